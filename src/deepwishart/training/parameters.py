"""All parameters of a model in one matrix, a row for each replica."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["FlatParameters", "flattened"]


class FlatParameters:
    """The parameters that are learned as rows of one matrix, of which the model's own are views.

    Optimiser, health checks and checkpoints then deal with one tensor, and a replica is a row of it.

    Args:
        model: Its parameters have shape ``(*batch_shape, …)``.
        batch_shape: Shape of the replicas.

    Attributes:
        values: Shape ``(R, n)``.
    """

    def __init__(self, model: nn.Module, batch_shape: torch.Size) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("The model has no parameter that requires a gradient: there is nothing to train.")
        self.parameters = [parameter for _, parameter in named]
        self.num_replicas = batch_shape.numel()
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named}
        self.values = self.join([parameter.detach() for parameter in self.parameters])
        for parameter, columns in zip(self.parameters, self.split(self.values), strict=True):
            parameter.data = columns.view(parameter.shape)

    def join(self, tensors: list[Tensor]) -> Tensor:
        """Tensors shaped like the parameters, as one matrix (R, n)."""
        return torch.cat([tensor.reshape(self.num_replicas, -1) for tensor in tensors], -1)

    def split(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The columns (R, …) of a matrix (R, n) that belong to each parameter."""
        return matrix.split([parameter.numel() // self.num_replicas for parameter in self.parameters], -1)

    def gradient(self, loss: Tensor) -> Tensor:
        """Of a sum over replicas, shape ``(R, n)``."""
        return self.join(list(torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)))

    def release(self) -> None:
        """Give every parameter its own memory again."""
        for parameter in self.parameters:
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


@contextmanager
def flattened(model: nn.Module, batch_shape: torch.Size) -> Iterator[FlatParameters]:
    """Flatten a model's parameters for the time of a run."""
    flat = FlatParameters(model, batch_shape)
    try:
        yield flat
    finally:
        flat.release()
