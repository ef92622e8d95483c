"""The Gram matrix that travels through a model, in the three blocks that are ever needed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["AnyGram", "FeatureGram", "Gram", "deal", "gram_of_features"]


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


@dataclass(frozen=True)
class FeatureGram:
    """A Gram matrix of low rank, kept as the features that make it; reads, and unpacks, like :class:`Gram`.

    A kernel that works on features directly never writes the largest block down.

    Attributes:
        inducing: F, shape ``(*sample, *batch, M, r)``.
        points: f, points last, shape ``(*sample, *batch, r, N)``.
        tt: Other points with themselves, ‖f_t‖² at least: they may have features that no inducing point has.
    """

    inducing: Tensor
    points: Tensor
    tt: Tensor

    @property
    def ii(self) -> Tensor:
        """F Fᵀ."""
        return self.inducing @ self.inducing.mT

    @property
    def it(self) -> Tensor:
        """F f."""
        return self.inducing @ self.points

    @property
    def diagonal(self) -> Tensor:
        """The diagonal of ``ii``."""
        return (self.inducing * self.inducing).sum(-1)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.ii, self.it, self.tt))

    def deal(self) -> "FeatureGram":
        """Each of S samples, the first dimension, with points of its own: sample s keeps the points s, s + S, …"""
        points, tt = (deal(x, len(x)).diagonal(dim1=0, dim2=1).movedim(-1, 0) for x in (self.points, self.tt))
        return FeatureGram(self.inducing, points, tt)

    def __truediv__(self, divisor: float) -> "FeatureGram":
        """Every block divided by a positive number."""
        root = divisor**0.5
        return FeatureGram(self.inducing / root, self.points / root, self.tt / divisor)


AnyGram = Gram | FeatureGram


def deal(x: Tensor, num_samples: int) -> Tensor:
    """Points, the last dimension, dealt out to S samples in turn: (…, N) → (S, …, N/S). N is a multiple of S."""
    return x.unflatten(-1, (-1, num_samples)).movedim(-1, 0)


def gram_of_features(inducing: Tensor, points: Tensor) -> FeatureGram:
    r"""The Gram matrix :math:`F F^\top / D` of features (*batch, M, D) and (*batch, N, D)."""
    return FeatureGram(inducing, points.mT, (points * points).sum(-1)) / inducing.shape[-1]
