"""The parts of a step, by the C library and by torch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deepwishart import deep_wishart_process, train
from deepwishart.products.kernel import KernelMatrices
from deepwishart.products.output import Output, make_output, pull_back_output
from deepwishart.products.projection import Projection, project, pull_back_projection
from deepwishart.products.scale import Scale, make_scale, pull_back_scale
from deepwishart.training import TrainingConfig
from tests.distributions.instances import generator
from tests.products.instances import ARCHITECTURES, library, normal, use

# Replicas, samples, inducing points, features or outputs, points. Points are taken in parts of 240; with more than 160
# inducing points, products are taken one by one.
CASES = [
    (1, 1, 1, 1, 1),
    (1, 3, 7, 2, 30),
    (2, 2, 50, 5, 241),
    (1, 5, 33, 40, 2200),
    (1, 2, 170, 3, 10),
    (3, 1, 6, 2, 0),
]


@pytest.fixture(params=ARCHITECTURES)
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A comparison of what a function returns with the library and without."""
    found = library(request.param)

    def compare(function: Any, *arguments: Any, lower: int = 0, **options: Any) -> Any:
        results = []
        for which in (found, None):
            use(monkeypatch, which)
            copies = (x.clone() if isinstance(x, Tensor) else x for x in arguments)  # some are used up
            results.append(tuple(function(*copies, **options)))
        for name, (x, y) in enumerate(zip(*results, strict=True)):
            if name == 0 and lower:
                x, y = (torch.cat([z[:, :lower].tril(), z[:, lower:]], 1) for z in (x, y))
            assert torch.allclose(x, y, rtol=1e-9, atol=1e-9), f"result {name}"
        return results[0]

    return compare


def features(B: int, M: int, c: int, N: int) -> tuple[Tensor, Tensor, Tensor]:
    F, f = normal(B, M, c) / c**0.5, normal(B, c, N, seed=1) / c**0.5
    return F, f, (f * f).sum(-2) + 0.1


@pytest.mark.parametrize(("R", "S", "M", "c", "N"), CASES)
def test_kernel_matrices(both: Any, R: int, S: int, M: int, c: int, N: int) -> None:
    B, jitter = R * S, torch.full((R,), 1e-3).double()
    F, f, tt = features(B, M, c, N)
    kernel: Any = KernelMatrices(*both(KernelMatrices.of, F, f, tt, 0.1 * normal(R), 0.1 * normal(R, seed=1), jitter))
    gradients = normal(B, M, M), normal(B, M, c + 2, seed=1), normal(B, c + 2, N, seed=2)
    both(lambda *bars: kernel.pull_back(*bars, tt, jitter), *gradients)


@pytest.mark.parametrize("against", ["k", "seen"])
@pytest.mark.parametrize(("R", "S", "M", "c", "N"), CASES)
def test_projections(both: Any, against: Any, R: int, S: int, M: int, c: int, N: int) -> None:
    B, rows = R * S, M + c
    P, p, maps = normal(B, M, c) / c**0.5, normal(B, c, N, seed=1) / c**0.5, normal(B, rows, M, seed=2)
    maps[:, :M].tril_()
    cap = torch.full((B, 1, 1), 0.7).double()
    found = Projection(*both(project, P, p, cap, maps))
    bars = normal(B, N, seed=3), normal(B, c, N, seed=4)
    lower = M if against == "seen" else 0
    pull_back: Any = pull_back_projection
    both(lambda *given: pull_back(P, p, maps, found, *given, against=against), *bars, lower=lower)


@pytest.mark.parametrize(("R", "S", "M", "c", "N"), CASES)
def test_scales(both: Any, R: int, S: int, M: int, c: int, N: int) -> None:
    B, df = R * S, 3
    K, added, H = (spd(count, M, seed) for seed, count in enumerate((B, R, R)))
    rest, T = 0.1 + torch.rand(R).double(), normal(B, M, c)
    scale = Scale(*both(make_scale, K, rest, added, T, H, df))
    bars = normal(B, M + c, M), normal(B, M, c, seed=1), normal(B, seed=2), normal(B, seed=3)
    pull_back: Any = pull_back_scale
    both(lambda *given: pull_back(K, rest, T, scale, *given, df), *bars)


@pytest.mark.parametrize(("R", "S", "M", "c", "N"), CASES)
def test_outputs(both: Any, R: int, S: int, M: int, c: int, N: int) -> None:
    B = R * S
    K, ell, v = spd(B, M), normal(R, M, M) / M**0.5, normal(R, M, c, seed=1)
    output = Output(*both(make_output, K, ell, v))
    both(lambda *given: pull_back_output(K, ell, v, output, *given), normal(B, M + c, M), normal(B, seed=1))


def spd(batch: int, M: int, seed: int = 0) -> Tensor:
    A = normal(batch, M, M, seed=seed)
    return A @ A.mT / M + 0.1 * torch.eye(M)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, None])
def test_a_matrix_without_a_factor_is_known_and_alone(
    monkeypatch: pytest.MonkeyPatch, architecture: str | None
) -> None:
    use(monkeypatch, None if architecture is None else library(architecture))
    K, rest, other = spd(3, 5), torch.ones(3).double(), spd(3, 5, 1)
    K[1] *= -1e3
    scale = make_scale(K, rest, 0.1 * other, other, other, 3)
    output = make_output(K, other, other)
    for logdet, made in ((scale.logdet, scale), (output.half_logdet, output)):
        assert logdet.isnan().tolist() == [False, True, False]
        assert all(x[[0, 2]].isfinite().all() for x in made)


def test_a_projection_of_a_point_does_not_depend_on_the_others() -> None:
    library("-march=native")
    P, p, maps, cap = normal(2, 20, 4), normal(2, 4, 1000, seed=1), normal(2, 23, 20), torch.zeros(2, 1, 1).double()
    whole = project(P, p, cap, maps)
    for x, y in zip(project(P, p[..., 300:411].contiguous(), cap, maps), whole, strict=True):
        assert torch.equal(x, y[..., 300:411])


@pytest.mark.parametrize("method", ["gw", "ab-gw"])
def test_training_is_the_same(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    X = normal(2, 40, 2)
    trained = []
    for which in (library("-march=native"), None):
        use(monkeypatch, which)
        model = deep_wishart_process(
            X, X[..., :1].sin(), depth=3, posterior=method, num_inducing=12, generator=generator(0)
        )
        train(model, X, X[..., :1].sin(), TrainingConfig(num_steps=6, num_samples=3, annealing_steps=2), seed=0)
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*trained, rtol=1e-7, atol=1e-7)
