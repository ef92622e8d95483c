"""The C library behind :mod:`deepwishart.products`: compiled for this machine when it is first needed, and kept."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["SWITCH", "Native", "library_for", "load"]

SWITCH = "DEEPWISHART_NATIVE"
_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fopenmp", "-fPIC")
_SECONDS = 120

_number, _whole, _pointer = ctypes.c_double, ctypes.c_long, ctypes.c_void_p
_matrix = (_pointer, _whole, _whole, _whole)


class Native(NamedTuple):
    """The library, or why there is none.

    Attributes:
        library: With the functions of native.c.
        problem: Empty if there is one.
    """

    library: ctypes.CDLL | None
    problem: str = ""


@functools.cache
def load() -> Native:
    """The library for this machine, compiled if it has not been.

    It takes a C compiler, on Linux and x86-64, and is not used where the environment variable ``DEEPWISHART_NATIVE`` is
    0. Without it torch computes the same, more slowly.
    """
    if os.environ.get(SWITCH) == "0":
        return Native(None, f"{SWITCH} is 0")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return Native(None, f"written for Linux on x86_64, not for {sys.platform} on {platform.machine()}")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return Native(None, "there is no C compiler (cc, or what CC names)")
    try:
        library = library_for("-march=native", compiler)
    except (OSError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return Native(None, f"{compiler} made no library that can be used here: {detail.strip()}")
    if not _computes(library):
        return Native(None, f"the library that {compiler} made computes something else")
    return Native(library)


def library_for(architecture: str, compiler: str) -> ctypes.CDLL:
    """The library for a processor, as the compiler's options name it; kept in the user's cache if that can be written.

    Its name holds all that it depends on, so that machines of several kinds may share a home.
    """
    ingredients = (_SOURCE.read_bytes(), *_FLAGS, architecture, compiler, _run(compiler, "--version"), _processor())
    digest = hashlib.sha256(repr(ingredients).encode()).hexdigest()[:16]
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepwishart" / f"native-{digest}.so"
    if kept.exists():
        with suppress(OSError, AttributeError):  # a damaged one is made anew
            return _open(kept)
    with tempfile.TemporaryDirectory() as folder:
        compiled, linked = Path(folder, "native.o"), Path(folder, "native.so")
        _run(compiler, *_FLAGS, architecture, "-c", str(_SOURCE), "-o", str(compiled))
        # OpenMP is left to torch's own, which is loaded: a second one would fight it for the cores.
        _run(compiler, "-shared", str(compiled), "-o", str(linked), "-lm")
        with suppress(OSError):  # a cache need not be writable
            _keep(linked, kept)
        return _open(linked)


def _keep(linked: Path, kept: Path) -> None:
    """Put it in its place at once, since another process may be about to read it."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        Path(shutil.copy(linked, folder)).replace(kept)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout


def _processor() -> list[str]:
    """The instructions that this processor has, as the kernel lists them."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return sorted({line for line in lines if line.startswith(("flags", "model name"))})


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    result = (_pointer, _whole, _whole)
    finish = (_number, ctypes.c_int, ctypes.c_int, _pointer, _whole)
    library.product.argtypes = [*(_whole,) * 4, *_matrix, *_matrix, *result, *finish]
    library.inverse_factor.argtypes = [*(_whole,) * 2, *(_pointer,) * 4]
    library.project.argtypes = [*(_whole,) * 5, *(_pointer,) * 7]
    library.pull_back_projection.argtypes = [*(_whole,) * 5, *(_pointer,) * 7, ctypes.c_int, *(_pointer,) * 3]
    library.kernel_matrices.argtypes = [*(_whole,) * 5, *(_pointer,) * 10]
    library.pull_back_kernel.argtypes = [*(_whole,) * 5, *(_pointer,) * 16]
    library.make_scale.argtypes = [*(_whole,) * 4, _number, *(_pointer,) * 14]
    library.pull_back_scale.argtypes = [*(_whole,) * 4, _number, *(_pointer,) * 18]
    library.make_output.argtypes = [*(_whole,) * 4, *(_pointer,) * 9]
    library.pull_back_output.argtypes = [*(_whole,) * 4, *(_pointer,) * 12]
    return library


def _computes(library: ctypes.CDLL) -> bool:
    """Whether it multiplies two matrices as torch does."""
    A = torch.arange(900, dtype=torch.float64).reshape(30, 30).cos()
    C = torch.empty_like(A)
    whole = (C.data_ptr(), 0, 30)
    failed = library.product(1, 30, 30, 30, A.data_ptr(), 0, 30, 1, A.data_ptr(), 0, 1, 30, *whole, 1.0, 0, 0, None, 0)
    return not failed and torch.allclose(C, A @ A.mT, rtol=0, atol=1e-12)
