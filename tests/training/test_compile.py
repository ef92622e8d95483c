"""A step that torch has compiled."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Distribution

from deepwishart import train
from deepwishart.likelihoods import HeteroscedasticGaussian, StudentT
from deepwishart.objectives import elbo_given_noise
from deepwishart.training import Check, TrainingConfig
from tests.distributions.instances import generator
from tests.training.instances import data, model_for, parameters

HAS_COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.fixture(autouse=True)
def validation_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is again after each test: torch.compile turns it off for the whole process."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_a_compiled_step_is_the_step_and_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    X, Y = data()
    runs, calls, compile_it = [], 0, torch.compile

    def counted(*args: Any, **options: Any) -> Any:
        function = compile_it(*args, **options)

        def call(*values: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*values)

        return call

    monkeypatch.setattr(torch, "compile", counted)
    plans = [(12, False, None), (12, True, None), (6, True, "same"), (12, True, "same"), (6, False, "other")]
    for steps, compiled, file in [*plans, (12, True, "other")]:
        model = model_for(X, Y, "a-gw", depth=2)
        config = TrainingConfig(
            num_steps=12, num_samples=3, batch_size=20, check_every=3, schedule="constant", compile=compiled
        )
        checkpoint = None if file is None else tmp_path / file

        def is_time(check: Check, last: int = steps) -> bool:
            return check.step >= last

        train(model, X, Y, config, checkpoint=checkpoint, resume=True, callbacks=[is_time])
        runs.append(parameters(model))
    plain, whole, _, resumed, _, compiled_later = runs
    torch.testing.assert_close([whole, compiled_later], [plain, plain], rtol=1e-9, atol=1e-9)
    assert torch.equal(resumed, whole)
    assert calls == 13 + 7 + 7 + 7  # the first one of each to compare it with what was compiled


@pytest.mark.filterwarnings("ignore")  # of torch's, about itself
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("gw", {}),
        ("a-gw", {}),
        ("ab-gw", {}),
        ("a-gw", {"initialisation": "whitened"}),
        ("a-gw", {"kernel": "matern-5/2"}),
        ("a-gw", {"likelihood": HeteroscedasticGaussian()}),
        ("a-gw", {"likelihood": StudentT()}),
        ("dgp", {}),
        ("diwp", {}),
    ],
)
@pytest.mark.parametrize("deal_rows", [False, True])
def test_what_torch_traces_has_the_same_gradients(method: str, options: dict[str, Any], deal_rows: bool) -> None:
    """The compiler's first half, without the code it writes. torch 2.11 loses gradients there, in silence, where a
    Function has changed one of its results in place.
    """
    X, Y = data(2, N=30)
    model = model_for(X, Y, method, **options)
    noise = model.draw_noise(3, 30, generator(0), deal_rows)
    torch.compiler.reset()
    traced = torch.compile(elbo_given_noise, backend="eager", dynamic=False, fullgraph=True)
    bounds = [function(model, X, Y, noise, deal_rows=deal_rows) for function in (elbo_given_noise, traced)]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [torch.autograd.grad(bound.sum(), parameters, materialize_grads=True) for bound in bounds]
    torch.testing.assert_close([bounds[1], *gradients[1]], [bounds[0], *gradients[0]], rtol=1e-9, atol=1e-9)


def test_each_model_of_a_process_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives up on a function, in silence, when it meets too many models with it."""
    X, Y = data()
    config = TrainingConfig(num_steps=2, num_samples=1, schedule="constant", compile=True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for num_inducing in (3, 4):
            train(model_for(X, Y, depth=1, num_inducing=num_inducing), X, Y, config)
    with pytest.raises(ValueError, match="constraint"):  # which torch.compile leaves unchecked
        torch.distributions.Normal(0.0, -1.0)


@pytest.mark.filterwarnings("ignore")  # of torch's, about itself
def test_where_torch_cannot_compile_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def failing(error: Exception) -> Any:
        def fail(*_: Any) -> None:
            raise error

        return lambda function, **_: fail

    X, Y = data()
    config = TrainingConfig(num_steps=2, compile=True)
    monkeypatch.setattr(torch, "compile", failing(InvalidCxxCompiler()))
    with pytest.raises(RuntimeError, match=r"could not compile the step \(.*\). Set compile=False"):
        train(model_for(X, Y), X, Y, config)
    monkeypatch.setattr(torch, "compile", failing(ZeroDivisionError("another matter")))
    with pytest.raises(ZeroDivisionError, match="another matter"):
        train(model_for(X, Y), X, Y, config)


@pytest.mark.parametrize("name", ["layers.0.posterior.V", "output.kernel.log_height", "the bound", "divergence"])
def test_a_compiler_that_computes_something_else_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has lost gradients without a word."""

    def wrong(function: Any, **_: Any) -> Any:
        def call(model: Any, *drawn: Any) -> Any:
            if name == "divergence":
                *others, kl_weight, weights, deal_rows = drawn
                return function(model, *others, 1.1 * kl_weight, weights, deal_rows)
            bound = function(model, *drawn)
            if name == "the bound":
                return 1.1 * bound
            parameter = model.get_parameter(name)
            return bound + 0.1 * bound.detach().abs() * (parameter - parameter.detach()).sum()

        return call

    X, Y = data()
    model = model_for(X, Y)
    before = parameters(model).clone()
    monkeypatch.setattr(torch, "compile", wrong)
    expected = "inducing_inputs" if name == "divergence" else name
    with pytest.raises(RuntimeError, match=rf"{expected} differs by .*%. Set compile=False"):
        train(model, X, Y, TrainingConfig(num_steps=20, annealing_steps=10, compile=True))
    assert torch.equal(parameters(model), before)
