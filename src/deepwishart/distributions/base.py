"""What all distributions of this room share: sampling through a Bartlett factor, validation, shapes."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.types import _size

from deepwishart.distributions.bartlett import Bartlett, BartlettNoise
from deepwishart.distributions.mixing import GeneralRows, TriangularRows
from deepwishart.distributions.support import PositiveSemidefiniteOfRank, factorise_value
from deepwishart.linalg import half_logdet, thin_cholesky

__all__ = ["PSDDistribution", "validates"]


def validates(validate_args: bool | None) -> bool:
    """Whether a distribution made with this argument looks at values; ``None`` is torch's class-wide setting."""
    return bool(Distribution._validate_args) if validate_args is None else validate_args


class PSDDistribution(Distribution, ABC):
    """Distribution of a positive semi-definite matrix G = F Fᵀ whose F is made from a Bartlett factor.

    Parameters are kept with the batch shape that they were given and broadcast where they meet, so what samples
    or replicas share is computed once. As attributes they read back expanded to ``batch_shape``.

    Args:
        rows: The matrix that mixes the rows of the factor (P × P).
        rank: Rank of every sample.
        batch_shape: What all parameters broadcast to.
        validate_args: Whether values are checked. Looking at a value synchronises a device: a training step passes
            ``False``.
    """

    has_rsample = True

    def __init__(
        self, rows: TriangularRows | GeneralRows, rank: int, batch_shape: torch.Size, validate_args: bool | None
    ) -> None:
        self.rows = rows
        self.rank = rank
        self._initialise(batch_shape, rows.matrix.shape[-2:], validates(validate_args))

    def _initialise(self, batch_shape: torch.Size, event_shape: torch.Size, validate_args: bool) -> None:
        # Without torch's check of the parameters, which ours precede with better messages.
        super().__init__(batch_shape, event_shape, validate_args=False)
        self._validate_args = validate_args

    @constraints.dependent_property(is_discrete=False, event_dim=2)
    def support(self) -> constraints.Constraint:
        """Positive semi-definite matrices of this rank."""
        return PositiveSemidefiniteOfRank(self.rank)

    @property
    @abstractmethod
    def bartlett(self) -> Bartlett:
        """The law of the factor T."""

    @abstractmethod
    def _features(self, T: Tensor) -> Tensor:
        """F from T."""

    @abstractmethod
    def _log_prob_of_factor(self, phi: Tensor, half_logdet_G: Tensor) -> Tensor:
        """Log-density of Φ Φᵀ, given half of log|G_{:r,:r}|."""

    # Sampling

    def draw_noise(self, sample_shape: _size = torch.Size(), generator: torch.Generator | None = None) -> BartlettNoise:
        """The noise of one :meth:`rsample_bartlett`; its shapes do not depend on any parameter's value."""
        shape = torch.Size(sample_shape) + self.batch_shape + torch.Size((self.event_shape[-1], self.rank))
        return BartlettNoise.draw(shape, self.rows.matrix, generator)

    def rsample_bartlett(
        self,
        sample_shape: _size = torch.Size(),
        generator: torch.Generator | None = None,
        noise: BartlettNoise | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A Bartlett factor T and F with F Fᵀ = G, both of shape ``(*sample, *batch, P, r)``.

        Args:
            sample_shape: Leading dimensions of independent samples.
            generator: Source of randomness; torch's global one if ``None``.
            noise: From :meth:`draw_noise`, instead of the two above.
        """
        if noise is None:
            noise = self.draw_noise(sample_shape, generator)
        elif len(sample_shape) or generator is not None:
            raise ValueError("Pass noise alone: its shape is the sample shape, and it needs no generator.")
        noise.check(self.batch_shape, self.event_shape[-1], self.rank, self.rows.matrix)
        T = self.bartlett.rsample(noise)
        return T, self._features(T)

    def rsample(self, sample_shape: _size = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        _, F = self.rsample_bartlett(sample_shape, generator)
        return F @ F.mT

    def sample(self, sample_shape: _size = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape, generator)

    # Densities

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of a matrix, from which the factors are recovered.

        With validation, a value that is singular to working precision is refused, even if it is a sample: its density
        would be rounding error. Without, a value that has no Cholesky factor gives NaN. For a sample whose factors are
        at hand, ``log_prob_bartlett`` is cheaper, and exact.
        """
        if self._validate_args:
            phi = factorise_value(value, self.rank, self.batch_shape, self.rows.matrix)
            half_logdet_G = half_logdet(phi)
        else:
            phi, definite = thin_cholesky(value, self.rank)
            half_logdet_G = half_logdet(phi).masked_fill(~definite, torch.nan)
        return self._batched(self._log_prob_of_factor(phi, half_logdet_G))

    # Shapes

    def expand(self, batch_shape: _size, _instance: Any = None) -> Any:
        target = torch.Size(batch_shape)
        if not _broadcasts_to(self.batch_shape, target):
            raise ValueError(
                f"batch_shape {tuple(self.batch_shape)} cannot be expanded to {tuple(target)}: only dimensions of size "
                f"1 grow, and new ones come in front."
            )
        new = self._get_checked_instance(type(self), _instance)
        new.__dict__.update(self.__dict__)
        # Parameters broadcast where they are used, so nothing else changes.
        new._initialise(target, self.event_shape, self._validate_args)
        return new

    def _expanded(self, parameter: Tensor, event_dims: int) -> Tensor:
        """A parameter as torch.distributions would show it."""
        event_shape = parameter.shape[parameter.ndim - event_dims :]
        return parameter.expand(self.batch_shape + event_shape)

    def _batched(self, result: Tensor) -> Tensor:
        """A log-density with at least the batch's shape, whatever broadcast to make it."""
        return result.expand(torch.broadcast_shapes(result.shape, self.batch_shape))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(batch_shape={tuple(self.batch_shape)}, event_shape={tuple(self.event_shape)}, "
            f"rank={self.rank})"
        )


def _broadcasts_to(shape: torch.Size, target: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, target) == target
    except RuntimeError:
        return False
