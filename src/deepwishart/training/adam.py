"""Adam for many replicas at once, each with its own learning rate and count of steps."""

import torch
from torch import Tensor

__all__ = ["Adam"]


class Adam:
    r"""Adam [K2015] on the rows of a matrix; a row may sit a step out.

    .. math:: m \leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \quad
        \theta \leftarrow \theta - \eta\, \frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)} + \epsilon}

    torch.optim takes one learning rate and one count for all rows.

    Args:
        values: θ, shape ``(R, n)``; changed in place.
        betas: β₁ and β₂.
        epsilon: ε.

    Attributes:
        mean: m.
        square: v.
        count: t, shape ``(R)``.
    """

    def __init__(self, values: Tensor, betas: tuple[float, float] = (0.9, 0.999), epsilon: float = 1e-8) -> None:
        self.values = values
        self.betas = betas
        self.epsilon = epsilon
        self.mean = torch.zeros_like(values)
        self.square = torch.zeros_like(values)
        self.count = values.new_zeros(values.shape[0])

    def step(self, gradient: Tensor, learning_rate: Tensor, moves: Tensor) -> None:
        """One step of the rows where ``moves`` is true; the others stay as they are, whatever their gradient.

        Args:
            gradient: Of the loss, shape ``(R, n)``.
            learning_rate: η, shape ``(R)``.
            moves: Shape ``(R)``.
        """
        beta1, beta2 = self.betas
        gradient = torch.where(moves[:, None], gradient, 0.0)
        share = moves.to(gradient.dtype)
        self.count += share
        # A weight of zero leaves a row untouched to the last bit.
        self.mean.lerp_(gradient, ((1 - beta1) * share)[:, None])
        self.square.lerp_(gradient * gradient, ((1 - beta2) * share)[:, None])
        exponent = self.count.clamp_min(1)
        rate = (learning_rate * share / (1 - beta1**exponent))[:, None]
        root = (self.square / (1 - beta2**exponent)[:, None]).sqrt_().add_(self.epsilon)
        self.values.addcdiv_(self.mean * rate, root, value=-1)
