"""Algorithm 1 of the paper, written down: plain eager torch, factors by solves, gradients by autograd.

One model (no replicas), A-GW posteriors, squared exponential kernels, a Gaussian likelihood. It is what a careful
reader of the paper would write in an afternoon, batched over samples; `benchmarks/step_time.py` measures the library
against it, and `tests/layers/test_fused.py` checks that both compute the same bound.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Gamma

from deepwishart.layers import WishartLayer
from deepwishart.models import DeepKernelProcess

__all__ = ["Layer", "Model", "elbo", "parameters", "textbook"]


class Layer(NamedTuple):
    """Parameters of a Wishart layer: kernel, Ψ, A′ and the Bartlett factor."""

    df: int
    log_height: Tensor
    log_lengthscale: Tensor
    V: Tensor
    q_logit: Tensor
    lower: Tensor  # A′ is a unit lower times a unit upper triangular matrix
    upper: Tensor
    log_alpha: Tensor
    log_beta: Tensor
    mu: Tensor
    log_sigma: Tensor


class Model(NamedTuple):
    """Inducing inputs, hidden layers, and the Gaussian process on top with a Gaussian likelihood."""

    Z: Tensor
    log_input_lengthscale: Tensor
    layers: list[Layer]
    log_height: Tensor
    log_lengthscale: Tensor
    v: Tensor
    precision_root: Tensor
    log_noise: Tensor  # log σ²
    jitter: float


def parameters(model: Model) -> list[Tensor]:
    """All tensors to be learned."""
    own = [value for value in model if isinstance(value, Tensor)]
    return own + [value for layer in model.layers for value in layer if isinstance(value, Tensor)]


def textbook(process: DeepKernelProcess) -> Model:
    """The same model, with copies of the parameters, to be learned."""

    def copy(tensor: Any) -> Tensor:
        return tensor.detach().clone().requires_grad_()

    layers = []
    for hidden in process.layers:
        assert isinstance(hidden, WishartLayer)
        q, kernel = hidden.posterior, hidden.kernel
        shared = (copy(x) for x in (q.tensors.V, q.q_logit, *(q.rows * q.rows.shape[-1] ** -0.5,) * 2))
        bartlett = (copy(x) for x in (q.log_concentration, q.log_rate, q.loc, q.log_scale))
        layers.append(Layer(q.df, copy(kernel.log_height), copy(kernel.log_lengthscale), *shared, *bartlett))
    output, noise = process.output, process.likelihood.log_noise
    return Model(
        copy(process.inducing_inputs),
        copy(process.log_input_lengthscale),
        layers,
        copy(output.kernel.log_height),
        copy(output.kernel.log_lengthscale),
        copy(output.posterior.v),
        copy(output.posterior.precision_root[0]),
        copy(noise),
        float(output.jitter),
    )


def squared_exponential(
    G: Tensor, d_row: Tensor, d_column: Tensor, log_height: Tensor, log_lengthscale: Tensor
) -> Tensor:
    weight = (-2 * log_lengthscale).exp()
    ends = (2 * log_height - 0.5 * weight * d_row)[..., :, None] - (0.5 * weight * d_column)[..., None, :]
    return torch.addcmul(ends, G, weight).exp()


def kernel_blocks(
    G: tuple[Tensor, Tensor, Tensor], log_height: Tensor, log_lengthscale: Tensor, jitter: float
) -> tuple[Tensor, Tensor, Tensor]:
    G_ii, G_it, G_tt = G
    d = G_ii.diagonal(dim1=-2, dim2=-1)
    K_ii = squared_exponential(G_ii, d, d, log_height, log_lengthscale)
    K_it = squared_exponential(G_it, d, G_tt, log_height, log_lengthscale)
    variance = (2 * log_height).exp()
    K_ii = K_ii + jitter * variance * torch.eye(K_ii.shape[-1], dtype=K_ii.dtype)
    return K_ii, K_it, variance * (1 + jitter) * torch.ones_like(G_tt)


def unit(strict: Tensor) -> Tensor:
    return strict + torch.eye(strict.shape[-1], dtype=strict.dtype)


def inverse(L: Tensor) -> Tensor:
    identity = torch.eye(L.shape[-1], dtype=L.dtype)
    return torch.linalg.solve_triangular(L, identity.expand_as(L), upper=False)


def normals(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32).double()  # torch's own float64 normals take five times as long


def log_diagonal(L: Tensor) -> Tensor:
    return L.diagonal(dim1=-2, dim2=-1).log()


def wishart_layer(
    layer: Layer, G: tuple[Tensor, Tensor, Tensor], jitter: float, S: int
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Sample the next Gram matrix; return it and log Q − log P of its inducing block."""
    nu = layer.df
    log_height = layer.log_height - 0.5 * math.log(nu)  # of S = K / ν
    S_ii, S_it, S_tt = kernel_blocks(G, log_height, layer.log_lengthscale, jitter)
    L = torch.linalg.cholesky(S_ii)
    q = layer.q_logit.sigmoid()
    Psi_tril = torch.linalg.cholesky((1 - q) * S_ii + q * layer.V @ layer.V.mT)
    logdet_A = log_diagonal(Psi_tril).sum(-1)

    # The Bartlett factor T and its log-densities under the posterior and under the standard Wishart; ½ log 2π cancels.
    P, r = layer.mu.shape
    gamma = Gamma(layer.log_alpha.exp(), layer.log_beta.exp(), validate_args=False)
    g, epsilon = gamma.rsample((S,)), normals(S, P, r).tril(-1)
    below = (layer.mu + layer.log_sigma.exp() * epsilon).tril(-1)
    T = below + torch.nn.functional.pad(g.sqrt().diag_embed(), (0, 0, 0, P - r))
    log_q = gamma.log_prob(g).sum(-1) - (0.5 * epsilon**2).sum((-2, -1)) - layer.log_sigma.tril(-1).sum()
    a = 0.5 * (nu - torch.arange(r, dtype=L.dtype))
    log_p = Gamma(a, torch.full_like(a, 0.5), validate_args=False).log_prob(g).sum(-1)
    log_p = log_p - 0.5 * (below**2).sum((-2, -1))

    F = Psi_tril @ (unit(layer.lower.tril(-1)) @ (unit(layer.upper.triu(1)) @ T))  # A T
    L_inverse = inverse(L)
    F_w = L_inverse @ F
    log_ratio = log_p - log_q + 0.5 * ((T**2).sum((-2, -1)) - (F_w**2).sum((-2, -1)))
    log_ratio = log_ratio + nu * (logdet_A - log_diagonal(L).sum(-1))

    # Every other point, from the prior given the inducing block.
    cross = L_inverse @ S_it
    residual = (S_tt - (cross * cross).sum(-2)).clamp_min(jitter * 1e-3)
    xi = normals(S, cross.shape[-1], nu)
    f = cross.mT @ F_w + residual.sqrt()[..., None] * xi
    return (F @ F.mT, F @ f.mT, (f**2).sum(-1)), -log_ratio


def elbo(model: Model, X: Tensor, y: Tensor, num_samples: int) -> Tensor:
    """The bound, averaged over samples; y has shape (N, 1)."""
    scale = (-model.log_input_lengthscale).exp() / model.Z.shape[-1] ** 0.5
    Z, X = model.Z * scale, X * scale
    G: tuple[Tensor, ...] = (Z @ Z.mT, Z @ X.mT, (X**2).sum(-1))
    kl = torch.zeros((), dtype=X.dtype)
    for layer in model.layers:
        G, layer_kl = wishart_layer(layer, G, model.jitter, num_samples)  # type: ignore[arg-type]
        kl = kl + layer_kl

    K_ii, K_it, K_tt = kernel_blocks(G, model.log_height, model.log_lengthscale, model.jitter)  # type: ignore[arg-type]
    L = torch.linalg.cholesky(K_ii)
    root = model.precision_root.mT @ L
    R = torch.linalg.cholesky(torch.eye(L.shape[-1], dtype=L.dtype) + root.mT @ root)
    R_inverse = inverse(R)
    m = R_inverse.mT @ (R_inverse @ (root.mT @ (model.precision_root.mT @ model.v)))
    M, C = model.v.shape
    kl = kl + 0.5 * (C * (R_inverse**2).sum((-2, -1)) + (m**2).sum((-2, -1)) - M * C) + C * log_diagonal(R).sum(-1)
    cross = inverse(L) @ K_it
    mean = (cross.mT @ m).squeeze(-1)
    explained = torch.eye(M, dtype=X.dtype) - R_inverse.mT @ R_inverse
    variance = K_tt - (cross * (explained @ cross)).sum(-2)

    noise = model.log_noise.exp()
    fit = -0.5 * (math.log(2 * math.pi) + noise.log() + ((y.squeeze(-1) - mean) ** 2 + variance) / noise)
    return (fit.sum(-1) - kl).mean()
