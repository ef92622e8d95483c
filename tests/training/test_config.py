"""Schedules, and what a configuration refuses."""

import itertools
from typing import Any

import numpy as np
import pytest

from deepwishart.training import TrainingConfig


def test_the_papers_preset() -> None:
    config = TrainingConfig.paper()
    rates = [config.learning_rate * factor for factor in config.learning_rate_factors()]
    assert len(rates) == 20_000
    assert rates[0] == rates[9_999] == 1e-2
    assert rates[10_000] == rates[-1] == pytest.approx(1e-3)
    weights = config.kl_weights()
    assert weights[0] == 0
    assert weights[500] == 0.5
    assert weights[1_000] == weights[-1] == 1
    assert config.num_samples == 10
    assert config.clip_norm is None


def test_other_schedules() -> None:
    cosine = TrainingConfig(num_steps=101, schedule="cosine").learning_rate_factors()
    assert cosine[0] == 1
    assert all(a > b for a, b in itertools.pairwise(cosine))
    assert cosine[-1] == pytest.approx(0.01, abs=1e-3)
    for flat in ("plateau", "constant"):
        assert set(TrainingConfig(num_steps=5, schedule=flat).learning_rate_factors()) == {1.0}
    assert set(TrainingConfig(num_steps=5, annealing_steps=0).kl_weights()) == {1.0}


def test_small_data_are_one_batch() -> None:
    assert TrainingConfig().rows_per_step(2_048) == 2_048
    assert TrainingConfig().rows_per_step(40_000) == 1_024
    assert TrainingConfig(batch_size=100).rows_per_step(50) == 50
    assert TrainingConfig(batch_size=100, deal_rows=True, num_samples=3).rows_per_step(300) == 99
    assert TrainingConfig(deal_rows=True, num_samples=3).rows_per_step(301) == 301
    with pytest.raises(ValueError, match="a row for each of 3 samples, got 2 rows"):
        TrainingConfig(deal_rows=True, num_samples=3).rows_per_step(2)


def test_annealing_takes_a_fifth_of_a_short_run() -> None:
    assert TrainingConfig(num_steps=100).kl_weights()[20] == 1
    assert TrainingConfig(num_steps=100).kl_weights()[10] == 0.5
    assert TrainingConfig(num_steps=20_000).steps_of_annealing == 1_000


def test_numbers_of_any_kind_become_plain_ones() -> None:
    assert type(TrainingConfig(learning_rate=np.float32(0.5)).learning_rate) is float  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_steps": 0}, "num_steps must be a whole number of at least 1, got 0"),
        ({"num_samples": 2.5}, "num_samples must be a whole number of at least 1, got 2.5"),
        ({"annealing_steps": -1}, "annealing_steps must be a whole number of at least 0"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"learning_rate": float("nan")}, "learning_rate must be a positive number, got nan"),
        ({"clip_norm": -1.0}, "clip_norm must be a positive number"),
        ({"checkpoint_seconds": -1.0}, "checkpoint_seconds must be zero or more"),
        ({"schedule": "steep"}, "schedule must be one of paper, cosine, plateau, constant, got 'steep'"),
    ],
)
def test_nonsense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**given)


def test_settling_needs_the_plateau() -> None:
    with pytest.raises(ValueError, match="needs the schedule 'plateau'"):
        TrainingConfig(stop_when_settled=True)
    with pytest.raises(ValueError, match="tolerance must be zero or more"):
        TrainingConfig(tolerance=-1.0)
