"""How the C library is found, compiled and kept, and what happens where it cannot be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepwishart.products import native, product
from deepwishart.products.native import SWITCH, load
from tests.products.instances import library, normal, use


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library("-march=native")  # the tests are skipped where there is none
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def look() -> native.Native:
    """Without what this process has already found."""
    return load.__wrapped__()


def executable(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_it_is_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look().library is not None
    (kept,) = (tmp_path / "deepwishart").iterdir()
    written = kept.stat().st_mtime_ns
    monkeypatch.setattr(native, "_keep", lambda *_: pytest.fail("compiled again"))
    assert look().library is not None
    assert kept.stat().st_mtime_ns == written


def test_a_cache_that_cannot_be_written_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    found = look()
    assert found.library is not None
    assert found.problem == ""


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert look() == (None, "DEEPWISHART_NATIVE is 0")


def test_other_processors_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert look() == (None, "written for Linux on x86_64, not for linux on aarch64")


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert look() == (None, "there is no C compiler (cc, or what CC names)")


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = executable(tmp_path / "cc", "#!/bin/sh\necho 'no such option' >&2; exit 1\n")
    monkeypatch.setenv("CC", compiler)
    assert look() == (None, f"{compiler} made no library that can be used here: no such option")
    assert not (tmp_path / "deepwishart").exists()


def test_a_library_that_computes_something_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "wrong.c"
    wrong.write_text(native._SOURCE.read_text(encoding="utf-8").replace("sum[i][w] += a[i]", "sum[i][w] -= a[i]"))
    monkeypatch.setattr(native, "_SOURCE", wrong)
    found = look()
    assert found.library is None
    assert found.problem.endswith("made computes something else")


def start(cache: Path) -> subprocess.Popen[bytes]:
    """A process that needs the library."""
    code = "from deepwishart.products.native import load; assert load().library is not None, load().problem"
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "XDG_CACHE_HOME": str(cache)})


def test_a_damaged_library_is_made_anew(tmp_path: Path) -> None:
    assert start(tmp_path).wait() == 0
    (kept,) = (tmp_path / "deepwishart").iterdir()
    kept.write_bytes(b"not a library")
    assert start(tmp_path).wait() == 0
    assert kept.stat().st_size > 1000


def test_processes_that_begin_at_once_all_find_it(tmp_path: Path) -> None:
    running = [start(tmp_path) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(list((tmp_path / "deepwishart").iterdir())) == 1


def test_without_it_torch_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = normal(2, 3, 4), normal(2, 4, 5, seed=1)
    use(monkeypatch, None)
    assert torch.equal(product(A, B), A @ B)


def test_memory_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def product(self, *_: object) -> int:
            return 1

    use(monkeypatch, Full())  # type: ignore[arg-type]
    with pytest.raises(MemoryError, match="Use fewer samples"):
        product(normal(2, 2), normal(2, 2))
