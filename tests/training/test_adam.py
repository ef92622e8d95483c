"""Adam against torch's, and what torch's cannot do."""

import pytest
import torch
from torch import Tensor

from deepwishart.training import Adam
from tests.distributions.instances import generator


def gradients(steps: int, R: int = 3, n: int = 5) -> Tensor:
    return torch.randn(steps, R, n, dtype=torch.float64, generator=generator(0))


@pytest.mark.parametrize("rate", [1e-2, 0.3])
def test_it_is_torchs(rate: float) -> None:
    values = torch.randn(3, 5, dtype=torch.float64, generator=generator(1))
    theirs = values.clone().requires_grad_()
    torchs = torch.optim.Adam([theirs], lr=rate)
    ours = Adam(values)
    for gradient in gradients(20):
        ours.step(gradient, torch.full((3,), rate, dtype=torch.float64), torch.ones(3, dtype=torch.bool))
        theirs.grad = gradient.clone()
        torchs.step()
        torch.testing.assert_close(values, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_every_row_has_its_own_rate_and_count() -> None:
    """A row that sits out is as if it had not been there, whatever its gradient."""
    rates = torch.tensor([0.1, 0.01, 1.0], dtype=torch.float64)
    together = Adam(torch.zeros(3, 5, dtype=torch.float64))
    alone = [Adam(torch.zeros(1, 5, dtype=torch.float64)) for _ in range(3)]
    for k, gradient in enumerate(gradients(12)):
        moves = torch.tensor([True, k % 2 == 0, k < 5])
        together.step(torch.where(moves[:, None], gradient, torch.nan), rates, moves)
        for r in range(3):
            if moves[r]:
                alone[r].step(gradient[r : r + 1], rates[r : r + 1], torch.ones(1, dtype=torch.bool))
    for r in range(3):
        assert torch.equal(together.values[r], alone[r].values[0])
    assert together.count.tolist() == [12, 6, 5]
