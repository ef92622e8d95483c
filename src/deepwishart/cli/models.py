"""fit, predict, evaluate, report."""

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from deepwishart.cli.app import (
    INTERRUPTED,
    Force,
    Json,
    Separator,
    app,
    check_output,
    console,
    errors_are_explained,
    fail,
    print_json,
    show_metrics,
)

__all__ = ["Method", "evaluate", "fit", "make_estimator", "predict", "report"]


class Method(StrEnum):
    """What is fitted."""

    AB_GW = "ab-gw"
    A_GW = "a-gw"
    GW = "gw"
    DGP = "dgp"
    DIWP = "diwp"


class Task(StrEnum):
    """What is predicted."""

    AUTO = "auto"
    REGRESSION = "regression"
    CLASSIFICATION = "classification"


Exclude = Annotated[str, typer.Option(help="Columns to leave out, separated by commas.")]
ModelFile = Annotated[Path, typer.Argument(help="A model file, written by fit.", show_default=False)]
TestTable = Annotated[Path, typer.Argument(help="CSV or Parquet with the columns of the fit and the target.")]


@app.command()
def fit(
    table: Annotated[Path, typer.Argument(help="CSV (with a header) or Parquet file.", show_default=False)],
    target: Annotated[str, typer.Option(help="Column to predict; several, separated by commas, for several outputs.")],
    out: Annotated[Path, typer.Option(help="Where to write the model.")] = Path("model.safetensors"),
    method: Annotated[
        Method, typer.Option(help="Posterior of the deep Wishart process, or another process.")
    ] = Method.AB_GW,
    task: Annotated[Task, typer.Option(help="By default classification if the target holds words.")] = Task.AUTO,
    depth: Annotated[int, typer.Option(min=1, help="Hidden layers and the output; 1 is a sparse GP.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps at most; a fit ends when it has settled.")] = 1_400,
    inducing: Annotated[int | None, typer.Option(min=1, help="Inducing points; chosen by the data by default.")] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Members of an ensemble, trained in one pass.")] = 1,
    likelihood: Annotated[
        str | None,
        typer.Option(
            help="heteroscedastic (the default for numbers), gaussian, student-t, poisson; bernoulli, categorical."
        ),
    ] = None,
    kernel: Annotated[
        str, typer.Option(help="Such as matern-5/2, or squared-exponential + linear.")
    ] = "squared-exponential",
    exclude: Exclude = "",
    impute: Annotated[bool, typer.Option("--impute", help="Fill missing values instead of refusing them.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or any other device of torch.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    separator: Separator = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted fit.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Fit a model to a table and write it to a file.

    Columns that hold words become categories. Ctrl-C saves the state of the fit; --resume goes on.
    """
    from deepwishart.data.tables import read_table

    check_output(out, force, (".safetensors",))
    checkpoint = out.with_name(f"{out.name}.checkpoint")
    with errors_are_explained():
        frame = read_table(table, separator)
        X, y = _split(frame, _names(target), _names(exclude))
        _check_resume(checkpoint, resume, force)
        y, task = _check_target(y, task)
        estimator = make_estimator(
            method,
            task,
            depth=depth,
            num_steps=steps,
            num_inducing=inducing,
            n_replicas=replicas,
            likelihood=likelihood,
            kernel=kernel,
            missing="impute" if impute else "refuse",
            device=device,
            dtype=dtype,
            random_state=seed,
            checkpoint=str(checkpoint),
            verbose=not quiet and not as_json and console.is_terminal,
        )
        begun = time.perf_counter()
        try:
            estimator.fit(X, y)
        except KeyboardInterrupt:
            if not checkpoint.exists():
                fail("Interrupted, before there was anything to save.", INTERRUPTED)
            fail(
                f"Interrupted. The last good state is in {checkpoint}; the same command with --resume goes on.",
                INTERRUPTED,
            )
        estimator.save(out)
    facts = {
        "model": str(out),
        "estimator": type(estimator).__name__,
        "rows": len(X),
        "columns": X.shape[1],
        "inducing": estimator.model_.inducing_inputs.shape[-2],
        "steps": estimator.n_iter_,
        "stopped": estimator.history_.stopped,
        "elbo": round(estimator.elbo_, 6),
        "seconds": round(time.perf_counter() - begun, 2),
    }
    if as_json:
        print_json(facts)
    else:
        console.print(
            f"Fitted {facts['estimator']} to {facts['rows']} rows and {facts['columns']} columns in "
            f"{facts['seconds']:.1f} s: {facts['steps']} steps ({facts['stopped']}), {facts['inducing']} inducing "
            f"points, ELBO {facts['elbo']:.3f} a row.",
            markup=False,
            soft_wrap=True,
        )
        console.print(f"Wrote {out}.", markup=False, soft_wrap=True)


@app.command()
def predict(
    model: ModelFile,
    table: Annotated[Path, typer.Argument(help="CSV or Parquet with the columns of the fit.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Where to write predictions, .csv or .parquet.")] = Path("predictions.csv"),
    quantiles: Annotated[str, typer.Option(help="Levels between 0 and 1, separated by commas.")] = "0.05,0.95",
    exclude: Exclude = "",
    separator: Separator = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Predict the rows of a table: mean, standard deviation and quantiles, or probabilities of classes."""
    from deepwishart.data.tables import FORMATS, read_table, write_table
    from deepwishart.files import load

    check_output(out, force, FORMATS)
    with errors_are_explained():
        estimator = load(model)
        frame = read_table(table, separator)
        left_out = [*estimator.target_names_, *_names(exclude)]
        X = frame.drop(columns=[name for name in left_out if name in frame.columns])
        predictions = estimator.predict_table(X, _levels(quantiles))
        write_table(predictions, out)
    if as_json:
        print_json({"predictions": str(out), "rows": len(predictions), "columns": list(predictions.columns)})
    else:
        console.print(f"Wrote {len(predictions)} predictions to {out}.", markup=False, soft_wrap=True)


@app.command()
def evaluate(
    model: ModelFile, table: TestTable, exclude: Exclude = "", separator: Separator = None, as_json: Json = False
) -> None:
    """Measure a model on rows whose target is known."""
    from deepwishart.report import evaluate as evaluate_estimator

    with errors_are_explained():
        estimator, X, y = _load_with_truth(model, table, exclude, separator)
        found = evaluate_estimator(estimator, X, y)
    if as_json:
        print_json({"model": str(model), "rows": len(X), "metrics": found.metrics})
    else:
        show_metrics([found])


@app.command()
def report(
    model: ModelFile,
    table: TestTable,
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("report.html"),
    train: Annotated[
        Path | None, typer.Option(help="The table of the fit: a linear model and a plain GP are shown beside.")
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page.")] = "Deep Wishart process report",
    exclude: Exclude = "",
    separator: Separator = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write one HTML page with metrics and plots of a model on rows whose target is known."""
    from deepwishart.report import write_report

    check_output(out, force, (".html", ".htm"))
    with errors_are_explained():
        estimator, X, y = _load_with_truth(model, table, exclude, separator)
        rows = None if train is None else _with_truth(estimator, train, exclude, separator)
        evaluations = write_report(estimator, X, y, out, rows, title=title)
    if as_json:
        print_json({"report": str(out), "metrics": {e.name: e.metrics for e in evaluations}})
    else:
        show_metrics(evaluations)
        console.print(f"Wrote {out}.", markup=False, soft_wrap=True)


def _check_resume(checkpoint: Path, resume: bool, force: bool) -> None:
    from deepwishart.estimators.checkpoints import remove_checkpoints

    if resume and not checkpoint.exists():
        fail(f"There is nothing to resume: {checkpoint} does not exist. Check --out.")
    if checkpoint.exists() and not resume:
        if not force:
            fail(f"{checkpoint} holds an unfinished fit. Pass --resume to go on, or --force to start anew.")
        remove_checkpoints(checkpoint)


def make_estimator(method: Method, task: Task, **params: Any) -> Any:
    """The estimator of a method and a task."""
    from deepwishart.estimators import ESTIMATORS

    process = {Method.DGP: "DGP", Method.DIWP: "DIWP"}.get(method, "DWP")
    kind = "Classifier" if task is Task.CLASSIFICATION else "Regressor"
    if process == "DWP":
        params["posterior"] = method.value
    return ESTIMATORS[f"{process}{kind}"](**params)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _levels(text: str) -> list[float]:
    try:
        return [float(level) for level in text.split(",") if level.strip()]
    except ValueError:
        fail(f"--quantiles must be numbers between 0 and 1, separated by commas, got {text!r}.")


def _split(frame: Any, targets: list[str], excluded: list[str]) -> tuple[Any, Any]:
    absent = [name for name in (*targets, *excluded) if name not in frame.columns]
    if absent:
        fail(f"There is no column {absent[0]!r}. The columns are {', '.join(map(str, frame.columns))}.")
    X = frame.drop(columns=[*targets, *excluded])
    if not X.shape[1]:
        fail("No column is left to predict from.")
    return X, frame[targets[0]] if len(targets) == 1 else frame[targets]


def _check_target(y: Any, task: Task) -> tuple[Any, Task]:
    """The target, numbers where they are wanted, and the task that it asks for."""
    import pandas as pd

    from deepwishart.data.encoding import TableEncoder, check_no_gaps, has_categories

    frame = y.to_frame() if y.ndim == 1 else y
    check_no_gaps(frame)
    words = has_categories(frame)
    if task is Task.AUTO:
        task = Task.CLASSIFICATION if words else Task.REGRESSION
        count = frame.iloc[:, 0].nunique()
        if words and count > max(20, len(frame) / 5):
            fail(
                f"The target {frame.columns[0]!r} holds {count} different words such as {frame.iloc[0, 0]!r}, too many "
                f"for classes. Numbers need a decimal point; if they are classes, pass --task classification."
            )
    if task is Task.CLASSIFICATION:
        if y.ndim != 1:
            fail("Classification takes one target.")
        return (y.astype(str) if words else pd.to_numeric(y)), task
    if words:
        fail(f"The target {frame.columns[0]!r} holds words, not numbers. Correct it, or pass --task classification.")
    numbers = TableEncoder.fit(frame).transform(frame)
    return frame.assign(**{name: numbers[:, i] for i, name in enumerate(frame.columns)}).squeeze(axis=1), task


def _load_with_truth(model: Path, table: Path, exclude: str, separator: str | None) -> tuple[Any, Any, Any]:
    from deepwishart.files import load

    estimator = load(model)
    return (estimator, *_with_truth(estimator, table, exclude, separator))


def _with_truth(estimator: Any, table: Path, exclude: str, separator: str | None) -> tuple[Any, Any]:
    from deepwishart.data.encoding import check_no_gaps
    from deepwishart.data.tables import read_table

    frame = read_table(table, separator)
    absent = [name for name in estimator.target_names_ if name not in frame.columns]
    if absent:
        fail(f"{table} has no column {absent[0]!r}, which the model predicts. Use predict for rows without it.")
    X, y = _split(frame, list(estimator.target_names_), [name for name in _names(exclude) if name in frame.columns])
    if hasattr(estimator, "classes_") and estimator.classes_.dtype.kind in "OU":
        check_no_gaps(y.to_frame())
        return X, y.astype(str)  # 01 is a word in this file too, whatever else stands in it
    y, _ = _check_target(y, Task.CLASSIFICATION if hasattr(estimator, "classes_") else Task.REGRESSION)
    return X, y
