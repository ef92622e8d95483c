"""A progress bar for a terminal; nothing elsewhere."""

import sys
from types import TracebackType
from typing import Any

import numpy as np

from deepwishart.training.history import History

__all__ = ["Progress"]


class Progress:
    """Shows steps, ELBO per datapoint and its trend, speed and time left, with rich.

    Args:
        total: Steps of the run.
        show: Whether to show anything; by default only on a terminal.
    """

    def __init__(self, total: int, show: bool | None = None) -> None:
        self.total = total
        self._bar: Any = None
        if sys.stderr.isatty() if show is None else show:
            self._bar = _make_bar()

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("training", total=self.total, elbo="", speed="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, history: History, steps_per_second: float) -> None:
        """Show where a run stands."""
        if self._bar is None:
            return
        speed = f"{steps_per_second:.1f} steps/s"
        self._bar.update(self._task, completed=history.num_steps, elbo=describe_elbo(history), speed=speed)


def describe_elbo(history: History) -> str:
    """The recent ELBO per datapoint, mean over replicas, and its change over as many steps before."""
    window = max(1, min(100, history.num_steps // 2))
    recent = history.elbo[-window:]
    before = history.elbo[-2 * window : -window]
    recent, before = (part[np.isfinite(part)] for part in (recent, before))
    if not recent.size:
        return "ELBO not finite"
    trend = f" ({recent.mean() - before.mean():+.3f})" if before.size else ""
    return f"ELBO {recent.mean():.3f}{trend}"


def _make_bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
    except ImportError:
        return None
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[elbo]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
