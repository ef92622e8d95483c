"""Sums and products of kernels."""

from collections.abc import Iterator

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
        total, *others = _values(self.kernels, g_ij, g_ii, g_jj)
        for value in others:
            total = total + value
        return total


class Product(Kernel):
    """k₁ · k₂ · …

    Args:
        kernels: At least one.
    """

    def __init__(self, *kernels: Kernel) -> None:
        super().__init__()
        self.kernels = nn.ModuleList(kernels)

    def equation(self, g_ij: Tensor, g_ii: Tensor, g_jj: Tensor) -> Tensor:
        product, *others = _values(self.kernels, g_ij, g_ii, g_jj)
        for value in others:
            product = product * value
        return product


def _values(kernels: nn.ModuleList, g_ij: Tensor, g_ii: Tensor, g_jj: Tensor) -> Iterator[Tensor]:
    for kernel in kernels:
        assert isinstance(kernel, Kernel)
        yield kernel.equation(g_ij, g_ii, g_jj)
