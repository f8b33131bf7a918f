"""Cases that pyterrier_dr does not cover: documents that an index lacks, and queries with at most one result."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyterrier as pt
from pyterrier_dr import FlexIndex


class CheckedFlexIndex(FlexIndex):  # type: ignore[misc]
    """A `FlexIndex` whose ``np_scorer``, ``torch_scorer`` and ``vec_loader`` refuse documents that it does not have.

    pyterrier_dr gives such a document the vector of the last one. And it takes a column ``docid`` for its own, although
    it may be that of the index of another first stage; here the docno decides.
    """

    def _load_docids(self, inp: pd.DataFrame) -> npt.NDArray[np.intp]:
        if "docno" not in inp.columns:
            return cast("npt.NDArray[np.intp]", super()._load_docids(inp))
        docids = np.asarray(self.docnos().inv[inp["docno"].to_numpy()])
        if (unknown := np.flatnonzero(docids < 0)).size:
            raise ValueError(
                f"docno: {len(unknown)} documents are not in {self!r}, such as {inp['docno'].iloc[unknown[0]]!r}; "
                "index them, or leave them out of the results"
            )
        return docids


class IndexRetriever(pt.Transformer):
    """Retrieves with a retriever of a `FlexIndex`, and returns one row per result.

    The retrievers of pyterrier_dr build their results with a DataFrameBuilder. For one result it yields arrays of
    length 1 in place of docno, docid, score and rank, for no results arrays of length 0, and it fails if the first
    query has more results than one and another query has not.
    """

    def __init__(self, retriever: pt.Transformer) -> None:
        """Takes the retriever."""
        self.retriever = retriever

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Retrieves for ``query_vec``, adding ``docno``, ``docid``, ``score`` and ``rank``."""
        if getattr(self.retriever, "num_results", None) == 0:  # some retrievers cannot retrieve no results
            inp = inp.iloc[:0]
        try:
            found = cast(pd.DataFrame, self.retriever(inp))
        except ValueError:
            if len(inp) < 2:
                raise
            found = pd.concat([self.transform(inp.iloc[[row]]) for row in range(len(inp))], ignore_index=True)
        columns = [name for name in ("docno", "docid", "score", "rank") if name in found]
        if any(isinstance(value, np.ndarray) for name in columns for value in found[name]):
            values: dict[str, Any] = {name: np.concatenate([*map(np.atleast_1d, found[name])]) for name in columns}
            is_result = [np.size(value) > 0 for value in found["docno"]]
            found = found[is_result].reset_index(drop=True).assign(**values)
        return found

    def fuse_rank_cutoff(self, k: int) -> IndexRetriever | None:
        """Returns a retriever of ``k`` results, if this one can be given that number."""
        fuse = getattr(self.retriever, "fuse_rank_cutoff", None)
        fused = None if fuse is None else fuse(k)
        return None if fused is None else IndexRetriever(fused)

    def __eq__(self, other: object) -> bool:
        return self.retriever == other.retriever if isinstance(other, IndexRetriever) else NotImplemented

    def __hash__(self) -> int:
        return hash((IndexRetriever, self.retriever))

    def __repr__(self) -> str:
        return repr(self.retriever)
