"""`FairIndex`: a FlexIndex that loses no work when it is interrupted and knows the encoder that made its vectors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pyterrier as pt
from pyterrier_dr import FlexIndex

from fair_calibration.identity import DifferentEncoderError, EncoderIdentity
from fair_indexing.assemble import NO_SINGLE, assemble_flex, read_manifest
from fair_indexing.builder import build
from fair_indexing.check import RECORD, check_index
from fair_indexing.lock import locked
from fair_indexing.pending import SourceChangedError
from fair_indexing.records import Source, open_source
from fair_indexing.shards import ShardFolder
from pyterrier_fair.biencoder import FairBiEncoder, FairQueryEncoder

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

    The same call of `index` resumes an interrupted one. Until the index is complete, its parts are in the folder
    ``<path>.build``, and there is nothing at ``path``. The index records its encoder, and queries of another encoder
    are refused. The calibration may differ, since queries are encoded plainly.
    """

    encodes_documents = True  # so that a doc encoder before it is refused

    def __init__(
        self,
        path: str | os.PathLike[str],
        encoder: FairBiEncoder,
        *,
        shard_size: int | None = None,
        tokens_per_batch: int | None = None,
        verbose: bool | None = None,
    ) -> None:
        """Takes the path of an index; nothing is read or written yet.

        Args:
            path: The folder of the index.
            encoder: Encodes the documents, and the queries unless another encoder is given.
            shard_size: The number of documents in a shard of the build; None means that of the interrupted build, or
                4096 for a new one.
            tokens_per_batch: The most tokens of a forward pass, padding included; None means a default by device.
            verbose: Whether to show progress bars; None means the encoder's setting.

        Raises:
            TypeError: ``encoder`` is not a FairBiEncoder.
        """
        if not isinstance(encoder, FairBiEncoder):
            raise TypeError(f"encoder: expected a FairBiEncoder, got {type(encoder).__name__}")
        self.path = str(Path(path))  # without a slash at its end
        self.encoder = encoder
        self.shard_size = shard_size
        self.tokens_per_batch = tokens_per_batch
        self.verbose = verbose

    def index(  # type: ignore[override]
        self, iter: Iterable[Mapping[str, Any]] | pd.DataFrame
    ) -> FairIndex:
        """Encodes and indexes documents, or resumes an interrupted call.

        To resume, give the same documents in the same order; those that are already encoded are compared, not encoded
        again. A call that was killed after the index was complete, while it was tidying up, is resumed as well: then
        only docnos are compared.

        Args:
            iter: Dicts with ``docno`` and the encoder's ``text_field``.

        Returns:
            This index.

        Raises:
            ValueError: There is an index already, there are fewer than two documents (the format cannot hold a single
                one), a document comes with a vector (``doc_vec``), or a record cannot be indexed, which is named. Then
                nothing is written at ``path``.
            TypeError: A docno or a text is not a string.
            DifferentEncoderError: The interrupted call used another encoder or other settings.
            SourceChangedError: The documents are not those of the interrupted call.
            FolderInUseError: Another process is building this index.
            OSError: The disk is full, or cannot be written; what is complete is kept.
        """
        target, work = Path(self.path), Path(f"{self.path}.build")
        shards, encoder = work / "shards", self.encoder
        if target.exists() and not (work.exists() and self.built()):
            raise ValueError(f"path: {target} exists; remove it to index anew, or take another path")
        source = open_source(iter, text_field=encoder.text_field, refused=_REFUSED).started(2, reason=NO_SINGLE)
        work.mkdir(parents=True, exist_ok=True)
        with locked(work):
            if self.built() and not ShardFolder.exists(shards):  # killed while it was tidying up
                self._check_complete(source)
                shutil.rmtree(work)
                return self
            try:
                built = build(
                    encoder.calibrated_model(),
                    source,
                    shards,
                    strength=encoder.config.strength,
                    normalize=encoder.normalize,
                    shard_size=self.shard_size,
                    model_name=encoder.identity().model,
                    tokens_per_batch=self.tokens_per_batch,
                    show_progress_bar=encoder.verbose if self.verbose is None else self.verbose,
                )
                if not target.exists():  # else an earlier call was killed between assembling and tidying up
                    assemble_flex(built.shards, target)
                os.rename(shards, work / "done")  # a folder that is removed in part must not look like a build
            finally:
                if not ShardFolder.exists(shards):
                    shutil.rmtree(work)
        return self

    def built(self) -> bool:
        """Returns whether there is an index; it appears when it is complete."""
        return (Path(self.path) / "pt_meta.json").exists()

    def record(self) -> EncoderIdentity:
        """Returns the identity of the encoder that made the vectors.

        Raises:
            ValueError: There is no index, or it was not made by a `FairIndex`.
        """
        if not Path(self.path).exists():
            raise ValueError(f"path: there is no index at {self.path}; call index() first")
        return read_manifest(self.path).encoder

    def flex(self) -> FlexIndex:
        """Returns the index as a `FlexIndex`, which accepts the vectors of any encoder.

        The sizes of its files and samples of their contents are compared with those recorded when it was built;
        ``fair_indexing.check_index(path, full=True)`` compares every byte.

        Raises:
            ValueError: There is no index.
            DamagedFileError: A file is missing or is not what was written; it is named.
        """
        if (Path(self.path) / RECORD).exists():
            check_index(self.path)
        elif not self.built():
            raise ValueError(f"path: there is no index at {self.path}; call index() first")
        return FlexIndex(self.path, verbose=self.encoder.verbose if self.verbose is None else self.verbose)

    def check(self, encoder: FairBiEncoder | None = None) -> None:
        """Checks that the query vectors of an encoder can be compared with the vectors of this index.

        The weights, modules, tokenizer, max_seq_length, query prompt, truncate_dim, normalization and similarity must
        be those of the encoder that made the index. The calibration and the prompt of documents may differ.

        Raises:
            DifferentEncoderError: They differ; every difference is named.
            ValueError: There is no index, or it was not made by a `FairIndex`.
        """
        own, queries = self.record(), self._choose(encoder).identity()
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
            encoder: Encodes the queries; None means the index's own encoder.
            verbose: Whether to show progress bars; None means the encoder's setting.
            batch_size: The most queries of a forward pass; None means the encoder's setting.

        Raises:
            TypeError: ``encoder`` is not a FairBiEncoder.
            DifferentEncoderError: The queries cannot be compared with this index, as in `check`.
        """
        encoder = self._choose(encoder)
        self.check(encoder)
        return IndexQueryEncoder(encoder, self, verbose, batch_size)

    def retriever(
        self, encoder: FairBiEncoder | None = None, *, kind: str = "np_retriever", **settings: Any
    ) -> pt.Transformer:
        """Returns a pipeline that encodes queries and retrieves.

        Args:
            encoder: Encodes the queries; None means the index's own encoder.
            kind: The `FlexIndex` method that makes the retriever, such as "np_retriever", "torch_retriever" or
                "faiss_hnsw_retriever".
            **settings: The arguments of that method, such as ``num_results``.

        Raises:
            TypeError: ``encoder`` is not a FairBiEncoder.
            DifferentEncoderError: The queries cannot be compared with this index, as in `check`.
            ValueError: There is no index, or no such retriever.
            DamagedFileError: A file of the index is missing or is not what was written; it is named.
        """
        kinds = sorted(name for name in dir(FlexIndex) if name.endswith("_retriever"))
        if kind not in kinds:
            raise ValueError(f"kind: expected one of {kinds}, got {kind!r}")
        queries = self.query_encoder(encoder)
        pipeline: pt.Transformer = queries >> IndexRetriever(getattr(self.flex(), kind)(**settings))
        return pipeline

    def index_inputs(self) -> list[list[str]]:
        """Returns the columns that `index` needs."""
        return [["docno", self.encoder.text_field]]

    def _choose(self, encoder: object) -> FairBiEncoder:
        """Returns the encoder of queries: the given one, that of a given query encoder, or the index's own."""
        if encoder is None:
            return self.encoder
        if isinstance(encoder, FairQueryEncoder):
            encoder = encoder.bi_encoder_model
        if not isinstance(encoder, FairBiEncoder):
            raise TypeError(f"encoder: expected a FairBiEncoder, got {type(encoder).__name__}")
        return encoder

    def _check_complete(self, source: Source) -> None:
        """Checks that the complete index is what the present call would make."""
        own, present = self.record(), self.encoder.identity()
        if lines := own.document_differences(present):
            raise DifferentEncoderError(
                f"path: {self.path} is complete, and was made by {own.model!r} with other settings than "
                f"{present.model!r} has now: {'; '.join(lines)}. Use the same settings, or take another path"
            )
        docnos = (docno for window in source.windows(4096) for docno in window.docnos)
        stored = self.flex().docnos()
        if [*docnos] != [*stored]:
            raise SourceChangedError(
                f"path: {self.path} is complete, and holds other documents; remove it to index anew, or take another "
                "path"
            )

    def __repr__(self) -> str:
        return f"FairIndex({self.path!r}, {self.encoder!r})"


class IndexQueryEncoder(FairQueryEncoder):
    """Adds ``query_vec`` for one index, and refuses an encoder that was changed so that it does not fit the index."""

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
            DifferentEncoderError: The queries cannot be compared with the index, as in `FairIndex.check`.
        """
        self.index.check(self.bi_encoder_model)
        return super().transform(inp)

    def _key(self) -> Hashable:
        return (super()._key(), self.index.path)


class IndexRetriever(pt.Transformer):
    """Retrieves with a retriever of a `FlexIndex`, also none or one result for a query.

    For one result the retrievers of pyterrier_dr return arrays of length 1 in place of docno, docid, score and rank;
    for none, arrays of length 0.
    """

    def __init__(self, retriever: pt.Transformer) -> None:
        """Takes the retriever."""
        self.retriever = retriever

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Retrieves for ``query_vec``, adding ``docno``, ``docid``, ``score`` and ``rank``."""
        if getattr(self.retriever, "num_results", None) == 0:  # some retrievers cannot retrieve nothing
            inp = inp.iloc[:0]
        found = cast(pd.DataFrame, self.retriever(inp))
        for column in ("docno", "docid", "score", "rank"):
            if any(isinstance(value, np.ndarray) for value in found.get(column, ())):
                found = found[[np.size(value) > 0 for value in found[column]]].reset_index(drop=True)
                values = [np.atleast_1d(value) for value in found[column]]
                found[column] = np.concatenate(values) if values else []
        return found

    def fuse_rank_cutoff(self, k: int) -> IndexRetriever | None:
        """Returns a retriever of ``k`` results, if this one can be given that number."""
        fuse = getattr(self.retriever, "fuse_rank_cutoff", None)
        fused = None if fuse is None else fuse(k)
        return None if fused is None else IndexRetriever(fused)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IndexRetriever):
            return NotImplemented
        return bool(self.retriever == other.retriever)

    def __hash__(self) -> int:
        return hash((IndexRetriever, self.retriever))

    def __repr__(self) -> str:
        return repr(self.retriever)
