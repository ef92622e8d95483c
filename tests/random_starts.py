"""A thousand random starts on the nine real sets: forward and backward without a NaN.

    python -m tests.random_starts [--starts 1000] [--device cuda]

Every start is a model of depth 5 with 100 inducing points and 10 samples, on 500 random rows of a set, with its own
seed: rows, inducing inputs, noise, and parameters moved at random by a tenth. Methods, dtypes and sets take turns.
"""

import argparse
import itertools
import sys
from collections import Counter

import torch

from deepwishart.data.uci import UCI
from deepwishart.objectives import elbo
from tests.conftest import read_uci
from tests.layers.instances import perturb
from tests.model_instances import METHODS, build
from tests.proofs import PAGE, machine, write_section


def start(method: str, name: str, dtype: torch.dtype, seed: int, device: str) -> bool:
    """Whether the ELBO and all its gradients are finite."""
    table = read_uci(name)
    assert table is not None
    g = torch.Generator().manual_seed(seed)
    data = table[torch.randperm(len(table), generator=g)[:500]].to(dtype)
    X, y = data[:, :-1], data[:, -1:]
    model = build(method, X, y, depth=5, num_inducing=100, generator=g)
    perturb(model, 0.1, seed)
    model.to(device)
    noise = torch.Generator(device).manual_seed(seed)
    bound = elbo(model, X.to(device), y.to(device), num_samples=10, generator=noise)
    grads = torch.autograd.grad(bound, list(model.parameters()), allow_unused=True)
    return bool(bound.isfinite()) and all(grad is None or bool(grad.isfinite().all()) for grad in grads)


def main() -> None:
    """Run the starts, print the count and add it to docs/proofs.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if read_uci("yacht") is None:
        sys.exit("There is no UCI data: put it into ../shared/uci or set DEEPWISHART_DATA.")
    kinds = itertools.product(METHODS, (torch.float64, torch.float32), UCI)
    turns = itertools.islice(itertools.cycle(list(kinds)), arguments.starts)
    done: Counter[str] = Counter()
    bad: list[str] = []
    for seed, (method, dtype, name) in enumerate(turns):
        label = f"{method}, {str(dtype).removeprefix('torch.')}"
        done[label] += 1
        if not start(method, name, dtype, seed, arguments.device):
            bad.append(f"{label}, {name}, seed {seed}")
            print(f"not finite: {bad[-1]}", flush=True)
    total = f"{sum(done.values())} starts, {len(bad)} not finite"
    print(total)
    command = f"python -m tests.random_starts --starts {arguments.starts} --device {arguments.device}"
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else machine()
    lines = [
        "## Random starts",
        "",
        f"`{command}`, {where}: depth 5, 100 inducing points, 10 samples, 500 rows of each of the nine sets; {total}.",
        "",
        "| method and dtype | starts | not finite |",
        "|---|---:|---:|",
        *(f"| {label} | {count} | {sum(b.startswith(label) for b in bad)} |" for label, count in done.items()),
    ]
    write_section(PAGE, "## Random starts", "\n".join(lines) + "\n")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
