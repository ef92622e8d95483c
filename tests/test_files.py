"""Model files: whole or refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save as serialise

from deepwishart import load
from deepwishart.estimators import ESTIMATORS, DWPClassifier, DWPRegressor
from deepwishart.files import FORMAT_VERSION, ModelFileError, _digest
from tests.proofs import Proofs

QUICK: dict[str, Any] = {"num_steps": 3, "num_inducing": 6, "num_predict_samples": 5, "random_state": 0}
FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("model-*.safetensors"))


def frame(rows: int = 30) -> pd.DataFrame:
    rng = np.random.RandomState(0)
    return pd.DataFrame({"a": rng.randn(rows), "b": rng.choice(["u", "v", "w"], rows), "c": rng.randn(rows)})


def target(table: pd.DataFrame) -> "pd.Series[float]":
    return (table["a"] + (table["b"] == "u")).rename("sales")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    DWPRegressor(**QUICK).fit(frame(), target(frame())).save(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_loaded_model_predicts_the_same(name: str, dtype: str, tmp_path: Path) -> None:
    X, y = frame(), target(frame())
    y = pd.cut(y, 3, labels=["low", "middle", "high"]).astype(str) if "Classifier" in name else y
    model = ESTIMATORS[name](**QUICK, dtype=dtype, n_replicas=2).fit(X, y)
    model.save(tmp_path / "model.safetensors")
    loaded = load(tmp_path / "model.safetensors")
    assert type(loaded) is type(model)
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    np.testing.assert_array_equal(loaded.predict_f(X), model.predict_f(X))
    assert loaded.get_params() == model.get_params()
    assert loaded.elbo_ == model.elbo_
    assert loaded.n_iter_ == model.n_iter_
    np.testing.assert_array_equal(loaded.history_.elbo, model.history_.elbo)
    with pytest.raises(ValueError, match="unseen at fit time"):
        loaded.predict(X.rename(columns={"a": "z"}))
    assert list(tmp_path.iterdir()) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1},
        {"depth": 3, "widths": [2, 5], "posterior": "gw"},
        {"kernel": "matern-5/2 + linear", "likelihood": "student-t"},
        {"likelihood": "heteroscedastic", "missing": "impute"},
    ],
)
def test_options_travel(options: dict[str, Any], tmp_path: Path) -> None:
    X = frame()
    model = DWPRegressor(**QUICK, **options).fit(X, target(X))
    model.save(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(load(tmp_path / "model.safetensors").predict(X), model.predict(X))


@pytest.mark.parametrize("labels", [[0, 5], [True, False], [0.0, 2.0], ["no", "yes"]])
def test_classes_keep_their_kind(labels: list[Any], tmp_path: Path) -> None:
    y = np.array(labels)[(frame()["a"] > 0).astype(int)]
    DWPClassifier(**QUICK).fit(frame(), y).save(tmp_path / "model.safetensors")
    loaded = load(tmp_path / "model.safetensors")
    assert loaded.classes_.tolist() == sorted(labels)
    assert loaded.classes_.dtype.kind == np.array(labels).dtype.kind


def test_the_file_holds_what_was_fitted_not_what_was_set_since(file: Path, tmp_path: Path) -> None:
    model = load(file)
    expected = model.predict(frame())
    model.set_params(kernel="matern-1/2", depth=7, likelihood="poisson")
    model.save(tmp_path / "again.safetensors")
    np.testing.assert_array_equal(load(tmp_path / "again.safetensors").predict(frame()), expected)


@pytest.mark.parametrize("values", [["yes", "no"], ["no"], ["no", "no"], [0, 1]])
def test_classes_out_of_order_are_refused(values: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    DWPClassifier(**QUICK).fit(frame(), np.where(frame()["a"] > 0, "yes", "no")).save(path)
    tensors, metadata = contents(path)
    record = json.loads(metadata["record"])
    forge(path, tensors, change(record, classes={"kind": "str", "values": values}))
    with pytest.raises(ModelFileError):
        load(path)


def test_a_model_of_a_device_that_is_not_here_loads_with_a_warning(file: Path, tmp_path: Path) -> None:
    tensors, metadata = contents(file)
    record = json.loads(metadata["record"])
    forge(tmp_path / "far.safetensors", tensors, change(record, params={**record["params"], "device": "cuda:99"}))
    with pytest.warns(UserWarning, match="fitted on 'cuda:99', which is not here"):
        assert load(tmp_path / "far.safetensors").device == "auto"


def test_an_unfitted_model_has_no_file(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="not fitted"):
        DWPRegressor().save(tmp_path / "model.safetensors")


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_old_files_keep_loading(path: Path) -> None:
    """A file of each format, as the library wrote it at the time, and what it predicted then."""
    model = load(path)
    expected = np.array(json.loads(path.with_suffix(".json").read_text())["prediction"])
    np.testing.assert_allclose(model.predict(frame(5)), expected, rtol=1e-6)
    assert model.target_names_ == ["sales"]


def test_noise_that_varied_before_format_3_had_a_spread_of_one(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = DWPRegressor(**QUICK, likelihood="heteroscedastic").fit(frame(), target(frame()))
    torch.nn.init.zeros_(model.model_.likelihood.get_parameter("log_spread"))
    model.save(path)
    tensors, metadata = contents(path)
    del tensors["model.likelihood.log_spread"]
    forge(path, tensors, json.loads(metadata["record"]), version="2")
    np.testing.assert_array_equal(load(path).predict_quantiles(frame()), model.predict_quantiles(frame()))


def test_every_format_has_a_file() -> None:
    assert [path.stem for path in FIXTURES] == [f"model-{version}" for version in range(1, FORMAT_VERSION + 1)]


def contents(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118


def forge(path: Path, tensors: dict[str, torch.Tensor], record: dict[str, Any], **metadata: str) -> None:
    """A file whose checksum is right, whatever it says."""
    text = json.dumps(record)
    base = {
        "format": "deepwishart-model",
        "version": str(FORMAT_VERSION),
        "record": text,
        "sha256": _digest(tensors, text),
    }
    path.write_bytes(serialise(tensors, {**base, **metadata}))


def test_what_is_not_a_model_is_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    cases: list[tuple[bytes, str]] = [
        (b"", "damaged or no model file"),
        (whole[: len(whole) // 2], "damaged or no model file"),
        (whole + b"more", "damaged or no model file"),
        (b"\xff" * 8 + whole[8:], "damaged or no model file"),
        (serialise({"a": torch.zeros(1)}), "no model of deepwishart"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "altered or damaged"),
    ]
    bad = tmp_path / "bad.safetensors"
    for content, message in cases:
        bad.write_bytes(content)
        with pytest.raises(ModelFileError, match=message):
            load(bad)
    with pytest.raises(ModelFileError, match="is not a file"):
        load(tmp_path)
    with bad.open("wb") as sparse:
        sparse.truncate(9 * 2**30)
    with pytest.raises(ModelFileError, match="larger than 8 GiB"):
        load(bad)


def change(record: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**record, **changes}


def test_forged_files_are_refused(file: Path, tmp_path: Path) -> None:
    tensors, metadata = contents(file)
    record = json.loads(metadata["record"])
    bad = tmp_path / "bad.safetensors"
    forge(bad, tensors, record)
    np.testing.assert_array_equal(load(bad).predict(frame()), load(file).predict(frame()))
    params, Z = record["params"], tensors["model.inducing_inputs"]
    forgeries: list[tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, str], str]] = [
        (tensors, record, {"version": str(FORMAT_VERSION + 1)}, "Update"),
        (tensors, record, {"version": "one"}, "Update"),
        (tensors, change(record, estimator="os.system"), {}, "no estimator 'os.system'"),
        (tensors, change(record, params={**params, "evil": 1}), {}, "no parameter 'evil'"),
        (tensors, change(record, params={**params, "depth": 10**9}), {}, "depth is 1000000000"),
        (tensors, change(record, params={**params, "widths": 10**9}), {}, "width"),
        (tensors, change(record, params={**params, "kernel": "linear*" * 10**4}), {}, "kernel"),
        (tensors, change(record, params={**params, "kernel": "__import__('os')"}), {}, "does not describe"),
        (tensors, change(record, params={**params, "posterior": "gw"}), {}, "expected"),
        (tensors, change(record, n_outputs=10**9), {}, "several outputs"),
        (tensors, change(record, n_outputs=10**9, targets_ndim=2), {}, "names"),
        (tensors, change(record, replicas=[7]), {}, "replicas"),
        (tensors, change(record, target_names=["a", "b"]), {}, "names"),
        (tensors, change(record, more=1), {}, "does not describe"),
        (tensors, change(record, replicas=[0, 0]), {}, "replicas"),
        (tensors, change(record, seed=2**70), {}, "does not describe"),
        (tensors, change(record, n_features=2), {}, "columns differ"),
        (tensors, change(record, params={**params, "num_predict_samples": 10**13}), {}, "samples"),
        (tensors, change(record, params={**params, "n_replicas": 3}), {}, "replicas"),
        ({**tensors, "history.elbo": torch.zeros(3, dtype=torch.float64)}, record, {}, "history"),
        (
            {**tensors, "model.inducing_inputs": Z[:, :1].expand(1, 10**5, 5).clone()},
            record,
            {},
            "no matrix for 100000",
        ),
        (tensors, change(record, elbo="high"), {}, "does not describe"),
        ({**tensors, "model.inducing_inputs": Z * torch.nan}, record, {}, "not finite"),
        ({**tensors, "model.inducing_inputs": Z[:, :3]}, record, {}, "no matrix for 3"),
        ({**tensors, "model.inducing_inputs": Z.float()}, record, {}, "expected"),
        ({**tensors, "x_scaler.scale": -tensors["x_scaler.scale"]}, record, {}, "scale"),
        ({k: v for k, v in tensors.items() if k != "gp.noise"}, record, {}, "does not describe"),
        ({**tensors, "model.more": Z.clone()}, record, {}, "expected"),
    ]
    for forged, text, extra, message in forgeries:
        forge(bad, forged, text, **extra)
        with pytest.raises(ModelFileError, match=message):
            load(bad)


def test_mutated_files_are_refused_or_mean_the_same(file: Path, tmp_path: Path, proofs: Proofs) -> None:
    """Bytes flipped, cut, doubled or shuffled anywhere, with more of it in the header, where files are fragile."""
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    expected = load(file).predict(frame(3))
    rng = np.random.RandomState(0)
    cases, loaded, wrong = proofs.size(10_000, 100_000), 0, 0
    bad = tmp_path / "bad.safetensors"
    for _ in range(cases):
        content = bytearray(whole)
        reach = header if rng.rand() < 0.6 else len(whole)
        at = rng.randint(reach)
        kind = rng.randint(5)
        if kind == 0:
            content[at] ^= 1 << rng.randint(8)
        elif kind == 1:
            content[at] = rng.randint(256)
        elif kind == 2:
            del content[at : at + rng.randint(1, 9)]
        elif kind == 3:
            content[at:at] = content[at : at + rng.randint(1, 9)]
        else:
            end = at + rng.randint(2, 65)
            content[at:end] = bytes(rng.permutation(np.frombuffer(bytes(content[at:end]), np.uint8)))
        bad.write_bytes(content)
        try:
            model = load(bad)
        except ModelFileError:
            continue
        loaded += 1
        wrong += not np.array_equal(model.predict(frame(3)), expected)
    proofs.record("mutated model files that load and differ", cases=cases, worst=wrong, limit=0, unit="files")
    assert loaded < cases / 5  # spaces and the like


def test_loading_executes_nothing(file: Path) -> None:
    """Python itself reports what would run a program, unpickle, compile or open a connection."""
    code = f"""
import sys, deepwishart
deepwishart.load({str(file)!r})  # what is imported on first use is imported

def refuse(event, arguments):
    if event in ("compile", "exec", "os.system", "os.exec", "subprocess.Popen", "pickle.find_class", "socket.connect"):
        raise SystemExit(f"load caused {{event}} {{arguments}}")

sys.addaudithook(refuse)
deepwishart.load({str(file)!r})
try:
    eval("1")
except SystemExit:
    print("the hook works")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("the hook works", 0), done.stderr
