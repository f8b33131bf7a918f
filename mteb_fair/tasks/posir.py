"""PosIR: queries with the spans of their answers, in 10 languages and 31 domains, scored by position and length."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from fair_calibration.fingerprint import digest_text
from mteb_fair.nearest_names import nearest_names
from mteb_fair.scores import Grouping
from mteb_fair.tasks.partitioned_search import SEPARATOR, part_of
from mteb_fair.tasks.position_task import OtherLanguagesError, PositionTask, build_metadata
from mteb_fair.tasks.sources import check_id, check_numbers, read_rows
from mteb_fair.tasks.task_data import PositionData

logger = logging.getLogger("mteb_fair")
# The languages of the benchmark; the dataset has some more.
LANGUAGES = (
    "ara-Arab", "cmn-Hans", "deu-Latn", "eng-Latn", "fra-Latn", "ita-Latn", "kor-Kore", "por-Latn", "rus-Cyrl",
    "spa-Latn",
)  # fmt: skip
ENGLISH = "eng-Latn"
N_DOMAINS = 31
N_BINS = 20
QUARTILES = {"q1": (0, 512), "q2": (512, 1024), "q3": (1024, 1536), "q4": (1536, math.inf)}
"""The length quartiles, in tokens of the relevant document: above the first bound, up to the second."""
_BINS = tuple(f"bin{number:02d}" for number in range(N_BINS))
GROUPINGS = (
    Grouping(name="", groups=_BINS),
    *(Grouping(name=quartile, groups=tuple(f"{quartile}_{name}" for name in _BINS)) for quartile in QUARTILES),
)
"""All lengths together, then one for each quartile."""
_SHARED: dict[str, Any] = {
    "reference": "https://arxiv.org/abs/2601.08363",
    "dataset": {"path": "infgrad/PosIR-Benchmark-v1", "revision": "main"},
    "date": ("2025-01-01", "2026-01-31"),
    "domains": ["Web", "Written"],
    "license": "not specified",
    "bibtex_citation": r"""
@article{zeng2026posir,
  author = {Zeng, Ziyang and Zhang, Dun and Yan, Yu and Sun, Xu and others},
  journal = {arXiv preprint arXiv:2601.08363},
  title = {{PosIR}: Position-Aware Heterogeneous Information Retrieval Benchmark},
  year = {2026},
}
""",
}


def labels_of(span: Sequence[float], length: float, tokens: float, *, where: str) -> tuple[str, str]:
    """Returns a query's position bin, over all lengths and within its length quartile.

    The relative position is the middle of the answer's span over the document's length, both in characters. Bins and
    quartiles are closed at their upper bounds, as in the benchmark's own evaluation. Impossible numbers are errors.
    """
    numbers = (*span, length, tokens)
    if len(span) != 2 or not all(math.isfinite(number) for number in numbers):
        raise ValueError(
            f"{where}: expected pos_char_span as two numbers, and pos_char_length and pos_token_length, got {numbers}"
        )
    middle = (span[0] + span[1]) / 2
    if length <= 0 or tokens <= 0:
        raise ValueError(f"{where}: expected positive lengths, got {numbers}")
    if not 0 <= span[0] <= span[1] or middle > length:
        raise ValueError(f"{where}: expected a span within the document, 0 <= start <= end <= length, got {numbers}")
    bin_number = max(0, math.ceil(round(middle / length * N_BINS, 9)) - 1)
    quartile = next(name for name, (low, high) in QUARTILES.items() if low < tokens <= high)
    return _BINS[bin_number], f"{quartile}_{_BINS[bin_number]}"


class PosIR(PositionTask):
    """PosIR with queries and documents of one language. Domains are searched separately and counted together."""

    metadata = build_metadata(
        name="PosIR",
        description=(
            "Queries with the span of the document that answers them, in 10 languages and 31 domains; scores by "
            "relative position of the span in 20 bins, over all lengths and within four classes of document length."
        ),
        eval_langs={language: [language] for language in LANGUAGES},
        **_SHARED,
    )
    groupings = GROUPINGS
    dataset_name = "PosIR"
    partitioned = True
    corpus_language: ClassVar[str | None] = None

    def __init__(
        self,
        *,
        domains: Sequence[str] | None = None,
        data_folder: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Chooses the data.

        Args:
            domains: The domains, such as "law_judiciary"; None means all. A selection is part of the task's name.
            data_folder: The folder with the data; None means the hub.
            **kwargs: ``revision`` of `PositionTask`, and further arguments of MTEB's `AbsTask`.

        Raises:
            ValueError: The folder does not exist, or holds no data files or none of the task's languages,
                ``revision`` is not a commit, or ``domains`` is not a list of names.
        """
        if isinstance(domains, str) or (domains is not None and not domains):
            raise ValueError(f"domains: expected None or a list of at least one domain, got {domains!r}")
        for domain in domains or ():
            if not isinstance(domain, str) or not re.fullmatch(r"[\w-]+", domain):
                raise ValueError(f"domains: expected names of letters, digits, '_' and '-', got {domain!r}")
        self.domains = None if domains is None else tuple(sorted(set(domains)))
        suffix = "" if self.domains is None else "-" + "+".join(self.domains)
        if self.domains is not None and len(self.domains) > 2:
            suffix = f"-{len(self.domains)}domains-{digest_text(suffix[1:])}"
        super().__init__(data_folder=data_folder, selection={"domains": self.domains}, suffix=suffix, **kwargs)

    @classmethod
    def local_languages(cls, folder: Path) -> dict[str, list[str]]:
        """Returns those of the task's languages in which a folder has queries; none is an `OtherLanguagesError`."""
        found = sorted({path.parts[-3] for path in folder.glob("*/*/queries.parquet")})
        languages = {s: codes for s, codes in cls.metadata.hf_subsets_to_langscripts.items() if codes[0] in found}
        if not languages:
            raise OtherLanguagesError(
                f"{folder}: expected <lang-Script>/<domain>/queries.parquet in it, with languages that "
                f"{cls.metadata.name} has; found the languages {found}"
            )
        return languages

    def read(self, subset: str) -> PositionData:
        """Reads the chosen domains of a language. Ids start with the domain."""
        language = self.metadata.hf_subsets_to_langscripts[subset][0]
        corpus_language = self.corpus_language or language
        languages = dict.fromkeys([language, corpus_language])
        folder = self.folder(*(f"{name}/{domain}/*" for name in languages for domain in self.domains or ("*",)))
        data = PositionData()
        domains = self._domains_in(folder / language)
        if self.data_folder is None and self.domains is None and len(domains) < N_DOMAINS:
            logger.warning(
                "%s, %s: found only %d of %d domains, %s. Without the network an incomplete cache looks like the whole "
                "benchmark, but the scores would differ from those of the whole",
                self.metadata.name, subset, len(domains), N_DOMAINS, domains,
            )  # fmt: skip
        for domain in domains:
            self._read_domain(data, folder / language / domain, folder / corpus_language / domain)
        corpora = {path.parent.name for path in (folder / corpus_language).glob("*/corpus.parquet")}
        if bare := sorted(corpora.intersection(self.domains or corpora) - {part_of(query) for query in data.queries}):
            logger.warning(
                "%s, %s: the domains %s have documents but no queries; they add nothing to the scores",
                self.metadata.name, subset, bare,
            )  # fmt: skip
        return data

    def _domains_in(self, folder: Path) -> list[str]:
        found = sorted(path.parent.name for path in folder.glob("*/queries.parquet"))
        if not found:
            raise ValueError(f"{folder}: expected <domain>/queries.parquet in it, found none")
        if self.domains is None:
            return found
        if unknown := [domain for domain in self.domains if domain not in found]:
            near = nearest_names(unknown[0], found)
            raise ValueError(f"domains: {unknown} are not in {folder}; the nearest to {unknown[0]!r} are {near}")
        return list(self.domains)

    def _read_domain(self, data: PositionData, folder: Path, corpus_folder: Path) -> None:
        part = folder.name + SEPARATOR
        path = corpus_folder / "corpus.parquet"
        for row in read_rows(path, ["_id", "text"]):
            data.add_document(part + check_id(row["_id"], path), row["text"], where=path)
        path = folder / "queries.parquet"
        beyond = []
        for row in read_rows(path, ["_id", "text", "pos_char_span", "pos_char_length", "pos_token_length"]):
            query = part + check_id(row["_id"], path)
            where = f"{path}, query {row['_id']!r}"
            span = check_numbers(row["pos_char_span"], "pos_char_span as two numbers", where)
            lengths = [row["pos_char_length"], row["pos_token_length"]]
            length, tokens = check_numbers(lengths, "pos_char_length and pos_token_length as numbers", where)
            data.add_query(query, row["text"], labels=labels_of(span, length, tokens, where=where), where=path)
            if span[1] > length:  # its middle, which counts, still stands in the document
                beyond.append(row["_id"])
        if beyond:
            logger.warning("%s: the spans of %d queries end beyond their documents: %s", path, len(beyond), beyond[:5])
        path = folder / "qrels" / "test.parquet"
        for row in read_rows(path, ["query-id", "corpus-id", "score"]):
            query, document = (part + check_id(row[name], path) for name in ("query-id", "corpus-id"))
            data.add_judgement(query, document, row["score"], where=path)


class PosIRCrossLingual(PosIR):
    """PosIR with queries in one of nine languages and documents in English."""

    metadata = build_metadata(
        name="PosIRCrossLingual",
        description="PosIR with queries in one of nine languages and documents in English.",
        eval_langs={f"{lang}_{ENGLISH}": [lang, ENGLISH] for lang in LANGUAGES if lang != ENGLISH},
        **_SHARED,
    )
    corpus_language = ENGLISH
