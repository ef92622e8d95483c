r"""The matrices of a squared exponential kernel of features, and the way back from their gradients.

With features F and f, :math:`k_{it} = \exp(P p)` for :math:`P = [F/\lambda, -\tfrac12 g_{ii}/\lambda^2, 1]` and
:math:`p = [f/\lambda, 1, 2\log h - \tfrac12 g_{tt}/\lambda^2]^\top`: the exponent is a product of two thin matrices.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deepwishart.products import call, exponential_of_product, product, usable_library
from deepwishart.products.samples import share, total

__all__ = ["KernelMatrices", "thin_factors"]


class KernelMatrices(NamedTuple):
    """K_ii = exp(P Q) + δI, with the factors of its exponents and of those of k_it = exp(P p)."""

    P: Tensor
    Q: Tensor
    p: Tensor
    K: Tensor
    cap: Tensor  # the largest exponent, that of a point with itself
    variance: Tensor  # h², shape (R)
    inverse_lengthscale: Tensor  # shape (R)

    @classmethod
    def of(
        cls, F: Tensor, f: Tensor, tt: Tensor, log_height: Tensor, log_lengthscale: Tensor, jitter: Tensor
    ) -> "KernelMatrices":
        """From features and parameters, as :class:`deepwishart.layers.fused.Fusable` has them."""
        (B, M, c), N, R = F.shape, f.shape[-1], log_height.shape[0]
        inverse, variance = (-log_lengthscale).exp(), (2 * log_height).exp()
        cap, diagonal = share(2 * log_height, B)[..., None, None], variance * (1 + jitter)
        library = usable_library(F, f, tt, log_height, log_lengthscale, jitter)
        if library is not None:
            P, Q_transposed, p, K = (F.new_empty(B, *shape) for shape in ((M, c + 2), (M, c + 2), (c + 2, N), (M, M)))
            inputs = (x.contiguous() for x in (F, f, tt, 2 * log_height, inverse, diagonal))
            call(library.kernel_matrices, B, B // R, M, c, N, *inputs, P, Q_transposed, p, K)
            return cls(P, Q_transposed.mT, p, K, cap, variance, inverse)
        P, Q, p = thin_factors(F, f, tt, share(inverse, B)[..., None, None], cap)
        # Rounding may carry an exponent past the largest, and that one off.
        K = exponential_of_product(P, Q, cap)
        K.diagonal(dim1=-2, dim2=-1).copy_(share(diagonal, B)[..., None])
        return cls(P, Q, p, K, cap, variance, inverse)

    def pull_back(self, K_bar: Tensor, P_bar: Tensor, p_bar: Tensor, tt: Tensor, jitter: Tensor) -> tuple[Tensor, ...]:
        """Gradients of F, f, tt, log h and log λ from those of K, and of P and p by way of k; K̄ and P̄ are used up."""
        P, Q, p, K, _, variance, inverse = self
        (B, M, width), N, R = P.shape, p.shape[-1], variance.shape[0]
        c = width - 2
        library = usable_library(P, p, K_bar, P_bar, p_bar, tt, jitter)
        if library is not None:
            found = [P.new_empty(B, *shape) for shape in ((M, c), (c, N), (N,), (), ())]
            inputs = (x.contiguous() for x in (P, Q.mT, p, K, tt, inverse, variance, jitter, K_bar, P_bar, p_bar))
            call(library.pull_back_kernel, B, B // R, M, c, N, *inputs, *found)
            *of_features, height_bar, lengthscale_bar = found
            return *of_features, total(height_bar, R), total(lengthscale_bar, R)
        diagonal = K_bar.diagonal(dim1=-2, dim2=-1)
        traces = diagonal.sum(-1)
        on_diagonal = diagonal * share(variance, B)[..., None]
        E = K_bar.mul_(K)
        E.diagonal(dim1=-2, dim2=-1).copy_(on_diagonal)
        Q_bar = product(P.mT, E)
        P_bar = product(E, Q.mT, into=P_bar.contiguous())
        F = P[..., :c]
        F_bar = P_bar[..., :c] + Q_bar[:, :c].mT
        F_bar -= F * (P_bar[..., c] + Q_bar[:, c + 1])[..., None]
        f_bar, last_bar = p_bar[:, :c], p_bar[:, c + 1]
        inverse_s = share(inverse, B)[..., None, None]
        tt_bar = last_bar * (-0.5 * inverse_s * inverse_s)[..., 0]
        by_height = last_bar.sum(-1) + Q_bar[:, c + 1].sum(-1) + share(jitter * variance, B) * traces
        by_lengthscale = (F * F_bar).sum((-2, -1)) + (p[:, :c] * f_bar).sum((-2, -1)) + 2 * (tt * tt_bar).sum(-1)
        return F_bar * inverse_s, f_bar * inverse_s, tt_bar, 2 * total(by_height, R), -total(by_lengthscale, R)


def thin_factors(
    F: Tensor, f: Tensor, tt: Tensor, inverse_lengthscale: Tensor, two_log_height: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """P, Q, p with k_ii = exp(P Q) and k_it = exp(P p).

    They are [F/λ, −½‖F‖²/λ², 1], and for inducing and other points [f/λ, 1, 2 log h − ½‖f‖²/λ²]ᵀ.

    Args:
        F: Features of inducing points, shape ``(*batch, M, r)``.
        f: Those of other points, shape ``(*batch, r, N)``.
        tt: ‖f‖² or more, shape ``(*batch, N)``.
        inverse_lengthscale: 1/λ, broadcasts to ``(*batch, 1, 1)``.
        two_log_height: 2 log h, likewise.
    """
    F = F * inverse_lengthscale
    half_norms = -0.5 * (F * F).sum(-1, keepdim=True)
    last = torch.addcmul(two_log_height, tt[..., None, :], inverse_lengthscale * inverse_lengthscale, value=-0.5)
    P = torch.cat([F, half_norms, torch.ones_like(half_norms)], -1)
    Q = torch.cat([F, torch.ones_like(half_norms), half_norms + two_log_height], -1).mT
    return P, Q, torch.cat([f * inverse_lengthscale, torch.ones_like(last), last], -2)
