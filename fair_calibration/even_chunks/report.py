"""The summary of a model that encodes in even chunks."""

from __future__ import annotations

from dataclasses import dataclass

from fair_calibration.even_chunks.config import EvenChunks
from fair_calibration.report import DocumentCounts, describe_documents


@dataclass(frozen=True)
class EvenChunksSummary:
    """How one model encodes documents in even chunks; ``print(model.summary())`` shows it as text.

    Attributes:
        model: The class of the transformer.
        config: The settings.
        pooling: How the model pools: "cls", "last" or "mean".
        counts: What became of the documents so far. Those in chunks count as calibrated.
        max_seq_length: The most tokens of one input, which limits a chunk and not a document.
    """

    model: str
    config: EvenChunks
    pooling: str
    counts: DocumentCounts
    max_seq_length: int | None

    def __str__(self) -> str:
        config = self.config
        parts = f"parts of {config.unit_size} tokens" if self.pooling == "mean" else "the chunks' pooled vectors"
        return "\n".join(
            [
                f"{self.model}: strength {config.strength}, even chunks of at most {config.chunk_size} tokens",
                f"  joined     {parts}, equally similar with ridge {config.ridge}",
                "  mechanism  chunks encoded one by one by the plain model; no attention is calibrated",
                describe_documents(self.counts, self.max_seq_length, done="in chunks", least=config.chunk_size + 1),
            ]
        )
