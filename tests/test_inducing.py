"""Inducing inputs: distinct rows, far apart."""

import torch

from deepwishart.inducing import choose_rows
from deepwishart.models import (
    deep_wishart_process,
)
from tests.distributions.instances import generator
from tests.model_instances import data


def test_inducing_inputs_are_distinct_rows_of_the_data() -> None:
    X, y = data(30)
    doubled = torch.cat([X, X, X])
    model = deep_wishart_process(doubled, torch.cat([y, y, y]), num_inducing=100, generator=generator(0))
    assert model.inducing_inputs.shape == (30, 3)
    assert len(torch.unique(model.inducing_inputs.detach(), dim=0)) == 30


def test_inducing_inputs_are_spread() -> None:
    """Two clusters, one of them tiny: both have inducing inputs."""
    X = torch.cat([torch.randn(500, 2, generator=generator(0)) * 0.01, torch.full((3, 2), 5.0)])
    chosen = X[choose_rows(X, 5, generator(1))]
    assert (chosen[:, 0] > 4).sum() == 1


def test_rows_too_close_to_square_their_distance_are_still_distinct() -> None:
    X = torch.tensor([[0.0], [1e-30], [2e-30], [1e-30]])
    rows = choose_rows(X, 3, generator(0))
    assert len(torch.unique(X[rows], dim=0)) == 3
