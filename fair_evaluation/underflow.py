"""Finds attention weights that underflow to exactly 0, so that heads no longer see distant tokens.

A bias that grows with distance (ALiBi: slope m, distance d, weight exp(-m d) / Z) makes weights smaller than the
smallest number of the dtype in which they are stored. Keys beyond that distance are then lost to the head, and no
rescaling of its weights brings them back.

The measurement follows eager attention in transformers: softmax, then a cast to the model's dtype. Here the softmax is
computed in float64 and the cast keeps subnormal numbers, so that underflow within a float32 kernel does not add to it.
Fused kernels cast exp(logit - maximum) before they divide by Z, and lose a key at a distance that is log(Z) / m
greater. Kernels that flush subnormal numbers to 0, as torch's fused CPU kernel does in float32 and bfloat16 (torch
2.13), lose it earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import pandas as pd
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from fair_calibration import FairConfig, FairSentenceTransformer, calibrate
from fair_calibration.limits import position_limit
from fair_calibration.validation import validate_positive_int
from fair_evaluation.documents import batches, count_tokens
from fair_evaluation.observation import Call, load_batch, observe_attention, row_logits
from fair_evaluation.position_collections import load_passages

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BLOCK_ROWS = 8  # small, so that the first and the last block have little weight among the measured rows


def diagnose_underflow(
    model: SentenceTransformer,
    *,
    lengths: Sequence[int],
    dtypes: Sequence[Dtype] = ("float32", "bfloat16", "float16"),
    texts: Iterable[str] | None = None,
    max_rows: int | None = 512,
) -> pd.DataFrame:
    """Measures which attention weights of the plain model are exactly 0 in a dtype, by layer and head.

    One sequence of each length is made by joining texts, repeatedly if needed. It runs through the model in the model's
    own dtype; only the weights are cast.

    Args:
        model: A plain or calibrated model that `fair_calibration.calibrate` accepts. It is not changed.
        lengths: The lengths in tokens, with special tokens; they may exceed ``max_seq_length``.
        dtypes: The dtypes in which the weights are stored.
        texts: The texts that the sequences are made of; None means the passages that come with `fair_evaluation`.
        max_rows: The number of rows measured in longer sequences, in evenly spaced blocks of 8 that include the first
            and the last row; None measures all rows.

    Returns:
        One row per length, layer (counted from 0), head and dtype:

        - ``share_zero``: the share of the weights of visible keys that are exactly 0;
        - ``first_zero``: the smallest distance in tokens at which a weight is 0; missing if none is;
        - ``all_zero_from``: the smallest distance from which on all weights are 0; missing if that of the most distant
          key is not.

    Raises:
        TypeError: A length is not an integer, or ``texts`` is a single string or has an element that is not a string.
        ValueError: The model cannot be calibrated or cannot take a length, a dtype is unknown, or all texts are empty.
    """
    lengths = [validate_positive_int("lengths", length) for length in lengths]
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise ValueError(f"dtypes: expected some of {list(DTYPES)}, got {unknown}")
    max_rows = None if max_rows is None else validate_positive_int("max_rows", max_rows)
    if texts is None:
        texts = [passage.text for passage in load_passages()]
    texts = [text for batch in batches(texts, 1024) for text in batch]
    fair = calibrate(model, FairConfig()).eval()
    limit = position_limit(fair.fair.model)
    if limit is not None and max(lengths, default=0) > limit:
        raise ValueError(f"lengths: the model has positions for {limit} tokens, got {max(lengths)}")
    rows: list[_Row] = []
    fair.fair.document_length = None
    for length in lengths:
        observer = UnderflowObserver(length, tuple(dtypes), max_rows)
        fair.max_seq_length = length
        batch = load_batch(fair, [_text_of_length(fair, texts, length)], prompt="")
        if batch.baskets.valid != ((0, length),):
            raise ValueError(f"lengths: the tokenizer makes no sequence of {length} tokens")
        try:
            observe_attention(fair, batch, observer)
        except (IndexError, RuntimeError) as error:
            raise ValueError(
                f"lengths: {type(fair.fair.model).__name__} fails at {length} tokens, probably more than it has "
                f"positions for ({type(error).__name__}: {error})"
            ) from error
        rows += observer.rows
    frame = pd.DataFrame(rows, columns=list(_Row._fields))
    return frame.astype({"first_zero": "Int64", "all_zero_from": "Int64"})


class _Row(NamedTuple):
    length: int
    layer: int
    head: int
    dtype: str
    share_zero: float
    first_zero: int | None
    all_zero_from: int | None


def _text_of_length(model: FairSentenceTransformer, texts: Sequence[str], length: int) -> str:
    """Joins texts until they have at least ``length`` tokens; the tokenizer cuts the rest."""
    n_tokens = sum(count_tokens(model, texts, prompt="")) if texts else 0
    if not any(text.strip() for text in texts):
        raise ValueError("texts: expected at least one that is not empty, to make sequences of")
    repeats = 1 + length // n_tokens
    while True:
        text = "\n\n".join([*texts] * repeats)
        if count_tokens(model, [text], prompt="")[0] >= length:
            return text
        repeats += 1


class UnderflowObserver:
    """Counts the weights of one sequence that are 0 in each dtype; every attention call adds to ``rows``."""

    def __init__(self, length: int, dtypes: Sequence[str], max_rows: int | None) -> None:
        self.length = length
        self.dtypes = dtypes
        self.max_rows = max_rows
        self.rows: list[_Row] = []

    def __call__(self, layer: int, call: Call) -> None:
        """Counts for the heads of one layer."""
        counts: dict[str, list[Tensor]] = {dtype: [] for dtype in self.dtypes}
        for rows in _row_blocks(self.length, self.max_rows):
            logits, visible = row_logits(call, 0, rows, slice(0, self.length), dtype=torch.float64)
            weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
            positions = torch.arange(self.length, device=weights.device)
            distance = (positions[rows, None] - positions).abs()
            for dtype in self.dtypes:
                counts[dtype].append(_count(weights.to(DTYPES[dtype]) == 0, visible, distance))
        for dtype in self.dtypes:
            n_zero, n_visible, first_zero, last_nonzero, farthest = torch.stack(counts[dtype]).unbind(1)
            measures = zip(
                (n_zero.sum(0).double() / n_visible.sum(0)).tolist(),
                first_zero.amin(0).tolist(),
                last_nonzero.amax(0).tolist(),
                farthest.amax(0).tolist(),
                strict=True,
            )
            for head, (share, first, last, most) in enumerate(measures):
                all_zero_from = last + 1 if last < most else None
                first_zero_or_none = first if first <= most else None
                self.rows.append(_Row(self.length, layer, head, dtype, share, first_zero_or_none, all_zero_from))


def _count(zero: Tensor, visible: Tensor, distance: Tensor) -> Tensor:
    """Counts zeros in one block of weights, shape (H, l, L).

    Returns:
        Five numbers per head, int64, shape (5, H): zeros; visible keys; the smallest distance of a zero (L without
        one); the largest distance of a weight above 0; and that of a visible key (-1 without one).
    """
    visible = visible.expand_as(zero)
    zero = zero & visible
    none = zero.shape[-1]
    return torch.stack(
        [
            zero.sum((1, 2)),
            visible.sum((1, 2)),
            torch.where(zero, distance, none).amin((1, 2)),
            torch.where(visible & ~zero, distance, -1).amax((1, 2)),
            torch.where(visible, distance, -1).amax((1, 2)),
        ]
    )


def _row_blocks(length: int, max_rows: int | None) -> list[slice]:
    """Returns blocks of all rows, or evenly spaced ones, the first and last row included, beyond ``max_rows`` rows."""
    if max_rows is None or length <= max_rows:
        return [slice(start, min(start + _BLOCK_ROWS, length)) for start in range(0, length, _BLOCK_ROWS)]
    n_blocks = max(2, max_rows // _BLOCK_ROWS)
    size = min(_BLOCK_ROWS, max(1, max_rows // n_blocks))
    starts = torch.linspace(0, length - size, n_blocks).long().tolist()
    return [slice(start, start + size) for start in starts]
