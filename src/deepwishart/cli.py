"""The command line: parses, calls, prints."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from deepwishart import __version__

__all__ = ["app"]

app = typer.Typer(
    name="deepwishart",
    help="Deep Wishart processes: deep Gaussian processes without the rotations.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)


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
    """Deep Wishart processes: deep Gaussian processes without the rotations."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to write the picture: .png, .pdf or .svg.")] = Path(
        "probability_plot.png"
    ),
    samples: Annotated[int, typer.Option(min=100, help="Number of draws from each distribution.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the picture if it exists.")] = False,
) -> None:
    """Draw the paper's probability plot: A-GW reaches distributions that GW cannot."""
    if out.suffix.lower() not in {".png", ".pdf", ".svg"}:
        _fail(f"--out must end in .png, .pdf or .svg, got {out}.")
    if out.exists() and not force:
        _fail(f"{out} exists. Pass --force to overwrite it, or --out to write somewhere else.")
    if not out.resolve().parent.is_dir():
        _fail(f"The folder {out.parent} does not exist. Create it, or choose another --out.")

    from deepwishart.experiments.probability_plot import draw_probability_plot

    try:
        with console.status("Drawing samples and fitting Gammas …"), _unfinished(out) as picture:
            draw_probability_plot(picture, samples, seed)
    except OSError as error:
        _fail(f"Could not write {out}: {error}.")
    console.print(
        f"Wrote {out}: quantiles of a matrix element under GW and A-GW against the best Gamma.",
        markup=False,
        soft_wrap=True,
    )


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """A file beside ``path`` that takes its place when all went well, so that no half-written file is left."""
    with tempfile.TemporaryDirectory(dir=path.resolve().parent) as folder:
        unfinished = Path(folder) / path.name
        yield unfinished
        os.replace(unfinished, path)


def _fail(message: str) -> NoReturn:
    Console(stderr=True, highlight=False).print(f"Error: {message}", markup=False, soft_wrap=True)
    raise typer.Exit(code=2)
