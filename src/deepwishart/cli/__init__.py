"""The command line: parses, calls, prints."""

from deepwishart.cli.app import app
from deepwishart.cli.data import data_app
from deepwishart.cli.demo import demo
from deepwishart.cli.models import evaluate, fit, predict, report
from deepwishart.cli.reproduce import reproduce_app

__all__ = ["app", "data_app", "demo", "evaluate", "fit", "predict", "report", "reproduce_app"]
