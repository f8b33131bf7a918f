"""Finds and reads the data of a benchmark: a local folder in the layout of the hub dataset, or the hub itself.

What cannot be found, read or used is a ValueError that names the file.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any

import pandas as pd
from huggingface_hub import snapshot_download

DATA_VARIABLE = "MTEB_FAIR_DATA"
"""The environment variable that names the folder with one folder per dataset, such as ``PosIR``."""
_ENDINGS = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz")
_OTHER_DATA = (".arrow", ".bz2", ".csv", ".gz", ".tsv", ".xz", ".zip", ".zst")
_NO_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # written by `datasets`
_EXPECTED = f"expected files that end in {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}"


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """Where the data of a benchmark come from.

    Attributes:
        name: The name of its folder in the one that the environment variable ``MTEB_FAIR_DATA`` names.
        repository: Its name on the hub.
        revision: The commit or branch that is read from the hub.
        patterns: The files to download.
        url: The paper.
    """

    name: str
    repository: str
    revision: str
    patterns: tuple[str, ...] = ("*.parquet", "*.jsonl")
    url: str


def local_folder(dataset: str) -> Path | None:
    """Returns the folder of a dataset in the one that the environment variable names, or None for the hub."""
    root = os.environ.get(DATA_VARIABLE)
    if not root:
        return None
    if not Path(root).is_dir():
        raise ValueError(f"{DATA_VARIABLE}: there is no folder {root!r}; unset the variable to use the hub")
    folder = Path(root) / dataset
    return folder if folder.is_dir() else None


def hub_folder(repository: str, revision: str, patterns: Sequence[str]) -> Path:
    """Returns the folder of a dataset of the hub; files that match ``patterns`` are downloaded first."""
    try:
        return Path(
            snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=list(patterns))
        )
    except Exception as error:  # the hub raises OSErrors, ValueErrors and errors of its HTTP client
        raise ValueError(
            f"{repository}: the dataset is not in the cache and could not be downloaded ({type(error).__name__}: "
            f"{error}); give a local copy as data_folder, or in the folder that {DATA_VARIABLE} names"
        ) from error


def data_files(folder: Path) -> list[Path]:
    """Returns the data files (Parquet or JSON Lines, also gzipped) in and below a folder, in a fixed order.

    Hidden files and folders, and files that hold no data, such as a README, are left out.

    Raises:
        ValueError: A file holds data in another format.
    """
    paths = [path for path in folder.rglob("*") if path.is_file()]
    shown = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    found = sorted(path for path in shown if path.name.endswith(_ENDINGS) and path.name not in _NO_DATA)
    if others := sorted(path for path in shown if path.suffix in _OTHER_DATA and path not in found):
        raise ValueError(f"{others[0]}: {_EXPECTED}; convert it, or remove it from the folder")
    return found


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Reads a Parquet or JSON Lines file as a list of rows with these columns."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; expected the columns {list(columns)} in it")
    try:
        if path.suffix == ".parquet":
            frame = pd.read_parquet(path)
        else:  # ids such as "007" stay text
            frame = pd.read_json(path, lines=True, dtype=False, convert_dates=False)
    except (OSError, ValueError) as error:  # pyarrow's are among them
        kind = "parquet file" if path.suffix == ".parquet" else "file of JSON lines"
        raise ValueError(f"{path}: expected a {kind}, could not read it ({error})") from error
    if missing := [column for column in columns if column not in frame.columns]:
        raise ValueError(f"{path}: expected the columns {list(columns)}, {missing} are not in {list(frame.columns)}")
    return [dict(zip(columns, row, strict=True)) for row in zip(*(frame[c].tolist() for c in columns), strict=True)]


def check_id(value: Any, where: object) -> str:
    """Returns an id, which must be an integer or a string that is not empty, as a string."""
    if not isinstance(value, (str, int)) or isinstance(value, bool) or value == "":
        raise ValueError(f"{where}: expected a string or an integer as id, got {value!r} ({type(value).__name__})")
    return str(value)


def check_numbers(values: Any, what: str, where: object) -> list[float]:
    """Returns a list of numbers as floats, missing ones as NaN."""
    if values is None or isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise ValueError(f"{where}: expected {what}, got {values!r}")
    values = list(values)
    if bad := [value for value in values if value is not None and not isinstance(value, Real)]:
        raise ValueError(f"{where}: expected {what}, got {bad[0]!r} ({type(bad[0]).__name__})")
    return [math.nan if value is None else float(value) for value in values]


def fingerprint(folder: Path) -> str:
    """Returns a hash of the names and the contents of the data files in a folder, which must have some."""
    files = data_files(folder)
    if not files:
        raise ValueError(f"{folder}: {_EXPECTED} in or below it, found none")
    return _hash_files(str(folder), tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files))


@lru_cache(maxsize=64)
def _hash_files(folder: str, files: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, size, _ in files:
        digest.update(f"{Path(name).relative_to(folder).as_posix()}\0{size}\0".encode())
        with open(name, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
