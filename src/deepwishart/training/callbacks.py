"""What a user may hook into a run."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from deepwishart.models import DeepKernelProcess
from deepwishart.training.history import History

__all__ = ["Callback", "Check", "tensorboard"]


class Check(NamedTuple):
    """A run at one of its checks.

    Attributes:
        step: Steps taken.
        model: As it stands; look, but do not touch.
        history: So far.
    """

    step: int
    model: DeepKernelProcess
    history: History


Callback = Callable[[Check], bool | None]
"""Called at every check; the run ends when it returns True."""


def tensorboard(folder: str | Path) -> Callback:
    """A callback that writes ELBO, learning rate and held-out log-likelihood for TensorBoard.

    Needs ``pip install deepwishart[tensorboard]``.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("TensorBoard is not installed. Install deepwishart[tensorboard].") from error
    writer = SummaryWriter(str(folder))

    def write(check: Check) -> None:
        history = check.history
        series = {"elbo": history.recent_elbo(), "learning_rate": history.learning_rate[-1]}
        if len(history.held_out):
            series["held_out"] = history.held_out[-1]
        for name, values in series.items():
            for replica, value in enumerate(values):
                writer.add_scalar(f"{name}/replica-{replica}", value, check.step)
        writer.flush()

    return write
