"""Deep kernel processes: layers that map a Gram matrix to a Gram matrix, and a Gaussian process on top."""

import copy
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from deepwishart.checks import check_data, require_whole
from deepwishart.gram import AnyGram, FeatureGram, gram_of_features
from deepwishart.inducing import choose_rows, count_distinct_rows
from deepwishart.kernels import Kernel, make_kernel
from deepwishart.layers import (
    INITIALISATIONS,
    POSTERIORS,
    GaussianLayer,
    GaussianOutput,
    GaussianPosterior,
    InverseWishartLayer,
    Marginals,
    WishartLayer,
    WishartPosterior,
)
from deepwishart.layers.base import KLEstimator
from deepwishart.layers.wishart import draw_ahead
from deepwishart.likelihoods import Gaussian, Likelihood
from deepwishart.linalg import cholesky, default_jitter

OutputPrecision = Literal["shared-full", "shared-diagonal", "separate-full", "separate-diagonal"]

__all__ = [
    "DeepKernelProcess",
    "OutputPrecision",
    "ProcessOutput",
    "deep_gaussian_process",
    "deep_inverse_wishart_process",
    "deep_wishart_process",
    "select_replicas",
]


class ProcessOutput(NamedTuple):
    """What a pass through a model returns.

    Attributes:
        marginals: Of the latent functions at the points.
        kls: Divergence of every hidden layer, from the inputs up; that of the output is ``marginals.kl``.
    """

    marginals: Marginals
    kls: tuple[Tensor, ...]

    @property
    def kl(self) -> Tensor:
        """The sum of all divergences, shape ``(*sample, *batch)``."""
        total = self.marginals.kl
        for kl in self.kls:
            total = total + kl
        return total


class DeepKernelProcess(nn.Module):
    """A stack of hidden layers and a Gaussian process output, with a likelihood.

    Make one with :func:`deep_wishart_process`, :func:`deep_gaussian_process` or :func:`deep_inverse_wishart_process`.

    Args:
        inducing_inputs: Shape ``(*batch, M, D)``.
        layers: Hidden layers, from the inputs up; none for a sparse GP.
        output: The Gaussian process on top.
        likelihood: An initialised likelihood.
        num_outputs: Columns of the targets.
    """

    def __init__(
        self,
        inducing_inputs: Tensor,
        layers: Sequence[nn.Module],
        output: GaussianOutput,
        likelihood: Likelihood,
        num_outputs: int,
    ) -> None:
        super().__init__()
        *batch, _, D = inducing_inputs.shape
        self.inducing_inputs = nn.Parameter(inducing_inputs.clone())
        self.log_input_lengthscale = nn.Parameter(inducing_inputs.new_zeros(*batch, D))
        self.layers = nn.ModuleList(layers)
        self.output = output
        self.likelihood = likelihood
        self.num_outputs = num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the replicas."""
        return self.inducing_inputs.shape[:-2]

    @property
    def depth(self) -> int:
        """Hidden layers and the output."""
        return len(self.layers) + 1

    def input_gram(self, X: Tensor) -> FeatureGram:
        """G₀ = (X/ℓ)(X/ℓ)ᵀ/D over inducing inputs and the rows of X (*batch, N, D)."""
        inverse_lengthscale = (-self.log_input_lengthscale).exp()[..., None, :]
        return gram_of_features(self.inducing_inputs * inverse_lengthscale, X * inverse_lengthscale)

    def draw_noise(
        self, num_samples: int, num_points: int, generator: torch.Generator | None = None, deal_rows: bool = False
    ) -> tuple[Any, ...]:
        """Noise of one pass.

        Args:
            num_samples: S.
            num_points: Points that have noise of their own; one for all if 1.
            generator: Source of randomness.
            deal_rows: As for :meth:`forward`; the points are then a multiple of S.
        """
        shape = torch.Size((num_samples, *self.batch_shape))
        dealt = num_points // num_samples if deal_rows else num_points
        return tuple(
            layer.draw_noise(shape, dealt if index else num_points, generator)  # type: ignore[operator]
            for index, layer in enumerate(self.layers)
        )

    def forward(self, X: Tensor, noise: tuple[Any, ...] = (), deal_rows: bool = False) -> ProcessOutput:
        """Marginals of the latent functions at the rows of X, and the divergences.

        Args:
            X: Shape ``(*batch, N, D)``.
            noise: Of :meth:`draw_noise`.
            deal_rows: Whether the rows are dealt out to the S samples, as :func:`deepwishart.gram.deal` does, so that
                each is seen by one of them. The first layer, where samples have the same Gram matrix, sees all.
        """
        gram, kls = self.input_gram(X), []
        draws = draw_ahead(self.layers, noise)
        for index, (layer, layer_noise, draw) in enumerate(zip(self.layers, noise, draws, strict=True)):
            gram, kl = layer(gram, layer_noise) if draw is None else layer(gram, layer_noise, draw)
            gram = gram.deal() if deal_rows and index == 0 else gram
            kls.append(kl)
        return ProcessOutput(self.output(gram), tuple(kls))


def select_replicas(model: DeepKernelProcess, replicas: Sequence[int]) -> DeepKernelProcess:
    """A copy of some replicas of a model whose batch shape is (R)."""
    chosen = copy.deepcopy(model)
    index = torch.as_tensor(replicas, device=model.inducing_inputs.device)
    for tensor in chosen.state_dict(keep_vars=True).values():  # all but the nodes of likelihoods, which replicas share
        tensor.data = tensor.data[index]
    return chosen


class _Plan(NamedTuple):
    """What the three constructors share, decided from the data."""

    inducing_inputs: Tensor
    inducing_targets: Tensor
    likelihood: Likelihood
    widths: tuple[int, ...]
    jitter: Tensor
    grams: tuple[AnyGram, ...]
    num_outputs: int


def deep_wishart_process(
    inputs: Tensor,
    targets: Tensor,
    depth: int = 2,
    posterior: str = "ab-gw",
    num_inducing: int = 100,
    likelihood: Likelihood | None = None,
    num_outputs: int | None = None,
    widths: int | Sequence[int] | None = None,
    kernel: str = "squared-exponential",
    initialisation: str = "prior",
    kl: KLEstimator = "closed-form",
    output_precision: OutputPrecision = "shared-full",
    jitter: float | None = None,
    generator: torch.Generator | None = None,
) -> DeepKernelProcess:
    """A deep Wishart process: depth − 1 Wishart layers and a GP output. [O2023]

    Args:
        inputs: Standardised, shape ``(*batch, N, D)``.
        targets: Shape ``(*batch, N, outputs)`` or ``(*batch, N)``, standardised where they are real numbers.
        depth: At least 1, which is a sparse GP and ignores ``posterior``.
        posterior: ``"gw"``, ``"a-gw"`` or ``"ab-gw"``.
        num_inducing: M is the smaller of this and the fewest distinct rows over replicas.
        likelihood: :class:`~deepwishart.likelihoods.Gaussian` by default.
        num_outputs: The number of columns of the targets; only checked, so it may be left out.
        widths: ν of all hidden layers, or of each; the number of inputs by default, as in the paper.
        kernel: Name or expression, see :func:`deepwishart.kernels.make_kernel`.
        initialisation: A key of :data:`deepwishart.layers.INITIALISATIONS`.
        kl: Estimator of the hidden layers' divergences.
        output_precision: Λ of the output: one for all latent functions, ``"shared-full"`` or ``"shared-diagonal"``, or
            one for each, ``"separate-full"`` or ``"separate-diagonal"``.
        jitter: Relative to a kernel's mean diagonal; the square root of the dtype's epsilon by default.
        generator: Source of randomness.
    """
    if posterior not in POSTERIORS:
        raise ValueError(f"posterior must be gw, a-gw or ab-gw, got {posterior!r}.")
    if initialisation not in INITIALISATIONS:
        raise ValueError(f"initialisation must be one of {', '.join(INITIALISATIONS)}, got {initialisation!r}.")
    plan = _plan(inputs, targets, depth, num_inducing, likelihood, num_outputs, widths, kernel, jitter, generator)
    layers = []
    for index, (width, gram) in enumerate(zip(plan.widths, plan.grams, strict=True)):
        layer_kernel = _kernel(kernel, plan, index)
        tril = _prior_tril(layer_kernel, gram, plan.jitter) / width**0.5
        layer_posterior = WishartPosterior(
            posterior, width, tril, INITIALISATIONS[initialisation], is_first=index == 0, generator=generator
        )
        layers.append(WishartLayer(layer_kernel, layer_posterior, plan.jitter.clone(), kl))
    return _assemble(layers, kernel, plan, output_precision)


def deep_gaussian_process(
    inputs: Tensor,
    targets: Tensor,
    depth: int = 2,
    num_inducing: int = 100,
    likelihood: Likelihood | None = None,
    num_outputs: int | None = None,
    widths: int | Sequence[int] | None = None,
    kernel: str = "squared-exponential",
    kl: KLEstimator = "closed-form",
    shared_precision: bool = True,
    output_precision: OutputPrecision = "shared-full",
    jitter: float | None = None,
    generator: torch.Generator | None = None,
) -> DeepKernelProcess:
    """A deep GP with global inducing points: the same prior as the deep Wishart process, on features.

    Args:
        inputs: Standardised, shape ``(*batch, N, D)``.
        targets: Shape ``(*batch, N, outputs)`` or ``(*batch, N)``, standardised where they are real numbers.
        depth: At least 1, which is a sparse GP.
        num_inducing: M is the smaller of this and the fewest distinct rows over replicas.
        likelihood: :class:`~deepwishart.likelihoods.Gaussian` by default.
        num_outputs: The number of columns of the targets; only checked, so it may be left out.
        widths: ν of all hidden layers, or of each; the number of inputs by default.
        kernel: Name or expression, see :func:`deepwishart.kernels.make_kernel`.
        kl: Estimator of the hidden layers' divergences.
        shared_precision: Whether the features of a hidden layer share one precision.
        output_precision: Λ of the output: one for all latent functions, ``"shared-full"`` or ``"shared-diagonal"``, or
            one for each, ``"separate-full"`` or ``"separate-diagonal"``.
        jitter: Relative to a kernel's mean diagonal; the square root of the dtype's epsilon by default.
        generator: Source of randomness.
    """
    plan = _plan(inputs, targets, depth, num_inducing, likelihood, num_outputs, widths, kernel, jitter, generator)
    Z, layers = plan.inducing_inputs, []
    for index, width in enumerate(plan.widths):
        # Features start near the inputs, repeated or cut to the width: a skip connection, softly.
        start = torch.cat([Z] * -(-width // Z.shape[-1]), -1)[..., :width]
        posterior = GaussianPosterior(start, shared=shared_precision)
        layers.append(GaussianLayer(_kernel(kernel, plan, index), posterior, plan.jitter.clone(), kl))
    return _assemble(layers, kernel, plan, output_precision)


def deep_inverse_wishart_process(
    inputs: Tensor,
    targets: Tensor,
    depth: int = 2,
    num_inducing: int = 100,
    likelihood: Likelihood | None = None,
    num_outputs: int | None = None,
    kernel: str = "squared-exponential",
    kl: KLEstimator = "closed-form",
    output_precision: OutputPrecision = "shared-full",
    jitter: float | None = None,
    generator: torch.Generator | None = None,
) -> DeepKernelProcess:
    """A deep inverse Wishart process: depth − 1 inverse Wishart layers, which have no width, and a GP output. [A2021]

    Args:
        inputs: Standardised, shape ``(*batch, N, D)``.
        targets: Shape ``(*batch, N, outputs)`` or ``(*batch, N)``, standardised where they are real numbers.
        depth: At least 1, which is a sparse GP.
        num_inducing: M is the smaller of this and the fewest distinct rows over replicas.
        likelihood: :class:`~deepwishart.likelihoods.Gaussian` by default.
        num_outputs: The number of columns of the targets; only checked, so it may be left out.
        kernel: Name or expression, see :func:`deepwishart.kernels.make_kernel`.
        kl: Estimator of the hidden layers' divergences.
        output_precision: Λ of the output: one for all latent functions, ``"shared-full"`` or ``"shared-diagonal"``, or
            one for each, ``"separate-full"`` or ``"separate-diagonal"``.
        jitter: Relative to a kernel's mean diagonal; the square root of the dtype's epsilon by default.
        generator: Source of randomness.
    """
    plan = _plan(inputs, targets, depth, num_inducing, likelihood, num_outputs, None, kernel, jitter, generator)
    layers = []
    for index, gram in enumerate(plan.grams):
        layer_kernel = _kernel(kernel, plan, index)
        tril = _prior_tril(layer_kernel, gram, plan.jitter)
        layers.append(InverseWishartLayer(layer_kernel, tril, plan.jitter.clone(), kl, generator=generator))
    return _assemble(layers, kernel, plan, output_precision)


def _plan(
    inputs: Tensor,
    targets: Tensor,
    depth: int,
    num_inducing: int,
    likelihood: Likelihood | None,
    num_outputs: int | None,
    widths: int | Sequence[int] | None,
    kernel: str,
    jitter: float | None,
    generator: torch.Generator | None,
) -> _Plan:
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a torch tensor, got {type(tensor).__name__}. Use torch.as_tensor.")
    targets = targets[..., None] if targets.ndim == inputs.ndim - 1 else targets
    check_data(inputs, targets)
    if likelihood is not None and not isinstance(likelihood, Likelihood):
        raise ValueError(f"likelihood must come from deepwishart.likelihoods, such as Gaussian(), got {likelihood!r}.")
    if jitter is not None and not 0 <= jitter <= 1:
        raise ValueError(f"jitter must be a number from 0 to 1, relative to a kernel's mean diagonal, got {jitter}.")
    depth, num_inducing = require_whole("depth", depth), require_whole("num_inducing", num_inducing)
    if num_outputs not in (None, targets.shape[-1]):
        raise ValueError(
            f"num_outputs must be the number of columns of targets, {targets.shape[-1]}, got {num_outputs}."
        )
    batch_shape, D = inputs.shape[:-2], inputs.shape[-1]
    likelihood = copy.deepcopy(likelihood) if likelihood is not None else Gaussian()
    likelihood.check_targets(targets)
    likelihood.num_latents(targets.shape[-1])
    likelihood.initialise(batch_shape, targets.shape[-1], inputs)
    rows = _choose_inducing(inputs, num_inducing, generator)
    Z = inputs.gather(-2, rows[..., None].expand(*rows.shape, D))
    pseudo = likelihood.pseudo_targets(targets)
    v = pseudo.gather(-2, rows[..., None].expand(*rows.shape, pseudo.shape[-1]))
    relative = default_jitter(inputs.dtype) if jitter is None else jitter
    return _Plan(
        inducing_inputs=Z,
        inducing_targets=v,
        likelihood=likelihood,
        widths=_widths(widths, depth, D),
        jitter=inputs.new_full(batch_shape, relative),
        grams=_expected_grams(Z, depth, kernel),
        num_outputs=targets.shape[-1],
    )


def _assemble(
    layers: Sequence[nn.Module], kernel: str, plan: _Plan, output_precision: OutputPrecision
) -> DeepKernelProcess:
    if output_precision not in get_args(OutputPrecision):
        names = ", ".join(get_args(OutputPrecision))
        raise ValueError(f"output_precision must be one of {names}, got {output_precision!r}.")
    posterior = GaussianPosterior(
        plan.inducing_targets,
        shared=output_precision.startswith("shared"),
        diagonal=output_precision.endswith("diagonal"),
    )
    output = GaussianOutput(_kernel(kernel, plan, len(layers)), posterior, plan.jitter.clone())
    return DeepKernelProcess(plan.inducing_inputs, layers, output, plan.likelihood, plan.num_outputs)


def _kernel(name: str, plan: _Plan, index: int) -> Kernel:
    """The kernel of a layer; the first has no lengthscale of its own, since the inputs have theirs."""
    Z = plan.inducing_inputs
    return make_kernel(name, Z.shape[:-2], learn_lengthscale=index > 0, dtype=Z.dtype).to(Z.device)


def _prior_tril(kernel: Kernel, gram: AnyGram, jitter: Tensor) -> Tensor:
    with torch.no_grad():
        return cholesky(kernel(gram).ii, jitter).tril


def _expected_grams(Z: Tensor, depth: int, kernel: str) -> tuple[AnyGram, ...]:
    """The Gram matrix below each hidden layer, were every layer equal to its prior mean."""
    module = make_kernel(kernel, Z.shape[:-2], dtype=Z.dtype).to(Z.device)
    gram, grams = gram_of_features(Z, Z[..., :0, :]), []
    with torch.no_grad():
        for _ in range(depth - 1):
            grams.append(gram)
            gram = module(gram)
    return tuple(grams)


def _choose_inducing(inputs: Tensor, num_inducing: int, generator: torch.Generator | None) -> Tensor:
    """Row numbers of the inducing inputs, shape ``(*batch, M)``."""
    tables = inputs.detach().reshape(-1, *inputs.shape[-2:])
    M = min(num_inducing, *(count_distinct_rows(table) for table in tables))
    rows = torch.stack([choose_rows(table, M, generator) for table in tables])
    return rows.reshape(*inputs.shape[:-2], M)


def _widths(widths: int | Sequence[int] | None, depth: int, num_inputs: int) -> tuple[int, ...]:
    given = num_inputs if widths is None else widths
    listed = tuple(given) if isinstance(given, Sequence) else (given,) * (depth - 1)
    listed = tuple(require_whole("widths", width) for width in listed)
    if len(listed) != depth - 1:
        raise ValueError(
            f"widths must be one whole number, or one for each of the {depth - 1} hidden layers, got {widths}."
        )
    return listed
