"""What to do about a replica that has become sick: undo, repair, or retire it, and leave the others alone."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deepwishart.linalg import default_jitter
from deepwishart.models import DeepKernelProcess
from deepwishart.training.history import History
from deepwishart.training.step import TrainingStep

__all__ = ["Diagnosis", "Health", "TrainingError", "diagnose"]

# A single bad step may be bad luck with the noise, and it was not taken anyway.
_FAILURES_BEFORE_RECOVERY = 3
_SHARE_BEFORE_RECOVERY = 0.25
# After so many checks in a row without a failure, earlier ones are forgotten.
_CHECKS_TO_FORGET = 20
_JITTER_FACTOR = 10.0
_LARGEST_JITTER = 1e-2
_RATE_FACTOR = 0.5
_ROWS_TO_DIAGNOSE = 2_048
_NOISES_TO_TRY = 5


class TrainingError(RuntimeError):
    """No replica of a run could be saved. The model keeps the last good state.

    Attributes:
        history: Of the run.
    """

    def __init__(self, message: str, history: History) -> None:
        super().__init__(message)
        self.history = history


class Diagnosis(NamedTuple):
    """Where a replica's numbers first stop being finite.

    Attributes:
        place: ``"the data"``, ``"parameter …"``, ``"hidden layer 2"``, ``"the output layer"``, ``"the likelihood"`` or
            ``"the gradient"``.
        jitter: Name of the jitter that may mend it, where one may.
        remedy: What a user can do.
    """

    place: str
    jitter: str | None
    remedy: str


class Health:
    """Keeps every replica's last good state, and returns a sick one to it.

    Args:
        step: The training step, whose state this looks after.
        max_recoveries: Times a replica is restored before it is retired.

    Attributes:
        good: The last good rows of all that belongs to a replica.
        recoveries: How often each was restored of late.
        good_checks: How many checks in a row each has passed.
    """

    def __init__(self, step: TrainingStep, max_recoveries: int) -> None:
        self.step = step
        self.max_recoveries = max_recoveries
        self.good = {name: tensor.clone() for name, tensor in self._rows().items()}
        self.recoveries = [0] * step.flat.num_replicas
        self.good_checks = [0] * step.flat.num_replicas

    def check(self, num_steps: int, chunk: int, history: History) -> None:
        """Look at all replicas after a chunk of steps.

        Raises:
            TrainingError: If none is left.
        """
        failures, skipped = self.step.failures.tolist(), self.step.skipped.tolist()
        sound = self.step.flat.values.isfinite().all(-1).tolist()
        active = self.step.active.tolist()
        self.step.skipped.zero_()
        last: Diagnosis | None = None
        for r in (r for r in range(len(active)) if active[r]):
            if skipped[r]:
                history.add_event(num_steps, r, "skipped", f"{skipped[r]} steps were not finite, and not taken.")
            often = skipped[r] >= max(_FAILURES_BEFORE_RECOVERY, _SHARE_BEFORE_RECOVERY * chunk)
            if failures[r] >= _FAILURES_BEFORE_RECOVERY or often or not sound[r]:
                last = self._treat(r, num_steps, history)
            elif not failures[r]:
                self._keep(r)
        if last is not None and not self.step.active.any():
            raise TrainingError(
                f"Training cannot go on at step {num_steps}: of replica {history.retired[-1]}, {last.place} is not "
                f"finite, after {self.recoveries[history.retired[-1]]} recoveries. {last.remedy} The model keeps the "
                f"last good state.",
                history,
            )

    def _treat(self, r: int, num_steps: int, history: History) -> Diagnosis:
        found = diagnose(self.step.model, self.step.X, self.step.Y, self.step.flat.shapes, r)
        for name, tensor in self._rows().items():
            tensor[r] = self.good[name][r]
        self.step.failures[r] = 0
        self.good_checks[r] = 0
        if self.recoveries[r] >= self.max_recoveries or found.place == "the data":
            self.step.active[r] = False
            history.retired.append(r)
            message = f"{found.place} is not finite; the replica keeps its last good state. {found.remedy}"
            history.add_event(num_steps, r, "retired", message)
            return found
        self.recoveries[r] += 1
        if found.jitter is not None and self._raise_jitter(found.jitter, r):
            done = f"{found.jitter} was raised to {self._jitter(found.jitter)[r].item():.1e}"
        else:
            self.step.rate_scale[r] *= _RATE_FACTOR
            done = f"the learning rate was multiplied by {_RATE_FACTOR}"
        history.add_event(
            num_steps, r, "recovered", f"{found.place} was not finite: the last good state was restored, and {done}."
        )
        return found

    def _raise_jitter(self, name: str, r: int) -> bool:
        """Whether there was room to."""
        jitter = self._jitter(name)
        old = jitter[r].item()
        new = max(old, min(max(_JITTER_FACTOR * old, default_jitter(jitter.dtype)), _LARGEST_JITTER))
        jitter[r] = new
        return new > old

    def _jitter(self, name: str) -> Tensor:
        return self.step.model.get_buffer(name).view(-1)

    def _keep(self, r: int) -> None:
        for name, tensor in self._rows().items():
            self.good[name][r] = tensor[r]
        self.good_checks[r] += 1
        if self.good_checks[r] >= _CHECKS_TO_FORGET:
            self.recoveries[r] = 0

    def _rows(self) -> dict[str, Tensor]:
        """All tensors whose r-th row belongs to replica r."""
        adam = self.step.optimiser
        return {"values": self.step.flat.values, "mean": adam.mean, "square": adam.square, "count": adam.count}


def diagnose(
    model: DeepKernelProcess, X: Tensor, Y: Tensor, parameters: dict[str, tuple[int, ...]], replica: int
) -> Diagnosis:
    """Find where a replica's numbers first stop being finite. Does not touch the run's randomness."""
    R = model.batch_shape.numel()

    def finite(tensor: Tensor, event_dims: int) -> bool:
        """Whether (*sample, *batch, …) is, as far as the replica is concerned."""
        flat = tensor.flatten(tensor.ndim - event_dims) if event_dims else tensor[..., None]
        return bool(flat.reshape(-1, R, flat.shape[-1])[:, replica].isfinite().all())

    if not (finite(X, 2) and finite(Y, 2)):
        return Diagnosis("the data", None, "Remove NaN and infinity from the inputs and targets.")
    slower = "Lower the learning rate, or set clip_norm."
    for name in parameters:
        parameter = model.get_parameter(name)
        if not finite(parameter, parameter.ndim - len(model.batch_shape)):
            return Diagnosis(f"parameter {name}", None, slower)
    for seed in range(_NOISES_TO_TRY):
        found = _diagnose_pass(model, X[..., :_ROWS_TO_DIAGNOSE, :], Y[..., :_ROWS_TO_DIAGNOSE, :], seed, finite)
        if found is not None:
            return found
    return Diagnosis("the gradient", None, slower)


def _diagnose_pass(
    model: DeepKernelProcess, X: Tensor, Y: Tensor, seed: int, finite: Callable[[Tensor, int], bool]
) -> Diagnosis | None:
    steadier = "Raise the jitter, lower the learning rate, or use float64."
    noise = model.draw_noise(10, X.shape[-2], torch.Generator(X.device).manual_seed(seed))
    with torch.no_grad():
        gram = model.input_gram(X)
        for index, (layer, layer_noise) in enumerate(zip(model.layers, noise, strict=True)):
            gram, kl = layer(gram, layer_noise)
            if not (finite(gram.inducing, 2) and finite(gram.points, 2) and finite(gram.tt, 1) and finite(kl, 0)):
                return Diagnosis(f"hidden layer {index + 1}", f"layers.{index}.jitter", steadier)
        mean, variance, kl = model.output(gram)
        if not (finite(mean, 2) and finite(variance, 2) and finite(kl, 0)):
            return Diagnosis("the output layer", "output.jitter", steadier)
        if not finite(model.likelihood.expected_log_prob(Y, mean, variance), 1):
            return Diagnosis("the likelihood", None, "Lower the learning rate, or check the scale of the targets.")
    return None
