"""Training on a GPU: one graph, no synchronisation, the same results, and sick replicas left to themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepwishart import train
from deepwishart.models import DeepKernelProcess
from deepwishart.training import Check, TrainingConfig
from deepwishart.training.loop import Trainer
from deepwishart.training.parameters import FlatParameters, flattened
from tests.training import instances
from tests.training.instances import data, parameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def model_for(X: Tensor, Y: Tensor, method: str = "a-gw", **options: Any) -> DeepKernelProcess:
    """Made on a CPU, so that it is the same on every device."""
    return instances.model_for(X.cpu(), Y.cpu(), method, **options).to(X.device)


CONFIG = TrainingConfig(num_steps=40, num_samples=3, annealing_steps=5, check_every=10)


@pytest.mark.parametrize(("batch_size", "deal_rows"), [(None, False), (None, True), (20, False), (20, True)])
@pytest.mark.parametrize("method", ["gw", "a-gw", "ab-gw", "dgp", "diwp"])
def test_a_graph_computes_what_eager_steps_compute(method: str, batch_size: int | None, deal_rows: bool) -> None:
    """Same noise, same steps: the capture changes nothing but rounding."""
    X, Y = (tensor.cuda() for tensor in data(2))
    config = TrainingConfig(num_steps=12, num_samples=3, annealing_steps=5, batch_size=batch_size, deal_rows=deal_rows)
    found = []
    for eager in (True, False):
        model = model_for(X, Y, method)
        with flattened(model, model.batch_shape) as flat:
            step = Trainer(model, flat, X, Y, config).step
            for _ in range(12):
                step._take() if eager else step()
            assert (step._graph is None) == eager
        found.append(parameters(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("method", "batch_size"), [("a-gw", None), ("dgp", 20)])
def test_a_compiled_step_is_captured_and_computes_the_same(method: str, batch_size: int | None) -> None:
    X, Y = (tensor.cuda() for tensor in data(2))
    found = []
    for compiled in (False, True):
        model = model_for(X, Y, method)
        config = TrainingConfig(num_steps=12, num_samples=3, annealing_steps=5, batch_size=batch_size, compile=compiled)
        with flattened(model, model.batch_shape) as flat:
            step = Trainer(model, flat, X, Y, config).step
            for _ in range(12):
                step()
            assert step._graph is not None
        found.append(parameters(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("initialisation", ["prior", "whitened"])
@pytest.mark.parametrize("method", ["gw", "a-gw", "ab-gw"])
def test_a_step_is_one_graph_and_never_waits(method: str, initialisation: str) -> None:
    X, Y = (tensor.cuda() for tensor in data(2))
    model = model_for(X, Y, method, initialisation=initialisation)
    step = Trainer(model, FlatParameters(model, model.batch_shape), X, Y, CONFIG).step
    for _ in range(4):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            step()
        step._take()  # nor does one that is not captured
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.counter.item() == 15
    assert step.failures.tolist() == [0, 0]


def test_a_gpu_learns_what_a_cpu_learns() -> None:
    X, Y = data(2)
    bounds = []
    for device in ("cpu", "cuda"):
        x, y = X.to(device), Y.to(device)
        model = model_for(x, y)
        history = train(model, x, y, TrainingConfig(num_steps=300, num_samples=10, annealing_steps=20))
        bounds.append(history.recent_elbo(50))
        assert all(parameter.device.type == device for parameter in model.parameters())
    assert abs(bounds[0] - bounds[1]).max() < 0.2


def test_a_sick_replica_harms_no_other() -> None:
    X, Y = (tensor.cuda() for tensor in data(3))

    def corrupt(check: Check) -> None:
        if check.step == 20:
            with torch.no_grad():
                check.model.get_parameter("layers.1.posterior.V")[1, 2, 3] = torch.nan

    found = []
    for callbacks in ([], [corrupt]):
        model = model_for(X, Y)
        history = train(model, X, Y, CONFIG, callbacks=callbacks)
        found.append(parameters(model))
    assert [event.kind for event in history.events] == ["skipped", "recovered"]
    for r in (0, 2):
        assert torch.equal(found[0][r], found[1][r])
    assert found[1][1].isfinite().all()


def test_resuming_on_a_gpu(tmp_path: Path) -> None:
    X, Y = (tensor.cuda() for tensor in data(2))

    def interrupt(check: Check) -> None:
        if check.step == 30:
            raise KeyboardInterrupt

    whole = model_for(X, Y)
    train(whole, X, Y, CONFIG)
    path = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(model_for(X, Y), X, Y, CONFIG, checkpoint=path, callbacks=[interrupt])
    model = model_for(X, Y)
    history = train(model, X, Y, CONFIG, checkpoint=path, resume=True)
    assert history.num_steps == 40
    torch.testing.assert_close(parameters(model), parameters(whole), rtol=1e-6, atol=1e-6)
