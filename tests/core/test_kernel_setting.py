"""The argument ``kernel``: what it changes in a whole model, where it is kept, and where it is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fair_calibration import EvenChunks, FairConfig, FairSentenceTransformer, calibrate
from fair_calibration.identity import EncoderIdentity
from fair_calibration.method import one_pass
from fair_indexing.manifest import describe_environment
from tests.conftest import TinyModel
from tests.core.tiny_models import documents

pytest.importorskip("triton", reason="the package triton, which exists for Linux, is not installed")
CONFIG = FairConfig(basket_size=8, strength=0.7, layers=1)
TEXTS = documents([20, 7])


def test_gives_the_same_vectors(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_model("qwen3", "lasttoken")
    expected = calibrate(plain, CONFIG).encode_document(TEXTS)
    fair = calibrate(plain, CONFIG, kernel="triton")
    launches: list[Any] = []
    launch = one_pass.OnePass._launch
    monkeypatch.setattr(
        one_pass.OnePass, "_launch", lambda self, *args: (launches.append(args), launch(self, *args))[1]
    )
    assert np.abs(fair.encode_document(TEXTS) - expected).max() < 1e-5
    assert len(launches) == 1  # one per layer and batch
    assert np.array_equal(fair.encode_query(TEXTS), plain.encode_query(TEXTS))
    assert np.array_equal(fair.encode_document(TEXTS, strength=0), plain.encode_document(TEXTS))
    assert len(launches) == 1
    short = calibrate(fair, pooled_row_only=True)  # keeps the kernel
    assert np.abs(short.encode_document(TEXTS) - expected).max() < 1e-5
    assert short.summary().pooled_row_only
    assert "  kernel     triton, one pass over the keys; not yet run on a GPU" in str(short.summary())


def test_is_kept_and_no_part_of_the_identity(tiny_model: TinyModel, tmp_path: Path) -> None:
    plain = tiny_model("qwen3", "lasttoken")
    fair, torch_only = calibrate(plain, CONFIG, kernel="triton"), calibrate(plain, CONFIG)
    assert (fair.summary().kernel, torch_only.summary().kernel) == ("triton", "torch")
    assert calibrate(fair, CONFIG, kernel="torch").summary().kernel == "torch"
    assert pickle.loads(pickle.dumps(fair)).summary().kernel == "triton"
    assert EncoderIdentity.of(fair) == EncoderIdentity.of(torch_only)
    assert [describe_environment(model)["kernel"] for model in (plain, torch_only, fair)] == [
        "torch",
        "torch",
        "triton",
    ]
    fair.save(str(tmp_path))
    assert FairSentenceTransformer(str(tmp_path), device="cpu").summary().kernel == "torch"
    assert FairSentenceTransformer(str(tmp_path), device="cpu", kernel="triton").summary().kernel == "triton"


def test_what_is_refused(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_model("bert", "mean")
    with pytest.raises(ValueError, match=r"kernel: expected one of \['torch', 'triton'\], got 'cuda'"):
        calibrate(plain, CONFIG, kernel="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"kernel: 'triton' cannot be used with the model, which computes its"):
        calibrate(tiny_model("mpnet", "mean"), CONFIG, kernel="triton")
    eager = tiny_model("bert", "mean", model_kwargs={"attn_implementation": "eager"})
    with pytest.raises(ValueError, match=r"kernel: 'triton' cannot .* of BertSelfAttention: a bias is added"):
        calibrate(eager, CONFIG, kernel="triton")
    with pytest.raises(ValueError, match=r"kernel: expected 'torch' with EvenChunks, .* got 'triton'"):
        calibrate(plain, EvenChunks(chunk_size=16), kernel="triton")
    fair = calibrate(plain, CONFIG, kernel="triton").train()
    with pytest.raises(ValueError, match=r"kernel: 'triton' computes no gradients; train with kernel='torch'"):
        fair(fair.preprocess(TEXTS))
    with monkeypatch.context() as patch:
        patch.setattr(one_pass, "_is_interpreted", lambda: False)
        with pytest.raises(ValueError, match=r"kernel: 'triton' runs on CUDA devices, the model is on cpu"):
            calibrate(plain, CONFIG, kernel="triton")
        with pytest.raises(ValueError, match=r"kernel: 'triton' runs on CUDA devices, the model is on cpu"):
            fair.eval().encode_document(TEXTS)  # as after model.to("cpu")


def test_a_kernel_that_computes_something_else_is_noticed(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny_model("bert", "cls")
    for wrong in (1.0, torch.nan):
        monkeypatch.setattr(one_pass.OnePass, "_launch", lambda _, output, *__, wrong=wrong: output.fill_(wrong))
        with pytest.raises(ValueError, match=r"kernel: 'triton' computes something else than torch's functions for"):
            calibrate(plain, CONFIG, kernel="triton")
