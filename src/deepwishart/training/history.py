"""What happened during a run: numbers at every step, and events."""

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Event", "History"]

_ARRAYS = ("elbo", "learning_rate", "held_out")


@dataclass(frozen=True)
class Event:
    """Something out of the ordinary.

    Attributes:
        step: When it was noticed.
        replica: Whom it happened to.
        kind: ``"skipped"``, ``"recovered"``, ``"retired"`` or ``"learning-rate"``.
        message: What happened and what was done.
    """

    step: int
    replica: int
    kind: str
    message: str


@dataclass
class History:
    """The course of a run.

    Attributes:
        elbo: Estimate of the ELBO per datapoint at every step, with the annealed KL divergence, shape ``(steps, R)``.
        learning_rate: Of every replica at every check, shape ``(checks, R)``.
        held_out: Log-likelihood per row of the held-out data at every check, shape ``(checks, R)``; empty without.
        check_steps: Steps at which the run was checked.
        events: In order.
        retired: Replicas that could not be saved; they keep their last good state.
        stopped: ``"running"``, and then why the run ended: ``"completed"``, ``"settled"``, ``"early-stopping"``,
            ``"callback"`` or ``"retired"``.
    """

    elbo: np.ndarray
    learning_rate: np.ndarray
    held_out: np.ndarray
    check_steps: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    retired: list[int] = field(default_factory=list)
    stopped: str = "running"

    @classmethod
    def of(cls, num_replicas: int) -> "History":
        """An empty one."""
        empty = np.empty((0, num_replicas))
        return cls(empty, empty, empty)

    @property
    def num_steps(self) -> int:
        """Steps taken."""
        return len(self.elbo)

    def add_check(self, step: int, elbo: Tensor, learning_rate: Tensor, held_out: Tensor | None) -> None:
        """Append what was found at a check."""
        self.check_steps.append(step)
        self.elbo = np.concatenate([self.elbo, elbo.numpy(force=True)])
        self.learning_rate = np.concatenate([self.learning_rate, learning_rate.numpy(force=True)[None]])
        if held_out is not None:
            self.held_out = np.concatenate([self.held_out, held_out.numpy(force=True)[None]])

    def add_event(self, step: int, replica: int, kind: str, message: str) -> None:
        """Append an event."""
        self.events.append(Event(step, replica, kind, message))

    def followed_by(self, later: "History") -> "History":
        """One history of two runs of the same replicas."""
        done = self.num_steps
        elbo, learning_rate, held_out = (np.concatenate([getattr(self, a), getattr(later, a)]) for a in _ARRAYS)
        return History(
            elbo,
            learning_rate,
            held_out,
            check_steps=[*self.check_steps, *(done + step for step in later.check_steps)],
            events=[*self.events, *(replace(event, step=done + event.step) for event in later.events)],
            retired=sorted({*self.retired, *later.retired}),
            stopped=later.stopped,
        )

    def recent_elbo(self, steps: int = 100) -> np.ndarray:
        """The mean ELBO per datapoint of the last steps, shape ``(R)``; steps that were not finite do not count."""
        with np.errstate(invalid="ignore"):
            recent = np.where(np.isfinite(self.elbo[-steps:]), self.elbo[-steps:], np.nan)
        finite = np.isfinite(recent)
        return np.where(finite.any(0), np.nansum(recent, 0) / np.maximum(1, finite.sum(0)), np.nan)

    def to_frame(self) -> "pd.DataFrame":
        """One row for each step and replica: ``step``, ``replica``, ``elbo``."""
        import pandas as pd

        steps, replicas = np.indices(self.elbo.shape)
        return pd.DataFrame(
            {"step": steps.ravel() + 1, "replica": replicas.ravel(), "elbo": self.elbo.ravel()},
        )

    # For checkpoints

    def tensors(self) -> dict[str, Tensor]:
        """The arrays, which are replaced as they grow and never changed, so that nothing is copied."""
        return {name: torch.from_numpy(getattr(self, name)) for name in _ARRAYS}

    def record(self) -> dict[str, Any]:
        """All the rest."""
        return {
            "check_steps": list(self.check_steps),
            "events": [asdict(event) for event in self.events],
            "retired": list(self.retired),
            "stopped": self.stopped,
        }

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], record: dict[str, Any]) -> "History":
        """From :meth:`tensors` and :meth:`record`."""
        elbo, learning_rate, held_out = (tensors[name].numpy() for name in _ARRAYS)
        events = [Event(**event) for event in record["events"]]
        return cls(elbo, learning_rate, held_out, **{**record, "events": events})
