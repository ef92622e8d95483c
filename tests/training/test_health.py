"""A sick replica recovers or is retired alone; the others do not notice."""

import math
import warnings

import numpy as np
import pytest
import torch

from deepwishart import train
from deepwishart.likelihoods import Poisson
from deepwishart.training import Check, History, TrainingConfig, TrainingError
from deepwishart.training.health import diagnose
from deepwishart.training.loop import Trainer
from deepwishart.training.parameters import flattened
from tests.training.instances import data, model_for, parameters

CONFIG = TrainingConfig(num_steps=40, num_samples=2, annealing_steps=4, check_every=5)
R = 3


def run(poison: str, config: TrainingConfig = CONFIG) -> tuple[History, torch.Tensor]:
    """Three replicas, the second of which is made sick."""
    X, Y = data(R)
    model = model_for(X, Y)
    if poison == "data":
        X = X.clone()
        X[1, 4, 0] = torch.inf

    def corrupt(check: Check) -> None:
        with torch.no_grad():
            if poison == "parameter" and check.step == 10:
                check.model.get_parameter("layers.1.posterior.V")[1, 2, 3] = torch.nan
            if poison == "always" and 1 not in check.history.retired:
                check.model.get_parameter("layers.0.kernel.log_height")[1] = math.inf
            if poison == "huge" and check.step == 10:
                check.model.get_parameter("layers.0.kernel.log_height")[1] = 500.0

    with flattened(model, model.batch_shape) as flat, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(model, flat, X, Y, config)  # past the validation of the data
        history = trainer.run(callbacks=[corrupt])
    return history, parameters(model)


@pytest.fixture(scope="module")
def healthy() -> tuple[History, torch.Tensor]:
    return run("nothing")


@pytest.mark.parametrize("poison", ["data", "parameter", "always", "huge"])
def test_the_others_are_unchanged_bit_for_bit(poison: str, healthy: tuple[History, torch.Tensor]) -> None:
    history, found = run(poison)
    expected_history, expected = healthy
    for r in (0, 2):
        assert torch.equal(found[r], expected[r])
        assert np.array_equal(history.elbo[:, r], expected_history.elbo[:, r])
    assert {event.replica for event in history.events} == {1}
    assert found[1].isfinite().all()


def test_a_healthy_run_has_no_events(healthy: tuple[History, torch.Tensor]) -> None:
    assert not healthy[0].events
    assert not healthy[0].retired


@pytest.mark.parametrize("poison", ["parameter", "huge"])
def test_a_corrupted_parameter_is_restored_and_the_replica_goes_on(poison: str) -> None:
    history, _ = run(poison)
    kinds = [event.kind for event in history.events]
    assert kinds == ["skipped", "recovered"]
    skipped, recovered = history.events
    assert "5 steps were not finite" in skipped.message
    assert recovered.step == 15
    assert "the last good state was restored" in recovered.message
    assert np.isfinite(history.elbo[15:, 1]).all()
    assert not history.retired


def test_an_infinite_datum_retires_its_replica_at_once() -> None:
    history, _ = run("data")
    assert history.retired == [1]
    (event,) = (event for event in history.events if event.kind == "retired")
    assert event.step == 5
    assert "the data is not finite" in event.message
    assert "Remove NaN" in event.message


def test_a_replica_that_cannot_be_saved_is_retired_after_some_attempts() -> None:
    config = TrainingConfig(num_steps=40, num_samples=2, annealing_steps=4, check_every=5, max_recoveries=2)
    history, _ = run("always", config)
    kinds = [event.kind for event in history.events if event.kind != "skipped"]
    assert kinds == ["recovered", "recovered", "retired"]
    assert history.retired == [1]


def test_rare_troubles_are_forgotten() -> None:
    """One every 125 steps: more in all than a replica is allowed, but each long after the one before."""
    X, Y = data(2)
    model = model_for(X, Y)

    def corrupt(check: Check) -> None:
        if check.step % 125 == 0:
            with torch.no_grad():
                check.model.get_parameter("layers.1.posterior.V")[1, 2, 3] = torch.nan

    config = TrainingConfig(num_steps=500, num_samples=1, check_every=5, max_recoveries=1)
    history = train(model, X, Y, config, callbacks=[corrupt])
    assert [event.kind for event in history.events].count("recovered") == 3
    assert not history.retired


def test_a_replica_that_fails_most_of_its_steps_is_treated() -> None:
    X, Y = data()
    model = model_for(X, Y)
    with flattened(model, model.batch_shape) as flat:
        trainer = Trainer(model, flat, X, Y, CONFIG)
        trainer.step.skipped.fill_(4)  # of five, the last of which was taken
        trainer.health.check(5, 5, trainer.history)
    assert [event.kind for event in trainer.history.events] == ["skipped", "recovered"]


def test_jitter_is_never_lowered_and_where_it_cannot_be_raised_the_rate_is() -> None:
    X, Y = data()
    for jitter in (0.1, 1e-2):
        model = model_for(X, Y, jitter=jitter)
        with flattened(model, model.batch_shape) as flat:
            trainer = Trainer(model, flat, X, Y, CONFIG)
            with torch.no_grad():
                model.get_parameter("layers.0.kernel.log_height").fill_(400.0)
            trainer.step.failures.fill_(3)
            trainer.health.check(5, 5, trainer.history)
        assert model.get_buffer("layers.0.jitter").item() == pytest.approx(jitter)
        assert trainer.step.rate_scale.item() == 0.5


def test_plateau_leaves_the_retired_alone() -> None:
    X, Y = data(2)
    model = model_for(X, Y)
    X[1, 0, 0] = torch.inf
    config = TrainingConfig(
        num_steps=60, num_samples=2, annealing_steps=0, check_every=5, schedule="plateau", plateau_patience=1
    )
    with flattened(model, model.batch_shape) as flat, pytest.warns(UserWarning, match="retired"):
        history = Trainer(model, flat, X, Y, config).run()
    assert {event.replica for event in history.events if event.kind == "learning-rate"} <= {0}


def test_a_likelihood_that_overflows_is_named() -> None:
    X, _ = data()
    Y = torch.ones_like(X[:, :1])
    model = model_for(X, Y, likelihood=Poisson())
    with torch.no_grad():
        model.get_parameter("output.posterior.v").fill_(1e4)
        model.get_parameter("output.posterior.precision_mixing").mul_(1e2)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert diagnose(model, X, Y, shapes, 0).place == "the likelihood"


def test_the_learning_rate_is_lowered_for_the_sick_replica_alone() -> None:
    history, _ = run("parameter")
    check = history.check_steps.index(20)
    assert history.learning_rate[check, 1] == pytest.approx(0.5 * history.learning_rate[check, 0])
    assert history.learning_rate[check, 2] == history.learning_rate[check, 0]


def test_retirement_is_warned_of() -> None:
    X, Y = data(2)
    model = model_for(X, Y)
    X[1, 0, 0] = torch.nan
    with flattened(model, model.batch_shape) as flat, pytest.warns(UserWarning, match=r"1 of 2 .* Replica 1 at step 5"):
        Trainer(model, flat, X, Y, CONFIG).run()


def test_a_run_without_survivors_ends_with_an_error_that_says_what_to_do() -> None:
    X, Y = data()
    model = model_for(X, Y)
    before = parameters(model)
    X[0, 0] = torch.inf
    with (
        flattened(model, model.batch_shape) as flat,
        pytest.raises(
            TrainingError, match=r"step 5: of replica 0, the data is not finite.*Remove.*last good"
        ) as raised,
    ):
        Trainer(model, flat, X, Y, CONFIG).run()
    assert raised.value.history.retired == [0]
    assert raised.value.history.stopped == "retired"
    assert raised.value.history.num_steps == 5
    assert torch.equal(parameters(model), before)


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("layers.0.posterior.loc", math.nan, "parameter layers.0.posterior.loc"),
        ("layers.0.kernel.log_height", 400.0, "hidden layer 1"),
        ("layers.1.kernel.log_lengthscale", -400.0, "hidden layer 2"),
        ("output.kernel.log_height", 400.0, "the output layer"),
    ],
)
def test_the_diagnosis_names_the_place(name: str, value: float, place: str) -> None:
    X, Y = data(2)
    model = model_for(X, Y)
    with torch.no_grad():
        model.get_parameter(name)[1] = value
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = diagnose(model, X, Y, shapes, 1)
    assert found.place == place
    assert (found.jitter is None) == place.startswith("parameter")
    assert diagnose(model, X, Y, shapes, 0).place == "the gradient"


def test_a_layer_that_fails_gets_more_jitter() -> None:
    X, Y = data(2)
    model = model_for(X, Y, jitter=0.0)
    with torch.no_grad():
        model.get_parameter("inducing_inputs")[1, 1] = model.get_parameter("inducing_inputs")[1, 0]
    history = train(model, X, Y, TrainingConfig(num_steps=20, num_samples=2, check_every=5))
    recovered = [event for event in history.events if event.kind == "recovered"]
    assert any("layers.0.jitter was raised" in event.message for event in recovered)
    assert model.get_buffer("layers.0.jitter")[1] > 0
    assert model.get_buffer("layers.0.jitter")[0] == 0
    assert np.isfinite(history.elbo[-1]).all()
