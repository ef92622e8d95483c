"""The loop: it learns, replicas are independent, options do what they say."""

import copy
import sys
import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepwishart import deep_gaussian_process, train
from deepwishart.layers.wishart import WishartNoise
from deepwishart.models import DeepKernelProcess
from deepwishart.objectives import elbo, predictive_log_likelihood
from deepwishart.training import Check, History, TrainingConfig, tensorboard
from deepwishart.training.loop import Trainer
from deepwishart.training.memory import memory_is_kept
from deepwishart.training.parameters import FlatParameters
from tests.distributions.instances import generator
from tests.layers.test_layers import replica_of
from tests.training.instances import QUICK, data, model_for, parameters


@pytest.mark.parametrize("method", ["gw", "a-gw", "ab-gw", "dgp", "diwp"])
def test_the_bound_rises(method: str) -> None:
    X, Y = data()
    model = model_for(X, Y, method)
    config = TrainingConfig(num_steps=200, num_samples=4, annealing_steps=20)
    before = elbo(model, X, Y, num_samples=100, generator=generator(0))
    history = train(model, X, Y, config)
    assert elbo(model, X, Y, num_samples=100, generator=generator(0)) > before + 5
    assert history.elbo.shape == (200, 1)
    assert history.check_steps == [50, 100, 150, 200]
    assert history.stopped == "completed"
    assert not history.events


def test_a_gp_reaches_the_exact_marginal_likelihood() -> None:
    """Depth 1 with every point inducing: the optimum of the bound is scikit-learn's log-likelihood at its optimum."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    X, Y = data(N=25)
    model = deep_gaussian_process(X, Y, depth=1, num_inducing=25)
    history = train(model, X, Y, TrainingConfig(num_steps=2_000, learning_rate=0.05, annealing_steps=0))
    kernel = ConstantKernel(1.0) * RBF(np.ones(2)) + WhiteKernel(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a lengthscale at its bound: the second input does not matter
        exact = GaussianProcessRegressor(kernel).fit(X.numpy(), Y.numpy().ravel())
    assert 25 * history.recent_elbo()[0] == pytest.approx(exact.log_marginal_likelihood_value_, abs=0.05)


@pytest.mark.parametrize("method", ["a-gw", "dgp", "diwp"])
@pytest.mark.parametrize(("batch_size", "deal_rows"), [(None, False), (7, False), (7, True)])
def test_replicas_in_one_pass_are_replicas_alone(
    method: str, batch_size: int | None, deal_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps under the same noise and batches."""
    R, (X, Y) = 3, data(3)
    config = TrainingConfig(
        num_steps=10, num_samples=2, annealing_steps=3, batch_size=batch_size, deal_rows=deal_rows, check_every=5
    )
    together = model_for(X, Y, method)
    alone = [split(together, r) for r in range(R)]
    drawn: dict[str, list[Any]] = {"noise": [], "rand": []}
    draw, rand = DeepKernelProcess.draw_noise, torch.rand

    def record_noise(*arguments: Any) -> Any:
        drawn["noise"].append(draw(*arguments))
        return drawn["noise"][-1]

    def record_rand(*shape: int, **options: Any) -> Tensor:
        keys = rand(*shape, **options)
        if shape == (R, X.shape[-2]):
            drawn["rand"].append(keys)
        return keys

    with monkeypatch.context() as patched:
        patched.setattr(DeepKernelProcess, "draw_noise", record_noise)
        patched.setattr(torch, "rand", record_rand)
        train(together, X, Y, config)
    for r, model in enumerate(alone):
        noise = iter(drawn["noise"])
        keys = iter(drawn["rand"])
        with monkeypatch.context() as patched:
            patched.setattr(
                DeepKernelProcess, "draw_noise", lambda *_, n=noise, r=r: tuple(replica_of(x, r) for x in next(n))
            )
            patched.setattr(torch, "rand", lambda *_, k=keys, r=r, **__: next(k)[r])
            train(model, X[r], Y[r], config)
        torch.testing.assert_close(parameters(model), parameters(together)[r], rtol=1e-10, atol=1e-10)


def split(model: DeepKernelProcess, r: int) -> DeepKernelProcess:
    """One replica as a model of its own."""
    single = copy.deepcopy(model)
    for module in single.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(parameter.detach()[r].clone()))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.shape[:1] == model.batch_shape and "node" not in name:
                setattr(module, name, buffer[r].clone())
    return single


def test_one_seed_gives_one_run() -> None:
    X, Y = data()
    runs = []
    for seed in (0, 0, 1):
        model = model_for(X, Y)
        runs.append((train(model, X, Y, QUICK, seed=seed).elbo, parameters(model)))
    assert np.array_equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not np.array_equal(runs[0][0], runs[2][0])


def test_training_leaves_torchs_global_randomness_alone() -> None:
    X, Y = data()
    model, state = model_for(X, Y), torch.get_rng_state()
    train(model, X, Y, QUICK)
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_are_drawn_without_replacement_for_each_replica_its_own() -> None:
    X, Y = data(2, N=40)
    X[..., 0] = torch.arange(40.0)
    flat = FlatParameters(model := model_for(X, Y), model.batch_shape)
    step = Trainer(model, flat, X, Y, TrainingConfig(batch_size=15)).step
    counts = torch.zeros(2, 40)
    for _ in range(400):
        x, _, _ = step._draw_batch()
        rows = x[..., 0].long()
        assert all(len(set(rows[r].tolist())) == 15 for r in range(2))
        assert rows[0].tolist() != rows[1].tolist()
        counts += torch.stack([torch.bincount(rows[r], minlength=40) for r in range(2)])
    expected, spread = 150, (400 * 0.375 * 0.625) ** 0.5
    assert ((counts - expected).abs() < 5 * spread).all()


def test_gradient_clipping_limits_each_replica() -> None:
    """Adam hardly sees the length of a gradient, so look at what it is given."""
    X, Y = data(2)
    seen: list[Tensor] = []
    for clip in (None, 1e-3):
        model = model_for(X, Y)
        flat = FlatParameters(model, model.batch_shape)
        trainer = Trainer(model, flat, X, Y, TrainingConfig(num_steps=1, num_samples=2, clip_norm=clip))
        trainer.step.optimiser.step = lambda gradient, *_: seen.append(gradient.clone())  # type: ignore[method-assign]
        trainer.step()
    free, clipped = seen
    assert (free.norm(dim=-1) > 1e-3).all()
    torch.testing.assert_close(clipped, 1e-3 * free / free.norm(dim=-1, keepdim=True))


def test_parameters_that_need_no_gradient_stay() -> None:
    X, Y = data()
    model = model_for(X, Y)
    model.inducing_inputs.requires_grad_(False)
    before = model.inducing_inputs.clone()
    train(model, X, Y, QUICK)
    assert torch.equal(model.inducing_inputs, before)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        train(model, X, Y, QUICK)


def test_the_models_memory_is_its_own_again() -> None:
    X, Y = data(2)
    model = model_for(X, Y)
    train(model, X, Y, QUICK)
    assert all(p.is_contiguous() and p.untyped_storage().nbytes() == p.numel() * 8 for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_plateau_lowers_the_rate_of_a_replica_whose_bound_has_stopped_rising() -> None:
    X, Y = data(2)
    model = model_for(X, Y)
    config = TrainingConfig(
        num_steps=120,
        num_samples=2,
        annealing_steps=0,
        schedule="plateau",
        plateau_patience=2,
        check_every=5,
        tolerance=0.2,
    )
    history = train(model, X, Y, config)
    lowered = [event for event in history.events if event.kind == "learning-rate"]
    assert lowered
    first = lowered[0]
    check = history.check_steps.index(first.step)
    rates = history.learning_rate[:, first.replica]
    assert rates[check] == pytest.approx(1e-2)
    assert rates[check + 1] == pytest.approx(1e-3)


def test_one_bad_step_does_not_look_like_the_end_of_the_rise() -> None:
    X, Y = data(2)
    config = TrainingConfig(num_steps=10, num_samples=2, annealing_steps=0, check_every=5, schedule="plateau")
    flat = FlatParameters(model := model_for(X, Y), model.batch_shape)
    trainer = Trainer(model, flat, X, Y, config)
    trainer.step.trace[:5] = torch.tensor([[0.0, 1.0, 2.0, 3.0, -1e6], [5.0, 5.0, -1e6, 5.0, 5.0]]).mT
    trainer._check(5, ())
    assert trainer.plateau.best.tolist() == [1.0, 5.0]


def test_early_stopping_keeps_the_best() -> None:
    X, Y = data(2)
    new_X, new_Y = data(2, seed=7)
    model = model_for(X, Y)
    config = TrainingConfig(
        num_steps=4_000, num_samples=2, annealing_steps=5, check_every=5, early_stopping_patience=3, learning_rate=0.05
    )
    history = train(model, X, Y, config, held_out=(new_X, new_Y))
    assert history.stopped == "early-stopping"
    assert history.num_steps < 4_000
    scored = history.held_out[1:]  # what comes with the annealing does not count
    score = predictive_log_likelihood(model, new_X, new_Y, 50, generator(0)).mean(-1)
    for r in range(2):
        assert score[r].item() == pytest.approx(scored[:, r].max(), abs=1e-3)


def test_a_run_that_ends_while_annealing_keeps_what_it_learned() -> None:
    X, Y = data()
    model, plain = model_for(X, Y), model_for(X, Y)
    config = TrainingConfig(num_steps=10, num_samples=2, annealing_steps=50, check_every=5)
    train(plain, X, Y, config)
    train(model, X, Y, config, held_out=(X, Y))
    assert torch.equal(parameters(model), parameters(plain))


def test_callbacks_see_the_run_and_may_end_it() -> None:
    X, Y = data()
    seen: list[int] = []

    def callback(check: Check) -> bool:
        seen.append(check.step)
        assert check.history.num_steps == check.step
        return check.step >= 10

    model = model_for(X, Y)
    history = train(model, X, Y, QUICK, callbacks=[callback])
    assert seen == [5, 10]
    assert history.stopped == "callback"
    assert history.num_steps == 10


def test_two_runs_have_one_history() -> None:
    first, second = History.of(2), History.of(2)
    for history, steps in ((first, 3), (second, 2)):
        history.add_check(steps, torch.full((steps, 2), float(steps)), torch.full((2,), 0.1 * steps), None)
        history.add_event(steps, 1, "skipped", "a step")
    first.retired, second.retired, first.stopped, second.stopped = [1], [0, 1], "completed", "settled"
    both = first.followed_by(second)
    assert both.elbo[:, 0].tolist() == [3, 3, 3, 2, 2]
    assert both.learning_rate[:, 0] == pytest.approx([0.3, 0.2])
    assert both.check_steps == [3, 5]
    assert [event.step for event in both.events] == [3, 5]
    assert (both.retired, both.stopped, both.num_steps) == ([0, 1], "settled", 5)


def test_history_as_a_frame() -> None:
    X, Y = data(2)
    model = model_for(X, Y)
    history = train(model, X, Y, QUICK)
    frame = history.to_frame()
    assert list(frame.columns) == ["step", "replica", "elbo"]
    assert len(frame) == 40
    assert frame.query("step == 20 and replica == 1").elbo.item() == history.elbo[19, 1]


@pytest.mark.parametrize("where", ["X", "Y"])
def test_data_that_are_not_finite_are_refused(where: str) -> None:
    X, Y = data()
    model = model_for(X, Y)
    {"X": X, "Y": Y}[where][3, 0] = torch.inf
    with pytest.raises(ValueError, match="must be finite"):
        train(model, X, Y, QUICK)


def test_progress_is_quiet_where_there_is_no_terminal_and_speaks_when_asked(
    capfd: pytest.CaptureFixture[str],
) -> None:
    X, Y = data()
    train(model_for(X, Y), X, Y, QUICK)
    assert capfd.readouterr() == ("", "")
    train(model_for(X, Y), X, Y, QUICK, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "20/20" in err
    assert "ELBO" in err
    assert "steps/s" in err


def test_keeping_memory_is_undone() -> None:
    with memory_is_kept():
        torch.zeros(10**6)


def test_noise_has_points_last() -> None:
    X, Y = data()
    (first, _) = model_for(X, Y).draw_noise(3, 5)
    assert isinstance(first, WishartNoise)
    assert first.points.shape == (3, 2, 5)


def test_tensorboard_gets_every_series(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the writer: TensorBoard is an optional extra."""
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == "logs"

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, float(value), step))

        def flush(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    X, Y = data(2)
    history = train(model_for(X, Y), X, Y, QUICK, held_out=(X, Y), callbacks=[tensorboard("logs")])
    names = {f"{series}/replica-{r}" for series in ("elbo", "learning_rate", "held_out") for r in (0, 1)}
    assert {name for name, _, _ in written} == names
    assert ("held_out/replica-1", history.held_out[-1, 1], 20) in written
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"Install deepwishart\[tensorboard\]"):
        tensorboard("logs")


def test_a_weight_of_two_is_a_row_twice() -> None:
    """In the bound exactly, and in what a GP learns from all rows."""
    X, Y = data(N=20)
    twice = torch.ones(20, dtype=X.dtype)
    twice[:8] = 2
    repeated = torch.cat([X, X[:8]]), torch.cat([Y, Y[:8]])
    models = [deep_gaussian_process(X, Y, depth=1, num_inducing=10, generator=generator(0)) for _ in range(2)]
    torch.testing.assert_close(elbo(models[0], X, Y, weights=twice), elbo(models[1], *repeated))
    config = TrainingConfig(num_steps=50, annealing_steps=0)
    first = train(models[0], X, Y, config, weights=twice)
    second = train(models[1], *repeated, config)
    np.testing.assert_allclose(first.elbo, second.elbo, rtol=1e-8)


def test_weights_travel_with_their_rows_into_batches() -> None:
    X, Y = data(R=2, N=40)
    weights = X[..., 0].exp()
    model = model_for(X, Y)
    step = Trainer(
        model,
        FlatParameters(model, model.batch_shape),
        X,
        Y,
        TrainingConfig(num_steps=5, batch_size=7),
        weights=weights,
    ).step
    x, _, drawn = step._draw_batch()
    torch.testing.assert_close(drawn, x[..., 0].exp())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(7), "weights must have shape"),
        (-torch.ones(30), "at least zero"),
        (torch.zeros(30), "not all zero"),
        (torch.full((30,), torch.nan), "finite"),
    ],
)
def test_bad_weights_are_refused(weights: Tensor, message: str) -> None:
    X, Y = data()
    with pytest.raises(ValueError, match=message):
        train(model_for(X, Y), X, Y, QUICK, weights=weights.double())


def test_a_run_ends_when_it_has_settled() -> None:
    X, Y = data()
    config = TrainingConfig(
        num_steps=5_000,
        schedule="plateau",
        stop_when_settled=True,
        tolerance=0.05,
        plateau_patience=2,
        annealing_steps=0,
    )
    history = train(model_for(X, Y), X, Y, config)
    assert history.stopped == "settled"
    lowered = [event.step for event in history.events if event.kind == "learning-rate"]
    assert len(lowered) == 1
    assert lowered[0] + 2 * config.check_every <= history.num_steps < 5_000
