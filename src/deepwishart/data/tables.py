"""Tables in files: CSV and Parquet, read with care and written at once or not at all."""

import csv
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from deepwishart.data.encoding import TableError

__all__ = ["FORMATS", "read_table", "write_atomically", "write_table"]

FORMATS = (".csv", ".tsv", ".parquet")
_SEPARATORS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar"}


def read_table(path: str | os.PathLike[str], separator: str | None = None) -> pd.DataFrame:
    """Read a CSV (UTF-8, with a header) or Parquet file. What stands in a CSV stays text: 01 and 1 are not the same.

    Args:
        path: Ending in .csv, .tsv or .parquet.
        separator: Of a CSV file; a comma by default, a tab for .tsv.

    Raises:
        TableError: With what is wrong and what to do.
    """
    path = Path(path)
    if path.is_dir():
        raise TableError(f"{path} is a folder. Give the path of a CSV or Parquet file in it.")
    if not path.exists():
        raise TableError(f"{path} does not exist. Check the path.")
    if path.suffix.lower() not in FORMATS:
        raise TableError(f"{path} must end in .csv, .tsv or .parquet.")
    table = _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path, separator)
    if not len(table):
        raise TableError(f"{path} has a header but no rows.")
    return table.set_axis([str(name) for name in table.columns], axis=1)


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except ImportError as error:
        raise TableError("Parquet needs pyarrow. Install deepwishart[parquet], or use CSV.") from error
    except Exception as error:
        # pyarrow has errors of many kinds for a damaged file.
        raise TableError(f"{path} cannot be read as Parquet: {error}") from error


def _read_csv(path: Path, separator: str | None) -> pd.DataFrame:
    separator = separator or ("\t" if path.suffix.lower() == ".tsv" else ",")
    separator = "\t" if separator == r"\t" else separator  # as a shell passes it on
    if len(separator) != 1:
        raise TableError(f"The separator must be one character, got {separator!r}.")
    try:
        header = _check_header(path, separator)
        # pandas would take a first column without a name for row labels where rows are longer than the header.
        table = pd.read_csv(
            path, sep=separator, index_col=False, header=0, names=header, skipinitialspace=True, dtype=str
        )
    except UnicodeDecodeError as error:
        raise TableError(
            f"{path} is not UTF-8 text (at byte {error.start}). Save it as UTF-8, for instance with "
            f"iconv -f latin1 -t utf-8."
        ) from error
    except pd.errors.EmptyDataError as error:
        raise TableError(f"{path} is empty. It needs a header with the names of the columns, and rows.") from error
    except (pd.errors.ParserError, csv.Error) as error:
        raise TableError(
            f"{path} cannot be read as CSV: {str(error).strip()}. Every row needs as many values as the header."
        ) from error
    return table


def _check_header(path: Path, separator: str) -> list[str]:
    """The names of the columns, after a look at whether rows have as many values."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=separator, skipinitialspace=True)
        header = next(rows, None)
        if not header:
            raise TableError(f"{path} is empty. It needs a header with the names of the columns, and rows.")
        if len(header) == 1:
            _check_separator(path, header[0], separator)
        repeated = sorted({name for name in header if header.count(name) > 1})
        if repeated:
            raise TableError(f"{path} has several columns named {', '.join(repeated)}. Rename all but one.")
        for row in rows:
            if row and len(row) != len(header):
                raise TableError(
                    f"{path} has {len(row)} values in line {rows.line_num}, but {len(header)} columns. Correct that "
                    f"line."
                )
    return header


def _check_separator(path: Path, header: str, separator: str) -> None:
    for other, name in _SEPARATORS.items():
        if other != separator and other in header:
            raise TableError(
                f"{path} seems to be separated by {name}. Pass --separator {other!r} (separator={other!r} in Python)."
            )


def write_table(table: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write a CSV or Parquet file, by its ending; the old file is replaced at once or not at all."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise TableError(f"{path} must end in .csv, .tsv or .parquet.")
    with write_atomically(path) as unfinished:
        if path.suffix.lower() == ".parquet":
            try:
                table.to_parquet(unfinished, index=False)
            except ImportError as error:
                raise TableError("Parquet needs pyarrow. Install deepwishart[parquet], or use CSV.") from error
        else:
            table.to_csv(unfinished, index=False, sep="\t" if path.suffix.lower() == ".tsv" else ",")


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """A file beside ``path`` that takes its place when all went well, so that no half-written file is left."""
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
