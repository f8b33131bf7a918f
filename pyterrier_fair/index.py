"""`FairIndex`: a FlexIndex that resumes an interrupted build and records the encoder that made its vectors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

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
from pyterrier_fair.columns import read_records
from pyterrier_fair.retriever import CheckedFlexIndex, IndexRetriever

_META = "pt_meta.json"
_REFUSED = {
    "doc_vec": "FairIndex encodes the documents itself, with the encoder it was given; leave out what adds vectors "
    "before it, or index into a pyterrier_dr.FlexIndex"
}


class FairIndex(pt.Artifact, pt.Indexer):
    """Indexes documents into the files of a `pyterrier_dr.FlexIndex`, and retrieves from them.

    Usage::

        index = FairIndex("index.flex", fair_dense)
        index.index(dataset.get_corpus_iter())
        index.retriever() % 100

    Calling `index` again resumes an interrupted build. Until the index is complete, its parts are in the folder
    ``<path>.build``, and nothing exists at ``path``. The index records its encoder, and queries of another encoder are
    refused. The calibration may differ, since queries are encoded without it.

    It is a `pyterrier.Artifact`, which `to_hf` shares and `pt.Artifact.load` and `pt.Artifact.from_hf` open. Without an
    encoder it says which one it needs: ``pt.Artifact.load("index.flex").retriever(fair_dense)``, or
    ``pt.Artifact.load("index.flex", encoder=fair_dense).retriever()``.
    """

    # Not pyterrier_dr's "flex": PyTerrier would load the artifact as a FlexIndex, which does not check the encoder.
    ARTIFACT_TYPE = "dense_index"
    ARTIFACT_FORMAT = "fair_flex"
    ARTIFACT_PACKAGE_HINT = "fair-calibration"

    path: Path

    def __init__(
        self,
        path: str | os.PathLike[str],
        encoder: FairBiEncoder | None = None,
        *,
        shard_size: int | None = None,
        tokens_per_batch: int | None = None,
        verbose: bool | None = None,
    ) -> None:
        """Takes the path of an index; nothing is read or written yet.

        Args:
            path: The folder of the index.
            encoder: Encodes the documents, and the queries unless another encoder is given. None opens an index that
                exists: its methods then take an encoder for the queries.
            shard_size: The number of documents in a shard of the build; None means that of the interrupted build, or
                4096 for a new one.
            tokens_per_batch: The most tokens of a forward pass, padding included; None means a default by device.
            verbose: Whether to show progress bars; None means the encoder's setting.

        Raises:
            TypeError: ``encoder`` is not a FairBiEncoder.
        """
        super().__init__(Path(path))
        self.encoder = None if encoder is None else _bi_encoder(encoder)
        self.shard_size = shard_size
        self.tokens_per_batch = tokens_per_batch
        self.verbose = verbose

    def index(  # type: ignore[override]
        self, iter: Iterable[dict[str, Any]] | pd.DataFrame
    ) -> FairIndex:
        """Encodes and indexes documents, or resumes an interrupted build.

        To resume, give the same documents in the same order. Documents that were encoded before are compared with what
        was given then, and not encoded again. If the build was interrupted after the index was complete, only docnos
        are compared.

        Args:
            iter: Dicts with ``docno`` and the encoder's ``text_field``.

        Returns:
            This index.

        Raises:
            ValueError: The path exists, there are fewer than two documents (the format cannot hold a single one), a
                document comes with a vector (``doc_vec``), or a record cannot be indexed. Nothing is written at
                ``path`` then.
            TypeError: A docno or a text is not a string.
            DifferentEncoderError: The interrupted build used another encoder or other settings.
            SourceChangedError: The documents are not those of the interrupted build.
            FolderInUseError: Another process is building this index.
            OSError: The disk is full or cannot be written; finished shards are kept.
        """
        target, work = self.path, Path(f"{self.path}.build")
        shards, encoder = work / "shards", self._encoder_or_own()
        if target.exists() and not (work.exists() and self.built()):
            raise ValueError(f"path: {target} exists; remove it to index anew, or take another path")
        records = read_records(iter, encoder.text_field)
        source = open_source(records, text_field=encoder.text_field, refused=_REFUSED).started(2, reason=NO_SINGLE)
        work.mkdir(parents=True, exist_ok=True)
        with locked(work):
            if self.built() and not ShardFolder.exists(shards):  # interrupted while removing the parts
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
                if not target.exists():  # otherwise an earlier call was interrupted after this step
                    metadata = {"format": self.ARTIFACT_FORMAT, "package_hint": self.ARTIFACT_PACKAGE_HINT}
                    assemble_flex(built.shards, target, metadata=metadata)
                os.rename(shards, work / "done")  # so that a partly removed folder does not look like a build
            finally:
                if not ShardFolder.exists(shards):
                    shutil.rmtree(work)
        return self

    def built(self) -> bool:
        """Returns whether there is a complete index at ``path``."""
        return (self.path / _META).exists()

    def record(self) -> EncoderIdentity:
        """Returns the identity of the encoder that made the vectors.

        Raises:
            ValueError: There is no index, or it was not made by a `FairIndex`.
        """
        self._check_exists()
        return read_manifest(self.path).encoder

    def flex(self) -> FlexIndex:
        """Returns the index as a `FlexIndex`, which accepts the vectors of any encoder.

        Its ``np_scorer``, ``torch_scorer`` and ``vec_loader`` find documents by docno, and refuse those that it does
        not have. The sizes of its files and samples of their contents are compared with those recorded by the build.
        ``fair_indexing.check_index(path, full=True)`` compares every byte.

        Raises:
            ValueError: There is no index.
            DamagedFileError: A file is missing, or its contents are not those recorded; the error names it.
        """
        self._check_exists()
        if (self.path / RECORD).exists():
            check_index(self.path)
        verbose = self.encoder is not None and self.encoder.verbose if self.verbose is None else self.verbose
        flex = CheckedFlexIndex(str(self.path), verbose=verbose)
        meta = json.loads((self.path / _META).read_text(encoding="utf-8"))
        if meta.get("format") == self.ARTIFACT_FORMAT:  # the same files, but FlexIndex insists on its own name
            flex._meta = meta | {"format": FlexIndex.ARTIFACT_FORMAT}
        return flex

    def check(self, encoder: FairBiEncoder | None = None) -> None:
        """Checks that the query vectors of an encoder can be compared with the vectors of this index.

        The weights, modules, tokenizer, max_seq_length, query prompt, truncate_dim, normalization and similarity must
        be those of the encoder that made the index. The calibration and the prompt of documents may differ.

        Args:
            encoder: The encoder, or one of its query encoders; None means the index's own encoder.

        Raises:
            DifferentEncoderError: They cannot be compared; the error names every difference.
            ValueError: There is no index, or it was not made by a `FairIndex`.
        """
        own, queries = self.record(), self._encoder_or_own(encoder).identity()
        if lines := own.query_differences(queries):
            raise DifferentEncoderError(
                f"encoder: the vectors of {self.path} were made by {own.model!r} with other settings than "
                f"{queries.model!r} has now, so its queries cannot be compared with them: {'; '.join(lines)}. "
                "Use an encoder with the index's settings, or index anew"
            )

    def query_encoder(
        self, encoder: FairBiEncoder | None = None, verbose: bool | None = None, batch_size: int | None = None
    ) -> IndexQueryEncoder:
        """Returns a transformer that adds ``query_vec`` and checks each time that the encoder fits this index.

        Args:
            encoder: Encodes the queries; None means the index's own encoder.
            verbose: Whether to show progress bars; None means the encoder's setting.
            batch_size: The most queries of a forward pass; None means the encoder's setting.

        Raises:
            TypeError: ``encoder`` is not a FairBiEncoder.
            DifferentEncoderError: The queries cannot be compared with this index, as in `check`.
        """
        encoder = self._encoder_or_own(encoder)
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
            DamagedFileError: As in `flex`.
        """
        kinds = sorted(name for name in dir(FlexIndex) if name.endswith("_retriever"))
        if kind not in kinds:
            raise ValueError(f"kind: expected one of {kinds}, got {kind!r}")
        pipeline: pt.Transformer = self.query_encoder(encoder) >> IndexRetriever(getattr(self.flex(), kind)(**settings))
        return pipeline

    def build_package(self, *args: Any, **settings: Any) -> str:
        """Packages the index into one file, as `to_hf` does before it uploads; see `pyterrier.Artifact`.

        Raises:
            ValueError: There is no index.
            DamagedFileError: As in `flex`.
        """
        self.flex()
        return super().build_package(*args, **settings)

    def index_inputs(self) -> list[list[str]]:
        """Returns the columns that `index` needs."""
        return [["docno", self._encoder_or_own().text_field]]

    def _encoder_or_own(self, encoder: FairBiEncoder | None = None) -> FairBiEncoder:
        """Returns the given encoder, or else the index's own."""
        if encoder is None and self.encoder is None:
            made_by = f"; its vectors were made by {self.record().model!r}" if self.built() else ""
            raise ValueError(
                f"encoder: {self.path} was opened without an encoder{made_by}. Pass one, as in FairIndex(path, "
                "encoder) or retriever(encoder)"
            )
        return _bi_encoder(self.encoder if encoder is None else encoder)

    def _check_exists(self) -> None:
        if not (self.built() or (self.path / RECORD).exists()):
            raise ValueError(f"path: there is no index at {self.path}; call index() first")

    def _check_complete(self, source: Source) -> None:
        """Checks that the complete index has the settings and the docnos of the present call."""
        own, present = self.record(), self._encoder_or_own().identity()
        if lines := own.document_differences(present):
            raise DifferentEncoderError(
                f"path: {self.path} is complete, and was made by {own.model!r} with other settings than "
                f"{present.model!r} has now: {'; '.join(lines)}. Use the same settings, or take another path"
            )
        docnos = [docno for window in source.windows(4096) for docno in window.docnos]
        if docnos != [*self.flex().docnos()]:
            raise SourceChangedError(
                f"path: {self.path} is complete and holds other documents; remove it to index anew, or take another "
                "path"
            )

    def __repr__(self) -> str:
        return f"FairIndex({str(self.path)!r}, {self.encoder!r})"


def _bi_encoder(encoder: object) -> FairBiEncoder:
    """Returns an encoder, or the encoder of a query encoder."""
    if isinstance(encoder, FairQueryEncoder):
        encoder = encoder.bi_encoder_model
    if not isinstance(encoder, FairBiEncoder):
        raise TypeError(f"encoder: expected a FairBiEncoder, got {type(encoder).__name__}")
    return encoder


class IndexQueryEncoder(FairQueryEncoder):
    """Adds ``query_vec`` for one index, and refuses an encoder that was changed and no longer fits the index."""

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
