"""Time of the distributions: Wishart against torch's, and A-GW and AB-GW against GW.

    python benchmarks/distributions.py [--json FILE] [--repeats 15]

Two comparisons, each with its contenders timed in turn, so that a noisy neighbour disturbs all alike; figures are
medians over the repeats, ratios are medians of the ratios within a turn.
"""

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributions import kl_divergence

from deepwishart.distributions import (
    ABGeneralizedWishart,
    AGeneralizedWishart,
    GeneralizedWishart,
    Wishart,
)
from deepwishart.distributions.bartlett_wishart import BartlettWishart
from deepwishart.linalg import inverse_tril

Contenders = dict[str, Callable[[], object]]


def wishart_contenders(validate: bool, P: int = 100, df: int = 120, batch: int = 256) -> Contenders:
    """A sample with its log-density; the first contender is torch's own Wishart."""
    scale_tril = random_tril(P, batch)

    def torchs() -> tuple[Tensor, Tensor]:
        distribution = torch.distributions.Wishart(df, scale_tril=scale_tril, validate_args=validate)
        G = distribution.rsample()
        return G, distribution.log_prob(G)

    def ours() -> tuple[Tensor, Tensor]:
        distribution = Wishart(df, scale_tril, validate_args=validate)
        G = distribution.rsample()
        return G, distribution.log_prob(G)

    def ours_with_factors() -> tuple[Tensor, Tensor]:
        distribution = Wishart(df, scale_tril, validate_args=validate)
        T, F = distribution.rsample_bartlett()
        return F @ F.mT, distribution.log_prob_bartlett(T, F)

    return {"torch": torchs, "ours": ours, "ours, log_prob_bartlett": ours_with_factors}


def posterior_contenders(P: int = 100, df: int = 10, batch: int = 10) -> tuple[Contenders, Contenders]:
    """A step of variational inference (sample, KL and gradients) by family, and log_prob(value) beside it."""
    make = {"GW": make_gw, "A-GW": make_a_gw, "AB-GW": make_ab_gw}
    L = random_tril(P, batch)
    prior = Wishart(df, L, scale_tril_inverse=inverse_tril(L), validate_args=False)
    parameters = {name: family_parameters(name, P, df, batch) for name in make}

    def step(name: str) -> Callable[[], object]:
        def run() -> None:
            posterior = make[name](df, parameters[name])
            _, F = posterior.rsample_bartlett()
            (kl_divergence(posterior, prior).sum() + F.sum()).backward()

        return run

    def density(name: str) -> Callable[[], object]:
        posterior = make[name](df, {key: value.detach() for key, value in parameters[name].items()})
        G = posterior.sample()
        return lambda: posterior.log_prob(G)

    return {name: step(name) for name in make}, {name: density(name) for name in make}


def make_gw(df: int, p: dict[str, Tensor]) -> BartlettWishart:
    return GeneralizedWishart(df, p["rows"], p["concentration"], p["rate"], p["loc"], p["scale"], validate_args=False)


def make_a_gw(df: int, p: dict[str, Tensor]) -> BartlettWishart:
    return AGeneralizedWishart(
        df,
        p["rows"],
        p["concentration"],
        p["rate"],
        p["loc"],
        p["scale"],
        row_mixing_logabsdet=p["logabsdet"],
        validate_args=False,
    )


def make_ab_gw(df: int, p: dict[str, Tensor]) -> BartlettWishart:
    return ABGeneralizedWishart(
        df,
        p["rows"],
        p["columns"],
        p["concentration"],
        p["rate"],
        p["loc"],
        p["scale"],
        row_mixing_logabsdet=p["logabsdet"],
        validate_args=False,
    )


def family_parameters(name: str, P: int, df: int, batch: int) -> dict[str, Tensor]:
    """Leaves that require gradients: rows for each of the batch, the rest shared, as a layer has them."""
    rank = min(df, P)
    rows = random_tril(P, batch) if name == "GW" else random_tril(P, batch) @ (torch.eye(P) + 0.05 * torch.randn(P, P))
    parameters = {
        "rows": rows,
        "columns": torch.eye(rank) + 0.1 * torch.randn(rank, rank).tril(-1),
        "concentration": 0.5 * (df - torch.arange(rank).double()),
        "rate": torch.full((rank,), 0.5),
        "loc": 0.1 * torch.randn(P, rank),
        "scale": torch.ones(P, rank),
        "logabsdet": torch.linalg.slogdet(rows).logabsdet,
    }
    return {key: value.double().requires_grad_() for key, value in parameters.items()}


def random_tril(P: int, batch: int) -> Tensor:
    X = torch.randn(batch, P, 2 * P, dtype=torch.float64)
    return torch.linalg.cholesky(X @ X.mT / (2 * P))


def measure(contenders: Contenders, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every contender in every turn, after one turn that does not count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def report(title: str, contenders: Contenders, repeats: int) -> dict[str, dict[str, float]]:
    """Print a table with times and ratios to the first contender; return it."""
    times = measure(contenders, repeats)
    reference = next(iter(times.values()))
    table = {
        name: {
            "ms": statistics.median(values),
            "ratio": statistics.median(t / r for t, r in zip(values, reference, strict=True)),
        }
        for name, values in times.items()
    }
    print(f"\n{title}")
    print("| | ms | time relative to the first |\n|---|---:|---:|")
    for name, row in table.items():
        print(f"| {name} | {row['ms']:.2f} | {row['ratio']:.3f} |")
    return table


def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--repeats", type=int, default=15, help="turns that count (default 15)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore", message="Singular sample detected")
    steps, densities = posterior_contenders()
    size = "Wishart, P = 100, df = 120, batch 256, rsample and log_prob of the sample"
    results: dict[str, object] = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }
    print(results["machine"])
    for name, title, contenders, repeats in (
        ("wishart validated", f"{size}, validated (goal: at most 0.5)", wishart_contenders(True), 1),
        ("wishart", f"{size}, validate_args=False (goal: at most 0.5)", wishart_contenders(False), 1),
        (
            "variational",
            "P = 100, df = 10, batch 10: rsample_bartlett, KL and gradients (goal: at most 1.3)",
            steps,
            10,
        ),
        ("log_prob", "P = 100, df = 10, batch 10: log_prob(value), validate_args=False", densities, 1),
    ):
        results[name] = report(title, contenders, repeats * arguments.repeats)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
