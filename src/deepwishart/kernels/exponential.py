r"""Exponentials of low-rank matrices: the squared exponential kernel of features, without its large blocks.

With features F and f, :math:`k_{it} = \exp(P p)` for :math:`P = [F/\lambda, -\tfrac12 g_{ii}/\lambda^2, 1]` and
:math:`p = [f/\lambda, 1, 2\log h - \tfrac12 g_{tt}/\lambda^2]^\top`: the exponent is a product of two thin matrices,
and so are all gradients. What lies between, of size M × N for every sample, is kept from autograd, which would write
it down in every form that it takes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["exp_of_product", "project", "project_exp_of_product", "pull_back_projection", "thin_factors"]


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


def exp_of_product(P: Tensor, p: Tensor, cap: Tensor) -> Tensor:
    """exp(P p) over the same points in rows and columns, whose largest exponents are on the diagonal.

    Args:
        P: Shape ``(*batch, M, c)``.
        p: Shape ``(*batch, c, M)``.
        cap: The largest exponent, broadcasts to ``(*batch)``. Rounding may carry others past it, and the diagonal off
            it; it has no gradient of its own.
    """
    K: Tensor = _ExpOfProduct.apply(P, p, cap)
    return K


def project_exp_of_product(P: Tensor, p: Tensor, cap: Tensor, W: Tensor, X: Tensor) -> tuple[Tensor, Tensor]:
    """Xᵀa, points last, and ‖a_t‖² of a = W exp(min(P p, cap)).

    Args:
        P: Shape ``(*batch, M, c)``.
        p: Shape ``(*batch, c, N)``.
        cap: The largest exponent, broadcasts to ``(*batch)``; it has no gradient of its own.
        W: Shape ``(*batch, M, M)``.
        X: Shape ``(*batch, M, columns)``.
    """
    mean, norms = _ProjectExpOfProduct.apply(P, p, W, X, cap[..., None, None])
    return mean, norms


class _ExpOfProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, P: Tensor, p: Tensor, cap: Tensor) -> Tensor:
        exponent = (P @ p).clamp_(max=cap[..., None, None])
        exponent.diagonal(dim1=-2, dim2=-1).copy_(cap[..., None])
        K = exponent.exp()  # not in place: compiled by torch 2.11, its gradient would be lost
        ctx.save_for_backward(P, p, K)
        return K

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        P, p, K = ctx.saved_tensors
        E = grad * K
        return E @ p.mT, P.mT @ E, None


class _ProjectExpOfProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, P: Tensor, p: Tensor, W: Tensor, X: Tensor, cap: Tensor) -> tuple[Tensor, Tensor]:
        k = (P @ p).clamp_(max=cap).exp_()
        maps, seen = project(W, X.mT @ W, k)
        ctx.save_for_backward(P, p, maps, X, k, seen)
        M = W.shape[-2]
        a = seen[..., :M, :]
        return seen[..., M:, :], (a * a).sum(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, mean_bar: Tensor, norms_bar: Tensor) -> tuple[Tensor | None, ...]:
        P, p, maps, X, k, seen = ctx.saved_tensors
        M = X.shape[-2]
        seen_bar, k_bar = pull_back_projection(maps, seen, norms_bar, mean_bar)
        E = k_bar.mul_(k)
        maps_bar = seen_bar @ k.mT
        XW_bar = maps_bar[..., M:, :]
        W_bar = maps_bar[..., :M, :] + X @ XW_bar
        return E @ p.mT, P.mT @ E, W_bar, maps[..., :M, :] @ XW_bar.mT, None


def project(W: Tensor, means: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """W on top of the maps of points to their means, and both applied to k.

    Together, since by themselves the few rows of the means would cost one more pass over k.
    """
    maps = torch.cat([W, means], -2)
    return maps, maps @ k


def pull_back_projection(maps: Tensor, seen: Tensor, norms_bar: Tensor, mean_bar: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of what :func:`project` saw and of k, from those of ‖(Wk)_t‖² and of the means."""
    M = seen.shape[-2] - mean_bar.shape[-2]
    a, scale = seen[..., :M, :], (2 * norms_bar)[..., None, :]
    if torch.compiler.is_compiling():  # it refuses out= into a part of a tensor, and makes one pass of this
        seen_bar = torch.cat([a * scale, mean_bar], -2)
    else:
        seen_bar = torch.empty_like(seen)
        torch.mul(a, scale, out=seen_bar[..., :M, :])
        seen_bar[..., M:, :] = mean_bar
    return seen_bar, maps.mT @ seen_bar
