from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from mteb import TaskMetadata
from mteb._create_dataloaders import create_dataloader
from mteb.models.cache_wrappers import CachedEmbeddingWrapper
from mteb.types import PromptType

from mteb_fair import FairEncoder, PositionDemoRetrieval
from tests.core.tiny_models import documents

TASK: TaskMetadata = PositionDemoRetrieval.metadata


def encode(encoder: Any, kind: PromptType) -> np.ndarray:
    texts = Dataset.from_dict({"id": ["a", "b"], "title": ["", ""], "text": documents([40, 60])})
    inputs = create_dataloader(texts, task_metadata=TASK, prompt_type=kind, batch_size=2)
    return np.asarray(
        encoder.encode(
            inputs, task_metadata=TASK, hf_split="test", hf_subset="default", prompt_type=kind, show_progress_bar=False
        )
    )


def test_roles_and_settings_stay_apart_in_one_folder(tiny_path: Path, tmp_path: Path) -> None:
    """A text that is a query and a document has two vectors (reported to MTEB as issue 5383), settings have theirs."""
    seen = []
    for settings in ({"strength": 1.0}, {"strength": 0.5}, {"config": "even_chunks", "chunk_size": 16, "unit_size": 8}):
        basket = {} if "config" in settings else {"basket_size": 16}
        encoder = FairEncoder(tiny_path, **basket, **settings)  # type: ignore[arg-type]
        for kind in PromptType:
            expected = encode(encoder, kind)
            for _ in range(2):  # the second time out of the folder
                assert np.array_equal(encode(CachedEmbeddingWrapper(encoder, tmp_path), kind), expected)
            seen.append((kind, expected))
    queries = [vectors for kind, vectors in seen if kind is PromptType.query]
    assert all(np.array_equal(queries[0], vectors) for vectors in queries[1:])
    different = [queries[0]] + [vectors for kind, vectors in seen if kind is PromptType.document]
    assert len({vectors.tobytes() for vectors in different}) == 4
