"""A step that torch has compiled."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deepwishart import train
from deepwishart.training import Check, TrainingConfig
from tests.training.instances import data, model_for, parameters

HAS_COMPILER = shutil.which("g++") or shutil.which("clang++")


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
    for steps, compiled, file in ((12, False, None), (12, True, None), (6, True, "run"), (12, True, "run")):
        model = model_for(X, Y, "a-gw", depth=2)
        config = TrainingConfig(
            num_steps=12, num_samples=3, batch_size=20, check_every=3, schedule="constant", compile=compiled
        )
        checkpoint = None if file is None else tmp_path / file

        def is_time(check: Check, last: int = steps) -> bool:
            return check.step >= last

        train(model, X, Y, config, checkpoint=checkpoint, resume=True, callbacks=[is_time])
        runs.append(parameters(model))
    plain, whole, _, resumed = runs
    torch.testing.assert_close(whole, plain, rtol=1e-9, atol=1e-9)
    assert torch.equal(resumed, whole)
    assert calls == 12 + 6 + 6


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
