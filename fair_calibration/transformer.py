"""The sentence-transformers module that calibrates: a `Transformer` whose documents get calibrated attention."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

from fair_calibration.access.attention_call import AttentionHandler
from fair_calibration.access.discovery import PROBE_TEXTS, Discovery, Probe, discover, model_name, set_implementation
from fair_calibration.access.interface import (
    base_implementation,
    handle_attention,
    register_implementations,
)
from fair_calibration.config import FairConfig, validate_strength
from fair_calibration.even_chunks.chunks import Frame, frame_of
from fair_calibration.even_chunks.encoder import ChunkEncoder, longest_input
from fair_calibration.method.baskets import build_baskets
from fair_calibration.method.calibrated_pass import CalibratedPass
from fair_calibration.method.last_layer import LastLayer, PooledRows, prove
from fair_calibration.poolings import check_pooled_directly, excluded_prompt, single_mode
from fair_calibration.report import DocumentCounter, DocumentCounts, Summary, count_truncated
from fair_calibration.routes import document_path, own_tasks

_OWN_STATE = {
    "fair_config",
    "counter",
    "_base_implementation",
    "_discovery",
    "_followers",
    "_frames",
    "_last_layer",
    "_own_kwargs",
    "_own_tasks",
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
        set_implementation(self.model, self._base_implementation)
        plain: Transformer = Transformer.__new__(Transformer)
        plain.__dict__ = {name: value for name, value in self.__dict__.items() if name not in _OWN_STATE}
        return plain

    def _set_up(self, config: FairConfig | Mapping[str, Any] | None) -> None:
        if config is None:
            config = FairConfig()
        self.fair_config = config if isinstance(config, FairConfig) else FairConfig.from_dict(config)
        self.counter = DocumentCounter()
        self._base_implementation = base_implementation(self)
        self._discovery: Discovery | None = None
        self._own_kwargs: frozenset[str] = frozenset()
        self._own_tasks: frozenset[str] = frozenset()
        # What documents pass behind this: read at every call, as it may be changed; no submodules of this one.
        self._followers: list[nn.Module] = []
        self._frames: dict[str | None, Frame] = {}
        self._last_layer: LastLayer | None = None  # if it is computed for the pooled rows alone

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
            names = [name for name, module in model.named_children() if module is self]  # none in a Router
            self._own_kwargs = frozenset(chain.from_iterable(module_kwargs.get(name, ()) for name in names))
        self._own_tasks = own_tasks(model.children())
        device = getattr(model, "device", self.model.device)  # the first parameter of an offloaded model is on "meta"
        discovery = discover(self.model, self._base_implementation, partial(self._run_probe, device))
        config.select_layers(len(discovery.modules))  # whether they are there is to be known now
        if config.chunk_size is not None:
            check_pooled_directly(self._followers, config, setting="chunk_size")
        self._discovery = discovery

    def use_pooled_row_only(self, model: nn.Module) -> None:
        """Has the last layer computed for the pooled rows alone from now on, if that leaves them as they are.

        Args:
            model: The model this is part of.

        Raises:
            ValueError: Other rows are read, the last layer is not calibrated, or the model does not lend itself to it.
        """
        config, discovery = self._require_ready()
        device = getattr(model, "device", self.model.device)
        mask = self._run_probe(device).attention_mask
        probing = replace(config, basket_size=1, min_content=1, isolate="none")  # so that the probe is long enough
        baskets = build_baskets(mask, probing).to(mask.device)
        layers = frozenset(config.select_layers(len(discovery.modules)))

        def encode(rows: PooledRows | None) -> torch.Tensor:
            calibrated_pass = CalibratedPass(layers, baskets, probing, strength=0.5, rows=rows)
            with discovery.handle(calibrated_pass, mask), rows or nullcontext():
                return self._run_probe(device).output

        n_layers = len(discovery.modules)
        rows = PooledRows(baskets.pooled, mask.shape[1])
        self._last_layer = prove(self.model, model_name(self.model), config, self._followers, n_layers, rows, encode)

    @property
    def is_pooled_row_only(self) -> bool:
        """Whether documents leave out what is not read of the last layer."""
        return self._last_layer is not None

    def use_poolings(self, model: nn.Module) -> None:
        """Takes note of the pooling that the model has now, a Router's by its route for documents."""
        self._followers = document_path(model.children())[1:]

    @property
    def _poolings(self) -> list[Pooling]:
        return [module for module in self._followers if isinstance(module, Pooling)]

    def _resolve(self) -> FairConfig:
        """Returns the settings with nothing left on "auto", by the model's pooling as it is now."""
        config = self.fair_config
        return config.resolve(single_mode(self._poolings) if config.pooling == "auto" else config.pooling)

    def _run_probe(self, device: torch.device) -> Probe:
        with _tokenizing:
            features = super().preprocess(list(PROBE_TEXTS))
        if "attention_mask" not in features:
            raise ValueError(
                f"{model_name(self.model)} takes no attention_mask (features: {sorted(features)}): only text models "
                "with padded input can be calibrated"
            )
        features = {key: value.to(device) if torch.is_tensor(value) else value for key, value in features.items()}
        result = super().forward(features)
        return Probe(result["attention_mask"], result[self.module_output_name])

    def preprocess(  # type: ignore[override]
        self, inputs: Any, prompt: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Tokenizes as `Transformer.preprocess` does; for documents it also counts the truncated ones."""
        strength = kwargs.pop("strength", None)
        strength = self.fair_config.strength if strength is None else strength
        task = kwargs.get("task")
        is_query = task is not None and _is_query(task, own_tasks=self._takes_own_tasks(task))
        if self.fair_config.chunk_size is not None and not is_query and strength > 0:
            return self._preprocess_whole(inputs, prompt, **kwargs)
        with _tokenizing:
            features: dict[str, Any] = super().preprocess(inputs, prompt=prompt, **kwargs)
            if features and not is_query:
                features["n_truncated"] = count_truncated(features, self.max_seq_length)
        return features

    def _preprocess_whole(self, inputs: Any, prompt: str | None, **kwargs: Any) -> dict[str, Any]:
        """Tokenizes documents without truncating them, and notes how many tokens stand around every text."""
        # verbose: transformers would warn of documents longer than the model's inputs.
        own = kwargs.pop("processing_kwargs", None) or {}
        kwargs["processing_kwargs"] = {**own, "text": {**own.get("text", {}), "truncation": False, "verbose": False}}
        with _tokenizing:
            if prompt not in self._frames:
                # What an empty text and another have in common at both ends.
                pair = [super(FairTransformer, self).preprocess([t], prompt=prompt, **kwargs) for t in ("", "a")]
                self._frames[prompt] = frame_of(*(p["input_ids"][0][p["attention_mask"][0] > 0].tolist() for p in pair))
            frame = self._frames[prompt]
            longest_input(frame, self.fair_config, self.max_seq_length)  # before anything is encoded
            features: dict[str, Any] = super().preprocess(inputs, prompt=prompt, **kwargs)
        return {**features, "frame": frame} if features else features

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
        frame: Frame | None = features.pop("frame", None)
        if is_query := _is_query(task, own_tasks=self._takes_own_tasks(task)):
            strength = 0.0
        if frame is not None:
            return self._forward_whole(features, frame, strength, count=not is_query, **kwargs)
        if is_query:
            with handle_attention(None):
                return super().forward(features, **kwargs)
        config, discovery = self._require_ready()
        if config.chunk_size is not None and strength > 0:
            raise ValueError(
                "features: they were made for a query, or at strength 0, so they may be truncated and cannot be cut "
                "into chunks; give preprocess the task and the strength that forward gets"
            )
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
        if strength > 0:
            result, counts = self._forward_calibrated(features, config, discovery, strength, **kwargs)
        else:
            counts = DocumentCounts(plain=features["attention_mask"].shape[0])
            with discovery.handle(None, features["attention_mask"]):
                result = super().forward(features, **kwargs)
        self.counter.add(counts._replace(truncated=n_truncated), max_seq_length=self.max_seq_length)
        return result

    def _forward_calibrated(
        self, features: dict[str, Any], config: FairConfig, discovery: Discovery, strength: float, **kwargs: Any
    ) -> tuple[dict[str, Any], DocumentCounts]:
        mask = features["attention_mask"]
        baskets = build_baskets(mask, config, prompt_length=self.excluded_prompt(features)).to(mask.device)
        counts = DocumentCounts(sum(baskets.is_calibrated), mask.shape[0] - sum(baskets.is_calibrated))
        if not counts.calibrated:
            with discovery.handle(None, mask):
                return super().forward(features, **kwargs), counts
        rows = None
        if self._last_layer is not None:
            rows = self._last_layer.rows(config, self._followers, baskets)
        layers = frozenset(config.select_layers(len(discovery.modules)))
        calibrated_pass = CalibratedPass(layers, baskets, config, strength, rows)
        with discovery.handle(calibrated_pass, mask), rows or nullcontext():
            result = super().forward(features, **kwargs)
        if calibrated_pass.n_calls != len(discovery.modules):
            raise ValueError(
                f"{model_name(self.model)} made {calibrated_pass.n_calls} attention calls instead of the "
                f"{len(discovery.modules)} recorded. Was its attn_implementation changed, or layers added? "
                "Calibrate the model again"
            )
        if self._last_layer is not None and rows is not None:
            result = self._last_layer.without_others(rows, result, self.module_output_name)
        return result, counts

    def _takes_own_tasks(self, task: str | None) -> bool:
        return "task" in self._own_kwargs or task in self._own_tasks

    def _forward_whole(
        self, features: dict[str, Any], frame: Frame, strength: float, *, count: bool, **kwargs: Any
    ) -> dict[str, Any]:
        """Encodes whole documents, the long ones in even chunks: one vector each, as of a document of one token."""
        config, discovery = self._require_ready()
        own = {
            name: value for name, value in features.items() if not torch.is_tensor(value) and name != "prompt_length"
        }

        def run(rows: dict[str, Any]) -> torch.Tensor:
            with discovery.handle(None, rows["attention_mask"]):
                states: torch.Tensor = Transformer.forward(self, {**own, **rows}, **kwargs)[self.module_output_name]
            return states

        encoder = ChunkEncoder(
            features,
            frame,
            config,
            run=run,
            pooling=check_pooled_directly(self._followers, config, setting="chunk_size"),
            max_seq_length=self.max_seq_length,
            tokenizer=self.tokenizer,
        )
        vectors = encoder.encode(strength)
        if count:
            self.counter.add(encoder.counts(strength), max_seq_length=self.max_seq_length)
        mask = torch.ones(len(vectors), 1, dtype=features["attention_mask"].dtype, device=vectors.device)
        return {**own, self.module_output_name: vectors[:, None], "attention_mask": mask}

    def run_handled(self, features: dict[str, Any], handler: AttentionHandler) -> dict[str, Any]:
        """Runs the transformer over documents with its attention calls sent to ``handler``; counts nothing.

        Args:
            features: As `preprocess` returns them, on the model's device.
            handler: What becomes of the calls.

        Returns:
            The features with the transformer's output.
        """
        config, discovery = self._require_ready()
        if config.chunk_size is not None:
            raise ValueError("chunk_size: no attention is calibrated with it, and none to be observed; set it to None")
        own = {"task": "document"} if "task" in self._own_kwargs else {}
        with discovery.handle(handler, features["attention_mask"]):
            return super().forward(features, **own)

    def excluded_prompt(self, features: dict[str, Any]) -> int:
        """Returns the number of leading tokens that pooling leaves out."""
        return excluded_prompt(self._poolings, features)

    def _require_ready(self) -> tuple[FairConfig, Discovery]:
        if self._discovery is None:
            raise ValueError(
                "this FairTransformer is not part of a model yet: use calibrate() or FairSentenceTransformer, "
                "or call on_model_ready(model)"
            )
        return self._resolve(), self._discovery

    def summary(self) -> Summary:
        """Returns which layers, rows and mechanism are in use, and what became of the documents so far."""
        config, discovery = self._require_ready()
        layers = config.select_layers(len(discovery.modules))
        return Summary(
            model=model_name(self.model),
            config=config,
            n_layers=len(discovery.modules),
            layers=layers,
            modules=tuple(discovery.modules[i] for i in layers),
            mechanism=discovery.mechanism,
            pooled_row_only=self.is_pooled_row_only,
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
