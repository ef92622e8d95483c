"""How to train: one frozen record that a checkpoint can hold."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from deepwishart.checks import require_whole

__all__ = ["Schedule", "TrainingConfig"]

Schedule = Literal["paper", "cosine", "plateau", "constant"]

_WHOLE_NUMBERS = (
    "num_steps",
    "num_samples",
    "batch_size",
    "check_every",
    "plateau_patience",
    "early_stopping_patience",
)
FULL_BATCH_UP_TO = 2_048  # rows
_BATCH = 1_024


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Everything that decides a run beside model, data and seed.

    Attributes:
        num_steps: Steps of Adam, at most.
        num_samples: Posterior samples a step.
        batch_size: Rows a step, drawn without replacement; by default all of up to 2,048, else 1,024.
        deal_rows: Whether each row of a batch is seen by one posterior sample instead of all, so that more rows cost
            less: for large data, where it is rows and not samples that a gradient lacks. A batch that is not all of the
            data is then a multiple of ``num_samples``.
        learning_rate: To start from.
        schedule: ``"paper"``, a tenth of it from half of the steps on; ``"cosine"``, down to a hundredth along a
            cosine; ``"plateau"``, a tenth of it for a replica whose ELBO has stopped rising; or ``"constant"``.
        annealing_steps: The KL divergence is weighted by a factor that rises from 0 to 1 over so many steps; by default
            a fifth of the run, and at most 1,000.
        clip_norm: Largest norm of a replica's gradient (of the ELBO per datapoint); no limit by default.
        tolerance: A rise of the ELBO or of the held-out log-likelihood, in nats per datapoint, that counts as one.
        stop_when_settled: Under ``"plateau"``, end the run when the ELBO has stopped rising at a tenth of the learning
            rate; ``num_steps`` is then a maximum.
        check_every: Steps between two looks at the run: history, health, progress, callbacks, checkpoints.
        plateau_patience: Checks without a better ELBO after which ``"plateau"`` lowers the learning rate.
        early_stopping_patience: Checks without a better held-out log-likelihood after which a run ends.
        max_recoveries: Times a replica is restored to its last good state before it is retired.
        checkpoint_seconds: Time between two checkpoints.
        compile: Let torch compile the step: about a minute before the first step, and a fifth less time for each on a
            GPU. It pays for runs of many minutes there; on a CPU, with a C++ compiler, only where
            :mod:`deepwishart.products` has no library of its own. Before the first step, the gradient is compared with
            that of the step as written.
    """

    num_steps: int = 5_000
    num_samples: int = 10
    batch_size: int | None = None
    deal_rows: bool = False
    learning_rate: float = 1e-2
    schedule: Schedule = "cosine"
    annealing_steps: int | None = None
    clip_norm: float | None = None
    tolerance: float = 1e-4
    stop_when_settled: bool = False
    check_every: int = 50
    plateau_patience: int = 10
    early_stopping_patience: int = 10
    max_recoveries: int = 4
    checkpoint_seconds: float = 60.0
    compile: bool = False

    def __post_init__(self) -> None:
        least = dict.fromkeys(("max_recoveries", "annealing_steps"), 0)
        for name in (*_WHOLE_NUMBERS, *least):
            if getattr(self, name) is not None or name not in ("batch_size", "annealing_steps"):
                object.__setattr__(self, name, require_whole(name, getattr(self, name), least.get(name, 1)))
        for name in ("learning_rate", "clip_norm"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
                object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("checkpoint_seconds", "tolerance"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be zero or more, got {getattr(self, name)}.")
        if self.stop_when_settled and self.schedule != "plateau":
            raise ValueError(f"stop_when_settled needs the schedule 'plateau', got {self.schedule!r}.")
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"schedule must be one of {', '.join(get_args(Schedule))}, got {self.schedule!r}.")

    @classmethod
    def paper(cls, **changes: Any) -> "TrainingConfig":
        """What O2023 states: 20,000 steps at 1e-2 and then 1e-3, annealed over 1,000, with 10 samples."""
        return cls(**{"num_steps": 20_000, "schedule": "paper", **changes})

    def rows_per_step(self, num_data: int) -> int:
        """The size of a batch."""
        default = num_data if num_data <= FULL_BATCH_UP_TO else _BATCH
        rows = min(default if self.batch_size is None else self.batch_size, num_data)
        if not self.deal_rows:
            return rows
        if rows < self.num_samples:
            raise ValueError(f"deal_rows needs a row for each of {self.num_samples} samples, got {rows} rows a step.")
        return rows if rows == num_data else rows - rows % self.num_samples

    def learning_rate_factors(self) -> list[float]:
        """What the schedule makes of the learning rate at every step."""
        if self.schedule == "paper":
            return [1.0 if step < self.num_steps / 2 else 0.1 for step in range(self.num_steps)]
        if self.schedule == "cosine":
            turn = [math.cos(math.pi * step / self.num_steps) for step in range(self.num_steps)]
            return [0.01 + 0.99 * 0.5 * (1 + c) for c in turn]
        return [1.0] * self.num_steps

    def kl_weights(self) -> list[float]:
        """The weight of the KL divergence at every step."""
        rise = self.steps_of_annealing
        return [min(1.0, step / rise) if rise else 1.0 for step in range(self.num_steps)]

    @property
    def steps_of_annealing(self) -> int:
        """After so many steps the KL divergence has its full weight."""
        return min(1_000, self.num_steps // 5) if self.annealing_steps is None else self.annealing_steps

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)


def _require_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a positive number, got {value!r}.")
