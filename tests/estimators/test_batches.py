"""Which rows a step of a fit sees."""

from typing import Any

import numpy as np
import pytest
from sklearn.base import is_classifier
from torch import Tensor

from deepwishart.estimators import ESTIMATORS, DWPRegressor, base
from deepwishart.shallow import ShallowGP
from deepwishart.training import TrainingConfig
from tests.estimators.test_sklearn import QUICK, table


@pytest.mark.parametrize(
    ("rows", "batch_size", "expected"),
    [(2_048, None, (2_048, False)), (2_049, None, (2_049, True)), (9_000, None, (4_095, True)), (60, 20, (20, False))],
)
def test_rows_of_large_tables_are_dealt_out_to_the_samples(
    rows: int, batch_size: int | None, expected: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(_model: Any, _inputs: Any, _targets: Any, config: TrainingConfig, **_: Any) -> None:
        assert (config.rows_per_step(rows), config.deal_rows) == expected
        raise InterruptedError

    def gp(X: Tensor, *_: Any, **__: Any) -> ShallowGP:
        return ShallowGP(X.new_ones(X.shape[-1]), X.new_ones(()), X.new_ones(()))

    monkeypatch.setattr(base, "train", train)
    monkeypatch.setattr(base, "fit_shallow_gp", gp)
    with pytest.raises(InterruptedError):
        DWPRegressor(**QUICK, batch_size=batch_size).fit(*table(rows))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("estimator", ESTIMATORS.values())
def test_every_estimator_learns_from_rows_that_are_dealt_out(
    estimator: Any, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_SHARED_ROWS", 30)
    monkeypatch.setattr(base, "_DEALT_ROWS", 40)
    X, y = table(100)
    y = (y > 0).astype(int) if is_classifier(estimator()) else y
    model = estimator(**QUICK, depth=depth, n_replicas=2).fit(X, y, sample_weight=np.linspace(0.5, 1.5, 100))
    assert model.score(X, y) > 0.8
