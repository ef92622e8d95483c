"""On a GPU: the variational path never synchronises, fits into one CUDA graph, and agrees with the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import kl_divergence

from deepwishart.distributions import InverseWishart, Wishart, log_density_ratio
from deepwishart.linalg import cholesky, log_abs_det
from tests.distributions.instances import ALL, CLASSES, POSTERIORS, make, parameters, random_scale_tril

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def to_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def variational_step(family: str, arguments: dict[str, Any], K: Tensor, generator: torch.Generator) -> Tensor:
    """What a layer does in training: factor, sample, both forms of the KL, gradients."""
    leaves = [value for value in arguments.values() if isinstance(value, Tensor)]
    factor = cholesky(K)
    prior = Wishart(arguments["df"], factor.tril, scale_tril_inverse=factor.tril_inverse, validate_args=False)
    if family != "gw":
        arguments = {**arguments, "row_mixing_logabsdet": log_abs_det(arguments["row_mixing"])}
    q = CLASSES[family](**arguments, validate_args=False)
    T, F = q.rsample_bartlett((4,), generator)
    loss = kl_divergence(q, prior).mean() - log_density_ratio(prior, q, T, F).mean()
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, leaves)])


@pytest.mark.parametrize("family", POSTERIORS)
def test_the_variational_path_fits_into_a_graph_and_never_synchronises(family: str) -> None:
    P, df, batch = 30, 5, (3,)
    arguments = to_gpu(parameters(family, P, df, batch=batch))
    for value in arguments.values():
        if isinstance(value, Tensor):
            value.requires_grad_()
    L = random_scale_tril(P, 9, batch).cuda()
    K, generator = L @ L.mT, torch.Generator("cuda").manual_seed(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            variational_step(family, arguments, K, generator)
    torch.cuda.current_stream().wait_stream(side)

    torch.cuda.set_sync_debug_mode("error")
    try:
        generator.manual_seed(1)
        eager = variational_step(family, arguments, K, generator)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            captured = variational_step(family, arguments, K, generator)
        generator.manual_seed(1)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    first = captured.clone()
    torch.testing.assert_close(first, eager, rtol=1e-10, atol=1e-10)
    graph.replay()
    assert not torch.equal(first, captured)  # fresh noise in every replay


@pytest.mark.parametrize("family", ALL)
def test_gpu_and_cpu_agree_under_the_same_noise(family: str) -> None:
    on_cpu = make(family, 6, 3, batch=(2,))
    on_gpu = CLASSES[family](**to_gpu(parameters(family, 6, 3, batch=(2,))))
    noise = on_cpu.draw_noise((5,))
    moved = type(noise)(noise.gaussian.cuda(), type(noise.gamma)(*(x.cuda() for x in noise.gamma)))
    _, F = on_cpu.rsample_bartlett(noise=noise)
    _, F_gpu = on_gpu.rsample_bartlett(noise=moved)
    assert F_gpu.is_cuda
    torch.testing.assert_close(F_gpu.cpu(), F, rtol=1e-10, atol=1e-10)
    G = F @ F.mT
    torch.testing.assert_close(on_gpu.log_prob(G.cuda()).cpu(), on_cpu.log_prob(G), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(on_gpu.mean.cpu(), on_cpu.mean)
    torch.testing.assert_close(on_gpu.variance.cpu(), on_cpu.variance)


def test_the_inverse_wishart_never_synchronises() -> None:
    L1, L0 = (random_scale_tril(30, seed, (3,)).cuda().requires_grad_() for seed in (0, 1))
    gamma = torch.rand(3, dtype=torch.float64).cuda().requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        p = InverseWishart(35.5, L0, validate_args=False)
        q = InverseWishart(35.5 + gamma, L1, validate_args=False)
        N, F = q.rsample_bartlett((4,))
        loss = kl_divergence(q, p).mean() - log_density_ratio(p, q, N, F).mean()
        grads = torch.autograd.grad(loss, [L1, L0, gamma])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(grad.isfinite().all() for grad in grads)


def test_failures_are_marked_on_the_gpu_too() -> None:
    K = torch.stack([torch.eye(3), -torch.eye(3)]).cuda()
    factor = cholesky(K)
    assert factor.tril[0].isfinite().all()
    assert factor.tril[1].isnan().all()


def test_parameters_on_different_devices_are_refused() -> None:
    arguments = parameters("gw", 3, 2)
    with pytest.raises(ValueError, match=r"share one device, got .*rate cuda"):
        CLASSES["gw"](**{**arguments, "rate": arguments["rate"].cuda()})
