"""Untouched defaults on UCI splits, beside what a practitioner would use instead.

    python benchmarks/peers.py --out FILE.jsonl [--sets yacht,boston] [--splits 0-4] [--methods dwp,gp,ngboost,boosting]

dwp       DWPRegressor(random_state=0), nothing else set; dwp-350 and the like have so many steps at most
gp        scikit-learn's exact GP: ConstantKernel() * RBF(ones) + WhiteKernel(), standardised; in a larger set, the
          kernel is learned from 2,000 rows, and the GP has 12,000 at most
ngboost   NGBoost with up to 2,000 trees, stopped early by a tenth of the training rows; install it beside, with the
          older pandas that it asks for: pip install ngboost
boosting  scikit-learn's HistGradientBoostingRegressor, with the spread of its out-of-fold residuals for a normal's

A row for each fit is appended to the file, and rows that are there are not made again. Prints means over splits:
log-likelihood, RMSE and CRPS in the data's units, share of test rows in their 90 % intervals, seconds of a fit.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import cross_val_predict, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from deepwishart import DWPRegressor
from deepwishart.data.uci import UCI, Split, load_split
from deepwishart.metrics import coverage, crps_gaussian, gaussian_log_likelihood, rmse

KERNEL_UP_TO = 2_000  # rows from which a GP's kernel is learned: with more, it takes hours
GP_UP_TO = 12_000  # rows of a GP: 1.2 GB for each matrix of all pairs
METRICS = ("ll", "rmse", "crps", "coverage", "seconds")


def fit_ours(split: Split, **options: Any) -> dict[str, Any]:
    begun = time.perf_counter()
    model = DWPRegressor(random_state=0, **options).fit(split.X_train, split.y_train)
    seconds = time.perf_counter() - begun
    mean = model.predict(split.X_test)
    lower, upper = model.predict_quantiles(split.X_test, (0.05, 0.95)).T
    return {
        "ll": model.log_likelihood(split.X_test, split.y_test),
        "rmse": rmse(split.y_test, mean),
        "crps": model.crps(split.X_test, split.y_test),
        "coverage": coverage(split.y_test, lower, upper),
        "seconds": seconds,
        "steps": model.n_iter_,
        "inducing": model.model_.inducing_inputs.shape[-2],
        "elbo": model.elbo_,
    }


def fit_gp(split: Split) -> dict[str, Any]:
    kernel = ConstantKernel() * RBF(np.ones(split.X_train.shape[1])) + WhiteKernel()
    gp = make_pipeline(StandardScaler(), GaussianProcessRegressor(kernel, normalize_y=True, random_state=0))
    rows = np.random.default_rng(0).permutation(len(split.y_train))
    learned, held = rows[:KERNEL_UP_TO], rows[:GP_UP_TO]
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        gp.fit(split.X_train[learned], split.y_train[learned])
    if len(held) > len(learned):
        gp[-1].set_params(kernel=gp[-1].kernel_, optimizer=None)
        gp.fit(split.X_train[held], split.y_train[held])
    seconds = time.perf_counter() - begun
    mean, std = gp.predict(split.X_test, return_std=True)
    return of_normals(split, mean, std, seconds)


def fit_ngboost(split: Split) -> dict[str, Any]:
    from ngboost import NGBRegressor

    begun = time.perf_counter()
    X, X_held, y, y_held = train_test_split(split.X_train, split.y_train, test_size=0.1, random_state=0)
    model = NGBRegressor(n_estimators=2_000, random_state=0, verbose=False)
    model.fit(X, y, X_val=X_held, Y_val=y_held, early_stopping_rounds=50)
    seconds = time.perf_counter() - begun
    predicted = model.pred_dist(split.X_test, max_iter=model.best_val_loss_itr)
    return of_normals(split, predicted.loc, predicted.scale, seconds)


def fit_boosting(split: Split) -> dict[str, Any]:
    begun = time.perf_counter()
    model = HistGradientBoostingRegressor(random_state=0)
    residuals = split.y_train - cross_val_predict(model, split.X_train, split.y_train, cv=5)
    model.fit(split.X_train, split.y_train)
    seconds = time.perf_counter() - begun
    spread = math.sqrt(np.mean(residuals**2))
    return of_normals(split, model.predict(split.X_test), np.full(len(split.y_test), spread), seconds)


def of_normals(split: Split, mean: np.ndarray, std: np.ndarray, seconds: float) -> dict[str, Any]:
    return {
        "ll": gaussian_log_likelihood(split.y_test, mean, std),
        "rmse": rmse(split.y_test, mean),
        "crps": crps_gaussian(split.y_test, mean, std),
        "coverage": coverage(split.y_test, mean - 1.6448536 * std, mean + 1.6448536 * std),
        "seconds": seconds,
    }


FITS: dict[str, Callable[..., dict[str, Any]]] = {
    "dwp": fit_ours,
    "gp": fit_gp,
    "ngboost": fit_ngboost,
    "boosting": fit_boosting,
}


def fit(method: str, split: Split) -> dict[str, Any]:
    kind, _, steps = method.partition("-")
    return FITS[kind](split, **({"num_steps": int(steps)} if steps else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(UCI))
    parser.add_argument("--splits", default="0-4")
    parser.add_argument("--methods", default=",".join(FITS))
    arguments = parser.parse_args()
    first, _, last = arguments.splits.partition("-")
    methods = arguments.methods.split(",")
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    done = {(row["set"], row["split"], row["method"]) for row in rows}
    for name in arguments.sets.split(","):
        for k in range(int(first), min(int(last or first) + 1, UCI[name].splits)):
            split = load_split(name, k)
            for method in methods:
                if (name, k, method) in done:
                    continue
                row = {"set": name, "split": k, "method": method, **fit(method, split)}
                rows.append(row)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        report(name, rows, methods)


def report(name: str, rows: list[dict[str, Any]], methods: list[str]) -> None:
    for method in methods:
        chosen = [row for row in rows if row["set"] == name and row["method"] == method]
        if chosen:
            means = "  ".join(f"{metric} {np.mean([row[metric] for row in chosen]):.4f}" for metric in METRICS)
            print(f"{name:9} {method:8} {len(chosen):2} splits  {means}", flush=True)


if __name__ == "__main__":
    main()
