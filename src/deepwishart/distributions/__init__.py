"""Distributions over positive semi-definite matrices, in the form of torch.distributions.

Importing this package registers closed-form KL divergences with :func:`torch.distributions.kl_divergence`.
"""

from deepwishart.distributions.bartlett import Bartlett, BartlettNoise
from deepwishart.distributions.conditional import WishartExtension, extend_wishart
from deepwishart.distributions.generalized_wishart import (
    ABGeneralizedWishart,
    AGeneralizedWishart,
    GeneralizedWishart,
)
from deepwishart.distributions.inverse_wishart import InverseWishart
from deepwishart.distributions.kl import log_density_ratio
from deepwishart.distributions.support import PositiveSemidefiniteOfRank
from deepwishart.distributions.wishart import Wishart

__all__ = [
    "ABGeneralizedWishart",
    "AGeneralizedWishart",
    "Bartlett",
    "BartlettNoise",
    "GeneralizedWishart",
    "InverseWishart",
    "PositiveSemidefiniteOfRank",
    "Wishart",
    "WishartExtension",
    "extend_wishart",
    "log_density_ratio",
]
