"""The sentence-transformers module that calibrates: a `Transformer` whose documents get calibrated attention."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

from fair_calibration.attention import (
    BASE_IMPLEMENTATIONS,
    BaseImplementation,
    CalibratedPass,
    handle_attention,
    implementation_name,
    register_implementations,
)
from fair_calibration.baskets import build_baskets
from fair_calibration.config import FairConfig, validate_strength
from fair_calibration.discovery import AttentionRecorder
from fair_calibration.report import DocumentCounter, DocumentCounts, Summary

_POOLING_MODES = {"cls": "cls", "lasttoken": "last", "mean": "mean", "mean_sqrt_len_tokens": "mean"}
_PROBE = ["one", "A probe of two lengths, so that one of the two sequences is padded."]
_OWN_STATE = {
    "fair_config",
    "counter",
    "_base_implementation",
    "_modules_called",
    "_own_kwargs",
    "_poolings",
}
# Fast tokenizers must not be entered by two threads at once ("Already borrowed").
_tokenizing = threading.RLock()


class FairTransformer(Transformer):
    """A `sentence_transformers` `Transformer` that encodes documents with calibrated attention.

    It takes the place of a model's first module; `calibrate` and `FairSentenceTransformer` put it there. Inputs with
    ``task="query"`` (`encode_query`) are encoded by the plain model, all others as documents.

    Attributes:
        fair_config: The settings as given.
        counter: What became of the documents so far.
    """

    forward_kwargs = {"task", "strength"}

    def __init__(
        self, model_name_or_path: str, *, fair_config: FairConfig | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Loads the transformer; arguments are `Transformer`'s.

        Args:
            model_name_or_path: A Hugging Face name or a local folder.
            fair_config: The settings, also as their dict (as saved models hold them); None for the defaults.
            **kwargs: `Transformer`'s.
        """
        super().__init__(model_name_or_path, **kwargs)
        self._set_up(fair_config)

    @classmethod
    def from_transformer(
        cls, transformer: Transformer, config: FairConfig, *, own_kwargs: Iterable[str] = ()
    ) -> FairTransformer:
        """Makes a `FairTransformer` of a loaded `Transformer`, taking its parts over: the given one is used up.

        Args:
            transformer: The loaded module.
            config: The settings.
            own_kwargs: The arguments of `encode` that the model asks for in its modules.json.
        """
        fair = cls.__new__(cls)
        fair.__dict__ = transformer.__dict__
        fair._set_up(config)
        fair._own_kwargs = frozenset(own_kwargs)
        return fair

    def into_transformer(self) -> Transformer:
        """Makes a plain `Transformer` of this one again, giving its parts away: this one is used up."""
        self._set_implementation(self._base_implementation)
        plain: Transformer = Transformer.__new__(Transformer)
        plain.__dict__ = {name: value for name, value in self.__dict__.items() if name not in _OWN_STATE}
        return plain

    def _set_up(self, config: FairConfig | Mapping[str, Any] | None) -> None:
        if config is None:
            config = FairConfig()
        self.fair_config = config if isinstance(config, FairConfig) else FairConfig.from_dict(config)
        self.counter = DocumentCounter()
        self._base_implementation = self._check_implementation()
        self._modules_called: tuple[str, ...] = ()
        self._own_kwargs: frozenset[str] = frozenset()
        # Read at every call, as they may be changed; in a list, as they are no submodules of this one.
        self._poolings: list[Pooling] = []

    def _check_implementation(self) -> BaseImplementation:
        if self.backend != "torch":
            raise ValueError(
                f"backend: calibration needs the torch backend, the model was loaded with {self.backend!r}"
            )
        current = self.model.config._attn_implementation
        base = str(current).removeprefix("fair_")
        if base not in BASE_IMPLEMENTATIONS:
            raise ValueError(
                f"attn_implementation: calibration works on top of {list(BASE_IMPLEMENTATIONS)}, the model was loaded "
                f"with {current!r}; load it with model_kwargs={{'attn_implementation': 'sdpa'}}"
            )
        return base

    def _set_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)
        if self.model.config._attn_implementation != name:
            raise ValueError(
                f"{type(self.model).__name__} does not route its attention through transformers' AttentionInterface, "
                "so its attention cannot be reached and the model cannot be calibrated"
            )

    def on_model_ready(self, model: nn.Module) -> None:
        """Resolves the settings for the model this is part of and finds its attention layers, by one forward pass.

        Raises:
            ValueError: The pooling is not one that can be calibrated, the settings do not fit the model, or its
                attention cannot be reached or is not one that can be calibrated.
        """
        self.use_poolings(model)
        config = self._resolve()
        # Models that condition on the task themselves say so in modules.json.
        if module_kwargs := getattr(model, "module_kwargs", None):
            name = next(name for name, module in model.named_children() if module is self)
            self._own_kwargs = frozenset(module_kwargs.get(name, ()))
        modules_called = self._record_layers()
        config.select_layers(len(modules_called))  # whether they are there is to be known now
        self._modules_called = modules_called

    def use_poolings(self, model: nn.Module) -> None:
        """Takes note of the pooling that the model has now."""
        self._poolings = [module for module in model.children() if isinstance(module, Pooling)]

    def _resolve(self) -> FairConfig:
        """Returns the settings with nothing left on "auto", by the model's pooling as it is now."""
        config = self.fair_config
        return config.resolve(_pooling_mode(self._poolings) if config.pooling == "auto" else config.pooling)

    def _record_layers(self) -> tuple[str, ...]:
        name = type(self.model).__name__
        was_training = self.model.training
        self.model.train(False)
        try:
            with torch.inference_mode(), handle_attention(None):
                self._set_implementation(self._base_implementation)
                plain = self._run_probe()
                register_implementations()
                self._set_implementation(implementation_name(self._base_implementation))
                recorder = AttentionRecorder(plain["attention_mask"])
                with handle_attention(recorder):
                    recorded = self._run_probe()
        finally:
            self.model.train(was_training)
        n_expected = getattr(self.model.config.get_text_config(), "num_hidden_layers", None)
        if not recorder.modules or len(recorder.modules) != (n_expected or len(recorder.modules)):
            raise ValueError(
                f"{name} made {len(recorder.modules)} attention calls through transformers' AttentionInterface in one "
                f"forward pass, but has {n_expected} layers: its attention cannot be reached as a whole, and the model "
                "cannot be calibrated"
            )
        if not torch.equal(plain[self.module_output_name], recorded[self.module_output_name]):
            raise ValueError(f"{name} computes something else when its attention is routed through ours")
        return tuple(recorder.modules)

    def _run_probe(self) -> dict[str, Any]:
        with _tokenizing:
            features = super().preprocess(list(_PROBE))
        if "attention_mask" not in features:
            raise ValueError(
                f"{type(self.model).__name__} takes no attention_mask (features: {sorted(features)}): only text models "
                "with padded input can be calibrated"
            )
        device = self.model.device
        features = {key: value.to(device) if torch.is_tensor(value) else value for key, value in features.items()}
        return super().forward(features)

    def preprocess(  # type: ignore[override]
        self, inputs: Any, prompt: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Tokenizes as `Transformer.preprocess` does; for documents it also counts the truncated ones."""
        kwargs.pop("strength", None)
        with _tokenizing:
            features: dict[str, Any] = super().preprocess(inputs, prompt=prompt, **kwargs)
            if features and kwargs.get("task") != "query":
                features["n_truncated"] = self._count_truncated(features)
        return features

    def _count_truncated(self, features: dict[str, Any]) -> int:
        encodings = getattr(features, "encodings", None)
        if encodings is not None:
            return sum(bool(encoding.overflowing) for encoding in encodings)
        # Slow tokenizers keep no record of what they cut off: documents that fill the limit count as truncated.
        if "attention_mask" not in features or self.max_seq_length is None:
            return 0
        return int((features["attention_mask"].sum(-1) >= self.max_seq_length).sum())

    def forward(
        self, features: dict[str, Any], task: str | None = None, strength: float | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Runs the transformer, with calibrated attention unless ``task`` is "query".

        Args:
            features: As `preprocess` returns them.
            task: "query", "document" or None, which is a document.
            strength: Overrides the config's for this call.
            **kwargs: The model's own.

        Returns:
            The features with the transformer's output.

        Raises:
            ValueError: The task is unknown, the features are none of padded text, or the model made other attention
                calls than recorded.
        """
        n_truncated = int(features.get("n_truncated", 0))
        features = {name: value for name, value in features.items() if name != "n_truncated"}
        strength = self.fair_config.strength if strength is None else validate_strength(strength)
        if task is not None and "task" in self._own_kwargs:
            kwargs["task"] = task
        if _is_query(task, own_tasks="task" in self._own_kwargs):
            with handle_attention(None):
                return super().forward(features, **kwargs)
        config = self._require_ready()
        if "attention_mask" not in features:
            raise ValueError(
                f"features: calibration needs padded text with an attention_mask, got {sorted(features)}; encode other "
                "inputs with the plain model"
            )
        if strength > 0 and self.model.training and getattr(self.model, "is_gradient_checkpointing", False):
            raise ValueError(
                "gradient checkpointing recomputes attention outside of the calibrated pass, uncalibrated; train with "
                "model[0].model.gradient_checkpointing_disable() or strength=0"
            )
        n_documents = features["attention_mask"].shape[0]
        if strength == 0.0:
            counts = DocumentCounts(plain=n_documents, truncated=n_truncated)
            with handle_attention(None):
                result = super().forward(features, **kwargs)
        else:
            baskets = build_baskets(features["attention_mask"], config, prompt_length=self._excluded_prompt(features))
            n_calibrated = sum(baskets.is_calibrated)
            counts = DocumentCounts(n_calibrated, n_documents - n_calibrated, truncated=n_truncated)
            layers = frozenset(config.select_layers(len(self._modules_called)))
            calibrated_pass = CalibratedPass(layers, baskets.to(features["attention_mask"].device), config, strength)
            with handle_attention(calibrated_pass if n_calibrated else None):
                result = super().forward(features, **kwargs)
            if n_calibrated and calibrated_pass.n_calls != len(self._modules_called):
                raise ValueError(
                    f"{type(self.model).__name__} made {calibrated_pass.n_calls} attention calls instead of the "
                    f"{len(self._modules_called)} recorded. Was its attn_implementation changed, or layers added? "
                    "Calibrate the model again"
                )
        self.counter.add(counts, max_seq_length=self.max_seq_length)
        return result

    def _excluded_prompt(self, features: dict[str, Any]) -> int:
        """Returns the number of leading tokens that pooling leaves out."""
        if all(pooling.include_prompt for pooling in self._poolings) or "prompt_length" not in features:
            return 0
        length = features["prompt_length"]
        return int(length.reshape(-1)[0]) if torch.is_tensor(length) else int(length or 0)

    def _require_ready(self) -> FairConfig:
        if not self._modules_called:
            raise ValueError(
                "this FairTransformer is not part of a model yet: use calibrate() or FairSentenceTransformer, "
                "or call on_model_ready(model)"
            )
        return self._resolve()

    def summary(self) -> Summary:
        """Returns which layers, rows and mechanism are in use, and what became of the documents so far."""
        config = self._require_ready()
        layers = config.select_layers(len(self._modules_called))
        return Summary(
            model=type(self.model).__name__,
            config=config,
            n_layers=len(self._modules_called),
            layers=layers,
            modules=tuple(self._modules_called[i] for i in layers),
            mechanism=f"transformers AttentionInterface, on top of {self._base_implementation}",
            counts=self.counter.counts,
            max_seq_length=self.max_seq_length,
        )

    def get_config_dict(self) -> dict[str, Any]:
        """Returns what is saved of the module, the settings included."""
        return {**super().get_config_dict(), "fair_config": self.fair_config.to_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # In a worker process nothing has been registered yet.
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        register_implementations()


def _is_query(task: str | None, *, own_tasks: bool) -> bool:
    if own_tasks:  # such as "retrieval.query"
        return task is not None and task.rsplit(".", 1)[-1] == "query"
    if task not in (None, "query", "document"):
        raise ValueError(f"task: expected 'query', 'document' or None, got {task!r}; only queries are encoded plainly")
    return task == "query"


def _pooling_mode(poolings: list[Pooling]) -> str:
    modes = [pooling.pooling_mode for pooling in poolings]
    if len(modes) == 1 and isinstance(modes[0], str) and modes[0] in _POOLING_MODES:
        return _POOLING_MODES[modes[0]]
    found = f"its pooling is {modes[0]!r}" if len(modes) == 1 else f"it has {len(modes)} Pooling modules"
    raise ValueError(
        f"pooling: 'auto' needs a model with one Pooling module of {sorted(_POOLING_MODES)}, but {found}; "
        "choose the rows to calibrate with FairConfig(pooling='cls', 'last' or 'mean')"
    )
