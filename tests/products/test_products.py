"""Products of the C library against torch's, for three kinds of processors."""

import math
from collections.abc import Callable

import mpmath
import pytest
import torch
from torch import Tensor

from deepwishart.products import exponential_of_product, inverse_factor, matmul, product
from tests.products.instances import ARCHITECTURES, library, normal, use


@pytest.fixture(params=ARCHITECTURES, autouse=True)
def _architecture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, library(request.param))


def spd(batch: int, n: int, jitter: float = 1.0) -> Tensor:
    A = normal(batch, n, n)
    return A @ A.mT / n + jitter * torch.eye(n)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda X: X,
    "transposed": lambda X: X.mT.contiguous().mT,
    "every other column": lambda X: X.repeat_interleave(2, -1)[..., ::2],
    "rows of a larger one": lambda X: torch.cat([X, X], -1)[..., : X.shape[-1]],
    "lower": lambda X: X.tril(),
    "upper": lambda X: X.triu(1),
    "zero": torch.zeros_like,
}
# Of tiles, of blocks of the inner dimension, and what is left over.
SIZES = [
    (1, 1, 1),
    (8, 24, 24),
    (13, 7, 50),
    (100, 13, 100),
    (37, 400, 29),
    (4, 800, 3),
    (5, 0, 3),
    (0, 3, 2),
    (3, 4, 0),
]


@pytest.mark.parametrize("right", SHAPES)
@pytest.mark.parametrize("left", SHAPES)
@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_products(m: int, k: int, n: int, left: str, right: str) -> None:
    A, B = SHAPES[left](normal(3, m, k)), SHAPES[right](normal(3, k, n, seed=1))
    torch.testing.assert_close(product(A, B), A @ B, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(product(A, B, alpha=-0.7), -0.7 * (A @ B), rtol=1e-12, atol=1e-12)
    C = normal(3, m, n, seed=2)
    expected = C - 0.7 * (A @ B)
    assert product(A, B, alpha=-0.7, into=C) is C
    torch.testing.assert_close(C, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", [5, 900])
@pytest.mark.parametrize("n", [1, 9, 100])
def test_lower_triangles_of_products(n: int, k: int) -> None:
    A, B = normal(3, n, k), normal(3, k, n, seed=1)
    torch.testing.assert_close(product(A, B, lower=True).tril(), (A @ B).tril(), rtol=1e-12, atol=1e-12)
    C = normal(3, n, n, seed=2)
    expected = C + A @ B
    torch.testing.assert_close(product(A, B, into=C, lower=True).tril(), expected.tril(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("left", "right"), [((), (4,)), ((4,), ()), ((2, 1), (1, 3)), ((2, 3), (3,)), ((), ()), ((1,), (4,)), ((0,), (0,))]
)
def test_batches_broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    A, B = normal(*left, 5, 6), normal(*right, 6, 7, seed=1)
    assert product(A, B).shape == (A @ B).shape
    torch.testing.assert_close(product(A, B), A @ B, rtol=1e-12, atol=1e-12)


def test_what_is_added_to_says_how_many() -> None:
    A, B, C = normal(5, 6), normal(6, 7, seed=1), torch.zeros(3, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(product(A, B, into=C), (A @ B).expand(3, -1, -1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row_and_column(bad: float) -> None:
    A, B = normal(2, 30, 30), normal(2, 30, 30, seed=1)
    A[0, 3, 4] = bad
    B[1, 5, 6] = bad
    finite = product(A, B).isfinite()
    assert not finite[0, 3].any()
    assert not finite[1, :, 6].any()
    assert finite.sum() == finite.numel() - 2 * 30


def test_the_same_matrices_give_the_same_bits_in_any_company() -> None:
    A, B = normal(7, 100, 300), normal(7, 300, 455, seed=1)
    expected = product(A, B)
    for e in range(7):
        assert torch.equal(product(A[e], B[e]), expected[e])
    assert torch.equal(product(A, B[..., 10:77]), expected[..., 10:77])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(product(A, B), expected)
        assert torch.equal(product(A[0], B[0]), expected[0])
    finally:
        torch.set_num_threads(threads)


def test_exponentials_are_exact_to_the_last_digit_but_one() -> None:
    x = torch.cat([torch.linspace(-708, 709, 2000), torch.linspace(-1, 1, 400)]).double()
    found = exponential_of_product(torch.ones(1, 1).double(), x[None], torch.tensor([[math.inf]]).double())[0]
    with mpmath.workdps(40):
        errors = [
            float(abs(mpmath.mpf(y) / mpmath.exp(mpmath.mpf(t)) - 1))
            for t, y in zip(x.tolist(), found.tolist(), strict=True)
        ]
    assert max(errors) < 1.5 * torch.finfo(torch.float64).eps


def test_exponentials_of_what_is_extreme() -> None:
    x = torch.tensor([-math.inf, -1e4, -750.0, -709.0, 0.0, 2.0, 1e4, math.inf, math.nan], dtype=torch.float64)
    one, cap = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[1.5]], dtype=torch.float64)
    # Numbers below the smallest normal one are zero.
    expected = torch.tensor([0, 0, 0, 0, 1, *[math.exp(1.5)] * 3, math.nan], dtype=torch.float64)
    found = exponential_of_product(one, x[None], cap)[0]
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=0, equal_nan=True)
    assert exponential_of_product(one, x[None, 6:7], cap * math.inf).item() == math.inf


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 50, 130])
def test_factors_and_their_inverses(n: int) -> None:
    K = spd(3, n, 1e-2)
    L, J, half_logdet = inverse_factor(K)
    torch.testing.assert_close(L, torch.linalg.cholesky(K), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(J @ L, torch.eye(n).double().expand(3, -1, -1), rtol=0, atol=1e-12)
    assert torch.equal(J, J.tril())
    torch.testing.assert_close(2 * half_logdet, torch.logdet(K), rtol=1e-11, atol=1e-11)


def test_factors_at_the_edge_of_what_has_one() -> None:
    x = torch.linspace(0, 1, 60, dtype=torch.float64)
    K = torch.exp(-0.5 * (x[:, None] - x) ** 2) + 1.5e-8 * torch.eye(60)
    L, J, half_logdet = inverse_factor(K)
    torch.testing.assert_close(L @ L.mT, K, rtol=0, atol=1e-14)
    torch.testing.assert_close(J @ L, torch.eye(60).double(), rtol=0, atol=1e-8)
    assert half_logdet.isfinite()


@pytest.mark.parametrize("at", [0, 20, 39])
@pytest.mark.parametrize("bad", [-1.0, 0.0, math.nan, math.inf])
def test_a_matrix_without_a_factor_says_so_and_leaves_others_alone(bad: float, at: int) -> None:
    K = spd(3, 40)
    expected = inverse_factor(K)
    K[1, at, at] = bad
    found = inverse_factor(K)
    assert found[2][1].isnan()
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x[[0, 2]], y[[0, 2]])


def test_gradients_of_any_order() -> None:
    A, B = normal(2, 3, 4).requires_grad_(), normal(4, 5, seed=1).requires_grad_()
    assert matmul(A, B).grad_fn is not None
    assert torch.autograd.gradcheck(matmul, (A, B))
    assert torch.autograd.gradgradcheck(matmul, (A, B))
    (gradient,) = torch.autograd.grad(matmul(A.detach(), B).sum(), B)
    torch.testing.assert_close(gradient, A.detach().sum((0, 1))[:, None].expand(4, 5))


def test_a_product_is_torchs_where_a_gradient_is_to_be_taken() -> None:
    A = normal(2, 3, 4).requires_grad_()
    assert product(A, normal(2, 4, 3)).requires_grad


def test_other_precisions_are_torchs() -> None:
    A, B = normal(2, 3, 4).float(), normal(2, 4, 3).float()
    assert torch.equal(product(A, B), A @ B)


def test_what_does_not_fit_is_refused_by_torch() -> None:
    A, B = normal(4, 5, 6), normal(4, 3, 7)
    for multiply in (product, matmul):
        with pytest.raises(RuntimeError):
            multiply(A, B)
    for into in (torch.zeros(4, 5, 9).double(), torch.zeros(4, 5, 7)):
        with pytest.raises(RuntimeError):
            product(A, normal(4, 6, 7), into=into)
    with pytest.raises(RuntimeError):
        inverse_factor(A)


def test_numbers_that_do_not_stand_in_memory_are_left_to_torch() -> None:
    B = normal(6, 7)
    negated = torch.complex(normal(5, 6), normal(5, 6, seed=1)).conj().imag
    torch.testing.assert_close(product(negated, B), negated @ B)
    torch.testing.assert_close(product(normal(5, 6).to_sparse(), B), normal(5, 6) @ B)
