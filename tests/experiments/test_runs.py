"""A run of the paper's tables: what it measures, stores, skips and resumes."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepwishart.data.uci import load_split
from deepwishart.experiments import runs
from deepwishart.experiments.recipes import METHODS, PRESETS, Recipe
from deepwishart.experiments.runs import evaluate, fit_gps, known_gps, load_replicas, make_model, run_cells
from deepwishart.experiments.store import METRICS, Cell, Store
from deepwishart.metrics import rmse
from deepwishart.objectives import elbo, predict
from deepwishart.shallow import ShallowGP
from deepwishart.training import Check
from tests.distributions.instances import generator

CPU = torch.device("cpu")
SHORT = replace(Recipe(), num_steps=120, num_samples=2, num_test_samples=10, num_inducing=10, gp_starts=0)


def make_data(root: Path, rows: int = 40) -> Path:
    """A folder with a table in the place of yacht: all of its splits, but only a few rows."""
    folder = root / "yacht"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, 6)) * np.arange(1, 7) + 3
    y = 5 * np.sin(X[:, 0]) + X[:, 1] + 0.1 * rng.normal(size=rows) + 100
    np.savetxt(folder / "data.txt", np.column_stack([X, y]))
    np.savetxt(folder / "index_features.txt", np.arange(6), fmt="%d")
    np.savetxt(folder / "index_target.txt", [6], fmt="%d")
    for split in range(20):
        order = rng.permutation(rows)
        np.savetxt(folder / f"index_train_{split}.txt", order[:-8], fmt="%d")
        np.savetxt(folder / f"index_test_{split}.txt", order[-8:], fmt="%d")
    for name in ("n_splits", "n_epochs", "n_hidden", "dropout_rates", "tau_values"):
        (folder / f"{name}.txt").touch()
    return root


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return make_data(tmp_path / "uci")


def test_replicas_are_standardised_by_their_training_part(data_dir: Path) -> None:
    data = load_replicas("yacht", [3, 0], data_dir)
    split = load_split("yacht", 3, data_dir)
    mean, std = split.X_train.mean(0), split.X_train.std(0)
    np.testing.assert_allclose(data.X_test[0], (split.X_test - mean) / std)
    np.testing.assert_allclose(data.X[0].mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(data.Y[1].std(correction=0), 1)
    np.testing.assert_allclose(data.scale[0], split.y_train.std())
    np.testing.assert_allclose(data.Y_test[0, :, 0] * data.scale[0], split.y_test - split.y_train.mean())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gp_starts", [0, 1, 3])
def test_models_start_finite(data_dir: Path, method: str, gp_starts: int) -> None:
    data = load_replicas("yacht", [0, 1], data_dir)
    gp = fit_gps("yacht", [0, 1], replace(SHORT, gp_starts=gp_starts), data_dir) if gp_starts else None
    model = make_model(data, 3, method, SHORT, gp)
    assert model.batch_shape == (2,)
    assert [layer.df for layer in model.layers] == [6, 6]  # ν is the number of inputs
    assert elbo(model, data.X, data.Y, generator=generator(0)).isfinite().all()


@pytest.mark.parametrize(("shared", "groups"), [(True, 1), (False, 6)])
def test_features_of_a_deep_gp_have_one_precision_or_each_its_own(data_dir: Path, shared: bool, groups: int) -> None:
    data = load_replicas("yacht", [0, 1], data_dir)
    recipe = replace(SHORT, gp_starts=1, shared_precision=shared)
    model = make_model(data, 3, "dgp", recipe, fit_gps("yacht", [0, 1], recipe, data_dir))
    assert [len(layer.get_parameter("posterior.log_precision")[0]) for layer in model.layers] == [groups, groups]
    assert elbo(model, data.X, data.Y, generator=generator(0)).isfinite().all()


def test_a_plain_gp_can_be_fitted_to_what_another_process_only_lends() -> None:
    """joblib maps arrays of more than a megabyte into its workers, read-only; torch would warn."""
    X = np.random.default_rng(0).normal(size=(30, 2))
    Y = np.sin(X[:, :1])
    own = runs._fit_gp(X, Y, 1, "likelihood", 0)
    X.flags.writeable = Y.flags.writeable = False
    for part, expected in zip(runs._fit_gp(X, Y, 1, "likelihood", 0), own, strict=True):
        np.testing.assert_array_equal(part, expected)


def test_plain_gps_are_fitted_once_for_all_cells_and_processes(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, asked = replace(SHORT, gp_starts=1), []

    def fit(dataset: str, splits: list[int], *options: Any) -> ShallowGP:
        asked.append(list(splits))
        return fit_gps(dataset, splits, *options)

    monkeypatch.setattr(runs, "fit_gps", fit)
    expected = fit_gps("yacht", [2, 0, 1], recipe, data_dir)
    for splits in ([0], [2, 0, 1], [1, 2]):
        found = known_gps(Store(tmp_path / "r.sqlite"), "yacht", splits, recipe, data_dir)
        for part, whole in zip(found, expected, strict=True):
            assert torch.equal(part, whole[[[2, 0, 1].index(split) for split in splits]])
    assert asked == [[0], [2, 1]]
    for other in (replace(recipe, gp_starts=2), replace(recipe, gp_choice="prediction"), replace(recipe, seed=1)):
        known_gps(Store(tmp_path / "r.sqlite"), "yacht", [0], other, data_dir)
    known_gps(Store(tmp_path / "r.sqlite"), "yacht", [0], replace(recipe, jitter=1e-6), data_dir)
    assert asked[2:] == [[0]] * 3


def test_metrics_are_in_the_units_of_the_data(data_dir: Path) -> None:
    data = load_replicas("yacht", [0, 1], data_dir)
    model = make_model(data, 1, "gw", SHORT)
    metrics = evaluate(model, data, 20)
    bound = elbo(model, data.X, data.Y) / data.X.shape[1]  # depth 1 is analytic
    torch.testing.assert_close(metrics["elbo"], bound.detach())
    predictive = predict(model, data.X_test, 20)
    for r in (0, 1):
        split = load_split("yacht", r, data_dir)
        scale = split.y_train.std()
        mean = predictive.mean[r, :, 0].detach().numpy() * scale + split.y_train.mean()
        std = predictive.stddev[r, :, 0].detach().numpy() * scale
        z = (split.y_test - mean) / std
        assert metrics["rmse"][r].item() == pytest.approx(rmse(split.y_test, mean))
        density = -0.5 * z**2 - np.log(std) - 0.5 * np.log(2 * np.pi)  # one normal a row at depth 1
        assert metrics["log_likelihood"][r].item() == pytest.approx(density.mean())
        assert 0 < metrics["crps"][r].item() < metrics["rmse"][r].item()


def test_coverage_is_that_of_central_intervals_of_90_percent(data_dir: Path) -> None:
    data = load_replicas("yacht", [0], data_dir)
    model = make_model(data, 1, "gw", SHORT)
    X_test = torch.randn(1, 500, 6, dtype=torch.float64)
    predictive = predict(model, X_test, 1)
    z = torch.linspace(-4, 4, 500, dtype=torch.float64)[None, :, None]
    data = data._replace(X_test=X_test, Y_test=predictive.mean + z * predictive.stddev)
    assert evaluate(model, data, 10)["coverage"].item() == (z.abs() < 1.6448536).double().mean().item()


def test_the_elbo_of_parts_is_that_of_the_whole(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_replicas("yacht", [0], data_dir)
    model = make_model(data, 1, "gw", SHORT)
    whole = evaluate(model, data, 10)["elbo"]
    monkeypatch.setattr(runs, "_ROWS_OF_ELBO", 7)
    torch.testing.assert_close(evaluate(model, data, 10)["elbo"], whole)


def run(store: Store, data_dir: Path, recipe: Recipe = SHORT, **options: Any) -> bool:
    cells = [("yacht", 2, "a-gw"), ("yacht", 2, "dgp")]
    return run_cells(store, cells, range(2), recipe, CPU, data_dir=data_dir, progress=False, **options)


def test_every_split_is_a_row_and_none_is_made_twice(tmp_path: Path, data_dir: Path) -> None:
    store, seen = Store(tmp_path / "r.sqlite"), []
    assert run(store, data_dir, report=lambda cell, rows: seen.append((cell.method, len(rows))))
    assert seen == [("a-gw", 2), ("dgp", 2)]
    frame = store.frame()
    assert len(frame) == 4
    assert np.isfinite(frame[list(METRICS)]).all(axis=None)
    assert set(frame["config_hash"]) == {SHORT.config_hash}
    assert json.loads(frame["config"][0])["num_steps"] == 120
    assert set(frame["trained_with"]) == {"0 1"}
    assert (frame["steps"] == 120).all()
    assert (frame["ms_per_step"] > 0).all()
    assert run(store, data_dir, report=lambda cell, rows: seen.append((cell.method, len(rows))))
    assert len(seen) == 2
    assert run(store, data_dir, replace(SHORT, jitter=1e-6))  # another recipe is another cell
    assert len(store.frame()) == 8
    assert not list((tmp_path / "r.sqlite.unfinished").iterdir())


def test_a_run_that_is_out_of_time_goes_on_to_the_same_end(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = Store(tmp_path / "a.sqlite"), Store(tmp_path / "b.sqlite")
    assert run(whole, data_dir)
    assert not run(broken, data_dir, deadline=time.monotonic() - 1)  # nothing is begun
    assert not (tmp_path / "b.sqlite.unfinished").exists()
    monkeypatch.setattr(runs, "_Timer", Late)
    assert not run(broken, data_dir)
    assert broken.finished(Cell("yacht", 2, "a-gw", SHORT.config_hash)) == set()
    assert len(list((tmp_path / "b.sqlite.unfinished").iterdir())) == 1
    monkeypatch.undo()
    assert run(broken, data_dir)
    assert broken.frame()[list(METRICS)].equals(whole.frame()[list(METRICS)])


class Late(runs._Timer):
    """Time is up at the first check."""

    def __call__(self, check: Check) -> bool:
        super().__call__(check)
        return True


def test_recipes_differ_in_their_hash_and_say_what_they_are() -> None:
    paper = PRESETS["paper"]
    assert (paper.num_steps, paper.num_samples, paper.num_test_samples) == (20_000, 10, 100)
    assert [paper.training(rows).rows_per_step(rows) for rows in (500, 41_157)] == [500, 41_157]
    assert [paper.training(rows).deal_rows for rows in (2_048, 2_049)] == [False, True]
    assert not paper.changed(["deal_rows=false"]).training(9_000).deal_rows
    config = paper.training(500)
    assert config.learning_rate_factors()[9_999:10_001] == [1.0, 0.1]
    assert config.kl_weights()[500] == 0.5
    changes = ["jitter=1e-6", "gp_starts=0", "schedule=cosine", "num_inducing=7", "shared_precision=false"]
    changed = paper.changed(changes)
    assert (changed.jitter, changed.gp_starts, changed.schedule, changed.num_inducing) == (1e-6, 0, "cosine", 7)
    assert paper.shared_precision
    assert not changed.shared_precision
    assert changed.config_hash != paper.config_hash
    assert paper.changed(changed.changes_from(paper)) == changed
    assert not paper.changes_from(paper)
    assert "7 inducing points" in changed.describe()
    assert "each seen by one of the samples" in changed.describe()
    assert "each seen" not in paper.changed(["deal_rows=false"]).describe()
    assert "a precision for each feature" in changed.describe()
    for wrong in ("jitter", "speed=2", "num_steps=many", "gp_starts=perhaps", "gp_choice=luck", "shared_precision=0"):
        with pytest.raises(ValueError, match=r"name=value|must be (of type|one of)"):
            paper.changed([wrong])
