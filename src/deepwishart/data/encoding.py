"""From a table with numbers and categories to a matrix of numbers, the same way at every prediction."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

__all__ = ["Column", "Missing", "TableEncoder", "TableError", "check_no_gaps", "has_categories"]

Missing = Literal["refuse", "impute"]

_LISTED = 5
_MAX_CATEGORIES = 1_000
_MAX_WIDTH = 10_000
# A column in which fewer of the distinct values are words is a column of numbers with mistakes.
_MOSTLY_NUMBERS = 0.5


class TableError(ValueError):
    """A table that cannot be used; the message says where the trouble is and what to do."""


@dataclass(frozen=True)
class Column:
    """One column of a table, as it was during the fit.

    Attributes:
        name: As in the table.
        categories: Its values where it is categorical, in order; ``None`` for numbers.
        fill: What takes the place of a missing value: the median, or the most frequent category.
    """

    name: str
    categories: tuple[str, ...] | None
    fill: float | str

    @property
    def width(self) -> int:
        """How many numbers it becomes."""
        return 1 if self.categories is None else len(self.categories)


class TableEncoder:
    """Numbers stay, categories become one-hot; missing values are refused, or imputed on request.

    Args:
        columns: See :meth:`fit`.
        missing: ``"refuse"`` or ``"impute"``.
    """

    def __init__(self, columns: Sequence[Column], missing: Missing = "refuse") -> None:
        self.columns = tuple(columns)
        self.missing = missing

    @classmethod
    def fit(cls, table: pd.DataFrame, missing: Missing = "refuse") -> "TableEncoder":
        """Learn the columns of a table."""
        if missing not in ("refuse", "impute"):
            raise ValueError(f"missing must be 'refuse' or 'impute', got {missing!r}.")
        encoder = cls([_learn(str(name), table[name]) for name in table.columns], missing)
        width = sum(column.width for column in encoder.columns)
        if width > _MAX_WIDTH:
            raise TableError(f"The table becomes {width} columns of numbers, more than {_MAX_WIDTH}. Leave some out.")
        return encoder

    @property
    def has_categories(self) -> bool:
        """Whether any column is categorical."""
        return any(column.categories is not None for column in self.columns)

    @property
    def feature_names(self) -> list[str]:
        """Of the matrix: a category is ``column=value``."""
        return [
            name
            for column in self.columns
            for name in (
                [column.name] if column.categories is None else [f"{column.name}={c}" for c in column.categories]
            )
        ]

    def transform(self, table: pd.DataFrame) -> np.ndarray:
        """The matrix, shape ``(rows, features)``."""
        self._check_columns([str(name) for name in table.columns])
        parts = [self._encode(column, table.iloc[:, i]) for i, column in enumerate(self.columns)]
        return np.concatenate(parts, 1) if parts else np.empty((len(table), 0))

    def _check_columns(self, names: list[str]) -> None:
        known = [column.name for column in self.columns]
        absent = [name for name in known if name not in names]
        extra = [name for name in names if name not in known]
        if absent or extra:
            said = [f"missing: {', '.join(absent)}"] * bool(absent) + [f"not known: {', '.join(extra)}"] * bool(extra)
            raise TableError(
                f"The columns differ from those of the fit ({'; '.join(said)}). Expected {', '.join(known)}."
            )
        if names != known:
            raise TableError(f"The columns are in another order than at the fit. Expected {', '.join(known)}.")

    def _encode(self, column: Column, values: "pd.Series[Any]") -> np.ndarray:
        gaps = values.isna().to_numpy()
        if gaps.any() and self.missing == "refuse":
            raise TableError(
                f"Column {column.name!r} has no value in {_rows(gaps)}. Remove or fill them, or ask for imputation "
                f"(missing='impute', on the command line --impute)."
            )
        if column.categories is None:
            numbers = _numbers(column.name, values)
            numbers[gaps] = column.fill
            return numbers[:, None]
        words = np.where(gaps, column.fill, values.astype(str).to_numpy(dtype=object))
        number = pd.Index(column.categories, dtype=object).get_indexer(words)
        unknown = number < 0
        if unknown.any():
            raise TableError(
                f"Column {column.name!r} has the value {words[unknown][0]!r} in {_rows(unknown)}, which the model has "
                f"never seen. It knows {_list(column.categories)}."
            )
        one_hot = np.zeros((len(words), column.width))
        one_hot[np.arange(len(words)), number] = 1
        return one_hot

    def to_record(self) -> dict[str, Any]:
        """For a model file."""
        return {"missing": self.missing, "columns": [asdict(column) for column in self.columns]}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "TableEncoder":
        """From :meth:`to_record`."""
        columns = []
        for item in record["columns"]:
            categories = item["categories"]
            columns.append(Column(str(item["name"]), None if categories is None else tuple(categories), item["fill"]))
        return cls(columns, record["missing"])


def check_no_gaps(table: pd.DataFrame) -> None:
    """Refuse a table with missing values, as targets must not have."""
    for name in table.columns:
        gaps = table[name].isna().to_numpy()
        if gaps.any():
            raise TableError(f"Column {name!r} has no value in {_rows(gaps)}, but it is the target. Remove these rows.")


def _learn(name: str, values: "pd.Series[Any]") -> Column:
    present = values.dropna()
    if present.empty:
        raise TableError(f"Column {name!r} has no values. Leave it out.")
    if not _is_categorical(values):
        numbers = _numbers(name, present)
        return Column(name, None, float(np.median(numbers)))
    words = present.astype(str)
    categories = tuple(sorted(words.unique()))
    if len(categories) > _MAX_CATEGORIES:
        raise TableError(
            f"Column {name!r} has {len(categories)} different values such as {categories[0]!r}, too many for "
            f"categories. If they are names or texts, leave the column out."
        )
    return Column(name, categories, str(words.mode().iloc[0]))


def has_categories(table: pd.DataFrame) -> bool:
    """Whether any column of a table holds words."""
    return any(_is_categorical(table.iloc[:, i]) for i in range(table.shape[1]))


def _is_categorical(values: "pd.Series[Any]") -> bool:
    """Whether a column holds words rather than numbers.

    Raises:
        TableError: If it holds dates, or numbers with some words among them, which is a mistake more often than not.
    """
    if isinstance(values.dtype, pd.CategoricalDtype):
        return True
    if pd.api.types.is_numeric_dtype(values):
        return False
    kind = pd.api.types.infer_dtype(values, skipna=True)
    if kind.startswith(("date", "time")):
        raise TableError(f"Column {values.name!r} holds dates. Turn them into numbers, such as days since a date.")
    present = values.dropna()
    distinct = pd.Series(present.unique())
    is_word = pd.to_numeric(distinct, errors="coerce").isna()
    if is_word.any() and is_word.mean() < _MOSTLY_NUMBERS:
        word = distinct[is_word].iloc[0]
        raise TableError(
            f"Column {values.name!r} holds numbers, but {word!r} in {_rows((values == word).to_numpy(dtype=bool))}. "
            f"Correct it, or leave it empty and ask for imputation; if the numbers are names of categories, make them "
            f"words, such as c1 for 1."
        )
    return bool(is_word.any())


def _numbers(name: str, values: "pd.Series[Any]") -> np.ndarray:
    numbers = pd.to_numeric(values, errors="coerce").to_numpy(dtype=float, na_value=np.nan, copy=True)
    text = np.isnan(numbers) & ~values.isna().to_numpy()
    if text.any():
        raise TableError(
            f"Column {name!r} should hold numbers, but has {values[text].iloc[0]!r} in {_rows(text)}. Correct it."
        )
    infinite = np.isinf(numbers)
    if infinite.any():
        raise TableError(f"Column {name!r} is infinite in {_rows(infinite)}. Correct or remove such rows.")
    return numbers


def _rows(mask: np.ndarray) -> str:
    """Rows, counted from 1 for the first below the header."""
    rows = (np.flatnonzero(mask) + 1).tolist()
    return f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} rows: {_list(rows)}"


def _list(values: Iterable[Any]) -> str:
    values = list(values)
    more = f", … ({len(values)} in all)" if len(values) > _LISTED else ""
    return ", ".join(str(value) for value in values[:_LISTED]) + more
