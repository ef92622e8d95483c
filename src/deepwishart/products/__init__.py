"""Products and factors of many small matrices, the bulk of a step of training.

On a CPU and in float64, C code of our own does them where it could be compiled (:mod:`deepwishart.products.native`); it
knows zeros when it meets them, so that a triangular matrix costs half, and does what follows a product on the way.
Elsewhere, and where a gradient is to be taken through them, torch does. The results are the same but for rounding.
[docs/performance.md]

Tensors have shape ``(*batch, ·, ·)``; batch dimensions broadcast.
"""

import ctypes

import torch
from torch import Tensor

from deepwishart.products.native import load

__all__ = [
    "exponential_of_product",
    "inverse_factor",
    "inverse_tril",
    "product",
]


def product(
    A: Tensor, B: Tensor, *, alpha: float = 1.0, into: Tensor | None = None, lower: bool = False
) -> Tensor:
    """α A B, or ``into`` + α A B in its place.

    Args:
        A: Shape ``(*batch, m, k)``.
        B: Shape ``(*batch, k, n)``.
        alpha: α.
        into: What the product is added to, shape ``(B, m, n)``; it is changed.
        lower: Whether only the lower triangle is needed: what is above it means nothing.
    """
    library = usable_library(A, B)
    if library is None or (into is not None and into.stride(-1) != 1):
        if into is not None:
            return into.baddbmm_(A.expand(len(into), -1, -1), B.expand(len(into), -1, -1), alpha=alpha)
        C = A @ B
        return C if alpha == 1.0 else C.mul_(alpha)
    return _multiply(library, A, B, into, alpha, lower)


def exponential_of_product(A: Tensor, B: Tensor, cap: Tensor) -> Tensor:
    """exp(min(A B, cap)), entry by entry.

    Args:
        A: Shape ``(*batch, m, k)``.
        B: Shape ``(*batch, k, n)``.
        cap: Shape ``(*batch, 1, 1)``.
    """
    library = usable_library(A, B)
    if library is None:
        return (A @ B).clamp_(max=cap).exp_()
    return _multiply(library, A, B, cap=cap)


def inverse_factor(K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L and L⁻¹ of K = L Lᵀ, without gradients, and what is not zero where there is no factor, shape ``(*batch)``.

    Nothing looks at the last on the way, so nothing synchronises a device.
    """
    library = usable_library(K, K)
    if library is None:
        L, info = torch.linalg.cholesky_ex(K, check_errors=False)
        return L, inverse_tril(L), info
    *batch, n, _ = K.shape
    L, J = (torch.empty(K.shape, dtype=K.dtype) for _ in range(2))
    info = torch.empty(batch, dtype=torch.int64)
    flat = K.reshape(-1, n, n)
    outputs = (L.data_ptr(), J.data_ptr(), info.data_ptr())
    require_memory(library.inverse_factor(len(flat), n, flat.data_ptr(), *flat.stride(), *outputs))
    return L, J, info


def inverse_tril(tril: Tensor) -> Tensor:
    """Inverse of a lower-triangular matrix."""
    identity = torch.eye(tril.shape[-1], dtype=tril.dtype, device=tril.device)
    return torch.linalg.solve_triangular(tril, identity.expand_as(tril), upper=False)


def usable_library(A: Tensor, B: Tensor) -> ctypes.CDLL | None:
    """The library, if it can do this."""
    if torch.compiler.is_compiling() or not (A.is_cpu and A.dtype == B.dtype == torch.float64):
        return None
    if torch.is_grad_enabled() and (A.requires_grad or B.requires_grad):
        return None
    return load().library


def _multiply(
    library: ctypes.CDLL,
    A: Tensor,
    B: Tensor,
    into: Tensor | None = None,
    alpha: float = 1.0,
    lower: bool = False,
    cap: Tensor | None = None,
) -> Tensor:
    (m, k), n, batch = A.shape[-2:], B.shape[-1], _batch_shape(A, B)
    C = A.new_empty(*batch, m, n) if into is None else into
    A, B = _one_batch(A, batch), _one_batch(B, batch)
    cap = None if cap is None else cap.expand(*batch, 1, 1).reshape(-1)
    failed = library.product(
        *(batch.numel(), m, n, k),
        *(A.data_ptr(), *A.stride()),
        *(B.data_ptr(), *B.stride()),
        *(C.data_ptr(), 0 if C.ndim == 2 else C.stride(-3), C.stride(-2)),
        *(alpha, into is not None, lower),
        *((None, 0) if cap is None else (cap.data_ptr(), *cap.stride())),
    )
    require_memory(failed)
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


def require_memory(failed: int) -> None:
    if failed:
        raise MemoryError("There is not enough memory for a product of matrices. Use fewer samples or smaller batches.")
