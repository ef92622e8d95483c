"""The paper's numbers. [O2023, appendix]"""

import json
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

__all__ = ["Estimate", "citation", "published", "published_runtime"]


class Estimate(NamedTuple):
    """A mean over splits with its standard error, and the number of splits."""

    mean: float
    stderr: float
    splits: int


@cache
def _tables() -> dict[str, Any]:
    text = resources.files("deepwishart.experiments").joinpath("paper_tables.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def citation() -> str:
    """Where the numbers come from."""
    return str(_tables()["citation"])


def published(dataset: str, depth: int, method: str, metric: str) -> Estimate | None:
    """What the paper reports of a metric (``elbo``, ``log_likelihood`` or ``rmse``), if it does."""
    cell = _tables()["uci"].get(dataset, {}).get(str(depth), {}).get(method, {})
    if metric not in cell:
        return None
    mean, stderr = cell[metric]
    return Estimate(mean, stderr, splits=5 if dataset == "protein" else 20)


def published_runtime() -> dict[tuple[str, int, str], float]:
    """Seconds an epoch, by set, depth and method."""
    return {
        (dataset, int(depth), method): seconds
        for dataset, depths in _tables()["seconds_per_epoch"].items()
        for depth, methods in depths.items()
        for method, seconds in methods.items()
    }
