"""reproduce: the paper's tables and figures."""

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from deepwishart.cli.app import (
    FAILED,
    INTERRUPTED,
    Force,
    Json,
    app,
    check_output,
    console,
    errors_are_explained,
    fail,
    print_json,
)
from deepwishart.data.tables import write_atomically

__all__ = ["reproduce_app"]

_WIDE = 1_000  # columns that no table needs

reproduce_app = typer.Typer(help="Reproduce the paper.", no_args_is_help=True)
app.add_typer(reproduce_app, name="reproduce")

StorePath = Annotated[Path, typer.Option(help="SQLite file of results; several processes may share one.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of the UCI sets; see deepwishart data.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or any other device of torch.")]

Datasets = Annotated[str, typer.Option(help="Sets, separated by commas, or all.")]
Depths = Annotated[str, typer.Option(help="Depths, such as 2,5 or 2-5.")]
Preset = Annotated[str, typer.Option(help="paper, or best: our own.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps of training instead of the preset's.")]
Inducing = Annotated[int | None, typer.Option(min=1, help="Inducing points instead of the preset's.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Any other choice of the preset, such as jitter=1e-6.")
]


@reproduce_app.callback()
def main() -> None:
    """Reproduce the paper."""


@reproduce_app.command()
def uci(
    dataset: Datasets = "all",
    depth: Depths = "2-5",
    method: Annotated[str, typer.Option(help="dgp, gw, a-gw, ab-gw, separated by commas, or all.")] = "all",
    splits: Annotated[str, typer.Option(help="Splits, such as 0-19 or 0,3.")] = "0-19",
    preset: Preset = "paper",
    steps: Steps = None,
    inducing: Inducing = None,
    change: Changes = None,
    store: StorePath = Path("results.sqlite"),
    data_dir: DataDir = None,
    device: Device = "auto",
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many; the same command goes on from there.")
    ] = None,
    compile_steps: Annotated[
        bool,
        typer.Option("--compile", help="Let torch compile steps, on a GPU: a minute a cell, a fifth off the rest."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    as_json: Json = False,
) -> None:
    """Train cells of the paper's tables and store what they reach.

    All splits of a cell train at once. Cells that are in the store are skipped, interrupted ones go on where they were,
    and several processes with one store never do a cell twice.
    """
    import torch

    from deepwishart.checks import find_device
    from deepwishart.data.uci import UCI
    from deepwishart.experiments.recipes import METHODS
    from deepwishart.experiments.runs import run_cells
    from deepwishart.experiments.store import METRICS, Store

    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    finished: list[dict[str, Any]] = []

    def report(cell: Any, rows: list[dict[str, Any]]) -> None:
        finished.extend(rows)
        if not as_json:
            means = "  ".join(f"{name} {sum(row[name] for row in rows) / len(rows):.3f}" for name in METRICS)
            name = f"{cell.dataset}, depth {cell.depth}, {cell.method}, {len(rows)} splits"
            console.print(f"{name:40} {means}", soft_wrap=True)

    with errors_are_explained():
        recipe = choose_recipe(preset, steps, inducing, change or [])
        names, methods = _datasets(dataset), _choices(method, METHODS)
        cells = [(name, d, m) for name in names for d in _numbers("--depth", depth) for m in methods]
        chosen = _numbers("--splits", splits)
        most = max(UCI[name].splits for name in names)
        if chosen[-1] >= most:
            raise ValueError(f"There are splits 0 to {most - 1}, got {splits}.")
        try:
            complete = run_cells(
                Store(store),
                cells,
                chosen,
                recipe,
                find_device(device),
                data_dir=data_dir,
                deadline=deadline,
                progress=False if quiet or as_json else None,
                compile_steps=compile_steps,
                report=report,
            )
        except KeyboardInterrupt:
            fail("Interrupted. What is finished is stored, and the same command goes on with the rest.", INTERRUPTED)
        except torch.OutOfMemoryError:
            fail(
                "The device has too little memory for these splits at once. What is finished is stored. Train fewer at "
                "a time, such as --splits 0-4 and then 5-9, or take fewer rows a step, --set batch_size=2048, which is "
                "another recipe.",
                FAILED,
            )
    if as_json:
        print_json({"store": str(store), "complete": complete, "rows": finished})
    elif not complete:
        console.print("Time is up. The same command goes on from here.")
    elif not finished:
        console.print(f"Nothing to do: {store} has these cells, or another process is at work on them.", soft_wrap=True)


@reproduce_app.command()
def table(
    store: StorePath = Path("results.sqlite"),
    dataset: Datasets = "all",
    depth: Depths = "2-5",
    preset: Preset = "paper",
    steps: Steps = None,
    inducing: Inducing = None,
    change: Changes = None,
    out: Annotated[Path | None, typer.Option(help="Write the tables too: .md, .html or .tex.")] = None,
    force: Force = False,
) -> None:
    """Print the paper's tables with ours beside them.

    An arrow marks figures that are worse by more than one standard error of the paper's; z counts standard errors of
    the difference, positive where ours is better. --store may be an export (CSV or Parquet), too.
    """
    from deepwishart.experiments import tables

    if out is not None:
        check_output(out, force, tuple(tables.FORMATS))
    with errors_are_explained():
        recipe = choose_recipe(preset, steps, inducing, change or [])
        results, cells = results_under(store, recipe), (_datasets(dataset), _numbers("--depth", depth))
        shown = tables.result_tables(results, *cells)
        shown += [tables.difference_table(results, *cells), tables.missed_table(results, *cells)]
        text = _head(preset, recipe, results)
        show_tables(shown, text, out)


@reproduce_app.command()
def runtime(
    dataset: Annotated[str, typer.Option(help="Sets, separated by commas.")] = "boston,protein",
    depth: Depths = "2,5",
    preset: Preset = "paper",
    inducing: Inducing = None,
    change: Changes = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the table too: .md, .html or .tex.")] = None,
    force: Force = False,
) -> None:
    """Measure the paper's table of run times on this machine: seconds an epoch of one split."""
    from deepwishart.checks import find_device
    from deepwishart.experiments import tables
    from deepwishart.experiments.paper import citation
    from deepwishart.experiments.runtime import runtime_table

    if out is not None:
        check_output(out, force, tuple(tables.FORMATS))
    with errors_are_explained():
        recipe = choose_recipe(preset, None, inducing, change or [])
        names, depths = tuple(_datasets(dataset)), tuple(_numbers("--depth", depth))
        with console.status("Training some steps of each …"):
            found = runtime_table(recipe, find_device(device), names, depths, data_dir)
        show_tables([found], [f"{_title(preset, recipe)}: {recipe.describe()}.", f"The paper's: {citation()}"], out)


@reproduce_app.command()
def export(
    store: StorePath = Path("results.sqlite"),
    out: Annotated[Path, typer.Option(help="Where to write all rows: .csv or .parquet.")] = Path("results.csv"),
    force: Force = False,
) -> None:
    """Write all results of a store to a CSV or Parquet file."""
    from deepwishart.data.tables import write_table
    from deepwishart.experiments.store import read_results

    check_output(out, force, (".csv", ".parquet"))
    with errors_are_explained():
        results = read_results(store)
        write_table(results, out)
    console.print(f"Wrote {len(results)} rows to {out}.", markup=False, soft_wrap=True)


@reproduce_app.command("import")
def import_results(
    files: Annotated[list[Path], typer.Argument(help="Stores or exports of other machines.", show_default=False)],
    store: StorePath = Path("results.sqlite"),
) -> None:
    """Add the results of other stores, or exports of them, to a store. What it has, it keeps."""
    from deepwishart.experiments.store import Store, read_results

    with errors_are_explained():
        found = [read_results(file) for file in files]
        added = sum(Store(store).add(results.to_dict("records")) for results in found)
    console.print(f"Added {added} of {sum(map(len, found))} rows to {store}.", markup=False, soft_wrap=True)


class Figure(StrEnum):
    """What is drawn."""

    PROBABILITY_PLOT = "probability-plot"
    DEPTH = "depth"


@reproduce_app.command()
def figure(
    kind: Annotated[
        Figure, typer.Argument(help="The paper's probability plot, or results by depth with the paper's points.")
    ] = Figure.PROBABILITY_PLOT,
    out: Annotated[Path | None, typer.Option(help="Where to write the picture: .png, .pdf or .svg.")] = None,
    samples: Annotated[
        int, typer.Option(min=100, help="Draws from each distribution of the probability plot.")
    ] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of those.")] = 1,
    store: StorePath = Path("results.sqlite"),
    preset: Preset = "paper",
    steps: Steps = None,
    inducing: Inducing = None,
    change: Changes = None,
    force: Force = False,
) -> None:
    """Draw the paper's figures."""
    out = out or Path(f"{kind.value.replace('-', '_')}.png")
    check_output(out, force, (".png", ".pdf", ".svg"))
    with errors_are_explained():
        if kind is Figure.PROBABILITY_PLOT:
            from deepwishart.experiments.probability_plot import draw_probability_plot

            with console.status("Drawing samples and fitting Gammas …"), write_atomically(out) as picture:
                draw_probability_plot(picture, samples, seed)
            what = "quantiles of a matrix element under GW and A-GW against the best Gamma"
        else:
            from deepwishart.experiments.depth_figure import draw_depth_figure

            results = results_under(store, choose_recipe(preset, steps, inducing, change or []))
            with write_atomically(out) as picture:
                draw_depth_figure(picture, results)
            what = "ELBO, log-likelihood and RMSE by depth, ours filled and the paper's open"
    console.print(f"Wrote {out}: {what}.", markup=False, soft_wrap=True)


def choose_recipe(preset: str, steps: int | None, inducing: int | None, changes: list[str]) -> Any:
    """A preset with what a user changed in it."""
    from deepwishart.experiments.recipes import PRESETS

    if preset not in PRESETS:
        raise ValueError(f"--preset must be one of {', '.join(PRESETS)}, got {preset!r}.")
    given = {"num_steps": steps, "num_inducing": inducing}
    return PRESETS[preset].changed([f"{name}={value}" for name, value in given.items() if value is not None] + changes)


def results_under(store: Path, recipe: Any) -> Any:
    """Results that were made by a recipe."""
    from deepwishart.experiments.store import read_results

    results = read_results(store)
    return results[results["config_hash"] == recipe.config_hash]


def show_tables(found: list[Any], head: list[str], out: Path | None) -> None:
    """On the terminal, and in a file whose ending says in which form."""
    from deepwishart.experiments.tables import FORMATS

    wide = Console(highlight=False, width=_WIDE)
    for paragraph in head:
        console.print(paragraph, markup=False, soft_wrap=True)
    for table in found:
        shown = Table(title=table.caption, box=box.SIMPLE, title_justify="left")
        for name in table.header:
            shown.add_column(name, justify="right", no_wrap=True)
        for row in table.rows:
            shown.add_row(*row)
        wide.print(shown)
    if out is not None:
        with write_atomically(out) as unfinished:
            unfinished.write_text(FORMATS[out.suffix.lower()](found, head), encoding="utf-8")


def _head(preset: str, recipe: Any, results: Any) -> list[str]:
    """What every table of results is headed by."""
    from deepwishart.experiments.paper import citation

    machines = ", ".join(sorted(set(results["machine"]))) or "no machine yet"
    return [
        f"{_title(preset, recipe)}: {recipe.describe()}. The same for all methods. Run on {machines}.",
        "Means ± standard errors over splits: ELBO per datapoint with standardised targets, test log-likelihood and "
        "RMSE in the units of the data. Δ is ours minus the paper's, z the same in standard errors of the two "
        "together, positive where ours is better; ↓ marks what is worse by more than one standard error of the "
        "paper's; – was not run.",
        f"The paper's: {citation()}",
    ]


def _title(preset: str, recipe: Any) -> str:
    """A preset, and what was changed in it."""
    from deepwishart.experiments.recipes import PRESETS

    changes = recipe.changes_from(PRESETS[preset])
    return f"Preset “{preset}”" + (f" with {', '.join(changes)}" if changes else "")


def _datasets(given: str) -> list[str]:
    from deepwishart.data.uci import UCI

    return _choices(given, tuple(UCI))


def _choices(given: str, known: tuple[str, ...]) -> list[str]:
    chosen = list(known) if given == "all" else [name.strip() for name in given.split(",")]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(f"There is no {', '.join(unknown)}. Choose from {', '.join(known)}, or all.")
    return chosen


def _numbers(option: str, given: str) -> list[int]:
    """Whole numbers and ranges of them."""
    numbers: list[int] = []
    for part in given.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise ValueError(f"{option} takes numbers and ranges such as 0-4,7, got {given!r}.")
        numbers.extend(range(int(first), int(last if dash else first) + 1))
    return sorted(set(numbers))
