"""Closed-form KL divergences, registered with torch.distributions, and the log-density ratio that they average."""

import math

import torch
from torch import Tensor
from torch.distributions import register_kl

from deepwishart.distributions.bartlett import Bartlett
from deepwishart.distributions.bartlett_wishart import BartlettWishart
from deepwishart.distributions.base import PSDDistribution
from deepwishart.distributions.inverse_wishart import InverseWishart
from deepwishart.distributions.wishart import Wishart
from deepwishart.linalg import column_norms, half_logdet

__all__ = ["kl_inverse_wishart", "kl_wishart", "log_density_ratio"]


@register_kl(BartlettWishart, Wishart)
def kl_wishart(q: BartlettWishart, p: Wishart) -> Tensor:
    r"""KL(q ‖ p) for q a Wishart, GW, A-GW or AB-GW: the entries of T are independent, so nothing is sampled.

    .. math:: \mathrm{KL} = \mathbb{E}\Big[\log\frac{q(T)}{p_0(T)} - \tfrac12\lVert T\rVert^2\Big]
        + \tfrac12\mathbb{E}\lVert L_S^{-1} A T B\rVert^2 - \nu\log|\det L_S^{-1}A| - \sum_j(\nu+P-2j+1)\log|B_{jj}|

    where :math:`p_0` is the standard Bartlett density and :math:`S = L_S L_S^\top` the scale of p.
    """
    _require_common_support(q, p)
    quadratic = _expected_trace(q, p)
    logabsdet = q.rows.logabsdet - p.rows.logabsdet
    # p.df stands for both: where the two differ, both have full rank, and q's density does not depend on q.df.
    kl = q.bartlett.kl_to_base_measure(p.df) + 0.5 * quadratic - p.df * logabsdet - q.column_mixing_logjacobian(p.df)
    return kl.expand(torch.broadcast_shapes(q.batch_shape, p.batch_shape))


def log_density_ratio(p: PSDDistribution, q: PSDDistribution, T: Tensor, F: Tensor) -> Tensor:
    r"""log p(G) − log q(G) at G = F Fᵀ for a pair (T, F) from ``q.rsample_bartlett``.

    Its expectation under q is −KL(q ‖ p). No minor of G is needed, and it stays accurate in float32, where the
    difference of two log-densities does not.

    Args:
        p: A Wishart, or an inverse Wishart.
        q: A Wishart, GW, A-GW or AB-GW beside a Wishart; an inverse Wishart beside an inverse Wishart.
        T: Bartlett factor of a sample of q, shape ``(*sample, *batch, P, r)``.
        F: The sample's features, same shape.
    """
    if isinstance(p, InverseWishart) and isinstance(q, InverseWishart):
        ratio = _log_ratio_inverse_wishart(p, q, T)
    elif isinstance(p, Wishart) and isinstance(q, BartlettWishart):
        ratio = _log_ratio_wishart(p, q, T, F)
    else:
        raise ValueError(
            f"p must be a Wishart and q a Wishart, GW, A-GW or AB-GW, or both inverse Wisharts, got p = {p!r} and "
            f"q = {q!r}."
        )
    return ratio.expand(torch.broadcast_shapes(ratio.shape, q.batch_shape, p.batch_shape))


def _log_ratio_wishart(p: Wishart, q: BartlettWishart, T: Tensor, F: Tensor) -> Tensor:
    r"""The ratio of a Wishart and a generalised Wishart.

    .. math:: \log\frac{p(G)}{q(G)} = \log\frac{p_0(T)}{q(T)} + \tfrac12(\lVert T\rVert^2 - \lVert L_S^{-1}F\rVert^2)
        + \nu\log|\det L_S^{-1}A| + \sum_j(\nu+P-2j+1)\log|B_{jj}|
    """
    _require_common_support(q, p)
    trace = (p.whiten(F) ** 2).sum((-2, -1))
    logabsdet = q.rows.logabsdet - p.rows.logabsdet
    standard = Bartlett.standard(p.df, p.event_shape[-1], F)
    log_ratio_T = standard.log_prob(T) - q.bartlett.log_prob(T) + 0.5 * (T**2).sum((-2, -1))
    return log_ratio_T - 0.5 * trace + p.df * logabsdet + q.column_mixing_logjacobian(p.df)


def _log_ratio_inverse_wishart(p: InverseWishart, q: InverseWishart, N: Tensor) -> Tensor:
    r"""The ratio of two inverse Wisharts, p with index 0 and q with index 1.

    .. math:: \log\frac{p(G)}{q(G)} = \tfrac{\nu_0}2\log\frac{|\Psi_0|}{|\Psi_1|} - (\nu_1-\nu_0)\sum_j\log N_{jj}
        + \tfrac12\lVert N\rVert^2 - \tfrac12\lVert N^\top L_1^{-1}L_0\rVert^2 + (\nu_1-\nu_0)\tfrac P2\log 2
        + \log\frac{\Gamma_P(\nu_1/2)}{\Gamma_P(\nu_0/2)}
    """
    _require_common_support(q, p)
    P = q.event_shape[-1]
    nu1, nu0 = q._nu, p._nu
    whitened = N.mT @ q.rows.whiten(p.rows.matrix)
    return (
        nu0 * (p.rows.logabsdet - q.rows.logabsdet)
        - (nu1 - nu0) * (half_logdet(N) - 0.5 * P * math.log(2))
        + 0.5 * ((N**2).sum((-2, -1)) - (whitened**2).sum((-2, -1)))
        + torch.mvlgamma(0.5 * nu1, P)
        - torch.mvlgamma(0.5 * nu0, P)
    )


@register_kl(InverseWishart, InverseWishart)
def kl_inverse_wishart(q: InverseWishart, p: InverseWishart) -> Tensor:
    """KL between two inverse Wisharts of any degrees of freedom above P − 1."""
    _require_common_support(q, p)
    P = q.event_shape[-1]
    nu1, nu0 = q._nu, p._nu
    trace = (q.rows.whiten(p.rows.matrix) ** 2).sum((-2, -1))  # ‖L1⁻¹L0‖² = tr(Ψ1⁻¹Ψ0)
    mvdigamma = q.bartlett.concentration.digamma().sum(-1)
    kl = (
        nu0 * (q.rows.logabsdet - p.rows.logabsdet)
        + torch.mvlgamma(0.5 * nu0, P)
        - torch.mvlgamma(0.5 * nu1, P)
        + 0.5 * (nu1 - nu0) * mvdigamma
        + 0.5 * nu1 * (trace - P)
    )
    return kl.expand(torch.broadcast_shapes(q.batch_shape, p.batch_shape))


def _expected_trace(q: BartlettWishart, p: Wishart) -> Tensor:
    """E_q[tr(S⁻¹G)] = ‖A_w M B‖² + Σ_i (A_wᵀA_w)_ii (V h)_i, with A_w = L_S⁻¹A and the moments M, V of T."""
    A_w, (M, V) = p.whiten(q.rows.matrix), q.bartlett.mean_and_variance
    mean_part = A_w @ q.mix_columns(M)
    return column_norms(mean_part).sum(-1) + (column_norms(A_w) * q.column_noise(V)).sum(-1)


def _require_common_support(q: PSDDistribution, p: PSDDistribution) -> None:
    if q.event_shape != p.event_shape:
        raise ValueError(
            f"Two distributions can be compared over matrices of one size, got {tuple(q.event_shape)} and "
            f"{tuple(p.event_shape)}."
        )
    if q.rank != p.rank:
        raise ValueError(
            f"Two distributions can be compared over matrices of one rank, got {q!r} and {p!r}: the KL divergence is "
            f"infinite. Give both the same df."
        )
    if q.rows.matrix.dtype != p.rows.matrix.dtype:
        raise ValueError(
            f"Two distributions can be compared in one dtype, got {q.rows.matrix.dtype} and {p.rows.matrix.dtype}."
        )
    try:
        torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    except RuntimeError:
        raise ValueError(
            f"The batch shapes must broadcast, got {tuple(q.batch_shape)} and {tuple(p.batch_shape)}."
        ) from None
