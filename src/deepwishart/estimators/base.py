"""What all estimators share: tables are encoded and standardised, a model is made, started, trained and asked."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_consistent_length, check_is_fitted, validate_data
from torch import Tensor

from deepwishart.checks import find_device, require_whole
from deepwishart.data.encoding import Missing, TableEncoder, TableError
from deepwishart.data.rows import Scaler, merge_rows
from deepwishart.estimators.checkpoints import checkpoint_of, remove_checkpoints
from deepwishart.layers import InverseWishartLayer
from deepwishart.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood
from deepwishart.models import DeepKernelProcess
from deepwishart.objectives import predict_f_in_chunks, predict_in_chunks
from deepwishart.predictive import Predictive
from deepwishart.shallow import ShallowGP, count_inducing, fit_shallow_gp
from deepwishart.starting import average_inducing_targets, match_noise, start_from, with_varying_noise
from deepwishart.training import History, TrainingConfig, TrainingError, train
from deepwishart.training.config import FULL_BATCH_UP_TO

__all__ = ["DeepKernelEstimator"]

_DTYPES = {"float64": torch.float64, "float32": torch.float32}
# A fit has settled when the ELBO has risen by less than this, in nats per row, over so many checks of 50 steps.
_TOLERANCE, _PATIENCE = 1e-2, 3
# A fit keeps the noise of the GP unless its start leaves so many times more unexplained.
_MISFIT = 10.0
# Of all steps, those for noise that varies.
_SHARE_OF_VARYING_NOISE = 2 / 7
# Rows a step of large tables, dealt out to the samples. A GPU is fastest with a multiple of eight for each.
_DEALT_ROWS = 4_080


@dataclass(kw_only=True, eq=False, repr=False)
class DeepKernelEstimator(BaseEstimator, ABC):
    """A deep kernel process behind scikit-learn's interface. Use one of its six kinds, such as ``DWPRegressor``.

    Attributes:
        depth: Hidden layers and the output; 1 is a sparse GP.
        num_inducing: Inducing points; by default as many as the data ask for, from 250 to 350.
        kernel: Name or expression, see :func:`deepwishart.kernels.make_kernel`.
        likelihood: Name of a likelihood; by default what suits the task: for numbers, ``"heteroscedastic"``.
        num_steps: Steps of training at most: a fit ends when its ELBO has settled.
        num_samples: Posterior samples a step.
        num_predict_samples: Posterior samples of a prediction.
        learning_rate: Of Adam.
        batch_size: Rows a step, all of which every sample sees. By default, all rows of up to 2,048; of more, 4,080
            that are dealt out to the samples, so that each is seen by one; where that is no gain, at depth 1 and in a
            deep inverse Wishart process, 1,024.
        n_replicas: Members of an ensemble, trained in one pass; predictions are those of their mixture.
        missing: What to do about missing values: ``"refuse"`` or ``"impute"``, with the median or the most frequent
            category.
        warm_start: Go on from the last fit instead of starting anew.
        random_state: Seed; the same gives the same fit on the same machine, and the same predictions.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or any other name of torch's.
        dtype: ``"float64"`` or ``"float32"``.
        checkpoint: A file for the state of a fit: the same call goes on from it after a crash. :meth:`save` removes it.
            Needs a ``random_state``.
        verbose: Whether to show a progress bar.
    """

    depth: int = 2
    num_inducing: int | None = None
    kernel: str = "squared-exponential"
    likelihood: str | None = None
    num_steps: int = 1_400
    num_samples: int = 3
    num_predict_samples: int = 100
    learning_rate: float = 5e-3
    batch_size: int | None = None
    n_replicas: int = 1
    missing: Missing = "refuse"
    warm_start: bool = False
    random_state: Any = None
    device: str = "auto"
    dtype: str = "float64"
    checkpoint: str | os.PathLike[str] | None = None
    verbose: bool = False

    # What the kinds of estimators differ in

    @abstractmethod
    def _encode_targets(self, y: Any) -> np.ndarray:
        """Targets as numbers, shape ``(rows, outputs)``; learns what decoding needs."""

    @abstractmethod
    def _decode_targets(self, y: Any) -> np.ndarray:
        """Targets of new rows as numbers, shape ``(rows, outputs)``, by what was learned."""

    @abstractmethod
    def _make_likelihood(self) -> Likelihood:
        """The likelihood, after :meth:`_encode_targets`."""

    @abstractmethod
    def _scale_targets(self, Y: np.ndarray, weights: np.ndarray | None) -> Scaler:
        """Standard units of the targets."""

    @abstractmethod
    def _regression_targets(self, Y: Tensor) -> Tensor:
        """Real numbers that tell which inputs matter, for the GP that a fit starts from; not yet standardised."""

    @abstractmethod
    def _make_model(self, X: Tensor, Y: Tensor, **options: Any) -> DeepKernelProcess:
        """A model for data of shape (R, rows, …)."""

    # The fit

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit to a table.

        Args:
            X: Array, or pandas or polars data frame, shape ``(rows, columns)``. A frame may have categorical columns.
            y: Targets, shape ``(rows)`` or ``(rows, outputs)``.
            sample_weight: How often each row counts, shape ``(rows)``.
        """
        self._check_parameters()
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        continued = getattr(self, "built_with_", None) if self.warm_start else None
        X = self._encode_inputs(X, learn=True)
        Y = self._encode_targets(y)
        check_consistent_length(X, Y)
        self.target_names_ = _target_names(y, Y.shape[1])
        weights = None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            if not weights.any():
                raise ValueError("sample_weight must not be all zero.")
        X, Y, weights = merge_rows(X, Y, weights)
        self.x_scaler_, self.y_scaler_ = Scaler.fit(X, weights), self._scale_targets(Y, weights)
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        R = self.n_replicas
        inputs, targets = (
            self._tensor(values).expand(R, *values.shape).contiguous()
            for values in (self.x_scaler_.forward(X), self.y_scaler_.forward(Y))
        )
        counts = None if weights is None else self._tensor(weights)
        self.built_with_: dict[str, Any] = self._structure(inputs, targets)
        if self.built_with_ == continued:
            self.history_: History = self._train(inputs, targets, counts, self.num_steps)
        else:
            self.history_ = self._train_anew(inputs, targets, counts)
        kept = [r for r in range(R) if r not in self.history_.retired]
        if not kept:
            raise TrainingError(
                "No member of the ensemble has come to the end: some were lost while features were learned, the others "
                "while noise was. Lower learning_rate, or set likelihood to 'gaussian'.",
                self.history_,
            )
        self.replicas_ = np.array(kept)
        self.elbo_ = float(self.history_.recent_elbo()[kept].mean())
        self.n_iter_ = self.history_.num_steps
        return self

    def _check_parameters(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be 'float64' or 'float32', got {self.dtype!r}.")
        for name in ("n_replicas", "depth", "num_steps", "num_samples", "num_predict_samples"):
            require_whole(name, getattr(self, name))
        if self.num_inducing is not None:
            require_whole("num_inducing", self.num_inducing)
        if self.checkpoint is not None and not isinstance(self.random_state, int | np.integer):
            raise ValueError("checkpoint needs a whole number for random_state: only the same seed can go on.")
        _ = self._device

    def _structure(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """All that decides the form of a model: another one cannot go on from its weights."""
        params = self.get_params(deep=False)
        names = ("depth", "kernel", "likelihood", "dtype", "posterior", "widths", "num_inducing", "n_replicas")
        classes = getattr(self, "classes_", np.empty(0)).tolist()
        chosen = {name: params[name] for name in names if name in params}
        return {**chosen, "classes": classes, "inputs": inputs.shape[-1], "outputs": targets.shape[-1]}

    def _train_anew(self, inputs: Tensor, targets: Tensor, weights: Tensor | None) -> History:
        """Make a model and train it.

        Noise that varies comes last, when the features have been learned, and leaves them as they are: what is easily
        taken for noise would else never be explained.
        """
        likelihood = self._make_likelihood()
        if not isinstance(likelihood, HeteroscedasticGaussian):
            self.model_: DeepKernelProcess = self._start_model(inputs, targets, weights, likelihood)
            return self._train(inputs, targets, weights, self.num_steps)
        for_noise = int(_SHARE_OF_VARYING_NOISE * self.num_steps)
        self.model_ = self._start_model(inputs, targets, weights, Gaussian())
        history = self._train(inputs, targets, weights, self.num_steps - for_noise)
        num_data = inputs.shape[-2] if weights is None else weights.sum().item()
        self.model_ = with_varying_noise(self.model_, num_data)
        if not for_noise:
            return history
        self.model_.requires_grad_(False)
        for part in (self.model_.output.posterior, self.model_.likelihood):
            part.requires_grad_(True)
        try:
            return history.followed_by(self._train(inputs, targets, weights, for_noise))
        finally:
            self.model_.requires_grad_(True)

    def _start_model(
        self, inputs: Tensor, targets: Tensor, weights: Tensor | None, likelihood: Likelihood
    ) -> DeepKernelProcess:
        """A model that begins where a plain GP has come to."""
        generator = torch.Generator().manual_seed(self.seed_)
        # What chooses rows is small, and the same on every device.
        inputs, targets = inputs.cpu(), targets.cpu()
        weights = torch.ones(len(inputs[0]), dtype=inputs.dtype) if weights is None else weights.cpu()
        X, Y = inputs[0], self._regression_targets(targets[0])
        mean = (weights[:, None] * Y).sum(0) / weights.sum()
        spread = ((weights[:, None] * (Y - mean) ** 2).sum(0) / weights.sum()).sqrt()
        Y = (Y - mean) / torch.where(spread > 0, spread, 1.0)
        self.gp_ = gp = fit_shallow_gp(X, Y, weights, generator=generator)
        M = count_inducing(X, gp) if self.num_inducing is None else self.num_inducing
        model = self._make_model(
            inputs,
            targets,
            depth=self.depth,
            num_inducing=M,
            kernel=self.kernel,
            likelihood=likelihood,
            generator=generator,
        )
        replicated = ShallowGP(*(part.expand(len(inputs), *part.shape) for part in gp))
        start_from(model, replicated, weights.sum().item())
        average_inducing_targets(model, X, targets[0], weights)
        match_noise(model, inputs, targets, weights, _MISFIT, generator)
        return model.to(self._device)

    def _train(self, inputs: Tensor, targets: Tensor, weights: Tensor | None, num_steps: int) -> History:
        is_large = self.batch_size is None and inputs.shape[-2] > FULL_BATCH_UP_TO
        is_dealt = is_large and _can_deal(self.model_)
        config = TrainingConfig(
            num_steps=num_steps,
            num_samples=self.num_samples,
            batch_size=_DEALT_ROWS if is_dealt else self.batch_size,
            deal_rows=is_dealt,
            learning_rate=self.learning_rate,
            schedule="plateau",
            annealing_steps=0,
            tolerance=_TOLERANCE,
            stop_when_settled=True,
            plateau_patience=_PATIENCE,
        )
        return train(
            self.model_,
            inputs,
            targets,
            config,
            seed=self.seed_,
            weights=None if weights is None else weights.expand(self.n_replicas, -1),
            checkpoint=None if self.checkpoint is None else checkpoint_of(self.model_, self.checkpoint),
            resume=True,
            progress=bool(self.verbose),
        )

    # Inputs

    def encode(self, X: Any) -> np.ndarray:
        """The matrix of numbers that the model reads, before standardisation; see the encoder for its columns."""
        check_is_fitted(self)
        return self._encode_inputs(X, learn=False)

    def as_table(self, X: Any) -> pd.DataFrame:
        """New rows as a data frame with the columns of the fit."""
        check_is_fitted(self)
        return self._table(X, learn=False)

    def _encode_inputs(self, X: Any, learn: bool) -> np.ndarray:
        table = self._table(X, learn)
        if learn:
            self.encoder_ = TableEncoder.fit(table, self.missing)
        return self.encoder_.transform(table)

    def _table(self, X: Any, learn: bool) -> pd.DataFrame:
        """A data frame from whatever was given; checked as scikit-learn does, or left to the encoder."""
        if type(X).__module__.startswith("polars"):
            X = pd.DataFrame(X.to_dict(as_series=False))
        if isinstance(X, pd.DataFrame):
            validate_data(self, X, skip_check_array=True, reset=learn)
            if not (len(X) and X.shape[1]):
                raise TableError(f"The table must have rows and columns, got {len(X)} and {X.shape[1]}.")
            return X.set_axis(self._column_names, axis=1)
        if not learn and self.encoder_.has_categories:
            names = ", ".join(column.name for column in self.encoder_.columns)
            raise TableError(f"The model was fitted to a data frame with categories. Give one with {names}.")
        finite = "allow-nan" if self.missing == "impute" else True
        numbers = validate_data(self, X, dtype=np.float64, ensure_all_finite=finite, reset=learn)
        return pd.DataFrame(numbers, columns=self._column_names)

    @property
    def _column_names(self) -> list[str]:
        """Of the table of the fit; where it had none, columns go by their place."""
        return list(getattr(self, "feature_names_in_", [f"x{i}" for i in range(self.n_features_in_)]))

    @property
    def _torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def _device(self) -> torch.device:
        return find_device(self.device)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=self._torch_dtype, device=self._device)

    # Predictions

    @abstractmethod
    def predict_table(self, X: Any, levels: Sequence[float] = (0.05, 0.95)) -> pd.DataFrame:
        """All that is predicted of the rows of X, in a data frame."""

    def _inputs(self, X: Any) -> Tensor:
        """Standardised inputs of a fitted model, shape ``(R, rows, D)``."""
        check_is_fitted(self)
        Z = self.model_.inducing_inputs
        inputs = torch.as_tensor(self.x_scaler_.forward(self._encode_inputs(X, learn=False)), dtype=Z.dtype)
        return inputs.to(Z.device).expand(len(Z), *inputs.shape)

    def _generator(self) -> torch.Generator:
        return torch.Generator(self.model_.inducing_inputs.device).manual_seed(self.seed_)

    def _predictives(self, X: Any) -> Iterator[Predictive]:
        """Predictive mixtures of y in standard units, some rows at a time; the same for a row at every call."""
        kept = torch.as_tensor(self.replicas_)
        for predictive in predict_in_chunks(self.model_, self._inputs(X), self.num_predict_samples, self._generator()):
            yield predictive.pool(kept)

    def _collect(self, X: Any, ask: Callable[[Predictive], Tensor], dim: int = 0) -> np.ndarray:
        """What is asked of the predictive mixtures of all rows."""
        with torch.no_grad():
            return torch.cat([ask(predictive) for predictive in self._predictives(X)], dim).numpy(force=True)

    def _collect_pairs(self, X: Any, y: Any, ask: Callable[[Predictive, Tensor], Tensor]) -> np.ndarray:
        """What is asked of the predictive mixtures at given targets."""
        Y = self.y_scaler_.forward(self._decode_targets(y))
        check_consistent_length(X, Y)
        at, parts, Z = 0, [], self.model_.inducing_inputs
        with torch.no_grad():
            for predictive in self._predictives(X):
                rows = predictive.components.batch_shape[2]
                targets = torch.as_tensor(Y[at : at + rows], dtype=Z.dtype, device=Z.device)
                parts.append(ask(predictive, targets))
                at += rows
        return torch.cat(parts).numpy(force=True)

    def log_likelihood(self, X: Any, y: Any, *, per_row: bool = False) -> Any:
        """log p(y | x) in the user's units, by log-mean-exp over samples; the mean over rows, or of each."""
        check_is_fitted(self)
        each = self._collect_pairs(X, y, lambda predictive, Y: predictive.log_prob(Y))
        each = each - np.log(self.y_scaler_.scale).sum()
        return each if per_row else float(each.mean())

    def _predict_latent(self, X: Any) -> np.ndarray:
        """Means and standard deviations of the latent functions, in standard units, shape ``(2, rows, latents)``."""
        kept = torch.as_tensor(self.replicas_)
        chunks = predict_f_in_chunks(self.model_, self._inputs(X), self.num_predict_samples, self._generator())
        pooled = (chunk.pool(kept) for chunk in chunks)
        return torch.cat([torch.stack([p.mean, p.stddev]) for p in pooled], 1).numpy(force=True)

    # Files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one self-describing safetensors file; :func:`deepwishart.load` reads it."""
        from deepwishart.files import save

        save(self, path)
        if self.checkpoint is not None:
            remove_checkpoints(self.checkpoint)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "replicas_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing == "impute"
        tags.non_deterministic = False
        return tags


def _can_deal(model: DeepKernelProcess) -> bool:
    """Whether dealt rows cost less: the large products of the first layer are the same for all samples."""
    return bool(model.layers) and not isinstance(model.layers[0], InverseWishartLayer)


def _target_names(y: Any, outputs: int) -> list[str]:
    """Those of a data frame or series, else ``y``, or ``y0``, ``y1``, …"""
    names = list(getattr(y, "columns", [getattr(y, "name", None)] if outputs == 1 else []))
    if len(names) != outputs or None in names:
        return ["y"] if outputs == 1 else [f"y{i}" for i in range(outputs)]
    return [str(name) for name in names]
