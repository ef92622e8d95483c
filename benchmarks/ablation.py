"""The choices that the paper leaves open, changed one at a time from the preset `paper`: A-GW on yacht and boston.

    python benchmarks/ablation.py --out FILE.csv [--sets yacht,boston] [--depths 2,5] [--splits 0-4] [--steps 2500]
        [--variants random-rows,late]

`VARIANTS` says what each of them is. A row for each split is appended to the file, and splits that are there are not
run again. Prints the table of docs/results.md: ELBO per datapoint and test log-likelihood, and in brackets what both
gain over the preset, paired over splits, ± standard errors.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from deepwishart.experiments.recipes import PRESETS
from deepwishart.experiments.runs import Replicas, evaluate, fit_gps, load_replicas, make_model
from deepwishart.experiments.tables import estimate, show_estimate
from deepwishart.layers.base import KLEstimator
from deepwishart.models import DeepKernelProcess
from deepwishart.shallow import ShallowGP
from deepwishart.starting import match_noise, start_from
from deepwishart.training.adam import Adam
from deepwishart.training.loop import Trainer
from deepwishart.training.parameters import flattened

METRICS = ("elbo", "log_likelihood")
METHOD = "a-gw"


@dataclass(frozen=True)
class Variant:
    """A departure from the preset.

    Attributes:
        about: For the table.
        settings: Changes of the preset by name.
        change: What is done to a model before it is trained.
        adjust: What is done to its training.
    """

    about: str
    settings: tuple[str, ...] = ()
    change: Callable[[DeepKernelProcess, Replicas, ShallowGP], None] = lambda model, data, gp: None
    adjust: Callable[[Trainer], None] = lambda trainer: None


# Models


def take_random_rows(model: DeepKernelProcess, data: Replicas, gp: ShallowGP) -> None:
    """Inducing inputs are rows drawn at random, each as likely as the others; the model begins as the GP once more."""
    generator = torch.Generator().manual_seed(1)
    M, N = model.inducing_inputs.shape[-2], data.X.shape[-2]
    rows = torch.stack([torch.randperm(N, generator=generator)[:M] for _ in data.X])[..., None]
    with torch.no_grad():
        model.inducing_inputs.copy_(data.X.gather(1, rows.expand(-1, -1, data.X.shape[-1])))
        model.output.posterior.v.copy_(data.Y.gather(1, rows))
    start_from(model, gp, N)
    match_noise(model, data.X, data.Y, generator=generator)


def estimate_divergence(kl: KLEstimator, model: DeepKernelProcess, data: Replicas, gp: ShallowGP) -> None:
    for layer in model.layers:
        layer.kl = kl  # type: ignore[assignment]


class Rescaled(nn.Module):
    """A parameter times a number that is learned, a number for each replica."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.log_factor = nn.Parameter(like.new_zeros(*like.shape[:-2], 1, 1))

    def forward(self, tensor: Tensor) -> Tensor:
        return self.log_factor.exp() * tensor

    def right_inverse(self, tensor: Tensor) -> Tensor:
        return tensor


def rescale_v(model: DeepKernelProcess, data: Replicas, gp: ShallowGP) -> None:
    for layer in model.layers:
        posterior: nn.Module = layer.posterior  # type: ignore[assignment]
        parametrize.register_parametrization(posterior, "V", Rescaled(posterior.V))  # type: ignore[arg-type]


# Training


def fall_late(trainer: Trainer) -> None:
    """The learning rate falls after nine tenths of the steps instead of half."""
    steps = trainer.config.num_steps
    factors = trainer.step.rates.new_tensor([1.0 if step < 0.9 * steps else 0.1 for step in range(steps)])
    trainer.step.rates = trainer.config.learning_rate * factors


class RatedAdam(Adam):
    """Adam whose steps are multiplied by a factor for each parameter."""

    def __init__(self, values: Tensor, factors: Tensor) -> None:
        super().__init__(values)
        self.factors = factors

    def step(self, gradient: Tensor, learning_rate: Tensor, moves: Tensor) -> None:
        before = self.values.clone()
        super().step(gradient, learning_rate, moves)
        self.values.copy_(torch.lerp(before, self.values, self.factors))


def set_rates(factor_of: Callable[[str, Tensor], Tensor], trainer: Trainer) -> None:
    flat = trainer.flat
    factors = [factor_of(name, p).expand_as(p) for name, p in zip(flat.shapes, flat.parameters, strict=True)]
    trainer.step.optimiser = RatedAdam(flat.values, flat.join(factors))


def rate_of_model(factor: float, name: str, parameter: Tensor) -> Tensor:
    """Of kernels, noise and inducing inputs; all else is the posterior's."""
    return parameter.new_tensor(1.0 if ".posterior." in name else factor)


def rate_of_triangle(name: str, parameter: Tensor) -> Tensor:
    """A′ = LU starts at the identity; L stays there."""
    factor = torch.ones_like(parameter)
    return factor.triu() if name.endswith(".posterior.rows") else factor


VARIANTS = {
    "preset": Variant("preset `paper`"),
    "random-rows": Variant("random rows for inducing inputs", change=take_random_rows),
    "inducing": Variant("200 inducing points", ("num_inducing=200",)),
    "v-scale": Variant("a scale of V Vᵀ that is learned apart", change=rescale_v),
    "upper": Variant("A′ upper triangular", adjust=partial(set_rates, rate_of_triangle)),
    "slow-model": Variant(
        "rates of kernels, noise and inducing inputs × 0.3", adjust=partial(set_rates, partial(rate_of_model, 0.3))
    ),
    "fast-model": Variant(
        "rates of kernels, noise and inducing inputs × 3", adjust=partial(set_rates, partial(rate_of_model, 3.0))
    ),
    "late": Variant("the rate falls after nine tenths of the steps", adjust=fall_late),
    "sampled": Variant("sampled divergences", change=partial(estimate_divergence, "sampled")),
}


@cache
def gps(dataset: str, splits: tuple[int, ...]) -> ShallowGP:
    return fit_gps(dataset, splits, PRESETS["paper"])


def run(dataset: str, depth: int, splits: tuple[int, ...], steps: int, variant: Variant) -> dict[str, Tensor]:
    recipe = PRESETS["paper"].changed([f"num_steps={steps}", *variant.settings])
    data, gp = load_replicas(dataset, splits), gps(dataset, splits)
    model = make_model(data, depth, METHOD, recipe, gp)
    variant.change(model, data, gp)
    with flattened(model, model.batch_shape) as flat:
        trainer = Trainer(model, flat, data.X, data.Y, recipe.training(data.X.shape[-2]), recipe.seed)
        variant.adjust(trainer)
        trainer.run()
    return evaluate(model, data, recipe.num_test_samples, recipe.seed)


# Tables


def table(results: pd.DataFrame) -> str:
    """In Markdown, a row for each variant."""
    cells = list(results.groupby(["dataset", "depth"], sort=False))
    names = " | ".join(f"{dataset}, {depth}" for (dataset, depth), _ in cells)
    lines = [f"| | {names} |", "|---" * (len(cells) + 1) + "|"]
    for name, variant in VARIANTS.items():
        if name in set(results["variant"]):
            lines.append(f"| {variant.about} | {' | '.join(show(cell, name) for _, cell in cells)} |")
    return "\n".join(lines)


def show(cell: pd.DataFrame, name: str) -> str:
    mine = cell[cell["variant"] == name].set_index("split")
    preset = cell[cell["variant"] == "preset"].set_index("split")
    if mine.empty:
        return "–"
    means = ", ".join(f"{mine[metric].mean():.3f}" for metric in METRICS).replace("-", "−")
    if name == "preset":
        return means
    gains = [estimate((mine[metric] - preset[metric]).dropna()) for metric in METRICS]
    return f"{means} ({', '.join(show_estimate(gain, '+') for gain in gains)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", default="yacht,boston")
    parser.add_argument("--depths", default="2,5")
    parser.add_argument("--splits", default="0-4")
    parser.add_argument("--steps", type=int, default=2_500)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    arguments = parser.parse_args()
    first, _, last = arguments.splits.partition("-")
    splits = tuple(range(int(first), int(last or first) + 1))
    names = arguments.variants.split(",")
    if unknown := set(names) - set(VARIANTS):
        parser.error(f"--variants takes {', '.join(VARIANTS)}, got {', '.join(sorted(unknown))}")
    for name in names:
        for dataset in arguments.sets.split(","):
            for depth in map(int, arguments.depths.split(",")):
                fill(arguments.out, name, dataset, depth, splits, arguments.steps)
    results = pd.read_csv(arguments.out)
    print(table(results[results["steps"] == arguments.steps]))


def fill(out: Path, name: str, dataset: str, depth: int, splits: tuple[int, ...], steps: int) -> None:
    cell = {"variant": name, "dataset": dataset, "depth": depth, "steps": steps}
    if out.exists():
        known = pd.read_csv(out)
        there = known[(known[list(cell)] == pd.Series(cell)).all(axis=1)]
        splits = tuple(split for split in splits if split not in set(there["split"]))
    if not splits:
        return
    metrics = run(dataset, depth, splits, steps, VARIANTS[name])
    rows = pd.DataFrame({**cell, "split": splits, **{metric: values.tolist() for metric, values in metrics.items()}})
    rows.to_csv(out, mode="a", header=not out.exists(), index=False)


if __name__ == "__main__":
    main()
