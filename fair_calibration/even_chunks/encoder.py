"""Documents in even chunks: each chunk encoded by itself, and their parts joined into one vector.

Every chunk is an input of its own, ``prefix chunk suffix``, where prefix and suffix are what the model puts around a
text: special tokens, prompt, chat template. So no chunk stands later than another, and a document may be longer than
the model's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fair_calibration.config import FairConfig
from fair_calibration.even_chunks.chunks import Frame, Row, content_ranges, even_chunks, group_rows
from fair_calibration.even_chunks.even_similarity import even_direction
from fair_calibration.report import DocumentCounts

_OF_TOKENS = {"input_ids", "token_type_ids"}
_NO_TOKENS = {"attention_mask", "prompt_length"}


def longest_input(frame: Frame, config: FairConfig, max_seq_length: int | None) -> int:
    """Returns the most tokens of one input, by default 512 between prefix and suffix.

    Raises:
        ValueError: The chunks do not fit into the model's inputs.
    """
    size = config.chunk_size or 0
    limit = max(size, 512) + sum(frame) if max_seq_length is None else max_seq_length
    if limit < size + sum(frame):
        raise ValueError(
            f"chunk_size: chunks of {size} tokens, and the {sum(frame)} that prompt and special tokens take, do not "
            f"fit into max_seq_length={limit}; use chunk_size={max(1, limit - sum(frame))}"
        )
    return limit


class ChunkEncoder:
    """One batch of documents, of which the long ones are encoded in even chunks."""

    def __init__(
        self,
        features: dict[str, Any],
        frame: Frame,
        config: FairConfig,
        *,
        run: Callable[[dict[str, Any]], Tensor],
        pooling: Pooling,
        max_seq_length: int | None,
        tokenizer: Any,
    ) -> None:
        """Checks that the chunks fit the model.

        Args:
            features: Of whole documents: ``input_ids``, ``attention_mask`` and ``token_type_ids``, (B, K).
            frame: What stands around every text.
            config: Resolved; with a ``chunk_size``.
            run: Takes features of inputs and returns token embeddings, (R, K, D).
            pooling: What makes one vector of token embeddings.
            max_seq_length: The longest input in tokens, None for no limit.
            tokenizer: The model's.

        Raises:
            ValueError: The chunks do not fit into the model's inputs, or it takes features that are not known here.
        """
        self._limit = longest_input(frame, config, max_seq_length)
        self._mask = features["attention_mask"]
        tensors = {name: value for name, value in features.items() if torch.is_tensor(value) and name not in _NO_TOKENS}
        if unknown := sorted(tensors.keys() - _OF_TOKENS):
            raise ValueError(
                f"features: {unknown} cannot be cut into chunks, only {sorted(_OF_TOKENS)} can; use chunk_size=None"
            )
        self._tensors = tensors
        self._prompt = {name: features[name] for name in ("prompt_length",) if name in features}
        self._frame, self._config, self._run, self._pooling = frame, config, run, pooling
        self._pad_id = getattr(tokenizer, "pad_token_id", None) or 0
        self._cuts_start = getattr(tokenizer, "truncation_side", "right") == "left"
        self._content = content_ranges(self._mask, frame)
        self._n_content = [stop - start for start, stop in self._content]
        self._is_long = [n >= config.min_content_tokens for n in self._n_content]

    def counts(self, strength: float) -> DocumentCounts:
        """Returns what becomes of the documents at a strength."""
        if strength > 0:
            return DocumentCounts(calibrated=sum(self._is_long), too_short=len(self._is_long) - sum(self._is_long))
        truncated = sum(n + sum(self._frame) > self._limit for n in self._n_content)
        return DocumentCounts(plain=len(self._n_content), truncated=truncated)

    def encode(self, strength: float) -> Tensor:
        """Returns the documents' vectors, (B, D): ``(1 - strength) * plain + strength * chunked`` of the long ones."""
        chunked = [i for i, cut in enumerate(self._is_long) if cut and strength > 0]
        plain = [i for i, cut in enumerate(self._is_long) if not cut or strength < 1]
        parts = []
        if plain:
            rows = tuple(Row(i, *self._kept(self._n_content[i])) for i in plain)
            parts.append((plain, self._pooled(rows), [1 - strength if self._is_long[i] else 1.0 for i in plain]))
        if chunked:
            parts.append((chunked, self._join(chunked), [strength] * len(chunked)))
        vectors = parts[0][1].new_zeros(len(self._n_content), parts[0][1].shape[1])
        for documents, part, weights in parts:
            index = torch.tensor(documents, device=vectors.device)
            scaled = part * torch.tensor(weights, dtype=part.dtype, device=part.device)[:, None]
            vectors = vectors.index_add(0, index, scaled)
        return vectors

    def _kept(self, n_tokens: int) -> tuple[int, int]:
        """Returns the range of a document's content that the plain model reads."""
        room = max(0, self._limit - sum(self._frame))
        if n_tokens > room and self._cuts_start:
            raise ValueError(
                "strength: below 1, the plain vector of a document that is too long is needed as well, but truncation "
                "at the start (truncation_side='left') is not done here; use strength=1, or 0 from the beginning"
            )
        return 0, min(n_tokens, room)

    def _join(self, documents: list[int]) -> Tensor:
        config = self._config
        chunks = [even_chunks(self._n_content[i], config.chunk_size or 0) for i in documents]
        rows = tuple(Row(i, *span) for i, spans in zip(documents, chunks, strict=True) for span in spans)
        if config.pooling == "mean":
            counts = [max(1, -(-self._n_content[i] // config.unit_size)) for i in documents]
            units, means, dtype = self._token_units(rows, documents, counts)
        else:  # the pooled tokens speak for their chunks
            counts = [len(spans) for spans in chunks]
            pooled = self._pooled(rows)
            units, dtype = pooled.float(), pooled.dtype
            means = torch.stack([part.mean(0) for part in torch.split(units, counts)])
        directions = even_direction(units, counts, ridge=config.ridge)
        # As long as their mean, for similarities in which length counts.
        lengths = torch.linalg.vector_norm(means, dim=-1, keepdim=True)
        joined: Tensor = (directions * lengths).to(dtype)
        return joined

    def _token_units(
        self, rows: tuple[Row, ...], documents: list[int], counts: list[int]
    ) -> tuple[Tensor, Tensor, torch.dtype]:
        """Returns the sums of the documents' units (T, D) and their means (B, D), both float32, and the dtype of it."""
        first_unit = dict(zip(documents, accumulate(counts, initial=0), strict=False))
        n_units = dict(zip(documents, counts, strict=True))
        total = sum(counts)
        sums: Tensor | None = None
        for indices, embeddings, _ in self._passes(rows):
            unit = torch.full(embeddings.shape[:2], total)
            for place, i in enumerate(indices):
                document, first, stop = rows[i]
                tokens = torch.arange(first, stop) * n_units[document] // self._n_content[document]
                unit[place, self._frame.prefix : self._frame.prefix + stop - first] = tokens + first_unit[document]
            states = embeddings.float().flatten(0, 1)
            sums = states.new_zeros(total + 1, states.shape[1]) if sums is None else sums
            sums = sums.index_add(0, unit.flatten().to(states.device), states)
            dtype = embeddings.dtype
        if sums is None:
            raise ValueError("documents: expected at least one to be cut")
        sums = sums[:total]
        lengths = torch.tensor([self._n_content[i] for i in documents], device=sums.device)
        means = torch.stack([part.sum(0) for part in torch.split(sums, counts)]) / lengths[:, None]
        return sums, means, dtype

    def _pooled(self, rows: tuple[Row, ...]) -> Tensor:
        order, parts = [], []
        for indices, embeddings, mask in self._passes(rows):
            order += indices
            pooled = self._pooling({**self._prompt, "token_embeddings": embeddings, "attention_mask": mask})
            parts.append(pooled["sentence_embedding"])
        inverse = torch.tensor(order).argsort().to(parts[0].device)
        return torch.cat(parts)[inverse]

    def _passes(self, rows: tuple[Row, ...]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Runs the model over the rows; yields their indices, token embeddings and masks, pass by pass."""
        device = self._mask.device
        lengths = [row.stop - row.first + sum(self._frame) for row in rows]
        # No pass is larger than the batch would be in the plain model.
        for indices in group_rows(lengths, len(self._n_content) * self._limit):
            positions = pad_sequence([self._positions(rows[i]) for i in indices], batch_first=True).to(device)
            valid = torch.arange(positions.shape[1]) < torch.tensor([lengths[i] for i in indices])[:, None]
            valid = valid.to(device)
            documents = torch.tensor([rows[i].document for i in indices], device=device)[:, None]
            features = {name: tensor[documents, positions] * valid for name, tensor in self._tensors.items()}
            features["input_ids"] = features["input_ids"].masked_fill(~valid, self._pad_id)
            mask = valid.to(self._mask.dtype)
            yield indices, self._run({**features, "attention_mask": mask}), mask

    def _positions(self, row: Row) -> Tensor:
        """Returns where the tokens of an input stand in the row of its document."""
        start, stop = self._content[row.document]
        prefix, suffix = self._frame
        return torch.cat(
            [
                torch.arange(start - prefix, start),
                torch.arange(start + row.first, start + row.stop),
                torch.arange(stop, stop + suffix),
            ]
        )
