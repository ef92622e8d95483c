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

from deepwishart.products import product
from deepwishart.products.projection import Projection, project, pull_back_projection

__all__ = ["exp_of_product", "project_exp_of_product"]


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
        # The means' maps below W: by themselves their few rows would cost one more pass over k.
        maps = torch.cat([W, product(X.mT, W)], -2)
        found = project(P, p, cap, maps)
        ctx.save_for_backward(P, p, maps, X, *found)
        return found.seen[..., W.shape[-2] :, :], found.norms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, mean_bar: Tensor, norms_bar: Tensor) -> tuple[Tensor | None, ...]:
        P, p, maps, X, *found = ctx.saved_tensors
        M = X.shape[-2]
        maps_bar, P_bar, p_bar = pull_back_projection(P, p, maps, Projection(*found), norms_bar, mean_bar, against="k")
        XW_bar = maps_bar[..., M:, :]
        W_bar = maps_bar[..., :M, :] + product(X, XW_bar)
        return P_bar, p_bar, W_bar, product(maps[..., :M, :], XW_bar.mT), None
