"""Untouched defaults on UCI splits, beside scikit-learn's exact GP with an ARD kernel.

    python benchmarks/defaults.py --out FILE.jsonl [--sets yacht,boston] [--splits 0-4] [--no-gp]

A row for each fit is appended to the file, and rows that are there are not made again. Prints means over splits:
log-likelihood, RMSE and CRPS in the data's units, share of test rows in their 90 % intervals, seconds of a fit.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from deepwishart import DWPRegressor
from deepwishart.data.uci import UCI, Split, load_split
from deepwishart.metrics import coverage, crps_gaussian, gaussian_log_likelihood, rmse

GP_UP_TO = 2_000  # rows: an exact GP of more takes hours
METRICS = ("ll", "rmse", "crps", "coverage", "seconds")


def fit_ours(split: Split) -> dict[str, Any]:
    begun = time.perf_counter()
    model = DWPRegressor(random_state=0).fit(split.X_train, split.y_train)
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
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        gp.fit(split.X_train, split.y_train)
    seconds = time.perf_counter() - begun
    mean, std = gp.predict(split.X_test, return_std=True)
    return {
        "ll": gaussian_log_likelihood(split.y_test, mean, std),
        "rmse": rmse(split.y_test, mean),
        "crps": crps_gaussian(split.y_test, mean, std),
        "coverage": coverage(split.y_test, mean - 1.6448536 * std, mean + 1.6448536 * std),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(UCI))
    parser.add_argument("--splits", default="0-4")
    parser.add_argument("--no-gp", action="store_true")
    arguments = parser.parse_args()
    first, last = (int(k) for k in arguments.splits.split("-"))
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    done = {(row["set"], row["split"], row["method"]) for row in rows}
    for name in arguments.sets.split(","):
        for k in range(first, last + 1):
            split = load_split(name, k)
            for method, fit in (("gp", fit_gp), ("dwp", fit_ours)):
                if (name, k, method) in done or (method == "gp" and (arguments.no_gp or len(split.X_train) > GP_UP_TO)):
                    continue
                row = {"set": name, "split": k, "method": method, **fit(split)}
                rows.append(row)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        report(name, rows)


def report(name: str, rows: list[dict[str, Any]]) -> None:
    for method in ("gp", "dwp"):
        chosen = [row for row in rows if row["set"] == name and row["method"] == method]
        if chosen:
            means = "  ".join(f"{metric} {np.mean([row[metric] for row in chosen]):.4f}" for metric in METRICS)
            print(f"{name:9} {method:4} {len(chosen)} splits  {means}", flush=True)


if __name__ == "__main__":
    main()
