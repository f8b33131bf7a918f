"""`EvenChunksTransformer`: the sentence-transformers module whose documents are encoded in even chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

from fair_calibration.access.discovery import model_name
from fair_calibration.document_transformer import DocumentState, DocumentTransformer, Tokenized
from fair_calibration.even_chunks.chunks import Frame, frame_of
from fair_calibration.even_chunks.config import EvenChunks
from fair_calibration.even_chunks.encoder import ChunkEncoder, longest_input
from fair_calibration.even_chunks.report import EvenChunksSummary
from fair_calibration.limits import position_limit
from fair_calibration.poolings import check_pooled_directly, single_mode
from fair_calibration.report import DocumentCounts
from fair_calibration.texts import tokenizer_lock


@dataclass
class EvenChunksState(DocumentState):
    """The state of an `EvenChunksTransformer`."""

    config: EvenChunks
    frames: dict[str | None, Frame] = field(default_factory=dict)  # by prompt


class EvenChunksTransformer(DocumentTransformer):
    """A sentence-transformers `Transformer` that encodes documents in even chunks, and queries plainly.

    Its output for a document is one token embedding: the document's vector, which the pooling module passes on.
    """

    config_class = EvenChunks
    state: EvenChunksState

    def attach(self, config: Any) -> None:
        """Gives the module a new ``state`` with these settings."""
        self.state = EvenChunksState(config)

    def use_pooled_row_only(self, model: nn.Module) -> None:  # noqa: ARG002
        """Raises a ValueError: the plain model encodes the chunks in full."""
        raise ValueError(
            "pooled_row_only: expected False with EvenChunks, whose chunks the plain model encodes in full, got True; "
            "set pooled_row_only=False, or calibrate with a FairConfig"
        )

    def use_kernel(self, kernel: Any, model: nn.Module) -> None:  # noqa: ARG002
        """Raises a ValueError for every kernel but "torch": no attention is calibrated."""
        if kernel != "torch":
            raise ValueError(
                f"kernel: expected 'torch' with EvenChunks, which calibrates no attention, got {kernel!r}; leave it "
                "out, or calibrate with a FairConfig"
            )

    def prepare(self, model: nn.Module) -> None:  # noqa: ARG002
        """Checks the model.

        Raises:
            ValueError: Its pooling does not work on chunks, a chunk does not fit into an input, or it encodes documents
                without padding.
        """
        if self.can_flatten_inputs:
            raise ValueError(
                "EvenChunks: with flash attention the model encodes documents without padding, which is not supported; "
                "set model[0].unpad_inputs = False, or load it with attn_implementation='sdpa'"
            )
        self._pooling()
        longest_input(self._frame(None), self.state.config, position_limit(self.model))

    def _pooling(self) -> Pooling:
        return check_pooled_directly(self.state.followers, "cls", "last", "mean", setting="EvenChunks")

    def _frame(self, prompt: str | None, **kwargs: Any) -> Frame:
        """Returns the number of tokens that the model adds before and after a text."""
        frames = self.state.frames
        with tokenizer_lock:
            if prompt not in frames:
                pair = [Transformer.preprocess(self, [text], prompt=prompt, **kwargs) for text in ("", "a")]
                frames[prompt] = frame_of(*(p["input_ids"][0][p["attention_mask"][0] > 0].tolist() for p in pair))
        return frames[prompt]

    def tokenize_documents(
        self, inputs: Any, prompt: str | None = None, *, strength: float, **kwargs: Any
    ) -> Tokenized:
        """Tokenizes documents without truncating them, unless the strength is 0, and without counting them.

        Raises:
            ValueError: A chunk does not fit into the model's inputs.
        """
        if strength == 0:
            return super().tokenize_documents(inputs, prompt, strength=strength, **kwargs)
        # verbose: transformers would warn of documents longer than the model's inputs.
        own = kwargs.pop("processing_kwargs", None) or {}
        kwargs["processing_kwargs"] = {**own, "text": {**own.get("text", {}), "truncation": False, "verbose": False}}
        frame = self._frame(prompt, **kwargs)
        longest_input(frame, self.state.config, self.max_seq_length)  # before anything is encoded
        features, _ = super().tokenize_documents(inputs, prompt, strength=strength, **kwargs)
        return Tokenized({**features, "frame": frame} if features else features, 0)

    def encode_queries(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Runs the transformer as the plain model does."""
        if "frame" not in features:
            return super().encode_queries(features, **kwargs)
        # They were tokenized as documents, so they are not truncated yet.
        encoder, others = self._chunk_encoder(dict(features), **kwargs)
        if n_truncated := encoder.counts(0.0).truncated:
            counts = DocumentCounts(truncated_queries=n_truncated)
            self.counter.add(counts, max_seq_length=self.max_seq_length)
        return self._output(encoder.encode(0.0), others)

    def encode_documents(self, features: dict[str, Any], strength: float, **kwargs: Any) -> dict[str, Any]:
        """Encodes documents in even chunks, and counts them.

        Raises:
            ValueError: The features were made at strength 0, so that the documents may be truncated.
        """
        if "frame" not in features:
            if strength > 0:
                raise ValueError(
                    "features: they were made for a query, or at strength 0, so they may be truncated and cannot be "
                    "cut into chunks; give preprocess the task and the strength that forward gets"
                )
            self.counter.add(DocumentCounts(plain=len(features["attention_mask"])), max_seq_length=self.max_seq_length)
            return self.encode_queries(features, **kwargs)
        encoder, others = self._chunk_encoder(features, **kwargs)
        vectors = encoder.encode(strength)
        self.counter.add(encoder.counts(strength), max_seq_length=self.max_seq_length)
        return self._output(vectors, others)

    def _chunk_encoder(self, features: dict[str, Any], **kwargs: Any) -> tuple[ChunkEncoder, dict[str, Any]]:
        """Returns the encoder of a batch of whole documents, and the features that all its chunks share."""
        frame: Frame = features.pop("frame")
        others = {
            name: value for name, value in features.items() if not torch.is_tensor(value) and name != "prompt_length"
        }

        def run(rows: dict[str, Any]) -> torch.Tensor:
            states: torch.Tensor = self.encode_queries({**others, **rows}, **kwargs)[self.module_output_name]
            return states

        encoder = ChunkEncoder(
            features,
            frame,
            self.state.config,
            run=run,
            pooling=self._pooling(),
            max_seq_length=self.max_seq_length,
            tokenizer=self.tokenizer,
        )
        return encoder, others

    def _output(self, vectors: torch.Tensor, others: dict[str, Any]) -> dict[str, Any]:
        """Returns the documents' vectors (B, D) as features of documents of one token each."""
        one_token = torch.ones(len(vectors), 1, dtype=torch.int64, device=vectors.device)
        return {**others, self.module_output_name: vectors[:, None], "attention_mask": one_token}

    def summary(self) -> EvenChunksSummary:
        """Returns how documents are cut and joined, and how many were."""
        self.check_ready()
        return EvenChunksSummary(
            model=model_name(self.model),
            config=self.state.config,
            pooling=single_mode(self.state.followers),
            counts=self.counter.counts,
            max_seq_length=self.max_seq_length,
        )
