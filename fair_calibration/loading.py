"""Loads a plain or a calibrated model with the arguments of a command line."""

from __future__ import annotations

from pathlib import Path

from sentence_transformers import SentenceTransformer

from fair_calibration.limits import position_limit, validate_max_seq_length
from fair_calibration.model import calibrate
from fair_calibration.model_source import find_model
from fair_calibration.routes import document_path
from fair_calibration.sentence_transformer import FairSentenceTransformer
from fair_calibration.settings import choose_settings, settings_from_text


def load_plain(name: str, *, max_seq_length: int | None = None, device: str | None = None) -> SentenceTransformer:
    """Loads a model as it was saved; one in a folder may be calibrated. The arguments are those of `load_calibrated`.

    Raises:
        ValueError: There is no such model, or it has fewer positions than ``max_seq_length``.
    """
    modules = Path(name, "modules.json")
    if modules.is_file() and '"fair_calibration.' in modules.read_text(encoding="utf-8"):
        return load_calibrated(name, max_seq_length=max_seq_length, device=device)
    model = SentenceTransformer(name, device=device, local_files_only=find_model(name))
    if max_seq_length is not None:
        model.max_seq_length = validate_max_seq_length(max_seq_length, model_position_limit(model))
    return model


def load_calibrated(
    name: str,
    *,
    config: str | None = None,
    strength: float | None = None,
    max_seq_length: int | None = None,
    device: str | None = None,
) -> FairSentenceTransformer:
    """Loads a model and calibrates it.

    Args:
        name: A folder or the name of a model on the hub.
        config: The name of a preset, or settings in JSON; None means the settings that the model was saved with, or
            else the defaults.
        strength: A strength that overrides that of the settings.
        max_seq_length: The number of tokens at which documents are truncated; None means the model's own.
        device: The device; None means a GPU if there is one.

    Raises:
        ValueError: There is no such model, it cannot be calibrated with these settings, or it has fewer positions than
            ``max_seq_length``.
    """
    settings = None if config is None else settings_from_text(config)
    fair = FairSentenceTransformer(name, config=settings, max_seq_length=max_seq_length, device=device)
    if strength is not None:
        own = fair.fair_config
        fair = calibrate(fair, choose_settings(own, {"strength": strength}, default=own))
    fair.fair.counter.mute()  # its warning names Python attributes, but commands have an option --max-seq-length
    return fair


def model_position_limit(model: SentenceTransformer) -> int | None:
    """Returns the number of tokens for which a model has positions (`position_limit`), or None for no limit."""
    network = getattr(document_path(model)[0], "model", None)
    return None if network is None else position_limit(network)
