"""Properties of whole models and of the fast paths, over random settings, lengths and masks.

Those of single calls and of the settings alone are in test_fast_paths.py, test_baskets.py and test_config.py.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fair_calibration import DocumentCounts, FairConfig, calibrate
from tests.core.cases import MASKS, make_case, masked_variants
from tests.core.families import MODES, MatrixCase, load_plain
from tests.core.model_oracle import oracle, oracle_forward, relative_error
from tests.core.test_families import TOLERANCE, encode
from tests.core.tiny_models import documents

# The fused mechanism and the two kinds of interception; causal, with a window, and neither; padded on either side.
MODELS = [
    MatrixCase("BERT", "cls", "right"),
    MatrixCase("BERT", "mean", "right"),
    MatrixCase("Mistral", "last", "left"),
    MatrixCase("Mistral", "mean", "left"),
    MatrixCase("MPNet", "mean", "right"),
    MatrixCase("Falcon, rotary", "last", "left"),
    MatrixCase("Falcon, rotary", "mean", "right"),
]


@st.composite
def configs(draw: st.DrawFn) -> FairConfig:
    """Draws settings for models of three layers and texts of up to 60 tokens."""
    isolate = draw(st.sampled_from(["auto", "none", "bos", "bos_eos"]))
    return FairConfig(
        strength=draw(st.floats(0.05, 1)),
        basket_size=draw(st.integers(1, 20)),
        layers=draw(
            st.sampled_from(["all", 0.5, 1, 3]) | st.lists(st.integers(-3, 2), min_size=1, max_size=3).map(tuple)  # type: ignore[arg-type]
        ),
        pooling=draw(st.sampled_from(["auto", "auto", "cls", "last", "mean"])),  # type: ignore[arg-type]
        isolate=isolate,  # type: ignore[arg-type]
        isolated_share=draw(st.sampled_from(["preserve", "equal"]) | st.floats(0, 0.4)),  # type: ignore[arg-type]
        last_basket=draw(st.sampled_from(["equal", "proportional", "halves"])),  # type: ignore[arg-type]
        min_content=draw(st.none() | st.integers(1, 30)),
    )


@settings(max_examples=25)
@given(
    case=st.sampled_from(MODELS),
    config=configs(),
    lengths=st.lists(st.integers(0, 55), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_models_equal_the_reference(case: MatrixCase, config: FairConfig, lengths: list[int], seed: int) -> None:
    texts = documents(lengths, seed)
    fair = calibrate(load_plain(case), config)
    calibrated = encode(fair, texts)
    resolved = config.resolve(case.pooling)
    expected = oracle(load_plain(case, "eager"), resolved, texts)
    assert relative_error(calibrated, expected.embeddings) < TOLERANCE

    # Specials and words are content but for those isolated; a text without words has no more than its specials.
    specials = 2 if case.family.bos else 1
    isolated = {"none": 0, "bos": 1, "bos_eos": 2}[resolved.isolate]
    n_calibrated = sum(n + specials - min(isolated, n + specials) >= resolved.min_content_tokens for n in lengths)
    assert fair.counts == DocumentCounts(n_calibrated, len(texts) - n_calibrated)

    # Any order and any batches give the same.
    order = random.Random(seed).sample(range(len(texts)), len(texts))
    shuffled = encode(fair, [texts[i] for i in order], batch_size=1 + seed % 3)
    assert relative_error(shuffled, calibrated[order]) < TOLERANCE
    again = calibrate(fair, FairConfig.from_json(config.to_json()))
    assert torch.equal(encode(again, texts), calibrated)


@settings(max_examples=40)
@given(
    case=st.sampled_from([case for case in MODELS if case.name != "Mistral"]),
    config=configs(),
    masks=st.integers(2, 40).flatmap(
        lambda n: st.lists(st.lists(st.sampled_from([0, 1, 1]), min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    seed=st.integers(0, 99),
)
def test_masks_with_holes(case: MatrixCase, config: FairConfig, masks: list[list[int]], seed: int) -> None:
    # No tokenizer makes such masks, but whoever calls the model with features of their own may.
    for mask in masks:
        mask[seed % len(mask)] = 1  # plain models have nothing to pool in an empty one
    attention_mask = torch.tensor(masks)
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(5, 300, attention_mask.shape, generator=generator)
    features = {"input_ids": input_ids, "attention_mask": attention_mask, "modality": "text"}
    fair = calibrate(load_plain(case), config)
    expected = oracle_forward(load_plain(case, "eager"), config.resolve(case.pooling), features)
    with torch.inference_mode():
        calibrated = fair(dict(features))["sentence_embedding"]
    assert relative_error(calibrated, expected.embeddings) < TOLERANCE


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    mask=st.sampled_from(MASKS),
    pooling=st.sampled_from(list(MODES)),
    isolate=st.sampled_from(["none", "bos", "bos_eos"]),
    isolated_share=st.sampled_from(["preserve", "equal", 0.2]),
    last_basket=st.sampled_from(["equal", "proportional", "halves"]),
    strength=st.floats(0, 1),
    size=st.sampled_from([1e-3, 1.0, 1e2, 1e4]),
    seed=st.integers(0, 99),
)
def test_outputs_are_averages_of_what_is_seen(
    lengths: list[int], mask: str, pooling: str, size: float, seed: int, **settings: Any
) -> None:
    case = make_case(lengths, pooling=pooling, seed=seed, side="left" if seed % 2 else "right", **settings)
    case = masked_variants(replace(case, query=case.query * size))[mask].to(torch.float32)
    _, visible = case.full_bias_and_visible()
    visible = visible & case.attention_mask.bool()[:, None, None]
    rows = case.rows() & visible.any(-1).all(1)
    hidden = ~visible[..., None]  # (B, H, L, K, 1)
    values = case.value[:, :, None].expand(-1, -1, visible.shape[2], -1, -1)
    lowest = values.masked_fill(hidden, torch.inf).amin(3).transpose(1, 2)
    highest = values.masked_fill(hidden, -torch.inf).amax(3).transpose(1, 2)
    for output in (case.fast(), case.fast_on_accelerator()):
        assert output.isfinite().all()
        # Weights that sum to 1 but for a few roundings, of logits that are off by as many of their own size.
        assert (output >= lowest - 1e-5)[rows].all()
        assert (output <= highest + 1e-5)[rows].all()
