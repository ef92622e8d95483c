"""What a fitted model is like: plots, metrics beside simple models, and one page with all of it."""

from deepwishart.report.evaluation import Evaluation, evaluate, gaussian_process, linear_model
from deepwishart.report.page import write_report
from deepwishart.report.plots import (
    plot_calibration,
    plot_confusion,
    plot_effect,
    plot_elbo,
    plot_grams,
    plot_predictions,
    plot_relevance,
    plot_reliability,
    plot_residuals,
)

__all__ = [
    "Evaluation",
    "evaluate",
    "gaussian_process",
    "linear_model",
    "plot_calibration",
    "plot_confusion",
    "plot_effect",
    "plot_elbo",
    "plot_grams",
    "plot_predictions",
    "plot_relevance",
    "plot_reliability",
    "plot_residuals",
    "write_report",
]
