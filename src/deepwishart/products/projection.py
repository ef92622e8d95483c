r"""The part of a step that every point takes: :math:`k = \exp(Pp)`, its image under some maps, and the way back.

These are the largest matrices, M × N for every sample. The C library takes a part of the points at a time, so that what
is made of them is used while it is near, and never written down where nothing else needs it.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from deepwishart.products import call, exponential_of_product, usable_library

__all__ = ["Projection", "project", "pull_back_projection"]


class Projection(NamedTuple):
    """What :func:`project` makes of points.

    Attributes:
        k: exp(min(P p, cap)), shape ``(*batch, M, N)``.
        seen: ``maps @ k``, shape ``(*batch, rows, N)``.
        norms: Squared norms of its columns over the first M rows, shape ``(*batch, N)``.
    """

    k: Tensor
    seen: Tensor
    norms: Tensor


def project(P: Tensor, p: Tensor, cap: Tensor, maps: Tensor) -> Projection:
    """The kernel of points, and what a layer sees of it.

    Args:
        P: Shape ``(*batch, M, c)``.
        p: Shape ``(*batch, c, N)``.
        cap: Shape ``(*batch, 1, 1)``.
        maps: M rows whose images' norms are wanted, and others below; shape ``(*batch, rows, M)``.
    """
    library, M, N = usable_library(P, p, cap, maps), maps.shape[-1], p.shape[-1]
    if library is None or N == 0:
        k = exponential_of_product(P, p, cap)
        seen = maps @ k
        a = seen[..., :M, :]
        return Projection(k, seen, (a * a).sum(-2))
    (*batch, _, c), rows = P.shape, maps.shape[-2]
    P, p, maps = (x.expand(*batch, *x.shape[-2:]).contiguous() for x in (P, p, maps))
    cap = cap.expand(*batch, 1, 1).contiguous()
    found = Projection(P.new_empty(*batch, M, N), P.new_empty(*batch, rows, N), P.new_empty(*batch, N))
    call(library.project, cap.numel(), M, c, N, rows, P, p, cap, maps, *found)
    return found


def pull_back_projection(
    P: Tensor,
    p: Tensor,
    maps: Tensor,
    found: Projection,
    norms_bar: Tensor,
    mean_bar: Tensor,
    against: Literal["k", "seen"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, from those of the norms and of the means, which are the last rows of what was seen.

    Args:
        P: As in :func:`project`.
        p: Likewise.
        maps: Likewise.
        found: What it returned.
        norms_bar: Shape ``(*batch, N)``.
        mean_bar: Shape ``(*batch, rows − M, N)``.
        against: Whether the gradient s̄ of what was seen is wanted against k, s̄kᵀ, which is that of the maps; or
            against the first M rows of what was seen, of which only the lower triangle is needed.

    Returns:
        That, shape ``(*batch, rows, M)``, and the gradients of P and of p.
    """
    library, k, seen = usable_library(P, p, maps, norms_bar, mean_bar), found.k, found.seen
    (*batch, M, c), (rows, N) = P.shape, seen.shape[-2:]
    if library is None or N == 0:
        seen_bar = _seen_bar(seen, M, norms_bar, mean_bar)
        E = (maps.mT @ seen_bar).mul_(k)
        other = k if against == "k" else seen[..., :M, :]
        return seen_bar @ other.mT, (p @ E.mT).mT, P.mT @ E
    P, p, maps, norms_bar, mean_bar = (x.contiguous() for x in (P, p, maps, norms_bar, mean_bar))
    results = P.new_empty(*batch, rows, M), torch.empty_like(P), torch.empty_like(p)
    sizes, inputs = (norms_bar.numel() // N, M, c, N, rows), (P, p, k, maps, seen, norms_bar, mean_bar)
    call(library.pull_back_projection, *sizes, *inputs, against == "seen", *results)
    return results


def _seen_bar(seen: Tensor, M: int, norms_bar: Tensor, mean_bar: Tensor) -> Tensor:
    a, scale = seen[..., :M, :], (2 * norms_bar)[..., None, :]
    if torch.compiler.is_compiling():  # it refuses out= into a part of a tensor, and makes one pass of this
        return torch.cat([a * scale, mean_bar], -2)
    seen_bar = torch.empty_like(seen)
    torch.mul(a, scale, out=seen_bar[..., :M, :])
    seen_bar[..., M:, :] = mean_bar
    return seen_bar
