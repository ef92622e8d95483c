"""The variational posterior of a Wishart layer, and where it starts."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from deepwishart.distributions import ABGeneralizedWishart, AGeneralizedWishart, GeneralizedWishart
from deepwishart.distributions.bartlett import standard_concentration
from deepwishart.distributions.bartlett_wishart import BartlettWishart
from deepwishart.linalg import Cholesky, cholesky, half_logdet

__all__ = ["INITIALISATIONS", "POSTERIORS", "Initialisation", "WishartPosterior"]

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

        identity = torch.eye(M, dtype=prior_tril.dtype, device=prior_tril.device).expand_as(prior_tril)
        prior_root = identity if self.whitened else prior_tril
        self.V = nn.Parameter(prior_root.clone() if initialisation.v == "prior" else normal(M, M) / M**0.5)
        self.q_logit = nn.Parameter(full(value=initialisation.q[0 if is_first else 1]).logit())
        if family != "gw":
            self.rows = nn.Parameter(full(M, M, value=0.0))
        if family == "ab-gw":
            self.columns = nn.Parameter(full(rank, rank, value=0.0))

    def forward(self, prior: Cholesky) -> BartlettWishart:
        """The posterior, given the Cholesky factor of the prior's scale S."""
        root = self._root(prior)
        free = (self.log_concentration.exp(), self.log_rate.exp(), self.loc, self.log_scale.exp())
        if self.family == "gw":
            return GeneralizedWishart(self.df, root, *free, validate_args=False)
        A, logabsdet = root @ self.row_mixing, half_logdet(root)
        if self.family == "a-gw":
            return AGeneralizedWishart(self.df, A, *free, row_mixing_logabsdet=logabsdet, validate_args=False)
        return ABGeneralizedWishart(
            self.df, A, self.column_mixing, *free, row_mixing_logabsdet=logabsdet, validate_args=False
        )

    @property
    def row_mixing(self) -> Tensor:
        """A′, of determinant one, shape ``(*batch, M, M)``."""
        return _unit(self.rows.tril(-1)) @ _unit(self.rows.triu(1))

    @property
    def column_mixing(self) -> Tensor:
        """B, unit lower triangular, shape ``(*batch, r, r)``."""
        return _unit(self.columns.tril(-1))

    def _root(self, prior: Cholesky) -> Tensor:
        """chol(Ψ)."""
        q = self.q_logit.sigmoid()[..., None, None]
        rest = (-self.q_logit).sigmoid()[..., None, None]  # 1 − q, without the zero that rounding makes of it
        if self.whitened:
            identity = torch.eye(self.V.shape[-1], dtype=self.V.dtype, device=self.V.device)
            return prior.tril @ cholesky(rest * identity + q * (self.V @ self.V.mT), jitter=0.0).tril
        S = prior.tril @ prior.tril.mT
        return cholesky(rest * S + q * (self.V @ self.V.mT), jitter=0.0).tril


def _unit(strict: Tensor) -> Tensor:
    """A strictly triangular matrix with ones on its diagonal."""
    return strict + torch.eye(strict.shape[-1], dtype=strict.dtype, device=strict.device)
