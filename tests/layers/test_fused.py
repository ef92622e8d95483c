"""The fused steps against the plain layers, and both against the paper's algorithm written down."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepwishart import deep_wishart_process
from deepwishart.kernels import SquaredExponential
from deepwishart.kernels.exponential import project_exp_of_product
from deepwishart.layers import fused
from deepwishart.layers.posterior import _UnitLU
from deepwishart.linalg import _Factorise, column_norms
from deepwishart.models import DeepKernelProcess
from deepwishart.objectives import elbo, predict
from tests.distributions.instances import generator
from tests.layers.instances import perturb
from tests.model_instances import build, data
from tests.reference import algorithm1


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Take the fused steps away."""

    def switch() -> None:
        for room in ("wishart", "gaussian"):
            monkeypatch.setattr(f"deepwishart.layers.{room}.fusable", lambda *_: None)
        for name in ("ii", "project", "tt"):
            monkeypatch.delattr(SquaredExponential, name)

    return switch


def value_and_gradients(model: DeepKernelProcess, X: Tensor, Y: Tensor) -> dict[str, Tensor]:
    bound = elbo(model, X, Y, num_samples=4, generator=generator(3))
    named = dict(model.named_parameters())
    grads = torch.autograd.grad((bound * torch.arange(1.0, 1 + bound.numel())).sum(), list(named.values()))
    return {"elbo": bound.detach(), **dict(zip(named, grads, strict=True))}


@pytest.mark.parametrize("batch", [(), (2,), (2, 1)], ids=str)
@pytest.mark.parametrize("width", [3, 7], ids=["narrow", "wider than M"])
@pytest.mark.parametrize("method", ["gw", "a-gw", "ab-gw", "a-gw whitened", "ab-gw whitened", "dgp"])
def test_values_and_gradients_are_those_of_the_plain_layers(
    method: str, width: int, batch: tuple[int, ...], plainly: Callable[[], None]
) -> None:
    X, Y = normal(*batch, 12, 3), normal(*batch, 12, 2, seed=1)
    method, *whitened = method.split()
    options = {"initialisation": "whitened"} if whitened else {}
    model = build(method, X, Y, depth=4, num_inducing=5, widths=width, **options)
    perturb(model)
    fast = value_and_gradients(model, X, Y)
    plainly()
    for name, expected in value_and_gradients(model, X, Y).items():
        torch.testing.assert_close(fast[name], expected, rtol=1e-9, atol=1e-9, msg=name)


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.clone().requires_grad_() for tensor in tensors)


def kernel_arguments(R: int, S: int, M: int = 4, N: int = 3, c: int = 2) -> tuple[Tensor, ...]:
    F, f = normal(R * S, M, c), normal(R * S, c, N, seed=1)
    tt = (f * f).sum(-2) + 0.1
    return (*leaves(F, f, tt, 0.1 * normal(R, seed=2), 0.1 * normal(R, seed=3)), torch.full((R,), 1e-2).double())


@pytest.mark.parametrize(("R", "S"), [(1, 1), (1, 3), (2, 2)])
def test_gradients_of_the_wishart_step(R: int, S: int) -> None:
    rest, V, T = 0.1 + torch.rand(R).double(), normal(R, 4, 4, seed=4), normal(R * S, 4, 3, seed=5)

    def step(*arguments: Tensor) -> Any:
        *kernel, rest, V, T, root = arguments
        return fused._WishartStep.apply(*kernel, rest, V @ V.mT, T, root @ root.mT, 5)

    assert torch.autograd.gradcheck(step, (*kernel_arguments(R, S), *leaves(rest, V, T, normal(R, 4, 4))))


@pytest.mark.parametrize(("R", "S"), [(1, 1), (1, 3), (2, 2)])
def test_gradients_of_the_whitened_step(R: int, S: int) -> None:
    def step(*arguments: Tensor) -> Any:
        return fused._WhitenedStep.apply(*arguments, 5)

    assert torch.autograd.gradcheck(step, (*kernel_arguments(R, S), *leaves(normal(R * S, 4, 3, seed=5))))


@pytest.mark.parametrize(("R", "S"), [(1, 1), (1, 3), (2, 2)])
def test_gradients_of_the_output_step(R: int, S: int) -> None:
    arguments = (*kernel_arguments(R, S), *leaves(normal(R, 4, 4, seed=4), normal(R, 4, 2, seed=5)))
    assert torch.autograd.gradcheck(fused._OutputStep.apply, arguments)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda V: _Factorise.apply(V @ V.mT + torch.eye(4)), 1),
        (column_norms, 1),
        (_UnitLU.apply, 1),
        (lambda P, p, W, X: project_exp_of_product(P, 0.3 * p, torch.full((2,), 99.0).double(), W, X), 4),
    ],
    ids=["factorise", "column norms", "unit LU", "projection"],
)
def test_gradients_of_smaller_functions(function: Callable[..., Any], arguments: int) -> None:
    assert torch.autograd.gradcheck(function, leaves(*(normal(2, 4, 4, seed=k) for k in range(arguments))))


def test_a_matrix_without_a_factor_makes_its_own_bound_nan_and_no_other() -> None:
    X, Y = normal(2, 12, 3), normal(2, 12, 1, seed=1)
    model = build("a-gw", X, Y, depth=3, num_inducing=5)
    alone = elbo(model, X, Y, num_samples=3, generator=generator(0)).detach()
    with torch.no_grad():
        dict(model.named_parameters())["layers.1.kernel.log_height"][1] = torch.nan
    bound = elbo(model, X, Y, num_samples=3, generator=generator(0))
    assert bound[1].isnan()
    torch.testing.assert_close(bound[0].detach(), alone[0], rtol=0, atol=0)
    grads = torch.autograd.grad(bound.sum(), list(model.parameters()))
    assert all(grad[0].isfinite().all() for grad in grads)


@pytest.mark.parametrize("initialisation", ["prior", "whitened"])
def test_predictions_without_a_factor_do_not_look_like_results(initialisation: str) -> None:
    X, Y = normal(60, 1), normal(60, 1, seed=1)
    model = build("a-gw", X, Y, depth=2, num_inducing=60, jitter=0.0, initialisation=initialisation)
    with torch.no_grad():
        model.log_input_lengthscale.fill_(4.0)  # a kernel matrix of ones, to working precision
    assert elbo(model, X, Y, num_samples=3, generator=generator(0)).isnan()
    assert predict(model, X[:4], num_samples=3, generator=generator(0)).mean.isnan().all()


@pytest.mark.parametrize("depth", [2, 4])
def test_the_bound_is_that_of_algorithm_1_as_the_paper_writes_it(depth: int) -> None:
    X, y = data(20)
    model = deep_wishart_process(X, y, depth=depth, posterior="a-gw", num_inducing=8, generator=generator(0))
    perturb(model, 0.05)
    book = algorithm1.textbook(model)
    with torch.no_grad():
        ours = torch.stack([elbo(model, X, y, num_samples=50, generator=generator(s)) for s in range(20)])
        theirs = torch.stack([algorithm1.elbo(book, X, y, 50) for _ in range(20)])
    spread = ((ours.var() + theirs.var()) / 20).sqrt()
    assert abs(ours.mean() - theirs.mean()) < 4.5 * spread
