"""What the parts of a step share that work on the same matrices of many samples.

Tensors have shape ``(B, ·, ·)``, where B counts replicas and within them samples, and what samples share ``(R, ·, ·)``.
The C library takes small matrices sample by sample, so that what is made of a sample stays near its core; large ones
are done product by product, each spread over all cores. How many samples there are has no say in it: a replica has the
same bits alone and in company.
"""

import ctypes

from torch import Tensor

from deepwishart.products import product, usable_library

__all__ = ["library_for_small", "pull_back_factor", "share", "total"]

_SMALL = 160


def library_for_small(*matrices: Tensor) -> ctypes.CDLL | None:
    """The C library, if these matrices are to be taken sample by sample; the first is square."""
    return usable_library(*matrices) if matrices[0].shape[-1] <= _SMALL else None


def pull_back_factor(L_inverse: Tensor, inner: Tensor, half_logdet_bar: Tensor) -> Tensor:
    r"""A gradient of K = L Lᵀ, :math:`J^\top \Phi(L^\top\bar L - \bar J J^\top) J`.

    See :func:`deepwishart.linalg.pull_back`. It is not symmetric, which makes no difference to what a symmetric K is
    made from. ``inner`` is used up.
    """
    diagonal = inner.tril_().diagonal(dim1=-2, dim2=-1)
    diagonal.add_(half_logdet_bar[..., None]).mul_(0.5)
    return product(L_inverse.mT, product(inner, L_inverse))


def share(x: Tensor, B: int) -> Tensor:
    """What samples share, (R, …), so that it broadcasts against (B, …)."""
    R = x.shape[0]
    return x[0] if R == 1 else x.repeat_interleave(B // R, 0)


def total(x: Tensor, R: int) -> Tensor:
    """The sum over samples: (B, …) → (R, …)."""
    return x.unflatten(0, (R, -1)).sum(1)
