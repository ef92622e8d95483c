"""Sums and products of kernels."""

import math
from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn

from deepwishart.kernels.base import Kernel

__all__ = ["Product", "Sum"]


class Sum(Kernel):
    """k₁ + k₂ + …

    Args:
        kernels: At least one.
    """

    def __init__(self, *kernels: Kernel) -> None:
        super().__init__()
        self.kernels = nn.ModuleList(kernels)

    def equation(self, g_ij: Tensor, g_ii: Tensor, g_jj: Tensor) -> Tensor:
        return cast(Tensor, sum(kernel.equation(g_ij, g_ii, g_jj) for kernel in _kernels(self.kernels)))


class Product(Kernel):
    """k₁ · k₂ · …

    Args:
        kernels: At least one.
    """

    def __init__(self, *kernels: Kernel) -> None:
        super().__init__()
        self.kernels = nn.ModuleList(kernels)

    def equation(self, g_ij: Tensor, g_ii: Tensor, g_jj: Tensor) -> Tensor:
        return cast(Tensor, math.prod(kernel.equation(g_ij, g_ii, g_jj) for kernel in _kernels(self.kernels)))


def _kernels(modules: nn.ModuleList) -> Iterator[Kernel]:
    return cast(Iterator[Kernel], iter(modules))
