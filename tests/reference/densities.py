"""Densities as the papers print them, entry by entry, for one matrix at a time. Slow and obvious."""

import math

import numpy as np
import torch
from scipy import stats
from scipy.special import multigammaln
from torch import Tensor


def log_bartlett(T: Tensor, alpha: Tensor, beta: Tensor, mu: Tensor, sigma: Tensor) -> float:
    """log of the product over j of Gamma(T_jj²; α_j, β_j) and over i > j of N(T_ij; μ_ij, σ_ij²)."""
    P, r = T.shape
    total = 0.0
    for j in range(r):
        total += stats.gamma.logpdf(T[j, j].item() ** 2, alpha[j].item(), scale=1 / beta[j].item())
        for i in range(j + 1, P):
            total += stats.norm.logpdf(T[i, j].item(), mu[i, j].item(), sigma[i, j].item())
    return float(total)


def log_gw(T: Tensor, L: Tensor, nu: int, log_q_T: float) -> float:
    """[O2023, eq. 12]."""
    P, r = T.shape
    total = log_q_T
    for j in range(1, P + 1):
        total -= min(j, nu) * math.log(L[j - 1, j - 1])
    for j in range(1, r + 1):
        total -= (P - j) * math.log(T[j - 1, j - 1]) + (P - j + 1) * math.log(L[j - 1, j - 1])
    return total


def log_ab_gw(T: Tensor, A: Tensor, B: Tensor, nu: int, log_q_T: float) -> float:
    """[O2023, eq. 14, with N read as P]; B = I gives eq. 13. Minors are computed as determinants."""
    P, r = T.shape
    G = A @ T @ B @ B.mT @ T.mT @ A.mT
    C = T @ B @ B.mT @ T.mT
    exponent = (nu - P - 1) / 2
    total = log_q_T + exponent * (_log_minor(G, r) - _log_minor(C, r)) - nu * math.log(abs(torch.linalg.det(A)))
    for j in range(1, r + 1):
        total -= (P - j) * math.log(T[j - 1, j - 1]) + 2 * (P - j + 1) * math.log(abs(B[j - 1, j - 1]))
    return total


def log_wishart(G: Tensor, S: Tensor, nu: int) -> float:
    """[O2023, eq. 30], for any ν ≥ 1."""
    P = G.shape[-1]
    r = min(nu, P)
    return float(
        nu * (r - P) / 2 * math.log(math.pi)
        - nu * P / 2 * math.log(2)
        - nu / 2 * math.log(torch.linalg.det(S))
        - multigammaln(nu / 2, r)
        + (nu - P - 1) / 2 * _log_minor(G, r)
        - 0.5 * np.trace(np.linalg.solve(S.numpy(), G.numpy()))
    )


def recover_bartlett(G: Tensor, A: Tensor, B: Tensor, rank: int) -> Tensor:
    """T from G by a thin Cholesky factor of A⁻¹ G A⁻ᵀ, as the paper describes it, for B of any signs."""
    A_inverse = torch.linalg.inv(A)
    C = A_inverse @ G @ A_inverse.mT
    leading = torch.linalg.cholesky(C[:rank, :rank])
    Lambda = torch.cat([leading, (torch.linalg.inv(leading) @ C[:rank, rank:]).mT])
    return Lambda @ torch.diag(B.diagonal().sign()) @ torch.linalg.inv(B)


def _log_minor(G: Tensor, r: int) -> float:
    return math.log(torch.linalg.det(G[:r, :r]))
