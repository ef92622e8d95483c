"""The matrix A that mixes the rows of a Bartlett factor: triangular in Wishart and GW, any in A-GW and AB-GW."""

import torch
from torch import Tensor

from deepwishart.linalg import half_logdet, log_abs_det, shared_matmul

__all__ = ["GeneralRows", "TriangularRows"]


class TriangularRows:
    """A = L, lower triangular with a positive diagonal.

    Args:
        matrix: L, shape ``(*batch, P, P)``.
        inverse: L⁻¹ if it is known; solves then become matrix products.
        logabsdet: log|det L|, shape ``(*batch)``, if it is known.
    """

    def __init__(self, matrix: Tensor, inverse: Tensor | None = None, logabsdet: Tensor | None = None) -> None:
        self.matrix = matrix
        self.inverse = inverse
        self._logabsdet = logabsdet

    @property
    def logabsdet(self) -> Tensor:
        return half_logdet(self.matrix) if self._logabsdet is None else self._logabsdet

    def whiten(self, rhs: Tensor) -> Tensor:
        """L⁻¹ rhs."""
        if self.inverse is not None:
            return shared_matmul(self.inverse, rhs)
        return torch.linalg.solve_triangular(self.matrix, rhs, upper=False)

    def unmix(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Λ, lower trapezoidal with a positive diagonal, such that L Λ = Φ; and log|det L|."""
        return self.whiten(phi), self.logabsdet

    def half_logdet_leading(self, F: Tensor) -> Tensor:
        """log|det F_{:r,:r}| of F = L T B, which is lower trapezoidal as T is."""
        return F.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)


class GeneralRows:
    """A, any invertible matrix.

    Args:
        matrix: A, shape ``(*batch, P, P)``.
        logabsdet: log|det A|, shape ``(*batch)``, if it is known; else an LU factorisation finds it.
    """

    def __init__(self, matrix: Tensor, logabsdet: Tensor | None = None) -> None:
        self.matrix = matrix
        self._logabsdet = logabsdet

    @property
    def logabsdet(self) -> Tensor:
        return log_abs_det(self.matrix) if self._logabsdet is None else self._logabsdet

    def unmix(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Λ, lower trapezoidal with a positive diagonal, such that A Λ Λᵀ Aᵀ = Φ Φᵀ; and log|det A|.

        Λ is A⁻¹Φ up to a rotation from the right, which a QR factorisation removes. Unlike a Cholesky factor of
        A⁻¹ G A⁻ᵀ this meets the condition number of A once, not squared.
        """
        lu, pivots, _ = torch.linalg.lu_factor_ex(self.matrix, check_errors=False)
        logabsdet = lu.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1) if self._logabsdet is None else self._logabsdet
        batch_shape = torch.broadcast_shapes(lu.shape[:-2], phi.shape[:-2])
        unmixed = torch.linalg.lu_solve(lu, pivots, phi.expand(*batch_shape, -1, -1))
        _, R = torch.linalg.qr(unmixed.mT)
        signs = R.diagonal(dim1=-2, dim2=-1).sign()
        return (signs[..., :, None] * R).mT, logabsdet

    def half_logdet_leading(self, F: Tensor) -> Tensor:
        """log|det F_{:r,:r}| of F = A T B: one LU factorisation of size r."""
        return log_abs_det(F[..., : F.shape[-1], :])
