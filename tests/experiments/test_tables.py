"""Tables of results beside the paper's."""

import math
from typing import Any

import pandas as pd
import pytest

from deepwishart.data.uci import UCI
from deepwishart.experiments.paper import Estimate, citation, published, published_runtime
from deepwishart.experiments.recipes import METHODS
from deepwishart.experiments.tables import (
    Comparison,
    TextTable,
    compare,
    difference_table,
    format_html,
    format_latex,
    format_markdown,
    missed_table,
    paired_difference,
    result_tables,
)


def results(**elbos: list[float]) -> pd.DataFrame:
    rows: list[dict[str, Any]] = [
        {"dataset": "yacht", "depth": 2, "method": method.replace("_", "-"), "split": split, "elbo": elbo}
        for method, values in elbos.items()
        for split, elbo in enumerate(values)
    ]
    return pd.DataFrame(rows).assign(log_likelihood=-0.05, rmse=0.30)


def test_the_papers_numbers_are_all_there() -> None:
    """A few cells, read off the paper's appendix by eye, and the number of all."""
    assert published("yacht", 2, "a-gw", "elbo") == Estimate(2.07, 0.01, 20)
    assert published("yacht", 3, "ab-gw", "log_likelihood") == Estimate(0.14, 0.06, 20)
    assert published("boston", 5, "gw", "rmse") == Estimate(2.82, 0.17, 20)
    assert published("protein", 5, "ab-gw", "rmse") == Estimate(3.70, 0.01, 5)
    assert published("yacht", 7, "gw", "elbo") is None
    assert published("yacht", 2, "gw", "crps") is None
    metrics = ("elbo", "log_likelihood", "rmse")
    cells = [published(d, depth, m, k) for d in UCI for depth in (2, 3, 4, 5) for m in METHODS for k in metrics]
    assert len(cells) == 432
    assert None not in cells
    assert published_runtime()["boston", 5, "a-gw"] == 0.373
    assert "Wishart" in citation()


def test_a_comparison_knows_which_direction_is_better() -> None:
    ours, paper = Estimate(1.0, 0.03, 20), Estimate(0.9, 0.04, 20)
    elbo = Comparison("yacht", 2, "gw", "elbo", ours, paper)
    assert elbo.gain == pytest.approx(0.1)
    assert elbo.z == pytest.approx(2.0)
    assert not elbo.is_missed
    rmse = elbo._replace(metric="rmse")
    assert rmse.z == pytest.approx(-2.0)
    assert rmse.is_missed
    assert not rmse._replace(ours=Estimate(0.94, 0.03, 20)).is_missed  # one standard error
    assert rmse._replace(ours=Estimate(0.946, 0.03, 20)).is_missed  # and rounding
    assert elbo._replace(ours=None).z is None
    assert not elbo._replace(ours=None).is_missed
    assert elbo._replace(ours=Estimate(1.0, 0.0, 20), paper=Estimate(0.9, 0.0, 20)).z == math.inf


def test_tables_show_means_errors_and_what_was_not_run() -> None:
    frame = results(a_gw=[2.05, 2.07, 2.09])
    assert [c.metric for c in compare(frame, ["yacht"]) if c.ours] == ["elbo", "log_likelihood", "rmse"]
    (table,) = result_tables(frame, ["yacht"])
    rows = {(row[0], row[1]): row for row in table.rows}
    assert len(rows) == 16
    assert rows["2", "A-GW"][2:6] == ["3", "2.07 ± 0.01", "2.07 ± 0.01", "0.00 (+0.0)"]
    assert rows["2", "A-GW"][9:12] == ["0.30 ± 0.00", "0.33 ± 0.03", "−0.03 (+1.0)"]
    assert rows["5", "GW"][2:6] == ["not run", "–", "1.59 ± 0.02", "–"]


def test_figures_that_are_worse_are_marked_and_listed() -> None:
    frame = results(a_gw=[1.95, 1.97, 1.99])
    (table,) = result_tables(frame, ["yacht"])
    assert next(row for row in table.rows if row[:2] == ["2", "A-GW"])[5].endswith("↓")
    missed = missed_table(frame, ["yacht"])
    assert missed.rows == [["yacht", "2", "A-GW", "ELBO", "1.97 ± 0.01", "2.07 ± 0.01", "−0.10 (−6.5) ↓"]]
    assert "Of 3 figures" in missed.caption
    assert "2 are within" in missed.caption
    frame["log_likelihood"] -= 1
    assert "1 is within" in missed_table(frame, ["yacht"]).caption
    assert missed_table(results(a_gw=[2.05, 2.07, 2.09]), ["yacht"]).rows == [["none", *[""] * 6]]


def test_differences_are_paired_over_splits() -> None:
    frame = results(gw=[1.0, 2.0, 3.0], a_gw=[1.1, 2.2, 3.3, 9.0])
    found = paired_difference(frame, "yacht", 2, ("a-gw", "gw"))
    assert found is not None
    assert found.mean == pytest.approx(0.2)
    assert found.stderr == pytest.approx(0.1 / math.sqrt(3))
    assert found.splits == 3
    assert paired_difference(frame, "yacht", 2, ("gw", "dgp")) is None
    table = difference_table(frame, ["yacht", "boston"])
    (row,) = table.rows
    assert row[table.header.index("A-GW − GW") :][:3] == ["0.20 ± 0.06", "+3.5", "0.05 ± 0.01"]
    assert row[table.header.index("GW − DGP") :][:3] == ["–", "–", "0.14 ± 0.03"]
    assert difference_table(results(a_gw=[1.0]), ["yacht"]).rows == [["none", *[""] * 13]]


@pytest.mark.parametrize(
    ("mean", "stderr", "shown"),
    [
        (2.0714, 0.0051, "2.07 ± 0.01"),
        (2.0714, 0.0049, "2.071 ± 0.005"),
        (0.03451, 0.00131, "0.035 ± 0.001"),
        (-0.00004, 0.00037, "0.0000 ± 0.0004"),
        (0.0000454, 0.0000012, "0.000045 ± 0.000001"),
        (3.8716, 0.0395, "3.87 ± 0.04"),
        (0.3, 1e-17, "0.30 ± 0.00"),
        (-1.06, 0.0, "−1.06 ± 0.00"),
    ],
)
def test_errors_are_not_rounded_to_zero(mean: float, stderr: float, shown: str) -> None:
    """Three values have this mean and this standard error; only where they are all equal is it shown as zero."""
    spread = stderr * math.sqrt(3)
    (table,) = result_tables(results(gw=[mean - spread, mean, mean + spread]), ["yacht"])
    assert next(row for row in table.rows if row[:2] == ["2", "GW"])[3] == shown


def test_a_single_split_has_no_error() -> None:
    (table,) = result_tables(results(gw=[1.0]), ["yacht"])
    row = next(row for row in table.rows if row[:2] == ["2", "GW"])
    assert row[2:4] == ["1", "1.00"]


def test_forms() -> None:
    table = TextTable("a_b & c", ["x", "y"], [["1.0 ± 0.1", "−2 ↓"], ["<b>", "–"]])
    markdown = format_markdown([table], ["head"])
    assert markdown.startswith("head\n\n**a_b & c**\n\n| x | y |\n|---|---|\n| 1.0 ± 0.1 | −2 ↓ |")
    page = format_html([table], ["head"])
    assert "<td>&lt;b&gt;</td>" in page
    assert "a_b &amp; c" in page
    latex = format_latex([table], ["head"])
    assert r"\caption{a\_b \& c}" in latex
    assert r"1.0 $\pm$ 0.1 & $-$2 $\downarrow$ \\" in latex
    assert latex.isascii()
