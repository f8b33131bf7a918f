"""What a calibrated model says about itself: its settings in use and what became of the documents."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fair_calibration.config import FairConfig

logger = logging.getLogger("fair_calibration")


class DocumentCounts(NamedTuple):
    """How many documents were encoded so far, by what became of them.

    Attributes:
        calibrated: Encoded with calibrated attention, or in chunks with ``FairConfig.chunk_size``.
        too_short: Left as they are: fewer content tokens than ``FairConfig.min_content_tokens``.
        plain: Encoded at strength 0.
        truncated: Of all of these, cut off at max_seq_length. What is cut off cannot be found.
    """

    calibrated: int = 0
    too_short: int = 0
    plain: int = 0
    truncated: int = 0

    @property
    def documents(self) -> int:
        """All documents encoded."""
        return self.calibrated + self.too_short + self.plain

    def plus(self, other: DocumentCounts) -> DocumentCounts:
        """Returns the sum, count by count."""
        return DocumentCounts(*(a + b for a, b in zip(self, other, strict=True)))


class DocumentCounter:
    """Adds up `DocumentCounts` from any number of threads, and warns at the first truncated document."""

    def __init__(self) -> None:
        self._counts = DocumentCounts()
        self._lock = threading.Lock()
        self._warned = False

    @property
    def counts(self) -> DocumentCounts:
        """The counts so far."""
        return self._counts

    def add(self, counts: DocumentCounts, *, max_seq_length: int | None) -> None:
        """Adds ``counts``; says once that documents are truncated at ``max_seq_length`` tokens."""
        with self._lock:
            self._counts = self._counts.plus(counts)
            warn = counts.truncated > 0 and not self._warned
            self._warned = self._warned or warn
        if warn:
            logger.warning(
                "Documents are truncated at max_seq_length=%s tokens, and what is cut off cannot be found. Raise "
                "model.max_seq_length if the model allows it; model.counts tells how many. Said once.",
                max_seq_length,
            )

    def take(self) -> DocumentCounts:
        """Returns the counts and starts again from 0."""
        with self._lock:
            counts, self._counts = self._counts, DocumentCounts()
        return counts

    def mute(self) -> None:
        """Counts without warning from now on."""
        self._warned = True

    # Locks are neither copied nor pickled; a copy starts from 0.
    def __getstate__(self) -> dict[str, Any]:
        return {"_counts": DocumentCounts()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        DocumentCounter.__init__(self)


def count_truncated(features: Mapping[str, Any], max_seq_length: int | None) -> int:
    """Returns how many of the documents that a tokenizer made ``features`` of were cut off."""
    encodings = getattr(features, "encodings", None)
    if encodings is not None:
        return sum(bool(encoding.overflowing) for encoding in encodings)
    # Slow tokenizers keep no record of what they cut off: documents that fill the limit count as truncated.
    if "attention_mask" not in features or max_seq_length is None:
        return 0
    return int((features["attention_mask"].sum(-1) >= max_seq_length).sum())


@dataclass(frozen=True)
class Summary:
    """The calibration in use in one model; `str` of it is made to be printed.

    Attributes:
        model: The class of the transformer.
        config: The settings, with nothing left on "auto".
        n_layers: The attention layers of the model.
        layers: The calibrated ones, 0 the first.
        modules: The class names of the calibrated layers' attention modules.
        mechanism: How the attention is reached.
        counts: What became of the documents so far.
        max_seq_length: Where documents are truncated, in tokens.
        pooled_row_only: Whether the last layer is computed for the pooled rows alone.
    """

    model: str
    config: FairConfig
    n_layers: int
    layers: tuple[int, ...]
    modules: tuple[str, ...]
    mechanism: str
    counts: DocumentCounts
    max_seq_length: int | None
    pooled_row_only: bool = False

    def __str__(self) -> str:
        return "\n".join(
            [*(self._attention() if self.config.chunk_size is None else self._chunks()), self._documents()]
        )

    def _attention(self) -> list[str]:
        config = self.config
        rows = {
            "cls": "the first token's row (cls pooling)",
            "last": "the last token's row (last-token pooling)",
            "mean": "every row (mean pooling)",
        }[config.pooling]
        isolated = {"none": "no token", "bos": "the first token", "bos_eos": "the first and the last token"}[
            config.isolate
        ]
        share = {"preserve": "its own mass", "equal": "a basket's share"}.get(
            str(config.isolated_share), str(config.isolated_share)
        )
        return [
            f"{self.model}: strength {config.strength}, baskets of {config.basket_size} tokens",
            f"  layers     {_spans(self.layers)} of {self.n_layers} ({', '.join(sorted(set(self.modules)))})",
            f"  rows       {rows}" + ("; the last layer is computed for no other" if self.pooled_row_only else ""),
            f"  isolated   {isolated}"
            + ("" if config.isolate == "none" else f", keeping {share}")
            + ("; baskets weigh by size" if config.last_basket == "proportional" else ""),
            f"  mechanism  {self.mechanism}",
        ]

    def _chunks(self) -> list[str]:
        config = self.config
        parts = f"parts of {config.unit_size} tokens" if config.pooling == "mean" else "the chunks' pooled vectors"
        return [
            f"{self.model}: strength {config.strength}, even chunks of at most {config.chunk_size} tokens",
            f"  joined     {parts}, equally similar with ridge {config.ridge}",
            "  mechanism  chunks encoded one by one by the plain model; no attention is calibrated",
        ]

    def _documents(self) -> str:
        counts, limit = self.counts, f"at {self.max_seq_length} tokens"
        what = "calibrated" if self.config.chunk_size is None else "in chunks"
        return (
            f"  documents  {counts.documents}: {counts.calibrated} {what}, {counts.too_short} too short "
            f"(under {self.config.min_content_tokens} content tokens), {counts.plain} plain; "
            f"{counts.truncated} truncated {limit}"
        )


def _spans(indices: tuple[int, ...]) -> str:
    """Writes (3, 4, 5, 8) as '3-5, 8'."""
    spans: list[list[int]] = []
    for i in indices:
        if spans and spans[-1][1] == i - 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
