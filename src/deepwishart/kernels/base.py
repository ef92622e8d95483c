"""A kernel is one equation on the entries of a Gram matrix; blocks and batches are the base's business."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepwishart.gram import AnyGram, Gram
from deepwishart.linalg import column_norms, shared_matmul

__all__ = ["Kernel", "Projection", "ScaledKernel"]


class Projection(NamedTuple):
    """What a layer needs of a = W k_it, so that neither need be kept.

    Attributes:
        mean: Xᵀa, shape ``(*sample, *batch, columns, N)``.
        norms: ‖a_t‖², shape ``(*sample, *batch, N)``.
    """

    mean: Tensor
    norms: Tensor


class Kernel(nn.Module, ABC):
    """Maps a Gram matrix to a Gram matrix, entry by entry."""

    @abstractmethod
    def equation(self, g_ij: Tensor, g_ii: Tensor, g_jj: Tensor) -> Tensor:
        """k(x_i, x_j) from the three inner products of x_i and x_j, which broadcast to (*sample, *batch, ·, ·)."""

    def forward(self, gram: AnyGram) -> Gram:
        """Apply the equation to every block."""
        return Gram(self.ii(gram), self.it(gram), self.tt(gram))

    def ii(self, gram: AnyGram) -> Tensor:
        """The block of the inducing points, shape ``(*sample, *batch, M, M)``."""
        G = gram.ii
        d = G.diagonal(dim1=-2, dim2=-1)
        return self.equation(G, d[..., :, None], d[..., None, :])

    def it(self, gram: AnyGram) -> Tensor:
        """Inducing points with the others, shape ``(*sample, *batch, M, N)``."""
        return self.equation(gram.it, gram.diagonal[..., :, None], gram.tt[..., None, :])

    def tt(self, gram: AnyGram) -> Tensor:
        """The others with themselves, shape ``(*sample, *batch, N)``."""
        t = gram.tt[..., None, :]
        return self.equation(t, t, t).squeeze(-2)

    def project(self, gram: AnyGram, W: Tensor, X: Tensor) -> Projection:
        """Xᵀa and ‖a_t‖² of a = W k_it.

        Args:
            gram: The Gram matrix that the kernel is applied to.
            W: Shape ``(*sample, *batch, M, M)``.
            X: Shape ``(*sample, *batch, M, columns)``; it may have sample dimensions that the others have not.
        """
        a = W @ self.it(gram)
        return Projection(shared_matmul(a.mT, X).mT, column_norms(a))

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
