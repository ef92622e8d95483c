"""Cholesky factors with jitter: against dense algebra, in both forms, on real data."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deepwishart import linalg


def random_spd(P: int, batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> Tensor:
    X = torch.randn(*batch, P, 2 * P, dtype=dtype)
    return X @ X.mT / P


def singular(P: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    F = torch.randn(P, rank, dtype=dtype)
    return F @ F.mT


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_factor_inverse_and_logdet(batch: tuple[int, ...]) -> None:
    K = random_spd(5, batch)
    factor = linalg.cholesky(K, jitter=0.0)
    torch.testing.assert_close(factor.tril, torch.linalg.cholesky(K))
    torch.testing.assert_close(factor.tril_inverse, torch.linalg.inv(factor.tril))
    torch.testing.assert_close(2 * factor.half_logdet, torch.logdet(K))
    rhs = torch.randn(*batch, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(factor.whiten(rhs), torch.linalg.solve(factor.tril, rhs))
    torch.testing.assert_close(factor.solve(rhs), torch.linalg.solve(K, rhs))


@pytest.mark.parametrize("form", [linalg.cholesky, linalg.checked_cholesky])
def test_jitter_is_relative_to_the_mean_diagonal_and_returned(form) -> None:  # type: ignore[no-untyped-def]
    K = random_spd(4, (2,))
    K[1] *= 1e6
    factor = form(K, 1e-3)
    expected = 1e-3 * K.diagonal(dim1=-2, dim2=-1).mean(-1)
    torch.testing.assert_close(factor.jitter, expected)
    eye = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(factor.tril @ factor.tril.mT, K + expected[:, None, None] * eye)


def test_jitter_may_differ_between_elements() -> None:
    K, jitter = random_spd(3, (2,)), torch.tensor([1e-6, 1e-2], dtype=torch.float64)
    factor = linalg.cholesky(K, jitter)
    for k in range(2):
        torch.testing.assert_close(factor.tril[k], linalg.cholesky(K[k], jitter[k]).tril)


def test_default_jitter_follows_the_dtype() -> None:
    assert linalg.default_jitter(torch.float64) == pytest.approx(1.5e-8, rel=0.01)
    assert linalg.default_jitter(torch.float32) == pytest.approx(3.5e-4, rel=0.02)


def test_the_unchecked_form_marks_failures_with_nan_and_leaves_the_others_alone() -> None:
    K = torch.stack([random_spd(3), -torch.eye(3, dtype=torch.float64), random_spd(3)])
    factor = linalg.cholesky(K)
    assert factor.tril[1].isnan().all()
    assert factor.tril_inverse[1].isnan().any()
    assert factor.half_logdet[1].isnan()
    torch.testing.assert_close(factor.tril[0], linalg.cholesky(K[0]).tril, rtol=0, atol=0)


def test_escalation_is_per_element() -> None:
    """A singular matrix needs more jitter than a regular one beside it, which keeps its own."""
    K = torch.stack([torch.eye(20), singular(20, 3, torch.float32) - 1e-3 * torch.eye(20)])
    factor = linalg.checked_cholesky(K, jitter=1e-6)
    assert factor.jitter[0] == pytest.approx(1e-6)
    assert factor.jitter[1] > 1e-4 * K[1].diagonal().mean()
    assert factor.tril.isfinite().all()


def test_escalation_does_not_depend_on_units() -> None:
    K = singular(20, 3) - 1e-6 * torch.eye(20, dtype=torch.float64)
    jitter = linalg.checked_cholesky(K, jitter=1e-9).jitter
    for unit in (1e-4, 1e4):
        torch.testing.assert_close(linalg.checked_cholesky(unit * K, jitter=1e-9).jitter, unit * jitter)


def test_escalation_from_zero() -> None:
    regular, deficient = random_spd(6), singular(6, 2)
    assert linalg.checked_cholesky(regular, jitter=0.0).jitter == 0
    assert linalg.checked_cholesky(deficient - 1e-12 * torch.eye(6, dtype=torch.float64), jitter=0.0).jitter > 0


def test_checked_gradients_are_those_of_the_factorisation() -> None:
    K = random_spd(3).requires_grad_()

    def factor(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(linalg.checked_cholesky((matrix + matrix.mT) / 2, jitter=1e-2))  # type: ignore[return-value]

    assert torch.autograd.gradcheck(factor, (K,))


def test_failure_names_what_where_and_what_to_do() -> None:
    K = torch.stack([torch.eye(3), torch.diag(torch.tensor([1.0, 1.0, -5.0]))])
    with pytest.raises(linalg.FactorizationError) as error:
        linalg.checked_cholesky(K, name="kernel of layer 3")
    parts = (
        "kernel of layer 3",
        "(2, 3, 3)",
        "float32",
        "element (1,)",
        "-5",
        "3.5e-04 to 3.5e-02",
        "float64",
        "duplicate",
    )
    for part in parts:
        assert part in str(error.value), part


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_input_is_named_as_such(bad: float) -> None:
    K = random_spd(3, (2, 2))
    K[1, 0, 2, 2] = bad
    with pytest.raises(linalg.FactorizationError, match=r"non-finite entries at batch element \(1, 0\).*learning rate"):
        linalg.checked_cholesky(K)


def test_an_asymmetric_matrix_is_named_as_such() -> None:
    with pytest.raises(linalg.FactorizationError, match=r"kernel .* is not symmetric"):
        linalg.checked_cholesky(torch.tensor([[1.0, 100.0], [0.0, 1.0]]), name="kernel")


@pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(2, 3), torch.eye(3, dtype=torch.long), [[1.0]], None])
def test_what_is_no_matrix_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a floating-point tensor of shape \(\*batch, P, P\), got"):
        linalg.checked_cholesky(bad)


@pytest.mark.parametrize("jitter", [-0.5, float("nan"), float("inf"), 2.0])
def test_jitter_must_make_sense(jitter: float) -> None:
    with pytest.raises(ValueError, match=r"jitter must be a number from 0 to 0.1.*got"):
        linalg.checked_cholesky(torch.eye(3), jitter)


def test_symmetry_in_any_units() -> None:
    units = torch.logspace(-8, 8, 5, dtype=torch.float64)
    K = random_spd(5) * units * units[:, None]
    assert linalg.is_symmetric(K)
    K[0, 1] *= 1.1
    assert not linalg.is_symmetric(K)


def test_a_zero_matrix_is_an_error_not_a_loop() -> None:
    with pytest.raises(linalg.FactorizationError, match="diagonal is positive"):
        linalg.checked_cholesky(torch.zeros(3, 3))


@pytest.mark.parametrize("batch", [(), (4,)])
def test_log_abs_det_agrees_with_slogdet(batch: tuple[int, ...]) -> None:
    A = torch.randn(*batch, 5, 5, dtype=torch.float64, requires_grad=True)
    expected = torch.linalg.slogdet(A).logabsdet
    torch.testing.assert_close(linalg.log_abs_det(A), expected)
    (ours,), (theirs,) = (torch.autograd.grad(f.sum(), A) for f in (linalg.log_abs_det(A), expected))
    torch.testing.assert_close(ours, theirs)
    assert linalg.log_abs_det(torch.ones(3, 3)) == -torch.inf


@pytest.mark.parametrize(("P", "rank"), [(1, 1), (5, 1), (5, 3), (5, 5)])
def test_thin_cholesky(P: int, rank: int) -> None:
    G = singular(P, rank)
    phi, definite = linalg.thin_cholesky(G, rank)
    assert definite
    assert phi.shape == (P, rank)
    assert (phi.triu(1) == 0).all()
    assert (phi.diagonal() > 0).all()
    torch.testing.assert_close(phi @ phi.mT, G)
    assert not linalg.thin_cholesky(-G, rank)[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("lengthscale", [0.3, 1.0, 10.0])
def test_kernels_of_real_data_factorise_at_the_default_jitter(
    uci_inputs: Tensor, dtype: torch.dtype, lengthscale: float
) -> None:
    """100 rows, duplicates included: no escalation, and a factor that reproduces the matrix."""
    rows = torch.randperm(len(uci_inputs), generator=torch.Generator().manual_seed(0))[:100]
    X = uci_inputs[rows] / lengthscale
    K = (-0.5 * torch.cdist(X, X, compute_mode="donot_use_mm_for_euclid_dist") ** 2 / X.shape[1]).exp().to(dtype)
    factor = linalg.checked_cholesky(K)
    assert factor.jitter == pytest.approx(linalg.default_jitter(dtype), rel=1e-5)
    torch.testing.assert_close(
        factor.tril @ factor.tril.mT, K + factor.jitter * torch.eye(100, dtype=dtype), rtol=0, atol=1e-5
    )
    identity = factor.tril_inverse @ factor.tril
    torch.testing.assert_close(identity, torch.eye(100, dtype=dtype), rtol=0, atol=2e-3)


def test_a_factor_divided_is_the_factor_of_the_matrix_divided() -> None:
    K = random_spd(4, (2,))
    divided, expected = linalg.cholesky(K, 1e-3).divide(3.0), linalg.cholesky(K / 3.0, 1e-3)
    for found, value in zip(divided, expected, strict=True):
        torch.testing.assert_close(found, value)


def test_the_gradient_of_a_factor_is_torchs() -> None:
    K = random_spd(5, (3,)).requires_grad_()
    weight = torch.randn(3, 5, 5, dtype=torch.float64)
    ours = linalg.cholesky(K, 0.0)
    L = torch.linalg.cholesky(K)
    loss = (ours.tril * weight).sum() + (ours.tril_inverse * weight.mT).sum() + ours.half_logdet.sum()
    theirs = (L * weight).sum() + (torch.linalg.inv(L) * weight.mT).sum() + 0.5 * torch.logdet(K).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, K), torch.autograd.grad(theirs, K))


def test_samples_become_columns_and_columns_samples() -> None:
    A, X = torch.randn(2, 4, 4, dtype=torch.float64), torch.randn(3, 2, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(linalg.shared_matmul(A, X), A @ X)
    assert linalg.samples_to_columns(X, 3).shape == (2, 4, 15)
    torch.testing.assert_close(linalg.columns_to_samples(linalg.samples_to_columns(X, 3), X, 3), X)
