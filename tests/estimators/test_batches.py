"""Which rows a step of a fit sees."""

from typing import Any

import numpy as np
import pytest
from sklearn.base import is_classifier
from torch import Tensor

from deepwishart.estimators import DGPClassifier, DGPRegressor, DIWPRegressor, DWPClassifier, DWPRegressor, base
from deepwishart.shallow import ShallowGP
from deepwishart.training import TrainingConfig
from tests.estimators.test_sklearn import QUICK, table


@pytest.mark.parametrize(
    ("estimator", "rows", "options", "expected"),
    [
        (DWPRegressor, 2_048, {}, (2_048, False)),
        (DWPRegressor, 2_050, {}, (2_050, True)),
        (DWPRegressor, 9_000, {}, (4_080, True)),
        (DGPRegressor, 9_000, {"num_samples": 7}, (4_074, True)),
        (DWPRegressor, 9_000, {"batch_size": 20}, (20, False)),
        (DWPRegressor, 9_000, {"depth": 1}, (1_024, False)),
        (DIWPRegressor, 9_000, {}, (1_024, False)),
    ],
)
def test_rows_of_large_tables_are_dealt_out_to_the_samples(
    estimator: Any, rows: int, options: dict[str, Any], expected: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(_model: Any, _inputs: Any, _targets: Any, config: TrainingConfig, **_: Any) -> None:
        assert (config.rows_per_step(rows), config.deal_rows) == expected
        raise InterruptedError

    def gp(X: Tensor, *_: Any, **__: Any) -> ShallowGP:
        return ShallowGP(X.new_ones(X.shape[-1]), X.new_ones(()), X.new_ones(()))

    monkeypatch.setattr(base, "train", train)
    monkeypatch.setattr(base, "fit_shallow_gp", gp)
    with pytest.raises(InterruptedError):
        estimator(**QUICK, **options).fit(*table(rows))


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("estimator", [DWPRegressor, DWPClassifier, DGPRegressor, DGPClassifier])
def test_what_is_learned_from_rows_that_are_dealt_out_is_what_is_learned_from_shared_ones(
    estimator: Any, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y = table(100)
    y = (y > 0).astype(int) if is_classifier(estimator()) else y
    model = estimator(**{**QUICK, "num_steps": 60, "num_samples": 5}, depth=depth, n_replicas=2)
    weights = np.linspace(0.5, 1.5, 100)
    shared = model.fit(X, y, weights).elbo_
    monkeypatch.setattr(base, "FULL_BATCH_UP_TO", 50)
    assert model.fit(X, y, weights).elbo_ == pytest.approx(shared, abs=0.1)
    assert not np.array_equal(model.elbo_, shared)
