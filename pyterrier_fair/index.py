"""`FairIndex`: a FlexIndex that is built safely and knows the encoder that made its vectors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt
from pyterrier_dr import FlexIndex

from fair_calibration.identity import DifferentEncoderError, EncoderIdentity
from fair_indexing.assemble import NO_SINGLE, assemble_flex, read_manifest
from fair_indexing.build import SHARD_SIZE, build
from fair_indexing.lock import locked
from fair_indexing.records import open_source
from fair_indexing.shards import ShardFolder
from pyterrier_fair.encoder import FairBiEncoder
from pyterrier_fair.identity import EncoderState, name_of
from pyterrier_fair.transformers import FairQueryEncoder

_REFUSED = {
    "doc_vec": "FairIndex encodes the documents itself, with the encoder it was given; leave out what adds vectors "
    "before it, or index into a pyterrier_dr.FlexIndex"
}


class FairIndex(pt.Indexer):
    """Indexes documents into a folder that `pyterrier_dr.FlexIndex` opens, and retrieves from it.

    Usage::

        index = FairIndex("index.flex", fair_dense)
        index.index(dataset.get_corpus_iter())
        index.retriever() % 100

    Indexing that ended early, in whatever way, is gone on with by the same call: until the index is complete its parts
    are in the folder ``<path>.build``, and nothing is at ``path``. The index records the encoder, and queries of
    another one are refused. The calibration may be another: queries are encoded plainly.
    """

    encodes_documents = True  # so that a doc encoder before it is refused

    def __init__(
        self,
        path: str | os.PathLike[str],
        encoder: FairBiEncoder,
        *,
        shard_size: int = SHARD_SIZE,
        tokens_per_batch: int | None = None,
        verbose: bool | None = None,
    ) -> None:
        """Takes the place of an index; nothing is read or written yet.

        Args:
            path: The folder of the index.
            encoder: Encodes the documents, and the queries unless another is given.
            shard_size: Documents per shard: what is lost at most when indexing is killed.
            tokens_per_batch: The most tokens of a forward pass, padding included; None is by the device.
            verbose: Whether to show progress bars; None as the encoder does.

        Raises:
            TypeError: ``encoder`` is no FairBiEncoder.
        """
        if not isinstance(encoder, FairBiEncoder):
            raise TypeError(f"encoder: expected a FairBiEncoder, got {type(encoder).__name__}")
        self.path = str(Path(path))  # without a slash at its end
        self.encoder = encoder
        self.shard_size = shard_size
        self.tokens_per_batch = tokens_per_batch
        self.verbose = verbose
        self._states: dict[int, EncoderState] = {}

    def index(  # type: ignore[override]
        self, iter: Iterable[Mapping[str, Any]] | pd.DataFrame
    ) -> FairIndex:
        """Encodes and indexes documents, or goes on where an earlier call ended.

        The same documents must come in the same order; those that were encoded before are compared, not encoded again.

        Args:
            iter: Dicts with ``docno`` and the encoder's ``text_field``.

        Returns:
            This index.

        Raises:
            ValueError: There is an index already, there are fewer than two documents (the format holds no single one),
                a document comes with a vector (``doc_vec``), or a record cannot be indexed; it is named. Nothing is at
                ``path`` then.
            TypeError: A docno or text is no string.
            DifferentEncoderError: What was encoded before is another encoder's, or of other settings.
            SourceChangedError: The documents are not those that were encoded before.
            FolderInUseError: Another process is building this index.
            OSError: The disk is full, or cannot be written; what is complete stays.
        """
        target, work = Path(self.path), Path(f"{self.path}.build")
        shards, encoder = work / "shards", self.encoder
        exists = ValueError(f"path: {target} exists; remove it to index anew, or take another path")
        if target.exists() and not work.exists():
            raise exists
        source = open_source(iter, text_field=encoder.text_field, refused=_REFUSED).started(2, reason=NO_SINGLE)
        work.mkdir(parents=True, exist_ok=True)
        with locked(work):
            try:
                if target.exists() and not ShardFolder.exists(shards):
                    raise exists
                # Where both exist, an earlier call was killed while tidying up.
                built = build(
                    encoder.calibrated_model(),
                    source,
                    shards,
                    strength=encoder.fair_config.strength,
                    normalize=encoder.normalize,
                    shard_size=self.shard_size,
                    model_name=name_of(encoder),
                    tokens_per_batch=self.tokens_per_batch,
                    show_progress_bar=encoder.verbose if self.verbose is None else self.verbose,
                )
                if not target.exists():
                    assemble_flex(built.shards, target)
                os.rename(shards, work / "done")  # what is half removed must not look like a build
            finally:
                if not ShardFolder.exists(shards):
                    shutil.rmtree(work)
        return self

    def built(self) -> bool:
        """Returns whether there is an index; it is there when it is complete, and not before."""
        return (Path(self.path) / "pt_meta.json").exists()

    def record(self) -> EncoderIdentity:
        """Returns what made the vectors.

        Raises:
            ValueError: There is no index, or it was not made by a `FairIndex`.
        """
        return read_manifest(self.path).encoder

    def flex(self) -> FlexIndex:
        """Returns the index as a `FlexIndex`, which takes vectors of whatever encoder.

        Raises:
            ValueError: There is no index.
        """
        if not self.built():
            raise ValueError(f"path: there is no index at {self.path}; call index() first")
        return FlexIndex(self.path, verbose=self.encoder.verbose if self.verbose is None else self.verbose)

    def check(self, encoder: FairBiEncoder | None = None) -> None:
        """Checks that the queries of an encoder are to be compared with the vectors of this index.

        The weights, modules, tokenizer, max_seq_length, query prompt, truncate_dim, normalization and similarity must
        be those that it was built with; the calibration and the prompt of documents change no query.

        Raises:
            DifferentEncoderError: They are not; every difference is named.
            ValueError: There is no index, or it was not made by a `FairIndex`.
        """
        encoder = self.encoder if encoder is None else encoder
        state = self._states.setdefault(id(encoder), EncoderState(encoder))
        own, queries = self.record(), state.record()
        if lines := own.query_differences(queries):
            raise DifferentEncoderError(
                f"encoder: the vectors of {self.path} were made by {own.model!r} with other settings than "
                f"{queries.model!r} has now, so its queries cannot be compared with them: {'; '.join(lines)}. "
                "Use an encoder with the index's settings, or index anew"
            )

    def query_encoder(
        self, encoder: FairBiEncoder | None = None, verbose: bool | None = None, batch_size: int | None = None
    ) -> IndexQueryEncoder:
        """Returns a transformer that adds ``query_vec``, checking each time that it fits this index.

        Args:
            encoder: Encodes the queries; None is the index's own.
            verbose: Whether to show progress bars; None as the encoder does.
            batch_size: Queries per forward pass; None as the encoder does.

        Raises:
            DifferentEncoderError: See `check`.
        """
        self.check(encoder)
        return IndexQueryEncoder(self.encoder if encoder is None else encoder, self, verbose, batch_size)

    def retriever(
        self, encoder: FairBiEncoder | None = None, *, kind: str = "np_retriever", **settings: Any
    ) -> pt.Transformer:
        """Returns a pipeline that encodes queries and retrieves.

        Args:
            encoder: Encodes the queries; None is the index's own.
            kind: The `FlexIndex` method that makes the retriever, such as "np_retriever", "torch_retriever" or
                "faiss_hnsw_retriever".
            **settings: That method's arguments, such as ``num_results``.

        Raises:
            DifferentEncoderError: See `check`.
            ValueError: There is no index, or no such retriever.
        """
        kinds = sorted(name for name in dir(FlexIndex) if name.endswith("_retriever"))
        if kind not in kinds:
            raise ValueError(f"kind: expected one of {kinds}, got {kind!r}")
        pipeline: pt.Transformer = self.query_encoder(encoder) >> getattr(self.flex(), kind)(**settings)
        return pipeline

    def index_inputs(self) -> list[list[str]]:
        """Returns the columns that `index` needs."""
        return [["docno", self.encoder.text_field]]

    def __repr__(self) -> str:
        return f"FairIndex({self.path!r}, {self.encoder!r})"


class IndexQueryEncoder(FairQueryEncoder):
    """Adds ``query_vec`` for one index; an encoder that was changed so that it does not fit it is refused."""

    def __init__(
        self,
        bi_encoder_model: FairBiEncoder,
        index: FairIndex,
        verbose: bool | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(bi_encoder_model, verbose, batch_size)
        self.index = index

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Encodes the column ``query``.

        Raises:
            DifferentEncoderError: See `FairIndex.check`.
        """
        self.index.check(self.bi_encoder_model)
        return super().transform(inp)

    def _key(self) -> Hashable:
        return (super()._key(), self.index.path)
