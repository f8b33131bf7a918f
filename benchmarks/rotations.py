"""Documents made of passages that stand once in every place, scores by place, and records.

Passages of different articles make a document and stand in it in all cyclic rotations, so that each stands once in
every place. Every rotation is a collection of its own. Long passages are cut to an excerpt of whole sentences; the
passages of a document differ in length, so that no size of baskets or chunks fits their borders.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from encode import processor_name, software
from numpy.typing import NDArray

from fair_evaluation import PositionEvaluation, evaluate_positions, psi_test
from fair_evaluation.cutting import token_counter
from fair_evaluation.position_collections import Passage, PositionCollection, Question, rotate_places
from fair_evaluation.resampling import add_up_units, draw_weights
from fair_evaluation.sentences import excerpt

N_RESAMPLES = 2000
N_SEARCHES = 400  # random orders in which passages are grouped; the one with the most documents is used


class Geometry(NamedTuple):
    """How documents are made: ``n_places`` passages of ``least`` to ``most`` tokens, ``low`` to ``high`` in all."""

    n_places: int
    least: int
    most: int
    low: int
    high: int


class Rotations(NamedTuple):
    """R rotations of N documents, and Q questions that are put to each rotation.

    Attributes:
        collections: The R rotations; what stands at place i of a document in the first stands at (i + r) mod R in
            rotation r.
        texts: Their R * N texts, rotation after rotation.
        n_tokens: The mean number of tokens of a text, without special tokens.
        questions: Q questions.
        passages: The id of the passage that answers each.
        documents: The document of each question within a rotation, int64 (Q,).
        indices: The place of its passage in the first rotation, int64 (Q,).
        n_places: R, the number of rotations and of passages in a document.
    """

    collections: list[PositionCollection]
    texts: list[str]
    n_tokens: float
    questions: list[Question]
    passages: list[str]
    documents: NDArray[np.int64]
    indices: NDArray[np.int64]
    n_places: int

    @property
    def n_documents(self) -> int:
        """The number of documents in a rotation."""
        return len(self.texts) // self.n_places

    def evaluate(self, similarities: NDArray[np.floating], name: str = "") -> PositionEvaluation:
        """Evaluates nDCG@10 by place. All questions of a passage are resampled together.

        Args:
            similarities: Of all questions to the texts of all rotations, shape (Q, R * N).
            name: What is evaluated.
        """
        rows = []
        for rotation, scores in enumerate(np.split(np.asarray(similarities), self.n_places, axis=1)):
            relevant = np.take_along_axis(scores, self.documents[:, None], axis=1)
            ranks = 1 + (scores > relevant).sum(1)
            gains = np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0.0)
            places = (self.indices + rotation) % self.n_places
            rows += [
                (f"r{rotation}{question.id}", float(gain), str(place), passage)
                for question, gain, place, passage in zip(self.questions, gains, places, self.passages, strict=True)
            ]
        frame = pd.DataFrame(rows, columns=["qid", "score", "position", "passage"])
        order = [str(place) for place in range(self.n_places)]
        return evaluate_positions(
            frame, unit="passage", order=order, n_resamples=N_RESAMPLES, name=name, measure="nDCG@10"
        )


def build_rotations(passages: Sequence[Passage], geometry: Geometry, tokenizer: Any, seed: int = 0) -> Rotations:
    """Makes as many documents as a random search finds, each passage in one document at most.

    Raises:
        ValueError: No passages of different articles fit.
    """
    count = token_counter(tokenizer)
    excerpts = [excerpt(passage, geometry.most, count) for passage in passages]
    sized = [(passage, count(passage.text)) for passage in excerpts if passage is not None]
    groups = _group([(passage, n) for passage, n in sized if n >= geometry.least], geometry, seed)
    if not groups:
        raise ValueError(f"passages: no {geometry.n_places} passages of different articles make a document: {geometry}")
    collections = rotate_places([[[passage] for passage in group] for group in groups])
    texts = [document["text"] for collection in collections for document in collection.documents]
    asked = [(q, p, d, i) for d, group in enumerate(groups) for i, p in enumerate(group) for q in p.questions]
    return Rotations(
        collections=collections,
        texts=texts,
        n_tokens=float(np.mean([count(text) for text in texts])),
        questions=[question for question, _, _, _ in asked],
        passages=[passage.passage_id for _, passage, _, _ in asked],
        documents=np.array([document for _, _, document, _ in asked]),
        indices=np.array([index for _, _, _, index in asked]),
        n_places=geometry.n_places,
    )


def _group(sized: Sequence[tuple[Passage, int]], geometry: Geometry, seed: int) -> list[list[Passage]]:
    """Returns the most groups of different articles that a greedy search from random orders finds, long ones first."""
    shuffle, best = random.Random(seed), []
    for _ in range(N_SEARCHES):
        left, groups = list(sized), []
        shuffle.shuffle(left)
        left.sort(key=lambda part: -part[1] + shuffle.uniform(-25, 25))
        while len(left) >= geometry.n_places:
            first = left.pop(0)
            for _ in range(60):
                group = [first, *shuffle.sample(left, geometry.n_places - 1)]
                n_articles = len({passage.article for passage, _ in group})
                n_tokens = sum(n for _, n in group)
                if geometry.low <= n_tokens <= geometry.high and n_articles == geometry.n_places:
                    for part in group[1:]:
                        left.remove(part)
                    shuffle.shuffle(group)
                    groups.append([passage for passage, _ in group])
                    break
        if len(groups) > len(best):
            best = groups
    return best


def describe(result: PositionEvaluation) -> dict[str, Any]:
    """Returns nDCG@10 and PSI with their 95 % intervals, and nDCG@10 by place, as records have them."""
    return {
        "ndcg": result.mean,
        "ndcg_interval": list(result.intervals["mean"]),
        "psi": result.psi,
        "psi_interval": list(result.intervals["psi"]),
        "places": [float(value) for value in result.groups["mean"]],
    }


def compare(result: PositionEvaluation, base: PositionEvaluation) -> dict[str, Any]:
    """Returns paired differences to a base with 95 % intervals: of nDCG@10 by percentiles, of PSI by `psi_test`."""
    rows = result.rows.merge(base.rows, on=["qid", "unit", "group"], suffixes=("", "_base"), validate="one_to_one")
    units = pd.factorize(rows["unit"], sort=True)[0].astype(np.int64)
    codes, groups = pd.factorize(rows["group"], sort=True)
    gains = add_up_units(units, codes.astype(np.int64), (rows["score"] - rows["score_base"]).to_numpy(), len(groups))
    weights = draw_weights(len(gains.sums), n_resamples=N_RESAMPLES, seed=0)
    drawn = np.concatenate([gains.group_means(w).mean(1) for w in weights])
    test = psi_test(result, base, n_resamples=N_RESAMPLES)
    return {
        "ndcg": [result.mean - base.mean, *np.quantile(drawn, [0.025, 0.975]).tolist()],
        "psi": [test.difference, *test.interval],
    }


class Record:
    """JSON lines, one for each result; a result that is recorded is not measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def find(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the result with these values, or None."""
        return next((row for row in self.rows if all(row.get(name) == value for name, value in key.items())), None)

    def get(self, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the result with the values of ``key``; measures and writes it where it is not recorded."""
        if (row := self.find(key)) is not None:
            return row
        row = {**key, **_rounded(measure()), "cpu": processor_name(), **software()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        return row


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
