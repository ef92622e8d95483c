r"""Exponentials of low-rank matrices: the squared exponential kernel of features, without its large blocks.

With features F and f, :math:`k_{it} = \exp(P p)` for :math:`P = [F/\lambda, -\tfrac12 g_{ii}/\lambda^2, 1]` and
:math:`p = [f/\lambda, 1, 2\log h - \tfrac12 g_{tt}/\lambda^2]^\top`: the exponent is a product of two thin matrices,
and so are all gradients. What lies between, of size M × N for every sample, is made a few samples at a time, so that on
a CPU it stays in the cache from the exponent to the last product. [docs/performance.md]
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["exp_of_product", "project_exp_of_product"]

# Bytes of one intermediate (samples × M × N) that are worked on at a time on a CPU: half of a usual L2 cache.
_CACHE_BYTES = 2**19


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
    batch_shape = P.shape[:-2]
    flat = (x.expand(*batch_shape, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (P, p, W, X))
    mean, norms = _ProjectExpOfProduct.apply(*flat, cap.expand(batch_shape).reshape(-1, 1, 1))
    return mean.reshape(*batch_shape, *mean.shape[1:]), norms.reshape(*batch_shape, -1)


class _ExpOfProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, P: Tensor, p: Tensor, cap: Tensor) -> Tensor:
        K = (P @ p).clamp_(max=cap[..., None, None]).exp_()
        K.diagonal(dim1=-2, dim2=-1).copy_(cap[..., None].exp())
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
        B, M, N = P.shape[0], P.shape[1], p.shape[2]
        keep = any(ctx.needs_input_grad)
        K, a = (P.new_empty(B, M, N) if keep else None for _ in range(2))
        mean, norms = P.new_empty(B, X.shape[-1], N), P.new_empty(B, N)
        for s in _chunks(B, M, N, P):
            k = torch.bmm(P[s], p[s], out=None if K is None else K[s]).clamp_(max=cap[s]).exp_()
            whitened = torch.bmm(W[s], k, out=None if a is None else a[s])
            torch.bmm(X[s].mT, whitened, out=mean[s])
            torch.sum(whitened * whitened, -2, out=norms[s])
        ctx.save_for_backward(P, p, W, X, K, a)
        return mean, norms

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_norms: Tensor) -> tuple[Tensor | None, ...]:
        P, p, W, X, K, a = ctx.saved_tensors
        grad_P, grad_p, grad_W, grad_X = (torch.empty_like(x) for x in (P, p, W, X))
        twice = 2 * grad_norms[..., None, :]
        for s in _chunks(K.shape[0], K.shape[1], K.shape[2], P):
            torch.bmm(a[s], grad_mean[s].mT, out=grad_X[s])
            grad_a = torch.bmm(X[s], grad_mean[s]).addcmul_(a[s], twice[s])
            torch.bmm(grad_a, K[s].mT, out=grad_W[s])
            E = torch.bmm(W[s].mT, grad_a).mul_(K[s])
            torch.bmm(E, p[s].mT, out=grad_P[s])
            torch.bmm(P[s].mT, E, out=grad_p[s])
        return grad_P, grad_p, grad_W, grad_X, None


def _chunks(B: int, M: int, N: int, like: Tensor) -> Iterator[slice]:
    """Slices of the batch whose intermediates fit a CPU's cache; all of it on other devices."""
    if like.device.type == "cpu":
        size = torch.get_num_threads() * max(1, _CACHE_BYTES // max(1, M * N * like.element_size()))
    else:
        size = max(1, B)
    return (slice(start, start + size) for start in range(0, B, size))
