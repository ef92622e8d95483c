r"""The part of a hidden layer's step among inducing points: from the scale of the prior to features, and the way back.

With :math:`K = L L^\top`, :math:`J = L^{-1}`, :math:`\Psi = (1-q)K/\nu + qVV^\top = C C^\top` and
:math:`D = \sqrt{\nu}\, J C`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from deepwishart.products import call, inverse_factor, product
from deepwishart.products.samples import library_for_small, pull_back_factor, share, total

__all__ = ["Scale", "make_scale", "pull_back_scale"]


class Scale(NamedTuple):
    """What :func:`make_scale` makes.

    Attributes:
        maps: J on top of F_wᵀJ, shape ``(B, M + c, M)``.
        C: Shape ``(B, M, M)``.
        C_inverse: C⁻¹.
        D: Shape ``(B, M, M)``.
        DH: D H.
        F_w: D T / √ν, shape ``(B, M, c)``.
        F: C T, features of the next layer.
        trace: E[tr(S⁻¹G)] = tr(DHDᵀ), shape ``(B)``.
        logdet: log|C| − log|L_S|, shape ``(B)``; NaN where there is no factor.
    """

    maps: Tensor
    C: Tensor
    C_inverse: Tensor
    D: Tensor
    DH: Tensor
    F_w: Tensor
    F: Tensor
    trace: Tensor
    logdet: Tensor


def make_scale(K: Tensor, rest: Tensor, added: Tensor, T: Tensor, H: Tensor, df: int) -> Scale:
    """From the kernel's matrix to features.

    Args:
        K: Shape ``(B, M, M)``.
        rest: 1 − q, shape ``(R)``.
        added: qVVᵀ, shape ``(R, M, M)``.
        T: Shape ``(B, M, c)``.
        H: Shape ``(R, M, M)``.
        df: ν.
    """
    (B, M, c), R = T.shape, rest.shape[0]
    library = library_for_small(K, rest, added, T, H)
    if library is not None:
        square, thin, one = (B, M, M), (B, M, c), (B,)
        found = Scale(*(K.new_empty(shape) for shape in ((B, M + c, M), *(square,) * 4, thin, thin, one, one)))
        inputs = (x.contiguous() for x in (K, rest, added, T, H))
        call(library.make_scale, B, B // R, M, c, float(df), *inputs, *found)
        return found
    Psi = torch.addcmul(share(added, B), K, share(rest / df, B)[..., None, None])
    # One call for both: on a GPU it takes as long as for one.
    (_, C), (J, C_inverse), (half_logdet_K, half_logdet_Psi) = inverse_factor(torch.stack([K, Psi]))
    D = product(J, C, alpha=df**0.5)
    DH = product(D, share(H, B))
    F_w = product(D, T, alpha=df**-0.5)
    maps = torch.cat([J, product(F_w.mT, J)], -2)
    logdet = half_logdet_Psi - half_logdet_K + 0.5 * M * math.log(df)
    return Scale(maps, C, C_inverse, D, DH, F_w, product(C, T), (D * DH).sum((-2, -1)), logdet)


def pull_back_scale(
    K: Tensor,
    rest: Tensor,
    T: Tensor,
    found: Scale,
    against_a: Tensor,
    F_bar: Tensor,
    trace_bar: Tensor,
    logdet_bar: Tensor,
    df: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of K, rest, added, T and H; that of K is not symmetric, which makes no difference to a symmetric K.

    Args:
        K: As in :func:`make_scale`.
        rest: Likewise.
        T: Likewise.
        found: What it returned.
        against_a: The lower triangle of J̄Jᵀ, as far as it comes from what J maps, on top of F̄_wᵀ; shape
            ``(B, M + c, M)``. It is used up.
        F_bar: Shape ``(B, M, c)``.
        trace_bar: Shape ``(B)``.
        logdet_bar: Shape ``(B)``.
        df: ν.
    """
    (B, M, c), R, root = T.shape, rest.shape[0], df**0.5
    maps, C, C_inverse, D, DH, F_w, *_ = found
    library = library_for_small(K, rest, T, against_a, F_bar, trace_bar, logdet_bar)
    if library is not None:
        square, thin, one = (B, M, M), (B, M, c), (B,)
        K_bar, rest_bar, added_bar, T_bar, H_bar = (K.new_empty(shape) for shape in (square, one, square, thin, square))
        inputs = (K, rest, T, maps, C, C_inverse, D, DH, F_w, against_a, F_bar, trace_bar, logdet_bar)
        outputs = (K_bar, rest_bar, added_bar, T_bar, H_bar)
        call(library.pull_back_scale, B, B // R, M, c, float(df), *(x.contiguous() for x in inputs), *outputs)
        return K_bar, total(rest_bar, R), total(added_bar, R), T_bar, total(H_bar, R)
    J, weight = maps[:, :M], trace_bar[..., None, None]
    F_w_bar = against_a[:, M:].mT
    JJ_bar = product(F_w, F_w_bar.mT, into=against_a[:, :M], lower=True)

    # tr(DHDᵀ) and F_w = DT/√ν, with D = √ν JC; F = CT. Of C̄ no more is needed than CᵀC̄.
    D_bar = product(F_w_bar, T.mT, alpha=1 / root, into=DH * (2 * weight), lower=True)
    H_bar = product(_fold_samples(D, R).mT, _fold_samples(D * weight, R))
    C_F_bar = product(C.mT, F_bar)
    T_bar = product(D.mT, F_w_bar, alpha=1 / root, into=C_F_bar.clone())
    product(D_bar, D.mT, into=JJ_bar, lower=True)
    CC_bar = product(C_F_bar, T.mT, into=product(D.mT, D_bar, lower=True), lower=True)

    # C Cᵀ = Ψ = (1 − q)K/ν + qVVᵀ.
    Psi_bar = pull_back_factor(C_inverse, CC_bar, logdet_bar)
    rest_bar = total((Psi_bar * K).sum((-2, -1)), R) / df
    K_bar = pull_back_factor(J, JJ_bar.neg_(), -logdet_bar)
    K_bar.addcmul_(Psi_bar, share(rest / df, B)[..., None, None])
    return K_bar, rest_bar, total(Psi_bar, R), T_bar, H_bar


def _fold_samples(x: Tensor, R: int) -> Tensor:
    """(B, M, ·) → (R, samples · M, ·)."""
    return x.reshape(R, -1, x.shape[-1])
