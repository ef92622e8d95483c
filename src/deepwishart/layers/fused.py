r"""The costly steps of a deep Wishart process, each with a backward pass written by hand.

With squared exponential kernels of features, all large matrices live inside a step: kernel blocks, their factors, and
what is made from them. Autograd would keep dozens of them for every sample, and visit them in hundreds of small
operations; here few are kept, and the backward pass is made of matrix products.

The plain versions are those that :class:`~deepwishart.layers.WishartLayer` and
:class:`~deepwishart.layers.GaussianOutput` use with other kernels; tests compare values and gradients.
[docs/performance.md]

Tensors have shape ``(B, ·, ·)``, where B counts replicas and within them samples, and what samples share ``(R, ·, ·)``.
A layer whose Gram matrix below does not depend on the sample has one, and the samples of its Bartlett factor are
columns. Bars mark gradients. Results of a forward pass are never changed in place: with torch 2.11, a step that was
compiled would then have other gradients.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepwishart.gram import AnyGram, FeatureGram
from deepwishart.kernels import Kernel, SquaredExponential
from deepwishart.products import inverse_factor, product
from deepwishart.products.kernel import KernelMatrices
from deepwishart.products.output import Output, make_output, pull_back_output
from deepwishart.products.projection import Projection, project, pull_back_projection
from deepwishart.products.samples import pull_back_factor
from deepwishart.products.scale import Scale, make_scale, pull_back_scale

__all__ = ["Fusable", "Layout", "fusable", "output_step", "whitened_step", "wishart_step"]


class Layout(NamedTuple):
    """How tensors of shape ``(*sample, *batch, …)`` lie as ``(B, …)``: replicas first."""

    sample_shape: torch.Size
    batch_shape: torch.Size

    def fold(self, x: Tensor) -> Tensor:
        """(*sample, *batch, …) → (B, …)."""
        k, b = len(self.sample_shape), len(self.batch_shape)
        x = x.movedim(tuple(range(k)), tuple(range(b, b + k))) if k and b else x
        return x.reshape(-1, *x.shape[k + b :])

    def fold_shared(self, x: Tensor) -> Tensor:
        """(*batch, …) → (R, …)."""
        return x.reshape(-1, *x.shape[len(self.batch_shape) :])

    def unfold(self, x: Tensor) -> Tensor:
        """(B, …) → (*sample, *batch, …)."""
        k, b = len(self.sample_shape), len(self.batch_shape)
        if not (k and b):
            return x.reshape(self.sample_shape + self.batch_shape + x.shape[1:])
        x = x.reshape(self.batch_shape + self.sample_shape + x.shape[1:])
        return x.movedim(tuple(range(b, b + k)), tuple(range(k)))


class Fusable(NamedTuple):
    """A squared exponential kernel of features, as the steps take it.

    Attributes:
        layout: Of the tensors.
        inducing: F, shape ``(B, M, c)``.
        points: f, shape ``(B, c, N)``.
        tt: ‖f‖² or more, shape ``(B, N)``.
        log_height: log h, shape ``(R)``.
        log_lengthscale: log λ, shape ``(R)``.
        jitter: Relative to h², shape ``(R)``.
    """

    layout: Layout
    inducing: Tensor
    points: Tensor
    tt: Tensor
    log_height: Tensor
    log_lengthscale: Tensor
    jitter: Tensor


def fusable(kernel: Kernel, gram: AnyGram, jitter: Tensor) -> Fusable | None:
    """The kernel as the steps take it, or ``None`` if it is another one, or not of features."""
    if type(kernel) is not SquaredExponential or not isinstance(gram, FeatureGram):
        return None
    layout = Layout(gram.inducing.shape[: gram.inducing.ndim - 2 - jitter.ndim], jitter.shape)
    return Fusable(
        layout,
        layout.fold(gram.inducing),
        layout.fold(gram.points),
        layout.fold(gram.tt),
        layout.fold_shared(kernel.log_height),
        layout.fold_shared(kernel.log_lengthscale),
        layout.fold_shared(jitter),
    )


def wishart_step(
    kernel: Fusable, df: int, rest: Tensor, added: Tensor, T: Tensor, second_moment: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""Features of the next layer, and what its closed-form divergence needs of the scale S = K/ν.

    With :math:`K = L L^\top`, :math:`\Psi = (1-q)S + qVV^\top = C C^\top` and :math:`D = L_S^{-1}C`.

    Args:
        kernel: Of the layer below.
        df: ν.
        rest: 1 − q, shape ``(R)``.
        added: q V Vᵀ, shape ``(R, M, M)``.
        T: A′TB, the Bartlett factor with rows and columns mixed, shape ``(B, M, columns)``.
        second_moment: H = E[A′TB(A′TB)ᵀ], shape ``(R, M, M)``.

    Returns:
        F = C T, shape ``(B, M, columns)``; the conditional means (L⁻¹F)ᵀa of the other points, where a = L⁻¹k_it, shape
        ``(B, columns, N)``; ‖a‖², shape ``(B, N)``; E[tr(S⁻¹G)] = tr(DHDᵀ), shape ``(B)``; and log|C| − log|L_S|.
    """
    return _WishartStep.apply(*kernel[1:], rest, added, T, second_moment, df)


def whitened_step(kernel: Fusable, df: int, T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Features of the next layer whose rows are mixed by L_S itself, where S = K/ν: F = L_S T.

    Args:
        kernel: Of the layer below.
        df: ν.
        T: The Bartlett factor with rows and columns mixed, shape ``(B, M, columns)``.

    Returns:
        F, the conditional means and ‖a‖², as :func:`wishart_step`.
    """
    return _WhitenedStep.apply(*kernel[1:], T, df)


def output_step(kernel: Fusable, ell: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Marginals of a Gaussian process whose inducing outputs are as if v had been seen with precision ℓℓᵀ.

    With :math:`I + \ell^\top K \ell = H H^\top` and :math:`W = H^{-1}\ell^\top`, see
    :class:`~deepwishart.layers.gaussian.Observed`.

    Args:
        kernel: Of the layer below.
        ell: ℓ, shape ``(R, M, M)``.
        v: Shape ``(R, M, C)``.

    Returns:
        Means, shape ``(B, C, N)``; ‖W k_t‖², shape ``(B, N)``; and the divergence, shape ``(B)``.
    """
    return _OutputStep.apply(*kernel[1:], ell, v)


class _WishartStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        F: Tensor,
        f: Tensor,
        tt: Tensor,
        log_height: Tensor,
        log_lengthscale: Tensor,
        jitter: Tensor,
        rest: Tensor,
        added: Tensor,
        T: Tensor,
        H: Tensor,
        df: int,
    ) -> tuple[Tensor, ...]:
        kernel = KernelMatrices.of(F, f, tt, log_height, log_lengthscale, jitter)
        scale = make_scale(kernel.K, rest, added, T, H, df)
        found = project(kernel.P, kernel.p, kernel.cap, scale.maps)
        ctx.save_for_backward(*kernel, *found, *scale, tt, jitter, rest, T)
        ctx.df = df
        mean = found.seen[:, F.shape[1] :]
        return scale.F, mean, _known(found.norms, scale.logdet), scale.trace, scale.logdet

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, F_bar: Tensor, mean_bar: Tensor, explained_bar: Tensor, trace_bar: Tensor, logdet_bar: Tensor
    ) -> tuple[Tensor | None, ...]:
        kernel, found = KernelMatrices(*ctx.saved_tensors[:7]), Projection(*ctx.saved_tensors[7:10])
        scale, (tt, jitter, rest, T) = Scale(*ctx.saved_tensors[10:19]), ctx.saved_tensors[19:]
        # ‖a‖² and the means F_wᵀa, with a = Jk. Of J̄ no more is needed than J̄Jᵀ.
        against_a, P_bar, p_bar = pull_back_projection(
            kernel.P, kernel.p, scale.maps, found, explained_bar, mean_bar, against="seen"
        )
        K_bar, *own = pull_back_scale(kernel.K, rest, T, scale, against_a, F_bar, trace_bar, logdet_bar, ctx.df)
        return *kernel.pull_back(K_bar, P_bar, p_bar, tt, jitter), None, *own, None


class _WhitenedStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        F: Tensor,
        f: Tensor,
        tt: Tensor,
        log_height: Tensor,
        log_lengthscale: Tensor,
        jitter: Tensor,
        T: Tensor,
        df: int,
    ) -> tuple[Tensor, ...]:
        kernel = KernelMatrices.of(F, f, tt, log_height, log_lengthscale, jitter)
        L, J, half_logdet_K = inverse_factor(kernel.K)
        M, F_w = T.shape[1], T * df**-0.5
        maps = torch.cat([J, product(F_w.mT, J)], -2)
        found = project(kernel.P, kernel.p, kernel.cap, maps)
        ctx.save_for_backward(*kernel, *found, tt, jitter, L, maps, F_w)
        ctx.df = df
        return product(L, F_w), found.seen[:, M:], _known(found.norms, half_logdet_K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, F_bar: Tensor, mean_bar: Tensor, explained_bar: Tensor) -> tuple[Tensor | None, ...]:
        kernel, found = KernelMatrices(*ctx.saved_tensors[:7]), Projection(*ctx.saved_tensors[7:10])
        tt, jitter, L, maps, F_w = ctx.saved_tensors[10:]
        M = F_w.shape[1]

        # F = L F_w, ‖a‖² and the means F_wᵀa, with a = Jk. Of L̄ and J̄ no more is needed than LᵀL̄ − J̄Jᵀ.
        against_a, P_bar, p_bar = pull_back_projection(
            kernel.P, kernel.p, maps, found, explained_bar, mean_bar, against="seen"
        )
        F_w_bar = against_a[:, M:].mT
        L_F_bar = product(L.mT, F_bar)
        inner = product(F_w, F_w_bar.mT, into=against_a[:, :M], lower=True).neg()
        product(L_F_bar, F_w.mT, into=inner, lower=True)
        K_bar = pull_back_factor(maps[:, :M], inner, torch.zeros_like(tt[:, 0]))
        below = kernel.pull_back(K_bar, P_bar, p_bar, tt, jitter)
        return *below, None, (L_F_bar + F_w_bar) * ctx.df**-0.5, None


class _OutputStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        F: Tensor,
        f: Tensor,
        tt: Tensor,
        log_height: Tensor,
        log_lengthscale: Tensor,
        jitter: Tensor,
        ell: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, ...]:
        kernel = KernelMatrices.of(F, f, tt, log_height, log_lengthscale, jitter)
        output = make_output(kernel.K, ell, v)
        found = project(kernel.P, kernel.p, kernel.cap, output.maps)
        ctx.save_for_backward(*kernel, *found, *output, tt, jitter, ell, v)
        mean = found.seen[:, F.shape[1] :].clone()  # predictions must not keep all of it
        return mean, _known(found.norms, output.half_logdet), output.kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, mean_bar: Tensor, explained_bar: Tensor, kl_bar: Tensor) -> tuple[Tensor | None, ...]:
        kernel, found = KernelMatrices(*ctx.saved_tensors[:7]), Projection(*ctx.saved_tensors[7:10])
        output, (tt, jitter, ell, v) = Output(*ctx.saved_tensors[10:16]), ctx.saved_tensors[16:]
        # ‖b‖² with b = Wk, and the means zᵀk.
        maps_bar, P_bar, p_bar = pull_back_projection(
            kernel.P, kernel.p, output.maps, found, explained_bar, mean_bar, against="k"
        )
        K_bar, *own = pull_back_output(kernel.K, ell, v, output, maps_bar, kl_bar)
        return *kernel.pull_back(K_bar, P_bar, p_bar, tt, jitter), None, *own


def _known(norms: Tensor, half_logdet: Tensor) -> Tensor:
    """‖a_t‖², NaN where there is no factor: what is made of it must not look like a result."""
    return norms.masked_fill(half_logdet.isnan()[..., None], torch.nan)
