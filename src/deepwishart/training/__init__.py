"""Training: all replicas at once, one CUDA graph on a GPU, and never a lost run."""

from deepwishart.training.adam import Adam
from deepwishart.training.callbacks import Callback, Check, tensorboard
from deepwishart.training.checkpoint import CheckpointError
from deepwishart.training.config import Schedule, TrainingConfig
from deepwishart.training.health import TrainingError
from deepwishart.training.history import Event, History
from deepwishart.training.loop import train
from deepwishart.training.step import CompilationError

__all__ = [
    "Adam",
    "Callback",
    "Check",
    "CheckpointError",
    "CompilationError",
    "Event",
    "History",
    "Schedule",
    "TrainingConfig",
    "TrainingError",
    "tensorboard",
    "train",
]
