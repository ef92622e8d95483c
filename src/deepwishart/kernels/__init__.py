"""Kernels as functions of a Gram matrix: every layer of a deep kernel process applies one to the Gram matrix below."""

from deepwishart.kernels.base import Kernel, ScaledKernel
from deepwishart.kernels.composite import Product, Sum
from deepwishart.kernels.dot_product import ArcCosine0, ArcCosine1, Linear
from deepwishart.kernels.names import KERNELS, make_kernel
from deepwishart.kernels.stationary import (
    Matern12,
    Matern32,
    Matern52,
    RationalQuadratic,
    SquaredExponential,
    Stationary,
)

__all__ = [
    "KERNELS",
    "ArcCosine0",
    "ArcCosine1",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Product",
    "RationalQuadratic",
    "ScaledKernel",
    "SquaredExponential",
    "Stationary",
    "Sum",
    "make_kernel",
]
