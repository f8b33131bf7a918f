from __future__ import annotations

from pathlib import Path
from typing import Any

import mteb
import numpy as np
import pytest
from datasets import Dataset
from mteb.models.instruct_wrapper import InstructSentenceTransformerModel
from mteb.models.model_implementations import MODEL_REGISTRY
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer
from torch.utils.data import DataLoader

import mteb_fair
from fair_calibration import FairSentenceTransformer
from mteb_fair import FairEncoder, PositionDemoRetrieval
from mteb_fair.instructions import instructions_of, loading_arguments
from tests.core.tiny_models import documents

TEXTS = documents([3, 40, 64])
TASKS = {"retrieval": PositionDemoRetrieval.metadata, "named": mteb.get_task("SciFact").metadata}
TASKS |= {"sts": mteb.get_task("STS12").metadata}
# One for each way to say it: a function, a template, and instructions for documents as well.
NAMES = ["microsoft/harrier-oss-v1-270m", "codefuse-ai/F2LLM-v2-80M", "intfloat/multilingual-e5-large-instruct"]
NAMES += ["Octen/Octen-Embedding-0.6B"]


def encode(model: Any, kind: PromptType | None, task: Any) -> np.ndarray:
    inputs = DataLoader(Dataset.from_dict({"text": TEXTS}), batch_size=2)
    settings = {"task_metadata": task, "hf_split": "test", "hf_subset": "default", "prompt_type": kind}
    return np.asarray(model.encode(inputs, show_progress_bar=False, **settings))


@pytest.mark.parametrize("name", NAMES)
def test_strength_0_is_mtebs_loader(tiny_path: Path, name: str) -> None:
    given = MODEL_REGISTRY[name].loader_kwargs
    kwargs = {
        k: given[k] for k in ("instruction_template", "prompts_dict", "apply_instruction_to_passages") if k in given
    }
    theirs = InstructSentenceTransformerModel(str(tiny_path), None, device="cpu", **kwargs)  # type: ignore[arg-type]
    ours = FairEncoder(tiny_path, strength=0, base_name=name)
    plain = SentenceTransformer(str(tiny_path), device="cpu")
    for task in TASKS.values():
        for kind in (None, *PromptType):
            if (kind is None) != (task is TASKS["sts"]):
                continue
            expected = encode(theirs, kind, task)
            np.testing.assert_allclose(encode(ours, kind, task), expected, atol=1e-6)
            is_bare = np.allclose(expected, plain.encode(TEXTS), atol=1e-4)
            assert is_bare == (kind is PromptType.document)  # of these models, none has an instruction for documents


def test_prompts_given_replace_them(tiny_path: Path) -> None:
    name = NAMES[0]
    ours = FairEncoder(tiny_path, strength=0, base_name=name, model_prompts={"query": "ba "})
    plain = SentenceTransformer(str(tiny_path), device="cpu")
    assert np.allclose(encode(ours, PromptType.query, TASKS["named"]), plain.encode(TEXTS, prompt="ba "), atol=1e-5)


def test_how_a_name_is_loaded(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def load(path: str, **kwargs: Any) -> FairSentenceTransformer:
        calls.append({"path": path, **kwargs})
        return FairSentenceTransformer(str(tiny_path), device="cpu")

    monkeypatch.setattr("mteb_fair.loading.FairSentenceTransformer", load)
    name = "codefuse-ai/F2LLM-v2-80M"
    known = MODEL_REGISTRY[name].loader_kwargs
    meta = FairEncoder(name, strength=0).mteb_model_meta
    call = calls.pop()
    assert (call["path"], call["revision"], call["max_seq_length"]) == (name, meta.revision, known["max_seq_length"])
    assert call["tokenizer_kwargs"] == {"add_eos_token": True}
    assert call["model_kwargs"] == known["model_kwargs"]
    assert meta.revision == MODEL_REGISTRY[name].revision
    assert loading_arguments(MODEL_REGISTRY["Octen/Octen-Embedding-4B-INT8"])["truncate_dim"] == 1024


@pytest.mark.parametrize(
    "name",
    ["google/embeddinggemma-300m", "lightonai/DenseOn", "lightonai/mDenseOn", "microsoft/harrier-oss-v1-0.6b",
     "codefuse-ai/F2LLM-v2-0.6B", "KaLM-Embedding/KaLM-embedding-multilingual-mini-instruct-v2.5",
     "ibm-granite/granite-embedding-97m-multilingual-r2", "perplexity-ai/pplx-embed-v1-0.6b",
     "nvidia/Nemotron-3-Embed-1B-BF16", "BidirLM/BidirLM-270M-Embedding", "telepix/PIXIE-Rune-v1.5"],
)  # fmt: skip
def test_models_of_2026_by_name(name: str) -> None:
    registered = mteb.get_model_meta(mteb_fair.register_model(name, strength=0.5))
    assert (registered.adapted_from, registered.revision) == (name, MODEL_REGISTRY[name].revision)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lightonai/LateOn", r"gives a text one vector for each token \(late interaction\)"),
        ("zeroentropy/zerank-2", "scores pairs of texts and gives no vectors"),
        ("naver/splade-code-06B", "gives sparse vectors"),
        ("openai/text-embedding-3-small", "weights of 'openai/text-embedding-3-small' are not public"),
    ],
)
def test_other_kinds_of_models(name: str, reason: str) -> None:
    for use in (FairEncoder, mteb_fair.register_model):
        with pytest.raises(ValueError, match=reason):
            use(name)


def test_every_template_of_the_registry_gives_a_prompt() -> None:
    metas = [meta for meta in MODEL_REGISTRY.values() if instructions_of(meta) is not None]
    assert len(metas) > 60
    for meta in metas:
        instructions = instructions_of(meta)
        assert instructions is not None
        for kind in PromptType:
            assert isinstance(instructions.prompt(TASKS["named"], kind), str), meta.name
