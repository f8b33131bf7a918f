"""Tiny random-weight models of several families, built from configs, and what their attention should have computed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertModel,
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomModel,
    DebertaV2Config,
    DebertaV2Model,
    Gemma2Config,
    Gemma2Model,
    GPTNeoConfig,
    GPTNeoModel,
    MPNetConfig,
    MPNetModel,
    MptConfig,
    MptModel,
    OpenAIGPTConfig,
    OpenAIGPTModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    RoFormerConfig,
    RoFormerModel,
    XGLMConfig,
    XGLMModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fair_calibration import FairConfig
from fair_calibration.method.baskets import Baskets, build_baskets
from fair_calibration.method.reference import calibrated_attention

SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
WORDS = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in ["", "l", "n", "s", "r"]]
MAX_LENGTH = 128
N_LAYERS = 4
_SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL_TOKENS) + len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LENGTH + 2,  # XLM-RoBERTa's positions start at 2
    "initializer_range": 0.25,  # sharp attention, so that calibrating it is seen
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}


GPT_NEO_WINDOW = 12
_INTERCEPTED = {"mpnet", "deberta_v2", "roformer", "bloom", "mpt", "openai_gpt", "gpt_neo", "xglm"}
_CAUSAL = {"qwen3", "qwen3_sliding", "gemma2", "bloom", "mpt", "openai_gpt", "gpt_neo", "xglm"}


def document(n_words: int, seed: int = 0) -> str:
    """Returns a made-up document of ``n_words`` words, one token each."""
    return " ".join(random.Random(1000 * seed + n_words).choices(WORDS, k=n_words))


def documents(lengths: Sequence[int], seed: int = 0) -> list[str]:
    """Returns one made-up document per length."""
    return [document(n, seed + i) for i, n in enumerate(lengths)]


def make_tokenizer(*, bos: bool, padding_side: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of one token per word, with EOS, and BOS if asked for."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    start = "<s> " if bos else ""
    tokenizer.post_processor = TemplateProcessing(
        single=f"{start}$A </s>", pair=f"{start}$A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        padding_side=padding_side,
        model_max_length=MAX_LENGTH,
    )


def make_model(family: str) -> PreTrainedModel:
    """Returns a random model of a family, always the same one."""
    causal = {"num_key_value_heads": 2, "head_dim": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        if family == "bert":
            return BertModel(BertConfig(**_SIZES))
        if family == "xlm_roberta":
            return XLMRobertaModel(XLMRobertaConfig(**_SIZES))
        if family == "qwen3":
            return Qwen3Model(Qwen3Config(**_SIZES, **causal))
        if family == "qwen3_sliding":
            sliding = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
            return Qwen3Model(Qwen3Config(**_SIZES, **causal, **sliding))
        if family == "gemma2":
            return Gemma2Model(Gemma2Config(**_SIZES, **causal, query_pre_attn_scalar=8))
        if family == "albert":
            return AlbertModel(AlbertConfig(**_SIZES, embedding_size=16, num_hidden_groups=1))
        if family in _INTERCEPTED:
            return _make_intercepted(family)
    raise ValueError(family)


def _make_intercepted(family: str) -> PreTrainedModel:
    if family == "mpnet":
        return MPNetModel(MPNetConfig(**_SIZES))
    if family == "deberta_v2":
        relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16}
        return DebertaV2Model(DebertaV2Config(**_SIZES, **relative))
    if family == "roformer":
        return RoFormerModel(RoFormerConfig(**_SIZES))
    if family == "bloom":
        return BloomModel(BloomConfig(**_SIZES))
    sizes = {"vocab_size": _SIZES["vocab_size"]}
    if family == "mpt":
        small = {"d_model": 32, "n_heads": 4, "n_layers": N_LAYERS, "max_seq_len": MAX_LENGTH}
        return MptModel(MptConfig(**sizes, **small, initializer_range=0.25))
    if family == "openai_gpt":
        small = {"n_embd": 32, "n_head": 4, "n_layer": N_LAYERS, "n_positions": MAX_LENGTH + 2}
        return OpenAIGPTModel(OpenAIGPTConfig(**sizes, **small, initializer_range=0.25))
    if family == "gpt_neo":
        small = {"hidden_size": 32, "num_heads": 4, "num_layers": N_LAYERS, "max_position_embeddings": MAX_LENGTH + 2}
        layers = {"attention_types": [[["global", "local"], N_LAYERS // 2]], "window_size": GPT_NEO_WINDOW}
        return GPTNeoModel(GPTNeoConfig(**sizes, **small, **layers, initializer_range=0.25))
    assert family == "xglm"
    small = {"d_model": 32, "attention_heads": 4, "ffn_dim": 48, "num_layers": N_LAYERS}
    return XGLMModel(XGLMConfig(**sizes, **small, max_position_embeddings=MAX_LENGTH + 2, init_std=0.25))


def save_tiny_model(path: Path, family: str, pooling: str) -> None:
    """Writes a tiny SentenceTransformer to a folder."""
    inner = path / "inner"
    causal = family in _CAUSAL
    make_model(family).save_pretrained(inner)
    make_tokenizer(bos=not causal, padding_side="left" if causal else "right").save_pretrained(inner)
    transformer = Transformer(str(inner))
    model = SentenceTransformer(
        modules=[transformer, Pooling(_SIZES["hidden_size"], pooling_mode=pooling)],  # type: ignore[arg-type]
        device="cpu",
        prompts={"query": "bal ", "document": "dan gos ", "other": "kir "},
    )
    model.save(str(path))


# The same model with reference attention


@dataclass
class ReferencePass:
    """What the reference attention needs to know of one forward pass."""

    layers: tuple[int, ...]
    baskets: Baskets
    config: FairConfig
    n_calls: int = 0


_current: list[ReferencePass] = []


def _reference_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    (this,) = _current
    layer, this.n_calls = this.n_calls, this.n_calls + 1
    if layer not in this.layers:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)
    n_segments = this.baskets.n_baskets + this.baskets.isolated.shape[1]
    visible = (this.baskets.segment_of_key < n_segments)[:, None, None]
    if attention_mask is not None:
        assert attention_mask.dtype == torch.bool
        visible = visible & attention_mask
    is_causal = kwargs.get("is_causal")
    if attention_mask is None and (module.is_causal if is_causal is None else is_causal):
        visible = visible & torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    output = calibrated_attention(
        query, key, value, this.baskets, visible=visible, scale=kwargs.get("scaling"), config=this.config
    ).output
    return output.transpose(1, 2).to(query.dtype), None


@contextmanager
def _reference_pass(this: ReferencePass) -> Iterator[None]:
    _current.append(this)
    try:
        yield
    finally:
        _current.pop()


def reference_embeddings(
    model: SentenceTransformer,
    texts: Sequence[str],
    config: FairConfig,
    *,
    prompt: str | None = None,
    gradients: bool = False,
) -> Tensor:
    """Encodes the texts as one batch with the reference attention in the calibrated layers. Changes ``model``.

    Args:
        model: A plain model, used up by this.
        texts: The documents.
        config: A resolved config.
        prompt: Put before every text; left out of the baskets where pooling leaves it out.
        gradients: Whether the result can be differentiated.
    """
    if "test_reference" not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register("test_reference", _reference_forward)
        AttentionMaskInterface.register("test_reference", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    transformer = model[0].model
    transformer.set_attn_implementation("test_reference")
    n_layers = transformer.config.num_hidden_layers
    features = model.preprocess(list(texts), prompt=prompt)
    excluded = 0 if model[1].include_prompt else int(features.get("prompt_length", 0))
    baskets = build_baskets(features["attention_mask"], config, prompt_length=excluded)
    this = ReferencePass(config.select_layers(n_layers), baskets, config)
    with torch.inference_mode(not gradients), _reference_pass(this):
        embeddings: Tensor = model.eval()(features)["sentence_embedding"]
    assert this.n_calls == n_layers
    return embeddings
