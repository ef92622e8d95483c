"""The distributions on kernels of real data: 100 rows of each of the nine sets, widths as in the paper."""

import torch
from torch import Tensor
from torch.distributions import kl_divergence

from deepwishart.distributions import ABGeneralizedWishart, Wishart, log_density_ratio
from deepwishart.linalg import checked_cholesky
from tests.distributions.instances import generator


def test_sampling_density_and_kl_on_real_kernels(uci_inputs: Tensor) -> None:
    M, df = 100, uci_inputs.shape[1]
    X = uci_inputs[torch.randperm(len(uci_inputs), generator=generator(0))[:M]]
    K = (-0.5 * torch.cdist(X, X) ** 2 / df).exp()
    factor = checked_cholesky(K / df)
    prior = Wishart(df, factor.tril, scale_tril_inverse=factor.tril_inverse)
    A = factor.tril @ torch.linalg.matrix_exp(0.01 * torch.randn(M, M, dtype=torch.float64, generator=generator(1)))
    steps = torch.arange(df, dtype=torch.float64)
    posterior = ABGeneralizedWishart(
        df,
        A,
        torch.eye(df, dtype=torch.float64) + 0.05 * torch.ones(df, df, dtype=torch.float64).tril(-1),
        (df - steps) / 2,
        torch.full((df,), 0.5, dtype=torch.float64),
        torch.full((M, df), 0.05, dtype=torch.float64),
        torch.full((M, df), 0.95, dtype=torch.float64),
    )
    T, F = posterior.rsample_bartlett((400,), generator(2))
    ratio = log_density_ratio(prior, posterior, T, F)
    kl = kl_divergence(posterior, prior)
    assert kl > 0
    assert abs(kl + ratio.mean()) < 5 * ratio.std() / 400**0.5
    # The matrix path agrees with the factor path to what the conditioning of the first ν rows leaves.
    G = F[:5] @ F[:5].mT
    torch.testing.assert_close(posterior.log_prob(G), posterior.log_prob_bartlett(T[:5], F[:5]), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(prior.mean, K + factor.jitter * df * torch.eye(M, dtype=torch.float64))
