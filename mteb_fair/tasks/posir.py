"""PosIR: queries with the spans of their answers, in 10 languages and 31 domains, scored by position and length."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from fair_calibration.fingerprint import digest_text
from fair_evaluation.benchmarks.posir import (
    BINS,
    ENGLISH,
    LANGUAGES,
    N_DOMAINS,
    QUARTILES,
    SOURCE,
    files_of,
    find_domains,
    read_posir,
)
from fair_evaluation.benchmarks.position_data import PositionData
from mteb_fair.scores import Grouping
from mteb_fair.tasks.partitioned_search import part_of
from mteb_fair.tasks.position_task import OtherLanguagesError, PositionTask, build_metadata

logger = logging.getLogger("mteb_fair")
GROUPINGS = (
    Grouping(name="", groups=BINS),
    *(Grouping(name=quartile, groups=tuple(f"{quartile}_{name}" for name in BINS)) for quartile in QUARTILES),
)
"""All lengths together, then one for each quartile."""
_SHARED: dict[str, Any] = {
    "reference": SOURCE.url,
    "dataset": {"path": SOURCE.repository, "revision": SOURCE.revision},
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
    dataset_name = SOURCE.name
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
        folder = self.folder(*files_of([language, corpus_language], self.domains))
        domains = find_domains(folder / language, self.domains)
        if self.data_folder is None and self.domains is None and len(domains) < N_DOMAINS:
            logger.warning(
                "%s, %s: found only %d of %d domains, %s. Without the network an incomplete cache looks like the whole "
                "benchmark, but the scores would differ from those of the whole",
                self.metadata.name, subset, len(domains), N_DOMAINS, domains,
            )  # fmt: skip
        data = read_posir(folder, language=language, corpus_language=corpus_language, domains=domains)
        corpora = {path.parent.name for path in (folder / corpus_language).glob("*/corpus.parquet")}
        if bare := sorted(corpora.intersection(self.domains or corpora) - {part_of(query) for query in data.queries}):
            logger.warning(
                "%s, %s: the domains %s have documents but no queries; they add nothing to the scores",
                self.metadata.name, subset, bare,
            )  # fmt: skip
        return data


class PosIRCrossLingual(PosIR):
    """PosIR with queries in one of nine languages and documents in English."""

    metadata = build_metadata(
        name="PosIRCrossLingual",
        description="PosIR with queries in one of nine languages and documents in English.",
        eval_langs={f"{lang}_{ENGLISH}": [lang, ENGLISH] for lang in LANGUAGES if lang != ENGLISH},
        **_SHARED,
    )
    corpus_language = ENGLISH
