"""PosIR: queries with the spans of their answers, in 10 languages and 31 domains (arXiv 2601.08363)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from fair_calibration.nearest_names import nearest_names
from fair_evaluation.benchmarks.position_data import PART_END, PositionData
from fair_evaluation.benchmarks.sources import HubDataset, check_id, check_numbers, read_rows

logger = logging.getLogger("fair_evaluation")
SOURCE = HubDataset(
    name="PosIR",
    repository="infgrad/PosIR-Benchmark-v1",
    revision="main",
    patterns=("*/*/*",),  # of all languages and domains; `files_of` selects
    url="https://arxiv.org/abs/2601.08363",
)
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
BINS = tuple(f"bin{number:02d}" for number in range(N_BINS))


def files_of(languages: Iterable[str], domains: Iterable[str] | None = None) -> tuple[str, ...]:
    """Returns the patterns of the files of some languages, and of all domains or of those that are named."""
    chosen = ["*"] if domains is None else list(domains)
    return tuple(f"{language}/{domain}/*" for language in dict.fromkeys(languages) for domain in chosen)


def read_posir(
    folder: Path, *, language: str, corpus_language: str | None = None, domains: Sequence[str] | None = None
) -> PositionData:
    """Reads domains of a language. Ids start with the domain and a slash.

    Args:
        folder: The folder of the dataset.
        language: The language of the queries, such as "eng-Latn".
        corpus_language: The language of the documents; None means that of the queries.
        domains: The domains, such as "law_judiciary"; None means all that the folder has.

    Raises:
        ValueError: The folder lacks the data, or they cannot be used; the file is named.
    """
    data = PositionData()
    for domain in find_domains(folder / language, domains):
        _read_domain(data, folder / language / domain, folder / (corpus_language or language) / domain)
    return data


def find_domains(folder: Path, domains: Sequence[str] | None = None) -> list[str]:
    """Returns the domains in the folder of a language, or the chosen ones after checking that the folder has them."""
    found = sorted(path.parent.name for path in folder.glob("*/queries.parquet"))
    if not found:
        raise ValueError(f"{folder}: expected <domain>/queries.parquet in it, found none")
    if domains is None:
        return found
    if unknown := [domain for domain in domains if domain not in found]:
        near = nearest_names(unknown[0], found)
        raise ValueError(f"domains: {unknown} are not in {folder}; the nearest to {unknown[0]!r} are {near}")
    return list(domains)


def _read_domain(data: PositionData, folder: Path, corpus_folder: Path) -> None:
    part = folder.name + PART_END
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
        data.positions[query], data.lengths[query] = sum(span) / 2 / length, tokens
        if span[1] > length:  # its middle, which counts, still stands in the document
            beyond.append(row["_id"])
    if beyond:
        logger.warning("%s: the spans of %d queries end beyond their documents: %s", path, len(beyond), beyond[:5])
    path = folder / "qrels" / "test.parquet"
    for row in read_rows(path, ["query-id", "corpus-id", "score"]):
        query, document = (part + check_id(row[name], path) for name in ("query-id", "corpus-id"))
        data.add_judgement(query, document, row["score"], where=path)


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
    return BINS[bin_number], f"{quartile}_{BINS[bin_number]}"
