"""scikit-learn estimators: tables in, calibrated predictions out."""

from deepwishart.estimators.base import DeepKernelEstimator
from deepwishart.estimators.classification import DGPClassifier, DIWPClassifier, DWPClassifier
from deepwishart.estimators.regression import DGPRegressor, DIWPRegressor, DWPRegressor

__all__ = [
    "ESTIMATORS",
    "DGPClassifier",
    "DGPRegressor",
    "DIWPClassifier",
    "DIWPRegressor",
    "DWPClassifier",
    "DWPRegressor",
    "DeepKernelEstimator",
]

ESTIMATORS: dict[str, type[DeepKernelEstimator]] = {
    estimator.__name__: estimator
    for estimator in (DWPRegressor, DGPRegressor, DIWPRegressor, DWPClassifier, DGPClassifier, DIWPClassifier)
}
"""By name, as model files have it."""
