"""How a model's attention is reached, and which layers it has: read off recorded forward passes over a probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fair_calibration.access.attention_call import AttentionHandler
from fair_calibration.access.compilation import run_uncompiled
from fair_calibration.access.interception import CallShape, Interception
from fair_calibration.access.interface import (
    BaseImplementation,
    handle_attention,
    implementation_name,
    register_implementations,
)
from fair_calibration.access.recorder import AttentionRecorder

PROBE_TEXTS = ("one", "A probe of two lengths, so that one of the two sequences is padded.")


class Probe(NamedTuple):
    """What came of one forward pass over the probe: its attention mask (B, L) and the model's output."""

    attention_mask: Tensor
    output: Tensor


@dataclass(frozen=True)
class Discovery:
    """How a model's attention is reached.

    Attributes:
        mechanism: The same in words.
        modules: The class names of the attention modules, in the order in which they are called.
        shapes: The calls that are to be intercepted; none where transformers' AttentionInterface is used.
        hidden_below: Up to which logit an intercepted softmax hides a key.
    """

    mechanism: str
    modules: tuple[str, ...]
    shapes: frozenset[CallShape] = frozenset()
    hidden_below: float = -torch.inf

    @contextmanager
    def handle(self, handler: AttentionHandler | None, attention_mask: Tensor) -> Iterator[None]:
        """Sends the model's attention calls of this thread to ``handler``, for one forward pass over a batch.

        Args:
            handler: What becomes of the calls; None leaves them plain.
            attention_mask: (B, L), the batch's.
        """
        if handler is None or not self.shapes:
            with run_uncompiled() if handler else nullcontext(), handle_attention(handler):
                yield
        else:
            shape = attention_mask.shape
            interception = Interception(handler, shape, shapes=self.shapes, hidden_below=self.hidden_below)
            with run_uncompiled(), interception:
                yield


def discover(model: PreTrainedModel, base: BaseImplementation, run_probe: Callable[[], Probe]) -> Discovery:
    """Finds out how a model's attention is reached: by transformers' AttentionInterface, or else by interception.

    Args:
        model: The model. Where it uses the AttentionInterface it is left with our implementation set.
        base: The attention implementation that it was loaded with.
        run_probe: Runs the model over a batch one of whose sequences is padded.

    Raises:
        ValueError: The attention is not reached as a whole, or it is none that can be calibrated.
    """
    training = [(module, module.training) for module in model.modules()]
    model.train(False)
    try:
        with torch.inference_mode(), handle_attention(None), run_uncompiled():
            return _discover(model, base, run_probe)
    finally:
        for module, mode in training:
            module.training = mode


def _discover(model: PreTrainedModel, base: BaseImplementation, run_probe: Callable[[], Probe]) -> Discovery:
    name, kinds = model_name(model), [type(module) for module in model.modules()]
    set_implementation(model, base)
    plain = run_probe()
    if [type(module) for module in model.modules()] != kinds:
        raise ValueError(
            f"{name} replaces its own attention modules, depending on the length of its input: it cannot be calibrated"
        )
    n_layers = _n_layers(model)

    routed = AttentionRecorder(plain.attention_mask)
    if model._can_set_attn_implementation():
        register_implementations()
        set_implementation(model, implementation_name(base))
        with handle_attention(routed):
            recorded = run_probe()
        if routed.modules and len(routed.modules) == (n_layers or len(routed.modules)):
            if not torch.equal(plain.output, recorded.output):
                raise ValueError(f"{name} computes something else when its attention is routed through ours")
            return Discovery(f"transformers AttentionInterface, on top of {base}", tuple(routed.modules))
        set_implementation(model, base)

    intercepted = AttentionRecorder(plain.attention_mask, intercepting=True)
    with _trace_modules(model) as running:
        interception = Interception(intercepted, plain.attention_mask.shape, name=running.enter_call)
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
            "its attention cannot be told apart, and the model cannot be calibrated"
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


def set_implementation(model: PreTrainedModel, name: str) -> None:
    """Sets the attention implementation of a model that lets it be set, or that has it already.

    Raises:
        ValueError: The model did not take it.
    """
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(f"{model_name(model)} does not let its attention implementation be set to {name!r}")


def model_name(model: nn.Module) -> str:
    """Returns the name of a model's class, also of one that torch.compile wrapped."""
    return type(getattr(model, "_orig_mod", model)).__name__


def _n_layers(model: PreTrainedModel) -> int | None:
    config = model.config.get_text_config()
    names = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")  # remote code need not map its own to the first
    return next((n for name in names if (n := getattr(config, name, None)) is not None), None)


@dataclass
class _Running:
    """The modules of a model that are running, innermost last, each with the attention calls that it made itself."""

    stack: list[tuple[str, list[None]]]

    def enter_call(self) -> str:
        """Returns the class of the innermost module, which makes an attention call."""
        name, calls = self.stack[-1]
        if calls:
            raise ValueError(
                f"{name} makes several calls of softmax or scaled_dot_product_attention in one forward pass that look "
                "like attention over the batch's tokens: which of them is attention is not known, and it cannot be "
                "calibrated"
            )
        calls.append(None)
        return name


@contextmanager
def _trace_modules(model: nn.Module) -> Iterator[_Running]:
    """Keeps account of which module is running; torch's own, such as `torch.nn.Softmax`, count as their caller."""
    running = _Running([(model_name(model), [])])  # sentence-transformers calls its forward past the hooks

    def enter(module: nn.Module, _: Any) -> None:
        running.stack.append((model_name(module), []))

    def leave(*_: Any) -> None:
        running.stack.pop()

    hooks = []
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()
