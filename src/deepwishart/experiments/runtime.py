"""The paper's table of run times, measured on the machine at hand. [O2023, appendix]"""

import time
from pathlib import Path

import torch

from deepwishart.experiments.machine import describe_machine
from deepwishart.experiments.paper import published_runtime
from deepwishart.experiments.recipes import METHODS, Recipe
from deepwishart.experiments.runs import load_replicas, make_model
from deepwishart.experiments.tables import NAMES, TextTable
from deepwishart.training.loop import Trainer
from deepwishart.training.memory import memory_is_kept
from deepwishart.training.parameters import flattened

__all__ = ["RUNTIME_DEPTHS", "RUNTIME_SETS", "measure_epoch", "runtime_table"]

RUNTIME_SETS, RUNTIME_DEPTHS = ("boston", "protein"), (2, 5)
_WARM_UP, _LEAST_STEPS = 3, 5


def measure_epoch(
    dataset: str, depth: int, method: str, recipe: Recipe, device: torch.device, data_dir: Path | None = None
) -> float:
    """Seconds that training one model takes to see as many rows as there are."""
    data = load_replicas(dataset, [0], data_dir)
    model = make_model(data, depth, method, recipe).to(device)
    data = data.to(device)
    config = recipe.training(data.X.shape[-2])
    with flattened(model, model.batch_shape) as flat, memory_is_kept():
        step = Trainer(model, flat, data.X, data.Y, config).step
        for _ in range(_WARM_UP):
            step()
        _wait(device)
        steps = data.X.shape[1] / config.rows_per_step(data.X.shape[1])
        count = max(_LEAST_STEPS, round(steps))
        begun = time.perf_counter()
        for _ in range(count):
            step()
        _wait(device)
        return (time.perf_counter() - begun) / count * steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def runtime_table(
    recipe: Recipe,
    device: torch.device,
    datasets: tuple[str, ...] = RUNTIME_SETS,
    depths: tuple[int, ...] = RUNTIME_DEPTHS,
    data_dir: Path | None = None,
) -> TextTable:
    """Seconds an epoch of every method, ours and the paper's, on their machines."""
    paper = published_runtime()
    header = ["set", "depth"]
    for method in METHODS:
        header += [NAMES[method], "paper"]
    rows = []
    for dataset in datasets:
        for depth in depths:
            row = [dataset, str(depth)]
            for method in METHODS:
                theirs = paper.get((dataset, depth, method))
                ours = measure_epoch(dataset, depth, method, recipe, device, data_dir)
                row += [f"{ours:.3f}", "–" if theirs is None else f"{theirs:.3f}"]
            rows.append(row)
    return TextTable(f"Seconds an epoch of one split, on {describe_machine(device)}", header, rows)
