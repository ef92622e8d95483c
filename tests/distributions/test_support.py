"""Membership of the support: every sample belongs, near misses do not."""

import pytest
import torch

from deepwishart.distributions import PositiveSemidefiniteOfRank, Wishart
from tests.distributions.instances import ALL, SIZES, make
from tests.proofs import Proofs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", ALL)
def test_every_sample_belongs(family: str, dtype: torch.dtype, proofs: Proofs) -> None:
    draws = proofs.size(2_000, 200_000)
    refused = cases = 0
    for P, df in [*SIZES, (10, 4), (10, 9)]:
        q = make(family, P, df, dtype=dtype)
        belongs = q.support.check(q.sample((draws,)))
        refused += int((~belongs).sum())
        cases += draws
    # T_jj² has a density that is infinite at zero where α_j = ½, so now and then a sample is singular to working
    # precision, in float32 more often; it is then right to say so.
    limit = 1e-2 if dtype == torch.float32 else 1e-5
    proofs.record(
        f"Samples of {family} refused by their own support, {str(dtype)[6:]}",
        cases=cases,
        worst=refused / cases,
        limit=limit,
        unit="share",
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_matrix_of_too_low_a_rank_belongs(dtype: torch.dtype, proofs: Proofs) -> None:
    draws = proofs.size(2_000, 500_000)
    accepted = cases = 0
    for P, rank in [(2, 2), (3, 2), (6, 4), (10, 9), (10, 10), (30, 10)]:
        F = torch.randn(draws, P, rank - 1, dtype=dtype)
        accepted += int(PositiveSemidefiniteOfRank(rank).check(F @ F.mT).sum())
        cases += draws
    proofs.record(
        f"Matrices of too low a rank accepted, {str(dtype)[6:]}",
        cases=cases,
        worst=accepted / cases,
        limit=0.0,
        unit="share",
    )


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_membership_does_not_depend_on_units(size: float) -> None:
    F = size * torch.randn(100, 6, 3, dtype=torch.float64)
    G = F @ F.mT
    assert PositiveSemidefiniteOfRank(3).check(G).all()
    assert not PositiveSemidefiniteOfRank(2).check(G).any()
    assert not PositiveSemidefiniteOfRank(4).check(G).any()
    rows = torch.logspace(-6, 6, 6, dtype=torch.float64)
    assert PositiveSemidefiniteOfRank(3).check(G * rows[:, None] * rows).all()


def test_a_small_step_off_the_manifold_is_seen() -> None:
    F = torch.randn(100, 6, 3, dtype=torch.float64)
    assert not PositiveSemidefiniteOfRank(3).check(F @ F.mT + 1e-8 * torch.eye(6, dtype=torch.float64)).any()


def test_an_ill_conditioned_leading_block_is_no_reason_to_refuse() -> None:
    """Three near duplicates in front: the residual is all rounding, magnified by the block's condition number."""
    F = torch.randn(6, 3, dtype=torch.float64)
    F[1] = F[0] + 1e-4 * F[1]
    F[2] = F[0] + 1e-4 * F[2]
    assert PositiveSemidefiniteOfRank(3).check(F @ F.mT)


def test_support_is_nan_safe_and_named() -> None:
    support = Wishart(2, torch.eye(3)).support
    assert repr(support) == "PositiveSemidefiniteOfRank(2)"
    assert not support.check(torch.full((3, 3), float("nan")))
