"""What a whole calibrated model should compute: its own logits, made into weights by the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fair_calibration import FairConfig
from fair_calibration.method.baskets import Baskets, build_baskets
from fair_calibration.method.reference import calibrated_attention


class OracleResult(NamedTuple):
    """The embeddings (B, D), and whether windows or causality hid some baskets, but not all, from calibrated rows."""

    embeddings: Tensor
    hides_baskets: bool


def oracle(
    model: SentenceTransformer, config: FairConfig, texts: Sequence[str], *, prompt: str | None = None
) -> OracleResult:
    """Encodes the texts as one batch with the model's own attention and the reference's weights.

    Args:
        model: A plain model, preferably with eager attention: there the softmax is the only thing replaced. It stays as
            it is.
        config: A resolved config.
        texts: The documents.
        prompt: Put before every text; left out of the baskets where pooling leaves it out.
    """
    features = model.preprocess(list(texts), prompt=prompt)
    includes_prompt = all(module.include_prompt for module in model if isinstance(module, Pooling))
    excluded = 0 if includes_prompt else int(features.get("prompt_length", 0))
    return oracle_forward(model, config, features, prompt_length=excluded)


def oracle_forward(
    model: SentenceTransformer, config: FairConfig, features: dict[str, Any], *, prompt_length: int = 0
) -> OracleResult:
    """Does what `oracle` does with features at hand."""
    baskets = build_baskets(features["attention_mask"], config, prompt_length=prompt_length)
    n_layers = model[0].model.config.num_hidden_layers
    with torch.inference_mode(), _OracleWeights(config.select_layers(n_layers), baskets, config) as weights:
        embeddings: Tensor = model.eval()(dict(features))["sentence_embedding"]
    assert weights.n_calls == n_layers
    return OracleResult(embeddings, weights.hides_baskets)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, relative to the largest value expected; NaN where there is one."""
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


class _OracleWeights(TorchFunctionMode):
    """Replaces the attention weights of the calibrated layers by the reference's.

    The logits are the model's own, whatever its masks, biases, scales and windows are: of what is tested only the
    geometry and the reference are used.
    """

    def __init__(self, layers: Sequence[int], baskets: Baskets, config: FairConfig) -> None:
        super().__init__()
        self.n_calls = 0
        self.hides_baskets = False
        self._layers, self._baskets, self._config = layers, baskets, config
        self._length = baskets.segment_of_key.shape[1]

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.softmax, Tensor.softmax, torch.nn.functional.softmax):
            if result.shape[-2:] == (self._length, self._length) and self._is_calibrated():
                return self._weights(args[0].reshape(len(self._baskets.valid), -1, *result.shape[-2:])).view_as(result)
        elif func is torch.nn.functional.scaled_dot_product_attention and self._is_calibrated():
            return self._attention(*args, **(kwargs or {}))
        return result

    def _is_calibrated(self) -> bool:
        self.n_calls += 1
        return self.n_calls - 1 in self._layers

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, is_causal: bool = False, **_: Any
    ) -> Tensor:
        assert not is_causal
        logits = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        logits = logits.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
        return self._weights(logits) @ value

    def _weights(self, logits: Tensor) -> Tensor:
        """Returns the weights (B, H, L, L) of the logits."""
        baskets = self._baskets
        real = baskets.segment_of_key < baskets.n_baskets + baskets.isolated.shape[1]
        visible = (logits > torch.finfo(logits.dtype).min / 2) & real[:, None, None]
        self.hides_baskets |= self._some_baskets_hidden(visible, real)
        nothing = logits.new_zeros(*logits.shape[:3], 1)
        weights = calibrated_attention(
            nothing,
            nothing,
            nothing,
            baskets,
            visible=visible,
            bias=logits.masked_fill(~visible, 0.0),
            config=self._config,
        ).weights
        return torch.where(real[:, None, :, None], weights, logits.softmax(-1))  # convolutions read padding

    def _some_baskets_hidden(self, visible: Tensor, real: Tensor) -> bool:
        baskets = self._baskets
        of_basket = baskets.segment_of_key[:, None] == torch.arange(baskets.n_baskets)[:, None]  # (B, N, K)
        seen = (visible[:, :, :, None] & of_basket[:, None, None]).any(-1)  # (B, H, L, N)
        missed = ~seen & of_basket.any(-1)[:, None, None]
        rows = real
        if self._config.pooling != "mean":
            rows = torch.zeros_like(real).scatter(1, baskets.pooled[:, None], True)
        return bool((seen.any(-1) & missed.any(-1) & rows[:, None]).any())
