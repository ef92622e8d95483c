"""Deep kernel processes in PyTorch: the deep Wishart process and its relatives.

Importing the package loads nothing heavy: a room is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepwishart import (
        distributions,
        gram,
        kernels,
        layers,
        likelihoods,
        linalg,
        models,
        objectives,
        predictive,
        training,
    )
    from deepwishart.models import deep_gaussian_process, deep_inverse_wishart_process, deep_wishart_process
    from deepwishart.training import train

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "deep_gaussian_process",
    "deep_inverse_wishart_process",
    "deep_wishart_process",
    "distributions",
    "gram",
    "kernels",
    "layers",
    "likelihoods",
    "linalg",
    "models",
    "objectives",
    "predictive",
    "train",
    "training",
]

_HOME = {
    "deep_gaussian_process": "models",
    "deep_inverse_wishart_process": "models",
    "deep_wishart_process": "models",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
