"""The prompts that ``encode_document`` and ``encode_query`` add before texts."""

from __future__ import annotations

from sentence_transformers import SentenceTransformer


def document_prompt(model: SentenceTransformer) -> str:
    """Returns the prompt that ``model.encode_document`` adds before every text, or ""."""
    return _prompt(model, "document", "passage", "corpus")


def query_prompt(model: SentenceTransformer) -> str:
    """Returns the prompt that ``model.encode_query`` adds before every text, or ""."""
    return _prompt(model, "query")


def _prompt(model: SentenceTransformer, *names: str) -> str:
    name = next((name for name in names if name in model.prompts), model.default_prompt_name)
    return (model.prompts.get(name) if name is not None else None) or ""
