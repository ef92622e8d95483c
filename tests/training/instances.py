"""Small runs to test."""

from typing import Any

import torch
from torch import Tensor

from deepwishart.models import DeepKernelProcess
from deepwishart.training import TrainingConfig
from tests.distributions.instances import generator
from tests.model_instances import build

QUICK = TrainingConfig(num_steps=20, num_samples=2, annealing_steps=4, check_every=5, checkpoint_seconds=0.0)


def data(R: int | None = None, N: int = 30, D: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    batch = () if R is None else (R,)
    X = torch.randn(*batch, N, D, dtype=torch.float64, generator=generator(seed))
    noise = 0.1 * torch.randn(*batch, N, 1, dtype=torch.float64, generator=generator(seed + 1))
    return X, (2 * X[..., :1]).sin() + noise


def model_for(X: Tensor, Y: Tensor, method: str = "a-gw", **options: Any) -> DeepKernelProcess:
    return build(method, X, Y, **{"depth": 3, "num_inducing": 6, **options})


def parameters(model: DeepKernelProcess) -> Tensor:
    return torch.cat([p.detach().reshape(*model.batch_shape, -1) for p in model.parameters()], -1)
