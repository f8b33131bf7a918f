"""Probes as JSON lines, as frames, and as collections for PyTerrier."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from tqdm.auto import tqdm

from fair_evaluation.position_collections import PositionCollection
from fair_evaluation.probes import ProbeDocument, ProbeQuery


def write_probes(
    probes: Iterable[ProbeDocument], path: str | os.PathLike[str], *, show_progress_bar: bool = False
) -> int:
    """Writes probes as JSON lines, one document with its queries per line, and returns the number of documents.

    The same probes give the same bytes. The file gets its name when it is complete.
    """
    target, n = Path(path), 0
    part = target.with_name(f"{target.name}.part")
    with part.open("w", encoding="utf-8", newline="\n") as file:
        for probe in tqdm(probes, desc="probes", unit="doc", disable=not show_progress_bar):
            file.write(json.dumps(asdict(probe), ensure_ascii=False, allow_nan=False) + "\n")
            n += 1
    part.replace(target)
    return n


def read_probes(path: str | os.PathLike[str]) -> Iterator[ProbeDocument]:
    """Yields the probes of a file that `write_probes` wrote, one at a time.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is not valid JSON for a probe; the error gives the line number and the reason.
    """
    with Path(path).open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                yield ProbeDocument(**{**record, "queries": tuple(ProbeQuery(**query) for query in record["queries"])})
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{os.fspath(path)}, line {number}: expected a document of write_probes, got {line[:60]!r} "
                    f"({type(error).__name__}: {error})"
                ) from error


class ProbeFrames(NamedTuple):
    """Probes as frames.

    Attributes:
        topics: ``qid``, ``query``, ``rotation``, ``place``, ``index``, ``position``, ``question``: the positions for
            `from_run` and `from_experiment`, with ``position="place"`` and ``unit="question"``.
        qrels: ``qid``, ``docno``, ``label``: one relevant document per query.
        docs: ``docno``, ``text``, ``rotation``, ``n_tokens``. Each rotation is a collection of its own.
    """

    topics: pd.DataFrame
    qrels: pd.DataFrame
    docs: pd.DataFrame


def probe_frames(probes: Iterable[ProbeDocument]) -> ProbeFrames:
    """Reads probes into frames of topics, qrels and documents."""
    topics: list[dict[str, Any]] = []
    docs = []
    for probe in probes:
        docs.append({name: getattr(probe, name) for name in ("docno", "text", "rotation", "n_tokens")})
        topics += [{**asdict(query), "rotation": probe.rotation} for query in probe.queries]
    frame = pd.DataFrame(
        topics, columns=["qid", "query", "rotation", "place", "index", "position", "question", "docno"]
    )
    return ProbeFrames(
        topics=frame.drop(columns="docno"),
        qrels=frame[["qid", "docno"]].assign(label=1),
        docs=pd.DataFrame(docs, columns=["docno", "text", "rotation", "n_tokens"]),
    )


def probe_collections(probes: Iterable[ProbeDocument]) -> list[PositionCollection]:
    """Reads probes into one collection per rotation, as `pyterrier_fair.PositionDataset` takes them.

    Raises:
        ValueError: There are no probes, or those of a rotation are missing.
    """
    rotations: dict[int, list[ProbeDocument]] = {}
    for probe in probes:
        rotations.setdefault(probe.rotation, []).append(probe)
    if not rotations or sorted(rotations) != list(range(len(rotations))):
        raise ValueError(
            f"probes: expected documents of all rotations from 0 on, got the rotations {sorted(rotations)}"
        )
    return [
        PositionCollection(
            documents=tuple({"docno": probe.docno, "text": probe.text} for probe in rotations[rotation]),
            queries=tuple(query for probe in rotations[rotation] for query in probe.queries),
        )
        for rotation in range(len(rotations))
    ]
