"""Checks of parameters: every refusal names the requirement, what was given, and what to do.

Shapes, dtypes and devices are always checked, since that costs nothing; values only where a distribution
validates its arguments, since looking at a value synchronises a device.
"""

import numbers
import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deepwishart.linalg import half_logdet, log_abs_det

__all__ = [
    "check_column_mixing",
    "check_finite",
    "check_positive",
    "check_real_df",
    "check_row_mixing",
    "check_scale_tril",
    "check_shapes",
    "require_integer_df",
    "require_real_df",
    "square_size",
    "where_in",
]

_SUPPORTED_DTYPES = (torch.float32, torch.float64)
_LARGEST_DF = 10**15  # a float64 holds all integers up to there, and their halves


def require_integer_df(df: Any) -> int:
    """``df`` as a Python int."""
    try:
        integer = operator.index(df)
    except (TypeError, RuntimeError):
        integer = 0
    is_bool = isinstance(df, bool) or (isinstance(df, Tensor) and df.dtype == torch.bool)
    if not 1 <= integer <= _LARGEST_DF or is_bool:
        raise ValueError(f"df must be a positive integer, got {df!r}. Pass a Python int from 1 to {_LARGEST_DF:.0e}.")
    return integer


def require_real_df(df: Any) -> float:
    """``df`` as a Python float."""
    if isinstance(df, bool) or not isinstance(df, numbers.Real):
        raise ValueError(f"df must be a real number or a tensor of them, got {df!r}.")
    return float(df)


def check_shapes(
    required: Mapping[str, tuple[Tensor, tuple[int, ...]]],
    optional: Mapping[str, tuple[Tensor | None, tuple[int, ...]]] = MappingProxyType({}),
) -> torch.Size:
    """Check every parameter's dtype, device and event shape; return the batch shape they broadcast to.

    Args:
        required: For each name, the tensor and the event shape that it must end with.
        optional: The same for parameters that may be ``None``.
    """
    given = dict(required)
    given.update({name: (tensor, event) for name, (tensor, event) in optional.items() if tensor is not None})
    for name, (tensor, event_shape) in given.items():
        _check_form(name, tensor, event_shape)
    _check_agreement("dtype", {name: str(tensor.dtype) for name, (tensor, _) in given.items()})
    _check_agreement("device", {name: str(tensor.device) for name, (tensor, _) in given.items()})
    batch_shapes = {name: tuple(tensor.shape[: tensor.ndim - len(event)]) for name, (tensor, event) in given.items()}
    try:
        return torch.broadcast_shapes(*batch_shapes.values())
    except RuntimeError:
        listed = ", ".join(f"{name} {shape}" for name, shape in batch_shapes.items())
        raise ValueError(
            f"The batch shapes of all parameters must broadcast, got {listed}. Insert dimensions of size 1 where a "
            f"parameter is shared."
        ) from None


def square_size(name: str, tensor: Tensor) -> int:
    """P of a tensor of shape ``(*batch, P, P)``."""
    given = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    if isinstance(given, str) or len(given) < 2 or given[-1] != given[-2] or given[-1] < 1:
        raise ValueError(f"{name} must be a tensor of square matrices, shape (*batch, P, P) with P ≥ 1, got {given}.")
    return given[-1]


def check_scale_tril(scale_tril: Tensor, inverse: Tensor | None, logabsdet: Tensor | None = None) -> None:
    """Lower triangular with a positive diagonal, and the inverse and determinant, where given, its own."""
    remedy = "Pass torch.linalg.cholesky(scale)."
    check_finite("scale_tril", scale_tril)
    _check_lower("scale_tril", scale_tril, remedy)
    diagonal = scale_tril.diagonal(dim1=-2, dim2=-1)
    _require(diagonal > 0, diagonal, "The diagonal of scale_tril must be positive", remedy)
    if inverse is not None:
        identity = torch.eye(scale_tril.shape[-1], dtype=scale_tril.dtype, device=scale_tril.device)
        error = (inverse @ scale_tril - identity).abs().amax((-2, -1))
        _require(
            error <= _shortcut_tolerance(scale_tril),
            error,
            "scale_tril_inverse must be the inverse of scale_tril: their product must differ little from the identity",
            "Leave it out, or pass deepwishart.linalg.inverse_tril(scale_tril).",
        )
    if logabsdet is not None:
        _check_logabsdet("scale_tril", half_logdet(scale_tril), logabsdet, "half_logdet")


def check_row_mixing(row_mixing: Tensor, logabsdet: Tensor | None) -> None:
    """Invertible to working precision in any units of rows and columns, and the determinant, where given, its own."""
    check_finite("row_mixing", row_mixing)
    tiny, eps = torch.finfo(row_mixing.dtype).tiny, torch.finfo(row_mixing.dtype).eps
    A = row_mixing / row_mixing.abs().amax(-1, keepdim=True).clamp_min(tiny)
    A = A / A.abs().amax(-2, keepdim=True).clamp_min(tiny)
    inverse, _ = torch.linalg.inv_ex(A)
    rcond = 1 / (torch.linalg.matrix_norm(A, 1) * torch.linalg.matrix_norm(inverse, 1))
    tolerance = row_mixing.shape[-1] * eps
    _require(
        rcond > tolerance,
        rcond,
        f"row_mixing must be invertible: the reciprocal of its condition number must exceed {tolerance:.1e}",
        "Start from the identity, or write it as a product of triangular matrices with a positive diagonal.",
    )
    if logabsdet is not None:
        _check_logabsdet("row_mixing", log_abs_det(row_mixing), logabsdet, "log_abs_det")


def check_column_mixing(column_mixing: Tensor) -> None:
    """Lower triangular without a zero on the diagonal."""
    remedy = "Pass column_mixing.tril() with a diagonal away from zero."
    check_finite("column_mixing", column_mixing)
    _check_lower("column_mixing", column_mixing, remedy)
    diagonal = column_mixing.diagonal(dim1=-2, dim2=-1)
    _require(diagonal != 0, diagonal, "The diagonal of column_mixing must not contain zeros", remedy)


def check_positive(name: str, tensor: Tensor, counts: Tensor | None = None) -> None:
    """Positive and finite, where ``counts`` is true (everywhere by default)."""
    valid = (tensor > 0) & tensor.isfinite()
    valid = valid if counts is None else valid | ~counts
    _require(valid, tensor, f"{name} must be positive and finite", "Parametrise it by exp or softplus.")


def check_finite(name: str, tensor: Tensor) -> None:
    """No NaN, no infinity."""
    _require(tensor.isfinite(), tensor, f"{name} must be finite", "Look for NaN or infinity in what it is made from.")


def check_real_df(df: Tensor, size: int) -> None:
    """Above P − 1, as a non-singular inverse Wishart needs."""
    valid = (df > size - 1) & df.isfinite()
    _require(valid, df, f"df must be finite and greater than P − 1 = {size - 1}", "Raise df or reduce the matrix.")


def where_in(invalid: Tensor) -> str:
    """`` at index (…)`` of the first true element, or nothing for a scalar."""
    index = tuple(invalid.nonzero()[0].tolist())
    return f" at index {index}" if index else ""


def _check_form(name: str, tensor: Tensor, event_shape: tuple[int, ...]) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in _SUPPORTED_DTYPES or tensor.layout != torch.strided:
        kind = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(
            f"{name} must be a dense float64 or float32 tensor, got {kind}. Convert it with .to(torch.float64)."
        )
    if tensor.ndim < len(event_shape) or tuple(tensor.shape[tensor.ndim - len(event_shape) :]) != event_shape:
        expected = ", ".join(("*batch", *map(str, event_shape)))
        raise ValueError(
            f"{name} must have shape ({expected}), got {tuple(tensor.shape)}. P is the size of the matrices, and the "
            f"Bartlett factor has min(df, P) columns."
        )


def _check_logabsdet(name: str, expected: Tensor, given: Tensor, function: str) -> None:
    error = (expected - given).abs()
    _require(
        error <= _shortcut_tolerance(given) * (1 + given.abs()),
        error,
        f"{name}_logabsdet must be log|det| of {name}: the difference must be small",
        f"Leave it out, or pass deepwishart.linalg.{function}({name}).",
    )


def _shortcut_tolerance(like: Tensor) -> float:
    """What a caller may supply is an error only if it is grossly wrong: 1e-4 in float64, 2e-2 in float32."""
    return float(torch.finfo(like.dtype).eps) ** 0.25


def _check_lower(name: str, matrix: Tensor, remedy: str) -> None:
    _require(matrix.triu(1) == 0, matrix, f"{name} must be lower triangular", remedy)


def _require(valid: Tensor, values: Tensor, requirement: str, remedy: str) -> None:
    if not valid.all():
        first = values[~valid].flatten()[0].item()
        raise ValueError(f"{requirement}, got {first:.6g}{where_in(~valid)}. {remedy}")


def _check_agreement(what: str, given: dict[str, str]) -> None:
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{name} {value.removeprefix('torch.')}" for name, value in given.items())
        raise ValueError(f"All parameters must share one {what}, got {listed}. Convert them with .to(…).")
