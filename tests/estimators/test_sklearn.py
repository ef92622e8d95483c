"""scikit-learn's contract, whole: every check that it has, and the tools that users combine estimators with."""

import warnings
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone, is_classifier
from sklearn.ensemble import BaggingRegressor
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from deepwishart.estimators import ESTIMATORS, DWPRegressor

QUICK: dict[str, Any] = {"num_steps": 8, "num_inducing": 12, "num_predict_samples": 10, "random_state": 0}


# scikit-learn skips its check of other array libraries unless SCIPY_ARRAY_API is set before SciPy is imported.
@parametrize_with_checks([estimator(**QUICK) for estimator in ESTIMATORS.values()])
def test_every_check_of_scikit_learn(estimator: Any, check: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


def table(rows: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(0)
    X = rng.randn(rows, 3)
    return X, np.sin(2 * X[:, 0]) + 0.1 * rng.randn(rows)


def test_pipelines_and_cross_validation() -> None:
    X, y = table()
    scores = cross_val_score(make_pipeline(StandardScaler(), DWPRegressor(**QUICK)), X, y, cv=3)
    assert scores.mean() > 0.8


def test_grid_search_with_processes_of_joblib() -> None:
    X, y = table()
    search = GridSearchCV(DWPRegressor(**QUICK), {"depth": [1, 2], "posterior": ["gw", "a-gw"]}, cv=2, n_jobs=2)
    search.fit(X, y)
    assert search.best_estimator_.score(X, y) > 0.8


def test_an_ensemble_of_estimators() -> None:
    X, y = table()
    bagging = BaggingRegressor(DWPRegressor(**QUICK), n_estimators=2, random_state=0).fit(X, y)
    assert bagging.score(X, y) > 0.8


@pytest.mark.parametrize("estimator", ESTIMATORS.values())
def test_two_fits_with_one_seed_are_the_same(estimator: Any) -> None:
    X, y = table()
    y = (y > 0).astype(int) if is_classifier(estimator()) else y
    first, second = (estimator(**QUICK).fit(X, y) for _ in range(2))
    assert (first.predict(X) == second.predict(X)).all()
    assert first.elbo_ == second.elbo_
    other = clone(first).set_params(random_state=1).fit(X, y)
    assert other.elbo_ != first.elbo_
