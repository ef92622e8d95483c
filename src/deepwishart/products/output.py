r"""The part of the output's step among inducing points: from K to what is seen of other points, and the way back.

With :math:`I + \ell^\top K \ell = H H^\top`, :math:`W = H^{-1}\ell^\top` and :math:`z = W^\top W v`, see
:class:`~deepwishart.layers.gaussian.Observed`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deepwishart.products import call, inverse_factor, product
from deepwishart.products.samples import library_for_small, pull_back_factor, share, total

__all__ = ["Output", "make_output", "pull_back_output"]


class Output(NamedTuple):
    """What :func:`make_output` makes.

    Attributes:
        maps: W on top of zᵀ, shape ``(B, M + C, M)``.
        K_ell: K ℓ, shape ``(B, M, M)``.
        H_inverse: H⁻¹.
        z: Shape ``(B, M, C)``.
        half_logdet: log|H|, shape ``(B)``; NaN where there is no factor.
        kl: The divergence, shape ``(B)``.
    """

    maps: Tensor
    K_ell: Tensor
    H_inverse: Tensor
    z: Tensor
    half_logdet: Tensor
    kl: Tensor


def make_output(K: Tensor, ell: Tensor, v: Tensor) -> Output:
    """From the kernel's matrix to maps of other points.

    Args:
        K: Shape ``(B, M, M)``.
        ell: ℓ, shape ``(R, M, M)``.
        v: Shape ``(R, M, C)``.
    """
    (B, M, _), R, columns = K.shape, v.shape[0], v.shape[-1]
    library = library_for_small(K, ell, v)
    if library is not None:
        square, one = (B, M, M), (B,)
        found = Output(*(K.new_empty(x) for x in ((B, M + columns, M), square, square, (B, M, columns), one, one)))
        call(library.make_output, B, B // R, M, columns, K, ell.contiguous(), v.contiguous(), *found)
        return found
    ell = share(ell, B)
    K_ell = product(K, ell)
    HH = product(ell.mT, K_ell, lower=True)
    HH.diagonal(dim1=-2, dim2=-1).add_(1)
    _, H_inverse, half_logdet = inverse_factor(HH)
    W = product(H_inverse, ell.mT)
    z = product(W.mT, product(W, share(v, B)))
    trace = (H_inverse * H_inverse).sum((-2, -1)) - M
    kl = 0.5 * (columns * trace + (z * product(K, z)).sum((-2, -1))) + columns * half_logdet
    return Output(torch.cat([W, z.mT], -2), K_ell, H_inverse, z, half_logdet, kl)


def pull_back_output(
    K: Tensor, ell: Tensor, v: Tensor, found: Output, maps_bar: Tensor, kl_bar: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of K, ℓ and v.

    Args:
        K: As in :func:`make_output`.
        ell: Likewise.
        v: Likewise.
        found: What it returned.
        maps_bar: Shape ``(B, M + C, M)``; it is used up.
        kl_bar: Shape ``(B)``.
    """
    (B, M, _), R, columns = K.shape, v.shape[0], v.shape[-1]
    maps, K_ell, H_inverse, z, *_ = found
    library = library_for_small(K, ell, v, maps_bar, kl_bar)
    if library is not None:
        K_bar, ell_bar, v_bar = torch.empty_like(K), torch.empty_like(K), torch.empty_like(z)
        inputs = (x.contiguous() for x in (K, ell, v, maps, K_ell, H_inverse, z, maps_bar, kl_bar))
        call(library.pull_back_output, B, B // R, M, columns, *inputs, K_bar, ell_bar, v_bar)
        return K_bar, total(ell_bar, R), total(v_bar, R)
    W, ell, v, weight = maps[:, :M], share(ell, B), share(v, B), kl_bar[..., None, None]

    # z = WᵀWv, which also enters the divergence, as ½zᵀKz.
    z_bar = torch.addcmul(maps_bar[:, M:].mT, product(K, z), weight)
    W_z_bar = product(W, z_bar)
    W_bar = product(product(W, v), z_bar.mT, into=maps_bar[:, :M])
    product(W_z_bar, v.mT, into=W_bar)
    v_bar = total(product(W.mT, W_z_bar), R)

    # W = H⁻¹ℓᵀ, where H Hᵀ = I + ℓᵀKℓ; and ½C‖H⁻¹‖² + C log|H|.
    inner = product(W_bar, W.mT, lower=True)
    inner.addcmul_(product(H_inverse, H_inverse.mT, lower=True), columns * weight).neg_()
    HH_bar = pull_back_factor(H_inverse, inner, columns * kl_bar)
    HH_bar += HH_bar.mT.clone()
    ell_bar = total(product(K_ell, HH_bar, into=product(W_bar.mT, H_inverse)), R)
    K_bar = product(weight * z, z.mT, into=product(ell, product(HH_bar, ell.mT))).mul_(0.5)
    return K_bar, ell_bar, v_bar
