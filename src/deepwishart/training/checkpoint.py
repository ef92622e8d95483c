"""Checkpoints: one safetensors file, written so that a crash at any moment leaves a whole one."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["CheckpointError", "fingerprint", "prepare_checkpoint", "read_checkpoint", "write_checkpoint"]

_FORMAT = "deepwishart-checkpoint"
_VERSION = 1


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or belongs to another run."""


def write_checkpoint(path: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Write tensors and a JSON record; the old file is replaced at once or not at all."""
    from safetensors.torch import save

    metadata = {"format": _FORMAT, "version": str(_VERSION), "record": json.dumps(record)}
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def prepare_checkpoint(path: Path) -> None:
    """Make the folder, and clear away what a killed process was writing."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder. Give the path of a file in it, such as {path / 'run.safetensors'}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    for rubbish in path.parent.glob(f".{path.name}.*.part"):
        rubbish.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What :func:`write_checkpoint` wrote. Reading executes nothing.

    Raises:
        CheckpointError: If the file is no checkpoint, is damaged, or comes from a newer version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise CheckpointError(f"{path} is no checkpoint of deepwishart. Give another path, or move it away.")
            if int(metadata["version"]) > _VERSION:
                raise CheckpointError(f"{path} was written by a newer deepwishart. Update, or start a new run.")
            record = json.loads(metadata["record"])
            return {name: file.get_tensor(name) for name in file.keys()}, record  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint ({error}). Move it away to start anew."
        ) from error


def fingerprint(*tensors: Tensor) -> str:
    """A digest of tensors' shapes, dtypes and values."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make the new name last, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
