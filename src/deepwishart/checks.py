"""What a user gives: whole numbers, devices, and tables that a model can be made for."""

import operator
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_data", "find_device", "require_whole"]


def require_whole(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least so much, as a Python int, or an error."""
    try:
        integer = operator.index(value)
    except TypeError:
        integer = least - 1
    if integer < least or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value}.")
    return integer


def find_device(name: str) -> torch.device:
    """A device by its name, ``"auto"`` for a GPU where there is one; an error if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"device {name!r} cannot be used here ({reason}). Choose 'auto' or 'cpu'.") from error
    return device


def check_data(inputs: Tensor, targets: Tensor) -> None:
    """Refuse inputs and targets (*batch, N, outputs) that no model can be made for."""
    if inputs.ndim < 2 or 0 in inputs.shape:
        raise ValueError(f"inputs must have shape (*batch, N, D) without a zero, got {tuple(inputs.shape)}.")
    if inputs.dtype not in (torch.float32, torch.float64) or targets.dtype != inputs.dtype:
        raise ValueError(
            f"inputs and targets must share float64 or float32, got {inputs.dtype} and {targets.dtype}. Convert them "
            f"with .to(torch.float64)."
        )
    if targets.shape[:-1] != inputs.shape[:-1] or targets.shape[-1] < 1:
        raise ValueError(
            f"targets must have shape (*batch, N) or (*batch, N, outputs) with the rows of inputs "
            f"{tuple(inputs.shape[:-1])}, got {tuple(targets.shape)}."
        )
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        finite = tensor.isfinite()
        if not finite.all():
            index = tuple((~finite).nonzero()[0].tolist())
            raise ValueError(
                f"{name} must be finite, got {tensor[index].item()} at {index}. Remove or impute such rows."
            )
