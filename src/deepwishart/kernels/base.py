"""A kernel is one equation on the entries of a Gram matrix; blocks and batches are the base's business."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from deepwishart.gram import Gram

__all__ = ["Kernel", "ScaledKernel"]


class Kernel(nn.Module, ABC):
    """Maps a Gram matrix to a Gram matrix, entry by entry."""

    @abstractmethod
    def equation(self, g_ij: Tensor, g_ii: Tensor, g_jj: Tensor) -> Tensor:
        """k(x_i, x_j) from the three inner products of x_i and x_j, which broadcast to (*sample, *batch, ·, ·)."""

    def forward(self, gram: Gram) -> Gram:
        """Apply the equation to every block."""
        d, t = gram.diagonal, gram.tt[..., None, :]
        return Gram(
            ii=self.equation(gram.ii, d[..., :, None], d[..., None, :]),
            it=self.equation(gram.it, d[..., :, None], t),
            tt=self.equation(t, t, t).squeeze(-2),
        )

    def __add__(self, other: "Kernel") -> "Kernel":
        from deepwishart.kernels.composite import Sum

        return Sum(self, other)

    def __mul__(self, other: "Kernel") -> "Kernel":
        from deepwishart.kernels.composite import Product

        return Product(self, other)


class ScaledKernel(Kernel):
    r"""A kernel with a height: :math:`h^2 k`, and for those that have one a lengthscale λ.

    Args:
        batch_shape: Shape of the replicas; each has its own parameters.
        learn_lengthscale: Whether λ is a parameter. At the inputs it is not: their own lengthscales do its work.
        dtype: Of the parameters.
    """

    has_lengthscale = False

    def __init__(
        self,
        batch_shape: torch.Size = torch.Size(),
        learn_lengthscale: bool = True,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.log_height = nn.Parameter(torch.zeros(batch_shape, dtype=dtype))
        zeros = torch.zeros(batch_shape, dtype=dtype)
        if self.has_lengthscale and learn_lengthscale:
            self.log_lengthscale = nn.Parameter(zeros)
        else:
            self.register_buffer("log_lengthscale", zeros)

    @property
    def variance(self) -> Tensor:
        """h², shape ``(*batch, 1, 1)``."""
        return (2 * self.log_height).exp()[..., None, None]

    @property
    def squared_lengthscale(self) -> Tensor:
        """λ², shape ``(*batch, 1, 1)``."""
        return (2 * self.log_lengthscale).exp()[..., None, None]
