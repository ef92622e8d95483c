"""Random matrices, and the products of torch beside those of the C library for several processors."""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepwishart.products.native import Native, library_for, load
from tests.distributions.instances import generator

# With 8, 4 and 2 numbers in a vector, as far as this processor has them.
ARCHITECTURES = ("-march=native", "-march=haswell", "-march=x86-64")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def library(architecture: str) -> ctypes.CDLL:
    """For a processor; the test is skipped where it cannot be made or used."""
    if load().library is None:
        pytest.skip(f"no C library here: {load().problem}")
    if architecture == "-march=haswell" and " avx2 " not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("this processor has no AVX2")
    compiler = shutil.which("cc")
    assert compiler is not None
    return library_for(architecture, compiler)


def use(monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL | None) -> None:
    """Let products be those of a library, or torch's."""
    monkeypatch.setattr("deepwishart.products.load", lambda: Native(library))
