"""Kernels by name, as arguments, files and the command line spell them."""

import torch

from deepwishart.kernels.base import Kernel, ScaledKernel
from deepwishart.kernels.composite import Product, Sum
from deepwishart.kernels.dot_product import ArcCosine0, ArcCosine1, Linear
from deepwishart.kernels.stationary import Matern12, Matern32, Matern52, RationalQuadratic, SquaredExponential

__all__ = ["KERNELS", "make_kernel"]

KERNELS: dict[str, type[ScaledKernel]] = {
    "squared-exponential": SquaredExponential,
    "matern-1/2": Matern12,
    "matern-3/2": Matern32,
    "matern-5/2": Matern52,
    "rational-quadratic": RationalQuadratic,
    "arc-cosine-0": ArcCosine0,
    "arc-cosine-1": ArcCosine1,
    "linear": Linear,
}


def make_kernel(
    name: str,
    batch_shape: torch.Size = torch.Size(),
    learn_lengthscale: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Kernel:
    """A kernel from its name, or from an expression such as ``"squared-exponential + linear * matern-5/2"``.

    Args:
        name: A key of :data:`KERNELS`, or several joined by ``+`` and ``*``; products bind more tightly.
        batch_shape: Shape of the replicas.
        learn_lengthscale: Whether the first kernel has a lengthscale of its own. At the inputs it has not, since
            theirs do its work; every other kernel of an expression has one, relative to them.
        dtype: Of the parameters.
    """
    terms = [[factor.strip() for factor in term.split("*")] for term in name.split("+")]
    unknown = [factor for term in terms for factor in term if factor not in KERNELS]
    if unknown:
        raise ValueError(
            f"kernel must be one of {', '.join(KERNELS)}, or several joined by + and *, got {name!r}: "
            f"there is no {unknown[0]!r}."
        )
    products = []
    for i, term in enumerate(terms):
        factors = [KERNELS[factor](batch_shape, learn_lengthscale or i + j > 0, dtype) for j, factor in enumerate(term)]
        products.append(Product(*factors) if len(factors) > 1 else factors[0])
    return Sum(*products) if len(products) > 1 else products[0]
