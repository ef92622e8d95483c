"""Checkpoints: a run that was broken off, at whatever moment, ends as if it had not been."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from deepwishart import train
from deepwishart.training import Check, CheckpointError, TrainingConfig
from deepwishart.training.checkpoint import read_checkpoint, write_checkpoint
from tests.proofs import Proofs
from tests.training.instances import QUICK, data, model_for, parameters

RUN = """
import sys, torch
from deepwishart import train
from deepwishart.training import TrainingConfig
from tests.training.instances import data, model_for, parameters

X, Y = data(2)
model = model_for(X, Y, "ab-gw")
config = TrainingConfig(num_steps=400, num_samples=2, annealing_steps=50, check_every=5, checkpoint_seconds=0.0,
                        batch_size=20)
print("ready", flush=True)
history = train(model, X, Y, config, checkpoint=sys.argv[1], resume=True)
torch.save([parameters(model), torch.from_numpy(history.elbo)], sys.argv[2])
"""


def start(checkpoint: Path, result: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RUN, str(checkpoint), str(result)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "ready\n"
    return process


def test_killed_at_random_moments_and_resumed_it_ends_as_if_it_had_not_been(tmp_path: Path, proofs: Proofs) -> None:
    """kill −9, again and again: three times in a usual run, fifty in a proof."""
    whole, broken = tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    begun = time.monotonic()
    assert start(whole, tmp_path / "whole.pt").wait() == 0
    duration = time.monotonic() - begun
    chance, kills = random.Random(0), 0
    while kills < proofs.size(3, 50):
        process = start(broken, tmp_path / "broken.pt")
        time.sleep(chance.uniform(0.0, duration / 8))
        if process.poll() is not None:  # it has reached its end: start over, the checkpoint with it
            broken.unlink()
            continue
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert start(broken, tmp_path / "broken.pt").wait() == 0
    for ours, theirs in zip(torch.load(tmp_path / "broken.pt"), torch.load(tmp_path / "whole.pt"), strict=True):
        assert torch.equal(ours, theirs)
    proofs.report(
        "Runs killed with SIGKILL and resumed: bit-identical to an uninterrupted one", ["kills"], [[str(kills)]]
    )


@pytest.mark.parametrize("method", ["a-gw", "dgp", "diwp"])
@pytest.mark.parametrize("stop_at", [5, 15])
def test_an_interrupt_keeps_the_last_check(method: str, stop_at: int, tmp_path: Path) -> None:
    X, Y = data(2)
    whole = model_for(X, Y, method)
    expected = train(whole, X, Y, QUICK)

    def interrupt(check: Check) -> None:
        if check.step == stop_at + 5:
            raise KeyboardInterrupt

    path, model = tmp_path / "run.safetensors", model_for(X, Y, method)
    with pytest.raises(KeyboardInterrupt):
        train(model, X, Y, QUICK, checkpoint=path, callbacks=[interrupt])
    tensors, record = read_checkpoint(path)
    assert record["num_steps"] == stop_at
    assert torch.equal(tensors["values"], parameters(model))
    fresh = model_for(X, Y, method)
    history = train(fresh, X, Y, QUICK, checkpoint=path, resume=True)
    assert torch.equal(parameters(fresh), parameters(whole))
    assert np.array_equal(history.elbo, expected.elbo)
    assert history.check_steps == expected.check_steps


def test_schedules_and_early_stopping_go_on_where_they_were(tmp_path: Path) -> None:
    X, Y = data(2)
    held_out = data(2, seed=5)
    config = TrainingConfig(
        num_steps=60, num_samples=2, annealing_steps=0, check_every=5, schedule="plateau", plateau_patience=2,
        early_stopping_patience=50,
    )  # fmt: skip
    whole = model_for(X, Y)
    expected = train(whole, X, Y, config, held_out=held_out)

    def interrupt(check: Check) -> None:
        if check.step == 30:
            raise KeyboardInterrupt

    path = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(model_for(X, Y), X, Y, config, held_out=held_out, checkpoint=path, callbacks=[interrupt])
    model = model_for(X, Y)
    history = train(model, X, Y, config, held_out=held_out, checkpoint=path, resume=True)
    assert torch.equal(parameters(model), parameters(whole))
    assert np.array_equal(history.held_out, expected.held_out)
    assert history.events == expected.events


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    X, Y = data()
    path, model = tmp_path / "run.safetensors", model_for(X, Y)
    train(model, X, Y, QUICK, checkpoint=path)
    fresh = model_for(X, Y)
    history = train(fresh, X, Y, QUICK, checkpoint=path, resume=True)
    assert history.num_steps == 20
    assert torch.equal(parameters(fresh), parameters(model))


def test_an_old_checkpoint_is_never_overwritten_unasked(tmp_path: Path) -> None:
    X, Y = data()
    path = tmp_path / "run.safetensors"
    train(model_for(X, Y), X, Y, QUICK, checkpoint=path)
    with pytest.raises(CheckpointError, match="Pass resume=True"):
        train(model_for(X, Y), X, Y, QUICK, checkpoint=path)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    X, Y = data()
    path = tmp_path / "run.safetensors"
    train(model_for(X, Y), X, Y, QUICK, checkpoint=path)
    others = {
        "configuration": (model_for(X, Y), X, TrainingConfig(num_steps=30), 0),
        "model": (model_for(X, Y, depth=2), X, QUICK, 0),
        "data set": (model_for(X, Y), X + 1, QUICK, 0),
        "seed": (model_for(X, Y), X, QUICK, 1),
    }
    for what, (model, inputs, config, seed) in others.items():
        with pytest.raises(CheckpointError, match=f"another {what}"):
            train(model, inputs, Y, config, seed=seed, checkpoint=path, resume=True)
    for options in ({"kernel": "matern-5/2"}, {"kl": "sampled"}, {"initialisation": "whitened"}):
        with pytest.raises(CheckpointError, match="another model"):
            train(model_for(X, Y, **options), X, Y, QUICK, checkpoint=path, resume=True)
    frozen = model_for(X, Y)
    frozen.inducing_inputs.requires_grad_(False)
    with pytest.raises(CheckpointError, match="another model"):
        train(frozen, X, Y, QUICK, checkpoint=path, resume=True)


def test_a_run_that_a_callback_ended_goes_on(tmp_path: Path) -> None:
    X, Y = data()
    whole, path = model_for(X, Y), tmp_path / "run.safetensors"
    train(whole, X, Y, QUICK)
    first = train(model_for(X, Y), X, Y, QUICK, checkpoint=path, callbacks=[lambda check: check.step >= 10])
    assert first.stopped == "callback"
    model = model_for(X, Y)
    later = dataclasses.replace(QUICK, checkpoint_seconds=9.0)  # which does not change the result
    assert train(model, X, Y, later, checkpoint=path, resume=True).stopped == "completed"
    assert torch.equal(parameters(model), parameters(whole))


def test_units_of_parameters_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """A start may come out different in the last digit on another day; the run that goes on is the old one."""
    X, Y = data(2)
    checkpoint = tmp_path / "run.safetensors"
    whole, broken, other = (model_for(X, Y, "a-gw") for _ in range(3))
    train(whole, X, Y, QUICK)
    train(broken, X, Y, QUICK, checkpoint=checkpoint, callbacks=[lambda check: check.step >= 10])
    other.get_buffer("layers.0.posterior.V_unit").mul_(1 + 1e-15)
    train(other, X, Y, QUICK, checkpoint=checkpoint, resume=True)
    assert torch.equal(parameters(other), parameters(whole))


def test_the_folder_is_made_and_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    X, Y = data()
    path = tmp_path / "new" / "run.safetensors"
    path.parent.mkdir()
    (path.parent / f".{path.name}.123.part").write_bytes(b"half")
    train(model_for(X, Y), X, Y, QUICK, checkpoint=path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    train(model_for(X, Y), X, Y, QUICK, checkpoint=tmp_path / "other" / "run.safetensors")
    with pytest.raises(CheckpointError, match="is a folder"):
        train(model_for(X, Y), X, Y, QUICK, checkpoint=tmp_path)


def test_a_full_disk_is_warned_of_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    X, Y = data()
    path, whole = tmp_path / "run.safetensors", model_for(X, Y)
    train(whole, X, Y, QUICK)
    replace = os.replace

    def full(*arguments: Path) -> None:
        if path.exists():
            raise OSError("disk full")
        replace(*arguments)

    monkeypatch.setattr(os, "replace", full)
    model = model_for(X, Y)
    with pytest.warns(UserWarning, match="could not be written .disk full.; the old one stays"):
        train(model, X, Y, QUICK, checkpoint=path)
    assert torch.equal(parameters(model), parameters(whole))
    assert read_checkpoint(path)[1]["num_steps"] == 0


def test_wrong_arguments_leave_no_checkpoint(tmp_path: Path) -> None:
    X, Y = data(2)
    path, model = tmp_path / "run.safetensors", model_for(X, Y)
    for inputs, targets in ((X[0], Y[0]), (X.float(), Y.float()), (X[..., :1], Y)):
        with pytest.raises(ValueError, match="must have"):
            train(model, inputs, targets, QUICK, checkpoint=path)
        with pytest.raises(ValueError, match="must have"):
            train(model, X, Y, QUICK, held_out=(inputs, targets), checkpoint=path)
    assert not path.exists()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    X, Y = data()
    path = tmp_path / "run.safetensors"
    train(model_for(X, Y), X, Y, QUICK, checkpoint=path)
    content = path.read_bytes()
    for damaged in (b"", content[:100], content[: len(content) // 2], b"\xff" * 64 + content[64:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
            read_checkpoint(path)


def test_other_formats_and_newer_versions_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "other.safetensors"
    save_file({"x": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="no checkpoint of deepwishart"):
        read_checkpoint(path)
    metadata = {"format": "deepwishart-checkpoint", "version": "99", "record": json.dumps({})}
    save_file({"x": torch.ones(2)}, path, metadata)
    with pytest.raises(CheckpointError, match="newer deepwishart"):
        read_checkpoint(path)


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.safetensors"
    write_checkpoint(path, {"x": torch.ones(3)}, {"a": 1})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(path, {"x": torch.zeros(3)}, {"a": 2})
    monkeypatch.undo()
    assert read_checkpoint(path)[1] == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.safetensors"]
