"""Writes docs/models.md from the families of the tests: ``PYTHONPATH=. python docs/generate_models.py``, a minute."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from fair_calibration import calibrate
from tests.core.families import (
    CONFIG,
    FAMILIES,
    INTERFACE,
    REFUSED,
    TEXTS,
    Family,
    MatrixCase,
    load_plain,
    load_transformer,
)
from tests.core.model_oracle import oracle, relative_error

PAGE = Path(__file__).with_name("models.md")
VERSIONS = ("torch", "transformers", "sentence-transformers")
HEAD = """# Models that work

Whether a model can be calibrated depends on how it computes attention, not on its name. Most architectures of
transformers 5 use the `AttentionInterface` of transformers, and calibration takes its place there. Other models, also
those with remote code, compute attention themselves; then torch's `softmax` or `scaled_dot_product_attention` is
intercepted while documents are encoded, if that accounts for every layer. `print(model.summary())` says which of the
two is in use. A model that fits neither is refused with an error that says why.

## Tested

Each family is tested as a tiny model with random weights (3 layers, of which the last 2 are calibrated, hidden size
32), on documents of 5 to 40 words, with [baskets](glossary.md#basket) of 8 tokens and strength 0.5. For each pooling
and side of padding, the tests check that

- embeddings equal those that the model computes with the attention weights of `fair_calibration.method.reference`. The
  column "off by" has the largest difference, relative to the largest value of the embeddings, in float32 on a CPU;
- queries, and documents at strength 0, have the embeddings of the plain model, bit for bit, and other documents do not;
- a document's embedding depends neither on the batch nor on its order and padding (except for ConvBERT, whose
  convolutions read the padding in the plain model as well).

A family with another kind of attention (windows, bidirectional, ALiBi) has a separate row. Half precision, float64 and
autocast are tested with 9 of the cases, and calibration on top of `eager` attention with 9. With flash attention the
vectors are compared with those of `sdpa` for 6 models, on the CPU: see [GPUs and flash attention](gpu.md).
"""
REFUSED_HEAD = """
## Refused

For these models calibration would not be the published method, or could not reach every layer:
"""
KINDS = """
Refused with any transformer: sparse encoders, late-interaction models (ColBERT, `MultiVectorEncoder`,
PyLate), cross-encoders, static embeddings, bags of words, and CLIP's own module. With weighted-mean, max and
concatenated pooling you have to say which rows to calibrate, such as `FairConfig(pooling="mean")`.

## Recent models by name

With MTEB, `mteb_fair.FairEncoder` and `register_model` take the names of MTEB's registry, and use its revision, prompts
or instructions, and arguments for loading ([MTEB](mteb.md#what-is-calibrated)). The models are not tested, as
tests download nothing, but their architectures are, as above.

| name | architecture | prompts | tokens |
| --- | --- | --- | --- |
| `lightonai/DenseOn` | ModernBERT, cls | the model's own, `query: ` and `document: ` | 512, see below |
| `lightonai/mDenseOn` | ModernBERT (mmBERT) | the model's own | the model's own |
| `google/embeddinggemma-300m` | Gemma 3, bidirectional | the model's own, by task | 2048 |
| `microsoft/harrier-oss-v1-270m`, `-27b` | Gemma 3 | MTEB's instructions for queries | the model's own |
| `microsoft/harrier-oss-v1-0.6b` | Qwen3 | MTEB's instructions for queries | the model's own |
| `codefuse-ai/F2LLM-v2-*` | see their cards | MTEB's instructions for queries | 8192 |
| `lightonai/LateOn`, `lightonai/mLateOn` | ModernBERT | refused: a vector for each token | |

Models that MTEB does not list, such as the PolDense family (`OPI-PIB/...`), are loaded by their Hugging Face names with
the prompts and the length that they are saved with.

Some models are saved with a shorter limit than their architecture has. DenseOn's card (commit 41b4bba) states 512
tokens, and its backbone ModernBERT reads 8192. What is cut off cannot be found: `model.counts.truncated` counts such
documents, and `max_seq_length=8192` raises the limit. How well a model reads texts longer than those it was trained on
is another question.

In ModernBERT and Gemma 3 most layers see only a window of tokens: see
[Layers that see only a window](settings.md#layers-that-see-only-a-window).
"""


def describe(family: Family) -> list[str]:
    """Returns the columns of a family but for the measured one: all that the tests compare with the page."""
    reached = "interface" if family.mechanism == INTERFACE else family.mechanism.replace("interception of ", "")
    sees = [word for word, is_so in (("causal", family.causal), ("window", family.has_window)) if is_so]
    sides: dict[str, list[str]] = {}
    for pooling, side in family.cases:
        sides.setdefault(pooling, []).append(side)
    return [
        family.name + (f" ({family.known_as})" if family.known_as else ""),
        f"`{type(load_transformer(family.name, family.cases[0][1]).model).__name__}`",
        reached if reached == "interface" else f"`{reached}`",
        ", ".join(sees) or "all",
        "; ".join(f"{pooling} ({', '.join(found)})" for pooling, found in sides.items()),
    ]


def measure(family: Family) -> str:
    """Returns the largest deviation from the reference over a family's cases."""
    largest = 0.0
    for pooling, side in family.cases:
        case = MatrixCase(family.name, pooling, side)
        expected = oracle(load_plain(case, "eager" if family.eager else None), CONFIG.resolve(pooling), TEXTS)
        calibrated = calibrate(load_plain(case), CONFIG).encode(TEXTS, convert_to_tensor=True)
        largest = max(largest, relative_error(calibrated, expected.embeddings))
    return f"{largest:.1e}"


def page(deviation: Callable[[Family], str], versions: str) -> str:
    """Returns the page, given how to fill in what is measured and with which versions that was done."""
    rows = [[*describe(family), deviation(family)] for family in FAMILIES.values()]
    tested = _table(["family", "class", "reached by", "sees", "pooling (padding)", "off by"], rows)
    refused = _table(["family", "reason"], [[each.name, each.reason] for each in REFUSED])
    return f"{HEAD}\n{tested}\n\nMeasured with {versions}.\n{REFUSED_HEAD}\n{refused}\n{KINDS}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    PAGE.write_text(page(measure, ", ".join(f"{name} {version(name)}" for name in VERSIONS)), encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {len(FAMILIES)} families, {len(REFUSED)} refused\n")
