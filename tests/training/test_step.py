"""What a step computes."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from deepwishart.objectives import elbo_given_noise
from deepwishart.training.step import pad_rows
from tests.distributions.instances import generator
from tests.training.instances import data, model_for


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(("N", "padded"), [(3, 8), (16, 16), (21, 24)])
@pytest.mark.parametrize("method", ["a-gw", "dgp"])
def test_rows_that_are_added_count_for_nothing(method: str, N: int, padded: int, is_weighted: bool) -> None:
    X, Y = data(2, N=N)
    model = model_for(X, Y, method, num_inducing=5)
    weights = torch.rand(2, N, dtype=X.dtype, generator=generator(3)) if is_weighted else None
    more = pad_rows(X, Y, weights)
    assert more[0].shape[-2] == more[1].shape[-2] == padded
    noise = model.draw_noise(3, padded, generator(4))

    def of_the_first_rows(values: Tensor) -> Tensor:
        return values[..., :N] if values.shape[-1] == padded else values

    found = elbo_given_noise(model, *more[:2], noise, None, 1.0, more[2])
    expected = elbo_given_noise(model, X, Y, tree_map(of_the_first_rows, noise), None, 1.0, weights)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
