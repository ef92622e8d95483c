"""The files of a fit that is not finished: one of the features, one of noise that varies."""

import os
from pathlib import Path

from deepwishart.likelihoods import HeteroscedasticGaussian
from deepwishart.models import DeepKernelProcess

__all__ = ["checkpoint_of", "remove_checkpoints"]


def checkpoint_of(model: DeepKernelProcess, path: str | os.PathLike[str]) -> Path:
    """The file of a run: that of noise which varies goes on from another run, and lies beside the file of that."""
    features, noise = _checkpoints(path)
    return noise if isinstance(model.likelihood, HeteroscedasticGaussian) else features


def remove_checkpoints(path: str | os.PathLike[str]) -> None:
    """All files of a fit."""
    for file in _checkpoints(path):
        file.unlink(missing_ok=True)


def _checkpoints(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The file of the features, and that of noise which varies."""
    path = Path(path)
    return path, path.with_name(f"{path.name}.noise")
