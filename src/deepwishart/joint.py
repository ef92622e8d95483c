"""Joint draws of the latent functions at many points: exact also between points, at the price of their covariance.

Predictions of rows one by one need marginals alone (:mod:`deepwishart.objectives`). Here the conditional covariance of
all points given the inducing points is drawn from in every layer, N × N and factorised for each draw.
"""

import torch
from torch import Tensor, nn

from deepwishart.distributions import InverseWishart
from deepwishart.distributions.noise import standard_normal
from deepwishart.gram import FeatureGram
from deepwishart.layers import InverseWishartLayer
from deepwishart.linalg import Cholesky, absolute_jitter, add_to_diagonal, checked_cholesky, cholesky
from deepwishart.models import DeepKernelProcess
from deepwishart.objectives import check_inputs

__all__ = ["MAX_JOINT_POINTS", "sample_functions"]

MAX_JOINT_POINTS = 2_000


@torch.no_grad()
def sample_functions(
    model: DeepKernelProcess, X: Tensor, num_samples: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """Draws of the latent functions at all rows of X together, shape ``(S, *batch, N, latents)``.

    Args:
        model: A deep kernel process.
        X: Shape ``(*batch, N, D)``, with at most 2,000 rows.
        num_samples: S; each has hidden layers of its own.
        generator: Source of randomness.
    """
    check_inputs(model, X, num_samples)
    if X.shape[-2] > MAX_JOINT_POINTS:
        raise ValueError(f"At most {MAX_JOINT_POINTS} points can be drawn jointly, got {X.shape[-2]}. Pass fewer.")
    M = model.inducing_inputs.shape[-2]
    start = model.input_gram(X)
    features = torch.cat([start.inducing, start.points.mT], -2)
    for layer, noise in zip(model.layers, model.draw_noise(num_samples, 1, generator), strict=True):
        # The layer itself draws its inducing block; one point, which is not used, keeps its shapes.
        inducing = features[..., :M, :]
        above, _ = layer(_gram(inducing, inducing[..., :1, :]), noise)
        features = _extend(layer, features, above.inducing, generator)
    features = features if model.layers else features.expand(num_samples, *features.shape)
    return _sample_output(model, features, M, generator)


def _gram(inducing: Tensor, points: Tensor) -> FeatureGram:
    return FeatureGram(inducing, points.mT, (points * points).sum(-1))


class _Conditional:
    """Of all points given the inducing points, under the kernel of a layer or of the output."""

    def __init__(self, layer: nn.Module, features: Tensor, M: int) -> None:
        K = layer.kernel.ii(_gram(features, features[..., :0, :]))  # type: ignore[operator, union-attr]
        self.ii, self.it, tt = K[..., :M, :M], K[..., :M, M:], K[..., M:, M:]
        self.jitter: Tensor = layer.jitter  # type: ignore[assignment]
        self.white = absolute_jitter(self.ii, self.jitter)  # in ii and tt alike
        self.tt = add_to_diagonal(tt, self.white)

    def root_of_rest(self, cross: Tensor) -> Tensor:
        """Root of K_tt − cross'cross."""
        rest = self.tt - cross.mT @ cross
        return checked_cholesky((rest + rest.mT) / 2, name="conditional covariance of the points").tril


def _extend(layer: nn.Module, features: Tensor, F: Tensor, generator: torch.Generator | None) -> Tensor:
    """Features of the next layer, of inducing points and points, given those of the inducing points."""
    given = _Conditional(layer, features, F.shape[-2])
    K = cholesky(given.ii, given.jitter)
    cross = K.whiten(given.it)
    root = given.root_of_rest(cross)
    if isinstance(layer, InverseWishartLayer):
        return _extend_inverse_wishart(layer, K, cross, root, F, generator)
    nu: int = layer.df  # type: ignore[assignment]
    F = nn.functional.pad(F, (0, nu - F.shape[-1]))  # features that no inducing point has
    mean = cross.mT @ K.whiten(F)
    noise = standard_normal(torch.Size(mean.shape), mean, generator)
    return torch.cat([F, mean + root @ noise / nu**0.5], -2)


def _extend_inverse_wishart(
    layer: InverseWishartLayer, K: Cholesky, cross: Tensor, root: Tensor, F: Tensor, generator: torch.Generator | None
) -> Tensor:
    """The Schur complement is inverse Wishart, and given it G_ii⁻¹G_it is a matrix of normals [A2021]."""
    M, N = cross.shape[-2:]
    delta = layer.log_delta.exp()
    shape = torch.Size(torch.broadcast_shapes(F.shape[:-2], root.shape[:-2]))
    scale = (delta.sqrt()[..., None, None] * root).expand(*shape, N, N)
    rest = InverseWishart((delta + M + N + 1).expand(shape), scale, validate_args=False)
    _, schur = rest.rsample_bartlett(generator=generator)
    noise = standard_normal(torch.Size((*shape, M, N)), F, generator)
    H = K.tril_inverse.mT @ (cross + noise @ schur.mT / delta.sqrt()[..., None, None])
    f = (F.mT @ H).mT
    return torch.cat([nn.functional.pad(F, (0, N)), torch.cat([f, schur], -1)], -2)


def _sample_output(model: DeepKernelProcess, features: Tensor, M: int, generator: torch.Generator | None) -> Tensor:
    given = _Conditional(model.output, features, M)
    q = model.output.posterior.observed(add_to_diagonal(given.ii, given.white))
    draws = []
    for gain, seen in zip(q.gain.unbind(-3), q.seen.unbind(-3), strict=True):
        cross = gain @ given.it
        mean = cross.mT @ seen
        noise = standard_normal(torch.Size(mean.shape), mean, generator)
        draws.append(mean + given.root_of_rest(cross) @ noise)
    return torch.cat(draws, -1)
