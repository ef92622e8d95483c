"""Runs of the paper's tables: all splits of a cell train as replicas of one model."""

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepwishart import __version__
from deepwishart.data.rows import Scaler
from deepwishart.data.uci import UCI, load_splits
from deepwishart.experiments.machine import describe_machine
from deepwishart.experiments.recipes import Recipe
from deepwishart.experiments.store import Cell, Store
from deepwishart.likelihoods import Gaussian
from deepwishart.models import DeepKernelProcess, deep_gaussian_process, deep_wishart_process
from deepwishart.objectives import elbo, predict_in_chunks
from deepwishart.shallow import Criterion, ShallowGP, fit_shallow_gp
from deepwishart.starting import match_noise, start_from
from deepwishart.training import Check, History, train

__all__ = ["Replicas", "evaluate", "fit_gps", "known_gps", "load_replicas", "make_model", "run_cell", "run_cells"]

_ROWS_OF_ELBO, _SAMPLES_OF_ELBO = 2_048, 10


class Replicas(NamedTuple):
    """Splits of a set, side by side, in the standard units of their training parts.

    Attributes:
        X: Inputs, shape ``(R, N, D)``.
        Y: Targets, shape ``(R, N, 1)``.
        X_test: Shape ``(R, T, D)``.
        Y_test: Shape ``(R, T, 1)``.
        scale: Standard deviation of the training targets in the data's units, shape ``(R)``.
    """

    X: Tensor
    Y: Tensor
    X_test: Tensor
    Y_test: Tensor
    scale: Tensor

    def to(self, device: torch.device) -> "Replicas":
        """On a device."""
        return Replicas(*(tensor.to(device) for tensor in self))


def load_replicas(dataset: str, splits: Sequence[int], data_dir: Path | None = None) -> Replicas:
    """Read splits of a set; all have as many rows."""
    parts = []
    for split in load_splits(dataset, splits, data_dir):
        x, y = Scaler.fit(split.X_train), Scaler.fit(split.y_train[:, None])
        columns = (split.X_train, split.y_train[:, None], split.X_test, split.y_test[:, None])
        scaled = [scaler.forward(values) for scaler, values in zip((x, y, x, y), columns, strict=True)]
        parts.append([*scaled, y.scale[0]])
    return Replicas(*(torch.from_numpy(np.stack(column)) for column in zip(*parts, strict=True)))


def make_model(
    data: Replicas, depth: int, method: str, recipe: Recipe, gp: ShallowGP | None = None
) -> DeepKernelProcess:
    """A model with a replica for each split, that starts from a GP if one is given."""
    generator = torch.Generator().manual_seed(recipe.seed)
    options: dict[str, Any] = {
        "depth": depth,
        "num_inducing": recipe.num_inducing,
        "likelihood": Gaussian(recipe.noise),
        "jitter": recipe.jitter,
        "generator": generator,
    }
    if method == "dgp":
        model = deep_gaussian_process(data.X, data.Y, shared_precision=recipe.shared_precision, **options)
    else:
        model = deep_wishart_process(data.X, data.Y, posterior=method, initialisation=recipe.initialisation, **options)
    if gp is not None:
        start_from(model, gp, data.X.shape[-2])
        match_noise(model, data.X, data.Y, generator=generator)
    return model


def fit_gps(dataset: str, splits: Sequence[int], recipe: Recipe, data_dir: Path | None = None) -> ShallowGP:
    """A plain GP for each split, on all cores."""
    from joblib import Parallel, cpu_count, delayed

    data = load_replicas(dataset, splits, data_dir)
    fits = Parallel(n_jobs=min(len(splits), cpu_count()))(
        delayed(_fit_gp)(X, Y, recipe.gp_starts, recipe.gp_choice, recipe.seed)
        for X, Y in zip(data.X.numpy(), data.Y.numpy(), strict=True)
    )
    return ShallowGP(*(torch.from_numpy(np.stack(part)) for part in zip(*fits, strict=True)))


def known_gps(
    store: Store, dataset: str, splits: Sequence[int], recipe: Recipe, data_dir: Path | None = None
) -> ShallowGP:
    """:func:`fit_gps`, once for all depths and methods: those that a store lacks are fitted and added to it."""
    made_by = json.dumps([recipe.gp_starts, recipe.gp_choice, recipe.seed, __version__])
    known = store.starts(dataset, made_by)
    missing = [split for split in splits if split not in known]
    if missing:
        fitted = zip(*(part.tolist() for part in fit_gps(dataset, missing, recipe, data_dir)), strict=True)
        store.add_starts(dataset, made_by, dict(zip(missing, fitted, strict=True)))
        known = store.starts(dataset, made_by)
    parts = zip(*(known[split] for split in splits), strict=True)
    return ShallowGP(*(torch.tensor(part, dtype=torch.float64) for part in parts))


def _fit_gp(X: np.ndarray, Y: np.ndarray, num_starts: int, choose_by: Criterion, seed: int) -> list[np.ndarray]:
    """In arrays, which unlike tensors can be passed between processes of any kind; large ones arrive read-only."""
    generator = torch.Generator().manual_seed(seed)
    gp = fit_shallow_gp(
        torch.tensor(X), torch.tensor(Y), num_starts=num_starts, choose_by=choose_by, generator=generator
    )
    return [part.numpy() for part in gp]


@torch.no_grad()
def evaluate(model: DeepKernelProcess, data: Replicas, num_samples: int, seed: int = 0) -> dict[str, Tensor]:
    """What the tables show, one value for each replica.

    The ELBO per datapoint in standard units; test log-likelihood (log-mean-exp over samples), RMSE of the mean over
    samples and CRPS in the units of the data; the share of test rows in their central 90 % intervals.
    """
    generator = torch.Generator(data.X.device).manual_seed(seed)
    N, rounds = data.X.shape[1], -(-num_samples // _SAMPLES_OF_ELBO)
    total = torch.zeros_like(data.scale)
    for X, Y in rounds * list(zip(data.X.split(_ROWS_OF_ELBO, 1), data.Y.split(_ROWS_OF_ELBO, 1), strict=True)):
        # An estimate from some rows is one of the whole; weighted by their number, they add up to it.
        total += X.shape[1] / N * elbo(model, X, Y, N, _SAMPLES_OF_ELBO, generator=generator)
    parts: dict[str, list[Tensor]] = {"log_likelihood": [], "square": [], "crps": [], "coverage": []}
    at = 0
    for predictive in predict_in_chunks(model, data.X_test, num_samples, generator):
        rows = predictive.mean.shape[-2]
        y = data.Y_test[:, at : at + rows]
        at += rows
        parts["log_likelihood"].append(predictive.log_prob(y))
        parts["square"].append((predictive.mean - y)[..., 0] ** 2)
        parts["crps"].append(predictive.crps(y)[..., 0])
        parts["coverage"].append(((predictive.cdf(y)[..., 0] - 0.5).abs() <= 0.45).to(y.dtype))
    means = {name: torch.cat(values, -1).mean(-1) for name, values in parts.items()}
    return {
        "elbo": total / (rounds * N),
        "log_likelihood": means["log_likelihood"] - data.scale.log(),
        "rmse": means["square"].sqrt() * data.scale,
        "crps": means["crps"] * data.scale,
        "coverage": means["coverage"],
    }


def run_cells(
    store: Store,
    cells: Sequence[tuple[str, int, str]],
    splits: Sequence[int],
    recipe: Recipe,
    device: torch.device,
    *,
    data_dir: Path | None = None,
    deadline: float | None = None,
    progress: bool | None = None,
    compile_steps: bool = False,
    report: Callable[[Cell, list[dict[str, Any]]], None] = lambda cell, rows: None,
) -> bool:
    """Fill a store with what it lacks.

    Args:
        store: Other processes may be at work on it.
        cells: Set, depth and method of each, in the order in which they are run.
        splits: Of every set; numbers that a set does not have are left out.
        recipe: How they are made.
        device: Where to train.
        data_dir: Where the sets are.
        deadline: A time of :func:`time.monotonic` at which to stop; the state of a cell is kept, and the next call
            goes on with it.
        progress: Whether to show a progress bar; by default on a terminal.
        compile_steps: Whether torch compiles them, see :class:`~deepwishart.training.TrainingConfig`. The store says
            so of a cell that was finished like this.
        report: Called with the rows of every pass that was finished.

    Returns:
        Whether every split has been finished or is another process's.
    """
    for dataset, depth, method in cells:
        cell = Cell(dataset, depth, method, recipe.config_hash)
        known = [split for split in splits if split < UCI[dataset].splits]
        with store.claim(cell, known) as mine:
            if mine:
                rows = run_cell(store, cell, mine, recipe, device, data_dir, deadline, progress, compile_steps)
                if rows is None:
                    return False
                report(cell, rows)
    return True


def run_cell(
    store: Store,
    cell: Cell,
    splits: Sequence[int],
    recipe: Recipe,
    device: torch.device,
    data_dir: Path | None = None,
    deadline: float | None = None,
    progress: bool | None = None,
    compile_steps: bool = False,
) -> list[dict[str, Any]] | None:
    """Train splits of a cell at once and store what they reach; ``None`` if time ran out before the end."""
    if deadline is not None and time.monotonic() >= deadline:
        return None
    data = load_replicas(cell.dataset, splits, data_dir)
    gp = known_gps(store, cell.dataset, splits, recipe, data_dir) if recipe.gp_starts else None
    model = make_model(data, cell.depth, cell.method, recipe, gp).to(device)
    data = data.to(device)
    checkpoint = _checkpoint(store, cell, splits)
    timer = _Timer(deadline)
    history = train(
        model,
        data.X,
        data.Y,
        replace(recipe.training(data.X.shape[-2]), compile=compile_steps),
        seed=recipe.seed,
        checkpoint=checkpoint,
        resume=True,
        progress=progress,
        callbacks=[timer],
    )
    if history.stopped == "callback":
        return None
    metrics = evaluate(model, data, recipe.num_test_samples, recipe.seed)
    described = _describe(cell, splits, recipe, device, timer, compile_steps)
    rows = [{**described, **row} for row in _rows(splits, metrics, history)]
    store.add(rows)
    checkpoint.unlink(missing_ok=True)
    return rows


class _Timer:
    """Measures steps after the first check, which pays for what happens once, and ends a run at a deadline."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self.seen: list[tuple[int, float]] = []

    def __call__(self, check: Check) -> bool:
        now = time.monotonic()
        self.seen = [*self.seen[:1], (check.step, now)]
        return self.deadline is not None and now >= self.deadline

    @property
    def ms_per_step(self) -> float | None:
        if len(self.seen) < 2:
            return None
        (first, begun), (last, ended) = self.seen
        return 1e3 * (ended - begun) / (last - first)


def _checkpoint(store: Store, cell: Cell, splits: Sequence[int]) -> Path:
    """Beside the store; another selection of splits is another run."""
    folder = store.path.with_name(f"{store.path.name}.unfinished")
    folder.mkdir(exist_ok=True)
    which = "-".join(str(split) for split in splits)
    return folder / f"{cell.dataset}_{cell.depth}_{cell.method}_{cell.config_hash}_{which}.safetensors"


def _rows(splits: Sequence[int], metrics: dict[str, Tensor], history: History) -> Iterator[dict[str, Any]]:
    for replica, split in enumerate(splits):
        recoveries = [e for e in history.events if e.replica == replica and e.kind not in ("learning-rate", "retired")]
        yield {
            "split": split,
            **{name: values[replica].item() for name, values in metrics.items()},
            "steps": history.num_steps,
            "recoveries": len(recoveries),
            "retired": int(replica in history.retired),
        }


def _describe(
    cell: Cell, splits: Sequence[int], recipe: Recipe, device: torch.device, timer: _Timer, compile_steps: bool
) -> dict[str, Any]:
    return {
        **cell._asdict(),
        "config": json.dumps(asdict(recipe), sort_keys=True),
        "trained_with": " ".join(str(split) for split in splits),
        "ms_per_step": timer.ms_per_step,
        "deepwishart": __version__,
        "torch": f"{torch.__version__}, compiled" if compile_steps else torch.__version__,
        "python": platform.python_version(),
        "machine": describe_machine(device),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
