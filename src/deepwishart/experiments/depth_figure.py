"""ELBO, log-likelihood and RMSE by depth, with the paper's points beside ours."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deepwishart.data.uci import UCI
from deepwishart.experiments.recipes import METHODS
from deepwishart.experiments.tables import COMPARED, DEPTHS, NAMES, Comparison, compare

__all__ = ["draw_depth_figure"]

_INK = "#22313f"
_COLOURS = {"dgp": "#8c96a0", "gw": "#5b8db8", "a-gw": "#c8553d", "ab-gw": "#d9a441"}
_SHIFTS = dict(zip(METHODS, (-0.18, -0.06, 0.06, 0.18), strict=True))


def draw_depth_figure(path: Path, results: pd.DataFrame) -> None:
    """A row of panels for each set that has results; the format follows the file's ending."""
    datasets = [name for name in UCI if name in set(results["dataset"])]
    if not datasets:
        raise ValueError("There are no results to draw under this preset. Run deepwishart reproduce uci first.")
    figure = Figure(figsize=(11, 1.2 + 2.6 * len(datasets)), layout="constrained")
    panels = figure.subplots(len(datasets), len(COMPARED), squeeze=False)
    for dataset, row in zip(datasets, panels, strict=True):
        found = list(compare(results, [dataset]))
        for metric, axes in zip(COMPARED, row, strict=True):
            _draw_panel(axes, [c for c in found if c.metric == metric])
        row[0].set_ylabel(dataset, color=_INK, fontsize=13, fontweight="bold")
    for axes, name in zip(panels[0], COMPARED.values(), strict=True):
        axes.set_title(name, color=_INK, fontsize=13)
    for axes in panels[-1]:
        axes.set_xlabel("depth", color=_INK)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS) + 1, frameon=False)
    figure.savefig(path, dpi=150)


def _draw_panel(axes: Axes, comparisons: list[Comparison]) -> None:
    for method in METHODS:
        mine = [c for c in comparisons if c.method == method]
        colour, shift = _COLOURS[method], _SHIFTS[method]
        paper = [(c.depth + shift, c.paper.mean, c.paper.stderr) for c in mine if c.paper]
        ours = [(c.depth + shift, c.ours.mean, np.nan_to_num(c.ours.stderr)) for c in mine if c.ours]
        label = "paper" if method == METHODS[0] else None
        for points, style in ((paper, {"mfc": "white", "label": label}), (ours, {"label": NAMES[method]})):
            if points:
                x, mean, error = zip(*points, strict=True)
                axes.errorbar(x, mean, error, fmt="o", ms=5, lw=1.2, capsize=0, color=colour, **style)
    axes.set_xticks(DEPTHS)
    axes.grid(axis="y", color="#e4e8ec", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
