"""Caches with one folder per encoder, since the keys of pyterrier-caching do not include the transformer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pyterrier as pt
from filelock import FileLock

from fair_calibration.identity import DifferentEncoderError, EncoderIdentity
from fair_indexing.files import new_folder, read_record, seal, synced_file
from pyterrier_fair.biencoder import FairBiEncoder
from pyterrier_fair.columns import read_texts

_RECORD = "fair_encoder.json"
_TEXTS_AT_ONCE = 10_000  # SQLite takes no more than 32,766 variables


def cache_path(folder: str | os.PathLike[str], encoder: FairBiEncoder) -> Path:
    """Returns the folder for caches of an encoder with its present settings, and makes it if it does not exist.

    Encoders that differ in anything that document vectors depend on (weights, calibration, prompts, max_seq_length,
    ...) have different folders. A cache whose keys are docnos needs a name for each collection::

        ScorerCache(cache_path("caches", fair_dense) / "msmarco-scores", fair_dense)

    The folder does not follow settings that are changed later, such as by a grid search; `FairDocCache` does.

    Args:
        folder: The folder of all caches.
        encoder: The encoder.

    Raises:
        DifferentEncoderError: The folder belongs to another encoder; the error names every difference.
        ValueError: The folder has no record of an encoder.
    """
    identity = encoder.identity()
    path = Path(folder) / identity.digest()
    if not path.exists():
        try:
            with new_folder(path) as part, synced_file(part / _RECORD) as file:
                file.write(seal(identity.to_dict()))
        except OSError:
            if not path.exists():
                raise  # otherwise another process was faster
    try:
        recorded = EncoderIdentity.from_dict(read_record(path / _RECORD))
    except FileNotFoundError as error:
        raise ValueError(f"folder: {path} has no {_RECORD}, so its encoder is not known") from error
    if lines := recorded.document_differences(identity):
        raise DifferentEncoderError(
            f"folder: {path} was made by {recorded.model!r} with other settings than {identity.model!r} has now: "
            f"{'; '.join(lines)}. Remove it, or take another folder"
        )
    return path


class FairDocCache(pt.Transformer):
    """Adds ``doc_vec`` as ``encoder.doc_encoder()`` does, encoding each text once, also across runs.

    It can be used wherever the doc encoder can: ``FairDocCache("caches", fair_dense) >> FlexIndex("index.flex")``, or
    before ``fair_dense.scorer()``. The keys are the texts, so one folder serves all collections. Each combination of
    settings that document vectors depend on has its own cache, a KeyValueCache of pyterrier-caching; the settings are
    read when documents are encoded.
    """

    batch_size = 4096  # how many documents an indexing pipeline passes on at a time

    def __init__(
        self, folder: str | os.PathLike[str], encoder: FairBiEncoder, *, text_field: str | None = None
    ) -> None:
        """Takes the folder of all caches, which is made when the first text is encoded.

        Args:
            folder: The folder of all caches.
            encoder: The encoder.
            text_field: The column of the texts; None means the encoder's.

        Raises:
            TypeError: ``encoder`` is not a FairBiEncoder.
        """
        if not isinstance(encoder, FairBiEncoder):
            raise TypeError(f"encoder: expected a FairBiEncoder, got {type(encoder).__name__}")
        self.folder = os.fspath(folder)
        self.encoder = encoder
        self.text_field = text_field

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Adds ``doc_vec``.

        Raises:
            ImportError: pyterrier-caching is not installed.
            DifferentEncoderError: The cache belongs to another encoder.
            ValueError: A text is missing, or two columns have its name.
            TypeError: A text is not a string.
        """
        field = self.text_field or self.encoder.text_field
        pt.validate.columns(inp, includes=[field])
        texts = read_texts(inp, field)
        vectors: dict[str, Any] = {}
        distinct = list(dict.fromkeys(texts))
        if distinct:
            try:
                from pyterrier_caching import KeyValueCache  # type: ignore[import-untyped]
            except ImportError as error:
                raise ImportError("FairDocCache needs pyterrier-caching: pip install pyterrier-caching") from error
            path = cache_path(self.folder, self.encoder)
            encode = pt.apply.generic(self._encode)
            with (
                FileLock(path / ".lock"),
                KeyValueCache(path / "doc_vec", encode, key="text", value="doc_vec") as cache,
            ):
                for start in range(0, len(distinct), _TEXTS_AT_ONCE):
                    frame = cache.transform(pd.DataFrame({"text": distinct[start : start + _TEXTS_AT_ONCE]}))
                    vectors.update(zip(frame["text"], frame["doc_vec"], strict=True))
        return inp.assign(doc_vec=cast(Any, [vectors[text] for text in texts]))

    def _encode(self, frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(doc_vec=cast(Any, list(self.encoder.encode_docs(frame["text"].tolist()))))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FairDocCache):
            return NotImplemented
        return (self.folder, self.encoder, self.text_field) == (other.folder, other.encoder, other.text_field)

    def __hash__(self) -> int:
        return hash((FairDocCache, self.folder, self.encoder))

    def __repr__(self) -> str:
        return f"FairDocCache({self.folder!r}, {self.encoder!r})"
