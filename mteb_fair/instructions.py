"""The instructions that MTEB's registry has for models which take one for each task, such as Harrier and F2LLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder, PromptSource
from mteb.models.instruct_wrapper import InstructSentenceTransformerModel
from mteb.types import PromptType

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata


class Instructions(AbsEncoder):
    """Builds the prompt of a task as MTEB's `InstructSentenceTransformerModel` does, without loading a model."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Takes the arguments of that class that the registry has for a model."""
        self.instruction_template = arguments.get("instruction_template")
        self.prompts_dict = arguments.get("prompts_dict")
        self._for_documents = arguments.get("apply_instruction_to_passages", True)
        if (priority := arguments.get("prompt_priority")) is not None:
            self.prompt_priority = [PromptSource.from_str(source) for source in priority]

    def prompt(self, task: TaskMetadata, prompt_type: PromptType | None) -> str:
        """Returns what is put before the texts of a task; "" for documents where the model takes no instruction."""
        if prompt_type == PromptType.document and not self._for_documents:
            return ""
        return self.get_task_instruction(task, prompt_type)

    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not available: this class has prompts alone."""
        raise NotImplementedError("Instructions has no model to encode with")


def instructions_of(meta: ModelMeta) -> Instructions | None:
    """Returns the instructions of a model in MTEB's registry, or None if MTEB loads it in another way."""
    loader: Any = meta.loader
    return Instructions(meta.loader_kwargs) if loader is InstructSentenceTransformerModel else None


def loading_arguments(meta: ModelMeta) -> dict[str, Any]:
    """Returns the length, the dimensions and the tokenizer's settings of a model with instructions.

    They are named as `FairSentenceTransformer` takes them.
    """
    given = meta.loader_kwargs
    tokenizer = {name: given[name] for name in ("add_eos_token", "padding_side") if given.get(name)}
    arguments: dict[str, Any] = {}
    if tokenizer:
        arguments["tokenizer_kwargs"] = {**given.get("tokenizer_kwargs", {}), **tokenizer}
    if given.get("max_seq_length") is not None:
        arguments["max_seq_length"] = given["max_seq_length"]
    if given.get("embed_dim") is not None:
        arguments["truncate_dim"] = given["embed_dim"]
    return arguments
