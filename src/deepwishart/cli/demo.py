"""demo: from a table to calibrated predictions in a minute or two."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from deepwishart.cli.app import Force, app, check_output, console, errors_are_explained, show_metrics

__all__ = ["demo"]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("report.html"),
    model: Annotated[Path, typer.Option(help="Where to write the model.")] = Path("diabetes.safetensors"),
    steps: Annotated[int, typer.Option(min=1, help="Steps of training at most.")] = 700,
    seed: Annotated[int, typer.Option(help="Seed of the split and of the fits.")] = 0,
    force: Force = False,
) -> None:
    """Fit a deep Wishart process to scikit-learn's diabetes data, beside a deep GP, a plain GP and a linear model."""
    check_output(out, force, (".html", ".htm"))
    check_output(model, force, (".safetensors",))
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import train_test_split

    from deepwishart.estimators import DGPRegressor, DWPRegressor
    from deepwishart.report import evaluate, write_report

    X, y = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, random_state=seed)
    console.print(
        f"Diabetes progression of {len(X)} patients from {X.shape[1]} columns; {len(X_test)} patients held out."
    )
    params: dict[str, Any] = {"num_steps": steps, "random_state": seed, "verbose": console.is_terminal}
    with errors_are_explained():
        dgp, _ = _fit(DGPRegressor(**params), X_train, y_train)
        dwp, seconds = _fit(DWPRegressor(**params), X_train, y_train)
        others = [evaluate(dgp, X_test, y_test)]
        title = "Diabetes progression: a deep Wishart process"
        evaluations = write_report(dwp, X_test, y_test, out, (X_train, y_train), others, title)
        dwp.save(model)
    show_metrics(evaluations)
    mean, std = dwp.predict(X_test.iloc[:1], return_std=True)
    console.print(
        f"The first patient: predicted {mean[0]:.0f} ± {std[0]:.0f}, in truth {y_test.iloc[0]:.0f}.", markup=False
    )
    console.print(f"Fitted in {seconds:.0f} s. Wrote {out} and {model}.", markup=False, soft_wrap=True)


def _fit(estimator: Any, X: Any, y: Any) -> tuple[Any, float]:
    begun = time.perf_counter()
    estimator.fit(X, y)
    return estimator, time.perf_counter() - begun
