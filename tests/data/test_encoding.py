"""Tables become matrices the same way every time, and trouble is named."""

import datetime
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

from deepwishart.data import Scaler, TableEncoder, TableError, merge_rows
from deepwishart.estimators import DWPRegressor

TABLE = pd.DataFrame(
    {"size": [1.0, 2.5, 4.0, 4.0], "colour": ["red", "blue", "red", "green"], "new": [True, False, True, True]}
)


def test_numbers_stay_and_categories_become_one_hot() -> None:
    encoder = TableEncoder.fit(TABLE)
    assert encoder.feature_names == ["size", "colour=blue", "colour=green", "colour=red", "new"]
    expected = [[1, 0, 0, 1, 1], [2.5, 1, 0, 0, 0], [4, 0, 0, 1, 1], [4, 0, 1, 0, 1]]
    np.testing.assert_array_equal(encoder.transform(TABLE), expected)
    again = TableEncoder.from_record(encoder.to_record())
    np.testing.assert_array_equal(again.transform(TABLE), expected)


def test_numbers_written_as_text_are_numbers() -> None:
    encoder = TableEncoder.fit(pd.DataFrame({"a": ["1", "2.5"]}))
    np.testing.assert_array_equal(encoder.transform(pd.DataFrame({"a": ["3", "4"]})), [[3], [4]])


def test_imputation_takes_the_median_and_the_most_frequent() -> None:
    encoder = TableEncoder.fit(TABLE, "impute")
    gaps = pd.DataFrame({"size": [np.nan], "colour": [None], "new": [None]})
    np.testing.assert_array_equal(encoder.transform(gaps), [[3.25, 0, 0, 1, 1]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": [1.0, np.nan, 2.0, np.nan]}, "Column 'size' has no value in 2 rows: 2, 4.*impute"),
        ({"size": [1.0, np.inf, 2.0, 3.0]}, "Column 'size' is infinite in row 2"),
        ({"size": ["1", "two", "3", "4"]}, "Column 'size' should hold numbers, but has 'two' in row 2"),
        (
            {"colour": ["red", "pink", "red", "red"]},
            "value 'pink' in row 2, which the model has never seen. It knows blue",
        ),
        ({"weight": [1, 2, 3, 4]}, "not known: weight"),
    ],
)
def test_trouble_is_named(change: dict[str, list[object]], message: str) -> None:
    encoder = TableEncoder.fit(TABLE)
    with pytest.raises(TableError, match=message):
        encoder.transform(TABLE.assign(**change))


def test_columns_are_checked() -> None:
    encoder = TableEncoder.fit(TABLE)
    with pytest.raises(TableError, match="missing: colour"):
        encoder.transform(TABLE.drop(columns="colour"))
    with pytest.raises(TableError, match="another order"):
        encoder.transform(TABLE[["new", "size", "colour"]])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([None, None], "has no values"),
        (pd.to_datetime(["2020-01-01", "2020-01-02"]), "holds dates"),
        ([datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)], "holds dates"),
        (["1", "2", "?", "4", "?"], r"Column 'a' holds numbers, but '\?' in 2 rows: 3, 5. Correct it"),
        ([f"name {i}" for i in range(1_200)], "too many for categories"),
    ],
)
def test_columns_that_cannot_be_used_are_refused(column: list[object], message: str) -> None:
    with pytest.raises(TableError, match=message):
        TableEncoder.fit(pd.DataFrame({"a": column}))


def test_a_table_must_not_become_too_wide() -> None:
    words = [f"w{i}" for i in range(900)]
    with pytest.raises(TableError, match="becomes 10800 columns"):
        TableEncoder.fit(pd.DataFrame({f"c{k}": words for k in range(12)}))


def test_columns_without_names_go_by_their_place() -> None:
    X, y = np.random.RandomState(0).randn(30, 2), np.arange(30.0)
    model = DWPRegressor(num_steps=2, num_inducing=5, random_state=0).fit(pd.DataFrame(X), y)
    np.testing.assert_array_equal(model.predict(X), model.predict(pd.DataFrame(X)))
    named = pd.DataFrame(X, columns=["a", "b"])
    with pytest.warns(UserWarning, match="without feature names"):
        np.testing.assert_array_equal(model.predict(named), model.predict(X))


def test_missing_must_be_known() -> None:
    with pytest.raises(ValueError, match="missing must be"):
        TableEncoder.fit(TABLE, "drop")  # type: ignore[arg-type]


def test_frames_of_every_kind_give_the_same_model() -> None:
    rng = np.random.RandomState(0)
    frame = pd.DataFrame({"a": rng.randn(40), "b": rng.choice(["u", "v"], 40)})
    y = frame["a"] + (frame["b"] == "u")
    quick: dict[str, Any] = {"num_steps": 5, "num_inducing": 10, "random_state": 0}
    first = DWPRegressor(**quick).fit(frame, y)
    second = DWPRegressor(**quick).fit(pl.DataFrame(frame.to_dict("list")), y.to_numpy())
    np.testing.assert_array_equal(first.predict(frame), second.predict(pl.DataFrame(frame.to_dict("list"))))
    with pytest.raises(TableError, match="data frame with categories"):
        first.predict(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="unseen at fit time"):
        first.predict(frame.rename(columns={"a": "z"}))


def test_scalers_go_forth_and_back() -> None:
    values = np.random.RandomState(0).randn(50, 3) * [1, 100, 0] + [0, 5, 1e8 / 3]
    scaler = Scaler.fit(values)
    standard = scaler.forward(values)
    np.testing.assert_allclose(standard[:, :2].std(0), 1)
    assert scaler.scale[2] == 1
    np.testing.assert_allclose(scaler.backward(standard), values)


def test_rows_are_merged_whatever_their_order() -> None:
    X, Y = np.array([[1.0], [0.0], [1.0], [5.0]]), np.array([[2.0], [3.0], [2.0], [9.0]])
    merged, targets, weights = merge_rows(X, Y, np.array([1.0, 1.0, 0.5, 0.0]))
    np.testing.assert_array_equal(merged, [[0], [1]])
    np.testing.assert_array_equal(targets, [[3], [2]])
    np.testing.assert_array_equal(weights, [1, 1.5])
    assert merge_rows(X[:2], Y[:2])[2] is None
