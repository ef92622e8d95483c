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


def test_each_of_several_clusters_gets_an_inducing_input() -> None:
    centres = torch.tensor([[-5.0, 2.0], [0.0, 0.0], [1.0, 7.0], [4.0, -3.0], [9.0, 1.0]], dtype=torch.float64)
    noise = 1e-6 * torch.randn(5, 30, 2, dtype=torch.float64, generator=generator(3))
    X = (centres[:, None] + noise).flatten(0, 1)
    for seed in range(20):
        assert (choose_rows(X, 5, generator(seed)) // 30).sort().values.tolist() == [0, 1, 2, 3, 4]


def test_rows_too_close_to_square_their_distance_are_still_distinct() -> None:
    X = torch.tensor([[0.0], [1e-30], [2e-30], [1e-30]])
    rows = choose_rows(X, 3, generator(0))
    assert len(torch.unique(X[rows], dim=0)) == 3
