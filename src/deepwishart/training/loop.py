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

from deepwishart.checks import check_data
from deepwishart.models import DeepKernelProcess
from deepwishart.objectives import check_inputs, check_targets, predictive_log_likelihood
from deepwishart.training.callbacks import Callback, Check
from deepwishart.training.checkpoint import (
    CheckpointError,
    fingerprint,
    prepare_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from deepwishart.training.config import TrainingConfig
from deepwishart.training.health import Health, TrainingError
from deepwishart.training.history import History
from deepwishart.training.memory import memory_is_kept
from deepwishart.training.parameters import FlatParameters, flattened
from deepwishart.training.progress import Progress
from deepwishart.training.step import TrainingStep

__all__ = ["train"]

_LEAST_RATE_SCALE = 1e-3
_SETTLED_RATE_SCALE = 0.1
_HELD_OUT_SAMPLES = 50


def train(
    model: DeepKernelProcess,
    X: Tensor,
    Y: Tensor,
    config: TrainingConfig | None = None,
    *,
    seed: int = 0,
    weights: Tensor | None = None,
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
        weights: How often each row counts, shape ``(*batch, N)``; once by default.
        held_out: Inputs and targets whose predictive log-likelihood ends the run when it has stopped rising; every
            replica then has the parameters that were best by it since the KL divergence has its full weight.
        checkpoint: A file to write the state of the run to, from time to time and at the end.
        resume: Go on from that file if it is there; on a CPU the result is that of a run without a break, bit for bit.
        progress: Whether to show a progress bar; by default on a terminal.
        callbacks: Called at every check.

    Returns:
        The history of the run. A replica that could not be saved is in ``retired``, with a warning.

    Raises:
        CompilationError: If torch cannot compile the step, and was to.
        TrainingError: If no replica could be saved; the model keeps the last good state.
        CheckpointError: If the checkpoint is there and ``resume`` is not set, or it belongs to another run.
    """
    Y = _validated(model, X, Y)
    if weights is not None:
        _check_weights(weights, X)
    if held_out is not None:
        held_out = (held_out[0], _validated(model, *held_out))
    with flattened(model, model.batch_shape) as flat:
        return Trainer(model, flat, X, Y, config or TrainingConfig(), seed, held_out, weights).run(
            None if checkpoint is None else Path(checkpoint), resume, progress, callbacks
        )


def _validated(model: DeepKernelProcess, X: Tensor, Y: Tensor) -> Tensor:
    """Targets with a dimension for outputs, after a look at whether they and the inputs suit the model."""
    check_inputs(model, X, 1)
    Y = check_targets(model, X, Y)
    check_data(X, Y)
    Z = model.inducing_inputs
    if (X.dtype, X.device) != (Z.dtype, Z.device):
        raise ValueError(
            f"The data must have the model's dtype and device, {Z.dtype} on {Z.device}, got {X.dtype} on {X.device}. "
            f"Move them with .to(…)."
        )
    model.likelihood.check_targets(Y)
    return Y


def _check_weights(weights: Tensor, X: Tensor) -> None:
    if weights.shape != X.shape[:-1]:
        raise ValueError(f"weights must have shape {tuple(X.shape[:-1])}, got {tuple(weights.shape)}.")
    if not (weights.isfinite().all() and (weights >= 0).all() and (weights.sum(-1) > 0).all()):
        raise ValueError("weights must be finite numbers of at least zero, and not all zero.")


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
        weights: How often each row counts.
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
        weights: Tensor | None = None,
    ) -> None:
        self.model, self.flat, self.config, self.seed, self.held_out = model, flat, config, seed, held_out
        self.generator = torch.Generator(X.device).manual_seed(seed)
        self.step = TrainingStep(model, flat, X, Y, config, self.generator, weights)
        self.health = Health(self.step, config.max_recoveries)
        self.history = History.of(flat.num_replicas)
        self.num_steps = 0
        self._digests: dict[str, Any] | None = None
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
        if checkpoint is not None:
            self._open(checkpoint, resume)
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
            self._write(checkpoint)
            raise
        if self.history.stopped == "running":
            self.history.stopped = "completed"
        if self.best_values is not None:
            scored = self.early.best.isfinite()  # a run that ends while the KL is annealed has no scores that count
            self.flat.values[scored] = self.best_values[scored]
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
            if self._has_ended or time.monotonic() - written >= self.config.checkpoint_seconds:
                self._write(checkpoint)
                written = time.monotonic()

    @property
    def _has_ended(self) -> bool:
        return self.num_steps >= self.config.num_steps or self.history.stopped != "running"

    def _open(self, checkpoint: Path, resume: bool) -> None:
        """Go on from a checkpoint, or write a first one, which shows that it can be."""
        prepare_checkpoint(checkpoint)
        if not checkpoint.exists():
            write_checkpoint(checkpoint, *self._state())
        elif resume:
            self._restore(*read_checkpoint(checkpoint))
            if self.history.stopped == "callback":
                self.history.stopped = "running"
        else:
            raise CheckpointError(f"{checkpoint} exists. Pass resume=True to go on with it, or move it away.")

    def _write(self, checkpoint: Path | None) -> None:
        """Write the state of the last check. A full disk is no reason to end a run: it is tried again later."""
        if checkpoint is None:
            return
        try:
            write_checkpoint(checkpoint, *self._last_state)
        except OSError as error:
            warnings.warn(
                f"The checkpoint {checkpoint} could not be written ({error}); the old one stays.", stacklevel=2
            )

    def _check(self, chunk: int, callbacks: Sequence[Callback]) -> None:
        """Look at the run, and take note if it should end."""
        first = self.num_steps % self.config.check_every
        self.num_steps += chunk
        trace = self.step.trace[first : first + chunk].clone()
        rates = self.step.learning_rates(self.num_steps - 1)
        try:
            self.health.check(self.num_steps, chunk, self.history)
        except TrainingError:
            self.history.add_check(self.num_steps, trace, rates, None)
            self.history.stopped = "retired"
            raise
        score = self._held_out_score()
        self.history.add_check(self.num_steps, trace, rates, score)
        if self.num_steps > self.config.steps_of_annealing:
            if self.config.schedule == "plateau":
                # The median: with few samples and little noise, a mean of 50 steps is what its worst step makes it.
                self._lower_rates(trace.nanmedian(0).values)
            if score is not None and self._has_stopped_improving(score):
                self.history.stopped = "early-stopping"
        for callback in callbacks:
            if callback(Check(self.num_steps, self.model, self.history)):
                self.history.stopped = "callback"

    def _lower_rates(self, elbo: Tensor) -> None:
        stale = self.plateau.update(elbo, self.config.plateau_patience, self.config.tolerance)
        if self.config.stop_when_settled:
            settled = stale & (self.step.rate_scale <= _SETTLED_RATE_SCALE)
            if (settled | ~self.step.active).all():
                self.history.stopped = "settled"
                return
        lower = stale & self.step.active & (self.step.rate_scale > _LEAST_RATE_SCALE)
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
        stale = self.early.update(score, self.config.early_stopping_patience, self.config.tolerance)
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
        record = {
            **self._identity(),
            "num_steps": self.num_steps,
            "history": self.history.record(),
            "recoveries": list(self.health.recoveries),
            "good_checks": list(self.health.good_checks),
        }
        return tensors, record

    def _restore(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        for name, expected in self._identity().items():
            if record.get(name) != expected:
                raise CheckpointError(
                    f"The checkpoint was written with another {name}. Use the same as before, or another file."
                )
        for name, tensor in self._tensors().items():
            tensor.copy_(tensors[name])
        self.generator.set_state(tensors["generator"])
        arrays = {name.removeprefix("history."): t for name, t in tensors.items() if name.startswith("history.")}
        self.history = History.restore(arrays, record["history"])
        self.num_steps = record["num_steps"]
        self.health.recoveries = list(record["recoveries"])
        self.health.good_checks = list(record["good_checks"])

    def _identity(self) -> dict[str, Any]:
        """What makes a run this run; all of it goes by the names that an error message can use."""
        if self._digests is None:
            weights = () if self.step.weights is None else (self.step.weights,)
            data = fingerprint(self.step.X, self.step.Y, *weights, *(self.held_out or ()))
            self._digests = {"model": self._describe_model(), "data set": data}
        config = self.config.to_dict()
        for name in ("checkpoint_seconds", "compile"):  # may change: neither changes a result, but for rounding
            del config[name]
        return {"configuration": config, "seed": self.seed, **self._digests}

    def _describe_model(self) -> dict[str, Any]:
        """Shapes of what is learned, kinds and options of all modules, and a digest of what is not learned."""
        changing = {*self.flat.shapes, *self._buffers()}
        fixed = {name: tensor for name, tensor in self.model.state_dict().items() if name not in changing}
        kinds = [[name, type(module).__name__, _options(module)] for name, module in self.model.named_modules()]
        shapes = {name: list(shape) for name, shape in self.flat.shapes.items()}
        return {"learned": shapes, "modules": kinds, "fixed": [sorted(fixed), fingerprint(*fixed.values())]}

    def _buffers(self) -> dict[str, Tensor]:
        """What goes with the parameters: jitter, which a check may raise, and units, which a start may have rounded."""
        names = ("jitter", "V_unit")
        return {name: buffer for name, buffer in self.model.named_buffers() if name.endswith(names)}

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
        tensors.update(self._buffers())
        if self.best_values is not None:
            tensors["early.values"] = self.best_values
        return tensors


def _options(module: torch.nn.Module) -> dict[str, Any]:
    """Numbers and names that a module was made with."""
    hidden = ("training", "_")
    return {k: v for k, v in vars(module).items() if isinstance(v, int | str) and not k.startswith(hidden)}


class _Best:
    """The best of a score so far, for each replica, and for how many checks there was no better one."""

    def __init__(self, like: Tensor) -> None:
        self.best = like.new_full(like.shape[:1], -torch.inf)
        self.stale = torch.zeros_like(self.best, dtype=torch.int64)

    def update(self, score: Tensor, patience: int, tolerance: float) -> Tensor:
        """Take note of a score; return who has been without a better one for too long."""
        better = score > self.best + tolerance
        self.stale.copy_(torch.where(better, 0, self.stale + 1))
        self.best.copy_(torch.where(better, score, self.best))
        return self.stale >= patience
