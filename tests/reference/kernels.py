"""Kernels on features, one pair of points at a time, in plain Python. Slow and obvious."""

import math
from collections.abc import Callable, Sequence

Point = Sequence[float]


def _dot(x: Point, y: Point) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True)) / len(x)


def _s(x: Point, y: Point, lengthscale: float) -> float:
    return sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) / len(x) / lengthscale**2


def _theta(x: Point, y: Point) -> float:
    cosine = _dot(x, y) / math.sqrt(_dot(x, x) * _dot(y, y))
    return math.acos(max(-1.0, min(1.0, cosine)))


def squared_exponential(x: Point, y: Point, h: float, l: float) -> float:
    return h**2 * math.exp(-_s(x, y, l) / 2)


def matern12(x: Point, y: Point, h: float, l: float) -> float:
    return h**2 * math.exp(-math.sqrt(_s(x, y, l)))


def matern32(x: Point, y: Point, h: float, l: float) -> float:
    d = math.sqrt(3 * _s(x, y, l))
    return h**2 * (1 + d) * math.exp(-d)


def matern52(x: Point, y: Point, h: float, l: float) -> float:
    s = _s(x, y, l)
    return h**2 * (1 + math.sqrt(5 * s) + 5 * s / 3) * math.exp(-math.sqrt(5 * s))


def rational_quadratic(x: Point, y: Point, h: float, l: float, a: float = 1.0) -> float:
    return h**2 * (1 + _s(x, y, l) / (2 * a)) ** (-a)


def arc_cosine_0(x: Point, y: Point, h: float, l: float) -> float:
    return h**2 * (1 - _theta(x, y) / math.pi)


def arc_cosine_1(x: Point, y: Point, h: float, l: float) -> float:
    theta = _theta(x, y)
    size = math.sqrt(_dot(x, x) * _dot(y, y))
    return h**2 / math.pi * size * (math.sin(theta) + (math.pi - theta) * math.cos(theta))


def linear(x: Point, y: Point, h: float, l: float) -> float:
    return h**2 * _dot(x, y)


KERNELS: dict[str, Callable[[Point, Point, float, float], float]] = {
    "squared-exponential": squared_exponential,
    "matern-1/2": matern12,
    "matern-3/2": matern32,
    "matern-5/2": matern52,
    "rational-quadratic": rational_quadratic,
    "arc-cosine-0": arc_cosine_0,
    "arc-cosine-1": arc_cosine_1,
    "linear": linear,
}
