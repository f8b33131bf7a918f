"""`FairTransformer`: the sentence-transformers module whose documents are encoded with calibrated attention."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast, get_args

import torch
from sentence_transformers.base.modules import Transformer
from torch import nn

from fair_calibration.access.attention_call import AttentionHandler
from fair_calibration.access.discovery import (
    PROBE_TEXTS,
    Discovery,
    Probe,
    discover,
    evaluating,
    model_name,
    set_implementation,
)
from fair_calibration.access.interface import base_implementation, register_implementations
from fair_calibration.access.unpadded import OFFSETS, attention_mask_of
from fair_calibration.config import FairConfig
from fair_calibration.document_transformer import DocumentState, DocumentTransformer
from fair_calibration.method.baskets import build_baskets
from fair_calibration.method.calibrated_pass import CalibratedPass, KernelName
from fair_calibration.method.last_layer import PooledRows, check_only_pooled_rows_are_read, compare_with_whole_layer
from fair_calibration.method.one_pass import check_device, check_same_output
from fair_calibration.poolings import poolings_of, single_mode
from fair_calibration.report import DocumentCounts, Summary
from fair_calibration.texts import tokenizer_lock
from fair_calibration.validation import validate_choice


@dataclass
class FairState(DocumentState):
    """The state of a `FairTransformer`."""

    config: FairConfig
    base_implementation: str = "sdpa"  # the attention implementation that the model was loaded with
    discovery: Discovery | None = None  # how its attention is reached; None before the module is part of a model
    n_last_linear: int | None = None  # the linear layers after the last attention, if computed for pooled rows alone
    kernel: KernelName = "torch"


class FairTransformer(DocumentTransformer):
    """A sentence-transformers `Transformer` that encodes documents with calibrated attention, and queries plainly."""

    config_class = FairConfig
    state: FairState

    def attach(self, config: Any) -> None:
        """Gives the module a new ``state`` with these settings."""
        self.state = FairState(config, base_implementation=base_implementation(self))

    def release(self) -> Transformer:
        """Turns this module back into a plain `Transformer`, in place, and returns it."""
        set_implementation(self.model, self.state.base_implementation)
        return super().release()

    def prepare(self, model: nn.Module) -> None:
        """Finds the attention layers of the model by one forward pass, and checks that the settings fit it.

        Raises:
            ValueError: The model's pooling or attention cannot be calibrated, or the settings do not fit the model.
        """
        config = self.resolved_config()
        device = getattr(model, "device", self.model.device)  # the first parameter of an offloaded model is on "meta"
        discovery = discover(self.model, self.state.base_implementation, partial(self._run_probe, device))
        _select_layers(config, discovery)  # raises an error now if the settings do not fit the model's layers
        self.state.discovery = discovery

    def use_pooled_row_only(self, model: nn.Module) -> None:
        """Computes the last layer for the pooled rows alone from now on, if that leaves these rows as they are.

        Raises:
            ValueError: Other rows are read as well, the last layer is not calibrated, or the model is not suited to it.
        """
        config, discovery = self._require_ready()
        n_layers = len(discovery.modules)
        layers = _select_layers(config, discovery)
        check_only_pooled_rows_are_read(config, self.state.followers, layers=layers, n_layers=n_layers)
        if self.can_flatten_inputs:
            raise ValueError(
                "pooled_row_only: flash attention runs over batches without padding, for which it is not available; "
                "set model[0].unpad_inputs = False, or pooled_row_only to False"
            )
        # The probe has only a few tokens.
        probing = replace(config, basket_size=1, min_content=1, isolate="none", strength=0.5)
        device = getattr(model, "device", self.model.device)
        mask = self._run_probe(device).attention_mask
        rows = PooledRows(build_baskets(mask, probing).pooled.to(mask.device), mask.shape[1])
        with evaluating(self.model):
            encode = partial(self._run_calibrated_probe, device, probing, mask, self.state.kernel)
            compare_with_whole_layer(model_name(self.model), rows, encode)
        self.state.n_last_linear = rows.n_linear

    def use_kernel(self, kernel: KernelName, model: nn.Module) -> None:
        """Computes calibrated rows with this kernel from now on, if that leaves the output of the model as it is.

        Raises:
            ValueError: It is not the name of a kernel, or the kernel is not suited to the model or its device.
        """
        validate_choice("kernel", kernel, get_args(KernelName))
        if kernel != "torch":
            config, _ = self._require_ready()
            device = getattr(model, "device", self.model.device)
            check_device(device)
            # The probe has only a few tokens.
            probing = replace(config, basket_size=3, min_content=1, strength=0.5)
            mask = self._run_probe(device).attention_mask
            with evaluating(self.model):
                kernels: tuple[KernelName, KernelName] = ("torch", kernel)
                outputs = [self._run_calibrated_probe(device, probing, mask, name, None) for name in kernels]
            if outputs[0].shape[:2] == mask.shape:  # padding may come out in any way
                outputs = [output[mask.bool()] for output in outputs]
            check_same_output(model_name(self.model), *outputs)
        self.state.kernel = kernel

    def _run_calibrated_probe(
        self, device: torch.device, config: FairConfig, mask: torch.Tensor, kernel: KernelName, rows: PooledRows | None
    ) -> torch.Tensor:
        """Runs the probe with calibrated attention, given its attention mask (B, L); ``config`` is resolved."""
        discovery = cast(Discovery, self.state.discovery)
        layers = frozenset(_select_layers(config, discovery))
        calibrated_pass = CalibratedPass(layers, build_baskets(mask, config).to(mask.device), config, rows, kernel)
        with discovery.handle(calibrated_pass, mask), rows or nullcontext():
            return self._run_probe(device).output

    @property
    def kernel(self) -> KernelName:
        """What computes the calibrated rows."""
        return self.state.kernel

    @property
    def is_pooled_row_only(self) -> bool:
        """Whether the last layer is computed for the pooled rows alone when documents are encoded."""
        return self.state.n_last_linear is not None

    def resolved_config(self) -> FairConfig:
        """Returns the settings with nothing left on "auto", according to the model's pooling as it is now."""
        config = self.state.config
        return config.resolve(single_mode(self.state.followers) if config.pooling == "auto" else config.pooling)

    def _run_probe(self, device: torch.device) -> Probe:
        with tokenizer_lock:
            features = Transformer.preprocess(self, list(PROBE_TEXTS))
        features = {key: value.to(device) if torch.is_tensor(value) else value for key, value in features.items()}
        mask = attention_mask_of(features)
        if mask is None:
            raise ValueError(
                f"{model_name(self.model)} takes no attention_mask (features: {sorted(features)}): only text models "
                "whose input shows where its sequences end can be calibrated"
            )
        result = Transformer.forward(self, features)
        return Probe(mask, result[self.module_output_name])

    def encode_documents(self, features: dict[str, Any], strength: float, **kwargs: Any) -> dict[str, Any]:
        """Runs the transformer over documents with calibrated attention, and counts them.

        Raises:
            ValueError: The model made other attention calls than when it was calibrated.
        """
        if strength > 0:
            result, counts = self._encode_calibrated(features, strength, **kwargs)
        else:
            result = self.encode_queries(features, **kwargs)
            counts = DocumentCounts(plain=len(cast(torch.Tensor, attention_mask_of(features))))
        self.counter.add(counts, max_seq_length=self.max_seq_length)
        return result

    def _encode_calibrated(
        self, features: dict[str, Any], strength: float, **kwargs: Any
    ) -> tuple[dict[str, Any], DocumentCounts]:
        config, discovery = self._require_ready()
        if self.model.training and getattr(self.model, "is_gradient_checkpointing", False):
            raise ValueError(
                "gradient checkpointing computes attention again in the backward pass, where it is not calibrated; "
                "train with model[0].model.gradient_checkpointing_disable() or strength=0"
            )
        mask = cast(torch.Tensor, attention_mask_of(features))
        baskets = build_baskets(mask, config, prompt_length=self.excluded_prompt(features)).to(mask.device)
        counts = DocumentCounts(sum(baskets.is_calibrated), mask.shape[0] - sum(baskets.is_calibrated))
        if not counts.calibrated:
            return self.encode_queries(features, **kwargs), counts
        rows, layers, n_layers = None, _select_layers(config, discovery), len(discovery.modules)
        # `PooledRows` needs padded input, with B and L that differ.
        if self.is_pooled_row_only and OFFSETS not in features and mask.shape[0] != mask.shape[1]:
            check_only_pooled_rows_are_read(config, self.state.followers, layers=layers, n_layers=n_layers)
            rows = PooledRows(baskets.pooled, mask.shape[1])
        calibrated_pass = CalibratedPass(
            frozenset(layers), baskets, replace(config, strength=strength), rows, self.kernel
        )
        with discovery.handle(calibrated_pass, mask), rows or nullcontext():
            result = Transformer.forward(self, features, **kwargs)
        if calibrated_pass.n_calls != n_layers:
            raise ValueError(
                f"{model_name(self.model)} made {calibrated_pass.n_calls} attention calls instead of the "
                f"{n_layers} recorded. Was its attn_implementation changed, or layers added? "
                "Calibrate the model again"
            )
        if rows is not None:
            self._check_pooled_rows(rows, result)
            result = {**result, self.module_output_name: rows.hide_others(result[self.module_output_name])}
        return result, counts

    def _check_pooled_rows(self, rows: PooledRows, result: dict[str, Any]) -> None:
        """Raises a ValueError if the model does not run as when ``pooled_row_only`` was checked."""
        if rows.n_linear != self.state.n_last_linear:
            raise ValueError(
                f"{model_name(self.model)} ran {rows.n_linear} linear layers after its last attention instead of the "
                f"{self.state.n_last_linear} recorded. Were adapters added or removed? Calibrate the model again"
            )
        if "all_layer_embeddings" in result:
            raise ValueError(
                "output_hidden_states: with pooled_row_only most states of the last layer are not computed; calibrate "
                "without it"
            )

    def run_handled(self, features: dict[str, Any], handler: AttentionHandler) -> dict[str, Any]:
        """Runs the transformer over the output of `tokenize_documents` with its attention calls sent to ``handler``.

        Returns:
            The features together with the transformer's output. The documents are not counted.
        """
        _, discovery = self._require_ready()
        own = {"task": "document"} if "task" in self.state.own_kwargs else {}
        with discovery.handle(handler, cast(torch.Tensor, attention_mask_of(features))):
            result: dict[str, Any] = Transformer.forward(self, features, **own)
        return result

    def excluded_prompt(self, features: dict[str, Any]) -> int:
        """Returns the length of the prompt in tokens if pooling leaves the prompt out, else 0."""
        if all(pooling.include_prompt for pooling in poolings_of(self.state.followers)):
            return 0
        length = features.get("prompt_length")
        return int(length.reshape(-1)[0]) if torch.is_tensor(length) else int(length or 0)

    def _require_ready(self) -> tuple[FairConfig, Discovery]:
        self.check_ready()
        return self.resolved_config(), cast(Discovery, self.state.discovery)

    def summary(self) -> Summary:
        """Returns which layers, rows and mechanism are in use, and how many documents were encoded."""
        config, discovery = self._require_ready()
        layers = _select_layers(config, discovery)
        return Summary(
            model=model_name(self.model),
            config=config,
            n_layers=len(discovery.modules),
            layers=layers,
            modules=tuple(discovery.modules[i] for i in layers),
            windows=tuple(discovery.windows[i] for i in layers) if discovery.windows else (None,) * len(layers),
            mechanism=discovery.mechanism,
            kernel=self.kernel,
            pooled_row_only=self.is_pooled_row_only,
            counts=self.counter.counts,
            max_seq_length=self.max_seq_length,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A worker process has not registered our attention functions yet.
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        register_implementations(self.state.base_implementation)


def _select_layers(config: FairConfig, discovery: Discovery) -> tuple[int, ...]:
    return config.select_layers(len(discovery.modules), windows=discovery.windows)
