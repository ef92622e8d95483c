"""What estimators predict, against answers from elsewhere."""

import copy
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.datasets import load_iris

from deepwishart.estimators import ESTIMATORS, DWPClassifier, DWPRegressor, base
from deepwishart.objectives import predict
from deepwishart.training import History, TrainingError, train

QUICK: dict[str, Any] = {"num_steps": 30, "num_inducing": 20, "num_predict_samples": 40, "random_state": 0}


def table(rows: int = 80) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(0)
    X = 10 + 5 * rng.randn(rows, 3)
    return X, 1_000 + 200 * np.sin(X[:, 0] / 3) + 20 * rng.randn(rows)


@pytest.fixture(scope="module", params=["gaussian", "heteroscedastic"])
def fitted(request: pytest.FixtureRequest) -> DWPRegressor:
    return DWPRegressor(**QUICK, n_replicas=2, likelihood=request.param).fit(*table())


def components(fitted: Any, X: np.ndarray) -> tuple[np.ndarray, ...]:
    """Means and standard deviations of the mixture in the user's units, and weights, shape (components, rows)."""
    inputs = torch.from_numpy((X - fitted.x_scaler_.mean) / fitted.x_scaler_.scale)
    generator = torch.Generator().manual_seed(fitted.seed_)
    predictive = predict(fitted.model_, inputs.expand(2, *inputs.shape), 40, generator)
    normals: Any = predictive.components
    parts = (normals.loc, normals.scale, predictive.log_weights.exp().expand(normals.loc.shape) / 80)
    loc, scale, weight = (part.detach()[..., 0].reshape(-1, len(X)).numpy() for part in parts)
    return loc * fitted.y_scaler_.scale + fitted.y_scaler_.mean, scale * fitted.y_scaler_.scale, weight


def test_mean_std_quantiles_and_likelihood_are_those_of_the_mixture(fitted: DWPRegressor) -> None:
    X, y = table()
    loc, scale, weight = components(fitted, X)
    assert loc.shape in ((80, 80), (80 * 8, 80))  # samples of two members, and nodes of noise that varies
    np.testing.assert_allclose(weight.sum(0), 1.0)
    expected = (weight * loc).sum(0)
    mean, std = fitted.predict(X, return_std=True)
    np.testing.assert_allclose(mean, expected, rtol=1e-10)
    np.testing.assert_allclose(std**2, (weight * (scale**2 + (loc - expected) ** 2)).sum(0), rtol=1e-8)
    quantiles = fitted.predict_quantiles(X[:5], (0.05, 0.8))
    for i in range(5):
        for j, level in enumerate((0.05, 0.8)):
            parts = (loc[:, i], scale[:, i])
            exact = brentq(
                lambda q, i=i, parts=parts, level=level: weight[:, i] @ norm.cdf(q, *parts) - level, 0, 2_000
            )
            assert quantiles[i, j] == pytest.approx(exact, rel=1e-9)
    density = (weight * norm.pdf(y[None], loc, scale)).sum(0)
    np.testing.assert_allclose(fitted.log_likelihood(X, y, per_row=True), np.log(density), rtol=1e-8)
    assert fitted.log_likelihood(X, y) == pytest.approx(np.log(density).mean())
    np.testing.assert_allclose(fitted.pit(X, y), (weight * norm.cdf(y[None], loc, scale)).sum(0), rtol=1e-8)


def test_the_crps_is_that_of_draws(fitted: DWPRegressor) -> None:
    X, y = table(30)
    draws = fitted.sample_y(X, 4_000)
    other = fitted.sample_y(X, 4_000, random_state=1)
    expected = np.abs(draws - y[:, None]).mean(1) - 0.5 * np.abs(draws - other).mean(1)
    assert fitted.crps(X, y) == pytest.approx(expected.mean(), rel=0.03)


def test_draws_have_the_moments_of_the_prediction(fitted: DWPRegressor) -> None:
    X, _ = table(10)
    draws = fitted.sample_y(X, 20_000)
    mean, std = fitted.predict(X, return_std=True)
    assert draws.shape == (10, 20_000)
    assert (np.abs(draws.mean(1) - mean) < 5 * std / np.sqrt(20_000)).all()
    np.testing.assert_allclose(draws.std(1), std, rtol=0.05)
    assert (fitted.sample_y(X, 3) == fitted.sample_y(X, 3)).all()
    with pytest.raises(ValueError, match="At most 2000"):
        fitted.sample_y(np.zeros((2_001, 3)))


def test_draws_are_smooth_functions(fitted: DWPRegressor) -> None:
    """Neighbours go up and down together, as far as noise lets them."""
    X = table(1)[0] + np.array([[0.0], [1e-6]])
    draws = fitted.sample_y(X, 4_000)
    _, noisy = fitted.predict(X, return_std=True)
    _, smooth = fitted.predict_f(X, return_std=True)
    expected = (smooth[0] / noisy[0]) ** 2
    assert np.corrcoef(draws)[0, 1] == pytest.approx(expected, abs=0.06)


def test_f_is_narrower_than_y(fitted: DWPRegressor) -> None:
    X, _ = table(10)
    mean, std = fitted.predict_f(X, return_std=True)
    np.testing.assert_allclose(mean, fitted.predict(X), rtol=1e-10)
    _, noisy = fitted.predict(X, return_std=True)
    assert (std < noisy).all()


def test_units_do_not_matter() -> None:
    X, y = table()
    first = DWPRegressor(**QUICK).fit(X, y)
    second = DWPRegressor(**QUICK).fit(X * [1e-3, 1, 1e3] + 7, 5 * y - 3)
    np.testing.assert_allclose(second.predict(X * [1e-3, 1, 1e3] + 7), 5 * first.predict(X) - 3, rtol=1e-4)
    assert second.log_likelihood(X * [1e-3, 1, 1e3] + 7, 5 * y - 3) == pytest.approx(
        first.log_likelihood(X, y) - np.log(5), abs=1e-2
    )


def test_a_row_is_predicted_alike_in_any_company(fitted: DWPRegressor) -> None:
    X, _ = table()
    np.testing.assert_allclose(fitted.predict(X[::-1])[::-1], fitted.predict(X), rtol=5e-12)
    np.testing.assert_allclose(fitted.predict(X[3:4]), fitted.predict(X)[3:4], rtol=1e-12)


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic", "student-t", "poisson"])
def test_every_likelihood_of_numbers(likelihood: str) -> None:
    X, y = table()
    y = np.round(np.exp((y - 1_000) / 200) * 3) if likelihood == "poisson" else y
    model = DWPRegressor(**QUICK, likelihood=likelihood).fit(X, y)
    assert model.score(X, y) > 0.5
    lower, upper = model.predict_quantiles(X, (0.02, 0.98)).T
    assert ((lower <= y) & (y <= upper)).mean() > 0.85
    assert np.isfinite(model.crps(X, y))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if "Regressor" in name])
def test_several_outputs(name: str) -> None:
    X, y = table()
    Y = pd.DataFrame({"up": y, "down": -y / 100})
    model = ESTIMATORS[name](**QUICK).fit(X, Y)
    assert model.predict(X).shape == (80, 2)
    assert model.predict_quantiles(X, (0.1, 0.5, 0.9)).shape == (80, 2, 3)
    assert model.sample_y(X, 4).shape == (80, 2, 4)
    assert model.score(X, Y) > 0.7
    assert list(model.predict_table(X).columns)[:2] == ["up_mean", "up_std"]
    with pytest.raises(ValueError, match="2 outputs"):
        model.log_likelihood(X, y)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if "Classifier" in name])
def test_classes_with_names(name: str) -> None:
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    model = ESTIMATORS[name](**QUICK).fit(X, names)
    probabilities = model.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert model.score(X, names) > 0.9
    expected = np.log(probabilities[np.arange(150), y])
    np.testing.assert_allclose(model.log_likelihood(X, names, per_row=True), expected, atol=1e-6)
    draws = model.sample_y(X, 2_000)
    np.testing.assert_allclose((draws == "setosa").mean(1), probabilities[:, 0], atol=0.06)
    assert model.predict_f(X).shape == (150, 3)
    with pytest.raises(ValueError, match="class 'rose', which was not in the fit"):
        model.log_likelihood(X[:1], ["rose"])


def test_two_classes_and_their_likelihoods() -> None:
    X, y = load_iris(return_X_y=True)
    X, y = X[:100, :2], y[:100] == 1
    bernoulli = DWPClassifier(**QUICK).fit(X, y)
    categorical = DWPClassifier(**QUICK, likelihood="categorical").fit(X, y)
    assert bernoulli.predict_proba(X).shape == categorical.predict_proba(X).shape == (100, 2)
    assert bernoulli.score(X, y) > 0.95
    assert categorical.score(X, y) > 0.95
    with pytest.raises(ValueError, match="needs two classes"):
        DWPClassifier(likelihood="bernoulli").fit(*load_iris(return_X_y=True))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"likelihood": "gauss"}, "likelihood must be one of gaussian"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"n_replicas": 0}, "n_replicas must be a whole number"),
        ({"depth": 1.5}, "depth must be a whole number"),
        ({"posterior": "normal"}, "posterior must be gw, a-gw or ab-gw"),
        ({"num_inducing": 0}, "num_inducing must be"),
        ({"missing": "drop"}, "missing must be"),
        ({"kernel": "rbf"}, "rbf"),
    ],
)
def test_bad_parameters_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DWPRegressor(**params).fit(*table(20))


def test_missing_values_are_imputed_on_request() -> None:
    X, y = table()
    X[3, 1] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        DWPRegressor(**QUICK).fit(X, y)
    model = DWPRegressor(**QUICK, missing="impute").fit(X, y)
    X[3, 1] = np.nanmedian(X[:, 1])
    np.testing.assert_array_equal(model.predict(X), DWPRegressor(**QUICK).fit(X, y).predict(X))


def test_noise_varies_by_default_and_is_learned_last() -> None:
    rng = np.random.RandomState(0)
    X = rng.uniform(-2, 2, (400, 1))
    y = np.sin(X[:, 0]) + 0.2 * np.exp(X[:, 0]) * rng.randn(400)
    params: dict[str, Any] = {"num_inducing": 20, "random_state": 0}
    model = DWPRegressor(**params, num_steps=1_400).fit(X, y)
    constant = DWPRegressor(**params, num_steps=1_000, likelihood="gaussian").fit(X, y)
    features, unchanged = (m.model_.layers.state_dict() for m in (model, constant))
    assert all(torch.equal(features[name], unchanged[name]) for name in unchanged)
    torch.testing.assert_close(model.model_.inducing_inputs, constant.model_.inducing_inputs, rtol=0, atol=0)
    new = np.linspace(-1.5, 1.5, 7)[:, None]
    _, std = model.predict(new, return_std=True)
    np.testing.assert_allclose(std, 0.2 * np.exp(new[:, 0]), rtol=0.35)
    assert model.log_likelihood(X, y) > constant.log_likelihood(X, y) + 0.3
    assert model.n_iter_ <= model.num_steps
    few = DWPRegressor(**params, num_steps=3).fit(X, y)
    assert few.n_iter_ == 3


def test_an_ensemble_of_which_nobody_is_left_is_an_error() -> None:
    """One member is lost while features are learned, the other while noise is."""
    X, y = table()
    lost = iter([[0], [1]])

    def lossy(*args: Any, **options: Any) -> History:
        history = train(*args, **options)
        history.retired = next(lost)
        return history

    with (
        mock.patch.object(base, "train", side_effect=lossy),
        pytest.raises(TrainingError, match="No member of the ensemble") as error,
    ):
        DWPRegressor(**QUICK, n_replicas=2).fit(X, y)
    assert error.value.history.retired == [0, 1]


def test_warm_starts_go_on() -> None:
    X, y = table()
    model = DWPRegressor(**QUICK, warm_start=True).fit(X, y)
    first, elbo = model.model_, model.elbo_
    model.fit(X, y)
    assert model.model_ is first
    assert model.elbo_ > elbo
    assert model.fit(X[:, :2], y).model_ is not first


def test_another_form_of_model_starts_anew() -> None:
    X, y = table()
    model = DWPRegressor(**QUICK, warm_start=True).fit(X, y)
    for change in ({"kernel": "matern-5/2"}, {"likelihood": "student-t"}, {"widths": 2}, {"num_inducing": 7}):
        before = model.model_
        assert model.set_params(**change).fit(X, y).model_ is not before
    labels = np.arange(80) % 4
    classifier = DWPClassifier(**QUICK, warm_start=True).fit(X, labels)
    assert classifier.fit(X[labels < 3], labels[labels < 3]).predict_proba(X).shape == (80, 3)


def test_repeated_inputs_speak_with_one_voice() -> None:
    """On few distinct rows, the start is the mean of what was seen there, not the first of it."""
    rng = np.random.RandomState(0)
    X = rng.randint(0, 5, (600, 2)).astype(float)
    y = rng.rand(600) < np.where(X[:, 0] >= 2, 0.8, 0.2)
    model = DWPClassifier(**{**QUICK, "num_steps": 100}).fit(X, y)
    assert model.score(X, y) > 0.75
    assert model.gp_.lengthscale[0] < model.gp_.lengthscale[1]
    regressor = DWPRegressor(**QUICK).fit(X, y + 0.1 * rng.randn(600))
    assert regressor.history_.elbo[0, 0] > -2


def test_a_spoilt_member_of_an_ensemble_is_left_out(fitted: DWPRegressor) -> None:
    X, _ = table(5)
    spoilt = copy.deepcopy(fitted)
    with torch.no_grad():
        for parameter in spoilt.model_.parameters():
            parameter[1] = torch.nan
    spoilt.replicas_ = np.array([0])
    assert np.isfinite(spoilt.predict(X)).all()
    assert np.isfinite(spoilt.predict_f(X)).all()
    assert np.isfinite(spoilt.sample_y(X, 20)).all()


def test_counts_have_a_fair_pit_and_quick_quantiles() -> None:
    rng = np.random.RandomState(0)
    X = rng.randn(150, 1)
    y = rng.poisson(np.exp(0.3 * X[:, 0] - 1))
    model = DWPRegressor(**QUICK, likelihood="poisson").fit(X, y)
    assert abs(model.pit(X, y).mean() - 0.5) < 0.06
    assert (model.predict_quantiles(X, (0.1, 0.9)) % 1 == 0).all()


def test_weights_count_rows() -> None:
    X, y = table()
    weights = np.random.RandomState(1).randint(0, 3, len(X))
    weighted = DWPRegressor(**QUICK).fit(X, y, weights)
    repeated = DWPRegressor(**QUICK).fit(np.repeat(X, weights, 0), np.repeat(y, weights))
    np.testing.assert_array_equal(weighted.predict(X), repeated.predict(X))
    shuffled = np.random.RandomState(2).permutation(80)
    np.testing.assert_array_equal(
        DWPRegressor(**QUICK).fit(X[shuffled], y[shuffled]).predict(X), DWPRegressor(**QUICK).fit(X, y).predict(X)
    )


def test_a_fit_ends_when_it_has_settled() -> None:
    X, y = table(40)
    model = DWPRegressor(num_steps=3_000, num_inducing=10, random_state=0).fit(X, y)
    assert model.history_.stopped == "settled"
    assert model.n_iter_ < 3_000


@pytest.mark.parametrize("at", [70, 110])
def test_an_interrupted_fit_goes_on(at: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the noise varies, and after."""
    from deepwishart.training import step as steps

    X, y = table()
    whole = DWPRegressor(**{**QUICK, "num_steps": 120}).fit(X, y)
    model = DWPRegressor(**{**QUICK, "num_steps": 120}, checkpoint=tmp_path / "run")
    take, count = steps.TrainingStep.__call__, iter(range(10**6))

    def interrupted(self: Any) -> None:
        if next(count) == at:
            raise KeyboardInterrupt
        take(self)

    monkeypatch.setattr(steps.TrainingStep, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, y)
    assert (tmp_path / "run").exists()
    monkeypatch.undo()
    np.testing.assert_array_equal(model.fit(X, y).predict(X), whole.predict(X))
    np.testing.assert_array_equal(model.history_.elbo, whole.history_.elbo)
    model.save(tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == [tmp_path / "model.safetensors"]
    with pytest.raises(ValueError, match="needs a whole number for random_state"):
        DWPRegressor(checkpoint=tmp_path / "run").fit(X, y)
