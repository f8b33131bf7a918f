"""`calibrate` a loaded SentenceTransformer, and `uncalibrate` it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from itertools import chain
from typing import Any, TypeVar, cast

from sentence_transformers import SentenceTransformer
from torch import nn

from fair_calibration.adoption import adopt, find_transformer, why_unsupported
from fair_calibration.config import FairConfig
from fair_calibration.document_transformer import DocumentTransformer
from fair_calibration.method.calibrated_pass import KernelName
from fair_calibration.sentence_transformer import FairSentenceTransformer
from fair_calibration.settings import Settings, choose_settings

ModelT = TypeVar("ModelT", bound=SentenceTransformer)


def calibrate(
    model: SentenceTransformer,
    config: Settings | str | None = None,
    *,
    pooled_row_only: bool | None = None,
    kernel: KernelName | None = None,
    max_seq_length: int | None = None,
) -> FairSentenceTransformer:
    """Returns a calibrated model that shares the given model's weights; the given one stays plain and usable.

    Args:
        model: A SentenceTransformer whose first module is a transformer, also inside a Router: the one that documents
            pass through is calibrated. A calibrated model is given the new settings.
        config: A `FairConfig`, an `EvenChunks` or the name of a preset; None means the settings that the model was
            calibrated with before, or else the defaults.
        pooled_row_only: Whether to leave out the part of the last layer that cls and last-token pooling do not read:
            its attention and linear layers for all rows but the pooled one. Vectors are the same up to rounding, and
            there are no token embeddings. A short text is encoded first to check that the model allows it. None means
            the value that the model was calibrated with before, or else False.
        kernel: What computes the calibrated rows: "torch", which runs everywhere, or "triton", a kernel for CUDA
            devices (docs/gpu.md) that has not been run on a GPU yet. A short text is encoded first with both, to check
            that they agree. What "triton" cannot compute is refused, and so are gradients. None means the value that
            the model was calibrated with before, or else "torch".
        max_seq_length: The number of tokens at which documents are truncated; None means that of the given model, whose
            own length stays as it is.

    Returns:
        A FairSentenceTransformer with the same prompts, modules, similarity and dimensions. Weights are shared, so that
        casting or moving one model casts or moves both; settings such as ``max_seq_length`` are not.

    Raises:
        TypeError: ``model`` is not a SentenceTransformer, ``config`` is not one of the above, or the first module that
            documents pass through is not a transformer.
        ValueError: The model cannot be calibrated, or not with these settings, or it has fewer positions than
            ``max_seq_length``.
    """
    if type(model) not in (SentenceTransformer, FairSentenceTransformer):
        raise TypeError(
            f"model: expected a SentenceTransformer, got {type(model).__name__}"
            + (
                why_unsupported(*(cls.__name__ for cls in type(model).__mro__))
                or "; load names and paths with FairSentenceTransformer(name, config=...)"
            )
        )
    modules = _share_modules(model)
    transformer = find_transformer(modules.values())
    default: Settings = FairConfig()
    if isinstance(transformer, DocumentTransformer):
        default = transformer.fair_config
        pooled_row_only = transformer.is_pooled_row_only if pooled_row_only is None else pooled_row_only
        kernel = transformer.kernel if kernel is None else kernel
    module = adopt(transformer, choose_settings(config, default=default), max_seq_length=max_seq_length)
    calibrated = _assemble(FairSentenceTransformer, model, modules)
    module.look_up(calibrated)
    if kernel is not None:
        module.use_kernel(kernel, calibrated)
    if pooled_row_only:
        module.use_pooled_row_only(calibrated)
    return calibrated


def uncalibrate(model: FairSentenceTransformer) -> SentenceTransformer:
    """Returns the plain model again, sharing the weights of the calibrated one, which stays as it is.

    Raises:
        TypeError: ``model`` is not calibrated.
    """
    if not isinstance(model, FairSentenceTransformer):
        raise TypeError(f"model: expected a FairSentenceTransformer, got {type(model).__name__}")
    modules = _share_modules(model)
    cast(DocumentTransformer, find_transformer(modules.values())).release()
    return _assemble(SentenceTransformer, model, modules)


def _share_modules(model: SentenceTransformer) -> OrderedDict[str, nn.Module]:
    """Returns copies of a model's modules that share its weights, so that two models take the memory of one."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    for module in model.modules():
        # The dicts are shared as well: casting or moving a model puts new tensors into them, which both must see.
        for shared in (module._parameters, module._buffers):
            memo[id(shared)] = shared
    return OrderedDict((name, copy.deepcopy(module, memo)) for name, module in model.named_children())


def _assemble(cls: type[ModelT], model: SentenceTransformer, modules: OrderedDict[str, nn.Module]) -> ModelT:
    new = cls(
        modules=modules,  # type: ignore[arg-type]
        device=str(model.device),
        prompts=cast(dict[str, str], dict(model.prompts)),
        default_prompt_name=model.default_prompt_name,
        trust_remote_code=model.trust_remote_code,
        model_card_data=copy.copy(model.model_card_data),
        similarity_fn_name=model.similarity_fn_name,
        truncate_dim=model.truncate_dim,
    )
    new.prompts = dict(model.prompts)  # without the empty defaults that a new model gets
    new.module_kwargs = copy.deepcopy(model.module_kwargs)
    new._model_card_text = model._model_card_text
    return new
