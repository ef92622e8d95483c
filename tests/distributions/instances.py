"""One table of instances, on which every invariant is tested."""

from typing import Any

import torch
from torch import Tensor

from deepwishart.distributions import (
    ABGeneralizedWishart,
    AGeneralizedWishart,
    GeneralizedWishart,
    InverseWishart,
    Wishart,
)
from deepwishart.distributions.bartlett_wishart import BartlettWishart

POSTERIORS = ("gw", "a-gw", "ab-gw")
FAMILIES = ("wishart", *POSTERIORS)
ALL = (*FAMILIES, "iw")

# P = 1, ν = 1, ν < P, ν = P − 1, ν = P, ν > P, ν ≫ P.
SIZES = ((1, 1), (1, 4), (2, 1), (3, 2), (4, 2), (3, 3), (3, 5), (2, 300))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_scale_tril(P: int, seed: int, batch: tuple[int, ...] = ()) -> Tensor:
    """A Cholesky factor of a well-conditioned matrix."""
    X = torch.randn(*batch, P, 2 * P + 2, dtype=torch.float64, generator=generator(seed))
    return torch.linalg.cholesky(X @ X.mT / (2 * P + 2) + 0.2 * torch.eye(P, dtype=torch.float64))


def random_row_mixing(P: int, seed: int, batch: tuple[int, ...] = ()) -> Tensor:
    """Any rotation or reflection times a diagonal between ½ and 2 times another: det of either sign."""
    g = generator(seed)
    U, V = (torch.linalg.qr(torch.randn(*batch, P, P, dtype=torch.float64, generator=g))[0] for _ in range(2))
    return U * (0.5 + 1.5 * torch.rand(*batch, 1, P, dtype=torch.float64, generator=g)) @ V


def random_column_mixing(r: int, seed: int, batch: tuple[int, ...] = ()) -> Tensor:
    """Lower triangular with a diagonal of random signs."""
    g = generator(seed)
    below = 0.5 * torch.randn(*batch, r, r, dtype=torch.float64, generator=g).tril(-1)
    size = 0.5 + torch.rand(*batch, r, dtype=torch.float64, generator=g)
    sign = 1.0 - 2.0 * torch.randint(0, 2, (*batch, r), generator=g)
    return below + torch.diag_embed(sign * size)


def bartlett_parameters(P: int, df: int, seed: int, batch: tuple[int, ...] = ()) -> dict[str, Any]:
    """Random α, β, μ, σ."""
    r, g = min(df, P), generator(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*batch, *shape, dtype=torch.float64, generator=g)

    return {
        "concentration": 0.7 + 3 * uniform(r),
        "rate": 0.4 + uniform(r),
        "loc": 2 * uniform(P, r) - 1,
        "scale": 0.4 + uniform(P, r),
    }


def standard_parameters(P: int, df: int) -> dict[str, Any]:
    """Those at which a generalised Wishart is a Wishart."""
    r = min(df, P)
    steps = torch.arange(r, dtype=torch.float64)
    return {
        "concentration": (df - steps) / 2,
        "rate": torch.full((r,), 0.5, dtype=torch.float64),
        "loc": torch.zeros(P, r, dtype=torch.float64),
        "scale": torch.ones(P, r, dtype=torch.float64),
    }


def parameters(family: str, P: int, df: int, seed: int = 0, batch: tuple[int, ...] = ()) -> dict[str, Any]:
    """Constructor arguments of an instance. An inverse Wishart has P + 2.5 to P + 3.5 degrees of freedom more."""
    tril = random_scale_tril(P, seed, batch)
    if family == "wishart":
        return {"df": df, "scale_tril": tril}
    if family == "iw":
        spread = torch.rand(batch, dtype=torch.float64, generator=generator(seed + 1))
        return {"df": df + P + 2.5 + spread, "scale_tril": tril}
    free = bartlett_parameters(P, df, seed + 1, batch)
    if family == "gw":
        return {"df": df, "scale_tril": tril, **free}
    mixing = {"row_mixing": random_row_mixing(P, seed + 2, batch)}
    if family == "ab-gw":
        mixing["column_mixing"] = random_column_mixing(min(df, P), seed + 3, batch)
    return {"df": df, **mixing, **free}


CLASSES: dict[str, Any] = {
    "wishart": Wishart,
    "gw": GeneralizedWishart,
    "a-gw": AGeneralizedWishart,
    "ab-gw": ABGeneralizedWishart,
    "iw": InverseWishart,
}


def make(
    family: str,
    P: int,
    df: int,
    seed: int = 0,
    batch: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
    validate_args: bool | None = None,
) -> Any:
    """A random instance of a family."""
    arguments = parameters(family, P, df, seed, batch)
    cast = {name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    return CLASSES[family](**cast, validate_args=validate_args)


def make_bartlett(family: str, P: int, df: int, seed: int = 0) -> BartlettWishart:
    """A random instance of the families that are made from a Bartlett factor."""
    instance = make(family, P, df, seed)
    assert isinstance(instance, BartlettWishart)
    return instance


def free_coordinates(G: Tensor, rank: int) -> Tensor:
    """The lower triangle of the first ``rank`` columns, as a vector."""
    row, column = torch.tril_indices(G.shape[-2], rank)
    return G[..., row, column]
