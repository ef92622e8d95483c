"""Milliseconds a training step, beside GPyTorch's deep GP, the paper's algorithm written down, and arithmetic itself.

    python benchmarks/step_time.py [--json FILE] [--device cuda] [--replicas 20] [--quick] [--no-scaling]

Contestants take turns, so that a slow minute of a shared machine is slow for all; each has a process of its own, so
that none profits from another's memory. GW, A-GW and AB-GW have the paper's Ψ = (1 − q)S + qVVᵀ; "whitened" is A-GW
with Ψ in units of S, "compiled" A-GW after torch.compile, whose peak memory is that of the plain step at least, with
which it is compared once. The arithmetic limit is the number of floating-point operations that a step of the paper's
A-GW needs, over the rate of the faster of torch's batched matrix product and ours, plus torch's exponentials over
theirs. A product costs 2mnk forward and twice that backward; a Cholesky factor with its inverse 2M³/3 and twice that.
With S samples, and all in the first layer that does not depend on them counted once:

    kernel blocks      6 M (M + N) (ν + 2)
    a = L⁻¹k           6 M² N
    conditional means  6 M N ν
    hidden layers      12 M³ (A = CA′ and L⁻¹A)  +  12 M² ν (features)  +  4 M³ (two factors)
    output             18 M³ (ℓᵀKℓ and W)  +  2 M³ (one factor), and no features
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepwishart import deep_gaussian_process, deep_wishart_process
from deepwishart.experiments.machine import cpu_name
from deepwishart.products import product
from deepwishart.products.native import load
from deepwishart.training import TrainingConfig
from deepwishart.training.loop import Trainer
from deepwishart.training.memory import memory_is_kept
from deepwishart.training.parameters import FlatParameters
from tests.peak import peak_mib
from tests.reference import algorithm1

# Rows of a training split and inputs of the UCI sets.
SETS = {"yacht": (277, 6), "boston": (455, 13)}
PEERS = ("textbook", "gpytorch")
SAMPLES, INDUCING = 10, 100

Step = Callable[[], None]


def random_table(N: int, D: int, replicas: int, device: str) -> tuple[Tensor, Tensor]:
    batch = () if replicas == 1 else (replicas,)
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(*batch, N, D, dtype=torch.float64, generator=generator)
    Y = X[..., :1].sin() + 0.1 * torch.randn(*batch, N, 1, dtype=torch.float64, generator=generator)
    return X.to(device), Y.to(device)


def our_step(
    method: str,
    X: Tensor,
    Y: Tensor,
    depth: int,
    num_samples: int = SAMPLES,
    num_inducing: int = INDUCING,
    is_compiled: bool = False,
    **options: Any,
) -> Step:
    common = {"depth": depth, "num_inducing": num_inducing, **options}
    if method == "dgp":
        model = deep_gaussian_process(X, Y, **common)
    else:
        model = deep_wishart_process(X, Y, posterior=method, **common)
    config = TrainingConfig(
        num_steps=100_000, num_samples=num_samples, batch_size=X.shape[-2], check_every=1_000, compile=is_compiled
    )
    return Trainer(model, FlatParameters(model, model.batch_shape), X, Y, config).step


def textbook_step(X: Tensor, Y: Tensor, depth: int) -> Step:
    model = algorithm1.textbook(
        deep_wishart_process(X, Y, depth=depth, posterior="a-gw", num_inducing=INDUCING, initialisation="prior")
    )
    optimiser = torch.optim.Adam(algorithm1.parameters(model), lr=1e-3, fused=True)

    def step() -> None:
        optimiser.zero_grad()
        (-algorithm1.elbo(model, X, Y, SAMPLES) / len(X)).backward()
        optimiser.step()

    return step


def gpytorch_step(X: Tensor, Y: Tensor, depth: int) -> Step | None:
    """A deep GP of the same depth, widths, inducing points and samples, or ``None`` without GPyTorch."""
    try:
        import gpytorch
        from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
    except ImportError:
        return None
    D = X.shape[-1]

    class Layer(DeepGPLayer):
        def __init__(self, inputs: int, outputs: int | None) -> None:
            batch = torch.Size(() if outputs is None else (outputs,))
            inducing = (
                X[:INDUCING].expand(*batch, -1, -1).clone() if inputs == D else torch.randn(*batch, INDUCING, inputs)
            )
            q = gpytorch.variational.CholeskyVariationalDistribution(INDUCING, batch)
            strategy = gpytorch.variational.VariationalStrategy(self, inducing, q, learn_inducing_locations=True)
            super().__init__(strategy, inputs, outputs)
            self.mean = gpytorch.means.ConstantMean(batch_shape=batch)
            rbf = gpytorch.kernels.RBFKernel(ard_num_dims=inputs, batch_shape=batch)
            self.kernel = gpytorch.kernels.ScaleKernel(rbf, batch_shape=batch)

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    class Model(DeepGP):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(D, D) for _ in range(depth - 1)] + [Layer(D, None)])

        def forward(self, x: Tensor) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model().to(X)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(X)
    bound = gpytorch.mlls.DeepApproximateMLL(gpytorch.mlls.VariationalELBO(likelihood, model, len(X)))
    optimiser = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=1e-3)
    y = Y.squeeze(-1)

    def step() -> None:
        optimiser.zero_grad()
        with gpytorch.settings.num_likelihood_samples(SAMPLES):
            (-bound(model(X), y)).backward()
        optimiser.step()

    return step


def operations(N: int, M: int, nu: int, S: int, depth: int) -> float:
    """Floating-point operations of a step; the docstring of this file says how they are counted."""
    kernel = 6 * M * (M + N) * (nu + 2) + 6 * M**2 * N
    total = 0.0
    for layer in range(depth):
        samples = 1 if layer == 0 else S
        total += samples * kernel
        if layer < depth - 1:
            total += S * (6 * M * N * nu + 12 * M**2 * nu) + samples * 16 * M**3
        else:
            total += samples * (6 * M * N + 20 * M**3)
    return total


def measured_rates(X: Tensor) -> tuple[float, float]:
    """Operations a second of a batched product of the size at hand, torch's or ours, and exponentials a second."""
    J = torch.randn(SAMPLES, INDUCING, INDUCING, dtype=X.dtype, device=X.device)
    k = torch.rand(SAMPLES, INDUCING, X.shape[-2], dtype=X.dtype, device=X.device)
    out = torch.empty_like(k)
    with memory_is_kept():
        products = (lambda: torch.bmm(J, k, out=out), lambda: product(J, k))
        fastest = min(best_time(work, X.device.type) for work in products)
        exponential = best_time(lambda: torch.exp(k, out=out), X.device.type)
    return 2 * SAMPLES * INDUCING**2 * X.shape[-2] / fastest, k.numel() / exponential


def best_time(work: Callable[[], Any], device: str, repeats: int = 60) -> float:
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - begun)
    return min(times)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def limit_ms(X: Tensor, depth: int, rates: tuple[float, float], replicas: int = 1) -> float:
    N, nu = X.shape[-2:]
    exponentials = INDUCING * (INDUCING + N) * (1 + SAMPLES * (depth - 1))
    seconds = operations(N, INDUCING, nu, SAMPLES, depth) / rates[0] + exponentials / rates[1]
    return 1e3 * replicas * seconds


class Contestant:
    """A training step in a process of its own."""

    def __init__(self, kind: str, shape: tuple[int, int, int], depth: int, device: str, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, kind, shape, depth, device, options), daemon=True)
        self.process.start()
        self.is_there: bool = self.connection.recv()

    def run(self, warm_up: int, steps: int) -> float:
        """Seconds a step."""
        self.connection.send((warm_up, steps))
        seconds: float = self.connection.recv()
        return seconds

    def close(self) -> float:
        """End the process; return its largest memory, in MiB."""
        self.connection.send(None)
        peak: float = self.connection.recv()
        self.process.join()
        return peak


def _serve(
    connection: Any, kind: str, shape: tuple[int, int, int], depth: int, device: str, options: dict[str, Any]
) -> None:
    N, D, replicas = shape
    X, Y = random_table(N, D, replicas, device)
    step: Step | None
    if kind == "textbook":
        step = textbook_step(X, Y, depth)
    elif kind == "gpytorch":
        step = gpytorch_step(X, Y, depth)
    else:
        step = our_step(kind, X, Y, depth, **options)
    connection.send(step is not None)
    # During a run our step keeps its memory.
    with memory_is_kept() if kind not in ("textbook", "gpytorch") and device == "cpu" else nullcontext():
        while (order := connection.recv()) is not None:
            assert step is not None
            for _ in range(order[0]):
                step()
            synchronise(device)
            begun = time.perf_counter()
            for _ in range(order[1]):
                step()
            synchronise(device)
            connection.send((time.perf_counter() - begun) / order[1])
    connection.send(peak_memory(device))


def by_turns(contestants: dict[str, Contestant], device: str, rounds: int, steps: int) -> dict[str, float]:
    """Median milliseconds a step."""
    warm_up = 2 if device == "cpu" else 6
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant.run(10, 1)
    for _ in range(rounds):
        for name, contestant in contestants.items():
            times[name].append(contestant.run(warm_up, steps))
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def compare(name: str, depth: int, device: str, replicas: int, rounds: int, steps: int) -> dict[str, Any]:
    shape = (*SETS[name], replicas)
    field = {"dgp": Contestant("dgp", shape, depth, device)}
    for method in ("gw", "a-gw", "ab-gw"):
        field[method] = Contestant(method, shape, depth, device, initialisation="prior")
    field["whitened"] = Contestant("a-gw", shape, depth, device, initialisation="whitened")
    field["compiled"] = Contestant("a-gw", shape, depth, device, initialisation="prior", is_compiled=True)
    if replicas == 1 and device == "cpu":
        field |= {peer: Contestant(peer, shape, depth, device) for peer in PEERS}
    field = {contestant: step for contestant, step in field.items() if step.is_there}
    found = by_turns(field, device, rounds, steps)
    memory = {contestant: step.close() for contestant, step in field.items()}
    row = {"set": name, "depth": depth, "replicas": replicas, "ms": found, "peak_mib": memory}
    if device == "cpu":
        X, _ = random_table(*SETS[name], 1, device)
        row["limit_ms"] = limit_ms(X, depth, measured_rates(X), replicas)
    return row


def scaling(device: str, rounds: int, steps_a_round: int) -> list[dict[str, Any]]:
    """A-GW at depth 3, one quantity at a time varied around N = 400, M = 100, ν = 8, S = 10, R = 1."""
    usual = {"N": 400, "M": 100, "nu": 8, "S": 10, "R": 1, "depth": 3}
    varied: dict[str, Sequence[int]] = {
        "N": (200, 400, 800, 1600),
        "M": (50, 100, 200, 400),
        "nu": (4, 8, 16, 32),
        "S": (5, 10, 20, 40),
        "R": (1, 2, 4, 8),
        "depth": (2, 3, 5, 9),
    }
    rows = []
    for quantity, values in varied.items():
        for value in values:
            q = {**usual, quantity: value}
            shape, options = (q["N"], q["nu"], q["R"]), {"num_samples": q["S"], "num_inducing": q["M"]}
            step = Contestant("a-gw", shape, q["depth"], device, initialisation="prior", **options)
            ms = by_turns({"a-gw": step}, device, rounds, steps_a_round)["a-gw"]
            rows.append({"quantity": quantity, "value": value, "ms": ms, "peak_mib": step.close()})
    return rows


def peak_memory(device: str) -> float:
    """The largest memory that this process has had, on a GPU that of the device, in MiB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_mib()


def machine(device: str) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "torch": torch.__version__,
        "products": load().problem or "compiled for this processor",
        "python": platform.python_version(),
    }


def show(row: dict[str, Any]) -> None:
    ms, limit = row["ms"], row.get("limit_ms")
    print(f"\n{row['set']}, depth {row['depth']}, {row['replicas']} replica(s)")
    for name, value in ms.items():
        against = [f"{ms[peer] / value:.2f}× faster than {peer}" for peer in PEERS if peer in ms and peer != name]
        if limit is not None:
            against.append(f"{value / limit:.2f}× the limit of {limit:.1f} ms")
        print(f"  {name:12s} {value:8.2f} ms {row['peak_mib'][name]:6.0f} MiB   {', '.join(against)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--replicas", type=int, nargs="+", default=[1], help="models trained at once")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 5])
    parser.add_argument("--sets", nargs="+", default=sorted(SETS), choices=sorted(SETS))
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--no-scaling", action="store_true", help="leave out how cost grows")
    options = parser.parse_args()
    rounds, steps_a_round = (3, 2) if options.quick else (11, 4)
    if options.device == "cuda":
        steps_a_round *= 10
    results: dict[str, Any] = {"machine": machine(options.device), "comparison": [], "scaling": []}
    print(results["machine"])

    def write() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")

    for name in options.sets:
        for depth in options.depths:
            for replicas in options.replicas:
                row = compare(name, depth, options.device, replicas, rounds, steps_a_round)
                results["comparison"].append(row)
                show(row)
                write()
    if not options.no_scaling:
        print("\nA-GW, depth 3, N = 400, M = 100, ν = 8, S = 10, R = 1, but for:")
        results["scaling"] = scaling(options.device, 3, max(1, steps_a_round // 2))
        for row in results["scaling"]:
            print(f"  {row['quantity']:>5s} = {row['value']:<5d} {row['ms']:9.2f} ms   peak {row['peak_mib']:7.0f} MiB")
        exponents(results["scaling"])
        write()


def exponents(rows: list[dict[str, Any]]) -> None:
    """The power with which cost grows, from the two largest values."""
    for quantity in dict.fromkeys(row["quantity"] for row in rows):
        low, high = [row for row in rows if row["quantity"] == quantity][-2:]
        power = np.log(high["ms"] / low["ms"]) / np.log(high["value"] / low["value"])
        print(f"  {quantity}: cost grows with power {power:.2f}")


if __name__ == "__main__":
    main()
