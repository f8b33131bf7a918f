"""`FairConfig`: the settings of attention calibration, as one frozen, validated and hashable value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args

from fair_calibration.json_settings import JsonSettings
from fair_calibration.validation import validate_choice, validate_positive_int, validate_strength

Pooling = Literal["auto", "cls", "last", "mean"]
Isolate = Literal["auto", "none", "bos", "bos_eos"]
LastBasket = Literal["equal", "proportional", "halves"]
Attention = Literal["any", "global"]


@dataclass(frozen=True, kw_only=True)
class FairConfig(JsonSettings):
    """The settings of attention calibration (Schuhmacher et al. 2026, arXiv 2601.16934; Michail et al., 2606.02737).

    The content of a document is cut into consecutive baskets of tokens. In the calibrated layers every basket gets the
    same total attention from the pooled token, and the tokens of a basket share it in their original proportions. The
    defaults are the published ones (arXiv 2606.02737): baskets of 128 tokens, strength 0.5, the last half of layers.

    Attributes:
        strength: A number in [0, 1]. The attention row used is ``(1 - strength) * plain + strength * calibrated``: 0 is
            the plain model, bit for bit, and 1 is full calibration.
        basket_size: The number of tokens in a basket, at least 1.
        layers: Which attention layers are calibrated. A float in (0, 1) is a fraction of the model's depth and an int a
            number of layers, both counted back from the last layer. ``"all"`` (or 1.0) means every layer. A tuple of
            ints names the layers: 0 is the first, -1 the last.
        attention: Which layers ``layers`` counts and chooses from: all of them (``"any"``, as published), or only those
            in which a token sees the whole document (``"global"``). In models such as ModernBERT and Gemma 3 most
            layers see only a window of tokens, and there is little or nothing to calibrate in a window.
        pooling: Which attention rows are calibrated: only the pooled token's (``"cls"``, ``"last"``), or every row
            (``"mean"``). ``"auto"`` takes it from the model's pooling module.
        isolate: Which tokens are kept out of the baskets: none, the first token (``"bos"``: BOS or CLS), or the first
            and the last token (``"bos_eos"``). ``"auto"`` is ``"bos"`` for cls pooling, ``"bos_eos"`` for last-token
            pooling and ``"none"`` for mean pooling.
        isolated_share: How much attention an isolated token gets: as much as in the plain model (``"preserve"``), as
            much as a basket (``"equal"``), or a fixed share in [0, 1).
        last_basket: How much attention the last basket of a document gets, which usually has fewer tokens than the
            others: as much as every other basket (``"equal"``, as published), or, as then holds for every basket, in
            proportion to the number of its tokens that the row may attend to (``"proportional"``). ``"halves"`` is
            ``"equal"``, except that a document of two baskets is cut into two of the same length.
        min_content: Documents with fewer content tokens than this stay as in the plain model. None means one basket.
    """

    strength: float = 0.5
    basket_size: int = 128
    layers: float | int | Literal["all"] | tuple[int, ...] = 0.5
    attention: Attention = "any"
    pooling: Pooling = "auto"
    isolate: Isolate = "auto"
    isolated_share: Literal["preserve", "equal"] | float = "preserve"
    last_basket: LastBasket = "equal"
    min_content: int | None = None

    def __post_init__(self) -> None:
        # Values are stored in one type each, so that equal settings are equal, hash alike and give the same JSON.
        object.__setattr__(self, "strength", validate_strength(self.strength))
        object.__setattr__(self, "basket_size", validate_positive_int("basket_size", self.basket_size))
        object.__setattr__(self, "layers", _validate_layers(self.layers))
        validate_choice("attention", self.attention, get_args(Attention))
        validate_choice("pooling", self.pooling, get_args(Pooling))
        validate_choice("isolate", self.isolate, get_args(Isolate))
        validate_choice("last_basket", self.last_basket, get_args(LastBasket))
        object.__setattr__(self, "isolated_share", _validate_isolated_share(self.isolated_share))
        if isinstance(self.isolated_share, float) and self.isolate == "bos_eos" and self.isolated_share >= 0.5:
            raise ValueError(
                f"isolated_share: two isolated tokens (isolate='bos_eos') need a share below 0.5 each, "
                f"got {self.isolated_share!r}"
            )
        if self.min_content is not None:
            object.__setattr__(self, "min_content", validate_positive_int("min_content", self.min_content))

    @property
    def min_content_tokens(self) -> int:
        """The number of content tokens from which on a document is calibrated."""
        return self.basket_size if self.min_content is None else self.min_content

    def resolve(self, pooling: str) -> FairConfig:
        """Returns the settings for a model with a given pooling, with nothing left on "auto".

        Args:
            pooling: How the model pools: "cls", "last" or "mean". It is used where ``self.pooling`` is "auto".

        Raises:
            ValueError: ``pooling`` is unknown, or the fixed share of the isolated tokens is too large for two of them.
        """
        resolved = self.pooling if self.pooling != "auto" else pooling
        validate_choice("pooling", resolved, ["cls", "last", "mean"])
        isolate = (
            {"cls": "bos", "last": "bos_eos", "mean": "none"}[resolved] if self.isolate == "auto" else self.isolate
        )
        return replace(self, pooling=resolved, isolate=isolate)  # type: ignore[arg-type]

    def select_layers(self, n_layers: int, *, windows: Sequence[int | None] | None = None) -> tuple[int, ...]:
        """Returns the indices, in ascending order, of the calibrated layers among ``n_layers`` attention layers.

        Args:
            n_layers: The number of the model's attention layers.
            windows: For each layer the distance from which on tokens do not see each other, None where all do. Needed
                for ``attention="global"``; None means that it is not known.

        Raises:
            ValueError: ``layers`` asks for more layers than there are to choose from, or for one that is not among
                them, or ``attention`` is "global" and no layer is known to be so.
        """
        offered, kind = list(range(n_layers)), "attention"
        if self.attention == "global":
            if windows is None:
                raise ValueError(
                    "attention: which layers of this model are global is not known, because its attention is "
                    "intercepted; name the layers by their indices, as in layers=(3, 7), with attention='any'"
                )
            offered, kind = [i for i, window in enumerate(windows) if window is None], "global attention"
            if not offered:
                widest = max(window for window in windows if window is not None)
                raise ValueError(
                    "attention: the model has no global attention layers; in each of them, tokens see only those fewer "
                    f"than {widest} positions away; use attention='any'"
                )
        if self.layers == "all":
            return tuple(offered)
        if isinstance(self.layers, tuple):
            if out_of_range := [i for i in self.layers if not -n_layers <= i < n_layers]:
                raise ValueError(
                    f"layers: expected indices in [-{n_layers}, {n_layers}) for {n_layers} attention layers, "
                    f"got {out_of_range}"
                )
            chosen = sorted({i % n_layers for i in self.layers})
            if local := [i for i in chosen if i not in offered]:
                raise ValueError(f"layers: with attention='global' expected layers among {offered}, got {local}")
            return tuple(chosen)
        if isinstance(self.layers, float):
            count = max(1, math.floor(self.layers * len(offered) + 0.5))
        else:
            count = self.layers
            if count > len(offered):
                raise ValueError(f"layers: the model has {len(offered)} {kind} layers, got a count of {count}")
        return tuple(offered[len(offered) - count :])


def _validate_layers(layers: Any) -> float | int | Literal["all"] | tuple[int, ...]:
    if isinstance(layers, str):
        validate_choice("layers", layers, ["all"])
        return "all"
    if isinstance(layers, Sequence):
        if not layers:
            raise ValueError("layers: expected at least one layer, got an empty sequence; use strength=0 for no effect")
        if any(isinstance(i, bool) or not isinstance(i, Integral) for i in layers):
            raise TypeError(f"layers: expected layer indices as integers, got {layers!r}")
        return tuple(sorted({int(i) for i in layers}))
    if isinstance(layers, Integral) and not isinstance(layers, bool):
        return validate_positive_int("layers", layers)
    if isinstance(layers, bool) or not isinstance(layers, Real):
        raise TypeError(
            f"layers: expected a fraction in (0, 1], a count, 'all' or a sequence of indices, "
            f"got {layers!r} ({type(layers).__name__})"
        )
    if not 0.0 < float(layers) <= 1.0:
        raise ValueError(f"layers: expected a fraction in (0, 1], got {layers!r}; a count of layers is an int")
    # 1.0 == 1 in Python: kept as a float, "every layer" would equal "one layer" as a key.
    return "all" if layers == 1.0 else float(layers)


def _validate_isolated_share(share: Any) -> Literal["preserve", "equal"] | float:
    if isinstance(share, str):
        validate_choice("isolated_share", share, ["preserve", "equal"])
        return "preserve" if share == "preserve" else "equal"
    if isinstance(share, bool) or not isinstance(share, Real):
        raise TypeError(
            f"isolated_share: expected 'preserve', 'equal' or a number in [0, 1), "
            f"got {share!r} ({type(share).__name__})"
        )
    if not 0.0 <= float(share) < 1.0:
        raise ValueError(f"isolated_share: expected 'preserve', 'equal' or a number in [0, 1), got {share!r}")
    return float(share) + 0.0  # as for the strength
