"""Deep kernel processes in PyTorch: the deep Wishart process and its relatives.

Importing the package loads nothing heavy: a room is imported when it is first used.
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"
__all__ = ["__version__", "distributions", "gram", "kernels", "linalg"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
