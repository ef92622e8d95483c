"""Model files: one safetensors file that says all about itself. Loading one executes nothing and checks everything."""

import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from deepwishart import __version__
from deepwishart.checks import find_device
from deepwishart.data.encoding import TableEncoder
from deepwishart.data.rows import Scaler
from deepwishart.data.tables import write_atomically
from deepwishart.estimators import ESTIMATORS, DeepKernelEstimator
from deepwishart.likelihoods import HeteroscedasticGaussian
from deepwishart.shallow import ShallowGP
from deepwishart.training import History

__all__ = ["FORMAT_VERSION", "ModelFileError", "load", "save"]

FORMAT_VERSION = 3
_FORMAT = "deepwishart-model"
_MAX_BYTES = 8 * 2**30
_MAX_DEPTH, _MAX_WIDTH, _MAX_SAMPLES = 1_000, 100_000, 1_000_000
_MODEL = "model."


class ModelFileError(RuntimeError):
    """A model file cannot be used; the message says why and what to do."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Column(_Strict):
    name: str
    categories: list[str] | None
    fill: float | str


class _Encoder(_Strict):
    missing: Literal["refuse", "impute"]
    columns: list[_Column] = Field(min_length=1)


class _Classes(_Strict):
    kind: Literal["str", "int", "float", "bool"]
    values: list[str] | list[bool] | list[int] | list[float]


class _Record(_Strict):
    """What a file says beside its tensors."""

    estimator: str
    library: str
    params: dict[str, Any]
    encoder: _Encoder
    classes: _Classes | None
    feature_names: list[str] | None
    n_features: int = Field(ge=1)
    n_outputs: int = Field(ge=1)
    targets_ndim: int = Field(ge=1, le=2)
    target_names: list[str] = Field(min_length=1)
    seed: int = Field(ge=0, lt=2**31)
    replicas: list[int] = Field(min_length=1)
    elbo: float
    history: dict[str, Any]


def save(estimator: DeepKernelEstimator, path: str | os.PathLike[str]) -> None:
    """Write a fitted estimator; the old file is replaced at once or not at all."""
    from safetensors.torch import save as serialise
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(estimator)
    tensors, record = _take_apart(estimator)
    text = record.model_dump_json()
    metadata = {"format": _FORMAT, "version": str(FORMAT_VERSION), "record": text, "sha256": _digest(tensors, text)}
    with write_atomically(Path(path)) as unfinished:
        unfinished.write_bytes(serialise(tensors, metadata))


def load(path: str | os.PathLike[str]) -> Any:
    """Read what :func:`save` wrote: an estimator that predicts the same, to the last digit, on the same machine.

    Raises:
        ModelFileError: If the file is none of ours, damaged, altered, or of a newer format.
    """
    path = Path(path)
    tensors, text, version = _read(path)
    try:
        record = _Record.model_validate_json(text)
        _upgrade(tensors, record, version)
        return _put_together(tensors, record)
    except ModelFileError as error:
        raise ModelFileError(f"{path} cannot be used: {error}") from error
    except (ValidationError, ValueError, KeyError, TypeError, IndexError, RuntimeError, OverflowError) as error:
        raise ModelFileError(f"{path} does not describe a model: {_first_line(error)}") from error


def _upgrade(tensors: dict[str, Tensor], record: _Record, version: int) -> None:
    """From an older format, in place."""
    if version < 2:  # the entries of A′ were not in units of 1/√M
        for name, tensor in tensors.items():
            if name.endswith(".posterior.rows"):
                tensors[name] = tensor * tensor.shape[-1] ** 0.5
    if version < 3:  # noise did not vary by default, and where it did, its spread was one
        if record.classes is None and record.params.get("likelihood") is None:
            record.params["likelihood"] = "gaussian"
        if record.params.get("likelihood") == "heteroscedastic":
            tensors[f"{_MODEL}likelihood.log_spread"] = torch.zeros_like(tensors[f"{_MODEL}likelihood.log_noise"])


def _read(path: Path) -> tuple[dict[str, Tensor], str, int]:
    """The tensors and the text of the record, both whole, and the version of the format."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ModelFileError(f"{path} is not a file. Check the path.")
    if path.stat().st_size > _MAX_BYTES:
        raise ModelFileError(f"{path} is larger than {_MAX_BYTES // 2**30} GiB: not a model of deepwishart.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ModelFileError(f"{path} is no model of deepwishart. Give a file that save() or fit wrote.")
            version = metadata.get("version", "")
            if not version.isdigit() or int(version) > FORMAT_VERSION:
                raise ModelFileError(
                    f"{path} has format {version[:20]!r}, which deepwishart {__version__} does not know. Update it."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            text = metadata.get("record", "")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelFileError(f"{path} is damaged or no model file: {_first_line(error)}") from error
    if metadata.get("sha256") != _digest(tensors, text):
        raise ModelFileError(f"{path} was altered or damaged: its checksum is wrong. Save the model again.")
    return tensors, text, int(version)


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    """Of all that decides what a file means."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _take_apart(estimator: Any) -> tuple[dict[str, Tensor], _Record]:
    tensors = {f"{_MODEL}{name}": tensor for name, tensor in estimator.model_.state_dict().items()}
    for name in ("x_scaler", "y_scaler"):
        scaler: Scaler = getattr(estimator, f"{name}_")
        tensors[f"{name}.mean"], tensors[f"{name}.scale"] = map(torch.from_numpy, (scaler.mean, scaler.scale))
    tensors.update({f"gp.{name}": tensor for name, tensor in estimator.gp_._asdict().items()})
    tensors.update({f"history.{name}": tensor for name, tensor in estimator.history_.tensors().items()})
    # What the model is, not what parameters were set to since.
    params = {name: estimator.built_with_.get(name, value) for name, value in estimator.get_params(deep=False).items()}
    if not isinstance(params["random_state"], int | None):
        params["random_state"] = None
    params["checkpoint"] = None
    classes = getattr(estimator, "classes_", None)
    record = _Record(
        estimator=type(estimator).__name__,
        library=__version__,
        params=json.loads(json.dumps(params, default=_plain)),
        encoder=_Encoder.model_validate_json(json.dumps(estimator.encoder_.to_record())),
        classes=None if classes is None else _Classes(kind=_kind(classes), values=classes.tolist()),
        feature_names=list(estimator.feature_names_in_) if hasattr(estimator, "feature_names_in_") else None,
        n_features=estimator.n_features_in_,
        n_outputs=getattr(estimator, "n_outputs_", 1),
        targets_ndim=getattr(estimator, "targets_ndim_", 1),
        target_names=estimator.target_names_,
        seed=estimator.seed_,
        replicas=estimator.replicas_.tolist(),
        elbo=estimator.elbo_,
        history=estimator.history_.record(),
    )
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, record


def _plain(value: Any) -> Any:
    """numpy's numbers and sequences as JSON knows them."""
    if isinstance(value, np.generic):
        return value.item()
    raise ModelFileError(f"A parameter of the estimator cannot be written to a file: {value!r}.")


def _kind(classes: np.ndarray) -> Literal["str", "int", "float", "bool"]:
    kinds: dict[str, Literal["str", "int", "float", "bool"]] = {"i": "int", "u": "int", "f": "float", "b": "bool"}
    if classes.dtype.kind in kinds:
        return kinds[classes.dtype.kind]
    if all(isinstance(value, str) for value in classes.tolist()):
        return "str"
    raise ModelFileError(f"Classes must be words or numbers to be saved, got {classes.dtype}.")


def _put_together(tensors: dict[str, Tensor], record: _Record) -> Any:
    if record.estimator not in ESTIMATORS:
        raise ModelFileError(f"there is no estimator {record.estimator[:40]!r}. Update deepwishart.")
    estimator: Any = ESTIMATORS[record.estimator]()
    unknown = sorted(set(record.params) - set(estimator.get_params()))
    if unknown:
        raise ModelFileError(f"{record.estimator} has no parameter {unknown[0]!r}. Update deepwishart.")
    estimator.set_params(**record.params)
    try:
        find_device(estimator.device)
    except ValueError:
        warnings.warn(f"The model was fitted on {estimator.device!r}, which is not here.", stacklevel=3)
        estimator.device = "auto"
    estimator._check_parameters()
    estimator.encoder_ = TableEncoder.from_record(record.encoder.model_dump())
    estimator.n_features_in_ = record.n_features
    if record.feature_names is not None:
        estimator.feature_names_in_ = np.array(record.feature_names, dtype=object)
    if record.n_features != len(record.encoder.columns):
        raise ModelFileError("the numbers of columns differ.")
    if record.targets_ndim == 1 and record.n_outputs != 1:
        raise ModelFileError("one column of targets cannot be several outputs.")
    if estimator.num_predict_samples > _MAX_SAMPLES:
        raise ModelFileError(f"it asks for {estimator.num_predict_samples} samples.")
    if record.classes is not None:
        estimator.classes_ = _classes(record.classes)
    elif hasattr(estimator, "predict_proba"):
        raise ModelFileError("a classifier has classes.")
    else:
        estimator.n_outputs_, estimator.targets_ndim_ = record.n_outputs, record.targets_ndim
    if len(record.target_names) != record.n_outputs:
        raise ModelFileError("the numbers of targets and of their names differ.")
    estimator.target_names_ = record.target_names
    estimator.seed_, estimator.elbo_ = record.seed, record.elbo
    for name in ("x_scaler", "y_scaler"):
        scaler = Scaler(tensors.pop(f"{name}.mean").numpy(), tensors.pop(f"{name}.scale").numpy())
        setattr(estimator, f"{name}_", scaler)
    estimator.gp_ = ShallowGP(*(tensors.pop(f"gp.{name}") for name in ShallowGP._fields))
    history = {name: tensors.pop(f"history.{name}") for name in ("elbo", "learning_rate", "held_out")}
    if any(array.ndim != 2 or array.shape[1] != estimator.n_replicas for array in history.values()):
        raise ModelFileError("its history has another number of replicas.")
    estimator.history_ = History.restore(history, record.history)
    estimator.n_iter_ = estimator.history_.num_steps
    weights = {name.removeprefix(_MODEL): tensor for name, tensor in tensors.items()}
    estimator.model_ = _rebuild(estimator, weights, record)
    estimator.built_with_ = estimator._structure(estimator.model_.inducing_inputs, torch.empty(record.n_outputs))
    replicas = np.array(record.replicas)
    if not (np.isin(replicas, np.arange(estimator.n_replicas)).all() and (np.diff(replicas) > 0).all()):
        raise ModelFileError("it names replicas that it does not hold.")
    estimator.replicas_ = replicas
    return estimator


def _classes(record: _Classes) -> np.ndarray:
    """Sorted, each once, and of the kind that they are said to be."""
    classes = np.array(record.values)
    if len(classes) < 2 or _kind(classes) != record.kind or not np.array_equal(np.unique(classes), classes):
        raise ModelFileError("its classes are not in order.")
    return classes


def _rebuild(estimator: Any, weights: dict[str, Tensor], record: _Record) -> Any:
    """The model: made for points that do not matter, and filled with what was learned."""
    R, M, D = weights["inducing_inputs"].shape
    _check_sizes(estimator, weights, D, record)
    likelihood = estimator._make_likelihood()
    varying = isinstance(likelihood, HeteroscedasticGaussian)
    points = torch.arange(M, dtype=estimator._torch_dtype)[None, :, None].expand(R, M, D) / M
    model = estimator._make_model(
        points,
        torch.zeros(R, M, record.n_outputs, dtype=estimator._torch_dtype),
        depth=estimator.depth,
        num_inducing=M,
        kernel=estimator.kernel,
        likelihood=likelihood,
        output_precision="separate-full" if varying else "shared-full",
        generator=torch.Generator().manual_seed(0),
    )
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
    if expected != found:
        wrong = sorted({*expected, *found}, key=lambda name: expected.get(name) == found.get(name))[0]
        raise ModelFileError(f"{wrong} is {found.get(wrong)}, where {expected.get(wrong)} was expected.")
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise ModelFileError(f"{name} is not finite.")
    model.load_state_dict(weights)
    return model.to(estimator._device)


def _check_sizes(estimator: Any, weights: dict[str, Tensor], D: int, record: _Record) -> None:
    """Nothing is built that the file does not fill."""
    R, M, _ = weights["inducing_inputs"].shape
    layers = {name.split(".")[1] for name in weights if name.startswith("layers.")}
    for place in ("output", *(f"layers.{layer}" for layer in layers)):
        # Every layer and the output has a matrix of this size, and nothing that is built is larger.
        if not any(name.startswith(f"{place}.") and t.shape[-2:] == (M, M) for name, t in weights.items()):
            raise ModelFileError(f"{place} has no matrix for {M} inducing points.")
    if estimator.n_replicas != R:
        raise ModelFileError(f"it holds {R} replicas, but names {estimator.n_replicas}.")
    if estimator.depth != len(layers) + 1 or estimator.depth > _MAX_DEPTH:
        raise ModelFileError(f"depth is {estimator.depth}, but there are {len(layers)} hidden layers.")
    widths = getattr(estimator, "widths", None)
    for width in widths if isinstance(widths, list) else [widths]:
        if width is not None and not (isinstance(width, int) and 1 <= width <= _MAX_WIDTH):
            raise ModelFileError(f"a width is {width!r}.")
    if not isinstance(estimator.kernel, str) or len(estimator.kernel) > 1_000:
        raise ModelFileError("the kernel has no name.")
    encoded = sum(column.width for column in estimator.encoder_.columns)
    scalers = (estimator.x_scaler_, estimator.y_scaler_)
    shapes = [values.shape for scaler in scalers for values in (scaler.mean, scaler.scale)]
    if shapes != [(encoded,)] * 2 + [(record.n_outputs,)] * 2 or encoded != D:
        raise ModelFileError("the sizes of columns, scalers and weights differ.")
    if not all(np.isfinite(s.mean).all() and np.isfinite(s.scale).all() and (s.scale > 0).all() for s in scalers):
        raise ModelFileError("a scale is not positive and finite.")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
