"""The three processes that estimators fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deepwishart.models import (
    DeepKernelProcess,
    deep_gaussian_process,
    deep_inverse_wishart_process,
    deep_wishart_process,
)

__all__ = ["DGP", "DIWP", "DWP"]

_MAX_WIDTH = 16


@dataclass(kw_only=True, eq=False, repr=False)
class DWP:
    """Hidden layers are Wishart.

    Attributes:
        posterior: ``"gw"``, ``"a-gw"`` or ``"ab-gw"``.
        widths: ν of all hidden layers, or of each; the number of inputs by default, and at most 16.
    """

    posterior: str = "ab-gw"
    widths: int | Sequence[int] | None = None

    def _make_model(self, X: Tensor, Y: Tensor, **options: Any) -> DeepKernelProcess:
        widths = _widths(self.widths, X)
        return deep_wishart_process(X, Y, posterior=self.posterior, widths=widths, initialisation="whitened", **options)


@dataclass(kw_only=True, eq=False, repr=False)
class DGP:
    """Hidden layers are features of a deep GP with global inducing points.

    Attributes:
        widths: ν of all hidden layers, or of each; the number of inputs by default, and at most 16.
    """

    widths: int | Sequence[int] | None = None

    def _make_model(self, X: Tensor, Y: Tensor, **options: Any) -> DeepKernelProcess:
        return deep_gaussian_process(X, Y, widths=_widths(self.widths, X), **options)


class DIWP:
    """Hidden layers are inverse Wishart, and have no width."""

    def _make_model(self, X: Tensor, Y: Tensor, **options: Any) -> DeepKernelProcess:
        return deep_inverse_wishart_process(X, Y, **options)


def _widths(widths: int | Sequence[int] | None, X: Tensor) -> int | Sequence[int]:
    return min(X.shape[-1], _MAX_WIDTH) if widths is None else widths
