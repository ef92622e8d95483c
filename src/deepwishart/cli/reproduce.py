"""reproduce: the paper's figures."""

from pathlib import Path
from typing import Annotated

import typer

from deepwishart.cli.app import Force, app, check_output, console, errors_are_explained
from deepwishart.data.tables import write_atomically

__all__ = ["reproduce_app"]

reproduce_app = typer.Typer(help="Reproduce the paper.", no_args_is_help=True)
app.add_typer(reproduce_app, name="reproduce")


@reproduce_app.callback()
def main() -> None:
    """Reproduce the paper."""


@reproduce_app.command()
def figure(
    out: Annotated[Path, typer.Option(help="Where to write the picture: .png, .pdf or .svg.")] = Path(
        "probability_plot.png"
    ),
    samples: Annotated[int, typer.Option(min=100, help="Number of draws from each distribution.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 1,
    force: Force = False,
) -> None:
    """Draw the paper's probability plot: A-GW reaches distributions that GW cannot."""
    check_output(out, force, (".png", ".pdf", ".svg"))
    from deepwishart.experiments.probability_plot import draw_probability_plot

    waiting = console.status("Drawing samples and fitting Gammas …")
    with errors_are_explained(), waiting, write_atomically(out) as picture:
        draw_probability_plot(picture, samples, seed)
    console.print(
        f"Wrote {out}: quantiles of a matrix element under GW and A-GW against the best Gamma.",
        markup=False,
        soft_wrap=True,
    )
