"""Layers: a Gram matrix and noise in, a Gram matrix and a KL divergence out."""

from deepwishart.layers.base import Layer, LayerOutput
from deepwishart.layers.gaussian import GaussianLayer, GaussianOutput, GaussianPosterior, Marginals
from deepwishart.layers.inverse_wishart import InverseWishartLayer
from deepwishart.layers.posterior import INITIALISATIONS, POSTERIORS, Initialisation, WishartPosterior
from deepwishart.layers.wishart import WishartLayer

__all__ = [
    "INITIALISATIONS",
    "POSTERIORS",
    "GaussianLayer",
    "GaussianOutput",
    "GaussianPosterior",
    "Initialisation",
    "InverseWishartLayer",
    "Layer",
    "LayerOutput",
    "Marginals",
    "WishartLayer",
    "WishartPosterior",
]
