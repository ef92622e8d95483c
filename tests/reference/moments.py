"""Moments of G = (A T B)(A T B)ᵀ by multiplying everything out. Slow, obvious and exact."""

import itertools
from collections import Counter

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def gram_moments(A: Array, B: Array, raw: dict[tuple[int, int], list[float]]) -> tuple[Array, Array]:
    """Mean and variance of every entry of G.

    Args:
        A: P × P.
        B: r × r.
        raw: For each entry (a, b) of T that is not always zero, its raw moments E[Tᵏ] for k = 0 … 4.
    """
    P = len(A)
    mean, variance = np.zeros((P, P)), np.zeros((P, P))
    entries = list(raw)
    # G_ij = Σ over pairs of entries of A_ia T_ab (BBᵀ)_bd T_cd A_jc.
    H = B @ B.T
    for i, j in itertools.product(range(P), repeat=2):
        terms = {(e, f): A[i, e[0]] * H[e[1], f[1]] * A[j, f[0]] for e, f in itertools.product(entries, repeat=2)}
        first = sum(c * _expectation(pair, raw) for pair, c in terms.items())
        second = sum(
            c * d * _expectation((*one, *other), raw)
            for (one, c), (other, d) in itertools.product(terms.items(), repeat=2)
        )
        mean[i, j], variance[i, j] = first, second - first**2
    return mean, variance


def _expectation(factors: tuple[tuple[int, int], ...], raw: dict[tuple[int, int], list[float]]) -> float:
    """Of a product of entries: they are independent, so a product over distinct ones of a moment each."""
    return float(np.prod([raw[entry][power] for entry, power in Counter(factors).items()]))
