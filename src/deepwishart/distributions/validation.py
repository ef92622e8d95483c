"""Checks of parameters: every refusal names the requirement, what was given, and what to do.

Shapes, dtypes and devices are always checked, since that costs nothing; values only where a distribution
validates its arguments, since looking at a value synchronises a device.
"""

import operator
from typing import Any

import torch
from torch import Tensor

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


def require_integer_df(df: Any) -> int:
    """``df`` as a Python int."""
    try:
        integer = operator.index(df)
    except TypeError:
        integer = 0
    if integer < 1 or isinstance(df, bool):
        raise ValueError(f"df must be a positive integer, got {df!r}. Pass a Python int of at least 1.")
    return integer


def require_real_df(df: Any) -> float:
    """``df`` as a Python float."""
    try:
        return float(df)
    except (TypeError, ValueError):
        raise ValueError(f"df must be a real number or a tensor of them, got {df!r}.") from None


def check_shapes(**parameters: tuple[Tensor | None, tuple[int, ...]]) -> torch.Size:
    """Check every parameter's dtype, device and event shape; return the batch shape they broadcast to.

    Args:
        parameters: For each name, the tensor and the event shape that it must end with. ``None`` is passed over.
    """
    given = {name: (tensor, event) for name, (tensor, event) in parameters.items() if tensor is not None}
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


def check_scale_tril(scale_tril: Tensor) -> None:
    """Lower triangular with a positive diagonal."""
    remedy = "Pass torch.linalg.cholesky(scale)."
    check_finite("scale_tril", scale_tril)
    _check_lower("scale_tril", scale_tril, remedy)
    diagonal = scale_tril.diagonal(dim1=-2, dim2=-1)
    _require(diagonal > 0, diagonal, "The diagonal of scale_tril must be positive", remedy)


def check_row_mixing(row_mixing: Tensor) -> None:
    """Invertible to working precision, whatever the scale of its rows."""
    check_finite("row_mixing", row_mixing)
    row_norm = row_mixing.abs().amax(-1, keepdim=True)
    lu, _, _ = torch.linalg.lu_factor_ex(row_mixing / row_norm.clamp_min(torch.finfo(row_mixing.dtype).tiny))
    pivots = lu.diagonal(dim1=-2, dim2=-1).abs()
    smallest = pivots.amin(-1) / pivots.amax(-1)
    tolerance = row_mixing.shape[-1] * torch.finfo(row_mixing.dtype).eps
    _require(
        smallest > tolerance,
        smallest,
        f"row_mixing must be invertible: the ratio of its smallest pivot to its largest must exceed {tolerance:.1e}",
        "Start from the identity, or write it as a product of triangular matrices with a positive diagonal.",
    )


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
    if not isinstance(tensor, Tensor) or tensor.dtype not in _SUPPORTED_DTYPES:
        kind = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} must be a float64 or float32 tensor, got {kind}. Convert it with .to(torch.float64).")
    if tensor.ndim < len(event_shape) or tuple(tensor.shape[tensor.ndim - len(event_shape) :]) != event_shape:
        expected = ", ".join(("*batch", *map(str, event_shape)))
        raise ValueError(
            f"{name} must have shape ({expected}), got {tuple(tensor.shape)}. P is the size of the matrices, and the "
            f"Bartlett factor has min(df, P) columns."
        )


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
