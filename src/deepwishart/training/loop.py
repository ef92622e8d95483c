"""The training loop: steps, and between them checks."""

import os
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepwishart.models import DeepKernelProcess, check_data
from deepwishart.objectives import predictive_log_likelihood
from deepwishart.training.callbacks import Callback, Check
from deepwishart.training.checkpoint import CheckpointError, fingerprint, read_checkpoint, write_checkpoint
from deepwishart.training.config import TrainingConfig
from deepwishart.training.health import Health, TrainingError
from deepwishart.training.history import History
from deepwishart.training.memory import memory_is_kept
from deepwishart.training.parameters import FlatParameters, flattened
from deepwishart.training.progress import Progress
from deepwishart.training.step import TrainingStep

__all__ = ["train"]

_LEAST_RATE_SCALE = 1e-3
_HELD_OUT_SAMPLES = 50


def train(
    model: DeepKernelProcess,
    X: Tensor,
    Y: Tensor,
    config: TrainingConfig | None = None,
    *,
    seed: int = 0,
    held_out: tuple[Tensor, Tensor] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
) -> History:
    """Maximise the ELBO of a model with Adam, all of its replicas at once.

    Args:
        model: Changed in place; on the device and in the dtype of the data.
        X: Standardised inputs, shape ``(*batch, N, D)``.
        Y: Targets, shape ``(*batch, N, outputs)`` or ``(*batch, N)``.
        config: How to train.
        seed: Of batches and noise. One seed gives the same run on the same machine.
        held_out: Inputs and targets whose predictive log-likelihood ends the run when it has stopped rising; every
            replica then has the parameters that were best by it.
        checkpoint: A file to write the state of the run to, from time to time and at the end.
        resume: Go on from that file if it is there; on a CPU the result is that of a run without a break, bit for bit.
        progress: Whether to show a progress bar; by default on a terminal.
        callbacks: Called at every check.

    Returns:
        The history of the run. A replica that could not be saved is in ``retired``, with a warning.

    Raises:
        TrainingError: If no replica could be saved; the model keeps the last good state.
        CheckpointError: If the checkpoint is there and ``resume`` is not set, or it belongs to another run.
    """
    Y = Y[..., None] if Y.ndim == X.ndim - 1 else Y
    for x, y in ((X, Y), *([held_out] if held_out else [])):
        check_data(x, y[..., None] if y.ndim == x.ndim - 1 else y)
    model.likelihood.check_targets(Y)
    with flattened(model, model.batch_shape) as flat:
        return Trainer(model, flat, X, Y, config or TrainingConfig(), seed, held_out).run(
            None if checkpoint is None else Path(checkpoint), resume, progress, callbacks
        )


class Trainer:
    """A run: its step, its health, its history, and what it needs to go on later.

    Args:
        model: To be trained.
        flat: Its parameters.
        X: Inputs, not checked.
        Y: Targets, not checked, with a dimension for outputs.
        config: How to train.
        seed: Of batches and noise.
        held_out: Inputs and targets for early stopping.
    """

    def __init__(
        self,
        model: DeepKernelProcess,
        flat: FlatParameters,
        X: Tensor,
        Y: Tensor,
        config: TrainingConfig,
        seed: int = 0,
        held_out: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.model, self.flat, self.config, self.seed, self.held_out = model, flat, config, seed, held_out
        self.generator = torch.Generator(X.device).manual_seed(seed)
        self.step = TrainingStep(model, flat, X, Y, config, self.generator)
        self.health = Health(self.step, config.max_recoveries)
        self.history = History.of(flat.num_replicas)
        self.num_steps = 0
        self.plateau = _Best(flat.values)
        self.early = _Best(flat.values)
        self.best_values = flat.values.clone() if held_out is not None else None

    def run(
        self,
        checkpoint: Path | None = None,
        resume: bool = False,
        progress: bool | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> History:
        """Train to the end."""
        if checkpoint is not None and checkpoint.exists():
            if not resume:
                raise CheckpointError(f"{checkpoint} exists. Pass resume=True to go on with it, or move it away.")
            self._restore(*read_checkpoint(checkpoint))
        self._last_state = self._state()
        on_cpu = self.flat.values.device.type == "cpu"
        try:
            with memory_is_kept() if on_cpu else nullcontext(), Progress(self.config.num_steps, progress) as bar:
                self._go_on(checkpoint, bar, callbacks)
        except TrainingError:
            raise  # at a check, where every replica has its last good state
        except BaseException:
            # Whatever broke in the middle of a step, the last check left a whole state.
            self._restore(*self._last_state)
            if checkpoint is not None:
                write_checkpoint(checkpoint, *self._last_state)
            raise
        if self.best_values is not None:
            self.flat.values.copy_(self.best_values)
        if self.history.retired:
            warnings.warn(self._describe_retired(), stacklevel=3)
        return self.history

    def _go_on(self, checkpoint: Path | None, bar: Progress, callbacks: Sequence[Callback]) -> None:
        begun, steps_before, written = time.monotonic(), self.num_steps, time.monotonic()
        while not self._has_ended:
            chunk = self.config.check_every - self.num_steps % self.config.check_every
            chunk = min(chunk, self.config.num_steps - self.num_steps)
            for _ in range(chunk):
                self.step()
            self._check(chunk, callbacks)
            bar.update(self.history, (self.num_steps - steps_before) / max(1e-9, time.monotonic() - begun))
            self._last_state = self._state()
            is_due = self._has_ended or time.monotonic() - written >= self.config.checkpoint_seconds
            if checkpoint is not None and is_due:
                write_checkpoint(checkpoint, *self._last_state)
                written = time.monotonic()

    @property
    def _has_ended(self) -> bool:
        return self.num_steps >= self.config.num_steps or self.history.stopped != "completed"

    def _check(self, chunk: int, callbacks: Sequence[Callback]) -> None:
        """Look at the run, and take note if it should end."""
        first = self.num_steps % self.config.check_every
        self.num_steps += chunk
        trace = self.step.trace[first : first + chunk].clone()
        rates = self.step.learning_rates(self.num_steps - 1)
        self.health.check(self.num_steps, self.history)
        score = self._held_out_score()
        self.history.add_check(self.num_steps, trace, rates, score)
        if self.num_steps > self.config.annealing_steps:
            if self.config.schedule == "plateau":
                self._lower_rates(trace.nanmean(0))
            if score is not None and self._has_stopped_improving(score):
                self.history.stopped = "early-stopping"
        for callback in callbacks:
            if callback(Check(self.num_steps, self.model, self.history)):
                self.history.stopped = "callback"

    def _lower_rates(self, elbo: Tensor) -> None:
        stale = self.plateau.update(elbo, self.config.plateau_patience)
        lower = stale & (self.step.rate_scale > _LEAST_RATE_SCALE)
        for r in lower.nonzero().flatten().tolist():
            self.step.rate_scale[r] *= 0.1
            self.plateau.stale[r] = 0
            self.history.add_event(
                self.num_steps, r, "learning-rate", "The ELBO has stopped rising: a tenth from here."
            )

    def _held_out_score(self) -> Tensor | None:
        if self.held_out is None:
            return None
        X, Y = self.held_out
        generator = torch.Generator(X.device).manual_seed(self.seed)
        return predictive_log_likelihood(self.model, X, Y, _HELD_OUT_SAMPLES, generator).mean(-1).reshape(-1)

    def _has_stopped_improving(self, score: Tensor) -> bool:
        stale = self.early.update(score, self.config.early_stopping_patience)
        assert self.best_values is not None
        improved = self.early.stale == 0
        self.best_values[improved] = self.flat.values[improved]
        return bool((stale | ~self.step.active).all())

    def _describe_retired(self) -> str:
        events = {event.replica: event for event in self.history.events if event.kind == "retired"}
        listed = " ".join(f"Replica {r} at step {events[r].step}: {events[r].message}" for r in self.history.retired)
        return f"{len(events)} of {self.flat.num_replicas} replicas were retired. {listed}"

    # Checkpoints

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that a run is made of, copied."""
        tensors = {name: tensor.clone() for name, tensor in self._tensors().items()}
        tensors["generator"] = self.generator.get_state()
        tensors.update({f"history.{name}": tensor for name, tensor in self.history.tensors().items()})
        return tensors, {**self._identity(), "num_steps": self.num_steps, "history": self.history.record()} | {
            "recoveries": list(self.health.recoveries)
        }

    def _restore(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        expected = self._identity()
        for name, what in (
            ("config", "another configuration"),
            ("parameters", "another model"),
            ("data", "other data"),
        ):
            if record[name] != expected[name]:
                raise CheckpointError(
                    f"The checkpoint was written with {what}. Use the same as before, or start with another file."
                )
        own = self._tensors()
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self.generator.set_state(tensors["generator"])
        arrays = {name.removeprefix("history."): t for name, t in tensors.items() if name.startswith("history.")}
        self.history = History.restore(arrays, record["history"])
        self.num_steps = record["num_steps"]
        self.health.recoveries = list(record["recoveries"])

    def _identity(self) -> dict[str, Any]:
        """What makes a run this run."""
        if not hasattr(self, "_digest"):
            self._digest = fingerprint(self.step.X, self.step.Y, *(self.held_out or ()))
        parameters = {name: list(shape) for name, shape in self.flat.shapes.items()}
        return {"config": self.config.to_dict(), "parameters": parameters, "data": f"{self.seed} {self._digest}"}

    def _tensors(self) -> dict[str, Tensor]:
        """Every tensor that a step or a check changes."""
        step, adam = self.step, self.step.optimiser
        tensors = {
            "values": self.flat.values,
            "adam.mean": adam.mean,
            "adam.square": adam.square,
            "adam.count": adam.count,
            "counter": step.counter,
            "active": step.active,
            "failures": step.failures,
            "rate_scale": step.rate_scale,
            "plateau.best": self.plateau.best,
            "plateau.stale": self.plateau.stale,
            "early.best": self.early.best,
            "early.stale": self.early.stale,
        }
        tensors.update({f"good.{name}": tensor for name, tensor in self.health.good.items()})
        tensors.update({name: b for name, b in self.model.named_buffers() if name.endswith("jitter")})
        if self.best_values is not None:
            tensors["early.values"] = self.best_values
        return tensors


class _Best:
    """The best of a score so far, for each replica, and for how many checks there was no better one."""

    def __init__(self, like: Tensor) -> None:
        self.best = like.new_full(like.shape[:1], -torch.inf)
        self.stale = torch.zeros_like(self.best, dtype=torch.int64)

    def update(self, score: Tensor, patience: int) -> Tensor:
        """Take note of a score; return who has been without a better one for too long."""
        better = score > self.best + 1e-4
        self.stale.copy_(torch.where(better, 0, self.stale + 1))
        self.best.copy_(torch.where(better, score, self.best))
        return self.stale >= patience
