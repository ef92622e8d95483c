"""Products and factors of the C library beside those of torch, in billions of floating-point operations a second.

    python benchmarks/products.py

Both take turns; figures are medians of 11 turns. Counted is what a dense matrix would need: 2mnk for a product, 2n³/3
for a factor with its inverse, so that what knows zeros can be faster than the processor. Exponentials count as one.
"""

import platform
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepwishart.experiments.machine import cpu_name
from deepwishart.products import exponential_of_product, inverse_factor, inverse_tril, product
from deepwishart.products.native import load
from deepwishart.training.memory import memory_is_kept

# Samples, rows, inner dimension, columns.
PRODUCTS = [(1, 1000, 1000, 1000), (3, 300, 300, 1000), (10, 100, 100, 455), (10, 100, 100, 100), (10, 100, 15, 455)]
TURNS, REPEATS = 11, 20


def seconds(work: Callable[..., object], operands: Sequence[Tensor]) -> float:
    work(*operands)
    begun = time.perf_counter()
    for _ in range(REPEATS):
        work(*operands)
    return (time.perf_counter() - begun) / REPEATS


def show(
    name: str, operations: float, ours: Callable[..., object], theirs: Callable[..., object], *operands: Tensor
) -> None:
    turns = [(seconds(theirs, operands), seconds(ours, operands)) for _ in range(TURNS)]
    torch_rate, own_rate = (operations / statistics.median(times) / 1e9 for times in zip(*turns, strict=True))
    print(f"| {name} | {torch_rate:.0f} | {own_rate:.0f} |", flush=True)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def plain_exponential(P: Tensor, p: Tensor, cap: Tensor) -> Tensor:
    return (P @ p).clamp_(max=cap).exp_()


def plain_factor(K: Tensor) -> tuple[Tensor, Tensor]:
    L, _ = torch.linalg.cholesky_ex(K)
    return L, inverse_tril(L)


def main() -> None:
    print(f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {platform.python_version()}")
    print(f"C library: {load().problem or 'compiled for this processor'}\n\n| | torch | ours |\n|---|--:|--:|")
    for batch, m, k, n in PRODUCTS:
        name, operations = f"{batch} × ({m} × {k}) · ({k} × {n})", 2.0 * batch * m * k * n
        show(name, operations, product, torch.matmul, normal(batch, m, k), normal(batch, k, n))
    lower = normal(10, 100, 100).tril()
    show("10 × (100 × 100) · (100 × 100), both lower triangular", 2e7, product, torch.matmul, lower, lower)
    thin, cap = (0.1 * normal(10, 100, 15), 0.1 * normal(10, 15, 455)), torch.zeros(1, 1, 1, dtype=torch.float64)
    operations = 10.0 * 100 * 455 * (2 * 15 + 1)
    show("10 × exp of (100 × 15) · (15 × 455)", operations, exponential_of_product, plain_exponential, *thin, cap)
    for batch, n in ((10, 100), (3, 300)):
        A = normal(batch, n, n)
        K = A @ A.mT + n * torch.eye(n)
        show(f"{batch} factors of {n} × {n} with inverses", batch * 2 / 3 * n**3, inverse_factor, plain_factor, K)


if __name__ == "__main__":
    with memory_is_kept():
        main()
