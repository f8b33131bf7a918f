"""Measures retrieval pipelines over a plain and a calibrated index: nDCG@10, PSI, time a query and size.

    python benchmarks/pipelines.py --record benchmarks/records/pipelines.jsonl --passages FILE
    python benchmarks/pipelines.py --record benchmarks/records/pipelines.jsonl --table   # only prints what is recorded

FILE has passages with questions as JSON lines, in the format of `fair_evaluation`'s `load_passages`; the default is the
project's own passages. Documents are made of 3 passages of about 165 tokens, and every passage stands once in every
place (`rotations`). The pipelines are those of docs/pipelines.md; one more is one more line of `PIPELINES`. JPQ needs
faiss-cpu, and is left out without it. The time of a query is the CPU time, on one thread, of a pipeline that gets this
query alone, the smallest of several runs: other work on the machine adds little to it.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pandas as pd
import pyterrier as pt
import pyterrier_alpha as pta
import torch
from ir_measures import nDCG
from pyterrier_dr import VectorPrf
from pyterrier_pisa import PisaIndex
from rotations import N_RESAMPLES, Record, Rotations, compare, describe, markdown
from tqdm.auto import tqdm
from ways import GEOMETRIES, SEED, Study, cell, collections, number, study_parser

from fair_evaluation import PositionEvaluation, from_experiment
from fair_evaluation.position_collections import PositionCollection
from pyterrier_fair import Dart, FairBiEncoder, FairIndex, FairPassages, PositionDataset

DEPTH = 10  # results of each stage
PASSAGES = 40  # retrieved, so that 10 documents of at most 4 passages result
CANDIDATES = 100  # of DART, as in its paper; with fewer than 23 it changes nothing
NEIGHBOURS = 4  # in the corpus graph of LADR and GAR
STRENGTHS = {"plain": 0.0, "calibrated": 0.5}
N_TIMED, N_RUNS = 5, 3


class Parts(NamedTuple):
    """What the pipelines of one rotation and one encoder are made of."""

    dataset: PositionDataset
    encoder: FairBiEncoder
    bm25: pt.Transformer
    index: FairIndex
    passages: FairIndex
    answers: dict[str, str]

    @property
    def dense(self) -> pt.Transformer:
        """Retrieval by one vector a document."""
        return self.index.retriever(num_results=DEPTH)


def _prf(p: Parts) -> pt.Transformer:
    flex = p.index.flex()
    return p.dense >> flex.vec_loader() >> VectorPrf(beta=0.2, k=3) >> flex.np_retriever(num_results=DEPTH)


def _jpq(p: Parts) -> pt.Transformer:
    from pyterrier_dr.jpq import JPQTrainer

    trainer = JPQTrainer(p.encoder, p.index.flex(), M=48, nbits=4, pq_impl="faiss2", device="cpu")
    first, second, *_ = p.index.flex().docnos()
    trainer.fit([{"query": "", "doc_id_a": first, "doc_id_b": second}], pq_only=True)
    return p.index.query_encoder() >> trainer.jpq_index(f"{p.index.path}.jpq").retriever_pq(topk=DEPTH)


PIPELINES: dict[str, Callable[[Parts], pt.Transformer]] = {
    "BM25": lambda p: p.bm25,
    "dense": lambda p: p.dense,
    "BM25, re-ranked by stored vectors": lambda p: p.bm25 >> p.index.query_encoder() >> p.index.flex().np_scorer(),
    "hybrid (RRF)": lambda p: pta.RRFusion(p.bm25, p.dense),
    "VectorPrf": _prf,
    f"DART, {CANDIDATES} candidates": lambda p: p.index.retriever(num_results=CANDIDATES) >> Dart(p.index),
    "LADR": lambda p: p.bm25 >> p.index.query_encoder() >> p.index.flex().ladr(NEIGHBOURS, num_results=DEPTH),
    "GAR": lambda p: p.bm25 >> p.index.query_encoder() >> p.index.flex().gar(NEIGHBOURS, num_results=DEPTH),
    "HyDE, given the answer": lambda p: pt.apply.query(lambda q: f"{q['query']} {p.answers[q['qid']]}") >> p.dense,
    "JPQ, 48 codes of 4 bits": _jpq,
    "passages": lambda p: p.passages.retriever(num_results=PASSAGES) >> pt.text.max_passage() % DEPTH,
    "BM25, re-ranked by texts": lambda p: p.bm25 >> pt.text.get_text(p.dataset) >> p.encoder,
}


def main() -> None:
    """Measures what the record lacks, and prints the tables."""
    args = study_parser(__doc__).parse_args()
    record = Record(args.record)
    if not args.table:
        args.encoder = args.encoder or ["minilm"]
        for study in collections(args, {"3 x 165": GEOMETRIES["3 x 165"]}):
            with tempfile.TemporaryDirectory() as folder:
                _measure(record, study, Path(folder))
    print(table(record))


def _measure(record: Record, study: Study, folder: Path) -> None:
    parts: dict[str, list[Parts]] = {}
    for variant, strength in STRENGTHS.items():
        fair = FairBiEncoder(study.model, strength=strength)
        parts[variant] = [_prepare(c, fair, folder / variant / str(r)) for r, c in enumerate(study.data.collections)]
    where = {name: study.where[name] for name in ("encoder", "passages")}
    for name, build in tqdm(PIPELINES.items(), unit="pipeline"):
        if build is _jpq and importlib.util.find_spec("faiss") is None:
            continue
        record.get({**where, "pipeline": name}, partial(_row, parts, build, study.data, study.facts))


def _prepare(collection: PositionCollection, encoder: FairBiEncoder, folder: Path) -> Parts:
    dataset = PositionDataset(collection)
    documents = list(collection.documents)
    folder.mkdir(parents=True)
    pisa = PisaIndex(str(folder / "pisa"), text_field="text")
    pisa.index(documents)
    passages = FairIndex(folder / "passages", encoder)
    (FairPassages(encoder) >> passages).index(documents)
    return Parts(
        dataset=dataset,
        encoder=encoder,
        bm25=pisa.bm25(num_results=DEPTH),
        index=FairIndex(folder / "index", encoder).index(documents),
        passages=passages,
        answers={},
    )


def _row(
    parts: dict[str, list[Parts]], build: Callable[[Parts], pt.Transformer], data: Rotations, facts: dict[str, Any]
) -> dict[str, Any]:
    answers = {f"r{r}{q.id}": q.answer for r in range(data.n_places) for q in data.questions}
    pipelines = {v: [build(p._replace(answers=answers)) for p in found] for v, found in parts.items()}
    results = {variant: evaluate(pipelines[variant], parts[variant], data) for variant in pipelines}
    times = time_queries({v: found[0] for v, found in pipelines.items()}, parts["plain"][0].dataset.get_topics())
    row: dict[str, Any] = {variant: {**describe(result), "ms": times[variant]} for variant, result in results.items()}
    if any((results["plain"].rows["score"] != results["calibrated"].rows["score"]).to_numpy()):
        row["difference"] = compare(results["calibrated"], results["plain"])
    return row | _size(parts["calibrated"][0], build) | facts


def evaluate(pipelines: list[pt.Transformer], parts: list[Parts], data: Rotations) -> PositionEvaluation:
    """Evaluates nDCG@10 by place over all rotations, each searched alone."""
    passage_of = dict(zip((q.id for q in data.questions), data.passages, strict=True))
    results, topics = [], []
    for pipeline, part in zip(pipelines, parts, strict=True):
        queries = part.dataset.get_topics()
        found = pt.Experiment(
            [pipeline],
            queries[["qid", "query"]],
            part.dataset.get_qrels(),
            [nDCG @ 10],
            names=["pipeline"],
            perquery=True,
        )
        results.append(found)
        topics.append(queries.assign(passage=[passage_of[qid[2:]] for qid in queries["qid"]]))
    evaluations = from_experiment(pd.concat(results), pd.concat(topics), unit="passage", n_resamples=N_RESAMPLES)
    return evaluations["pipeline"]


def time_queries(pipelines: dict[str, pt.Transformer], topics: pd.DataFrame) -> dict[str, float]:
    """Returns the milliseconds that each pipeline takes for one query: the mean over queries of the smallest times."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    chosen = topics[["qid", "query"]].sample(n=min(N_TIMED, len(topics)), random_state=SEED)
    seconds = np.full((len(pipelines), len(chosen), N_RUNS + 1), np.inf)
    for run in range(N_RUNS + 1):
        for query in range(len(chosen)):
            for i, pipeline in enumerate(pipelines.values()):  # alternately
                start = time.process_time()
                pipeline(chosen.iloc[[query]])
                seconds[i, query, run] = time.process_time() - start
    torch.set_num_threads(threads)
    means = seconds[..., 1:].min(-1).mean(-1)  # without the first run, which loads what is loaded on demand
    return dict(zip(pipelines, (means * 1000).tolist(), strict=True))


def _size(parts: Parts, build: Callable[[Parts], pt.Transformer]) -> dict[str, float]:
    """Returns the vectors and their bytes for one document."""
    n = len(parts.dataset.collection.documents)
    if build in (PIPELINES["BM25"], PIPELINES["BM25, re-ranked by texts"]):
        return {}
    if build is _jpq:
        return {"vectors": 1, "bytes": Path(f"{parts.index.path}.jpq", "codes.f4").stat().st_size / n}
    index = parts.passages if build is PIPELINES["passages"] else parts.index
    return {"vectors": len(index.flex()) / n, "bytes": (index.path / "vecs.f4").stat().st_size / n}


def table(record: Record) -> str:
    """Returns a table for each encoder and collection: plain, then calibrated, with the difference and its interval."""
    parts = []
    for encoder, passages in dict.fromkeys((row["encoder"], row["passages"]) for row in record.rows):
        rows = [row for row in record.rows if (row["encoder"], row["passages"]) == (encoder, passages)]
        sizes = f"{rows[0]['documents']} documents of {rows[0]['tokens']:.0f} tokens, {rows[0]['questions']} questions"
        parts.append(f"{encoder}, {passages}: {sizes} in each rotation")
        header = ["pipeline", "nDCG@10", "calibrated", "PSI", "calibrated", "ms a query", "vectors", "bytes"]
        parts.append(markdown(header, [_cells(row) for row in rows]))
    return "\n\n".join(parts)


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["pipeline"]]
    for measure in ("ndcg", "psi"):
        is_same = "difference" not in row
        cells.append(number(row["plain"][measure]))
        cells.append("the same" if is_same else cell(row["calibrated"][measure], row["difference"][measure]))
    times = [row[variant]["ms"] for variant in STRENGTHS]
    sizes = [f"{row['vectors']:.1f}", f"{row['bytes']:.0f}"] if "vectors" in row else ["", ""]
    return [*cells, " / ".join(f"{ms:.0f}" for ms in times), *sizes]


if __name__ == "__main__":
    main()
