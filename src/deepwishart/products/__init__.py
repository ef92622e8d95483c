"""Products and factors of many small matrices, the bulk of a step of training.

On a CPU and in float64, C code of our own does them where it could be compiled (:mod:`deepwishart.products.native`); it
knows zeros when it meets them, so that a triangular matrix costs half, and does what follows a product on the way.
Elsewhere torch does. The results are the same but for rounding. Only :func:`matmul` has a gradient: the others are for
forward and backward passes that are written by hand. [docs/performance.md]

Tensors have shape ``(*batch, ·, ·)``; batch dimensions broadcast.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from deepwishart.products.native import load

__all__ = [
    "exponential_of_product",
    "inverse_factor",
    "inverse_tril",
    "matmul",
    "product",
]


def product(A: Tensor, B: Tensor, *, alpha: float = 1.0, into: Tensor | None = None, lower: bool = False) -> Tensor:
    """α A B, or ``into`` + α A B in its place.

    Args:
        A: Shape ``(*batch, m, k)``.
        B: Shape ``(*batch, k, n)``.
        alpha: α.
        into: What the product is added to, shape ``(B, m, n)``; it is changed.
        lower: Whether only the lower triangle is needed: what is above it means nothing.
    """
    library = _library_for_product(A, B, into)
    if library is not None:
        return _multiply(library, A, B, into, alpha, lower)
    if into is not None:
        return into.baddbmm_(A.expand(len(into), -1, -1), B.expand(len(into), -1, -1), alpha=alpha)
    C = A @ B
    return C if alpha == 1.0 else C.mul_(alpha)


def matmul(A: Tensor, B: Tensor) -> Tensor:
    """A B, with gradients of any order.

    Args:
        A: Shape ``(*batch, m, k)``.
        B: Shape ``(*batch, k, n)``.
    """
    if _library(A, B) is None or A.shape[-1] != B.shape[-2]:
        return A @ B
    C: Tensor = _Matmul.apply(A, B)
    return C


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor) -> Tensor:
        ctx.save_for_backward(A, B)
        return product(A, B)

    @staticmethod
    def backward(ctx: Any, C_bar: Tensor) -> tuple[Tensor | None, ...]:
        (A, B), (of_A, of_B) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            matmul(C_bar, B.mT).sum_to_size(A.shape) if of_A else None,
            matmul(A.mT, C_bar).sum_to_size(B.shape) if of_B else None,
        )


def exponential_of_product(A: Tensor, B: Tensor, cap: Tensor) -> Tensor:
    """exp(min(A B, cap)), entry by entry.

    Args:
        A: Shape ``(*batch, m, k)``.
        B: Shape ``(*batch, k, n)``.
        cap: Shape ``(*batch, 1, 1)``.
    """
    library = _library_for_product(A, B)
    if library is None:
        return (A @ B).clamp_(max=cap).exp_()
    return _multiply(library, A, B, cap=cap)


def inverse_factor(K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L and L⁻¹ of K = L Lᵀ, without gradients, and Σ log L_ii, shape ``(*batch)``.

    The last is NaN where there is no factor; L and L⁻¹ mean nothing there. Nothing looks at it on the way, so nothing
    synchronises a device.
    """
    library = usable_library(K) if K.shape[-1] == K.shape[-2] else None
    if library is None:
        L, info = torch.linalg.cholesky_ex(K, check_errors=False)
        half_logdet = L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return L, inverse_tril(L), half_logdet.masked_fill(info != 0, torch.nan)
    K = K.contiguous()
    L, J, half_logdet = torch.empty_like(K), torch.empty_like(K), K.new_empty(K.shape[:-2])
    call(library.inverse_factor, half_logdet.numel(), K.shape[-1], K, L, J, half_logdet)
    return L, J, half_logdet


def inverse_tril(tril: Tensor) -> Tensor:
    """Inverse of a lower-triangular matrix."""
    identity = torch.eye(tril.shape[-1], dtype=tril.dtype, device=tril.device)
    return torch.linalg.solve_triangular(tril, identity.expand_as(tril), upper=False)


def usable_library(*tensors: Tensor) -> ctypes.CDLL | None:
    """The library, if it can do this and no gradient has to be taken through it."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    return _library(*tensors)


def _library(*tensors: Tensor) -> ctypes.CDLL | None:
    if torch.compiler.is_compiling() or not all(map(_has_numbers_to_read, tensors)):
        return None
    return load().library


def _has_numbers_to_read(x: Tensor) -> bool:
    """Whether a tensor is doubles in this machine's memory, as they stand there."""
    return x.dtype == torch.float64 and x.is_cpu and type(x) in (Tensor, Parameter) and not (x.is_neg() or x.is_sparse)


def _library_for_product(A: Tensor, B: Tensor, into: Tensor | None = None) -> ctypes.CDLL | None:
    """The library, if these fit together; if they do not, torch says so."""
    if A.shape[-1] != B.shape[-2]:
        return None
    if into is None:
        return usable_library(A, B)
    fits = into.shape[-2:] == (A.shape[-2], B.shape[-1]) and into.stride(-1) == 1
    return usable_library(A, B, into) if fits else None


def call(function: Callable[..., int], *arguments: Tensor | float | None) -> None:
    """Call a function of the library; of tensors, which must be contiguous, it gets the memory."""
    if function(*(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)):
        raise MemoryError("There is not enough memory for a product of matrices. Use fewer samples or smaller batches.")


def _multiply(
    library: ctypes.CDLL,
    A: Tensor,
    B: Tensor,
    into: Tensor | None = None,
    alpha: float = 1.0,
    lower: bool = False,
    cap: Tensor | None = None,
) -> Tensor:
    (m, k), n = A.shape[-2:], B.shape[-1]
    batch = _batch_shape(A, B) if into is None else into.shape[:-2]
    C = A.new_empty(*batch, m, n) if into is None else into
    A, B = _one_batch(A, batch), _one_batch(B, batch)
    cap = None if cap is None else cap.expand(*batch, 1, 1).reshape(-1)
    sizes, strides = (batch.numel(), m, n, k), (0 if C.ndim == 2 else C.stride(-3), C.stride(-2))
    largest = (None, 0) if cap is None else (cap, cap.stride(0))
    finish = (alpha, into is not None, lower, *largest)
    call(library.product, *sizes, A, *A.stride(), B, *B.stride(), C, *strides, *finish)
    return C


def _batch_shape(A: Tensor, B: Tensor) -> torch.Size:
    left, right = A.shape[:-2], B.shape[:-2]
    return left if left == right else torch.broadcast_shapes(left, right)


def _one_batch(X: Tensor, batch: torch.Size) -> Tensor:
    """(*batch, ·, ·), as it broadcasts, with one batch dimension."""
    if X.ndim == 3 and X.shape[:1] == batch:
        return X
    X = X.expand(*batch, *X.shape[-2:])
    return X[None] if X.ndim == 2 else X if X.ndim == 3 else X.flatten(0, -3)
