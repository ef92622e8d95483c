"""Where a deep model begins: as a plain GP, and with noise that varies, as itself with noise that does not.

A deep model that starts from nothing first has to find out which inputs matter and how much noise there is, and may
settle in a poor answer: an input whose lengthscale has run away while the noise was still large never comes back.
"""

import copy
import math

import torch
from torch import Tensor, nn

from deepwishart.distributions.bartlett import standard_concentration
from deepwishart.gram import FeatureGram
from deepwishart.kernels import ScaledKernel, Stationary
from deepwishart.layers import (
    GaussianLayer,
    GaussianOutput,
    GaussianPosterior,
    InverseWishartLayer,
    WishartLayer,
    WishartPosterior,
)
from deepwishart.likelihoods import Gaussian, HeteroscedasticGaussian, StudentT
from deepwishart.linalg import add_to_diagonal, cholesky
from deepwishart.models import DeepKernelProcess
from deepwishart.objectives import predict_f
from deepwishart.shallow import ShallowGP, average_repeated

__all__ = ["average_inducing_targets", "match_noise", "start_from", "with_varying_noise"]

# Standard deviation of the noise around the inputs with which they are taken for features, relative to them.
_FEATURE_NOISE = 0.5
# Lengthscales of the first kernel, relative to the spread of the scaled inputs: features start close to linear in them.
_STRETCH = 2.0
# Likelihoods whose noise a GP knows.
_REAL = Gaussian | HeteroscedasticGaussian | StudentT
_ROWS_TO_MATCH, _SAMPLES_TO_MATCH = 2_000, 10
# Share of Ψ that stays at the prior's scale.
_PRIOR_SHARE = 1e-3


@torch.no_grad()
def start_from(model: DeepKernelProcess, gp: ShallowGP, num_data: float) -> None:
    """Let a deep model begin as the GP, softly: its hidden features are the scaled inputs, seen through noise.

    Lengthscales and features suit every likelihood; height and noise are taken over by those of real numbers.

    Args:
        model: Deep Wishart, deep Gaussian or deep inverse Wishart process, as it was made.
        gp: Fitted to the model's data.
        num_data: Rows of that data, as often as they count; an inducing point stands for num_data/M of them.
    """
    Z, D = model.inducing_inputs, model.inducing_inputs.shape[-1]
    scaled = Z / gp.lengthscale[..., None, :]
    # In units in which the features of a point have a squared norm of one on average, as those of every layer have.
    unit = (scaled**2).sum(-1).mean(-1).sqrt()
    unit = torch.where(unit > 0, unit, 1.0)  # a single row is all zeros
    features = scaled / unit[..., None, None]
    if any(isinstance(layer, InverseWishartLayer) for layer in model.layers) or not len(model.layers):
        unit, stretch = torch.ones_like(unit), 1.0  # no features: the kernel of the inputs is the GP's
    else:
        stretch = _STRETCH
    model.log_input_lengthscale.copy_((stretch * gp.lengthscale * unit[..., None] / D**0.5).log())
    below = model.input_gram(Z[..., :0, :])
    for layer in model.layers:
        if isinstance(layer, WishartLayer):
            _start_wishart(layer, below, features)
        elif isinstance(layer, GaussianLayer):
            layer.posterior.v.copy_(layer.df**0.5 * _fit_width(features, layer.df))
            layer.posterior.log_precision.fill_(-2 * math.log(_FEATURE_NOISE))
        below = FeatureGram(features, features[..., :0, :].mT, features[..., :0, 0])
    kernel = model.output.kernel
    if model.layers and isinstance(kernel, Stationary):
        kernel.log_lengthscale.copy_(-unit.log())
    if isinstance(model.likelihood, _REAL):
        if isinstance(kernel, Stationary):
            kernel.log_height.copy_(0.5 * gp.variance.log())
        _set_noise(model, gp.noise[..., None], num_data)
    else:
        precision = model.likelihood.pseudo_precision * num_data / Z.shape[-2]
        model.output.posterior.log_precision.fill_(math.log(precision))


@torch.no_grad()
def match_noise(
    model: DeepKernelProcess,
    X: Tensor,
    Y: Tensor,
    weights: Tensor | None = None,
    misfit: float = 1.0,
    generator: torch.Generator | None = None,
) -> None:
    """Raise the noise to what a model leaves unexplained where it stands: the best by the ELBO, all else equal.

    Features that are seen through noise predict worse than the GP, the more so the more layers there are. With the
    noise of the GP, a deep model would begin with a misfit of hundreds of nats a row, and lose its way. Where the
    misfit is small, the noise of the GP is the better start: a fit need not find it again.

    Args:
        model: Changed in place if its likelihood is one of real numbers, else left as it is.
        X: Inputs, shape ``(*batch, N, D)``.
        Y: Targets, shape ``(*batch, N, outputs)``.
        weights: How often each row counts, shape ``(N)``; once by default.
        misfit: How many times the noise may be left unexplained; only beyond that is it raised.
        generator: Source of randomness.
    """
    if not isinstance(model.likelihood, _REAL):
        return
    N = X.shape[-2]
    counts = X.new_ones(N) if weights is None else weights
    rows = torch.linspace(0, N - 1, min(N, _ROWS_TO_MATCH), device=X.device).long()
    f = predict_f(model, X[..., rows, :], _SAMPLES_TO_MATCH, generator).components
    mean, variance = f.mean[0, ..., : model.num_outputs], f.variance[0, ..., : model.num_outputs]
    squares = ((Y[..., rows, :] - mean) ** 2 + variance).mean(0)
    share = counts[rows] / counts[rows].sum()
    unexplained = (share[:, None] * squares).sum(-2)
    _set_noise(model, torch.maximum(_noise(model.likelihood), unexplained / misfit), counts.sum().item())


@torch.no_grad()
def average_inducing_targets(model: DeepKernelProcess, X: Tensor, Y: Tensor, weights: Tensor) -> None:
    """Let inducing points start from the mean of the targets of all rows that they equal.

    Args:
        model: Its inducing inputs are rows of X.
        X: Inputs, shape ``(N, D)``.
        Y: Targets, shape ``(N, outputs)``.
        weights: How often each row counts, shape ``(N)``.
    """
    pseudo = average_repeated(X, model.likelihood.pseudo_targets(Y), weights)
    _, group = torch.unique(torch.cat([X, model.inducing_inputs.flatten(0, 1)]), dim=0, return_inverse=True)
    by_group = pseudo.new_zeros(int(group.max()) + 1, pseudo.shape[-1])
    by_group[group[: len(X)]] = pseudo
    model.output.posterior.v.copy_(by_group[group[len(X) :]].reshape(model.output.posterior.v.shape))


@torch.no_grad()
def with_varying_noise(model: DeepKernelProcess, num_data: float) -> DeepKernelProcess:
    """A copy of a model with Gaussian noise in which noise is a function of the inputs, as yet about constant.

    Args:
        model: Its likelihood is :class:`~deepwishart.likelihoods.Gaussian`.
        num_data: Rows of its data, as often as they count; an inducing point stands for num_data/M of them.
    """
    if not isinstance(model.likelihood, Gaussian):
        raise ValueError(f"Only Gaussian noise can be made to vary, not that of {type(model.likelihood).__name__}.")
    varied, C = copy.deepcopy(model), model.num_outputs
    known, kernel = varied.output.posterior, varied.output.kernel
    likelihood = HeteroscedasticGaussian()
    likelihood.initialise(model.batch_shape, C, known.v)
    likelihood.log_noise.copy_(model.likelihood.log_noise)
    if isinstance(kernel, ScaledKernel):
        likelihood.log_spread.copy_(-kernel.log_height[..., None].expand_as(likelihood.log_spread))
    posterior = GaussianPosterior(torch.cat([known.v, torch.zeros_like(known.v)], -1), shared=False)
    # The curvature of −log N(y; f, σ²e^{τg}) in τg is one half on average.
    log_precision = math.log(0.5 * num_data / known.v.shape[-2]) + 2 * likelihood.log_spread[..., None]
    posterior.log_precision[..., :C, :] = known.log_precision
    posterior.log_precision[..., C:, :] = log_precision
    if not known.diagonal:
        posterior.precision_mixing[..., :C, :, :] = known.precision_mixing
    varied.output = GaussianOutput(kernel, posterior, varied.output.jitter)
    varied.likelihood = likelihood
    return varied


def _noise(likelihood: Gaussian | HeteroscedasticGaussian | StudentT) -> Tensor:
    """The variance of the noise of each output, or the square of its scale."""
    return (2 * likelihood.log_scale if isinstance(likelihood, StudentT) else likelihood.log_noise).exp()


def _set_noise(model: DeepKernelProcess, noise: Tensor, num_data: float) -> None:
    """The noise of each output, and the precision with which inducing points know their targets."""
    likelihood, posterior, log_noise = model.likelihood, model.output.posterior, noise.log()
    if isinstance(likelihood, StudentT):
        likelihood.log_scale.copy_(0.5 * log_noise.expand_as(likelihood.log_scale))
    elif isinstance(likelihood, Gaussian | HeteroscedasticGaussian):
        likelihood.log_noise.copy_(log_noise.expand_as(likelihood.log_noise))
    if posterior.groups in (1, model.num_outputs) or isinstance(likelihood, HeteroscedasticGaussian):
        seen = posterior.log_precision[..., : model.num_outputs, :]
        # One precision for several outputs is that of their mean noise, by logarithms.
        log_noise = log_noise.mean(-1, keepdim=True) if seen.shape[-2] == 1 else log_noise
        seen.copy_((math.log(num_data / seen.shape[-1]) - log_noise[..., None]).expand_as(seen))


def _fit_width(features: Tensor, width: int) -> Tensor:
    """The features of a given width whose Gram matrix is nearest: principal ones, or with zeros beside them."""
    if width < features.shape[-1]:
        U, s, _ = torch.linalg.svd(features, full_matrices=False)
        features = (U * s[..., None, :])[..., :width]
    return nn.functional.pad(features, (0, width - features.shape[-1]))


def _start_wishart(layer: WishartLayer, below: FeatureGram, features: Tensor) -> None:
    """A posterior of F = L W as if features had been F seen through noise: W has precision RRᵀ = I + LᵀL/s²."""
    q, (M, r) = layer.posterior, layer.posterior.loc.shape[-2:]
    L = cholesky(layer.kernel.ii(below), layer.jitter).tril / q.df**0.5
    precision = q.df / _FEATURE_NOISE**2  # in units of the prior's scale, K/ν
    identity = torch.eye(M, dtype=L.dtype, device=L.device)
    R = cholesky(identity + precision * (L.mT @ L), jitter=0.0)
    mean = R.solve(precision * (L.mT @ _fit_width(features, r)))
    # W = mean + R⁻ᵀ N with normal N, and W = front T: front and the spread of T hold what they can of R⁻ᵀ.
    front, spread = _start_whitened(q, R.tril_inverse.mT) if q.whitened else _start_mixed(q, L, R.tril_inverse.mT)
    W = torch.linalg.solve_triangular(front, mean, upper=False)
    # Turned so that the first r rows are lower triangular with a positive diagonal: the Gram matrix does not change.
    Q, upper = torch.linalg.qr(W[..., :r, :].mT)
    T = W @ (Q * torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None, :])
    q.loc.copy_(T)
    # T_jj² in units of its spread has the mean of a χ² with ν − j degrees of freedom and the noncentrality t².
    t = T[..., :r, :].diagonal(dim1=-2, dim2=-1) / spread[..., :r]
    q.log_concentration.copy_((standard_concentration(q.df, r, t) + 0.5 * t**2).log())
    q.log_rate.copy_(math.log(0.5) - 2 * spread[..., :r].log())
    q.log_scale.copy_(spread.log()[..., None].expand_as(q.log_scale))


def _start_whitened(q: WishartPosterior, root: Tensor) -> tuple[Tensor, Tensor]:
    """V is the root of the covariance; T has unit spread."""
    q.V.copy_(root)
    q.q_logit.copy_(torch.full_like(q.q_logit, 1 - _PRIOR_SHARE).logit())
    rest, added = q.tensors.scale_parts
    return cholesky(add_to_diagonal(added, rest), jitter=0.0).tril, torch.ones_like(root[..., 0])


def _start_mixed(q: WishartPosterior, prior_tril: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Ψ is S, and follows it: a V of its own would not, and small steps of the kernel would tear the two apart.

    T has the spreads that are best for entries without correlation, one over the root of the precision's diagonal. A′
    could hold the correlations, but those of one S, while S varies from sample to sample in all layers but the first.
    """
    if not q.relative:
        raise ValueError("A GP gives a start to the initialisations “prior” and “whitened” alone.")
    identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device).expand_as(root)
    q.get_buffer("V_unit").copy_(prior_tril)
    q.V.copy_(identity)
    q.q_logit.copy_(torch.full_like(q.q_logit, _PRIOR_SHARE).logit())
    inverse = torch.linalg.solve_triangular(root, identity, upper=True)
    return identity, (inverse**2).sum(-2).rsqrt()
