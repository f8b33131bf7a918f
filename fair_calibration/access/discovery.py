"""Finds out how the attention of a model is reached, and which attention layers it has.

No table of model names is needed: two short texts are run through the model while its attention calls are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fair_calibration.access.attention_call import AttentionHandler
from fair_calibration.access.compilation import run_uncompiled
from fair_calibration.access.interception import CallShape, Interception
from fair_calibration.access.interface import (
    handle_attention,
    implementation_name,
    register_implementations,
)
from fair_calibration.access.recorder import AttentionRecorder, non_finite_error

PROBE_TEXTS = ("one", "A probe of two lengths, so that one of the two sequences is padded.")


class Probe(NamedTuple):
    """The result of one forward pass over `PROBE_TEXTS`."""

    attention_mask: Tensor  # (B, L), 1 for tokens and 0 for padding, as if padded if the model runs without padding
    output: Tensor  # usually (B, L, D), or (1, T, D) without padding


@dataclass(frozen=True)
class Discovery:
    """How the attention of one model is reached."""

    mechanism: str  # a description in words
    modules: tuple[str, ...]  # the class names of the attention modules, in the order in which they are called
    shapes: frozenset[CallShape] = frozenset()  # of the calls to intercept; empty for the AttentionInterface
    hidden_below: float = -torch.inf  # in an intercepted softmax, a key whose logit is at most this is masked
    windows: tuple[int | None, ...] | None = None  # as `FusedCall.window`; unknown where calls are intercepted

    @contextmanager
    def handle(self, handler: AttentionHandler, attention_mask: Tensor) -> Iterator[None]:
        """Hands the model's attention calls in this thread to ``handler`` during a forward pass over a batch (B, L)."""
        reach: AbstractContextManager[Any] = handle_attention(handler)
        if self.shapes:
            shape = attention_mask.shape
            reach = Interception(handler, shape, shapes=self.shapes, hidden_below=self.hidden_below)
        with run_uncompiled(), reach:
            yield


def discover(model: PreTrainedModel, base: str, run_probe: Callable[[], Probe]) -> Discovery:
    """Finds out whether the attention of a model is reached through the AttentionInterface or by interception.

    Args:
        model: The transformers model. If it uses the AttentionInterface, our implementation stays set on it.
        base: The attention implementation that it was loaded with.
        run_probe: Runs the model over a batch in which one sequence is padded.

    Raises:
        ValueError: The model cannot be calibrated: not all of its attention is reached, its attention computes
            something other than a softmax over logits, or the plain model itself gives NaN or infinite values.
    """
    with evaluating(model), handle_attention(None), run_uncompiled():
        return _discover(model, base, run_probe)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which a model is in evaluation mode, and runs without gradients."""
    training = [(module, module.training) for module in model.modules()]
    model.train(False)
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, mode in training:
            module.training = mode


def _discover(model: PreTrainedModel, base: str, run_probe: Callable[[], Probe]) -> Discovery:
    name, kinds = model_name(model), [type(module) for module in model.modules()]
    set_implementation(model, base)
    plain = run_probe()
    _check_finite(model, plain)  # first, or the comparisons below would blame the architecture for it
    if [type(module) for module in model.modules()] != kinds:
        raise ValueError(
            f"{name} replaces its own attention modules, depending on the length of its input: it cannot be calibrated"
        )
    n_layers = _n_layers(model)

    routed = AttentionRecorder(plain.attention_mask)
    if model._can_set_attn_implementation():
        register_implementations(base)
        set_implementation(model, implementation_name(base))
        with handle_attention(routed):
            recorded = run_probe()
        if routed.modules and len(routed.modules) == (n_layers or len(routed.modules)):
            if not torch.equal(plain.output, recorded.output):
                raise ValueError(f"{name} computes something else when its attention is routed through our function")
            return Discovery(
                f"transformers AttentionInterface, on top of {base}",
                tuple(routed.modules),
                windows=tuple(routed.windows),
            )
        set_implementation(model, base)

    intercepted = AttentionRecorder(plain.attention_mask, intercepting=True)
    with _trace_modules(model) as enter_call:
        interception = Interception(intercepted, plain.attention_mask.shape, name=enter_call)
        with interception:
            recorded = run_probe()
    n_calls, n_others = len(intercepted.modules), interception.others.total()
    if not n_calls or n_calls != n_layers:
        raise ValueError(
            f"{name} has {n_layers} layers, but in one forward pass it made {len(routed.modules)} attention calls "
            f"through transformers' AttentionInterface, and {n_calls} calls of softmax or scaled_dot_product_attention "
            f"that look like attention over the batch's tokens, beside {n_others} others: its attention cannot be "
            "reached as a whole, and the model cannot be calibrated"
        )
    if interception.attention.keys() & interception.others.keys():
        raise ValueError(
            f"{name} attends not only over the batch's tokens but, with as many heads, over something else as well: "
            "which of these calls to calibrate cannot be determined, so the model cannot be calibrated"
        )
    if intercepted.doubts:
        raise ValueError(intercepted.doubts[0])
    if not torch.equal(plain.output, recorded.output):
        raise ValueError(f"{name} computes something else when torch's functions are intercepted")
    functions = sorted({shape.function for shape in interception.attention})
    return Discovery(
        f"interception of {' and '.join(functions)}",
        tuple(intercepted.modules),
        frozenset(interception.attention),
        intercepted.hidden_below,
    )


def _check_finite(model: PreTrainedModel, plain: Probe) -> None:
    """Checks that the plain model gives finite values at the positions of tokens; padding may hold anything."""
    output, valid = plain.output, plain.attention_mask.bool()
    if output.shape[:2] == valid.shape:
        output = output[valid]
    if output.isfinite().all():
        return
    device, dtype = output.device.type, model.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    broken = next((name for name, parameter in model.named_parameters() if _has_non_finite(parameter)), None)
    hint = "" if broken is None else f" (its parameter {broken} holds such values)"
    raise non_finite_error(model_name(model), dtype, hint)


def _has_non_finite(parameter: nn.Parameter) -> bool:
    # Packed, quantized and offloaded parameters are skipped, since there is no common way to examine them.
    is_ordinary = type(parameter.data) is Tensor and parameter.is_floating_point() and not parameter.is_meta
    return is_ordinary and not bool(parameter.float().isfinite().all())


def set_implementation(model: PreTrainedModel, name: str) -> None:
    """Sets the attention implementation of a model; a ValueError if the model does not allow it."""
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(f"{model_name(model)} does not let its attention implementation be set to {name!r}")


def model_name(model: nn.Module) -> str:
    """Returns the class name of a model, also of one inside the wrapper of torch.compile."""
    return type(getattr(model, "_orig_mod", model)).__name__


def _n_layers(model: PreTrainedModel) -> int | None:
    """Returns the number of layers that the model's config states, if it does."""
    config = model.config.get_text_config()
    # transformers' own models all answer to the first name; models with remote code need not.
    names = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
    return next((n for name in names if (n := getattr(config, name, None)) is not None), None)


@contextmanager
def _trace_modules(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Yields a function that returns the class name of the module that is running, to be called once per attention.

    It raises a ValueError at the second call in one run of a module. While one of torch's own modules is running, such
    as `torch.nn.Softmax`, the module that called it counts as the one that is running.
    """
    # sentence-transformers calls the model's forward method directly, so no hook is run for the model itself.
    stack = [(model_name(model), False)]  # class names, and whether the module has made an attention call

    def enter(module: nn.Module, _: Any) -> None:
        stack.append((model_name(module), False))

    def leave(*_: Any) -> None:
        stack.pop()

    def enter_call() -> str:
        name, has_attended = stack[-1]
        if has_attended:
            raise ValueError(
                f"{name} makes several calls of softmax or scaled_dot_product_attention in one forward pass that look "
                "like attention over the batch's tokens: which of them is attention is not known, and it cannot be "
                "calibrated"
            )
        stack[-1] = (name, True)
        return name

    hooks = []
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield enter_call
    finally:
        for hook in hooks:
            hook.remove()
