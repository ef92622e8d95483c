"""``python -m deepwishart`` is the command line."""

from deepwishart.cli import app

if __name__ == "__main__":
    app()
