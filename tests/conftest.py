"""Options, fixtures and the summary of a test run."""

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

from deepwishart.data.rows import Scaler
from deepwishart.data.uci import UCI, load_table
from tests.proofs import Proofs

REPOSITORY = Path(__file__).parents[1]
NO_UCI = "no UCI data: put it into ../shared/uci or set DEEPWISHART_DATA"
_PROOFS = pytest.StashKey[Proofs]()

settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prove", action="store_true", help="run proofs at full size and write docs/proofs.md")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_PROOFS] = Proofs(long=config.getoption("--prove"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    counts = {
        outcome: sum(1 for report in terminalreporter.getreports(outcome) if "[uci-" in report.nodeid)
        for outcome in ("passed", "failed", "skipped")
    }
    terminalreporter.write_line("real data: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    proofs = config.stash[_PROOFS]
    if proofs.long and proofs.shown and exitstatus == 0:
        proofs.write()
        terminalreporter.write_line(f"{len(proofs.shown)} proofs written to docs/proofs.md")


@pytest.fixture(scope="session")
def proofs(request: pytest.FixtureRequest) -> Proofs:
    return request.config.stash[_PROOFS]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Every test starts from the same global seed and leaves torch's settings as it found them."""
    torch.manual_seed(0)
    before = (torch.get_default_dtype(), torch.is_grad_enabled())
    yield
    assert before == (torch.get_default_dtype(), torch.is_grad_enabled())


@pytest.fixture(params=sorted(UCI), ids=lambda name: f"uci-{name}")
def uci_inputs(request: pytest.FixtureRequest) -> torch.Tensor:
    """Standardised inputs of one of the nine real sets, float64, all rows."""
    table = read_uci(request.param)
    if table is None:
        pytest.skip(NO_UCI)
    return table[:, :-1]


@pytest.fixture
def uci_folder() -> Path:
    """Where the nine real sets are."""
    folder = find_uci()
    if folder is None:
        pytest.skip(NO_UCI)
    return folder


def find_uci() -> Path | None:
    """The folder of the real sets, if there is one: tests never fetch."""
    folders = [os.environ.get("DEEPWISHART_DATA"), REPOSITORY.parent / "shared" / "uci"]
    return next((Path(folder) for folder in folders if folder and Path(folder).is_dir()), None)


@functools.cache
def read_uci(name: str) -> torch.Tensor | None:
    """Standardised inputs and, in the last column, targets of a set; ``None`` where there is no copy of the data."""
    folder = find_uci()
    if folder is None:
        return None
    X, y = load_table(name, folder)
    data = np.concatenate([X, y[:, None]], 1)
    return torch.from_numpy(Scaler.fit(data).forward(data))
