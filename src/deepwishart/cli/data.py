"""data: the nine UCI sets."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from deepwishart.cli.app import Json, app, console, errors_are_explained, print_json

__all__ = ["data_app"]

data_app = typer.Typer(help="The nine UCI sets with their fixed splits.", no_args_is_help=True)
app.add_typer(data_app, name="data")

DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the sets; DEEPWISHART_DATA, ../shared/uci or the user's cache by default."),
]


@data_app.command(name="list")
def list_sets(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the sets, and whether they are here."""
    from deepwishart.data.uci import UCI, find_folder

    root = find_folder(data_dir)
    here = {name: (root / info.folder / "data.txt").exists() for name, info in UCI.items()}
    if as_json:
        print_json({name: {**info._asdict(), "here": here[name]} for name, info in UCI.items()})
        return
    table = Table()
    for heading in ("name", "rows", "features", "splits", "here"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for name, info in UCI.items():
        table.add_row(name, str(info.rows), str(info.features), str(info.splits), "yes" if here[name] else "no")
    console.print(table)


@data_app.command()
def fetch(
    names: Annotated[list[str] | None, typer.Argument(help="Sets; all nine by default.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Fetch sets that are not here, and check all files against their SHA-256."""
    from deepwishart.data.uci import UCI
    from deepwishart.data.uci import fetch as fetch_set

    with errors_are_explained():
        for name in names or list(UCI):
            console.print(f"{name}: {fetch_set(name, data_dir, check=True)}", markup=False, soft_wrap=True)


@data_app.command()
def path(data_dir: DataDir = None) -> None:
    """Print the folder in which sets are looked for."""
    from deepwishart.data.uci import find_folder

    typer.echo(find_folder(data_dir))
