"""What a calibrated model reports: the settings in use, and how many documents were encoded in which way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fair_calibration.access.unpadded import attention_mask_of
from fair_calibration.config import FairConfig
from fair_calibration.limits import has_limit

logger = logging.getLogger("fair_calibration")


class DocumentCounts(NamedTuple):
    """The number of documents encoded so far, by what became of them.

    Attributes:
        calibrated: Documents encoded with calibrated attention, or in chunks with `EvenChunks`.
        too_short: Documents left as in the plain model, since they have fewer content tokens than
            ``FairConfig.min_content_tokens``, or fit into one chunk.
        plain: Documents encoded at strength 0.
        truncated: Documents, among all of these, that were cut off at ``max_seq_length``, counted when they are
            tokenized. What is cut off cannot be found by any query.
        truncated_queries: Queries that were cut off at ``max_seq_length``. What is cut off is not searched for.
    """

    calibrated: int = 0
    too_short: int = 0
    plain: int = 0
    truncated: int = 0
    truncated_queries: int = 0

    @property
    def documents(self) -> int:
        """The number of all documents encoded."""
        return self.calibrated + self.too_short + self.plain

    def plus(self, other: DocumentCounts) -> DocumentCounts:
        """Returns the sums of the counts of both."""
        return DocumentCounts(*(a + b for a, b in zip(self, other, strict=True)))


class DocumentCounter:
    """Adds up `DocumentCounts` from any number of threads, and warns when the first text is truncated."""

    def __init__(self) -> None:
        self._counts = DocumentCounts()
        self._lock = threading.Lock()
        self._unreported = {"documents", "queries"}  # of which no truncation was reported yet

    @property
    def counts(self) -> DocumentCounts:
        """The counts so far."""
        return self._counts

    def add(self, counts: DocumentCounts, *, max_seq_length: int | None) -> None:
        """Adds ``counts``, and warns once each if documents and queries are truncated at ``max_seq_length`` tokens."""
        truncated = {"documents"} if counts.truncated > 0 else set()
        truncated |= {"queries"} if counts.truncated_queries > 0 else set()
        with self._lock:
            self._counts = self._counts.plus(counts)
            report = truncated & self._unreported
            self._unreported -= report
        if "documents" in report:
            logger.warning(
                "Documents are truncated at max_seq_length=%s tokens, and what is cut off cannot be found. Raise "
                "max_seq_length if the model allows it; model.counts.truncated is their number. This warning is shown "
                "once.",
                max_seq_length,
            )
        if "queries" in report:
            logger.warning(
                "Queries are truncated at max_seq_length=%s tokens, and what is cut off is not searched for. Raise "
                "max_seq_length if the model allows it; model.counts.truncated_queries is their number. This warning "
                "is shown once.",
                max_seq_length,
            )

    def take(self) -> DocumentCounts:
        """Returns the counts and starts again from 0."""
        with self._lock:
            counts, self._counts = self._counts, DocumentCounts()
        return counts

    def mute(self) -> None:
        """Turns the warnings off; truncated texts are still counted."""
        self._unreported = set()

    # Locks can be neither copied nor pickled. A copy starts from 0.
    def __getstate__(self) -> dict[str, Any]:
        return {"_counts": DocumentCounts()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        DocumentCounter.__init__(self)


def count_truncated(features: Mapping[str, Any], max_seq_length: int | None) -> int:
    """Returns how many texts were cut off when they were tokenized into ``features``."""
    encodings = getattr(features, "encodings", None)
    if encodings is not None:
        return sum(bool(encoding.overflowing) for encoding in encodings)
    # Slow tokenizers do not record what they cut off, and batches without padding have lost it: texts that fill the
    # limit count as truncated.
    mask = attention_mask_of(features)
    if mask is None or max_seq_length is None:
        return 0
    return int((mask.sum(-1) >= max_seq_length).sum())


@dataclass(frozen=True)
class Summary:
    """The calibration in use in one model; ``print(model.summary())`` shows it as text.

    Attributes:
        model: The class of the transformer.
        config: The settings, with nothing left on "auto".
        n_layers: The number of attention layers of the model.
        layers: The indices of the calibrated layers; 0 is the first.
        modules: The class names of the attention modules in the calibrated layers.
        mechanism: How the model's attention is reached.
        counts: What became of the documents so far.
        max_seq_length: The number of tokens at which documents are truncated.
        pooled_row_only: Whether the last layer is computed for the pooled rows alone.
        windows: For each calibrated layer, the distance in tokens from which on tokens do not see each other. None
            where all do, and for models whose attention is intercepted, where it is not known.
        kernel: What computes the calibrated rows: "torch", or "triton", which has not been run on a GPU yet.
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
    windows: tuple[int | None, ...] = ()
    kernel: str = "torch"

    def __str__(self) -> str:
        config = self.config
        rows = {
            "cls": "the first token's row (cls pooling)",
            "last": "the last token's row (last-token pooling)",
            "mean": "every row (mean pooling)",
        }[config.pooling]
        isolated = {"none": "no token", "bos": "the first token", "bos_eos": "the first and the last token"}[
            config.isolate
        ]
        share = {"preserve": "its own share", "equal": "a basket's share"}.get(
            str(config.isolated_share), f"the share {config.isolated_share}"
        )
        return "\n".join(
            [
                f"{self.model}: strength {config.strength}, baskets of {config.basket_size} tokens"
                + (", or two halves" if config.last_basket == "halves" else ""),
                f"  layers     {_spans(self.layers)} of {self.n_layers} ({', '.join(sorted(set(self.modules)))})",
                *self._describe_windows(),
                f"  rows       {rows}" + ("; the last layer is computed for no other" if self.pooled_row_only else ""),
                f"  isolated   {isolated}"
                + ("" if config.isolate == "none" else f", keeping {share}")
                + ("; baskets weigh by size" if config.last_basket == "proportional" else ""),
                f"  mechanism  {self.mechanism}",
                *(
                    []
                    if self.kernel == "torch"
                    else [f"  kernel     {self.kernel}, one pass over the keys; not yet run on a GPU"]
                ),
                describe_documents(
                    self.counts, self.max_seq_length, done="calibrated", least=config.min_content_tokens
                ),
            ]
        )

    def _describe_windows(self) -> list[str]:
        """Returns a line for each window that the calibrated layers have and that is smaller than a document may be."""
        config, limit, lines = self.config, self.max_seq_length, []
        for window in sorted({window for window in self.windows if window is not None}):
            if limit is not None and has_limit(limit) and window >= limit:
                continue
            layers = tuple(i for i, own in zip(self.layers, self.windows, strict=True) if own == window)
            line = f"  local      in {_spans(layers)} a token sees only those fewer than {window} positions away"
            n_content = window if config.isolate == "none" else window - 1  # that the first token sees
            own_share = config.isolate == "none" or config.isolated_share == "preserve"
            # The halves of a document of two baskets have this many tokens or more.
            least = config.basket_size // 2 + 1 if config.last_basket == "halves" else config.basket_size
            if config.pooling == "cls" and own_share and n_content <= least:
                line += "; for the first token that is one basket, so these layers stay as they are"
            lines.append(line)
        return lines


def describe_documents(counts: DocumentCounts, max_seq_length: int | None, *, done: str, least: int) -> str:
    """Returns the line of a summary about the documents, and one about queries if some were truncated.

    Args:
        counts: What became of the documents.
        max_seq_length: The number of tokens at which they are truncated.
        done: The word for documents that were encoded as the settings ask.
        least: The least number of content tokens for that.
    """
    limit = f"at {max_seq_length} tokens" if has_limit(max_seq_length) else "(no limit)"
    return (
        f"  documents  {counts.documents}: {counts.calibrated} {done}, {counts.too_short} too short "
        f"(under {least} content tokens), {counts.plain} plain; {counts.truncated} truncated {limit}"
    ) + (f"\n  queries    {counts.truncated_queries} truncated" if counts.truncated_queries else "")


def _spans(indices: tuple[int, ...]) -> str:
    """Writes (3, 4, 5, 8) as '3-5, 8'."""
    spans: list[list[int]] = []
    for i in indices:
        if spans and spans[-1][1] == i - 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
