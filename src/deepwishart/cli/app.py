"""The application, and what its commands share: how they speak, fail and write."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from deepwishart import __version__

__all__ = [
    "Force",
    "Json",
    "Separator",
    "app",
    "check_output",
    "console",
    "errors_are_explained",
    "fail",
    "print_json",
    "show_metrics",
]

app = typer.Typer(
    name="deepwishart",
    help="Deep Wishart processes: deep Gaussian processes without the rotations.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130

Force = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines instead of text.")]
Separator = Annotated[str | None, typer.Option(help="Separator of CSV files; a comma by default, a tab for .tsv.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(f"deepwishart {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Deep Wishart processes: deep Gaussian processes without the rotations.

    Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.
    """


def fail(message: str, code: int = BAD_INPUT) -> NoReturn:
    """Say what is wrong on the error stream, and end."""
    Console(stderr=True, highlight=False).print(f"Error: {message}", markup=False, soft_wrap=True)
    raise typer.Exit(code=code)


@contextmanager
def errors_are_explained() -> Iterator[None]:
    """Turn what users can mend into a message; anything else is a defect of ours, and keeps its traceback."""
    from deepwishart.files import ModelFileError
    from deepwishart.training.checkpoint import CheckpointError
    from deepwishart.training.health import TrainingError
    from deepwishart.training.step import CompilationError

    try:
        yield
    except (ModelFileError, CheckpointError, ValueError) as error:  # TableError is a ValueError
        fail(str(error))
    except (CompilationError, TrainingError) as error:
        fail(str(error), FAILED)
    except OSError as error:
        fail(f"{error.strerror or error}: {error.filename or ''}")


def check_output(path: Path, force: bool, endings: tuple[str, ...]) -> None:
    """Refuse, before any work is done, a file that could not be written or should not be."""
    if path.suffix.lower() not in endings:
        fail(f"--out must end in {' or '.join(endings)}, got {path}.")
    if path.is_dir():
        fail(f"{path} is a folder. Give the path of a file.")
    if path.exists() and not force:
        fail(f"{path} exists. Pass --force to overwrite it, or --out to write somewhere else.")
    if not path.resolve().parent.is_dir():
        fail(f"The folder {path.parent} does not exist. Create it, or choose another --out.")


def print_json(record: dict[str, Any]) -> None:
    """One line on standard output."""
    typer.echo(json.dumps(record, allow_nan=False, default=str))


def show_metrics(evaluations: list[Any]) -> None:
    """A table with a row for each model."""
    table = Table(box=box.SIMPLE)
    table.add_column("model")
    for name in evaluations[0].metrics:
        table.add_column(name, justify="right", min_width=max(map(len, name.split())))
    for evaluation in evaluations:
        table.add_row(evaluation.name, *(f"{value:#.4g}" for value in evaluation.metrics.values()))
    console.print(table)
