"""What people do instead of calibration, on the same documents and questions in one run, with MiniLM.

    python benchmarks/rivals.py --passages FILE --record benchmarks/records/rivals.jsonl   # a quarter of an hour
    python benchmarks/rivals.py --passages FILE --record benchmarks/records/rivals.jsonl --table

One vector a document: plain, calibrated, even chunks (the preset), the average of chunk vectors, and late chunking
averaged. Several vectors: the best chunk, chunked before encoding or after it (late chunking). Rerankers: the first
documents of the plain model, ranked again by their best chunk, by late interaction of MiniLM's own token vectors
(MaxSim; MiniLM was not trained for it), or by BM25. No cross-encoder is measured: none can be had offline.

Documents are those of the test half of FILE's articles (JSON lines, see `fair_evaluation.position_collections.load_passages`) at
about 480 and 300 tokens, and the project's own passages at about 480. Needs the extra ``demo``, for BM25 (PISA).

Encoding is timed in pairs: plain and rival alternate on the same documents, and the ratio of the pairs is reported.
Every result is a line of the record, written at once.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pyterrier as pt
import torch
import transformers
from numpy.typing import NDArray
from paired import time_pairs
from position_data import (
    LENGTHS,
    N_PLACES,
    PositionData,
    Record,
    build_data,
    compare,
    load_model,
    markdown,
    signed,
    split_articles,
    summarize,
)
from pyterrier_pisa import PisaIndex
from sentence_transformers import SentenceTransformer
from tqdm.auto import tqdm

from fair_calibration import PRESETS, FairConfig, calibrate
from fair_evaluation.position_collections import load_passages

Array = NDArray[np.float32]
CHUNK = 128
COSTS_AS = {  # what encodes in the same way as another, which is timed
    "calibrated, strength 1": "published",
    "best chunk of 128": "average of chunks of 128",
    "best even chunk": "average of even chunks",
    "late chunking, best chunk": "late chunking, average",
    "late interaction (MaxSim)": "late chunking, average",
}
DEPTHS = (5, 10)  # of reranking; there are some 20 documents in a collection
SECOND_STAGES = ("best even chunk", "late interaction (MaxSim)", "BM25")
N_TIMED, N_PAIRS = 4, 7  # documents, and pairs of runs


class Encoded(NamedTuple):
    """Vectors of unit length, and the text that each belongs to, in order."""

    vectors: Array
    owners: NDArray[np.int64]


class Rival(NamedTuple):
    """What is done at indexing and at query time."""

    name: str
    encode: Callable[[list[str]], Encoded]
    interaction: bool = False  # MaxSim over all vectors of query and document, else the best vector of the document


def main() -> None:
    """Runs what the record lacks, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=Path, help="JSON lines; left out: only the project's own passages")
    parser.add_argument("--record", type=Path, required=True, help="a JSON lines file, read and added to")
    parser.add_argument("--table", action="store_true", help="only print the table of the record")
    args = parser.parse_args()
    record = Record(args.record)
    if not args.table:
        transformers.utils.logging.disable_progress_bar()
        model = load_model()
        own = "embedded", build_data(load_passages(), LENGTHS[480], model)
        if args.passages is None:
            _run(record, model, *own, timed=True)
        else:
            test, name = split_articles(load_passages(args.passages))["test"], f"{args.passages.stem}, test half"
            _run(record, model, f"{name}, 480", build_data(test, LENGTHS[480], model), timed=True)
            _run(record, model, *own)
            _run(record, model, f"{name}, 300", build_data(test, LENGTHS[300], model))
    print(tables(record))


def rivals(model: SentenceTransformer) -> list[Rival]:
    """Returns what is compared, the plain model first."""
    configs = {
        "published": PRESETS["published"],
        "calibrated, strength 1": FairConfig(strength=1.0),
        "calibrated, strength 1, BOS isolated": FairConfig(strength=1.0, isolate="bos"),
        "even chunks (preset)": PRESETS["even_chunks"],
    }
    return [
        Rival("plain", partial(_encode, model)),
        *(Rival(name, partial(_encode, calibrate(model, config))) for name, config in configs.items()),
        Rival("average of chunks of 128", partial(_average, partial(_encode_chunks, model, even=False))),
        Rival("average of even chunks", partial(_average, partial(_encode_chunks, model, even=True))),
        Rival("late chunking, average", partial(_average, partial(_chunk_late, model))),
        Rival("best chunk of 128", partial(_encode_chunks, model, even=False)),
        Rival("best even chunk", partial(_encode_chunks, model, even=True)),
        Rival("late chunking, best chunk", partial(_chunk_late, model)),
        Rival("late interaction (MaxSim)", partial(_encode_tokens, model), interaction=True),
    ]


def _encode(model: SentenceTransformer, texts: list[str]) -> Encoded:
    vectors = model.encode_document(texts, batch_size=16, normalize_embeddings=True, show_progress_bar=False)
    return Encoded(np.asarray(vectors), np.arange(len(texts)))


def _encode_chunks(model: SentenceTransformer, texts: list[str], *, even: bool) -> Encoded:
    chunks = [cut_chunks(model, text, even=even) for text in texts]
    vectors = _encode(model, [chunk for cut in chunks for chunk in cut]).vectors
    return Encoded(vectors, np.repeat(np.arange(len(texts)), [len(cut) for cut in chunks]))


def cut_chunks(model: SentenceTransformer, text: str, *, even: bool) -> list[str]:
    """Cuts a text, at the beginnings of words, into chunks of 128 tokens, or into as many of equal length."""
    encoding = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts, words = [start for start, _ in encoding["offset_mapping"]], encoding.word_ids()
    cuts = [0]
    for first in _starts(len(starts), even=even)[1:]:
        while words[first] == words[first - 1]:
            first -= 1
        cuts.append(starts[first])
    return [text[a:b].strip() for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _starts(n_tokens: int, *, even: bool) -> list[int]:
    """Returns the first token of each chunk."""
    n_chunks = max(1, -(-n_tokens // CHUNK))
    return [round(i * n_tokens / n_chunks) if even else i * CHUNK for i in range(n_chunks)]


def _chunk_late(model: SentenceTransformer, texts: list[str]) -> Encoded:
    """Encodes whole texts, and averages the token vectors of each of the even chunks (Günther et al. 2024)."""
    states = _token_states(model, texts)
    parts = [
        state[a:b].mean(0)
        for state in states
        for starts in [_starts(len(state), even=True)]
        for a, b in zip(starts, [*starts[1:], len(state)], strict=True)
    ]
    counts = [len(_starts(len(state), even=True)) for state in states]
    return Encoded(_unit(np.stack(parts)), np.repeat(np.arange(len(texts)), counts))


def _encode_tokens(model: SentenceTransformer, texts: list[str]) -> Encoded:
    states = _token_states(model, texts)
    return Encoded(_unit(np.concatenate(states)), np.repeat(np.arange(len(texts)), [len(state) for state in states]))


def _token_states(model: SentenceTransformer, texts: list[str]) -> list[Array]:
    """Returns the token vectors of each text, without those of CLS and SEP."""
    states = model.encode(texts, batch_size=16, output_value="token_embeddings", show_progress_bar=False)
    return [state[1:-1].numpy() for state in states]


def _average(encode: Callable[[list[str]], Encoded], texts: list[str]) -> Encoded:
    vectors, owners = encode(texts)
    sums = np.zeros((len(texts), vectors.shape[1]), dtype=np.float32)
    np.add.at(sums, owners, vectors)
    return Encoded(_unit(sums), np.arange(len(texts)))


def _unit(vectors: Array) -> Array:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _similarities(model: SentenceTransformer, rival: Rival, questions: list[str], encoded: Encoded) -> Array:
    """Returns the similarities of the questions to the texts, shape (Q, R * N)."""
    queries = (_encode_tokens if rival.interaction else _encode_queries)(model, questions)
    starts = np.searchsorted(encoded.owners, np.arange(encoded.owners[-1] + 1))
    similarities = np.empty((len(questions), len(starts)), dtype=np.float32)
    for i in range(len(questions)):
        best = np.maximum.reduceat(queries.vectors[queries.owners == i] @ encoded.vectors.T, starts, axis=1)
        similarities[i] = best.sum(0)
    return similarities


def _encode_queries(model: SentenceTransformer, texts: list[str]) -> Encoded:
    return Encoded(model.encode_query(texts, normalize_embeddings=True), np.arange(len(texts)))


def _bm25(data: PositionData) -> Array:
    """Returns BM25's scores of the questions for the texts, 0 where none of the words is there."""
    scores = np.zeros((len(data.questions), len(data.texts)), dtype=np.float32)
    topics = [{"qid": str(i), "query": question.text} for i, question in enumerate(data.questions)]
    n = data.n_documents
    for rotation in range(N_PLACES):
        with tempfile.TemporaryDirectory() as folder:
            index = PisaIndex(f"{folder}/index", text_field="text")
            texts = data.texts[rotation * n : (rotation + 1) * n]
            index.index([{"docno": str(rotation * n + i), "text": text} for i, text in enumerate(texts)])
            found = index.bm25(num_results=n)(pt.new.queries([t["query"] for t in topics], [t["qid"] for t in topics]))
        scores[found["qid"].astype(int), found["docno"].astype(int)] = found["score"]
    return scores


def rerank(first: Array, second: Array, depth: int) -> Array:
    """Returns scores that put the first documents of each rotation into the order of the second scores."""
    scores = first.copy()
    for columns in np.split(np.arange(first.shape[1]), N_PLACES):
        top = columns[np.argsort(-first[:, columns], axis=1, kind="stable")[:, :depth]]
        chosen = np.take_along_axis(second, top, axis=1)
        above = first.max() - second.min() + 1  # above all that are not ranked again
        np.put_along_axis(scores, top, chosen + above, axis=1)
    return scores


def _run(record: Record, model: SentenceTransformer, name: str, data: PositionData, *, timed: bool = False) -> None:
    plain, *others = rivals(model)
    seconds = [(second, depth) for second in SECOND_STAGES for depth in DEPTHS]
    names = [plain.name, *(rival.name for rival in others), "BM25", *(_reranked(*second) for second in seconds)]
    if not all(record.find({"data": name, "name": system}) for system in names):
        _rank(record, model, name, data)
    if timed:
        texts = data.texts[:N_TIMED]
        for rival in tqdm([rival for rival in others if rival.name not in COSTS_AS], desc="timing", unit="system"):
            key = {"what": "time", "name": rival.name}
            runs = [partial(system.encode, texts) for system in (plain, rival)]
            record.get(key, partial(time_pairs, *runs, N_PAIRS))


def _rank(record: Record, model: SentenceTransformer, name: str, data: PositionData) -> None:
    questions = [question.text for question in data.questions]
    scores: dict[str, Array] = {}
    vectors: dict[str, float] = {}
    for rival in tqdm(rivals(model), desc=name, unit="system"):
        encoded = rival.encode(data.texts)
        scores[rival.name] = _similarities(model, rival, questions, encoded)
        vectors[rival.name] = len(encoded.owners) / len(data.texts)
    scores["BM25"], vectors["BM25"] = _bm25(data), 0.0
    for second in SECOND_STAGES:
        for depth in DEPTHS:
            scores[_reranked(second, depth)] = rerank(scores["plain"], scores[second], depth)
            vectors[_reranked(second, depth)] = 1 + vectors[second]
    plain = data.evaluate(scores["plain"], name="plain")
    sizes = {"documents": data.n_documents, "questions": len(questions), "tokens": data.n_tokens}
    for system, similarities in scores.items():
        result = data.evaluate(similarities, name=system)
        row = {**summarize(result), **compare(result, plain), "vectors": vectors[system], **sizes}
        record.get({"data": name, "name": system}, partial(dict, row))


def _reranked(name: str, depth: int) -> str:
    return f"plain, its first {depth} reranked: {name}"


def tables(record: Record) -> str:
    """Returns one table for each set of documents."""
    parts = []
    for data in dict.fromkeys(row["data"] for row in record.rows if "data" in row):
        rows = [row for row in record.rows if row.get("data") == data]
        head = f"{data}: {rows[0]['documents']} documents of {rows[0]['tokens']:.0f} tokens, {rows[0]['questions']} "
        cells = []
        for row in rows:
            encodes_as = COSTS_AS.get(row["name"], row["name"])
            timed = record.find({"what": "time", "name": encodes_as})
            low, high = row["psi_interval"]
            cells.append(
                [
                    row["name"],
                    f"{row['ndcg']:.3f}",
                    " / ".join(f"{place:.3f}" for place in row["places"]),
                    f"{row['psi']:.3f} [{low:.3f}, {high:.3f}]",
                    signed(row["ndcg_difference"], row["ndcg_difference_interval"]),
                    f"{row['vectors']:.0f}",
                    f"{timed['ratio']:.2f}" if timed else "1" if row["name"] == "plain" else "",
                ]
            )
        header = ["", "nDCG@10", "beginning / middle / end", "PSI", "nDCG difference to plain", "vectors", "time"]
        parts += [head + "questions in each of 3 rotations", markdown(header, cells)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
