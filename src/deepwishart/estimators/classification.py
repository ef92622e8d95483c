"""Classifiers: probabilities of classes, whatever the classes are called."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from sklearn.base import ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import Tensor
from torch.nn.functional import one_hot

from deepwishart.data.rows import Scaler
from deepwishart.estimators.base import DeepKernelEstimator
from deepwishart.estimators.processes import DGP, DIWP, DWP
from deepwishart.likelihoods import Bernoulli, Categorical, Likelihood

__all__ = ["DGPClassifier", "DIWPClassifier", "DWPClassifier"]


class Classification(ClassifierMixin):
    """What classifiers do beside fitting."""

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes, in the order of ``classes_``, shape ``(rows, classes)``."""
        check_is_fitted(self)
        probabilities = self._collect(X, lambda predictive: predictive.probs)
        if probabilities.shape[1] == 1:
            return np.concatenate([1 - probabilities, probabilities], 1)
        return probabilities / probabilities.sum(1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(1)]

    def predict_table(self, X: Any, levels: Sequence[float] = ()) -> pd.DataFrame:
        """The most probable class, and the probability of each: ``y``, ``p_…``; classes have no quantiles."""
        probabilities = self.predict_proba(X)
        columns = {self.target_names_[0]: self.classes_[probabilities.argmax(1)]}
        return pd.DataFrame({**columns, **{f"p_{c}": probabilities[:, k] for k, c in enumerate(self.classes_)}})

    def predict_f(self, X: Any, return_std: bool = False) -> Any:
        """Mean of the latent functions, and their standard deviation: a logit for two classes, else one a class."""
        check_is_fitted(self)
        mean, std = self._predict_latent(X)
        return (mean, std) if return_std else mean

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of classes, each row by itself, shape ``(rows, n_samples)``."""
        probabilities = self.predict_proba(X)
        uniform = check_random_state(random_state).random_sample
        drawn = (uniform((len(probabilities), n_samples, 1)) > probabilities.cumsum(1)[:, None, :-1]).sum(-1)
        return self.classes_[drawn]

    # The fit

    def _encode_targets(self, y: Any) -> np.ndarray:
        labels = column_or_1d(y, warn=True)
        check_classification_targets(labels)
        if not len(labels):
            raise ValueError("y must have at least one row.")
        if _has_missing(labels):
            raise ValueError("y contains NaN or None. Every row needs a class.")
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least two classes, got one class: {self.classes_.tolist()[0]!r}.")
        return numbers.reshape(-1, 1).astype(float)

    def _decode_targets(self, y: Any) -> np.ndarray:
        labels = column_or_1d(y)
        unknown = ~np.isin(labels, self.classes_)
        if unknown.any():
            raise ValueError(f"y holds the class {labels[unknown].tolist()[0]!r}, which was not in the fit.")
        return np.searchsorted(self.classes_, labels).reshape(-1, 1).astype(float)

    def _make_likelihood(self) -> Likelihood:
        if self.likelihood not in (None, "bernoulli", "categorical"):
            raise ValueError(f"likelihood must be bernoulli or categorical, got {self.likelihood!r}.")
        if self.likelihood == "bernoulli" and len(self.classes_) != 2:
            raise ValueError(f"likelihood bernoulli needs two classes, got {len(self.classes_)}.")
        if self.likelihood == "categorical" or len(self.classes_) > 2:
            return Categorical(len(self.classes_))
        return Bernoulli()

    def _scale_targets(self, Y: np.ndarray, weights: np.ndarray | None) -> Scaler:
        return Scaler.identity(Y.shape[1])

    def _regression_targets(self, Y: Tensor) -> Tensor:
        """One column a class (one for two): least squares tell which inputs matter."""
        classes = one_hot(Y[:, 0].long(), len(self.classes_)).to(Y)
        return classes[:, 1:] if len(self.classes_) == 2 else classes


@dataclass(kw_only=True, eq=False, repr=False)
class DWPClassifier(Classification, DWP, DeepKernelEstimator):
    """Classification by a deep Wishart process."""


@dataclass(kw_only=True, eq=False, repr=False)
class DGPClassifier(Classification, DGP, DeepKernelEstimator):
    """Classification by a deep Gaussian process with global inducing points."""


@dataclass(kw_only=True, eq=False, repr=False)
class DIWPClassifier(Classification, DIWP, DeepKernelEstimator):
    """Classification by a deep inverse Wishart process."""


def _has_missing(labels: np.ndarray) -> bool:
    return any(label is None or label != label for label in labels.tolist())
