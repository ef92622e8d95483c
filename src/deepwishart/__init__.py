"""Deep kernel processes in PyTorch: the deep Wishart process and its relatives.

Importing the package loads nothing heavy: a room is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepwishart import (
        data,
        distributions,
        estimators,
        files,
        gram,
        joint,
        kernels,
        layers,
        likelihoods,
        linalg,
        metrics,
        models,
        objectives,
        predictive,
        report,
        shallow,
        starting,
        training,
    )
    from deepwishart.estimators import (
        DGPClassifier,
        DGPRegressor,
        DIWPClassifier,
        DIWPRegressor,
        DWPClassifier,
        DWPRegressor,
    )
    from deepwishart.files import load
    from deepwishart.models import deep_gaussian_process, deep_inverse_wishart_process, deep_wishart_process
    from deepwishart.training import train

__version__ = "0.1.0"
__all__ = [
    "DGPClassifier",
    "DGPRegressor",
    "DIWPClassifier",
    "DIWPRegressor",
    "DWPClassifier",
    "DWPRegressor",
    "__version__",
    "data",
    "deep_gaussian_process",
    "deep_inverse_wishart_process",
    "deep_wishart_process",
    "distributions",
    "estimators",
    "files",
    "gram",
    "joint",
    "kernels",
    "layers",
    "likelihoods",
    "linalg",
    "load",
    "metrics",
    "models",
    "objectives",
    "predictive",
    "report",
    "shallow",
    "starting",
    "train",
    "training",
]

_HOME = {
    "DGPClassifier": "estimators",
    "DGPRegressor": "estimators",
    "DIWPClassifier": "estimators",
    "DIWPRegressor": "estimators",
    "DWPClassifier": "estimators",
    "DWPRegressor": "estimators",
    "load": "files",
    "deep_gaussian_process": "models",
    "deep_inverse_wishart_process": "models",
    "deep_wishart_process": "models",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        globals()[name] = found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        return found
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
