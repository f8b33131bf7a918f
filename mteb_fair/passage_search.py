"""`FairPassageSearch`: retrieval with several vectors per document in MTEB, one for each passage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from mteb.models import ModelMeta, SearchEncoderWrapper
from mteb.types import PromptType
from torch.utils.data import DataLoader

from fair_calibration.passages import check_chunk_size, cut_passages
from mteb_fair.encoder import FairEncoder
from mteb_fair.variant import compression_of

if TYPE_CHECKING:
    from mteb.types import Array, BatchedInput, CorpusDatasetType, QueryDatasetType, RetrievalOutputType

Vectors = npt.NDArray[np.float32]
_N_DOCUMENTS = 10_000  # encoded and scored at once; MTEB's own 50,000 would be several times as many vectors here
_N_SCORES = 2**24  # of queries and passages computed at once: 64 MB


class FairPassageSearch:
    """An MTEB search model that cuts documents into even passages and ranks a document by its best passage.

    Passages end at white space and differ little in their number of tokens, as `pyterrier_fair.FairPassages` cuts them
    (`fair_calibration.passages.cut_passages`). A document's title is part of the text that is cut. Passages of 128
    tokens are short enough for the plain model, so give it an encoder of strength 0::

        mteb.evaluate(FairPassageSearch(FairEncoder("BAAI/bge-m3", strength=0), passage_size=128), task)

    It evaluates retrieval and reranking tasks. MTEB refuses it for all others with a TypeError, since it only searches.
    The passage size is part of its name and its experiment settings, as the settings of the encoder are.
    """

    def __init__(self, encoder: FairEncoder, *, passage_size: int = 128) -> None:
        """Takes the encoder of passages and queries.

        Args:
            encoder: The encoder, whose tokenizer counts the tokens. Its ``counts`` count passages as documents.
            passage_size: The most tokens of a passage, without the model's prompt and special tokens.

        Raises:
            TypeError: ``encoder`` is not a FairEncoder, or ``passage_size`` is not an integer.
            ValueError: ``passage_size`` is below 1 or too large for the model's ``max_seq_length``, or the model has a
                slow tokenizer, which gives no character offsets.
        """
        if not isinstance(encoder, FairEncoder):
            raise TypeError(
                f"encoder: expected a FairEncoder, got {type(encoder).__name__}; MTEB's wrappers of encoders cannot be "
                "combined with passages"
            )
        check_chunk_size(encoder.model, passage_size, setting="passage_size")
        cut_passages(encoder.model, "", chunk_size=passage_size)  # a slow tokenizer is reported now
        self.encoder = encoder
        self.variant = replace(encoder.variant, passage_size=passage_size)
        # Not inherited from, since that class also encodes, and tasks without a search would take it for an encoder.
        passages: Any = _PassageEncoder(encoder, passage_size)
        self._search = SearchEncoderWrapper(passages, corpus_chunk_size=_N_DOCUMENTS)
        self.mteb_model_meta = encoder.mteb_model_meta

    def __repr__(self) -> str:
        return f"FairPassageSearch({self.variant.name!r}, device={str(self.encoder.model.device)!r})"

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """MTEB's metadata of the encoder, with the passage size in the name and in the experiment settings."""
        meta = self.encoder.mteb_model_meta
        # Without the settings of a CompressionWrapper that was put around the encoder later: passages skip it.
        return self.variant.identify(meta.model_copy(update={"experiment_kwargs": None}))

    @mteb_model_meta.setter
    def mteb_model_meta(self, meta: ModelMeta) -> None:
        # MTEB sets it when it loads a registered model, and CompressionWrapper to add its settings.
        if compression_of(meta):
            raise TypeError(
                "FairPassageSearch: MTEB's CompressionWrapper compresses the one vector that encoders give a document, "
                "and here a document has several; evaluate it without compression"
            )
        self.encoder.mteb_model_meta = meta

    def index(self, corpus: CorpusDatasetType, **kwargs: Any) -> None:
        """Keeps the corpus, with the columns "id", "text" and perhaps "title", until it is searched.

        Args:
            corpus: The documents. They are encoded when they are searched, 10,000 at a time.
            **kwargs: As for `mteb.models.SearchProtocol.index`.
        """
        self._search.index(corpus, **kwargs)

    def search(self, queries: QueryDatasetType, **kwargs: Any) -> RetrievalOutputType:
        """Ranks the documents of the corpus, or those that ``top_ranked`` has for a query, by their best passages.

        Args:
            queries: The queries, with the columns "id" and "text".
            **kwargs: As for `mteb.models.SearchProtocol.search`; ``top_k`` is the number of documents.

        Returns:
            The similarity of the best passage by query and document.

        Raises:
            ValueError: There is no corpus, or the encoder raises it.
        """
        return self._search.search(queries, **kwargs)


class _PassageEncoder:
    """Encodes documents as lists of vectors, which MTEB's search takes where it expects one vector per document."""

    def __init__(self, encoder: FairEncoder, passage_size: int) -> None:
        self._encoder = encoder
        self._passage_size = passage_size

    @property
    def mteb_model_meta(self) -> ModelMeta:
        return self._encoder.mteb_model_meta

    def encode(
        self, inputs: DataLoader[BatchedInput], *, prompt_type: PromptType, **kwargs: Any
    ) -> Array | list[Vectors]:
        """Returns query vectors (n, D), or the passage vectors of each document, float32 (number of passages, D)."""
        if prompt_type != PromptType.document:
            return self._encoder.encode(inputs, prompt_type=prompt_type, **kwargs)
        ids: list[str] = []
        passages: list[str] = []
        starts: list[int] = []
        for batch in inputs:
            for identifier, text in zip(batch["id"], batch["text"], strict=True):
                starts.append(len(passages))
                passages += cut_passages(self._encoder.model, text, chunk_size=self._passage_size)
                ids += [f"{identifier}, passage {i}" for i in range(len(passages) - starts[-1])]
        data: Any = Dataset.from_dict({"id": ids, "text": passages})
        vectors = np.asarray(self._encoder.encode(DataLoader(data, batch_size=256), prompt_type=prompt_type, **kwargs))
        return np.split(vectors, starts[1:])

    def similarity(self, queries: Array, documents: Sequence[Vectors]) -> torch.Tensor:
        """Returns the similarity of n queries (n, D) to the best passages of m documents: (n, m)."""
        best = []
        for part in _parts(documents, max(1, _N_SCORES // max(1, len(queries)))):
            scores = np.asarray(self._encoder.similarity(queries, np.concatenate(part)))
            starts = np.cumsum([0, *map(len, part[:-1])])
            best.append(np.maximum.reduceat(scores, starts, axis=1))
        return torch.from_numpy(np.concatenate(best, axis=1))


def _parts(documents: Sequence[Vectors], n_vectors: int) -> list[list[Vectors]]:
    """Divides documents into parts of at most ``n_vectors`` vectors, or of one document that has more."""
    parts: list[list[Vectors]] = []
    room = 0
    for vectors in documents:
        if not parts or len(vectors) > room:
            parts.append([])
            room = n_vectors
        parts[-1].append(vectors)
        room -= len(vectors)
    return parts
