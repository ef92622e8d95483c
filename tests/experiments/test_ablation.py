"""Variants of the preset differ from it in one thing, and the table of the results page is theirs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks import ablation
from benchmarks.ablation import VARIANTS, fill, table
from deepwishart.experiments.recipes import PRESETS
from deepwishart.experiments.runs import Replicas, load_replicas, make_model
from deepwishart.layers import WishartLayer
from deepwishart.models import DeepKernelProcess
from deepwishart.objectives import elbo
from deepwishart.shallow import ShallowGP
from deepwishart.training.loop import Trainer
from deepwishart.training.parameters import flattened
from tests.distributions.instances import generator
from tests.experiments.test_runs import make_data
from tests.results_page import PAGE

RECIPE = PRESETS["paper"].changed(["num_steps=20", "num_samples=2", "num_inducing=7"])


@pytest.fixture
def data(tmp_path: Path) -> Replicas:
    return load_replicas("yacht", [0, 1], make_data(tmp_path / "uci"))


@contextmanager
def started(data: Replicas, name: str) -> Iterator[tuple[DeepKernelProcess, Trainer]]:
    gp = ShallowGP(data.X.new_ones(2, data.X.shape[-1]), data.X.new_ones(2), data.X.new_full((2,), 0.1))
    model = make_model(data, 2, "a-gw", RECIPE, gp)
    VARIANTS[name].change(model, data, gp)
    with flattened(model, model.batch_shape) as flat:
        trainer = Trainer(model, flat, data.X, data.Y, RECIPE.training(data.X.shape[-2]))
        VARIANTS[name].adjust(trainer)
        yield model, trainer


def moved(data: Replicas, name: str) -> dict[str, torch.Tensor]:
    """How far each parameter goes in one step."""
    with started(data, name) as (_, trainer):
        before = trainer.flat.values.clone()
        trainer.step()
        columns = trainer.flat.split(trainer.flat.values - before)
        return dict(zip(trainer.flat.shapes, columns, strict=True))


def test_random_rows_have_their_own_targets(data: Replicas) -> None:
    with started(data, "preset") as (preset, _), started(data, "random-rows") as (model, _):
        assert not torch.equal(model.inducing_inputs, preset.inducing_inputs)
        for replica in range(2):
            for z, v in zip(model.inducing_inputs[replica], model.output.posterior.v[replica], strict=True):
                assert v in data.Y[replica][(data.X[replica] == z).all(-1)]
            assert len(model.inducing_inputs[replica].unique(dim=0)) == 7
        layer = model.layers[0]
        assert isinstance(layer, WishartLayer)
        unit = layer.posterior.get_buffer("V_unit")
        K = layer.kernel.ii(model.input_gram(data.X[:, :0]))
        torch.testing.assert_close(layer.df * unit @ unit.mT, K, rtol=0, atol=1e-7)  # it began at these rows


@pytest.mark.parametrize(("name", "factor"), [("slow-model", 0.3), ("fast-model", 3.0)])
def test_kernels_noise_and_inducing_inputs_have_a_rate_of_their_own(data: Replicas, name: str, factor: float) -> None:
    preset, found = moved(data, "preset"), moved(data, name)
    theirs = {key for key in preset if "posterior" not in key}
    assert theirs == {
        "inducing_inputs",
        "log_input_lengthscale",
        "layers.0.kernel.log_height",
        "output.kernel.log_lengthscale",
        "output.kernel.log_height",
        "likelihood.log_noise",
    }
    for key, step in preset.items():
        torch.testing.assert_close(found[key], (factor if key in theirs else 1.0) * step, rtol=1e-9, atol=1e-12)


def test_a_triangle_stays_a_triangle(data: Replicas) -> None:
    with started(data, "upper") as (model, trainer):
        for _ in range(3):
            trainer.step()
        rows = dict(model.named_parameters())["layers.0.posterior.rows"]
        assert (rows.tril(-1) == 0).all()
        assert (rows.triu(1) != 0).any()


def test_the_scale_of_v_is_one_more_parameter(data: Replicas) -> None:
    with started(data, "preset") as (preset, _), started(data, "v-scale") as (model, trainer):
        bounds = [elbo(m, data.X, data.Y, data.X.shape[1], 2, generator=generator(3)) for m in (preset, model)]
        torch.testing.assert_close(*bounds)
        trainer.step()
        (factor,) = (p for name, p in model.named_parameters() if name.endswith("log_factor"))
        assert factor.shape == (2, 1, 1)
        assert (factor != 0).all()


def test_the_rate_falls_late(data: Replicas) -> None:
    with started(data, "late") as (_, trainer):
        torch.testing.assert_close(trainer.step.rates, data.X.new_tensor([0.01] * 18 + [0.001] * 2))


def test_divergences_can_be_sampled(data: Replicas) -> None:
    """The exact divergence of the first layer is the same for all samples, a sampled one on average."""
    with started(data, "preset") as (preset, _), started(data, "sampled") as (model, _):
        noise = model.draw_noise(2_000, 1, generator(0))
        with torch.no_grad():
            (exact,), (sampled,) = preset(data.X[:, :1], noise).kls, model(data.X[:, :1], noise).kls
    assert exact.shape == (2,)
    assert sampled.shape == (2_000, 2)
    error = sampled.std(0) / 2_000**0.5
    assert (error > 0).all()
    assert ((sampled.mean(0) - exact).abs() < 5 * error).all()


def test_gains_over_the_preset_are_paired() -> None:
    rows = [
        ("preset", 0, 1.0, -2.0),
        ("preset", 1, 3.0, -1.0),
        ("late", 0, 1.5, -2.25),
        ("late", 1, 3.7, -1.25),
        ("upper", 1, 3.0, -1.0),
    ]
    frame = pd.DataFrame(rows, columns=["variant", "split", "elbo", "log_likelihood"]).assign(dataset="yacht", depth=2)
    lines = table(frame).splitlines()
    assert lines[0] == "| | yacht, 2 |"
    assert lines[2:] == [
        "| preset `paper` | 2.000, −1.500 |",
        "| A′ upper triangular | 3.000, −1.000 (0.00, 0.00) |",
        "| the rate falls after nine tenths of the steps | 2.600, −1.750 (+0.60 ± 0.10, −0.25 ± 0.00) |",
    ]


def test_only_splits_that_a_file_lacks_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(dataset: str, depth: int, splits: tuple[int, ...], steps: int, *_: object) -> dict[str, torch.Tensor]:
        asked.append((dataset, depth, splits, steps))
        return {"elbo": torch.tensor(splits) + 0.1}

    monkeypatch.setattr(ablation, "run", run)
    out = tmp_path / "rows.csv"
    for dataset, depth, splits, steps in [
        ("yacht", 2, (0, 1), 9),
        ("yacht", 2, (0, 1), 9),
        ("yacht", 2, (0, 1, 2), 9),
        ("yacht", 5, (0,), 9),
        ("yacht", 2, (0,), 8),
    ]:
        fill(out, "late", dataset, depth, splits, steps)
    assert asked == [("yacht", 2, (0, 1), 9), ("yacht", 2, (2,), 9), ("yacht", 5, (0,), 9), ("yacht", 2, (0,), 8)]
    rows = pd.read_csv(out)
    assert list(rows.columns) == ["variant", "dataset", "depth", "steps", "split", "elbo"]
    assert rows["split"].tolist() == [0, 1, 2, 0, 0]
    assert rows["elbo"].tolist() == pytest.approx([0.1, 1.1, 2.1, 0.1, 0.1])


def test_the_results_page_has_their_table() -> None:
    """Else: what benchmarks/ablation.py --out docs/results/variants.csv prints."""
    results = pd.read_csv(PAGE.parent / "results" / "variants.csv")
    assert table(results) in PAGE.read_text(encoding="utf-8")
