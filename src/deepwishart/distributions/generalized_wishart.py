"""The generalised Wishart distributions of the deep Wishart process's posteriors: GW, A-GW and AB-GW."""

import torch
from torch import Tensor
from torch.distributions import constraints

from deepwishart.distributions.bartlett import Bartlett
from deepwishart.distributions.bartlett_wishart import BartlettWishart
from deepwishart.distributions.base import validates
from deepwishart.distributions.mixing import GeneralRows, TriangularRows
from deepwishart.distributions.validation import (
    check_column_mixing,
    check_finite,
    check_positive,
    check_row_mixing,
    check_scale_tril,
    check_shapes,
    require_integer_df,
    square_size,
)

__all__ = ["ABGeneralizedWishart", "AGeneralizedWishart", "GeneralizedWishart"]

_BARTLETT_CONSTRAINTS = {
    "df": constraints.positive_integer,
    "concentration": constraints.independent(constraints.positive, 1),
    "rate": constraints.independent(constraints.positive, 1),
    "loc": constraints.independent(constraints.real, 2),
    "scale": constraints.independent(constraints.positive, 2),
}
_REAL_MATRIX = constraints.independent(constraints.real, 2)


class GeneralizedWishart(BartlettWishart):
    r"""Generalised (singular) Wishart, GW: a Wishart whose Bartlett factor has free parameters.

    .. math:: G = L T T^\top L^\top, \qquad T_{jj}^2 \sim \mathrm{Gamma}(\alpha_j, \beta_j), \qquad
        T_{ij} \sim \mathcal{N}(\mu_{ij}, \sigma_{ij}^2) \quad (i > j)

    with T of shape P × r, r = min(ν, P). At :math:`\alpha_j = (\nu-j+1)/2, \beta = ½, \mu = 0, \sigma = 1` it is
    :class:`Wishart`. [O2021; O2023, eqs. 11 and 12]

    Args:
        df: Degrees of freedom :math:`\nu`, a positive integer.
        scale_tril: :math:`L`, lower triangular with a positive diagonal, shape ``(*batch, P, P)``.
        concentration: :math:`\alpha`, shape ``(*batch, r)``.
        rate: :math:`\beta`, shape ``(*batch, r)``.
        loc: :math:`\mu`, shape ``(*batch, P, r)``; entries on and above the diagonal are ignored.
        scale: :math:`\sigma`, a standard deviation, shape ``(*batch, P, r)``; likewise.
        scale_tril_inverse: :math:`L^{-1}` if the caller has it.
        scale_tril_logabsdet: :math:`\log|L|` if the caller has it, shape ``(*batch)``.
        validate_args: As in torch.distributions: whether values are checked.
    """

    arg_constraints = {**_BARTLETT_CONSTRAINTS, "scale_tril": constraints.lower_cholesky}

    def __init__(
        self,
        df: int,
        scale_tril: Tensor,
        concentration: Tensor,
        rate: Tensor,
        loc: Tensor,
        scale: Tensor,
        *,
        scale_tril_inverse: Tensor | None = None,
        scale_tril_logabsdet: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        df = require_integer_df(df)
        P = square_size("scale_tril", scale_tril)
        shapes = _bartlett_shapes(df, P, concentration, rate, loc, scale)
        batch_shape = check_shapes(
            {"scale_tril": (scale_tril, (P, P)), **shapes},
            {"scale_tril_inverse": (scale_tril_inverse, (P, P)), "scale_tril_logabsdet": (scale_tril_logabsdet, ())},
        )
        if validates(validate_args):
            check_scale_tril(scale_tril, scale_tril_inverse, scale_tril_logabsdet)
            _check_bartlett(concentration, rate, loc, scale)
        bartlett = Bartlett(concentration, rate, loc, scale)
        rows = TriangularRows(scale_tril, scale_tril_inverse, scale_tril_logabsdet)
        super().__init__(df, bartlett, rows, None, batch_shape, validate_args)

    @property
    def scale_tril(self) -> Tensor:
        return self._expanded(self.rows.matrix, 2)


class AGeneralizedWishart(BartlettWishart):
    r"""A-generalised (singular) Wishart, A-GW: the rows of T mixed by any invertible matrix.

    .. math:: G = A T T^\top A^\top

    T is distributed as in :class:`GeneralizedWishart`, which is the special case of a lower-triangular A with a
    positive diagonal. The family is closed under :math:`G \mapsto R G R^\top`. [O2023, eq. 13]

    Args:
        df: Degrees of freedom :math:`\nu`, a positive integer.
        row_mixing: :math:`A`, invertible, shape ``(*batch, P, P)``.
        concentration: :math:`\alpha`, shape ``(*batch, r)``.
        rate: :math:`\beta`, shape ``(*batch, r)``.
        loc: :math:`\mu`, shape ``(*batch, P, r)``; entries on and above the diagonal are ignored.
        scale: :math:`\sigma`, a standard deviation, shape ``(*batch, P, r)``; likewise.
        row_mixing_logabsdet: log|det A|, shape ``(*batch)``, if the caller has it; else an LU factorisation.
        validate_args: As in torch.distributions: whether values are checked.
    """

    arg_constraints = {**_BARTLETT_CONSTRAINTS, "row_mixing": _REAL_MATRIX}

    def __init__(
        self,
        df: int,
        row_mixing: Tensor,
        concentration: Tensor,
        rate: Tensor,
        loc: Tensor,
        scale: Tensor,
        *,
        row_mixing_logabsdet: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        df = require_integer_df(df)
        P = square_size("row_mixing", row_mixing)
        shapes = _bartlett_shapes(df, P, concentration, rate, loc, scale)
        batch_shape = check_shapes(
            {"row_mixing": (row_mixing, (P, P)), **shapes}, {"row_mixing_logabsdet": (row_mixing_logabsdet, ())}
        )
        if validates(validate_args):
            check_row_mixing(row_mixing, row_mixing_logabsdet)
            _check_bartlett(concentration, rate, loc, scale)
        bartlett = Bartlett(concentration, rate, loc, scale)
        rows = GeneralRows(row_mixing, row_mixing_logabsdet)
        super().__init__(df, bartlett, rows, None, batch_shape, validate_args)

    @property
    def row_mixing(self) -> Tensor:
        return self._expanded(self.rows.matrix, 2)


class ABGeneralizedWishart(BartlettWishart):
    r"""AB-generalised (singular) Wishart, AB-GW: the rows of T mixed by A, its columns by a lower-triangular B.

    .. math:: G = A T B B^\top T^\top A^\top

    T is distributed as in :class:`GeneralizedWishart`; B = I gives :class:`AGeneralizedWishart`. [O2023, eq. 14]

    Args:
        df: Degrees of freedom :math:`\nu`, a positive integer.
        row_mixing: :math:`A`, invertible, shape ``(*batch, P, P)``.
        column_mixing: :math:`B`, lower triangular without a zero on its diagonal, shape ``(*batch, r, r)``.
        concentration: :math:`\alpha`, shape ``(*batch, r)``.
        rate: :math:`\beta`, shape ``(*batch, r)``.
        loc: :math:`\mu`, shape ``(*batch, P, r)``; entries on and above the diagonal are ignored.
        scale: :math:`\sigma`, a standard deviation, shape ``(*batch, P, r)``; likewise.
        row_mixing_logabsdet: log|det A|, shape ``(*batch)``, if the caller has it; else an LU factorisation.
        validate_args: As in torch.distributions: whether values are checked.
    """

    arg_constraints = {
        **_BARTLETT_CONSTRAINTS,
        "row_mixing": _REAL_MATRIX,
        "column_mixing": constraints.lower_triangular,
    }

    def __init__(
        self,
        df: int,
        row_mixing: Tensor,
        column_mixing: Tensor,
        concentration: Tensor,
        rate: Tensor,
        loc: Tensor,
        scale: Tensor,
        *,
        row_mixing_logabsdet: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        df = require_integer_df(df)
        P = square_size("row_mixing", row_mixing)
        r = min(df, P)
        shapes = _bartlett_shapes(df, P, concentration, rate, loc, scale)
        batch_shape = check_shapes(
            {"row_mixing": (row_mixing, (P, P)), "column_mixing": (column_mixing, (r, r)), **shapes},
            {"row_mixing_logabsdet": (row_mixing_logabsdet, ())},
        )
        if validates(validate_args):
            check_row_mixing(row_mixing, row_mixing_logabsdet)
            check_column_mixing(column_mixing)
            _check_bartlett(concentration, rate, loc, scale)
        bartlett = Bartlett(concentration, rate, loc, scale)
        rows = GeneralRows(row_mixing, row_mixing_logabsdet)
        super().__init__(df, bartlett, rows, column_mixing, batch_shape, validate_args)

    @property
    def row_mixing(self) -> Tensor:
        return self._expanded(self.rows.matrix, 2)

    @property
    def column_mixing(self) -> Tensor:
        assert self._B is not None
        return self._expanded(self._B, 2)


def _bartlett_shapes(
    df: int, P: int, concentration: Tensor, rate: Tensor, loc: Tensor, scale: Tensor
) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    r = min(df, P)
    return {
        "concentration": (concentration, (r,)),
        "rate": (rate, (r,)),
        "loc": (loc, (P, r)),
        "scale": (scale, (P, r)),
    }


def _check_bartlett(concentration: Tensor, rate: Tensor, loc: Tensor, scale: Tensor) -> None:
    below = torch.ones(scale.shape[-2:], dtype=torch.bool, device=scale.device).tril(-1)
    check_positive("concentration", concentration)
    check_positive("rate", rate)
    check_finite("loc", loc.tril(-1))
    check_positive("scale", scale, counts=below)
