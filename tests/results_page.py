"""Write the tables of docs/results.md anew, each after the command that makes it: python -m tests.results_page."""

import re
import shlex
import tempfile
from pathlib import Path

from typer.testing import CliRunner

from deepwishart.cli import app

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "results.md"
# A command, and all tables and captions that follow it.
_BLOCK = re.compile(r"^    deepwishart (reproduce table --store docs/results/.*)\n(?:\n|\|.*\n|\*\*[^*]*\*\*\n)*", re.M)


def refreshed(page: str) -> str:
    """A page with the tables that its commands make."""
    return _BLOCK.sub(_with_tables, page)


def _with_tables(block: re.Match[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tables.md"
        command = block[1].replace("docs/results/", f"{PAGE.parent}/results/")
        result = CliRunner().invoke(app, [*shlex.split(command), "--out", str(file)])
        if result.exit_code:
            raise RuntimeError(f"deepwishart {block[1]} failed: {result.output}")
        text = file.read_text(encoding="utf-8")
    return f"    deepwishart {block[1]}\n\n{text[text.index('**') :]}\n"


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
