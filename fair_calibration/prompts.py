"""Which prompt a SentenceTransformer puts before the texts given to ``encode_document`` and ``encode_query``."""

from __future__ import annotations

from sentence_transformers import SentenceTransformer


def document_prompt(model: SentenceTransformer) -> str:
    """Returns the prompt that ``model.encode_document`` puts before every text, "" where there is none."""
    return _prompt(model, "document", "passage", "corpus")


def query_prompt(model: SentenceTransformer) -> str:
    """Returns the prompt that ``model.encode_query`` puts before every text, "" where there is none."""
    return _prompt(model, "query")


def _prompt(model: SentenceTransformer, *names: str) -> str:
    name = next((name for name in names if name in model.prompts), model.default_prompt_name)
    return (model.prompts.get(name) if name is not None else None) or ""
