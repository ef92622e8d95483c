r"""The paper's probability plot: A-GW reaches distributions that GW cannot. [O2023, figure 1]

With P = 2 and ν = 1 the top-left element of a GW matrix is Gamma distributed whatever its parameters, since it is
:math:`(L_{11} T_{11})^2`. With :math:`A = \begin{pmatrix} 1 & 1 \\ 0 & 1 \end{pmatrix}` that of an A-GW matrix is
:math:`(|g| + n)^2` with :math:`g \sim \mathcal{N}(0, 1)` and :math:`n \sim \mathcal{N}(\mu, \sigma^2)`, and no Gamma
fits it. The paper draws a signed g here, but :math:`T_{11} = +\sqrt{\mathrm{Gamma}}` is positive: this is the
distribution as it is defined. The exact skewness decides: a Gamma's is twice its coefficient of variation.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from deepwishart.distributions import AGeneralizedWishart, GeneralizedWishart
from deepwishart.distributions.bartlett_wishart import BartlettWishart

__all__ = ["GammaFit", "Skewness", "draw_probability_plot", "exact_skewness", "fit_gamma", "top_left_elements"]

_MEAN, _STD = 3.0, 1.0
_INK, _POINTS, _BAND = "#22313f", {"GW": "#5b8db8", "A-GW": "#c8553d"}, "#9aa5b1"


def top_left_elements(
    num_samples: int, mean: float = _MEAN, std: float = _STD, seed: int = 1
) -> dict[str, NDArray[np.float64]]:
    """Sorted samples of G₁₁ under GW and A-GW with one and the same law of T."""
    bartlett: dict[str, Any] = {
        "concentration": torch.full((1,), 0.5, dtype=torch.float64),
        "rate": torch.full((1,), 0.5, dtype=torch.float64),
        "loc": torch.full((2, 1), mean, dtype=torch.float64),
        "scale": torch.full((2, 1), std, dtype=torch.float64),
    }
    identity = torch.eye(2, dtype=torch.float64)
    mixed = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    families: dict[str, BartlettWishart] = {
        "GW": GeneralizedWishart(1, identity, **bartlett),
        "A-GW": AGeneralizedWishart(1, mixed, **bartlett),
    }
    generator = torch.Generator().manual_seed(seed)
    samples = {name: family.sample((num_samples,), generator=generator) for name, family in families.items()}
    return {name: np.sort(G[:, 0, 0].numpy()) for name, G in samples.items()}


@dataclass(frozen=True)
class GammaFit:
    """Sorted samples beside the maximum-likelihood Gamma.

    Attributes:
        samples: Sorted, shape ``(n,)``.
        quantiles: Of the fitted Gamma at (k − ½)/n.
        low, high: Where the k-th of n draws of that Gamma lies with probability 0.99.
    """

    samples: NDArray[np.float64]
    quantiles: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def fit_gamma(samples: NDArray[np.float64]) -> GammaFit:
    """Fit a Gamma that starts at zero to sorted samples."""
    count = len(samples)
    shape, _, scale = scipy.stats.gamma.fit(samples, floc=0)
    gamma = scipy.stats.gamma(shape, scale=scale)
    rank = np.arange(1, count + 1)
    order = scipy.stats.beta(rank, count + 1 - rank)  # the law of the k-th of n uniforms
    return GammaFit(
        samples=samples,
        quantiles=gamma.ppf((rank - 0.5) / count),
        low=np.asarray(gamma.ppf(order.ppf(0.005))),
        high=np.asarray(gamma.ppf(order.ppf(0.995))),
    )


class Skewness(NamedTuple):
    """Of a distribution, and of the Gamma with its mean and variance."""

    actual: float
    gamma: float


def exact_skewness(mean: float, std: float) -> Skewness:
    """Of (|g| + n)² with g ~ N(0, 1) and n ~ N(mean, std²), from moments of |g| and n. GW is the case n = 0."""
    root_moments = [2 ** (k / 2) * math.gamma((k + 1) / 2) / math.sqrt(math.pi) for k in range(7)]
    normal_moments = [1.0, mean]
    for k in range(2, 7):
        normal_moments.append(mean * normal_moments[-1] + (k - 1) * std**2 * normal_moments[-2])
    first, second, third = (
        sum(math.comb(m, k) * root_moments[k] * normal_moments[m - k] for k in range(m + 1)) for m in (2, 4, 6)
    )
    variance = second - first**2
    return Skewness(
        actual=(third - 3 * first * second + 2 * first**3) / variance**1.5, gamma=2 * math.sqrt(variance) / first
    )


def draw_probability_plot(path: Path, num_samples: int = 10_000, seed: int = 1) -> None:
    """Draw both families beside their best Gamma into a picture; the format follows the file's ending."""
    samples = top_left_elements(num_samples, _MEAN, _STD, seed)
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_panel(left, "GW", fit_gamma(samples["GW"]), exact_skewness(0, 0), "a Gamma, as it must be")
    _draw_panel(right, "A-GW", fit_gamma(samples["A-GW"]), exact_skewness(_MEAN, _STD), "no Gamma fits")
    left.set_ylabel("sample quantiles", color=_INK, fontsize=13)
    figure.suptitle("Mixing rows reaches what GW cannot", color=_INK, fontsize=18, fontweight="bold")
    figure.supxlabel(
        f"Top-left element of a random 2×2 matrix with one degree of freedom, {num_samples:,} draws, μ = {_MEAN:g}, "
        f"σ = {_STD:g}",
        color=_INK,
        fontsize=11,
    )
    figure.savefig(path, dpi=180, bbox_inches="tight", pad_inches=0.25)


def _draw_panel(axes: Axes, family: str, fit: GammaFit, skewness: Skewness, verdict: str) -> None:
    top = 1.04 * max(fit.samples[-1], fit.quantiles[-1])
    axes.fill_between(fit.quantiles, fit.low, fit.high, color=_BAND, alpha=0.35, lw=0, label="99 % of Gamma samples")
    axes.plot([0, top], [0, top], color=_INK, lw=1.2, label="equal distributions")
    axes.scatter(fit.quantiles, fit.samples, s=10, color=_POINTS[family], lw=0, zorder=3, label=f"{family} samples")
    axes.set(xlim=(0, top), ylim=(0, top), box_aspect=1)
    axes.set_title(f"{family}: {verdict}", color=_INK, fontsize=14, pad=10)
    axes.set_xlabel("quantiles of the fitted Gamma", color=_INK, fontsize=13)
    caption = f"exact skewness {skewness.actual:.3f}\na Gamma with this mean\nand variance: {skewness.gamma:.3f}"
    axes.text(0.97, 0.05, caption, transform=axes.transAxes, ha="right", color=_INK, fontsize=11, linespacing=1.4)
    axes.legend(loc="upper left", frameon=False, fontsize=11, labelcolor=_INK, markerscale=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=11)
