"""`DocumentTransformer`: the base of `FairTransformer` (calibrated attention) and `EvenChunksTransformer`.

Both take the place of a model's own transformer, encode queries as it does, and count documents.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, NamedTuple

from sentence_transformers.base.modules import Transformer
from torch import nn

from fair_calibration.access.interface import handle_attention
from fair_calibration.access.unpadded import attention_mask_of
from fair_calibration.config import FairConfig
from fair_calibration.even_chunks.config import EvenChunks
from fair_calibration.limits import NO_LIMIT, position_limit, validate_max_seq_length
from fair_calibration.query import is_query_task
from fair_calibration.report import DocumentCounter, DocumentCounts, count_truncated
from fair_calibration.routes import document_path, own_tasks
from fair_calibration.settings import Settings
from fair_calibration.texts import tokenizer_lock
from fair_calibration.validation import validate_strength

logger = logging.getLogger("fair_calibration")


class Tokenized(NamedTuple):
    """Tokenized documents: the features for the transformer, and how many documents were truncated."""

    features: dict[str, Any]
    n_truncated: int


@dataclass
class DocumentState:
    """What a `DocumentTransformer` has beyond a plain `Transformer`, in one object that `release` deletes."""

    config: Settings  # as given, with "auto" not resolved
    counter: DocumentCounter = field(default_factory=DocumentCounter)
    followers: list[nn.Module] = field(default_factory=list)  # the modules that documents pass through after this one
    own_kwargs: frozenset[str] = frozenset()  # the arguments of ``encode`` that the model asks for in its modules.json
    own_tasks: frozenset[str] = frozenset()  # the names of tasks in the model's Routers
    is_ready: bool = False  # whether the module is part of a model (`DocumentTransformer.on_model_ready`)


class DocumentTransformer(Transformer):
    """A sentence-transformers `Transformer` that encodes queries unchanged, and documents as its subclass does."""

    forward_kwargs = {"task", "strength"}
    config_class: ClassVar[type[FairConfig] | type[EvenChunks]]
    state: DocumentState

    def __init__(
        self, model_name_or_path: str, *, fair_config: Settings | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Loads the transformer.

        Args:
            model_name_or_path: A Hugging Face name or a local folder.
            fair_config: The settings, or a dict of them as saved models have it; None means the defaults.
            **kwargs: Further arguments of `Transformer`.
        """
        super().__init__(model_name_or_path, **kwargs)
        if fair_config is None or isinstance(fair_config, Mapping):
            fair_config = self.config_class.from_dict(fair_config or {})
        self.attach(fair_config)

    def release(self) -> Transformer:
        """Turns this module back into a plain `Transformer`, in place, and returns it."""
        del self.state
        self.__class__ = Transformer
        return self

    def attach(self, config: Any) -> None:
        """Gives the module, whose class was set to this one, a new ``state`` with these settings."""
        raise NotImplementedError

    @property
    def is_pooled_row_only(self) -> bool:
        """Whether the last layer is computed for the pooled rows alone when documents are encoded."""
        return False

    @property
    def kernel(self) -> Any:
        """What computes calibrated attention."""
        return "torch"

    def use_kernel(self, kernel: Any, model: nn.Module) -> None:
        """Computes calibrated attention with this kernel from now on.

        Raises:
            ValueError: The kernel is unknown, or the model or the settings are not suited to it.
        """
        raise NotImplementedError

    def use_pooled_row_only(self, model: nn.Module) -> None:
        """Computes the last layer of ``model`` for the pooled rows alone from now on.

        Raises:
            ValueError: The model or the settings are not suited to it.
        """
        raise NotImplementedError

    @property
    def fair_config(self) -> Settings:
        """The settings as given."""
        return self.state.config

    @property
    def counter(self) -> DocumentCounter:
        """Counts the documents encoded so far."""
        return self.state.counter

    @property
    def max_seq_length(self) -> int | None:
        """The number of tokens at which inputs are truncated. Setting it beyond the model's positions is an error."""
        return super().max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int | None) -> None:
        value = validate_max_seq_length(value, position_limit(self.model))
        Transformer.max_seq_length.fset(self, value)

    def on_model_ready(self, model: nn.Module) -> None:
        """Prepares the module for the model that it is part of.

        Raises:
            ValueError: The settings do not fit the model.
        """
        self.look_up(model)
        limit = position_limit(self.model)
        if limit is not None and (self.max_seq_length is None or self.max_seq_length > limit):
            if self.max_seq_length is not None and self.max_seq_length <= NO_LIMIT:
                logger.warning(
                    "%s was loaded with max_seq_length=%s, but it has positions for %s tokens: documents are truncated "
                    "there.",
                    type(self.model).__name__,
                    self.max_seq_length,
                    limit,
                )
            self.max_seq_length = limit
        self.prepare(model)
        self.state.is_ready = True

    def prepare(self, model: nn.Module) -> None:
        """Checks that the settings fit the model, and prepares for encoding its documents."""
        raise NotImplementedError

    def look_up(self, model: nn.Module) -> None:
        """Reads the parts of the model around this module that matter here, at every call, as they may be changed."""
        self.state.followers = document_path(model.children())[1:]
        self.state.own_tasks = own_tasks(model.children())
        # Models that condition on the task themselves say so in modules.json.
        module_kwargs = getattr(model, "module_kwargs", None) or {}
        names = [name for name, module in model.named_children() if module is self]  # empty inside a Router
        self.state.own_kwargs = frozenset(chain.from_iterable(module_kwargs.get(name, ()) for name in names))

    def preprocess(  # type: ignore[override]
        self, inputs: Any, prompt: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Tokenizes as `Transformer.preprocess` does, and counts the texts that are truncated.

        With ``counted=False`` nothing is counted, as for texts that only show how the model tokenizes.
        """
        counted = kwargs.pop("counted", True)
        strength = kwargs.pop("strength", None)
        strength = self.fair_config.strength if strength is None else strength
        task = kwargs.get("task")
        if task is not None and self._is_query(task):
            with tokenizer_lock:
                features: dict[str, Any] = super().preprocess(inputs, prompt=prompt, **kwargs)
                counts = DocumentCounts(truncated_queries=count_truncated(features, self.max_seq_length))
        else:
            features, n_truncated = self.tokenize_documents(inputs, prompt, strength=strength, **kwargs)
            counts = DocumentCounts(truncated=n_truncated)
        if counted and any(counts):
            self.counter.add(counts, max_seq_length=self.max_seq_length)
        return features

    def tokenize_documents(
        self,
        inputs: Any,
        prompt: str | None = None,
        *,
        strength: float,  # noqa: ARG002
        **kwargs: Any,
    ) -> Tokenized:
        """Tokenizes documents to be encoded at a strength, without counting them."""
        with tokenizer_lock:
            features: dict[str, Any] = super().preprocess(inputs, prompt=prompt, **kwargs)
            return Tokenized(features, count_truncated(features, self.max_seq_length) if features else 0)

    def forward(
        self, features: dict[str, Any], task: str | None = None, strength: float | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Runs the transformer: for queries as the plain model does, for documents with the calibration.

        Args:
            features: The output of `preprocess`.
            task: "query", "document", or None, which is a document.
            strength: The strength for this call; None means that of the settings.
            **kwargs: Further arguments of the model.

        Returns:
            The features together with the transformer's output.

        Raises:
            ValueError: The task is unknown, or the features do not come from padded text.
        """
        strength = self.fair_config.strength if strength is None else validate_strength(strength)
        if task is not None and "task" in self.state.own_kwargs:
            kwargs["task"] = task
        if self._is_query(task):
            return self.encode_queries(features, **kwargs)
        self.check_ready()
        if attention_mask_of(features) is None:
            raise ValueError(
                "features: documents need text with an attention_mask, or with cu_seq_lens_q if it is not padded, got "
                f"{sorted(features)}; encode other inputs with the plain model"
            )
        return self.encode_documents(dict(features), strength, **kwargs)

    def encode_queries(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Runs the transformer as the plain model does."""
        with handle_attention(None):  # the weights may be shared with another calibrated model
            return super().forward(features, **kwargs)

    def encode_documents(self, features: dict[str, Any], strength: float, **kwargs: Any) -> dict[str, Any]:
        """Runs the transformer over documents at a strength, and counts them."""
        raise NotImplementedError

    def _is_query(self, task: str | None) -> bool:
        has_own_tasks = "task" in self.state.own_kwargs or task in self.state.own_tasks
        return is_query_task(task, has_own_tasks=has_own_tasks)

    def check_ready(self) -> None:
        """Raises a ValueError unless the module is part of a model."""
        if not self.state.is_ready:
            raise ValueError(
                f"this {type(self).__name__} is not part of a model yet: use calibrate() or FairSentenceTransformer, "
                "or call on_model_ready(model)"
            )

    def get_config_dict(self) -> dict[str, Any]:
        """Returns what is saved of the module, with the settings."""
        return {**super().get_config_dict(), "fair_config": self.fair_config.to_dict()}
