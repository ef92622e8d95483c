"""The paper's tables, with ours beside them, as text in four forms."""

import html
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import pandas as pd

from deepwishart.data.uci import UCI
from deepwishart.experiments.paper import Estimate, published
from deepwishart.experiments.recipes import METHODS

__all__ = [
    "FORMATS",
    "NAMES",
    "PAIRS",
    "Comparison",
    "TextTable",
    "compare",
    "difference_table",
    "estimate",
    "format_html",
    "format_latex",
    "format_markdown",
    "missed_table",
    "paired_difference",
    "result_tables",
    "show_estimate",
]

NAMES = {"dgp": "DGP", "gw": "GW", "a-gw": "A-GW", "ab-gw": "AB-GW"}
COMPARED = {"elbo": "ELBO", "log_likelihood": "LL", "rmse": "RMSE"}
PAIRS = (("gw", "dgp"), ("a-gw", "gw"), ("ab-gw", "gw"), ("ab-gw", "a-gw"))
DEPTHS = (2, 3, 4, 5)
_ROUNDING = 0.005  # the paper's means have two decimals
_NO_ERROR = 1e-12  # relative to a mean: the rounding of values that are all equal


class TextTable(NamedTuple):
    """A table of words, for people."""

    caption: str
    header: list[str]
    rows: list[list[str]]


class Comparison(NamedTuple):
    """A cell of ours beside the paper's.

    Attributes:
        ours: ``None`` if it was not run.
        paper: ``None`` if the paper has no such cell.
    """

    dataset: str
    depth: int
    method: str
    metric: str
    ours: Estimate | None
    paper: Estimate | None

    @property
    def gain(self) -> float | None:
        """How much better ours is, in units of the metric."""
        if self.ours is None or self.paper is None:
            return None
        difference = self.ours.mean - self.paper.mean
        return -difference if self.metric == "rmse" else difference

    @property
    def z(self) -> float | None:
        """The gain in standard errors of the difference, as if the two were independent."""
        if self.gain is None or self.ours is None or self.paper is None:
            return None
        return _ratio(self.gain, math.hypot(self.ours.stderr, self.paper.stderr))

    @property
    def is_missed(self) -> bool:
        """Whether ours is worse by more than one standard error of the paper's, after rounding as it does."""
        return self.gain is not None and self.paper is not None and self.gain < -self.paper.stderr - _ROUNDING


def estimate(values: pd.Series) -> Estimate:
    """Mean and standard error over splits; none of a single one."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(float(values.mean()), error, len(values))


def compare(
    results: pd.DataFrame, datasets: Sequence[str] = tuple(UCI), depths: Sequence[int] = DEPTHS
) -> Iterator[Comparison]:
    """Cells and metrics of the paper's tables, from results under one recipe."""
    cells = dict(iter(results.groupby(["dataset", "depth", "method"])))
    for dataset in datasets:
        for depth in depths:
            for method in METHODS:
                group = cells.get((dataset, depth, method))
                for metric in COMPARED:
                    ours = None if group is None else estimate(group[metric])
                    yield Comparison(dataset, depth, method, metric, ours, published(dataset, depth, method, metric))


def result_tables(
    results: pd.DataFrame, datasets: Sequence[str] = tuple(UCI), depths: Sequence[int] = DEPTHS
) -> list[TextTable]:
    """A table for each set: depths and methods, ours and the paper's."""
    tables = []
    header = ["depth", "method", "splits"]
    for name in COMPARED.values():
        header += [name, "paper", "Δ (z)"]
    for dataset in datasets:
        found = list(compare(results, [dataset], depths))
        rows = []
        for k in range(0, len(found), len(COMPARED)):
            cell = found[k : k + len(COMPARED)]
            splits = str(cell[0].ours.splits) if cell[0].ours else "not run"
            row = [str(cell[0].depth), NAMES[cell[0].method], splits]
            for comparison in cell:
                row += [show_estimate(comparison.ours), show_estimate(comparison.paper), _show_difference(comparison)]
            rows.append(row)
        tables.append(TextTable(f"{dataset}", header, rows))
    return tables


def missed_table(
    results: pd.DataFrame, datasets: Sequence[str] = tuple(UCI), depths: Sequence[int] = DEPTHS
) -> TextTable:
    """The cells in which ours is worse by more than a standard error of the paper's."""
    run = [c for c in compare(results, datasets, depths) if c.gain is not None]
    missed = [c for c in run if c.is_missed]
    rows = [
        [
            c.dataset,
            str(c.depth),
            NAMES[c.method],
            COMPARED[c.metric],
            show_estimate(c.ours),
            show_estimate(c.paper),
            _show_difference(c),
        ]
        for c in missed
    ]
    header = ["set", "depth", "method", "metric", "ours", "paper", "Δ (z)"]
    reached = len(run) - len(missed)
    caption = (
        f"Of {len(run)} figures of cells that were run, {reached} {'is' if reached == 1 else 'are'} within one "
        f"standard error of the paper's or better; the others"
    )
    return TextTable(caption, header, rows or _none(header))


def paired_difference(results: pd.DataFrame, dataset: str, depth: int, pair: tuple[str, str]) -> Estimate | None:
    """The ELBO of a method minus that of another, over the splits that both have."""
    cell = results[(results["dataset"] == dataset) & (results["depth"] == depth)]
    first, second = (cell[cell["method"] == method].set_index("split")["elbo"] for method in pair)
    difference = (first - second).dropna()
    return estimate(difference) if len(difference) else None


def difference_table(
    results: pd.DataFrame, datasets: Sequence[str] = tuple(UCI), depths: Sequence[int] = DEPTHS
) -> TextTable:
    """ELBO differences between methods, paired over splits, beside those of the paper's means."""
    header = ["set", "depth"]
    for better, worse in PAIRS:
        header += [f"{NAMES[better]} − {NAMES[worse]}", "z", "paper"]
    rows = []
    for dataset in datasets:
        for depth in depths:
            ours = [paired_difference(results, dataset, depth, pair) for pair in PAIRS]
            if not any(ours):
                continue
            row = [dataset, str(depth)]
            for pair, found in zip(PAIRS, ours, strict=True):
                z = None if found is None else _ratio(found.mean, found.stderr)
                row += [show_estimate(found), _show_z(z), _show_published_difference(dataset, depth, pair)]
            rows.append(row)
    return TextTable(
        "ELBO per datapoint, differences between methods paired over splits", header, rows or _none(header)
    )


def _none(header: Sequence[str]) -> list[list[str]]:
    """The rows of a table that has nothing to show, and says so."""
    return [["none", *[""] * (len(header) - 1)]]


def _show_published_difference(dataset: str, depth: int, pair: tuple[str, str]) -> str:
    first, second = (published(dataset, depth, method, "elbo") for method in pair)
    if first is None or second is None:
        return "–"
    return show_estimate(Estimate(first.mean - second.mean, math.hypot(first.stderr, second.stderr), first.splits))


def _ratio(value: float, error: float) -> float:
    return value / error if error else math.copysign(math.inf, value) if value else 0.0


def show_estimate(found: Estimate | None, sign: Literal["-", "+"] = "-") -> str:
    """Mean ± standard error, with a plus before what is positive if the sign says so."""
    if found is None:
        return "–"
    digits = _decimals(found)
    mean = _minus(f"{found.mean:{sign}.{digits}f}")
    return mean if math.isnan(found.stderr) else f"{mean} ± {found.stderr:.{digits}f}"


def _decimals(found: Estimate) -> int:
    """The paper's two, or as many as it takes for the standard error not to be rounded to zero."""
    if not found.stderr > _NO_ERROR * abs(found.mean):
        return 2
    return max(2, math.ceil(-math.log10(2 * found.stderr)))


def _show_difference(comparison: Comparison) -> str:
    """Ours minus the paper's, in brackets how many standard errors better ours is."""
    if comparison.ours is None or comparison.paper is None:
        return "–"
    difference = _minus(f"{comparison.ours.mean - comparison.paper.mean:+.2f}")
    return f"{difference} ({_show_z(comparison.z)}){' ↓' if comparison.is_missed else ''}"


def _show_z(z: float | None) -> str:
    if z is None or math.isnan(z):
        return "–"
    return ("+∞" if z == math.inf else "-∞" if z == -math.inf else f"{z:+.1f}").replace("-", "−")


def _minus(text: str) -> str:
    """With a typographic minus, and without a sign before zero."""
    return text[1:] if text[0] in "+-" and not text.strip("+-0.") else text.replace("-", "−")


# Forms


def format_markdown(tables: Sequence[TextTable], head: Sequence[str]) -> str:
    """For a repository's pages."""
    parts = list(head)
    for table in tables:
        lines = [f"**{table.caption}**", ""]
        lines.append(f"| {' | '.join(table.header)} |")
        lines.append(f"|{'|'.join('---' for _ in table.header)}|")
        lines += [f"| {' | '.join(row)} |" for row in table.rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def format_html(tables: Sequence[TextTable], head: Sequence[str]) -> str:
    """One page that needs nothing else."""
    body = [f"<p>{html.escape(text)}</p>" for text in head]
    for table in tables:
        names = "".join(f"<th>{html.escape(name)}</th>" for name in table.header)
        rows = ("".join(f"<td>{html.escape(value)}</td>" for value in row) for row in table.rows)
        lines = "\n".join(f"<tr>{row}</tr>" for row in rows)
        caption = f"<h2>{html.escape(table.caption)}</h2>"
        body.append(f'{caption}\n<div class="wide"><table>\n<tr>{names}</tr>\n{lines}\n</table></div>')
    return _PAGE.replace("BODY", "\n".join(body))


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>The paper's tables, reproduced</title>
<style>
body { font: 14px/1.5 system-ui, sans-serif; color: #22313f; margin: 2rem auto; max-width: 84rem; padding: 0 1rem }
h2 { font-size: 1.1rem; margin-top: 2rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { padding: 0.2rem 0.5rem; text-align: right; border-bottom: 1px solid #e4e8ec }
</style>
</head>
<body>
BODY
</body>
</html>
"""

_LATEX = {
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "↓": r"$\downarrow$",
    "∞": r"$\infty$",
    "Δ": r"$\Delta$",
    "%": r"\%",
    "_": r"\_",
    "&": r"\&",
    "“": "``",
    "”": "''",
}


def format_latex(tables: Sequence[TextTable], head: Sequence[str]) -> str:
    """Tables for booktabs."""
    parts = [f"% {text}" for text in head]
    for table in tables:
        names = " & ".join(map(_tex, table.header))
        lines = [f"{' & '.join(map(_tex, row))} \\\\" for row in table.rows]
        parts += [
            r"\begin{table}",
            rf"\caption{{{_tex(table.caption)}}}",
            rf"\begin{{tabular}}{{{'r' * len(table.header)}}}",
            r"\toprule",
            rf"{names} \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    return "\n".join(parts) + "\n"


def _tex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


FORMATS = {".md": format_markdown, ".html": format_html, ".tex": format_latex}
