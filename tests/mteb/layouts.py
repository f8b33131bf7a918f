"""Writes small datasets in the layouts of the hub's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd


def write_posir(
    root: Path,
    language: str,
    domain: str,
    *,
    corpus: Mapping[str, str],
    queries: Mapping[str, tuple[Any, ...]],
    qrels: Sequence[tuple[str, str, int]],
) -> None:
    """Writes a domain of PosIR; a query is (text, span, length in characters, length in tokens)."""
    folder = root / language / domain
    (folder / "qrels").mkdir(parents=True)
    pd.DataFrame({"_id": list(corpus), "text": list(corpus.values())}).to_parquet(folder / "corpus.parquet")
    rows = [(name, *values) for name, values in queries.items()]
    columns = ["_id", "text", "pos_char_span", "pos_char_length", "pos_token_length"]
    pd.DataFrame(rows, columns=columns).to_parquet(folder / "queries.parquet")
    pd.DataFrame(qrels, columns=["query-id", "corpus-id", "score"]).to_parquet(folder / "qrels" / "test.parquet")


def write_fineweb(root: Path, rows: Sequence[tuple[Any, str, Any]]) -> None:
    """Writes FineWeb-PosQ; a row is (question, content, span_class)."""
    root.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(rows, columns=["question", "content", "span_class"])
    frame["content_summary"] = frame["answer"] = frame["span"] = ""
    frame["question_level"] = "easy"
    frame.to_parquet(root / "train-00000-of-00001.parquet")


def write_squad(root: Path, rows: Sequence[tuple[str, str, str, list[int]]], part: str = "train") -> None:
    """Writes a part of SQuAD v2; a row is (id, context, question, starts of the answers)."""
    (root / "squad_v2").mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame([row[:3] for row in rows], columns=["id", "context", "question"])
    frame["title"] = "title"
    frame["answers"] = [{"text": ["x"] * len(row[3]), "answer_start": row[3]} for row in rows]
    frame.to_parquet(root / "squad_v2" / f"{part}-00000-of-00001.parquet")
