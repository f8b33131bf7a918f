"""Measures the ways to position-fair document vectors on three encoders: nDCG@10 and PSI with paired intervals.

    python benchmarks/ways.py --record benchmarks/records/ways.jsonl                  # the project's passages
    python benchmarks/ways.py --record benchmarks/records/ways.jsonl --passages FILE  # 10 to 20 minutes an encoder
    python benchmarks/ways.py --record benchmarks/records/ways.jsonl --table          # only prints what is recorded

FILE has passages with questions as JSON lines, in the format of `fair_evaluation`'s `load_passages`. Documents are made
of 3 passages of about 165 tokens, 4 of 110, or 2 of 220, in the encoder's own tokens and short enough that none is
truncated; every passage stands once in every place (`rotations`). The encoders are those of `encoders`.

One vector a document: the plain model, calibrated attention in several settings, even chunks, and the average of the
vectors of the same chunks (chunk and average). Several vectors: the best of these chunk vectors. Every result is a line
of the record, written at once, and what is recorded is not measured again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import transformers
from encoders import ENCODERS, encoder_facts, load_encoder
from numpy.typing import NDArray
from rotations import Geometry, Record, Rotations, build_rotations, compare, describe, markdown
from sentence_transformers import SentenceTransformer
from tqdm.auto import tqdm

from fair_calibration import EvenChunks, FairConfig, calibrate
from fair_calibration.even_chunks.chunks import even_chunks
from fair_evaluation import PositionEvaluation
from fair_evaluation.measures import harmonic_mean
from fair_evaluation.position_collections import load_passages

Array = NDArray[np.float32]
GEOMETRIES = {
    "3 x 165": Geometry(n_places=3, least=90, most=180, low=400, high=500),
    "4 x 110": Geometry(n_places=4, least=60, most=125, low=360, high=500),
    "2 x 220": Geometry(n_places=2, least=140, most=250, low=360, high=500),
}
SETTINGS = {
    "published default": FairConfig(),
    "strength .75": FairConfig(strength=0.75),
    "strength 1": FairConfig(strength=1.0),
    "strength 1, BOS isolated": FairConfig(strength=1.0, isolate="bos"),
    "even chunks": EvenChunks(),
    "even chunks alone": EvenChunks(strength=1.0),
}
PLAIN, PUBLISHED, AVERAGE, BEST = "plain", "published default", "chunk and average", "best chunk"
WAYS = (PLAIN, *SETTINGS, AVERAGE, BEST)
CHUNK = EvenChunks().chunk_size
OWN = "embedded"  # the name of the project's own passages in the record
SEED = 0  # of the grouping of passages into documents


def main() -> None:
    """Measures what the record lacks, and prints the tables."""
    parser = study_parser(__doc__)
    parser.add_argument("--geometry", choices=GEOMETRIES, action="append", help="repeatable; default: all that fit")
    parser.add_argument("--base", choices=("plain", "published"), default="plain", help="what the tables compare with")
    args = parser.parse_args()
    record = Record(args.record)
    if not args.table:
        for study in collections(args, {name: GEOMETRIES[name] for name in args.geometry or GEOMETRIES}):
            bench = Bench(study.model, study.data)
            for way in tqdm(WAYS, desc=" ".join(study.where.values()), unit="way", mininterval=5):
                record.get({**study.where, "way": way}, partial(_row, bench, way, study.facts))
    print(tables(record, args.base))


def study_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the arguments of a study over encoders, geometries and a record."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=Path, help="JSON lines; default: the project's own passages")
    parser.add_argument("--encoder", choices=ENCODERS, action="append", help="repeatable; default: all")
    parser.add_argument("--record", type=Path, required=True, help="a JSON lines file, read and added to")
    parser.add_argument("--table", action="store_true", help="print the tables of the record and measure nothing")
    return parser


class Study(NamedTuple):
    """One collection of a study, as one encoder reads it.

    Attributes:
        where: The encoder, the passages and the geometry, by which a record finds results.
        model: The encoder.
        data: The documents and questions.
        facts: Their numbers, the seed, and where the encoder comes from, for the record.
    """

    where: dict[str, str]
    model: SentenceTransformer
    data: Rotations
    facts: dict[str, Any]


def collections(args: argparse.Namespace, geometries: Mapping[str, Geometry]) -> Iterator[Study]:
    """Makes the collections of a study; a geometry for which the passages are too short is left out, and named.

    Args:
        args: The arguments of `study_parser`.
        geometries: The geometries by name.
    """
    transformers.utils.logging.disable_progress_bar()
    passages = load_passages(args.passages)
    for encoder in args.encoder or ENCODERS:
        model = load_encoder(encoder)
        for name, geometry in geometries.items():
            where = {"encoder": encoder, "passages": args.passages.stem if args.passages else OWN, "geometry": name}
            try:
                data = build_rotations(passages, geometry, model, SEED)
            except ValueError as error:
                print(f"{where}: left out, {error}")
                continue
            sizes = {"documents": data.n_documents, "questions": len(data.questions), "tokens": data.n_tokens}
            yield Study(where, model, data, {**sizes, "seed": SEED, **encoder_facts(encoder)})


def _row(bench: Bench, way: str, facts: dict[str, Any]) -> dict[str, Any]:
    result = bench.evaluate(way)
    row = bench.describe(result)
    return {**row, "harmonic_mean": harmonic_mean(row["places"]), **facts}


class Bench:
    """Evaluates ways of encoding on one collection of documents."""

    def __init__(self, model: SentenceTransformer, data: Rotations) -> None:
        self.model, self.data = model, data

    @cached_property
    def plain(self) -> PositionEvaluation:
        """The plain model, which the others are compared with."""
        return self._evaluate_model(PLAIN, self.model)

    @cached_property
    def published(self) -> PositionEvaluation:
        """The published default, which the others are compared with."""
        return self._evaluate_model(PUBLISHED, calibrate(self.model, SETTINGS[PUBLISHED]))

    def evaluate(self, way: str) -> PositionEvaluation:
        """Evaluates one of `WAYS`."""
        kept = {PLAIN: lambda: self.plain, PUBLISHED: lambda: self.published}
        if way in kept:
            return kept[way]()
        if way in SETTINGS:
            return self._evaluate_model(way, calibrate(self.model, SETTINGS[way]))
        join: Callable[[Array], Array] = _average if way == AVERAGE else lambda chunks: chunks
        similarities = [(self._queries @ join(chunks).T).max(axis=1) for chunks in self._chunks]
        return self.data.evaluate(np.stack(similarities, axis=1), name=way)

    def describe(self, result: PositionEvaluation) -> dict[str, Any]:
        """Returns a result as records have it, with differences to the plain model and to the published default."""
        differences = {"to_plain": compare(result, self.plain), "to_published": compare(result, self.published)}
        return describe(result) | differences

    def evaluate_vectors(self, name: str, vectors: Array) -> PositionEvaluation:
        """Evaluates one vector for each text of the collection, shape (R * N, D)."""
        return self.data.evaluate(self._queries @ vectors.T, name=name)

    def _evaluate_model(self, name: str, model: SentenceTransformer) -> PositionEvaluation:
        return self.evaluate_vectors(name, encode_documents(model, self.data.texts))

    @cached_property
    def _queries(self) -> Array:
        texts = [question.text for question in self.data.questions]
        return np.asarray(self.model.encode_query(texts, normalize_embeddings=True, show_progress_bar=False))

    @cached_property
    def _chunks(self) -> list[Array]:
        """The chunk vectors of each text, each of shape (C, D)."""
        chunks = [cut_chunks(self.model, text) for text in self.data.texts]
        vectors = encode_documents(self.model, [chunk for cut in chunks for chunk in cut])
        return np.split(vectors, np.cumsum([len(cut) for cut in chunks])[:-1])


def encode_documents(model: SentenceTransformer, texts: list[str]) -> Array:
    """Returns vectors of unit length, shape (N, D)."""
    vectors = model.encode_document(texts, batch_size=16, normalize_embeddings=True, show_progress_bar=False)
    return np.asarray(vectors)


def _average(chunks: Array) -> Array:
    """Returns the mean of chunk vectors at unit length, (C, D) to (1, D)."""
    mean = chunks.mean(axis=0, keepdims=True)
    return mean / np.linalg.norm(mean)


def cut_chunks(model: SentenceTransformer, text: str) -> list[str]:
    """Cuts a text at the beginnings of words into the fewest chunks of equal length of at most 128 tokens."""
    encoding = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts, words = [start for start, _ in encoding["offset_mapping"]], encoding.word_ids()
    cuts = [0]
    for first, _ in even_chunks(len(starts), CHUNK)[1:]:
        while words[first] == words[first - 1]:
            first -= 1
        cuts.append(starts[first])
    return [text[a:b].strip() for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def tables(record: Record, base: str) -> str:
    """Returns a table for each encoder, with differences to the plain model or to the published default.

    Args:
        record: The results.
        base: "plain" or "published".
    """
    parts = []
    for encoder in ENCODERS:
        rows = [row for row in record.rows if row["encoder"] == encoder]
        if not rows:
            continue
        collections = sorted(
            {(row["passages"], row["geometry"]) for row in rows},
            key=lambda where: (where[0] == OWN, where[0], list(GEOMETRIES).index(where[1])),
        )
        columns = [
            {row["way"]: row for row in rows if (row["passages"], row["geometry"]) == where} for where in collections
        ]
        header = [encoder]
        for (passages, geometry), found in zip(collections, columns, strict=True):
            row = next(iter(found.values()))
            sizes = f"{row['documents']} documents of {row['tokens']:.0f} tokens, {row['questions']} questions"
            parts.append(f"{encoder}, {passages}, {geometry}: {sizes}")
            header += [f"{passages} {geometry}: nDCG@10", "PSI"]
        names = [way for way in WAYS if any(way in found for found in columns)]
        cells = [[way, *(cell for found in columns for cell in _cells(found.get(way), base))] for way in names]
        parts.append(markdown(header, cells))
    return "\n\n".join(parts)


def _cells(row: dict[str, Any] | None, base: str) -> list[str]:
    """Returns nDCG@10 and PSI of a result, each with its difference to the base and the interval of that."""
    if row is None:
        return ["", ""]
    return [cell(row[name], row[f"to_{base}"][name]) for name in ("ndcg", "psi")]


def cell(value: float, difference: list[float]) -> str:
    """Returns a value with its difference to a base and the interval of that, for tables; the base has none."""
    if not any(difference):
        return number(value)
    gain, low, high = (number(each, "+") for each in difference)
    return f"{number(value)} ({gain} [{low}, {high}])"


def number(value: float, sign: str = "") -> str:
    """Returns a number as the tables have it, without the zero in front."""
    return f"{value:{sign}.3f}".replace("0.", ".", 1)


if __name__ == "__main__":
    main()
