"""Memory: a run needs no more as it goes on, and predictions for many rows need little."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.peak import STATUS
from tests.proofs import Proofs

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="needs Linux to tell the memory of a process")

TRAIN = """
import sys, torch
from deepwishart import train
from deepwishart.training import TrainingConfig
from tests.peak import peak_mib
from tests.training.instances import data, model_for

X, Y = data(2, N=200)
model = model_for(X, Y, num_inducing=40)
seen = []
def note(check):
    if check.step % 50 == 0:
        seen.append(peak_mib())
train(model, X, Y, TrainingConfig(num_steps=int(sys.argv[1]), check_every=10), callbacks=[note])
print(seen[3], seen[-1])
"""

PREDICT = """
import sys, torch
from deepwishart.objectives import predict_in_chunks
from tests.peak import peak_mib
from tests.training.instances import data, model_for

inducing, samples = int(sys.argv[1]), int(sys.argv[2])
X, Y = data(N=300, D=6)
model = model_for(X, Y, num_inducing=inducing)
rows = torch.randn(1_000_000, 6, dtype=torch.float64)
mean = torch.empty(1_000_000, dtype=torch.float64)
before, done = peak_mib(), 0
for part in predict_in_chunks(model, rows, samples):
    mean[done : done + part.mean.shape[-2]] = part.mean[:, 0]
    done += part.mean.shape[-2]
assert done == 1_000_000
assert mean.isfinite().all()
print(before, peak_mib())
"""


def memory(code: str, *arguments: int) -> tuple[float, float]:
    """What a script prints: MiB before and after."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {"PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    before, after = map(float, done.stdout.split())
    return before, after


def test_memory_stays_flat_over_a_run(proofs: Proofs) -> None:
    steps = proofs.size(600, 5_000)
    early, late = memory(TRAIN, steps)
    assert late - early < 16
    row = [f"{steps:,}", f"{early:.0f} MiB", f"{late:.0f} MiB"]
    proofs.report("Largest memory of a process that trains", ["steps", "after 200 steps", "at the end"], [row])


def test_predictions_for_a_million_rows_need_less_than_a_gibibyte(proofs: Proofs) -> None:
    inducing, samples = proofs.size(20, 100), proofs.size(5, 100)
    before, after = memory(PREDICT, inducing, samples)
    assert after - before < 1024
    row = [str(inducing), str(samples), f"{after - before:.0f} MiB"]
    proofs.report(
        "Predictions for 1,000,000 rows, depth 3", ["inducing points", "samples", "memory beyond the data"], [row]
    )
