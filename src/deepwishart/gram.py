"""The Gram matrix that travels through a model, in the three blocks that are ever needed."""

from typing import NamedTuple

from torch import Tensor

__all__ = ["Gram", "gram_of_features"]


class Gram(NamedTuple):
    """Blocks of a Gram (or kernel) matrix over M inducing points i and N other points t.

    The other points are independent of one another given the inducing points, so of their own block only the
    diagonal is needed.

    Attributes:
        ii: Inducing points with one another, shape ``(*sample, *batch, M, M)``.
        it: Inducing points with other points, shape ``(*sample, *batch, M, N)``.
        tt: Other points with themselves, shape ``(*sample, *batch, N)``.
    """

    ii: Tensor
    it: Tensor
    tt: Tensor

    @property
    def diagonal(self) -> Tensor:
        """The diagonal of ``ii``, shape ``(*sample, *batch, M)``."""
        return self.ii.diagonal(dim1=-2, dim2=-1)

    def __truediv__(self, divisor: float) -> "Gram":
        """Every block divided by a number."""
        return Gram(self.ii / divisor, self.it / divisor, self.tt / divisor)


def gram_of_features(inducing: Tensor, points: Tensor) -> Gram:
    r"""The Gram matrix :math:`F F^\top / D` of features (*batch, M, D) and (*batch, N, D)."""
    D = inducing.shape[-1]
    return Gram(inducing @ inducing.mT / D, inducing @ points.mT / D, (points**2).sum(-1) / D)
