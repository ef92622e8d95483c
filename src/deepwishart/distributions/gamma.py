r"""Gamma variates from noise of fixed shape.

torch's own sampler draws as many random numbers as rejection happens to need, so that one replica's parameters
shift another's noise, and it returns a finite number for a NaN concentration. Here the noise is drawn first, in
a shape that depends on nothing but the number of variates, and :func:`standard_gamma` is a pure function of it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepwishart.distributions.noise import standard_normal

__all__ = ["GammaNoise", "standard_gamma", "standard_gamma_sample"]

# Marsaglia & Tsang accept a proposal with probability 0.95 or more at any concentration >= 1,
# so all eight are rejected for less than one variate in 1e10; that one takes the value d.
_NUM_PROPOSALS = 8


class GammaNoise(NamedTuple):
    """What :func:`standard_gamma` needs to make variates of shape ``shape``.

    Attributes:
        normal: Standard normals, one a proposal, shape ``(proposals, *shape)``.
        uniform: Uniforms on (0, 1], one a proposal, shape ``(proposals, *shape)``.
        boost: Uniforms on (0, 1] for concentrations below one, shape ``shape``.
    """

    normal: Tensor
    uniform: Tensor
    boost: Tensor

    @classmethod
    def draw(cls, shape: torch.Size, like: Tensor, generator: torch.Generator | None = None) -> "GammaNoise":
        """Draw noise for variates of this shape with the dtype and device of ``like``."""
        normal = standard_normal((_NUM_PROPOSALS, *shape), like, generator)
        # 1 − [0, 1) = (0, 1]: a logarithm of these is finite.
        uniform = 1 - torch.rand(_NUM_PROPOSALS + 1, *shape, dtype=like.dtype, device=like.device, generator=generator)
        return cls(normal, uniform[:-1], uniform[-1])


def standard_gamma_sample(concentration: Tensor, noise: GammaNoise) -> Tensor:
    """:func:`standard_gamma` without a gradient."""
    return _propose_and_pick(concentration.expand_as(noise.boost), noise)


def standard_gamma(concentration: Tensor, noise: GammaNoise) -> Tensor:
    r"""Gamma(concentration, 1) variates with implicitly reparameterised gradients.

    Marsaglia & Tsang's method [MT2000] with a fixed number of proposals: with :math:`d = \alpha - 1/3` and
    :math:`c = 1/\sqrt{9d}`, accept :math:`d v` with :math:`v = (1 + c x)^3` if
    :math:`\log u < x^2/2 + d - dv + d\log v`. For :math:`\alpha < 1` it draws at :math:`\alpha + 1` and multiplies
    by :math:`u^{1/\alpha}`. A NaN concentration gives NaN.

    Args:
        concentration: Positive, broadcasts to the noise's shape.
        noise: From :meth:`GammaNoise.draw`; its ``boost`` has the shape of the result.
    """
    alpha = concentration.expand_as(noise.boost)
    variate: Tensor = _Reparameterised.apply(alpha, standard_gamma_sample(alpha.detach(), noise))
    return variate


class _Reparameterised(torch.autograd.Function):
    """A Gamma variate whose derivative with respect to the concentration is torch's implicit formula."""

    generate_vmap_rule = True

    @staticmethod
    def forward(concentration: Tensor, variate: Tensor) -> Tensor:
        return variate.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        concentration, variate = ctx.saved_tensors
        return grad * torch._standard_gamma_grad(concentration, variate), None


def _propose_and_pick(alpha: Tensor, noise: GammaNoise) -> Tensor:
    x, u = noise.normal, noise.uniform
    small = alpha < 1
    d = torch.where(small, alpha + 1, alpha) - 1 / 3
    v = (1 + x * (9 * d).rsqrt()) ** 3
    # v <= 0 makes the logarithm NaN, and a comparison with NaN is false: such proposals are rejected.
    accepted = u.log() < x**2 / 2 + d * (1 - v + v.log())
    first = accepted.byte().argmax(0, keepdim=True)
    chosen = torch.where(accepted.any(0), v.gather(0, first).squeeze(0), 1.0)
    variate = d * chosen
    variate = torch.where(small, variate * noise.boost ** (1 / alpha), variate)
    return variate.clamp_min(torch.finfo(alpha.dtype).tiny)
