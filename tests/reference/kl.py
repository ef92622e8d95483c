"""The KL divergence between a generalised Wishart and a Wishart, as five separate sums. Slow and obvious."""

import torch
from torch import Tensor

from deepwishart.distributions.bartlett_wishart import BartlettWishart


def kl_as_in_the_note(q: BartlettWishart, L: Tensor) -> float:
    """Gamma and Gaussian divergences of T from its standard law, then what mixing and scale add."""
    nu, P, r = q.df, q.event_shape[-1], q.rank
    b = q.bartlett
    A_w = torch.linalg.inv(L) @ q.rows.matrix
    B = q.mix_columns(torch.eye(r, dtype=L.dtype))
    total = 0.0
    for j in range(1, r + 1):
        alpha, beta, a = b.concentration[j - 1], b.rate[j - 1], torch.tensor((nu - j + 1) / 2, dtype=L.dtype)
        gamma = torch.distributions.kl_divergence(
            torch.distributions.Gamma(alpha, beta), torch.distributions.Gamma(a, torch.full_like(a, 0.5))
        )
        total += gamma.item()
        for i in range(j, P):
            normal = torch.distributions.kl_divergence(
                torch.distributions.Normal(b.loc[i, j - 1], b.scale[i, j - 1]),
                torch.distributions.Normal(torch.zeros_like(a), torch.ones_like(a)),
            )
            total += normal.item()
        total -= (nu + P - 2 * j + 1) * B[j - 1, j - 1].abs().log().item()
    M, V = b.mean, b.variance
    h = (B**2).sum(1)
    quadratic = ((A_w @ M @ B) ** 2).sum() + ((A_w.mT @ A_w).diagonal() * (V @ h)).sum() - (M**2 + V).sum()
    return total + 0.5 * quadratic.item() - nu * torch.linalg.slogdet(A_w).logabsdet.item()
