"""Files with every kind of trouble: what the user reads."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from deepwishart.data import TableError, read_table, write_table


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".parquet"])
def test_what_is_written_is_read(tmp_path: Path, ending: str) -> None:
    table = pd.DataFrame({"a": [1.5, np.nan], "b, c": ["x", "ü"], "0": [1, 2]})
    path = tmp_path / f"table{ending}"
    write_table(table, path)
    found = read_table(path)
    assert found["b, c"].tolist() == ["x", "ü"]
    found = found.assign(**{name: pd.to_numeric(found[name]) for name in ("a", "0")})
    pd.testing.assert_frame_equal(found, table, check_dtype=False)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty. It needs a header"),
        (b"a,b\n", "has a header but no rows"),
        (b"a,b\n1,2\n3\n", "has 1 values in line 3, but 2 columns"),
        (b"a,b\n1,2\n3,4,5\n", "has 3 values in line 3, but 2 columns"),
        (b"a;b\n1;2\n", "separated by a semicolon. Pass --separator ';'"),
        (b"a\tb\n1\t2\n", "separated by a tab"),
        ("a,größe\n1,2\n".encode("latin1"), "is not UTF-8 text .at byte 4.*iconv"),
        (b"a,a\n1,2\n", "several columns named a"),
        (b'a,b\n1,"2\n', "line|CSV"),
    ],
)
def test_trouble_in_a_csv_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(TableError, match=message):
        read_table(path)


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "no.csv", "does not exist"),
        (tmp_path, "is a folder"),
        (tmp_path / "a.xlsx", "must end in"),
        (tmp_path / "bad.parquet", "cannot be read as Parquet"),
    ):
        if message not in ("does not exist", "is a folder"):
            path.write_bytes(b"nonsense")
        with pytest.raises(TableError, match=message):
            read_table(path)


def test_a_separator_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes("\ufeffa; b\n1; 2\n\n3;4\n".encode())
    table = read_table(path, ";")
    assert list(table.columns) == ["a", "b"]
    assert table["b"].tolist() == ["2", "4"]  # text: 01 is not 1


def test_a_tab_may_be_written_as_a_shell_passes_it(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"a\tb\n01\t2\n")
    assert read_table(path, r"\t")["a"].tolist() == ["01"]
    with pytest.raises(TableError, match="one character"):
        read_table(path, "::")


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.csv"
    path.write_text("precious")

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(pd.DataFrame, "to_csv", fail)
    with pytest.raises(OSError, match="disk full"):
        write_table(pd.DataFrame({"a": [1]}), path)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TableError, match="must end in"):
        write_table(pd.DataFrame({"a": [1]}), tmp_path / "table.txt")
