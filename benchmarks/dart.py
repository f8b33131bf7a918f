"""Measures DART and VectorPrf behind three encoders, plain and calibrated: nDCG@10, PSI and time per query.

    python benchmarks/dart.py --record benchmarks/records/dart.jsonl --passages xquad-dev.en.jsonl
    python benchmarks/dart.py --record benchmarks/records/dart.jsonl --table          # only prints what is recorded

The documents are those of `ways`, of 3 passages of about 165 tokens, each rotation an index of its own. Queries come
in a random order, in which DART passes its state on; how much the order matters is measured with four other orders.
No setting was chosen by the scores on these data; a larger learning rate shows whether the default is only too small.
Every result is a line of the record, and what is recorded is not measured again.

Times are CPU times of the transformers behind the retriever, on one thread, the smallest of `N_TIMES`. In the table,
there are as many candidates as documents; a second measurement has 100 random candidates of 1024 dimensions.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pandas as pd
import pyterrier as pt
from numpy.typing import NDArray
from pyterrier_dr import FlexIndex, VectorPrf
from rotations import Record, Rotations, compare, describe, markdown
from sentence_transformers import SentenceTransformer
from threadpoolctl import threadpool_limits
from ways import GEOMETRIES, PLAIN, PUBLISHED, SETTINGS, Study, cell, collections, study_parser

from fair_calibration import calibrate
from fair_evaluation import PositionEvaluation
from pyterrier_fair import Dart, DartSettings
from pyterrier_fair.dart_scoring import adapt

Array = NDArray[np.float32]
GEOMETRY = "3 x 165"
NONE = "none"
RERANKERS: dict[str, Callable[[FlexIndex], pt.Transformer]] = {
    NONE: lambda _: pt.Transformer.identity(),
    "DART": Dart,
    "DART, stateless": lambda index: Dart(index, state="stateless"),
    "DART, learning rate .5": lambda index: Dart(index, DartSettings(learning_rate=0.5)),
    "VectorPrf": lambda index: index.vec_loader() >> VectorPrf() >> index.np_retriever(num_results=100),
}
ENCODINGS = (PLAIN, PUBLISHED)
N_ORDERS = 5
N_TIMES = 5


def main() -> None:
    """Measures what the record lacks, and prints the table."""
    args = study_parser(__doc__).parse_args()
    record = Record(args.record)
    if not args.table:
        print(record.get({"timing": "100 x 1024"}, _time_large), flush=True)
        for study in collections(args, {GEOMETRY: GEOMETRIES[GEOMETRY]}):
            _measure(record, study)
    print(table(record))


def _measure(record: Record, study: Study) -> None:
    for encoding in ENCODINGS:
        keys = {name: {**study.where, "encoding": encoding, "reranker": name} for name in RERANKERS}
        if all(record.find(key) for key in keys.values()):
            continue
        model = study.model if encoding == PLAIN else calibrate(study.model, SETTINGS[encoding])
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(model, study.data, Path(folder))
            for name, key in keys.items():
                row = record.get(key, partial(_row, bench, name, study.facts))
                print(key, row["ndcg"], row["psi"], row["ms"], flush=True)


def _row(bench: Bench, name: str, facts: dict[str, Any]) -> dict[str, Any]:
    result, ms = bench.evaluate(name, order=0)
    none, _ = bench.evaluate(NONE, order=0)
    row = {**describe(result), "to_none": compare(result, none), "ms": ms, **facts}
    if name == "DART":
        others = [bench.evaluate(name, order=order)[0] for order in range(1, N_ORDERS)]
        row["orders"] = [[other.mean, other.psi] for other in [result, *others]]
    if name == "DART, stateless":
        row["displacements"] = bench.displacements()
    return row


class Bench:
    """Evaluates rerankers on the rotations of a collection, as one encoder encodes it."""

    def __init__(self, model: SentenceTransformer, data: Rotations, folder: Path) -> None:
        self.data = data
        texts = [question.text for question in data.questions]
        encoding: dict[str, Any] = {"normalize_embeddings": True, "show_progress_bar": False, "batch_size": 16}
        self.queries: Array = np.asarray(model.encode_query(texts, **encoding))
        self.documents = np.split(np.asarray(model.encode_document(data.texts, **encoding)), data.n_places)
        self.indices = [FlexIndex(str(folder / str(i)), verbose=False) for i in range(data.n_places)]
        for index, vectors in zip(self.indices, self.documents, strict=True):
            index.index([{"docno": str(i), "doc_vec": vector} for i, vector in enumerate(vectors)])

    def evaluate(self, name: str, order: int) -> tuple[PositionEvaluation, float]:
        """Evaluates one of `RERANKERS` with the queries in a random order; returns its ms per query as well."""
        numbers = np.random.default_rng(order).permutation(len(self.queries))
        topics = pd.DataFrame({"qid": numbers.astype(str), "query_vec": list(self.queries[numbers])})
        similarities, seconds = [], 0.0
        for index in self.indices:
            reranked, fastest = _time(RERANKERS[name](index), index.np_retriever(num_results=100)(topics))
            seconds += fastest
            scores = np.full((len(self.queries), self.data.n_documents), -np.inf)
            scores[reranked["qid"].astype(int), reranked["docno"].astype(int)] = reranked["score"]
            similarities.append(scores)
        evaluation = self.data.evaluate(np.concatenate(similarities, axis=1), name=name)
        return evaluation, 1000 * seconds / (len(self.queries) * len(self.indices))

    def displacements(self) -> dict[str, float]:
        """Returns how often a query is adapted without state, and how far its vector moves then on average."""
        lengths = [
            float(np.linalg.norm(adapt(query, documents, query, DartSettings())))
            for documents in np.asarray(self.documents, dtype=np.float64)
            for query in self.queries.astype(np.float64)
        ]
        return {"share": float(np.mean(np.array(lengths) > 0)), "length": float(np.mean([n for n in lengths if n]))}


def _time(transformer: pt.Transformer, results: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    """Returns the output of a transformer, and the least CPU seconds it took, on one thread."""
    seconds = []
    with threadpool_limits(1):
        for _ in range(N_TIMES):
            start = time.process_time()
            output = transformer(results)
            seconds.append(time.process_time() - start)
    return output, min(seconds)


def _time_large(n_queries: int = 200, n_documents: int = 5000, dimension: int = 1024) -> dict[str, Any]:
    """Times DART at 100 candidates of 1024 dimensions: random queries and documents with a common component."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(n_queries + n_documents, dimension)) + rng.normal(size=dimension)
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    topics = pd.DataFrame({"qid": [str(i) for i in range(n_queries)], "query_vec": list(vectors[:n_queries])})
    with tempfile.TemporaryDirectory() as folder:
        index = FlexIndex(str(Path(folder) / "index"), verbose=False)
        index.index([{"docno": str(i), "doc_vec": vector} for i, vector in enumerate(vectors[n_queries:])])
        results = index.np_retriever(num_results=100)(topics)
        loaded = index.vec_loader()(results)
        times = {
            "ms": _time(Dart(index), results)[1],
            "ms_without_index": _time(Dart(), loaded)[1],
            "ms_stateless": _time(Dart(index, state="stateless"), results)[1],
        }
    return {name: 1000 * seconds / n_queries for name, seconds in times.items()}


def table(record: Record) -> str:
    """Returns nDCG@10 and PSI of all rerankers, with differences to the same encoder without a reranker."""
    rows = [row for row in record.rows if "reranker" in row]
    header = ["encoder", "documents", "reranker", "nDCG@10", "PSI", "ms per query"]
    cells = [
        [
            row["encoder"],
            row["encoding"],
            row["reranker"],
            *(cell(row[name], row["to_none"][name]) for name in ("ndcg", "psi")),
            "" if row["reranker"] == NONE else f"{row['ms']:.1f}",
        ]
        for row in rows
    ]
    orders = [
        f"{row['encoder']}, {row['encoding']}: nDCG@10 and PSI of {N_ORDERS} orders: "
        + ", ".join(f"{ndcg:.3f} / {psi:.3f}" for ndcg, psi in row["orders"])
        for row in rows
        if "orders" in row
    ]
    moved = [
        f"{row['encoder']}, {row['encoding']}: {row['displacements']['share']:.0%} of the queries are adapted, and "
        f"move by {row['displacements']['length']:.2f}"
        for row in rows
        if "displacements" in row
    ]
    times = [f"100 candidates of 1024 dimensions: {row}" for row in record.rows if "timing" in row]
    return "\n".join([markdown(header, cells), "", *orders, *moved, *times])


if __name__ == "__main__":
    main()
