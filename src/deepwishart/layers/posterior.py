"""The variational posterior of a Wishart layer, and where it starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from deepwishart.distributions import ABGeneralizedWishart, AGeneralizedWishart, GeneralizedWishart
from deepwishart.distributions.bartlett import Bartlett, BartlettNoise, standard_concentration
from deepwishart.distributions.bartlett_wishart import BartlettWishart, column_noise, mix_columns
from deepwishart.distributions.gamma import GammaNoise
from deepwishart.linalg import Cholesky, add_to_diagonal, cholesky, shared_matmul
from deepwishart.products import matmul, product

__all__ = ["INITIALISATIONS", "POSTERIORS", "Draw", "Initialisation", "WishartPosterior", "draw_together"]

POSTERIORS = ("gw", "a-gw", "ab-gw")


@dataclass(frozen=True)
class Initialisation:
    """Where the posterior of a Wishart layer starts.

    Attributes:
        scale: How Ψ is made: ``"mixed"`` as in the paper, (1 − q) S + q V Vᵀ; ``"whitened"``,
            L_S ((1 − q) I + q V Vᵀ) L_Sᵀ, which can follow S but not forget it, and needs no second Cholesky factor.
        v: ``"prior"``: V Vᵀ starts at the prior's scale (the identity where whitened); ``"normal"``: entries N(0, 1/M).
        q: Share of V Vᵀ in the first layer, and in later ones.
        loc_std: μ starts at normals of this standard deviation, divided by √ν.
        log_scale: log σ.
    """

    scale: Literal["mixed", "whitened"]
    v: Literal["prior", "normal"]
    q: tuple[float, float]
    loc_std: float
    log_scale: float


INITIALISATIONS = {
    # At the prior: no divergence in the first layer, little in the others, where S varies and V Vᵀ does not.
    "prior": Initialisation("mixed", "prior", q=(0.5, 1e-3), loc_std=0.0, log_scale=0.0),
    # As the authors of O2021 start: narrow, and away from the prior. q is sigmoid(−4).
    "authors": Initialisation("mixed", "normal", q=(0.018, 0.018), loc_std=1.0, log_scale=-3.0),
    # At the prior in every layer, whatever S is.
    "whitened": Initialisation("whitened", "prior", q=(0.5, 0.5), loc_std=0.0, log_scale=0.0),
}


class WishartPosterior(nn.Module):
    r"""GW, A-GW or AB-GW over the inducing block of a Wishart layer, given the scale S of its prior.

    .. math:: \Psi = (1-q) S + q V V^\top, \qquad A = \mathrm{chol}(\Psi)\,A', \qquad F = A T B

    [O2023, eqs. 15–17]. A′ is a product of a unit lower and a unit upper triangular matrix and B a unit lower
    triangular one, so that no step of an optimiser can make them singular. Nothing is lost: the scales of their
    columns are those of T. Positive parameters are exponentials, q is a sigmoid.

    Args:
        family: ``"gw"``, ``"a-gw"`` or ``"ab-gw"``.
        df: Degrees of freedom ν.
        prior_tril: Cholesky factor of the prior's scale to start from, shape ``(*batch, M, M)``.
        initialisation: Where to start.
        is_first: Whether the layer is the first, whose S does not depend on a sample.
        generator: Source of randomness.
    """

    def __init__(
        self,
        family: str,
        df: int,
        prior_tril: Tensor,
        initialisation: Initialisation = INITIALISATIONS["prior"],
        is_first: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if family not in POSTERIORS:
            raise ValueError(f"posterior must be gw, a-gw or ab-gw, got {family!r}.")
        self.family = family
        self.df = df
        self.whitened = initialisation.scale == "whitened"
        *batch, M, _ = prior_tril.shape
        rank = min(df, M)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*batch, *shape, dtype=prior_tril.dtype, device=prior_tril.device, generator=generator)

        def full(*shape: int, value: float) -> Tensor:
            return prior_tril.new_full((*batch, *shape), value)

        concentration = standard_concentration(df, rank, prior_tril)
        self.log_concentration = nn.Parameter(concentration.log().expand(*batch, rank).clone())
        self.log_rate = nn.Parameter(full(rank, value=0.5).log())
        self.loc = nn.Parameter(initialisation.loc_std / df**0.5 * normal(M, rank))
        self.log_scale = nn.Parameter(full(M, rank, value=initialisation.log_scale))

        # V is learned in units of the prior's root where it starts: that of a smooth kernel has directions that are
        # nearly null, in which a step of V itself would be a giant's. The whitened Ψ has S's units anyway.
        self.relative = initialisation.v == "prior" and not self.whitened
        if self.relative:
            self.register_buffer("V_unit", prior_tril.clone())
        identity = torch.eye(M, dtype=prior_tril.dtype, device=prior_tril.device).expand_as(prior_tril)
        self.V = nn.Parameter(identity.clone() if initialisation.v == "prior" else normal(M, M) / M**0.5)
        self.q_logit = nn.Parameter(full(value=initialisation.q[0 if is_first else 1]).logit())
        if family != "gw":
            self.rows = nn.Parameter(full(M, M, value=0.0))
        if family == "ab-gw":
            self.columns = nn.Parameter(full(rank, rank, value=0.0))

    def forward(self, prior: Cholesky) -> BartlettWishart:
        """The posterior, given the Cholesky factor of the prior's scale S."""
        q = self.tensors
        root, logabsdet = q.root(prior)
        A_prime, B = q.row_mixing, q.column_mixing
        if A_prime is None:
            return GeneralizedWishart(self.df, root, *q.free, scale_tril_logabsdet=logabsdet, validate_args=False)
        A = root @ A_prime
        if B is None:
            return AGeneralizedWishart(self.df, A, *q.free, row_mixing_logabsdet=logabsdet, validate_args=False)
        return ABGeneralizedWishart(self.df, A, B, *q.free, row_mixing_logabsdet=logabsdet, validate_args=False)

    @property
    def row_mixing(self) -> Tensor | None:
        """A′, of determinant one, shape ``(*batch, M, M)``; ``None`` for the identity of GW."""
        return self.tensors.row_mixing

    @property
    def column_mixing(self) -> Tensor | None:
        """B, unit lower triangular, shape ``(*batch, r, r)``; ``None`` for the identity of GW and A-GW."""
        return self.tensors.column_mixing

    @property
    def tensors(self) -> "PosteriorTensors":
        """The parameters, with all that is computed from them."""
        return PosteriorTensors(
            self.df,
            self.whitened,
            self.log_concentration,
            self.log_rate,
            self.loc,
            self.log_scale,
            self.get_buffer("V_unit") if self.relative else None,
            self.V,
            self.q_logit,
            None if self.family == "gw" else self.rows,
            self.columns if self.family == "ab-gw" else None,
        )


class Draw(NamedTuple):
    """A sample of the part of a posterior that does not depend on the layer below.

    Attributes:
        T: A′TB, with A′ times the factor of Ψ in units of S where that is whitened, shape ``(*sample, *batch, M, r)``.
        divergence: The part of the KL divergence that does not depend on the layer below, shape ``(*batch)``.
        second_moment: E[A′TB(A′TB)ᵀ], shape ``(*batch, M, M)``.
        rest: 1 − q, shape ``(*batch)``.
        added: q V Vᵀ, shape ``(*batch, M, M)``.
    """

    T: Tensor
    divergence: Tensor
    second_moment: Tensor
    rest: Tensor
    added: Tensor


class PosteriorTensors(NamedTuple):
    """The parameters of a :class:`WishartPosterior`, or those of several alike with a dimension for them in front."""

    df: int
    whitened: bool
    log_concentration: Tensor
    log_rate: Tensor
    loc: Tensor
    log_scale: Tensor
    V_unit: Tensor | None
    V_free: Tensor
    q_logit: Tensor
    rows: Tensor | None
    columns: Tensor | None

    @property
    def free(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """α, β, μ, σ."""
        return self.log_concentration.exp(), self.log_rate.exp(), self.loc, self.log_scale.exp()

    @property
    def V(self) -> Tensor:
        """V, which is learned in units of V_unit where there are such."""
        return self.V_free if self.V_unit is None else matmul(self.V_unit, self.V_free)

    @property
    def row_mixing(self) -> Tensor | None:
        """A′. Its entries are learned in units of 1/√M: M of them act on a feature together."""
        return None if self.rows is None else _UnitLU.apply(self.rows * self.rows.shape[-1] ** -0.5)

    @property
    def column_mixing(self) -> Tensor | None:
        """B."""
        return None if self.columns is None else _unit(self.columns.tril(-1))

    @property
    def scale_parts(self) -> tuple[Tensor, Tensor]:
        """1 − q, shape ``(*batch)``, and q V Vᵀ."""
        rest = (-self.q_logit).sigmoid()  # 1 − q, without the zero that rounding makes of it
        V = self.V
        return rest, self.q_logit.sigmoid()[..., None, None] * matmul(V, V.mT)

    def root(self, prior: Cholesky) -> tuple[Tensor, Tensor]:
        """chol(Ψ) and the logarithm of its determinant."""
        rest, added = self.scale_parts
        if self.whitened:
            inner = cholesky(add_to_diagonal(added, rest), jitter=0.0)
            return prior.tril @ inner.tril, prior.half_logdet + inner.half_logdet
        Psi = cholesky(torch.addcmul(added, prior.matrix, rest[..., None, None]), jitter=0.0)
        return Psi.tril, Psi.half_logdet

    def draw(self, noise: BartlettNoise) -> Draw:
        """A sample.

        The second moment is A′(E[TB]E[TB]ᵀ + diag(n))A′ᵀ, where n is the noise that reaches each row of TB.
        """
        A, B = self.row_mixing, self.column_mixing
        bartlett, (rest, added) = Bartlett(*self.free), self.scale_parts
        T, (mean, variance) = mix_columns(bartlett.rsample(noise), B), bartlett.mean_and_variance
        mean, n = mix_columns(mean, B), column_noise(variance, B)
        divergence = bartlett.kl_to_base_measure(self.df)
        if A is None:
            second_moment = matmul(mean, mean.mT) + n.diag_embed()
        else:
            mean, T = matmul(A, mean), shared_matmul(A, T, matmul)
            second_moment = matmul(mean, mean.mT) + matmul(A * n[..., None, :], A.mT)
        if self.whitened:
            # L_S⁻¹A is the same whatever S is, and so is the divergence.
            inner = cholesky(add_to_diagonal(added, rest), jitter=0.0)
            trace = (inner.tril * (inner.tril @ second_moment)).sum((-2, -1))
            T, divergence = shared_matmul(inner.tril, T), divergence + 0.5 * trace - self.df * inner.half_logdet
        return Draw(T, divergence, second_moment, rest, added)


def draw_together(posteriors: Sequence[WishartPosterior], noises: Sequence[BartlettNoise]) -> list[Draw]:
    """A sample of each posterior. Those of all layers are drawn in one pass where they have one form.

    They do not depend on the layers below, and there are many small operations in a draw.
    """
    alike = {(q.family, q.df, q.whitened, q.relative, q.loc.shape) for q in posteriors}
    if len(alike) != 1 or len(posteriors) == 1:
        return [q.tensors.draw(noise) for q, noise in zip(posteriors, noises, strict=True)]
    first, *columns = zip(*(q.tensors[2:] for q in posteriors), strict=True)
    stacked = [None if column[0] is None else torch.stack(column) for column in (first, *columns)]
    q = PosteriorTensors(posteriors[0].df, posteriors[0].whitened, *stacked)  # type: ignore[arg-type]
    # The layers come before the replicas, and samples before both.
    at = noises[0].gaussian.ndim - posteriors[0].loc.ndim
    normal, uniform = (torch.stack(x, at + 1) for x in zip(*(n.gamma[:2] for n in noises), strict=True))
    gamma = GammaNoise(normal, uniform, torch.stack([n.gamma.boost for n in noises], at))
    T, *others = q.draw(BartlettNoise(torch.stack([n.gaussian for n in noises], at), gamma))
    return [Draw(*parts) for parts in zip(T.unbind(at), *(x.unbind(0) for x in others), strict=True)]


class _UnitLU(torch.autograd.Function):
    """The product of the unit lower and the unit upper triangular matrix that a square matrix holds."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        lower, upper = rows.tril(-1), rows.triu(1)
        for triangle in (lower, upper):
            triangle.diagonal(dim1=-2, dim2=-1).fill_(1)
        ctx.save_for_backward(lower, upper)
        return product(lower, upper)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> Tensor:
        lower, upper = ctx.saved_tensors
        return product(bar, upper.mT).tril(-1) + product(lower.mT, bar).triu(1)


def _unit(strict: Tensor) -> Tensor:
    """A strictly triangular matrix with ones on its diagonal."""
    return strict + torch.eye(strict.shape[-1], dtype=strict.dtype, device=strict.device)
