"""Regressors: numbers out, with their uncertainty, in the user's units."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from deepwishart.checks import require_whole
from deepwishart.data.rows import Scaler
from deepwishart.estimators.base import DeepKernelEstimator
from deepwishart.estimators.processes import DGP, DIWP, DWP
from deepwishart.joint import sample_functions
from deepwishart.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood, Poisson, StudentT
from deepwishart.models import select_replicas
from deepwishart.predictive import Predictive

__all__ = ["REGRESSION_LIKELIHOODS", "DGPRegressor", "DIWPRegressor", "DWPRegressor"]

REGRESSION_LIKELIHOODS: dict[str, type[Likelihood]] = {
    "gaussian": Gaussian,
    "heteroscedastic": HeteroscedasticGaussian,
    "student-t": StudentT,
    "poisson": Poisson,
}


_JOINT_NUMBERS = 2**23  # that one matrix of a block of draws may hold; some matrices are alive at a time


class Regression(RegressorMixin):
    """What regressors do beside fitting."""

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean of y at the rows of X, and its standard deviation with ``return_std``: noise included."""
        check_is_fitted(self)

        def moments(predictive: Predictive) -> Tensor:
            return torch.stack([predictive.mean, predictive.stddev])

        mean, std = self._collect(X, moments, dim=1)
        mean = self._in_users_shape(self.y_scaler_.backward(mean))
        return (mean, self._in_users_shape(std * self.y_scaler_.scale)) if return_std else mean

    def predict_quantiles(self, X: Any, levels: Any = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles of y, one column a level: shape ``(rows, levels)``, or ``(rows, outputs, levels)``."""
        check_is_fitted(self)
        levels = np.atleast_1d(np.asarray(levels, dtype=float)).tolist()
        quantiles = self._collect(X, lambda predictive: predictive.quantile(levels), dim=1)
        return self._in_users_shape(np.moveaxis(self.y_scaler_.backward(quantiles), 0, -1))

    def predict_table(self, X: Any, levels: Sequence[float] = (0.05, 0.95)) -> pd.DataFrame:
        """Mean, standard deviation and quantiles of every target: ``y_mean``, ``y_std``, ``y_q0.05``, …"""
        check_is_fitted(self)
        levels = list(levels)

        def everything(predictive: Predictive) -> Tensor:
            parts = [predictive.mean[None], predictive.stddev[None]]
            return torch.cat([*parts, predictive.quantile(levels)] if levels else parts)

        mean, std, *quantiles = self._collect(X, everything, dim=1)
        scaler, columns = self.y_scaler_, {}
        for i, name in enumerate(self.target_names_):
            columns[f"{name}_mean"] = scaler.backward(mean)[:, i]
            columns[f"{name}_std"] = (std * scaler.scale)[:, i]
            for level, quantile in zip(levels, quantiles, strict=True):
                columns[f"{name}_q{level:g}"] = scaler.backward(quantile)[:, i]
        return pd.DataFrame(columns)

    def predict_f(self, X: Any, return_std: bool = False) -> Any:
        """Mean of the noise-free function, and its standard deviation: narrower than :meth:`predict`, which is of y.

        For counts, of the logarithm of their rate.
        """
        check_is_fitted(self)
        mean, std = (values[:, : self.n_outputs_] for values in self._predict_latent(X))
        mean = self._in_users_shape(self.y_scaler_.backward(mean))
        return (mean, self._in_users_shape(std * self.y_scaler_.scale)) if return_std else mean

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of y at up to 2,000 rows jointly, shape ``(rows, n_samples)`` or ``(rows, outputs, n_samples)``.

        Each draw is one function of the posterior, seen with noise; of an ensemble, a function of one of its members.
        """
        check_is_fitted(self)
        require_whole("n_samples", n_samples)
        inputs, rng = self._inputs(X), check_random_state(random_state)
        generator = torch.Generator(inputs.device).manual_seed(int(rng.randint(2**31 - 1)))
        block = max(1, _JOINT_NUMBERS // (inputs.shape[-2] + self.model_.inducing_inputs.shape[-2]) ** 2)
        members = rng.choice(self.replicas_, n_samples)
        values = np.empty((n_samples, inputs.shape[-2], self.n_outputs_))
        for member in np.unique(members):
            model = select_replicas(self.model_, [int(member)])
            for draws in np.split(numbers := np.flatnonzero(members == member), range(block, len(numbers), block)):
                f = sample_functions(model, inputs[:1], len(draws), generator)
                with torch.no_grad():
                    y = Predictive(model.likelihood.predict(f, torch.zeros_like(f))).sample_each(generator)
                values[draws] = y[:, 0].numpy(force=True)
        return self._in_users_shape(np.moveaxis(self.y_scaler_.backward(values), 0, -1))

    def crps(self, X: Any, y: Any) -> float:
        """Mean continuous ranked probability score over rows and outputs, in the units of y; lower is better."""
        check_is_fitted(self)
        each = self._collect_pairs(X, y, lambda predictive, Y: predictive.crps(Y))
        return float((each * self.y_scaler_.scale).mean())

    def pit(self, X: Any, y: Any) -> np.ndarray:
        """The predictive cdf at y, evenly spread over (0, 1) for a calibrated model; shaped like y.

        For counts, the middle of the step that the cdf takes at y.
        """
        check_is_fitted(self)

        def middle(predictive: Predictive, Y: Tensor) -> Tensor:
            return (predictive.cdf(Y) + predictive.cdf(Y - 1)) / 2

        is_count = isinstance(self.model_.likelihood, Poisson)
        ask = middle if is_count else Predictive.cdf
        return self._in_users_shape(self._collect_pairs(X, y, ask))

    # The fit

    def _encode_targets(self, y: Any) -> np.ndarray:
        Y = self._checked(y)
        self.n_outputs_ = Y.shape[1] if Y.ndim == 2 else 1
        self.targets_ndim_ = Y.ndim
        return Y.reshape(len(Y), -1)

    def _decode_targets(self, y: Any) -> np.ndarray:
        Y = self._checked(y)
        Y = Y.reshape(len(Y), -1)
        if Y.shape[1] != self.n_outputs_:
            raise ValueError(f"y must have {self.n_outputs_} outputs, as at the fit, got {Y.shape[1]}.")
        return Y

    def _checked(self, y: Any) -> np.ndarray:
        Y: np.ndarray = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        if Y.ndim > 2 or Y.ndim < 1:
            raise ValueError(f"y must have shape (rows,) or (rows, outputs), got {Y.shape}.")
        return Y

    def _make_likelihood(self) -> Likelihood:
        name = self.likelihood or "heteroscedastic"
        if name not in REGRESSION_LIKELIHOODS:
            raise ValueError(f"likelihood must be one of {', '.join(REGRESSION_LIKELIHOODS)}, got {name!r}.")
        return REGRESSION_LIKELIHOODS[name]()

    def _scale_targets(self, Y: np.ndarray, weights: np.ndarray | None) -> Scaler:
        if isinstance(self._make_likelihood(), Poisson):
            return Scaler.identity(Y.shape[1])
        return Scaler.fit(Y, weights)

    def _regression_targets(self, Y: Tensor) -> Tensor:
        if isinstance(self._make_likelihood(), Poisson):
            return (Y + 0.5).log()
        return Y

    def _in_users_shape(self, values: np.ndarray) -> np.ndarray:
        """(rows, outputs, …) → (rows, …) if y had no dimension of outputs."""
        return values[:, 0] if self.targets_ndim_ == 1 else values

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output = True
        tags.target_tags.multi_output = True
        return tags


@dataclass(kw_only=True, eq=False, repr=False)
class DWPRegressor(Regression, DWP, DeepKernelEstimator):
    """Regression by a deep Wishart process."""


@dataclass(kw_only=True, eq=False, repr=False)
class DGPRegressor(Regression, DGP, DeepKernelEstimator):
    """Regression by a deep Gaussian process with global inducing points."""


@dataclass(kw_only=True, eq=False, repr=False)
class DIWPRegressor(Regression, DIWP, DeepKernelEstimator):
    """Regression by a deep inverse Wishart process."""
