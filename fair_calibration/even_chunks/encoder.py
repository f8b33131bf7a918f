"""Encodes one batch of documents in even chunks: each chunk by itself, and their parts joined into one vector.

Every chunk is a separate input ``prefix chunk suffix``, where prefix and suffix are what the model adds to a text:
special tokens, prompt, chat template. So no chunk is at a later position than another, and a document may be longer
than the model's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fair_calibration.even_chunks.chunks import Frame, Row, content_ranges, even_chunks, group_rows
from fair_calibration.even_chunks.config import EvenChunks
from fair_calibration.even_chunks.even_similarity import even_direction
from fair_calibration.limits import has_limit
from fair_calibration.report import DocumentCounts

_TOKEN_FEATURES = {"input_ids", "token_type_ids"}
_OTHER_FEATURES = {"attention_mask", "prompt_length"}
_DEFAULT_INPUT = 512  # tokens of a chunk's input at most, for models without a limit


def longest_input(frame: Frame, config: EvenChunks, max_seq_length: int | None) -> int:
    """Returns the largest number of tokens of one input, which holds a chunk, the prompt and special tokens.

    If ``max_seq_length`` is not a limit, it is 512 tokens and the frame, or more for larger chunks.

    Raises:
        ValueError: A chunk does not fit into one input.
    """
    size = config.chunk_size
    limit = max_seq_length if max_seq_length is not None and has_limit(max_seq_length) else None
    if limit is None:
        return max(size, _DEFAULT_INPUT) + sum(frame)
    if limit < size + sum(frame):
        raise ValueError(
            f"chunk_size: chunks of {size} tokens, and the {sum(frame)} that prompt and special tokens take, do not "
            f"fit into max_seq_length={limit}; use chunk_size={max(1, limit - sum(frame))}"
        )
    return limit


class ChunkEncoder:
    """Encodes one batch of documents, those with more tokens than a chunk in even chunks."""

    def __init__(
        self,
        features: dict[str, Any],
        frame: Frame,
        config: EvenChunks,
        *,
        run: Callable[[dict[str, Any]], Tensor],
        pooling: Pooling,
        max_seq_length: int | None,
        tokenizer: Any,
    ) -> None:
        """Checks that the chunks fit the model.

        Args:
            features: The features of whole documents, not truncated: ``input_ids``, ``attention_mask`` and
                ``token_type_ids``, each (B, K).
            frame: The number of tokens before and after the text in every input.
            config: The settings.
            run: Runs the model over the features of R inputs, and returns token embeddings (R, K, D).
            pooling: The model's pooling module.
            max_seq_length: The largest number of tokens of one input; None for no limit.
            tokenizer: The model's tokenizer.

        Raises:
            ValueError: The chunks do not fit into the model's inputs, or it takes features that cannot be cut.
        """
        self._limit = longest_input(frame, config, max_seq_length)
        self._mask = features["attention_mask"]
        tensors = {
            name: value for name, value in features.items() if torch.is_tensor(value) and name not in _OTHER_FEATURES
        }
        if unknown := sorted(tensors.keys() - _TOKEN_FEATURES):
            raise ValueError(
                f"features: {unknown} cannot be cut into chunks, only {sorted(_TOKEN_FEATURES)} can; use a FairConfig"
            )
        self._tensors = tensors
        self._prompt = {"prompt_length": features["prompt_length"]} if "prompt_length" in features else {}
        self._frame, self._config, self._run, self._pooling = frame, config, run, pooling
        self._pad_id = getattr(tokenizer, "pad_token_id", None) or 0
        self._cuts_start = getattr(tokenizer, "truncation_side", "right") == "left"
        self._content = content_ranges(self._mask, frame)
        self._n_content = [stop - start for start, stop in self._content]
        self._is_long = [n > config.chunk_size for n in self._n_content]

    def counts(self, strength: float) -> DocumentCounts:
        """Returns how many documents are cut into chunks, fit into one chunk, or are encoded by the plain model."""
        if strength > 0:
            return DocumentCounts(calibrated=sum(self._is_long), too_short=len(self._is_long) - sum(self._is_long))
        truncated = sum(not self._fits(n) for n in self._n_content)
        return DocumentCounts(plain=len(self._n_content), truncated=truncated)

    def encode(self, strength: float) -> Tensor:
        """Returns the documents' vectors, (B, D).

        They are ``(1 - strength) * whole + strength * joined``. Documents in one chunk have no joined vector, and those
        that do not fit into one input have no whole vector, unless the strength is 0.
        """
        weights = [self._joined_share(n, strength) for n in self._n_content]
        whole = [i for i, weight in enumerate(weights) if weight < 1]
        chunked = [i for i, weight in enumerate(weights) if weight > 0]
        parts = []
        if whole:
            rows = tuple(Row(i, *self._kept(self._n_content[i])) for i in whole)
            parts.append((whole, self._pooled(rows), [1 - weights[i] for i in whole]))
        if chunked:
            parts.append((chunked, self._join(chunked), [weights[i] for i in chunked]))
        vectors = parts[0][1].new_zeros(len(self._n_content), parts[0][1].shape[1])
        for documents, part, share in parts:
            index = torch.tensor(documents, device=vectors.device)
            scaled = part * torch.tensor(share, dtype=part.dtype, device=part.device)[:, None]
            vectors = vectors.index_add(0, index, scaled)
        return vectors

    def _joined_share(self, n_tokens: int, strength: float) -> float:
        """Returns the weight of the joined vector for a document of so many content tokens."""
        if n_tokens <= self._config.chunk_size:
            return 0.0
        return strength if strength == 0 or self._fits(n_tokens) else 1.0

    def _fits(self, n_tokens: int) -> bool:
        """Returns whether a document of so many content tokens is one input of the model, without truncation."""
        return n_tokens + sum(self._frame) <= self._limit

    def _kept(self, n_tokens: int) -> tuple[int, int]:
        """Returns the range of a document's content that the plain model reads, which truncates it."""
        if self._fits(n_tokens):
            return 0, n_tokens
        if self._cuts_start:
            raise ValueError(
                "strength: these features hold a whole document that is too long for the plain model, and truncation "
                "at the start (truncation_side='left') is not done here; give preprocess strength=0 as well"
            )
        return 0, max(0, self._limit - sum(self._frame))

    def _join(self, documents: list[int]) -> Tensor:
        config = self._config
        chunks = [even_chunks(self._n_content[i], config.chunk_size) for i in documents]
        rows = tuple(Row(i, *span) for i, spans in zip(documents, chunks, strict=True) for span in spans)
        if self._pooling.pooling_mode == "mean":
            counts = [max(1, -(-self._n_content[i] // config.unit_size)) for i in documents]
            units, means, dtype = self._token_units(rows, documents, counts)
        else:  # each chunk is represented by its pooled token
            counts = [len(spans) for spans in chunks]
            pooled = self._pooled(rows)
            units, dtype = pooled.float(), pooled.dtype
            means = torch.stack([part.mean(0) for part in torch.split(units, counts)])
        directions = even_direction(units, counts, ridge=config.ridge)
        # The vector gets the length of the parts' mean, for similarities that depend on it.
        lengths = torch.linalg.vector_norm(means, dim=-1, keepdim=True)
        joined: Tensor = (directions * lengths).to(dtype)
        return joined

    def _token_units(
        self, rows: tuple[Row, ...], documents: list[int], counts: list[int]
    ) -> tuple[Tensor, Tensor, torch.dtype]:
        """Returns the sums of the units (T, D) and the documents' means (B, D), float32, and the model's dtype."""
        first_unit = dict(zip(documents, accumulate(counts, initial=0), strict=False))
        n_units = dict(zip(documents, counts, strict=True))
        total = sum(counts)
        sums = torch.empty(0)
        for indices, embeddings, _ in self._passes(rows):
            unit = torch.full(embeddings.shape[:2], total)
            for place, i in enumerate(indices):
                document, first, stop = rows[i]
                tokens = torch.arange(first, stop) * n_units[document] // self._n_content[document]
                unit[place, self._frame.prefix : self._frame.prefix + stop - first] = tokens + first_unit[document]
            states = embeddings.float().flatten(0, 1)
            sums = sums if len(sums) else states.new_zeros(total + 1, states.shape[1])
            sums = sums.index_add(0, unit.flatten().to(states.device), states)
            dtype = embeddings.dtype
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
        """Runs the model over the inputs; yields indices, token embeddings and masks, one forward pass at a time."""
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
        """Returns the positions of an input's tokens in the row of its document."""
        start, stop = self._content[row.document]
        prefix, suffix = self._frame
        return torch.cat(
            [
                torch.arange(start - prefix, start),
                torch.arange(start + row.first, start + row.stop),
                torch.arange(stop, stop + suffix),
            ]
        )
