"""Chooses the strength of the calibration, and the basket size, for a model and documents without labels.

Pieces of the documents serve as queries: each should find its document, wherever in the document it stands. The texts
are cut into segments, which are rotated through all positions, and in every rotation the pieces of the segments rank
the texts. The score is the harmonic mean over positions of nDCG@10. It falls if one position is hard to find, and also
if calibration makes the vectors less specific, which segment reflection (`fair_evaluation.reflection`) does not show.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tqdm.auto import tqdm

from fair_calibration import FairConfig, FairSentenceTransformer, calibrate
from fair_calibration.prompts import document_prompt
from fair_calibration.validation import validate_positive_int
from fair_evaluation.cutting import cut_segments, cut_text, rotated_orders, token_counter
from fair_evaluation.documents import batches, count_tokens, encode_checked, max_document_tokens
from fair_evaluation.measures import Array, harmonic_mean, position_sensitivity_index

_QUERY_TOKENS = 32  # length of a piece, approximately
_SEGMENT_TOKENS = 16  # least length of a segment
_LEAST_TEXTS = 8


class TuningCounts(NamedTuple):
    """The number of texts that were used, and of those left out.

    Attributes:
        texts: The different texts that were given.
        examined: The texts drawn until enough of them could be used.
        too_short: Texts left out since they have fewer tokens than the largest basket tried, or than 16 per position.
        used: The texts that the choice is based on.
        truncated: The texts among these that were cut to what the model reads.
        queries: The pieces that serve as queries.
    """

    texts: int
    examined: int
    too_short: int
    used: int
    truncated: int
    queries: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuning:
    """The settings that `tune` chose, and the scores behind the choice; print it for a table.

    Attributes:
        config: The chosen settings, for `fair_calibration.calibrate`.
        curve: One row per candidate, the plain model first: the settings ``strength`` and ``basket_size``;
            ``score``, the harmonic mean over positions of nDCG@10, and its ``mean`` and ``psi``;
            ``behind``, the best score minus this one, and ``error``, the standard error of that difference;
            ``cosine``, the mean cosine similarity to the plain model's vectors; ``chosen``; and nDCG@10 by position,
            from ``at_0`` on.
        counts: The number of texts that were used, and of those left out.
    """

    config: FairConfig
    curve: pd.DataFrame
    counts: TuningCounts

    def __str__(self) -> str:
        counts, table = self.counts, self.curve.loc[:, "strength":"cosine"]
        settings = ", ".join(f"{name} {getattr(self.config, name)!r}" for name in table.columns[:2])
        return (
            f"Chosen: {settings}. The settings in use are kept if their score is within one standard error of the best "
            "one; otherwise, of the settings within one standard error, those closest to the plain model are chosen.\n"
            f"{counts.used} of {counts.texts} texts, {counts.queries} pieces of them as queries; {counts.examined} "
            f"examined, {counts.too_short} too short. {counts.truncated} of the texts used are longer than the model "
            f"reads and were cut.\n{table.to_string(index=False, float_format='{:.3f}'.format)}"
        )


def tune(
    model: SentenceTransformer,
    texts: Iterable[str],
    *,
    strengths: Sequence[float] = (0.25, 0.5, 0.75, 1.0),
    basket_sizes: Sequence[int] | None = None,
    n_positions: int = 4,
    max_texts: int = 32,
    seed: int = 0,
    batch_size: int = 32,
    show_progress_bar: bool = True,
) -> Tuning:
    """Chooses a strength, and a basket size if asked, by how well pieces of texts find their texts.

    The candidates are the plain model and all combinations of strengths and basket sizes to try. If the score of the
    settings in use (those of a calibrated model, or the defaults) is within one standard error of the best, they are
    kept, as the sample does not speak against them. Otherwise, of the candidates within one standard error of the best
    (the rule by which Breiman et al. 1984 prune trees), the one is chosen whose vectors have the highest mean cosine
    similarity to those of the plain model: if only the strength varies, the smallest. The standard error is that of the
    difference between two candidates, by the jackknife over texts.

    With T texts, every candidate encodes ``T * n_positions`` documents. The pieces, which together are as long as the
    T texts, are encoded once as queries.

    Args:
        model: A plain or calibrated model that `fair_calibration.calibrate` accepts. It is not changed.
        texts: Documents of the kind that will be encoded. They are read into memory, so give a sample of some thousands
            of a large collection. Texts that the model would truncate are cut to what it reads.
        strengths: The strengths to try.
        basket_sizes: The basket sizes to try; None keeps the one in use.
        n_positions: The number of segments per text, at least 2.
        max_texts: The number of texts to draw, at least 8. With fewer than about 20, the settings in use mostly stay.
        seed: Seed of the drawing. The same seed, texts and model give the same result.
        batch_size: The number of texts encoded at once.
        show_progress_bar: Whether to show a progress bar.

    Returns:
        The chosen settings and the scores of all candidates.

    Raises:
        TypeError: ``texts`` is a single string or has an element that is not a string, an argument has a wrong type, or
            the model encodes in even chunks.
        ValueError: An argument is out of range, the model cannot be calibrated with a candidate, its tokenizer gives no
            character offsets, fewer than 8 texts can be used, or a vector is zero or not finite.
    """
    for name, value, least in (("n_positions", n_positions, 2), ("max_texts", max_texts, _LEAST_TEXTS)):
        if validate_positive_int(name, value) < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    validate_positive_int("batch_size", batch_size)
    base = model.fair_config if isinstance(model, FairSentenceTransformer) else FairConfig()
    if not isinstance(base, FairConfig):
        raise TypeError(
            "model: it encodes documents in even chunks, and what is tuned here are the settings of FairConfig; give "
            "the plain model, as uncalibrate(model) returns it"
        )
    candidates = _candidates(base, strengths, [base.basket_size] if basket_sizes is None else basket_sizes)
    full = [replace(candidate, strength=1.0) for candidate in candidates]  # one model serves all strengths
    models = {config: calibrate(model, config) for config in dict.fromkeys(full[1:])}
    first = next(iter(models.values()))
    least_tokens = max(n_positions * _SEGMENT_TOKENS, *(config.min_content_tokens for config in models))
    sample = _draw(first, texts, n_positions, max_texts, least_tokens, seed)
    queries = encode_checked(first.encode_query, sample.pieces, batch_size=batch_size)
    orders = rotated_orders(n_positions)
    scores: list[Array] = []
    vectors: list[Array] = []
    n_documents = len(candidates) * orders.shape[0] * len(sample.texts)
    with tqdm(desc="tuning", unit="doc", total=n_documents, disable=not show_progress_bar) as bar:
        for candidate, key in zip(candidates, full, strict=True):
            fair = models.get(key, first)
            score, rotations = np.zeros((len(sample.texts), n_positions)), []
            for order in orders:
                documents = [" ".join(segments[i] for i in order) for segments in sample.texts]
                encoded = encode_checked(
                    fair.encode_document, documents, batch_size=batch_size, strength=candidate.strength
                )
                score += sample.score(fair.similarity(queries, encoded).numpy(), order)
                rotations.append(encoded / np.linalg.norm(encoded, axis=1, keepdims=True))
                bar.update(len(documents))
            scores.append(score)
            vectors.append(np.stack(rotations))
    cosines = np.array([(v * vectors[0]).sum(-1).mean() for v in vectors])
    curve = _curve(candidates, np.stack(scores), cosines, in_use=base)
    return Tuning(config=candidates[int(curve["chosen"].argmax())], curve=curve, counts=sample.counts)


def _candidates(base: FairConfig, strengths: Sequence[float], basket_sizes: Sequence[int]) -> list[FairConfig]:
    """Returns the plain model, and then all different combinations of settings with a strength above 0."""
    for name, values in {"strengths": strengths, "basket_sizes": basket_sizes}.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise TypeError(f"{name}: expected a list of values to try, got {values!r}")
    combinations = [replace(base, basket_size=size, strength=s) for size in basket_sizes for s in strengths]
    calibrated = [config for config in dict.fromkeys(combinations) if config.strength > 0]
    if not calibrated:
        raise ValueError(
            f"strengths: expected one above 0, and at least one of basket_sizes, got {strengths} and {basket_sizes}"
        )
    return [replace(base, strength=0.0), *calibrated]


class _Sample(NamedTuple):
    """T texts as lists of segments, and the Q pieces with the indices of the text and the segment that each is from."""

    texts: list[list[str]]
    pieces: list[str]
    text_of: NDArray[np.int64]
    segment_of: NDArray[np.int64]
    counts: TuningCounts

    def score(self, similarities: Array, order: NDArray[np.int64]) -> Array:
        """Returns what one rotation adds to the mean nDCG@10 by text and position.

        Args:
            similarities: The similarity of each piece to each text, shape (Q, T).
            order: The index of the segment at each position, shape (P,).

        Returns:
            Sums of gains divided by the number of pieces of the text, shape (T, P).
        """
        own = np.take_along_axis(similarities, self.text_of[:, None], axis=1)
        ranks = 1 + (similarities > own).sum(1)
        gains = np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0.0)  # nDCG@10 with one relevant document
        shape = len(self.texts), len(order)
        sums = np.zeros(shape)
        np.add.at(sums, (self.text_of, np.argsort(order)[self.segment_of]), gains)
        return sums / np.bincount(self.text_of)[:, None]


def _draw(
    model: FairSentenceTransformer, texts: Iterable[str], n_positions: int, max_texts: int, least_tokens: int, seed: int
) -> _Sample:
    """Draws texts that are long enough, and cuts them into segments and pieces."""
    pool = list(dict.fromkeys(text for batch in batches(texts, 1024) for text in batch))
    random.Random(seed).shuffle(pool)
    count, limit = token_counter(model), max_document_tokens(model)
    if limit is not None:  # leaves room for the prompt, special tokens, and tokens added where segments are joined
        limit = max(0, limit - count_tokens(model, [""], prompt=document_prompt(model))[0] - n_positions)
    used: list[list[str]] = []
    pieces: list[tuple[int, int, str]] = []
    examined = truncated = 0
    while examined < len(pool) and len(used) < max_texts:
        text = pool[examined]
        examined += 1
        read = text if limit is None else cut_text(text, limit, count)
        if (n_tokens := count(read)) < least_tokens:
            continue
        segments = cut_segments(model, read, n_positions) or []
        cuts = [cut_segments(model, s, max(1, round(n_tokens / n_positions / _QUERY_TOKENS))) or [s] for s in segments]
        pieces += [(len(used), i, piece) for i, cut in enumerate(cuts) for piece in cut if piece]
        used.append(segments)
        truncated += read != text
    counts = TuningCounts(len(pool), examined, examined - len(used), len(used), truncated, len(pieces))
    if counts.used < _LEAST_TEXTS:
        raise ValueError(
            f"texts: expected at least {_LEAST_TEXTS} different ones of at least {least_tokens} tokens within what the "
            f"model reads{'' if limit is None else f' ({limit} tokens)'}, got {counts.used}, and {counts.too_short} "
            "that are too short; give more or longer texts, or smaller basket_sizes"
        )
    text_of, segment_of = (np.array(column) for column in list(zip(*pieces, strict=True))[:2])
    return _Sample(used, [piece for _, _, piece in pieces], text_of, segment_of, counts)


def _curve(candidates: Sequence[FairConfig], scores: Array, cosines: Array, *, in_use: FairConfig) -> pd.DataFrame:
    """Builds the table of candidates and marks the chosen one.

    Args:
        candidates: The C candidates.
        scores: nDCG@10 by candidate, text and position, shape (C, T, P).
        cosines: The mean cosine similarity to the plain model's vectors, shape (C,).
        in_use: The settings in use.
    """
    n_texts = scores.shape[1]
    means = scores.mean(1)
    values = harmonic_mean(means)
    best = int(values.argmax())
    without_one = harmonic_mean((scores.sum(1, keepdims=True) - scores) / (n_texts - 1))  # (C, T)
    errors = np.sqrt((n_texts - 1) * (without_one[best] - without_one).var(1))  # jackknife
    behind = values[best] - values
    near = behind <= errors
    kept = np.array([candidate == in_use for candidate in candidates]) & near
    chosen = np.where(kept if kept.any() else near, cosines, -np.inf).argmax()
    curve = pd.DataFrame({n: [getattr(c, n) for c in candidates] for n in ("strength", "basket_size")})
    curve = curve.assign(
        score=values, mean=means.mean(1), psi=position_sensitivity_index(means), behind=behind, error=errors
    )
    curve = curve.assign(cosine=cosines, chosen=np.arange(len(candidates)) == chosen)
    return curve.join(pd.DataFrame(means).add_prefix("at_"))
