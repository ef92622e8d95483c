"""Bad input gets a ValueError that names the requirement, the value and the remedy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepwishart.distributions import InverseWishart, Wishart
from deepwishart.distributions.validation import check_row_mixing
from tests.distributions.instances import ALL, CLASSES, FAMILIES, make, parameters

EYE = torch.eye(3, dtype=torch.float64)


def change(family: str, **changes: Any) -> Callable[[], object]:
    """A constructor call with some arguments replaced."""
    return lambda: CLASSES[family](**{**parameters(family, 3, 2), **changes})


def put(family: str, name: str, index: tuple[int, ...], value: float) -> Callable[[], object]:
    """A constructor call with one entry replaced."""
    tensor = parameters(family, 3, 2)[name].clone()
    tensor[index] = value
    return change(family, **{name: tensor})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "df", [0, -2, 2.5, 2.0, "3", None, True, float("nan"), 10**30, torch.tensor(True), torch.ones(2)]
)
def test_df_must_be_a_positive_integer(family: str, df: Any) -> None:
    with pytest.raises(ValueError, match=r"df must be a positive integer, got .*Pass a Python int"):
        change(family, df=df)()


@pytest.mark.parametrize("df", [2.0, 1.5, float("nan"), float("inf"), torch.tensor([5.0, 1.0], dtype=torch.float64)])
def test_df_of_an_inverse_wishart_must_exceed_p_minus_1(df: Any) -> None:
    with pytest.raises(ValueError, match=r"df must be finite and greater than P − 1 = 2, got"):
        InverseWishart(df, EYE)


@pytest.mark.parametrize("df", ["many", "5", None, True])
def test_df_of_an_inverse_wishart_must_be_a_number(df: Any) -> None:
    with pytest.raises(ValueError, match="df must be a real number or a tensor of them, got"):
        InverseWishart(df, EYE)


CASES = {
    "scale_tril not lower": (put("wishart", "scale_tril", (0, 2), 0.3), r"scale_tril must be lower triangular, got 0.3 at index \(0, 2\).*cholesky"),
    "scale_tril zero diagonal": (put("gw", "scale_tril", (1, 1), 0.0), r"diagonal of scale_tril must be positive, got 0 at index \(1,\).*cholesky"),
    "scale_tril negative diagonal": (put("iw", "scale_tril", (1, 1), -1.0), r"diagonal of scale_tril must be positive, got -1"),
    "scale_tril nan": (put("wishart", "scale_tril", (2, 0), float("nan")), r"scale_tril must be finite, got nan at index \(2, 0\)"),
    "row_mixing singular": (change("a-gw", row_mixing=torch.ones(3, 3, dtype=torch.float64)), r"row_mixing must be invertible.*got .*triangular"),
    "row_mixing zero row": (change("a-gw", row_mixing=EYE * torch.tensor([1.0, 0.0, 1.0])), r"row_mixing must be invertible"),
    "row_mixing inf": (put("ab-gw", "row_mixing", (0, 0), float("inf")), r"row_mixing must be finite, got inf"),
    "column_mixing upper": (put("ab-gw", "column_mixing", (0, 1), 0.1), r"column_mixing must be lower triangular, got 0.1 at index \(0, 1\).*tril"),
    "column_mixing singular": (put("ab-gw", "column_mixing", (1, 1), 0.0), r"diagonal of column_mixing must not contain zeros, got 0 at index \(1,\)"),
    "concentration zero": (put("gw", "concentration", (0,), 0.0), r"concentration must be positive and finite, got 0 at index \(0,\).*exp or softplus"),
    "rate negative": (put("a-gw", "rate", (1,), -1.0), r"rate must be positive and finite, got -1"),
    "scale nan": (put("ab-gw", "scale", (2, 1), float("nan")), r"scale must be positive and finite, got nan at index \(2, 1\)"),
    "loc inf": (put("gw", "loc", (2, 0), float("inf")), r"loc must be finite, got inf"),
    "not square": (change("wishart", scale_tril=torch.ones(3, 2)), r"scale_tril must be a tensor of square matrices.*got \(3, 2\)"),
    "no tensor": (change("wishart", scale_tril=[[1.0]]), r"scale_tril must be a tensor of square matrices.*got list"),
    "a vector": (change("a-gw", row_mixing=torch.ones(3)), r"row_mixing must be a tensor of square matrices.*got \(3,\)"),
    "empty": (change("wishart", scale_tril=torch.ones(0, 0)), r"P ≥ 1, got \(0, 0\)"),
    "integers": (change("wishart", scale_tril=torch.eye(3, dtype=torch.long)), r"scale_tril must be a dense float64 or float32 tensor, got torch.int64"),
    "half": (change("wishart", scale_tril=EYE.half()), r"must be a dense float64 or float32 tensor, got torch.float16"),
    "mixed dtypes": (change("gw", rate=torch.ones(2)), r"share one dtype, got .*rate float32"),
    "wrong length": (change("gw", rate=torch.ones(3, dtype=torch.float64)), r"rate must have shape \(\*batch, 2\), got \(3,\)"),
    "wrong loc": (change("gw", loc=torch.ones(3, 3, dtype=torch.float64)), r"loc must have shape \(\*batch, 3, 2\), got \(3, 3\)"),
    "column_mixing too large": (change("ab-gw", column_mixing=EYE), r"column_mixing must have shape \(\*batch, 2, 2\), got \(3, 3\)"),
    "sparse": (change("gw", loc=torch.zeros(3, 2, dtype=torch.float64).to_sparse()), r"loc must be a dense .*got .*sparse"),
    "loc missing": (change("gw", loc=None), r"loc must be a dense float64 or float32 tensor, got NoneType"),
    "column_mixing missing": (change("ab-gw", column_mixing=None, validate_args=False), r"column_mixing must be a dense .*got NoneType"),
    "wrong inverse": (change("wishart", scale_tril_inverse=5 * EYE), r"scale_tril_inverse must be the inverse of scale_tril.*Leave it out"),
    "nan inverse": (change("iw", scale_tril_inverse=float("nan") * EYE), r"scale_tril_inverse must be the inverse of scale_tril"),
    "wrong determinant": (change("a-gw", row_mixing_logabsdet=torch.tensor(77.0, dtype=torch.float64)), r"row_mixing_logabsdet must be log\|det\| of row_mixing.*Leave it out"),
    "no broadcast": (
        change("gw", rate=torch.ones(4, 2, dtype=torch.float64), loc=torch.ones(5, 3, 2, dtype=torch.float64)),
        r"batch shapes of all parameters must broadcast, got scale_tril \(\), .*rate \(4,\), loc \(5,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_parameters_are_refused(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("family", ALL)
def test_nothing_looks_at_values_without_validation(family: str) -> None:
    q = CLASSES[family](**{**parameters(family, 3, 2), "df": 5 if family == "iw" else 2}, validate_args=False)
    bad = {name: value * float("nan") for name, value in parameters(family, 3, 2).items() if torch.is_tensor(value)}
    CLASSES[family](**{**parameters(family, 3, 2), **bad}, validate_args=False)
    assert q.log_prob(torch.full((3, 3), float("nan"), dtype=torch.float64)).isnan()


def test_row_mixing_in_any_units_is_invertible() -> None:
    """Rows or columns of very different size are no sign of a singular matrix."""
    units = torch.tensor([1e-20, 1.0, 1e20], dtype=torch.float64)
    A = parameters("a-gw", 3, 2)["row_mixing"]
    for scaled in (units[:, None] * A, A * units):
        CLASSES["a-gw"](**{**parameters("a-gw", 3, 2), "row_mixing": scaled})


@pytest.mark.parametrize("P", [2, 3, 10, 30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_row_mixing_that_is_singular_but_for_rounding_is_refused(P: int, dtype: torch.dtype) -> None:
    for seed in range(100):
        g = torch.Generator().manual_seed(seed)
        A = torch.randn(P, P - 1, dtype=dtype, generator=g) @ torch.randn(P - 1, P, dtype=dtype, generator=g)
        with pytest.raises(ValueError, match="must be invertible"):
            check_row_mixing(A, None)


@pytest.mark.parametrize("family", ALL)
def test_noise_of_another_shape_is_refused(family: str) -> None:
    q = make(family, 3, 2, batch=(4,))
    for other in (
        make(family, 4, 2, batch=(4,)),
        make(family, 3, 2, batch=(5,)),
        make(family, 3, 2, dtype=torch.float32),
    ):
        with pytest.raises(ValueError, match="draw_noise"):
            q.rsample_bartlett(noise=other.draw_noise())
    with pytest.raises(ValueError, match="draw_noise"):
        q.expand((2, 4)).rsample_bartlett(noise=q.draw_noise())
    with pytest.raises(ValueError, match="Pass noise alone"):
        q.rsample_bartlett((7,), noise=q.draw_noise())


VALUES = {
    "not symmetric in small units": (
        torch.tensor([[1e10, 0.0, 0.0], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]], dtype=torch.float64),
        r"value must be symmetric, got entries that differ by 0.5",
    ),
    "not symmetric": (EYE + torch.tensor([[0, 0, 0.5], [0, 0, 0], [0, 0, 0]]), r"value must be symmetric, got entries that differ by 0.5"),
    "negative definite": (-EYE, r"value must be positive semi-definite, got a matrix with an eigenvalue of -1"),
    "indefinite": (EYE * torch.tensor([1.0, 1.0, -0.2], dtype=torch.float64), r"positive semi-definite, got a matrix with an eigenvalue of -0.2"),
    "nan": (EYE * float("nan"), r"value must be finite, got nan"),
    "inf": (EYE + float("inf"), r"value must be finite, got inf"),
    "wrong size": (torch.eye(4, dtype=torch.float64), r"value must be a tensor of shape \(…, 3, 3\), got \(4, 4\)"),
    "wrong dtype": (torch.eye(3), r"value must have the distribution's dtype.*float64.*float32"),
    "zero": (0 * EYE, r"rank 0"),
}  # fmt: skip


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("case", VALUES)
def test_bad_values_are_refused(family: str, case: str) -> None:
    value, message = VALUES[case]
    with pytest.raises(ValueError, match=message):
        make(family, 3, 3).log_prob(value)


def test_a_value_that_does_not_broadcast_is_refused() -> None:
    q = make("gw", 3, 3, batch=(4,))
    with pytest.raises(ValueError, match=r"broadcast with batch_shape \(4,\), got \(5,\)"):
        q.log_prob(EYE.expand(5, 3, 3))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("df", "found"), [(2, 3), (2, 1), (3, 2), (1, 3)])
def test_a_value_of_the_wrong_rank_is_refused(family: str, df: int, found: int) -> None:
    F = torch.randn(3, found, dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"rank min\(df, P\) = {df}, got a 3×3 matrix of rank {found}.*F @ F.mT"):
        make(family, 3, df).log_prob(F @ F.mT)


def test_the_message_points_at_the_batch_element() -> None:
    values = EYE.expand(2, 4, 3, 3).clone()
    values[1, 2] *= -1
    with pytest.raises(ValueError, match=r"at index \(1, 2\)"):
        make("wishart", 3, 3, batch=(4,)).log_prob(values)


def test_a_singular_leading_block_is_refused() -> None:
    F = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.3, 1.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"leading 2×2 block of value must be non-singular.*Reorder"):
        make("wishart", 3, 2).log_prob(F @ F.mT)


def test_expand_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"batch_shape \(3,\) cannot be expanded to \(2,\)"):
        make("gw", 2, 2, batch=(3,)).expand((2,))
    with pytest.raises(ValueError, match="cannot be expanded"):
        make("iw", 2, 2, batch=(3,)).expand(())


def test_validation_follows_torchs_setting() -> None:
    bad = torch.ones(2, 2, dtype=torch.float64)
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        Wishart(2, bad)
    finally:
        torch.distributions.Distribution.set_default_validate_args(True)
    with pytest.raises(ValueError, match="lower triangular"):
        Wishart(2, bad)
