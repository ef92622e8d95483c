"""Gradients of log-densities with respect to the matrix and to every parameter."""

import pytest
import torch
from torch import Tensor

from deepwishart.distributions.bartlett import Bartlett, BartlettNoise
from tests.distributions.instances import ALL, CLASSES, SIZES, free_coordinates, generator, make, parameters


def from_free_coordinates(coordinates: Tensor, P: int, rank: int) -> Tensor:
    """A symmetric matrix with the given entries; the block that a density does not read is left zero."""
    row, column = torch.tril_indices(P, rank)
    lower = torch.zeros(P, P, dtype=coordinates.dtype).index_put((row, column), coordinates)
    return lower + lower.tril(-1).mT


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(("P", "df"), [size for size in SIZES if size != (2, 300)])
def test_gradcheck_of_log_prob(family: str, P: int, df: int) -> None:
    arguments = parameters(family, P, df)
    names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    rank = P if family == "iw" else min(df, P)
    G = make(family, P, df).sample()

    def log_prob(coordinates: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        for name in ("scale_tril", "column_mixing"):
            if name in given:
                given[name] = given[name].tril()  # what is above the diagonal is not a parameter
        q = CLASSES[family](**{**arguments, **given}, validate_args=False)
        return q.log_prob(from_free_coordinates(coordinates, P, rank))

    inputs = (free_coordinates(G, rank), *(arguments[name] for name in names))
    assert torch.autograd.gradcheck(log_prob, tuple(x.clone().requires_grad_() for x in inputs), rtol=1e-3)


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(("P", "df"), [(3, 2), (3, 3), (2, 4)])
def test_gradients_of_both_paths_agree(family: str, P: int, df: int) -> None:
    """log_prob(F Fᵀ) and log_prob_bartlett(T, F) have equal derivatives through parameters and sample together."""
    grads = []
    for path in ("matrix", "factor"):
        arguments = parameters(family, P, df)
        names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
        leaves = [arguments[name].requires_grad_() for name in names]
        q = CLASSES[family](**arguments)
        T, F = q.rsample_bartlett(noise=q.draw_noise(generator=torch.Generator().manual_seed(1)))
        value = q.log_prob(F @ F.mT) if path == "matrix" else q.log_prob_bartlett(T, F)
        grads.append(torch.autograd.grad(value, leaves))
    for name, matrix, factor in zip(names, *grads, strict=True):
        if name in ("scale_tril", "column_mixing"):
            matrix, factor = matrix.tril(), factor.tril()
        torch.testing.assert_close(matrix, factor, rtol=1e-6, atol=1e-6)


def test_zeros_in_ignored_places_of_scale_do_not_poison_gradients() -> None:
    arguments = parameters("gw", 4, 3)
    arguments["scale"] = arguments["scale"].tril(-1).requires_grad_()
    q = CLASSES["gw"](**arguments)
    T, F = q.rsample_bartlett()
    (grad,) = torch.autograd.grad(q.log_prob_bartlett(T, F) + F.sum(), arguments["scale"])
    assert grad.isfinite().all()
    assert (grad.triu() == 0).all()


@pytest.mark.parametrize("family", ALL)
def test_one_distribution_serves_several_backward_passes(family: str) -> None:
    arguments = parameters(family, 3, 2)
    for value in arguments.values():
        if isinstance(value, Tensor):
            value.requires_grad_()
    q = CLASSES[family](**arguments)
    for _ in range(2):
        (q.rsample().sum() + q.log_prob(q.sample())).backward()


def test_a_diagonal_that_underflows_keeps_finite_gradients() -> None:
    arguments = parameters("gw", 2, 2)
    arguments["concentration"] = torch.full((2,), 0.005, dtype=torch.float64)
    arguments["rate"] = torch.full((2,), 1e20, dtype=torch.float64, requires_grad=True)
    T, F = CLASSES["gw"](**arguments).rsample_bartlett((2000,))
    assert (T.diagonal(dim1=-2, dim2=-1) > 0).all()
    (grad,) = torch.autograd.grad(F.sum(), arguments["rate"])
    assert grad.isfinite().all()


def test_moments_that_do_not_exist_leave_the_gradients_of_others_alone() -> None:
    L = torch.eye(3, dtype=torch.float64, requires_grad=True)
    dist = CLASSES["iw"](torch.tensor([4.0, 8.0], dtype=torch.float64), L)
    (grad,) = torch.autograd.grad(dist.mean[1].sum() + dist.variance[1].sum(), L)
    assert grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functional_transforms_work() -> None:
    """torch.func differentiates a sample under fixed noise, and vmaps over it."""
    arguments = parameters("ab-gw", 3, 2)
    noise = CLASSES["ab-gw"](**arguments).draw_noise()

    def total(concentration: Tensor) -> Tensor:
        q = CLASSES["ab-gw"](**{**arguments, "concentration": concentration}, validate_args=False)
        return q.rsample_bartlett(noise=noise)[1].sum()

    alpha = arguments["concentration"]
    several = torch.stack([alpha, 2 * alpha])
    expected = torch.stack([torch.func.grad(total)(row) for row in several])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(several), expected)


def test_gradients_of_a_draw_by_all_but_the_concentration() -> None:
    """Under fixed noise a draw is smooth in the rest, so finite differences know its gradients."""
    alpha, beta, loc, scale = (parameters("gw", 4, 2, batch=(3,))[n] for n in ("concentration", "rate", "loc", "scale"))
    noise = BartlettNoise.draw(torch.Size((2, 3, 4, 2)), loc, generator(0))

    def draw(beta: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        return Bartlett(alpha, beta, loc, scale).rsample(noise)

    leaves = tuple(x.detach().clone().requires_grad_() for x in (beta, loc, scale))
    assert torch.autograd.gradcheck(draw, leaves)
