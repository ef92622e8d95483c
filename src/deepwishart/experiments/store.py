"""Results of experiments in one SQLite file, which several processes may share."""

import json
import os
import socket
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

__all__ = ["COLUMNS", "KEY", "METRICS", "Cell", "Store", "StoreError", "read_results"]

METRICS = ("elbo", "log_likelihood", "rmse", "crps", "coverage")
KEY = ("dataset", "depth", "method", "split", "config_hash")
COLUMNS = {
    "dataset": "TEXT",
    "depth": "INTEGER",
    "method": "TEXT",
    "split": "INTEGER",
    "config_hash": "TEXT",
    "config": "TEXT",
    "trained_with": "TEXT",
    **dict.fromkeys(METRICS, "REAL"),
    "steps": "INTEGER",
    "recoveries": "INTEGER",
    "retired": "INTEGER",
    "ms_per_step": "REAL",
    "deepwishart": "TEXT",
    "torch": "TEXT",
    "python": "TEXT",
    "machine": "TEXT",
    "finished": "TEXT",
}
_STALE_SECONDS, _BEAT_SECONDS = 120.0, 20.0


class StoreError(ValueError):
    """A file that is no store of results, or cannot be one."""


class Cell(NamedTuple):
    """A cell of the paper's tables, under a recipe."""

    dataset: str
    depth: int
    method: str
    config_hash: str


class Store:
    """Finished splits, a row each, and who is at work on which others.

    A connection lives as long as one statement or transaction: nothing is held while a model trains, and a process
    that dies leaves no lock behind. What it had claimed is free again as soon as its death is seen: at once on the
    same machine, and from another after two minutes without a sign of life.

    Args:
        path: The file, made if it is not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.worker = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        key = ", ".join(KEY)
        columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
        claimed = ", ".join(f"{name} {COLUMNS[name]}" for name in KEY)
        with self._transaction() as db:
            db.execute(f"CREATE TABLE IF NOT EXISTS results ({columns}, PRIMARY KEY ({key}))")
            db.execute(f"CREATE TABLE IF NOT EXISTS claims ({claimed}, worker TEXT, seen REAL, PRIMARY KEY ({key}))")
            db.execute(
                "CREATE TABLE IF NOT EXISTS starts "
                "(dataset TEXT, split INTEGER, recipe TEXT, start TEXT, PRIMARY KEY (dataset, split, recipe))"
            )
            present = [row[1] for row in db.execute("PRAGMA table_info(results)")]
            if present != list(COLUMNS):
                raise StoreError(f"{self.path} has other columns than this version writes. Use another file.")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A connection that holds the write lock, and commits at the end or not at all."""
        try:
            with closing(sqlite3.connect(self.path, timeout=60, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")
                try:
                    yield db
                except BaseException:
                    db.execute("ROLLBACK")
                    raise
                db.execute("COMMIT")
        except sqlite3.Error as error:
            raise StoreError(f"{self.path} cannot be used as a store of results: {error}.") from error

    # Results

    def finished(self, cell: Cell) -> set[int]:
        """Splits of a cell that have results."""
        with self._transaction() as db:
            return self._finished(db, cell)

    @staticmethod
    def _finished(db: sqlite3.Connection, cell: Cell) -> set[int]:
        rows = db.execute(f"SELECT split FROM results WHERE {_of_cell()}", cell)
        return {split for (split,) in rows}

    def add(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Add results; a split that has some keeps them. The number that were new."""
        names = ", ".join(COLUMNS)
        marks = ", ".join("?" * len(COLUMNS))
        new = 0
        with self._transaction() as db:
            for row in rows:
                values = [row[name] for name in COLUMNS]
                new += db.execute(f"INSERT OR IGNORE INTO results ({names}) VALUES ({marks})", values).rowcount
                db.execute(f"DELETE FROM claims WHERE {_of_cell()} AND split = ?", (*_cell(row), row["split"]))
        return new

    def frame(self) -> pd.DataFrame:
        """All results, sorted."""
        order = ", ".join(KEY)
        with self._transaction() as db:
            rows = db.execute(f"SELECT {', '.join(COLUMNS)} FROM results ORDER BY {order}").fetchall()
        return pd.DataFrame(rows, columns=list(COLUMNS))

    # Where models begin

    def starts(self, dataset: str, recipe: str) -> dict[int, Any]:
        """What was kept for the splits of a set."""
        with self._transaction() as db:
            rows = db.execute("SELECT split, start FROM starts WHERE dataset = ? AND recipe = ?", (dataset, recipe))
            return {split: json.loads(start) for split, start in rows}

    def add_starts(self, dataset: str, recipe: str, starts: Mapping[int, Any]) -> None:
        """Keep what takes long to find and is the same for all depths and methods; what is there already, stays.

        Args:
            dataset: The set.
            recipe: How they were found.
            starts: By split, of numbers and lists and dictionaries of them.
        """
        rows = [(dataset, split, recipe, json.dumps(start)) for split, start in starts.items()]
        with self._transaction() as db:
            db.executemany("INSERT OR IGNORE INTO starts VALUES (?, ?, ?, ?)", rows)

    # Claims

    @contextmanager
    def claim(self, cell: Cell, splits: Sequence[int]) -> Iterator[list[int]]:
        """Those of the splits that nobody has finished or is at work on: ours until the end of the block."""
        with self._transaction() as db:
            taken = self._finished(db, cell) | self._claimed(db, cell)
            mine = [split for split in splits if split not in taken]
            now = time.time()
            marks = ", ".join("?" * (len(KEY) + 2))
            db.executemany(
                f"INSERT OR REPLACE INTO claims ({', '.join(KEY)}, worker, seen) VALUES ({marks})",
                [(*cell[:3], split, cell.config_hash, self.worker, now) for split in mine],
            )
        stop = threading.Event()
        heart = threading.Thread(target=self._beat, args=(stop,), daemon=True)
        heart.start()
        try:
            yield mine
        finally:
            stop.set()
            heart.join()
            with self._transaction() as db:
                db.execute(f"DELETE FROM claims WHERE {_of_cell()} AND worker = ?", (*cell, self.worker))

    def _claimed(self, db: sqlite3.Connection, cell: Cell) -> set[int]:
        """Splits that a living process is at work on."""
        rows = db.execute(f"SELECT split, worker, seen FROM claims WHERE {_of_cell()}", cell)
        return {split for split, worker, seen in rows if time.time() - seen < _STALE_SECONDS and _may_live(worker)}

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(_BEAT_SECONDS):
            # A beat that is missed for want of the lock does not matter: the next one counts.
            with suppress(StoreError), self._transaction() as db:
                db.execute("UPDATE claims SET seen = ? WHERE worker = ?", (time.time(), self.worker))


def _of_cell() -> str:
    return " AND ".join(f"{name} = ?" for name in Cell._fields)


def _cell(row: Mapping[str, Any]) -> Cell:
    return Cell(*(row[name] for name in Cell._fields))


def _may_live(worker: str) -> bool:
    """False if the process was on this machine and is gone."""
    host, pid, _ = worker.rsplit(":", 2)
    if host != socket.gethostname():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def read_results(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Results of a store, or of a table that was exported from one (CSV or Parquet)."""
    path = Path(path)
    if not path.exists():
        raise StoreError(f"{path} does not exist. Run deepwishart reproduce uci first, or name another file.")
    if path.suffix.lower() not in (".csv", ".parquet"):
        return Store(path).frame()
    from deepwishart.data.tables import read_table

    table = read_table(path)
    missing = [name for name in COLUMNS if name not in table]
    if missing:
        raise StoreError(f"{path} is no export of results: it has no column {', '.join(missing)}.")
    kinds = {"INTEGER": "int64", "REAL": "float64"}
    numbers = {name: kinds[kind] for name, kind in COLUMNS.items() if kind in kinds}
    try:
        table = table[list(COLUMNS)].astype(numbers)
        table["config"].map(json.loads)
    except (TypeError, ValueError) as error:  # a missing recipe is no text at all
        raise StoreError(f"{path} is no export of results: {error}.") from error
    return table
