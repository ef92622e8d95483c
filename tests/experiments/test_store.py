"""Results are kept once, whatever happens to the processes that make them."""

import multiprocessing
import os
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deepwishart.data.tables import write_table
from deepwishart.experiments.store import COLUMNS, METRICS, Cell, Store, StoreError, read_results

CELL = Cell("yacht", 2, "a-gw", "abc")
CONTEXT = multiprocessing.get_context("spawn")


def row(split: int, elbo: float = 1.0, cell: Cell = CELL) -> dict[str, Any]:
    values = {name: {"TEXT": "x", "INTEGER": 1, "REAL": 0.5}[kind] for name, kind in COLUMNS.items()}
    return {**values, "config": "{}", **cell._asdict(), "split": split, "elbo": elbo}


def test_results_come_back_as_they_went_in(tmp_path: Path) -> None:
    store = Store(tmp_path / "r.sqlite")
    assert store.add([row(1), row(0, 0.1 + 0.2)]) == 2
    frame = Store(store.path).frame()
    assert list(frame.columns) == list(COLUMNS)
    assert frame["split"].tolist() == [0, 1]
    assert frame["elbo"].tolist() == [0.1 + 0.2, 1.0]
    assert store.finished(CELL) == {0, 1}
    assert store.finished(CELL._replace(depth=3)) == set()


def test_a_finished_split_keeps_its_result(tmp_path: Path) -> None:
    store = Store(tmp_path / "r.sqlite")
    store.add([row(0, 1.0)])
    assert store.add([row(0, 2.0), row(1, 3.0)]) == 1
    assert store.frame()["elbo"].tolist() == [1.0, 3.0]


def test_starts_are_kept_once_for_a_set_and_a_recipe(tmp_path: Path) -> None:
    store = Store(tmp_path / "r.sqlite")
    store.add_starts("yacht", "a", {3: [[0.1 + 0.2, 1e-300], 2.0], 0: [[1.0], 1.0]})
    store.add_starts("yacht", "a", {3: [[9.0], 9.0], 1: [[2.0], 2.0]})
    assert Store(store.path).starts("yacht", "a") == {3: [[0.1 + 0.2, 1e-300], 2.0], 0: [[1.0], 1.0], 1: [[2.0], 2.0]}
    assert store.starts("yacht", "b") == store.starts("wine", "a") == {}


def test_claims_are_exclusive_and_end_with_their_block(tmp_path: Path) -> None:
    ours, theirs = Store(tmp_path / "r.sqlite"), Store(tmp_path / "r.sqlite")
    ours.add([row(3)])
    with ours.claim(CELL, range(4)) as mine:
        assert mine == [0, 1, 2]
        assert ours.add([row(1)]) == 1
        with theirs.claim(CELL, range(6)) as rest:
            assert rest == [4, 5]
        with theirs.claim(CELL._replace(method="gw"), [0]) as other:
            assert other == [0]
    with theirs.claim(CELL, range(4)) as mine:
        assert mine == [0, 2]


def test_a_block_that_fails_gives_its_claims_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "r.sqlite")
    with pytest.raises(RuntimeError), store.claim(CELL, [0]):
        raise RuntimeError
    with Store(store.path).claim(CELL, [0]) as mine:
        assert mine == [0]


def hold(path: Path) -> None:
    with Store(path).claim(CELL, [0, 1]):
        (path.parent / "held").touch()
        time.sleep(60)


def test_claims_of_a_process_that_was_killed_are_free_at_once(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    process = CONTEXT.Process(target=hold, args=(path,))
    process.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.05)
    with Store(path).claim(CELL, [0, 1, 2]) as mine:
        assert mine == [2]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with Store(path).claim(CELL, [0, 1, 2]) as mine:
        assert mine == [0, 1, 2]


def test_claims_of_another_machine_end_with_its_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far, near = Store(tmp_path / "r.sqlite"), Store(tmp_path / "r.sqlite")
    far.worker = "elsewhere:1:x"
    with far.claim(CELL, [0]):
        with near.claim(CELL, [0]) as mine:
            assert mine == []
        later = time.time() + 121
        monkeypatch.setattr(time, "time", lambda: later)
        with near.claim(CELL, [0]) as mine:
            assert mine == [0]


def test_signs_of_life_keep_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepwishart.experiments.store._BEAT_SECONDS", 0.02)
    monkeypatch.setattr("deepwishart.experiments.store._STALE_SECONDS", 0.5)
    far, near = Store(tmp_path / "r.sqlite"), Store(tmp_path / "r.sqlite")
    far.worker = "elsewhere:1:x"
    with far.claim(CELL, [0]):
        time.sleep(1)
        with near.claim(CELL, [0]) as mine:
            assert mine == []


def work(path: Path, log: Path) -> None:
    store = Store(path)
    for depth in range(2, 8):
        cell = CELL._replace(depth=depth)
        with store.claim(cell, range(5)) as mine:
            if mine:
                time.sleep(0.02)
                with log.open("a") as file:
                    file.write("".join(f"{depth} {split}\n" for split in mine))
                store.add([row(split, cell=cell) for split in mine])


def test_processes_share_the_work_and_do_nothing_twice(tmp_path: Path) -> None:
    path, log = tmp_path / "r.sqlite", tmp_path / "log"
    processes = [CONTEXT.Process(target=work, args=(path, log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    done = log.read_text().splitlines()
    assert sorted(done) == sorted(f"{depth} {split}" for depth in range(2, 8) for split in range(5))
    assert len(Store(path).frame()) == 30


def test_of_many_that_claim_at_one_moment_one_gets_it(tmp_path: Path) -> None:
    path, workers, rounds = tmp_path / "r.sqlite", 4, 25
    Store(path)
    barrier, lock = threading.Barrier(workers), threading.Lock()
    won: list[int] = []

    def claim(store: Store) -> None:
        for depth in range(rounds):
            barrier.wait()
            with store.claim(CELL._replace(depth=depth), [0]) as mine:
                with lock:
                    won.extend(depth for _ in mine)
                barrier.wait()

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(claim, Store(path)) for _ in range(workers)]:
            future.result(timeout=60)
    assert sorted(won) == list(range(rounds))


@pytest.mark.parametrize("name", ["r.csv", "r.parquet"])
def test_an_export_reads_back(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / "r.sqlite")
    store.add([row(0, 1 / 3), row(1)])
    write_table(store.frame(), tmp_path / name)
    back = read_results(tmp_path / name)
    assert back[list(METRICS)].equals(store.frame()[list(METRICS)])
    assert Store(tmp_path / "s.sqlite").add(back.to_dict("records")) == 2


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        read_results(tmp_path / "none.sqlite")
    (tmp_path / "words.sqlite").write_text("no database, but words " * 10)
    with pytest.raises(StoreError, match="not a database"):
        Store(tmp_path / "words.sqlite")
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE results (a, b)")
    other.close()
    with pytest.raises(StoreError, match="other columns"):
        Store(tmp_path / "other.sqlite")
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(StoreError, match="no column dataset"):
        read_results(tmp_path / "a.csv")
    with pytest.raises(StoreError, match="cannot be used"):
        Store(tmp_path / "no_folder" / "r.sqlite")


@pytest.mark.parametrize(("column", "value"), [("config", ""), ("config", "{"), ("depth", "two"), ("elbo", "high")])
def test_a_damaged_export_is_refused(tmp_path: Path, column: str, value: str) -> None:
    store = Store(tmp_path / "r.sqlite")
    store.add([row(0)])
    write_table(store.frame().astype(object).assign(**{column: value}), tmp_path / "r.csv")
    with pytest.raises(StoreError, match="is no export of results"):
        read_results(tmp_path / "r.csv")
