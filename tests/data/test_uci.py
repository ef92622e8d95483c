"""The nine sets: found, fetched from a server of our own, and refused when they are not what they should be."""

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepwishart.data import TableError, uci

FILES = {
    "data.txt": "1 2 3\n4 5 6\n7 8 9\n",
    "index_features.txt": "0\n1\n",
    "index_target.txt": "2\n",
    "index_train_0.txt": "0.0\n2.0\n",
    "index_test_0.txt": "1.0\n",
}


class Handler(SimpleHTTPRequestHandler):
    cut = False

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not Handler.cut:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"1 2")
        self.close_connection = True


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is served as the public repository, with a small set for yacht."""
    served = tmp_path / "served" / "yacht" / "data"
    served.mkdir(parents=True)
    for name, content in FILES.items():
        (served / name).write_text(content)
    Handler.cut = False
    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "served")))
    threading.Thread(target=http.serve_forever, daemon=True).start()
    monkeypatch.setenv("DEEPWISHART_DATA_URL", f"http://127.0.0.1:{http.server_port}")
    digests = {f"yacht/{name}": hashlib.sha256(text.encode()).hexdigest() for name, text in FILES.items()}
    monkeypatch.setattr(uci, "_registry", lambda: digests)
    yield served
    http.shutdown()
    http.server_close()


def test_a_set_is_fetched_once(server: Path, tmp_path: Path) -> None:
    split = uci.load_split("yacht", 0, tmp_path / "cache")
    np.testing.assert_array_equal(split.X_train, [[1, 2], [7, 8]])
    np.testing.assert_array_equal(split.y_test, [6])
    for file in server.iterdir():
        file.unlink()  # offline
    assert uci.load_split("yacht", 0, tmp_path / "cache").y_test[0] == 6
    assert uci.fetch("yacht", tmp_path / "cache", check=True).name == "yacht"


def test_faults_leave_nothing_behind(server: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (server / "data.txt").write_text("9 9 9\n")
    with pytest.raises(TableError, match=r"data.txt could not be fetched.*--data-dir"):
        uci.fetch("yacht", cache)
    (server / "data.txt").unlink()
    with pytest.raises(TableError, match="404"):
        uci.fetch("yacht", cache)
    Handler.cut = True
    with pytest.raises(TableError, match="could not be fetched"):
        uci.fetch("yacht", cache)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_an_altered_file_is_noticed(server: Path, tmp_path: Path) -> None:
    folder = uci.fetch("yacht", tmp_path / "cache")
    (folder / "data.txt").write_text("1 2 4\n")
    with pytest.raises(TableError, match="not the file that it should be"):
        uci.fetch("yacht", tmp_path / "cache", check=True)


def test_names_and_splits_are_checked(server: Path, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"no set 'mars'. Choose one of boston"):
        uci.fetch("mars", tmp_path)
    with pytest.raises(TableError, match="splits 0 to 19, got 20"):
        uci.load_split("yacht", 20, tmp_path / "cache")


def test_where_sets_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DEEPWISHART_DATA", raising=False)
    assert uci.find_folder("here") == Path("here")
    assert uci.find_folder().name == "uci"
    monkeypatch.setenv("DEEPWISHART_DATA", "there")
    assert uci.find_folder() == Path("there")


def test_the_registry_lists_every_file() -> None:
    for name, info in uci.UCI.items():
        assert len(list(uci._files(name))) == 4 + 2 * info.splits, name


def test_the_real_sets_have_their_sizes(uci_folder: Path) -> None:
    for name, info in uci.UCI.items():
        uci.fetch(name, uci_folder, check=True)
        X, y = uci.load_table(name, uci_folder)
        assert (X.shape, len(y)) == ((info.rows, info.features), info.rows)
