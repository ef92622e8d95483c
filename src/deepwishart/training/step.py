"""One step of training, for all replicas at once and without a look at any value; on a GPU, one CUDA graph."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from deepwishart.models import DeepKernelProcess
from deepwishart.objectives import elbo_given_noise
from deepwishart.training.adam import Adam
from deepwishart.training.config import TrainingConfig
from deepwishart.training.parameters import FlatParameters

__all__ = ["CompilationError", "TrainingStep", "pad_rows"]

_WARM_UP_STEPS = 3
_ALIGNMENT = 8


class CompilationError(RuntimeError):
    """torch could not compile a step, or compiled another one. Nothing was trained."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"torch {torch.__version__} {problem}. Set compile=False, or leave out --compile.")


class TrainingStep:
    """Draws a batch and noise, takes the gradient of the ELBO, and moves every replica whose gradient is finite.

    Schedules are tables on the device that are read at the counter there, results are written into buffers: nothing is
    copied to the host, and on a GPU the whole step is replayed as one graph.

    Args:
        model: To be trained.
        flat: Its parameters.
        X: Shape ``(*batch, N, D)``.
        Y: Shape ``(*batch, N, outputs)``.
        config: How to train.
        generator: Source of randomness on the model's device.
        weights: Of the rows, shape ``(*batch, N)``.

    Attributes:
        counter: Steps taken, shape ``(1)``.
        trace: ELBO per datapoint of the steps since the last check, shape ``(check_every, R)``.
        active: Whether a replica is trained, shape ``(R)``.
        failures: Steps in a row that a replica could not take, shape ``(R)``.
        skipped: Steps since the last check that it could not take, shape ``(R)``.
        rate_scale: What a replica's learning rate is multiplied by, shape ``(R)``.
    """

    def __init__(
        self,
        model: DeepKernelProcess,
        flat: FlatParameters,
        X: Tensor,
        Y: Tensor,
        config: TrainingConfig,
        generator: torch.Generator,
        weights: Tensor | None = None,
    ) -> None:
        self.model, self.flat, self.X, self.Y, self.config, self.generator = model, flat, X, Y, config, generator
        self.weights = weights
        self.optimiser = Adam(flat.values)
        self.num_data = X.shape[-2]
        self.total_weight = self.num_data if weights is None else weights.sum(-1).reshape(-1)
        self.batch_size = config.rows_per_step(self.num_data)
        R, like = flat.num_replicas, flat.values
        self.rates = config.learning_rate * like.new_tensor(config.learning_rate_factors())
        self.kl_weights = like.new_tensor(config.kl_weights())
        self.counter = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.trace = like.new_zeros(config.check_every, R)
        self.active = torch.ones(R, dtype=torch.bool, device=like.device)
        self.failures = torch.zeros(R, dtype=torch.int64, device=like.device)
        self.skipped = torch.zeros_like(self.failures)
        self.rate_scale = like.new_ones(R)
        # A sample has as many rows as the others, and a GPU multiplies aligned rows faster.
        multiple = (config.num_samples if config.deal_rows else 1) * (_ALIGNMENT if like.device.type == "cuda" else 1)
        self._whole = pad_rows(X, Y, weights, multiple) if self.batch_size == self.num_data else None
        self._elbo = elbo_given_noise
        self._is_to_be_compiled = config.compile
        self._graph: Any = None
        self._warm_ups = 0

    def __call__(self) -> None:
        """Take one step."""
        if self._is_to_be_compiled:
            self._compile()
        if self.X.device.type != "cuda":
            self._take()
        elif self._graph is not None:
            self._graph.replay()
        else:
            self._take_on_side_stream()
            if self._warm_ups == _WARM_UP_STEPS:
                self._capture()

    def learning_rates(self, step: int) -> Tensor:
        """Of every replica at a step, shape ``(R)``."""
        return self.rates[min(step, len(self.rates) - 1)] * self.rate_scale

    def _take(self) -> None:
        config = self.config
        rate = self.rates.index_select(0, self.counter) * self.rate_scale
        kl_weight = self.kl_weights.index_select(0, self.counter)
        bound, gradient = self._differentiate(self._elbo, self._draw(kl_weight))
        with torch.no_grad():
            norm = gradient.norm(dim=-1)
            healthy = bound.isfinite() & norm.isfinite() & self.active
            if config.clip_norm is not None:
                gradient *= (config.clip_norm / norm).clamp_max(1.0)[:, None]
            self.optimiser.step(gradient, rate, healthy)
            failed = ~healthy & self.active
            self.failures.copy_(torch.where(failed, self.failures + 1, 0))
            self.skipped += failed
            position = self.counter % config.check_every
            self.trace.index_copy_(0, position, bound[None])
            self.counter += 1

    def _draw(self, kl_weight: Tensor) -> tuple[Any, ...]:
        """What :func:`elbo_given_noise` takes beside the model."""
        X, Y, weights = self._draw_batch()
        deal_rows = self.config.deal_rows
        noise = self.model.draw_noise(self.config.num_samples, X.shape[-2], self.generator, deal_rows)
        num_data = self.num_data if self._whole is None else None  # of a whole batch, padding is no data
        return X, Y, noise, num_data, kl_weight, weights, deal_rows

    def _differentiate(self, elbo: Any, drawn: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """The bound per datapoint, shape ``(R)``, and the gradient of what is minimised, shape ``(R, n)``."""
        bound = elbo(self.model, *drawn).reshape(-1) / self.total_weight
        return bound.detach(), self.flat.gradient(-bound.sum())

    def _compile(self) -> None:
        """Let torch compile the ELBO, and compare: torch 2.11 has lost gradients without a word."""
        state = self.generator.get_state()
        drawn = self._draw(torch.ones_like(self.kl_weights[:1]))  # in the first step the divergence has no weight yet
        self.generator.set_state(state)
        with warnings.catch_warnings(), _validation_comes_back():
            warnings.simplefilter("ignore")  # they are about the compiler's own code
            compiled = torch.compile(_with_code_of_its_own(elbo_given_noise), dynamic=False)
            try:
                found = self._differentiate(compiled, drawn)
            except Exception as error:
                if not type(error).__module__.startswith("torch."):
                    raise
                reason = (str(error).splitlines() or [""])[0]
                raise CompilationError(f"could not compile the step ({reason})") from error
        self._require_agreement(found, self._differentiate(elbo_given_noise, drawn))
        self._elbo, self._is_to_be_compiled = compiled, False

    def _require_agreement(self, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
        """Raise if a compiled bound or gradient differs from the plain one by more than rounding.

        Parameter by parameter; replicas whose plain bound or gradient is not finite are left out.
        """
        eps = torch.finfo(self.rates.dtype).eps
        is_finite = expected[0].isfinite() & expected[1].isfinite().all(-1)
        # Some gradients are zero but for rounding, which is that of larger ones.
        floor = eps**0.5 * expected[1].norm(dim=-1)
        parts = zip(self.flat.shapes, self.flat.split(found[1]), self.flat.split(expected[1]), strict=True)
        for name, found_part, expected_part in [("the bound", found[0][:, None], expected[0][:, None]), *parts]:
            gap, size = (found_part - expected_part).norm(dim=-1), expected_part.norm(dim=-1)
            differs = is_finite & ~(gap <= eps ** (1 / 6) * size + floor)
            if differs.any():
                percent = f"{(gap / size)[differs].max().item():.1%}"
                raise CompilationError(f"compiled the step into another one, in which {name} differs by {percent}")

    def _draw_batch(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows without replacement, for each replica its own; all of them if the batch is the data."""
        if self._whole is not None:
            return self._whole
        *batch_shape, N, D = self.X.shape
        keys = torch.rand(*batch_shape, N, dtype=torch.float32, device=self.X.device, generator=self.generator)
        rows = keys.topk(self.batch_size, dim=-1, sorted=False).indices
        X = self.X.gather(-2, rows[..., None].expand(*rows.shape, D))
        Y = self.Y.gather(-2, rows[..., None].expand(*rows.shape, self.Y.shape[-1]))
        return X, Y, None if self.weights is None else self.weights.gather(-1, rows)

    def _take_on_side_stream(self) -> None:
        """A step of its own right before the capture: what torch sets up on first use must not be captured."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._take()
        torch.cuda.current_stream().wait_stream(stream)
        self._warm_ups += 1

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph):
            self._take()
        self._graph = graph


def pad_rows(X: Tensor, Y: Tensor, weights: Tensor | None, multiple: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add rows that count for nothing, up to a multiple of a number."""
    N = X.shape[-2]
    rows = torch.arange(-(-N // multiple) * multiple, device=X.device)
    if len(rows) == N:
        return X, Y, weights
    counts = (rows < N).to(X.dtype).expand(*X.shape[:-2], -1)
    rows %= N
    return X[..., rows, :], Y[..., rows, :], counts if weights is None else weights[..., rows] * counts


@contextmanager
def _validation_comes_back() -> Iterator[None]:
    """torch.compile turns the checks of torch.distributions off, and those of ours, for the whole process."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _with_code_of_its_own(function: Any) -> Any:
    """A copy: of one piece of code torch compiles eight variants, and every model is one."""
    return FunctionType(function.__code__.replace(), function.__globals__, argdefs=function.__defaults__)
