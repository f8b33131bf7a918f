"""A model that computes attention itself, in many ways, as remote code does: to be reached, or refused."""

from __future__ import annotations

import copy
import math
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from tests.core.tiny_models import SPECIAL_TOKENS, WORDS, make_tokenizer

N_LAYERS, N_HEADS, N_KV, DIM = 3, 4, 2, 8


class OwnConfig(PreTrainedConfig):
    model_type = "own_attention"

    def __init__(
        self,
        attention: str = "torch.softmax",
        mask_value: float = -1e4,
        causal: bool = False,
        n_experts: int = 0,
        num_hidden_layers: int | None = N_LAYERS,
        **kwargs: Any,
    ) -> None:
        self.attention = attention
        self.mask_value = mask_value
        self.causal = causal
        self.n_experts = n_experts
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**kwargs)


class Gate(nn.Module):
    """A softmax over the tokens that is no attention."""

    def forward(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


class OwnAttention(nn.Module):
    def __init__(self, config: OwnConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.query, self.output = (nn.Linear(N_HEADS * DIM, N_HEADS * DIM) for _ in range(2))
        self.key, self.value = (nn.Linear(N_HEADS * DIM, N_KV * DIM) for _ in range(2))
        self.softmax = nn.Softmax(dim=-1)
        self.gate = Gate()
        self.dropout = nn.Dropout(0.1)
        self.mha = nn.MultiheadAttention(N_HEADS * DIM, N_HEADS, batch_first=True)

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        kind = self.config.attention
        if kind == "multihead attention":
            attended, _ = self.mha(hidden, hidden, hidden, key_padding_mask=~seen[:, 0, -1], need_weights=False)
            return attended
        query, key, value = (
            project(hidden).unflatten(-1, (-1, DIM)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        if kind != "sdpa grouped":
            key, value = (x.repeat_interleave(N_HEADS // N_KV, dim=1) for x in (key, value))
        if kind.startswith("sdpa"):
            attended = self.attend(query, key, value, seen)
        else:
            attended = self.weights(query, key, seen).to(value.dtype) @ value
            if kind == "summaries":
                attended = attended + (query[:, :, :1] @ key.mT).softmax(-1) @ value
        return self.output(attended.transpose(1, 2).flatten(2))

    def additive(self, seen: Tensor, value: float) -> Tensor:
        return torch.zeros(seen.shape).masked_fill(~seen, value)

    def weights(self, query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
        unmasked = query @ key.mT / math.sqrt(DIM)
        logits = unmasked + self.additive(seen, self.config.mask_value)
        match self.config.attention:
            # Reached
            case "torch.softmax" | "summaries":
                return torch.softmax(logits, dim=-1)
            case "keywords":
                return torch.softmax(input=logits, dim=3)
            case "functional":
                return functional.softmax(logits, -1, dtype=torch.float32)
            case "method":
                return logits.softmax(-1)
            case "special":
                return torch.special.softmax(logits, -1)
            case "module":
                return self.softmax(logits)
            case "dropped":
                return self.dropout(logits.softmax(-1, torch.float32))
            case "five dimensions":
                return logits.unflatten(1, (N_KV, -1)).softmax(-1).flatten(1, 2)
            case "three dimensions":
                return functional.softmax(logits.flatten(0, 1), dim=-1).unflatten(0, (-1, N_HEADS))
            # Out of reach
            case "heads first":
                return logits.transpose(0, 1).flatten(0, 1).softmax(-1).unflatten(0, (N_HEADS, -1)).transpose(0, 1)
            case "keys first":
                return logits.mT.softmax(-2).mT
            case "twice":
                return logits.softmax(-1) - 0.1 * (2 * logits).softmax(-1)
            case "gated":
                return self.gate(2 * logits) * logits.softmax(-1)
            case "out":
                return torch.softmax(logits, -1, out=torch.empty_like(logits))
            case "exponentials":
                return logits.log_softmax(-1).exp()
            case "partly":
                return logits.log_softmax(-1).exp() if self.layer == 1 else logits.softmax(-1)
            case "masked afterwards":
                weights = unmasked.softmax(-1) * seen
                return weights / weights.sum(-1, keepdim=True)
            case "unmasked":
                return unmasked.softmax(-1)
        raise ValueError(self.config.attention)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        sdpa = functional.scaled_dot_product_attention
        match self.config.attention:
            # Reached
            case "sdpa":
                return sdpa(query, key, value, seen)
            case "sdpa grouped":
                return sdpa(query, key, value, seen, enable_gqa=True)
            case "sdpa three dimensions":
                mask = seen.expand(-1, N_HEADS, -1, -1).flatten(0, 1)
                query, key, value = (x.flatten(0, 1) for x in (query, key, value))
                return sdpa(query, key, value, mask).unflatten(0, (-1, N_HEADS))
            case "sdpa scaled":
                mask = self.additive(seen, torch.finfo(query.dtype).min)
                return sdpa(query=query, key=key, value=value, attn_mask=mask, dropout_p=0.0, scale=0.2)
            # Reached with some masks
            case "sdpa additive":
                return sdpa(query, key, value, self.additive(seen, self.config.mask_value))
            # Out of reach
            case "sdpa unmasked":
                return sdpa(query, key, value)
        raise ValueError(self.config.attention)


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        size = N_HEADS * DIM
        self.embed = nn.Embedding(len(SPECIAL_TOKENS) + len(WORDS), size)
        self.position = nn.Embedding(256, size)
        self.layers = nn.ModuleList(OwnAttention(config, i) for i in range(N_LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(N_LAYERS))
        self.router = nn.Linear(size, config.n_experts) if config.n_experts else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.4)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> BaseModelOutput:
        length = input_ids.shape[1]
        seen = attention_mask.bool()[:, None, None, :].expand(-1, 1, length, -1)
        if self.config.causal:
            seen = seen & torch.ones(length, length, dtype=torch.bool).tril()
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        hidden = self.embed(input_ids) + self.position(positions)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            hidden = norm(hidden + layer(hidden, seen))
            if self.router is not None:
                hidden = hidden * (1 + self.router(hidden).softmax(-1).amax(-1, keepdim=True))
        return BaseModelOutput(last_hidden_state=hidden)


AutoConfig.register("own_attention", OwnConfig)
AutoModel.register(OwnConfig, OwnModel)


@cache
def _load_transformer() -> Transformer:
    with TemporaryDirectory() as folder:
        OwnModel(OwnConfig()).save_pretrained(folder)
        make_tokenizer(bos=True, padding_side="right").save_pretrained(folder)
        return Transformer(folder)


def load_own_model(
    attention: str, pooling: str = "mean", *, side: str = "right", **settings: Any
) -> SentenceTransformer:
    """Returns a SentenceTransformer whose attention is computed in one of the ways of `OwnAttention`."""
    transformer = copy.deepcopy(_load_transformer())  # faster than loading
    transformer.tokenizer.padding_side = side
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        transformer.model = OwnModel(OwnConfig(attention=attention, **settings))
    pooled = Pooling(N_HEADS * DIM, pooling_mode=pooling)
    return SentenceTransformer(modules=[transformer, pooled], device="cpu")  # type: ignore[arg-type]
