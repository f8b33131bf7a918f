"""Public benchmarks with the position of each answer as PyTerrier datasets: ``pt.get_dataset("fair:...")``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt
from pyterrier.datasets import Dataset, DatasetProvider

from fair_evaluation.benchmarks import fineweb_posq, posir, squad_posq
from fair_evaluation.benchmarks.position_data import PositionData
from fair_evaluation.benchmarks.sources import HubDataset, hub_folder, local_folder
from fair_evaluation.position_collections import PLACES, build_collections, load_passages
from pyterrier_fair.datasets import PositionDataset, TextDataset, check_no_variant


class FairDatasetProvider(DatasetProvider):
    """Gives access to position collections by name, as in ``pt.get_dataset("fair:fineweb-posq")``.

    - ``demo/0``, ``demo/1``, ``demo/2``: the rotations of the documents that come with `fair_evaluation`;
    - ``fineweb-posq`` and ``squad-posq``;
    - ``posir/<language>/<domain>``, such as ``posir/eng-Latn/law_judiciary``, and with queries of another language
      ``posir/deu-Latn_eng-Latn/law_judiciary``.

    Topics have the position of the answer: `fair_evaluation.from_experiment` takes them as they are, and those of
    SQuAD-PosQ with ``order=dataset.places``.
    """

    def get_dataset(self, name: str) -> Dataset:
        """Returns a dataset; benchmarks are not read yet.

        Raises:
            KeyError: There is no such dataset.
        """
        if name in _DEMOS:
            return PositionDataset(build_collections(load_passages())[_DEMOS.index(name)])
        if name in _BENCHMARKS:
            return BenchmarkDataset(_BENCHMARKS[name])
        if (found := re.fullmatch(r"posir/([\w-]+?)(?:_([\w-]+))?/([\w-]+)", name)) is not None:
            language, corpus_language, domain = found.groups()
            if language in posir.LANGUAGES and corpus_language in (None, posir.ENGLISH):
                return BenchmarkDataset(_posir(language, corpus_language or language, domain))
        raise KeyError(f"{name!r}: expected one of {[*self.list_dataset_names()]}, or posir/<language>/<domain>")

    def list_dataset_names(self) -> list[str]:
        """Returns the names, without those of PosIR, whose domains are read from its data."""
        return [*_DEMOS, *_BENCHMARKS]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What `BenchmarkDataset` has to know.

    Attributes:
        source: Where the data come from.
        read: Reads the files in a folder.
        places: The labels of positions, from the beginning of documents to their end; None where they are numbers.
        language: The ISO 639-1 code of the language of topics and documents, if it is known.
    """

    source: HubDataset
    read: Callable[[Path], PositionData]
    places: tuple[str, ...] | None = None
    language: str | None = None


class BenchmarkDataset(TextDataset):
    """A public benchmark with positions, from a local folder or the hub. It is read when it is first needed."""

    def __init__(self, benchmark: Benchmark, *, data_folder: str | os.PathLike[str] | None = None) -> None:
        """Takes the benchmark, and the local folder of its data."""
        self.benchmark = benchmark
        self.data_folder = data_folder

    def _configure(self, *, data_folder: str | os.PathLike[str] | None = None) -> None:
        """Takes the arguments of `pt.get_dataset`: a local folder of the benchmark's data."""
        self.data_folder = data_folder

    @property
    def places(self) -> tuple[str, ...] | None:
        """The ``order`` for `fair_evaluation.from_experiment`; None where positions are numbers."""
        return self.benchmark.places

    @cached_property
    def data(self) -> PositionData:
        """The data; downloaded if there is no local folder.

        Raises:
            ValueError: The data cannot be found, read or used.
        """
        source = self.benchmark.source
        folder = Path(self.data_folder) if self.data_folder is not None else local_folder(source.name)
        if folder is None:
            folder = hub_folder(source.repository, source.revision, source.patterns)
        elif not folder.is_dir():
            raise ValueError(f"data_folder: there is no folder {str(folder)!r}")
        data = self.benchmark.read(folder)
        data.check(str(folder))
        return data

    def get_corpus_iter(self, *, verbose: bool = True) -> Iterator[dict[str, str]]:
        """Yields the documents as ``docno`` and ``text``."""
        documents = self.data.corpus.items()
        for docno, text in pt.tqdm(documents, desc="documents", unit="doc", disable=not verbose):
            yield {"docno": docno, "text": text}

    def get_topics(self, variant: str | None = None) -> pd.DataFrame:
        """Returns ``qid``, ``query`` and the position of the answer.

        It is a relative ``position`` in [0, 1] with the ``length`` of the document in tokens (PosIR), or ``place``, the
        list of the labels that the answer counts in.
        """
        check_no_variant(variant)
        data = self.data
        topics = pd.DataFrame({"qid": list(data.queries), "query": list(data.queries.values())})
        columns: dict[str, Any] = (
            {"position": data.positions, "length": data.lengths}
            if data.positions
            else {"place": {qid: list(labels) for qid, labels in data.labels.items()}}
        )
        return topics.assign(**{name: topics["qid"].map(values) for name, values in columns.items()})

    def get_qrels(self, variant: str | None = None) -> pd.DataFrame:
        """Returns ``qid``, ``docno`` and ``label``."""
        check_no_variant(variant)
        judged = self.data.relevant.items()
        rows = [(qid, docno, label) for qid, documents in judged for docno, label in documents.items()]
        return pd.DataFrame(rows, columns=["qid", "docno", "label"])

    def get_corpus_lang(self) -> str | None:
        """Returns the ISO 639-1 code of the documents' language, if it is known."""
        return self.benchmark.language

    def get_topics_lang(self) -> str | None:
        """Returns the ISO 639-1 code of the topics' language, if it is known."""
        return self.benchmark.language

    def info_url(self) -> str:
        """Returns the address of the paper."""
        return self.benchmark.source.url

    def __repr__(self) -> str:
        return f"BenchmarkDataset({self.benchmark.source.name!r})"


def _posir(language: str, corpus_language: str, domain: str) -> Benchmark:
    return Benchmark(
        source=replace(posir.SOURCE, patterns=posir.files_of([language, corpus_language], [domain])),
        read=partial(posir.read_posir, language=language, corpus_language=corpus_language, domains=[domain]),
    )


_DEMOS = ("demo/0", "demo/1", "demo/2")
_BENCHMARKS = {
    "fineweb-posq": Benchmark(
        source=fineweb_posq.SOURCE, read=fineweb_posq.read_fineweb_posq, places=PLACES, language="en"
    ),
    "squad-posq": Benchmark(
        source=squad_posq.SOURCE, read=squad_posq.read_squad_posq, places=squad_posq.GROUPS, language="en"
    ),
}
