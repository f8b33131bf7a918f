"""Every model family that people embed texts with, as tiny random models: the matrix of tests and docs/models.md."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoConfig, AutoModel

from fair_calibration import FairConfig
from tests.core.tiny_models import MAX_LENGTH, SPECIAL_TOKENS, WORDS, documents, make_tokenizer

N_LAYERS = 3
CONFIG = FairConfig(basket_size=8, strength=0.5, layers=2)
"""What the matrix is run with. One layer stays plain; where layers differ, one with a window and one without do not."""
TEXTS = documents([40, 5, 27])
"""One of them is too short to be calibrated."""
WINDOW = 12
"""Tokens that a layer with a window sees: less than two baskets."""
INTERFACE = "transformers AttentionInterface, on top of sdpa"
SOFTMAX = "interception of softmax"
IS_NEW = Version(transformers.__version__) >= Version("5.25")
"""Whether families are reached as `Family.mechanism` says: Falcon and GPT-J used to compute attention themselves."""
MODES = {"cls": "cls", "last": "lasttoken", "mean": "mean"}
_SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL_TOKENS) + len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LENGTH + 2,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {"num_key_value_heads": 2}
_LOCAL = {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
_GEMMA3 = {**_GROUPED, **_LOCAL, "head_dim": 8, "query_pre_attn_scalar": 8}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": N_LAYERS, "num_heads": 4}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_BOTH = (("cls", "right"), ("mean", "right"))
_EVERY = (("last", "left"), ("last", "right"), ("mean", "left"), ("mean", "right"))
_RIGHT = (("last", "right"), ("mean", "right"))  # of models whose positions count the padding


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: What it is called.
        model_type: transformers' name for it.
        settings: Of its config, beside the sizes.
        cases: The poolings natural for it, each with a side of padding.
        mechanism: How its attention is reached with transformers 5.25 and later.
        causal: Whether a token sees only those before it.
        has_window: Whether some of its layers see a window.
        bos: Whether its texts start with a BOS or CLS token.
        eager: Whether its eager attention computes the same as its own choice.
        reads_padding: Whether the plain embedding of a text depends on what it is padded to.
        known_as: Embedding models of this family.
    """

    name: str
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    cases: tuple[tuple[str, str], ...] = _BOTH
    mechanism: str = INTERFACE
    causal: bool = False
    has_window: bool = False
    bos: bool = True
    eager: bool = True
    reads_padding: bool = False
    known_as: str = ""


def _decoder(name: str, model_type: str, settings: Mapping[str, Any] | None = None, **kwargs: Any) -> Family:
    kwargs = {"cases": (("last", "left"), ("mean", "right")), "bos": False, "causal": True, **kwargs}
    return Family(name, model_type, {} if settings is None else settings, **kwargs)


_FAMILIES = [
    Family("BERT", "bert", known_as="all-MiniLM, bge-base-en, e5-base, LaBSE"),
    Family("RoBERTa", "roberta", known_as="all-distilroberta-v1"),
    Family("XLM-RoBERTa", "xlm-roberta", known_as="bge-m3, multilingual-e5, arctic-embed-l-v2.0"),
    Family("CamemBERT", "camembert", known_as="sentence-camembert"),
    Family("DistilBERT", "distilbert", known_as="msmarco-distilbert, distiluse"),
    Family("ELECTRA", "electra", {"embedding_size": 16}),
    Family("ALBERT", "albert", {"embedding_size": 16, "num_hidden_groups": 1}, known_as="paraphrase-albert"),
    Family("ERNIE", "ernie"),
    Family("GTE", "gte", known_as="gte-multilingual-base"),
    Family(
        "ModernBERT",
        "modernbert",
        {"local_attention": WINDOW, "layer_types": _LOCAL["layer_types"]},
        has_window=True,
        known_as="gte-modernbert-base, modernbert-embed-base",
    ),
    Family(
        "UltraBERT",
        "ultrabert",
        {"sliding_window": WINDOW // 2, "layer_types": _LOCAL["layer_types"]},
        has_window=True,
        known_as="UltraBERT-Embed-150M",
    ),
    Family("EuroBERT", "eurobert", _GROUPED),
    Family("NomicBERT", "nomic_bert", known_as="nomic-embed-text-v1.5"),
    Family("Jina v3", "jina_embeddings_v3", known_as="jina-embeddings-v3-hf"),
    Family("MPNet", "mpnet", mechanism=SOFTMAX, known_as="all-mpnet-base-v2"),
    Family("DeBERTa", "deberta", _DEBERTA, mechanism=SOFTMAX),
    Family("DeBERTa-v2", "deberta-v2", {**_DEBERTA, "position_buckets": 16, "share_att_key": True}, mechanism=SOFTMAX),
    Family("RoFormer", "roformer", {"embedding_size": 32}, mechanism=SOFTMAX),
    Family("RemBERT", "rembert", {"input_embedding_size": 16}, mechanism=SOFTMAX),
    Family("X-MOD", "xmod", {"default_language": "en_XX"}),
    Family(
        "LUKE",
        "luke",
        {"entity_vocab_size": 10, "entity_emb_size": 16},
        mechanism=SOFTMAX,
        known_as="sentence-luke-japanese",
    ),
    Family("XLM", "xlm", mechanism=SOFTMAX),
    Family("ConvBERT", "convbert", {"embedding_size": 16}, mechanism=SOFTMAX, reads_padding=True),  # convolutions
    _decoder(
        "XLNet",
        "xlnet",
        {"max_position_embeddings": None, "d_model": 32, "n_layer": N_LAYERS, "n_head": 4, "d_inner": 48},
        mechanism=SOFTMAX,
        causal=False,
        bos=True,
        cases=(("last", "left"), ("mean", "left")),
    ),
    Family("BigBird, full attention", "big_bird", {"attention_type": "original_full"}, mechanism=SOFTMAX),
    Family("T5 encoder", "t5", _T5, (("mean", "right"),), bos=False, known_as="sentence-t5, gtr-t5, instructor"),
    Family("mT5 encoder", "mt5", _T5, (("mean", "right"),), bos=False),
    Family("UMT5 encoder", "umt5", _T5, (("mean", "right"),), bos=False),
    _decoder("Qwen2", "qwen2", _GROUPED, cases=_EVERY),
    _decoder("Qwen2, sliding window", "qwen2", {**_GROUPED, **_LOCAL, "use_sliding_window": True}, has_window=True),
    _decoder(
        "Qwen2, bidirectional", "qwen2", {**_GROUPED, "is_causal": False}, causal=False, cases=(("mean", "left"),)
    ),
    _decoder("Qwen3", "qwen3", {**_GROUPED, "head_dim": 8}, cases=_EVERY, known_as="Qwen3-Embedding"),
    _decoder(
        "Qwen3 MoE",
        "qwen3_moe",
        {**_GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    _decoder("Llama", "llama", _GROUPED, bos=True, cases=_EVERY, known_as="RepLLaMA"),
    _decoder(
        "Llama, bidirectional",
        "llama",
        {**_GROUPED, "is_causal": False},
        causal=False,
        bos=True,
        cases=(("mean", "right"),),
        known_as="LLM2Vec",
    ),
    _decoder(
        "Mistral",
        "mistral",
        {**_GROUPED, "sliding_window": WINDOW},
        bos=True,
        cases=_EVERY,
        has_window=True,
        known_as="e5-mistral-7b-instruct, SFR-Embedding-Mistral",
    ),
    _decoder("Gemma", "gemma", {**_GROUPED, "head_dim": 8}, bos=True),
    _decoder("Gemma 3", "gemma3_text", _GEMMA3, bos=True, has_window=True),
    _decoder(
        "Gemma 3, bidirectional",
        "gemma3_text",
        {**_GEMMA3, "sliding_window": 2 * WINDOW, "use_bidirectional_attention": True},
        causal=False,
        bos=True,
        cases=(("mean", "right"), ("mean", "left")),
        has_window=True,
        known_as="embeddinggemma-300m",
    ),
    _decoder("Granite", "granite", {**_GROUPED, "attention_multiplier": 0.3}),
    _decoder("BLOOM", "bloom", {"n_head": 4}, mechanism=SOFTMAX, cases=_EVERY, known_as="SGPT-7B1"),
    _decoder("MPT", "mpt", {"d_model": 32, "n_heads": 4, "n_layers": N_LAYERS}, mechanism=SOFTMAX),
    _decoder("Falcon, ALiBi", "falcon", {"alibi": True, "multi_query": True}, eager=IS_NEW),  # which added biases twice
    _decoder("Falcon, rotary", "falcon", {"alibi": False, "multi_query": True}),
    _decoder("GPT-NeoX", "gpt_neox"),
    _decoder(
        "GPT-Neo",
        "gpt_neo",
        {"num_layers": N_LAYERS, "attention_types": [[["global", "local", "global"], 1]], "window_size": WINDOW},
        cases=_RIGHT,
        mechanism=SOFTMAX,
        has_window=True,
        known_as="SGPT-125M",
    ),
    _decoder("GPT-J", "gptj", {"rotary_dim": 4}, known_as="SGPT-5.8B"),
    _decoder("GPT-2", "gpt2", cases=_RIGHT),
    _decoder("OPT", "opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, bos=True),
    _decoder("OLMo 2", "olmo2", _GROUPED),
    _decoder("OLMo 3", "olmo3", {**_GROUPED, **_LOCAL}, has_window=True),
    _decoder("SmolLM3", "smollm3", {**_GROUPED, "no_rope_layer_interval": 2}),
    _decoder("Phi-3", "phi3", {**_GROUPED, "sliding_window": WINDOW}, has_window=True),
    _decoder("Cohere 2", "cohere2", {**_GROUPED, **_LOCAL}, bos=True, has_window=True),
    _decoder(
        "ModernBERT decoder",
        "modernbert-decoder",
        {"local_attention": 2 * WINDOW, "layer_types": _LOCAL["layer_types"]},
        bos=True,
        has_window=True,
    ),
]
FAMILIES = {family.name: family for family in _FAMILIES}


class MatrixCase(NamedTuple):
    """One family, one of its poolings ("cls", "last" or "mean"), one side of padding."""

    name: str
    pooling: str
    side: str

    def __str__(self) -> str:
        return f"{self.name}-{self.pooling}-{self.side}"

    @property
    def family(self) -> Family:
        """The family by its name."""
        return FAMILIES[self.name]


class Refused(NamedTuple):
    """A family that cannot be calibrated: settings as of `Family`, what is the matter, and a part of the error."""

    name: str
    model_type: str
    settings: Mapping[str, Any]
    reason: str
    error: str


_HYBRID = "only some of its layers are attention"
_BLOCKS = "computes attention in blocks or windows, by a method of its own"
REFUSED = [
    Refused("Gemma 2", "gemma2", _GEMMA3, "soft-caps its logits", r"Gemma2Attention passes \['softcap'\]"),
    Refused(
        "GPT-OSS",
        "gpt_oss",
        {**_GROUPED, "head_dim": 8, "num_local_experts": 4},
        "has attention sinks",
        r"GptOssAttention passes \['s_aux'\]",
    ),
    Refused(
        "DiffLlama",
        "diffllama",
        _GROUPED,
        "subtracts one softmax from another",
        "DiffLlamaAttention makes several calls of softmax",
    ),
    Refused(
        "BART",
        "bart",
        {
            **{f"{part}_layers": N_LAYERS for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
            "d_model": 32,
        },
        "consists of an encoder and a decoder",
        "BartModel has 3 layers, .* it made 9 attention calls",
    ),
    Refused(
        "BigBird, block-sparse",
        "big_bird",
        {"attention_type": "block_sparse"},
        "uses another attention for short texts, and keeps it after the first one",
        "BigBirdModel replaces its own attention modules, depending on the length of its input",
    ),
    Refused(
        "Longformer", "longformer", {"attention_window": 8}, _BLOCKS, "LongformerModel has 3 layers, .* made 0 att"
    ),
    Refused("LongT5", "longt5", _T5, _BLOCKS, "LongT5EncoderModel has 3 layers, .* made 0 attention calls"),
    Refused(
        "CANINE", "canine", {}, "reads characters, which it pools to shorter sequences", "CanineModel has 3 layers"
    ),
    Refused(
        "FNet", "fnet", {}, "has no attention", "FNetModel has 3 layers, .* 0 attention calls .* 0 calls of softmax"
    ),
    Refused(
        "Mamba", "mamba", {}, "has no attention", "MambaModel has 3 layers, .* 0 attention calls .* 0 calls of softmax"
    ),
    Refused(
        "LFM2",
        "lfm2",
        {**_GROUPED, "layer_types": ["conv", "full_attention", "conv"]},
        _HYBRID,
        "Lfm2Model has 3 layers, .* it made 1 attention calls",
    ),
    Refused(
        "Jamba",
        "jamba",
        {**_GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "use_mamba_kernels": False},
        _HYBRID,
        "JambaModel has 3 layers, .* it made 1 attention calls",
    ),
]

CASES = [MatrixCase(family.name, *case) for family in _FAMILIES for case in family.cases]


@cache
def load_transformer(name: str, side: str, implementation: str | None = None) -> Transformer:
    """Returns the tiny transformer of a family, always with the same weights. Shared: leave it as it is.

    Args:
        name: The family's.
        side: Of padding.
        implementation: Of attention; None is the one that the family has by itself.
    """
    family = FAMILIES[name]
    first_side = family.cases[0][1]
    is_settable = family.mechanism == INTERFACE
    if (side, implementation) == (first_side, None) or (implementation and not is_settable):
        return make_transformer(
            family.model_type, family.settings, side=side, bos=family.bos, implementation=implementation
        )
    transformer = copy.deepcopy(load_transformer(name, first_side))  # faster than loading
    transformer.tokenizer.padding_side = side
    if implementation is not None:
        transformer.model.set_attn_implementation(implementation)
    return transformer


def make_transformer(
    model_type: str,
    settings: Mapping[str, Any],
    *,
    side: str = "right",
    bos: bool = True,
    implementation: str | None = None,
) -> Transformer:
    """Makes a tiny random transformer as sentence-transformers loads it. Settings of None are left out."""
    config = AutoConfig.for_model(model_type, **{k: v for k, v in {**_SIZES, **settings}.items() if v is not None})
    tokenizer = make_tokenizer(bos=bos, padding_side=side)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), TemporaryDirectory() as folder:
        torch.manual_seed(7)
        model = AutoModel.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)  # sharp attention, so that calibrating it is seen
            elif not parameter.any():
                parameter.normal_(0, 0.1)  # a bias
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        transformer = Transformer(
            folder, model_kwargs={} if implementation is None else {"attn_implementation": implementation}
        )
    transformer.processor = tokenizer  # some families would have it read as another class
    return transformer


@cache
def load_plain(case: MatrixCase, implementation: str | None = None) -> SentenceTransformer:
    """Returns the plain model of a case. Shared: leave it as it is."""
    return with_pooling(load_transformer(case.name, case.side, implementation), case.pooling)


def load_refused(name: str, pooling: str) -> tuple[SentenceTransformer, str]:
    """Returns a plain model that attention calibration refuses, and the pattern of the error."""
    refused = next(each for each in REFUSED if each.name == name)
    return with_pooling(make_transformer(refused.model_type, refused.settings), pooling), refused.error


def with_pooling(transformer: Transformer, pooling: str) -> SentenceTransformer:
    """Returns the transformer as a model that pools by "cls", "last" or "mean"."""
    return SentenceTransformer(
        modules=[transformer, Pooling(32, pooling_mode=MODES[pooling])],  # type: ignore[arg-type]
        device="cpu",
        prompts={"query": "bal ", "document": "dan gos "},
    )
