"""How a cell of the paper's tables is made: everything beside set, depth, method and split."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_args

import torch

from deepwishart.linalg import default_jitter
from deepwishart.shallow import Criterion
from deepwishart.training import TrainingConfig
from deepwishart.training.config import FULL_BATCH_UP_TO, Schedule

__all__ = ["METHODS", "PRESETS", "Recipe"]

METHODS = ("dgp", "gw", "a-gw", "ab-gw")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Choices that are the same for all methods.

    Attributes:
        num_steps: Steps of Adam.
        num_samples: Posterior samples a step.
        num_test_samples: Posterior samples of a prediction, and of the ELBO that is reported.
        learning_rate: To start from.
        schedule: See :class:`~deepwishart.training.TrainingConfig`.
        num_inducing: M.
        initialisation: Of Wishart layers, a key of :data:`deepwishart.layers.INITIALISATIONS`.
        gp_starts: A model begins where a plain GP ends, whose best fit is searched from so many points, see
            :func:`deepwishart.shallow.fit_shallow_gp`; with 0, it begins from nothing.
        gp_choice: What makes one of its fits the best, ``"likelihood"`` or ``"prediction"``.
        noise: Variance of the noise to start from, where no GP has said.
        jitter: Relative to a kernel's mean diagonal.
        batch_size: Rows a step, or all if there are no more. By default, all of every set.
        deal_rows: Whether, in sets of more than 2,048 rows, each row of a step is seen by one of the samples instead of
            all, see :class:`~deepwishart.training.TrainingConfig`.
        shared_precision: Whether the features of a hidden layer of a deep GP share one precision.
        seed: Of inducing inputs, batches and noise.
    """

    num_steps: int = 20_000
    num_samples: int = 10
    num_test_samples: int = 100
    learning_rate: float = 1e-2
    schedule: Schedule = "paper"
    num_inducing: int = 100
    initialisation: str = "prior"
    gp_starts: int = 12
    gp_choice: Criterion = "likelihood"
    noise: float = 1.0
    jitter: float = default_jitter(torch.float64)
    batch_size: int = 50_000
    deal_rows: bool = True
    shared_precision: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.gp_choice not in get_args(Criterion):
            raise ValueError(f"gp_choice must be one of {', '.join(get_args(Criterion))}, got {self.gp_choice!r}.")

    def changed(self, changes: Sequence[str]) -> "Recipe":
        """With other choices, each written as ``name=value``."""
        kinds, given = {field.name: type(getattr(self, field.name)) for field in fields(self)}, {}
        for change in changes:
            name, _, text = change.partition("=")
            if name not in kinds or not text:
                raise ValueError(
                    f"A choice is written name=value, with a name from {', '.join(kinds)}; got {change!r}."
                )
            given[name] = _parse(name, text, kinds[name])
        return replace(self, **given)

    def changes_from(self, other: "Recipe") -> list[str]:
        """In what it differs, as :meth:`changed` reads it."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name}={value}" for name, value in mine.items() if value != theirs[name]]

    @property
    def config_hash(self) -> str:
        """Twelve digits that differ for different recipes."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def training(self, num_data: int) -> TrainingConfig:
        """How a model of so many rows is trained."""
        return TrainingConfig(
            num_steps=self.num_steps,
            num_samples=self.num_samples,
            batch_size=self.batch_size,
            deal_rows=self.deal_rows and num_data > FULL_BATCH_UP_TO,
            learning_rate=self.learning_rate,
            schedule=self.schedule,
        )

    def describe(self) -> str:
        """In a sentence, for the head of a table."""
        starts = f" (the best of {self.gp_starts} by {self.gp_choice})" if self.gp_starts > 1 else ""
        start = f"the fit of a plain GP{starts}" if self.gp_starts else f"noise {self.noise:g}"
        dealt = f", each seen by one of the samples in sets of more than {FULL_BATCH_UP_TO:,}" if self.deal_rows else ""
        apart = "" if self.shared_precision else ", in the DGP a precision for each feature"
        return (
            f"{self.num_steps:,} steps of Adam at {self.learning_rate:g} ({self.schedule} schedule), "
            f"{self.num_samples} samples to train and {self.num_test_samples} to test, {self.num_inducing} inducing "
            f"points, jitter {self.jitter:.1g}, initialisation “{self.initialisation}” from {start}, up to "
            f"{self.batch_size:,} rows a step{dealt}, seed {self.seed}{apart}"
        )


def _parse(name: str, text: str, kind: type) -> Any:
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{name} must be of type {kind.__name__}, got {text!r}.") from None


PRESETS = {
    # Steps, samples and schedule as O2023 states them; what it leaves open comes from the ablation in docs/results.md.
    "paper": Recipe(),
    # More inducing points helped most, and with them the GP that predicts best.
    "best": Recipe(num_inducing=200, gp_choice="prediction"),
}
