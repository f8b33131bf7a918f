"""The safe way with pyterrier-caching, whose keys never include the transformer: a folder for each encoder."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pyterrier as pt
from filelock import FileLock

from fair_calibration.identity import DifferentEncoderError, EncoderIdentity
from fair_indexing.files import new_folder, read_record, seal, synced_file
from pyterrier_fair.encoder import FairBiEncoder
from pyterrier_fair.identity import EncoderState
from pyterrier_fair.texts import read_texts

_RECORD = "fair_encoder.json"
_TEXTS_AT_ONCE = 10_000  # SQLite takes no more than 32,766 variables


def cache_path(folder: str | os.PathLike[str], encoder: FairBiEncoder) -> Path:
    """Returns the folder for caches of an encoder with its settings as they stand now, made if it is not there.

    Encoders that differ in anything that document vectors depend on (weights, calibration, prompts, max_seq_length,
    ...) have different ones. Caches of documents, scores or results go into it under names of their own, one for each
    collection where they go by docno::

        ScorerCache(cache_path("caches", fair_dense) / "msmarco-scores", fair_dense)

    Settings that are changed later, by a grid search say, are not followed: see `FairDocCache`.

    Args:
        folder: Of all caches.
        encoder: The encoder.

    Raises:
        DifferentEncoderError: The folder of that name is another encoder's; every difference is named.
        ValueError: It holds no record of an encoder.
    """
    return _folder_of(Path(folder), EncoderState(encoder).record())


class FairDocCache(pt.Transformer):
    """Adds ``doc_vec`` as ``encoder.doc_encoder()`` does, encoding no text twice, not even in another run.

    It may stand wherever the doc encoder may: ``FairDocCache("caches", fair_dense) >> FlexIndex("index.flex")``, or
    before ``fair_dense.scorer()``. The cache goes by the text, so one folder serves all collections, and by all that
    the encoder's document vectors depend on, as it stands when documents are encoded: changed settings have a cache of
    their own. It is a pyterrier-caching KeyValueCache per setting.
    """

    batch_size = 4096  # how many documents an indexing pipeline hands over at a time

    def __init__(
        self, folder: str | os.PathLike[str], encoder: FairBiEncoder, *, text_field: str | None = None
    ) -> None:
        """Takes the folder of all caches; it is made when the first text is encoded.

        Args:
            folder: Of all caches.
            encoder: The encoder.
            text_field: The column of the texts; None is the encoder's.

        Raises:
            TypeError: ``encoder`` is no FairBiEncoder.
        """
        if not isinstance(encoder, FairBiEncoder):
            raise TypeError(f"encoder: expected a FairBiEncoder, got {type(encoder).__name__}")
        self.folder = os.fspath(folder)
        self.encoder = encoder
        self.text_field = text_field
        self._state = EncoderState(encoder)

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Adds ``doc_vec``.

        Raises:
            ImportError: pyterrier-caching is missing.
            DifferentEncoderError: The cache is another encoder's.
            ValueError: A text is missing, or there are two columns of its name.
            TypeError: A text is no string.
        """
        field = self.text_field or self.encoder.text_field
        pt.validate.columns(inp, includes=[field])
        texts = read_texts(inp, field)
        vectors: dict[str, Any] = {}
        distinct = list(dict.fromkeys(texts))
        if distinct:
            path = _folder_of(Path(self.folder), self._state.record())
            encode = _TextEncoder(self.encoder)
            make_cache = _key_value_cache()
            with FileLock(path / ".lock"), make_cache(path / "doc_vec", encode, key="text", value="doc_vec") as cache:
                for start in range(0, len(distinct), _TEXTS_AT_ONCE):
                    frame = cache.transform(pd.DataFrame({"text": distinct[start : start + _TEXTS_AT_ONCE]}))
                    vectors.update(zip(frame["text"], frame["doc_vec"], strict=True))
        return inp.assign(doc_vec=cast(Any, [vectors[text] for text in texts]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FairDocCache):
            return NotImplemented
        own, others = ((c.folder, c.encoder, c.text_field) for c in (self, other))
        return own == others

    def __hash__(self) -> int:
        return hash((FairDocCache, self.folder, self.encoder))

    def __repr__(self) -> str:
        return f"FairDocCache({self.folder!r}, {self.encoder!r})"


class _TextEncoder(pt.Transformer):
    """Encodes the column ``text``, whatever the encoder's text_field is."""

    def __init__(self, encoder: FairBiEncoder) -> None:
        self.encoder = encoder

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        return inp.assign(doc_vec=cast(Any, list(self.encoder.encode_docs(inp["text"].tolist()))))


def _folder_of(folder: Path, record: EncoderIdentity) -> Path:
    values = {key: value for key, value in record.to_dict().items() if key != "model"}
    digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()
    path = folder / digest
    if not path.exists():
        try:
            with new_folder(path) as part, synced_file(part / _RECORD) as file:
                file.write(seal(record.to_dict()))
        except OSError:
            if not path.exists():
                raise  # else another process was faster
    try:
        there = EncoderIdentity.from_dict(read_record(path / _RECORD))
    except FileNotFoundError as error:
        raise ValueError(f"folder: {path} has no {_RECORD}, so nothing tells which encoder it is of") from error
    if lines := there.document_differences(record):
        raise DifferentEncoderError(
            f"folder: {path} is of {there.model!r} with other settings than {record.model!r} has now: "
            f"{'; '.join(lines)}. Remove it, or take another folder"
        )
    return path


def _key_value_cache() -> Any:
    try:
        from pyterrier_caching import KeyValueCache  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("a cache of vectors needs pyterrier-caching: pip install pyterrier-caching") from error
    return KeyValueCache
