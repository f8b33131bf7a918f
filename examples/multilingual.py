"""Measures in four languages whether an encoder favours the beginning of documents: plain, calibrated, in even chunks.

The same documents and questions, in English and translated into German, Spanish and Chinese; every passage stands once
at the beginning, in the middle and at the end of a document. Each language is an index of its own, which is searched
with questions in that language and in English. Prints a table, and draws nDCG@10 by language and place.

    python examples/multilingual.py                      # multilingual-e5-small, offline
    python examples/multilingual.py --model BAAI/bge-m3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from sentence_transformers import SentenceTransformer

from fair_calibration import EvenChunks, FairConfig, calibrate
from fair_evaluation import PositionEvaluation, evaluate_positions
from fair_evaluation.cutting import token_counter
from fair_evaluation.position_collections import (
    PLACES,
    Passage,
    PositionCollection,
    build_collections,
    load_passages,
)
from fair_evaluation.sentences import excerpt

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # for the encoder that needs no network, and intervals

TRANSLATIONS = Path(__file__).parent / "translations"
LANGUAGES = {"English": None, "German": "de", "Spanish": "es", "Chinese": "zh"}
PLAIN, SETTINGS = "plain", {"calibrated": FairConfig(), "even chunks": EvenChunks()}
MAX_SEQ_LENGTH = 512
COLUMNS = ["documents", "questions", "model", "nDCG@10", *PLACES, "PSI"]


def main() -> None:
    """Encodes, evaluates, prints the table and saves the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a multilingual sentence-transformers model (default: multilingual-e5-small)")
    parser.add_argument("--output", type=Path, default=Path("results/multilingual.png"), help="the picture")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    args = parser.parse_args()
    plain = load_model(args.model)
    models = {PLAIN: plain, **{name: calibrate(plain, settings) for name, settings in SETTINGS.items()}}
    collections = translated_collections(plain)
    sizes = {(len(rotations[0].documents), len(rotations[0].queries)) for rotations in collections.values()}
    print("{} documents with {} questions in each language\n".format(*sizes.pop()))
    evaluations = evaluate(models, collections, show_progress_bar=not args.quiet)
    print(make_table(evaluations).to_string(index=False, float_format="{:.3f}".format))
    print("\nPSI is 1 - min / max of nDCG@10 over the places; 0 is position-fair.\n")
    for line in differences(evaluations):
        print(line)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    draw(evaluations).savefig(args.output, dpi=110)
    print(f"Picture of nDCG@10 by place, with 95 % intervals: {args.output}")


def load_model(name: str | None) -> SentenceTransformer:
    """Loads a model that reads at most 512 tokens."""
    if name is None:
        from encoders import load_encoder

        return load_encoder("e5-small")
    model = SentenceTransformer(name)
    model.max_seq_length = min(MAX_SEQ_LENGTH, model.max_seq_length or MAX_SEQ_LENGTH)
    return model


def translated_collections(model: SentenceTransformer) -> dict[str, list[PositionCollection]]:
    """Makes the three rotations of the documents in each language, all of the same passages with the same questions.

    Passages are cut to whole sentences, so that the model reads the three passages of a document in every language. A
    question stays if its answer is left in all languages.
    """
    count = token_counter(model)
    most = (model.max_seq_length - 12) // len(PLACES)  # 12 for the prompt and the special tokens
    parallel: list[list[Passage]] = []
    sources = [load_passages(code and TRANSLATIONS / f"{code}.jsonl") for code in LANGUAGES.values()]
    for translations in zip(*sources, strict=True):
        cut = [excerpt(passage, most, count) for passage in translations]
        asked = [{question.id for question in passage.questions} for passage in cut if passage is not None]
        if len(asked) == len(sources) and (common := set.intersection(*asked)):
            parallel.append([_keep(passage, common) for passage in cut if passage is not None])
    return {language: build_collections([passages[i] for passages in parallel]) for i, language in enumerate(LANGUAGES)}


def _keep(passage: Passage, questions: set[str]) -> Passage:
    kept = tuple(question for question in passage.questions if question.id in questions)
    return replace(passage, questions=kept, article=passage.passage_id)  # the id is the same in all languages


def evaluate(
    models: dict[str, SentenceTransformer], collections: dict[str, list[PositionCollection]], *, show_progress_bar: bool
) -> dict[tuple[str, str, str], PositionEvaluation]:
    """Evaluates every model on every language, by the language of documents and of questions and by the model."""
    evaluations = {}
    for name, model in models.items():
        queries = {
            language: [
                model.encode_query([query.query for query in rotation.queries], show_progress_bar=show_progress_bar)
                for rotation in rotations
            ]
            for language, rotations in collections.items()
        }
        for language, rotations in collections.items():
            documents = [
                model.encode_document(
                    [document["text"] for document in rotation.documents], show_progress_bar=show_progress_bar
                )
                for rotation in rotations
            ]
            for asked in dict.fromkeys((language, "English")):
                rows = []
                for rotation, vectors, asking in zip(rotations, documents, queries[asked], strict=True):
                    rows += score(rotation, model.similarity(asking, vectors).numpy())
                evaluations[language, asked, name] = evaluate_positions(
                    pd.DataFrame(rows, columns=["qid", "score", "position", "question"]), unit="question"
                )
    return evaluations


def score(collection: PositionCollection, similarities: np.ndarray) -> list[tuple[str, float, str, str]]:
    """Returns query, nDCG@10, place and question; ``similarities`` are (queries, documents)."""
    numbers = {document["docno"]: i for i, document in enumerate(collection.documents)}
    rows = []
    for query, row in zip(collection.queries, similarities, strict=True):
        rank = 1 + int((row > row[numbers[query.docno]]).sum())
        rows.append((query.qid, 1 / np.log2(1 + rank) if rank <= 10 else 0.0, query.place, query.question))
    return rows


def make_table(evaluations: dict[tuple[str, str, str], PositionEvaluation]) -> pd.DataFrame:
    """Puts the evaluations into a table, first with questions in the language of the documents."""
    languages = list(LANGUAGES)
    ordered = sorted(evaluations, key=lambda key: (key[0] != key[1], languages.index(key[0])))
    rows = [(*key, (e := evaluations[key]).mean, *e.groups["mean"], e.psi) for key in ordered]
    return pd.DataFrame(rows, columns=COLUMNS)


def differences(evaluations: dict[tuple[str, str, str], PositionEvaluation]) -> Iterator[str]:
    """Yields what the settings change in each language, with 95 % intervals from a paired bootstrap over questions."""
    from rotations import compare

    for name in SETTINGS:
        yield f"{name} minus plain, questions in the language of the documents:"
        for language in LANGUAGES:
            changed = compare(evaluations[language, language, name], evaluations[language, language, PLAIN])
            ndcg, psi = ("{:+.3f} [{:+.3f}, {:+.3f}]".format(*changed[measure]) for measure in ("ndcg", "psi"))
            yield f"{language:8} nDCG@10 {ndcg}  PSI {psi}"


def draw(evaluations: dict[tuple[str, str, str], PositionEvaluation]) -> Figure:
    """Draws nDCG@10 by place with intervals, a panel for each language."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    panels: Sequence = figure.subplots(1, len(LANGUAGES), sharey=True)
    for axes, language in zip(panels, LANGUAGES, strict=True):
        for (_, _, name), result in ((k, r) for k, r in evaluations.items() if k[:2] == (language, language)):
            groups = result.groups
            errors = [groups["mean"] - groups["low"], groups["high"] - groups["mean"]]
            axes.errorbar(groups["group"], groups["mean"], yerr=errors, marker="o", capsize=3, label=name)
        axes.set(title=language, xlabel="position of the answer")
    panels[0].set_ylabel("nDCG@10")
    panels[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
