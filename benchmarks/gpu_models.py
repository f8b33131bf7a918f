"""Whole models: plain against calibrated forward passes over tokenized batches, with random weights."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from gpu_run import Run
from paired import paired_ratios
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from fair_calibration import FairConfig, calibrate

POOLINGS = {"cls": "cls", "last": "lasttoken", "mean": "mean"}
VOCABULARY = 1000
BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 1}
SLOW = 0.3  # seconds of a forward pass from which on three pairs have to do


def time_models(run: Run, kernels: Sequence[str], dtype: str) -> None:
    """Times plain against calibrated forward passes in one dtype, on top of sdpa and, in half precision, flash."""
    args = run.args
    with tempfile.TemporaryDirectory() as folder:
        _save_model(folder, TINY if args.tiny else BASE, max(args.lengths))
        for attention in ("sdpa", "flash_attention_2") if dtype != "float32" else ("sdpa",):
            for pooling in POOLINGS:
                try:
                    model = _load_model(run, folder, dtype, attention, pooling)
                except Exception as error:  # whatever transformers raises where flash attention is missing
                    if attention == "sdpa":
                        raise
                    run.skipped.append(f"{attention} {dtype}: {str(error).strip()[:150]}")
                    break
                for length in args.lengths:
                    case = {"attention": attention, "dtype": dtype, "pooling": pooling, "tokens": length}
                    try:
                        _time_model(run, model, kernels, case)
                    except torch.OutOfMemoryError as error:
                        run.skipped.append(f"{' '.join(map(str, case.values()))}: {str(error)[:150]}")


def _time_model(run: Run, plain: SentenceTransformer, kernels: Sequence[str], case: dict[str, Any]) -> None:
    config = FairConfig(basket_size=8 if run.args.tiny else 128)
    what = " ".join(map(str, case.values()))
    if not run.has_time(what):
        return
    models = {kernel: calibrate(plain, config, kernel=kernel) for kernel in kernels}  # type: ignore[arg-type]
    # Flash attention runs without padding, where pooled rows alone are not available.
    if case["pooling"] != "mean" and case["attention"] == "sdpa":
        models["torch, pooled_row_only"] = calibrate(plain, config, kernel="torch", pooled_row_only=True)
    n_documents = max(1, run.args.batch_tokens // case["tokens"])
    features = _features(run, plain, n_documents, case["tokens"])
    plain_peak = run.peak_mib(lambda: plain(dict(features)))
    for name, model in models.items():
        if not run.has_time(f"{what} {name}"):
            return
        times: dict[str, list[float]] = {"plain": [], "fair": []}
        pair = [("plain", plain), ("fair", model)]
        for i in range(-1, run.args.pairs):  # the first pair warms up
            if i >= 2 and times["plain"][0] > SLOW:
                break
            for which, either in pair if i % 2 else pair[::-1]:
                seconds = run.seconds(lambda either=either: either(dict(features)))
                if i >= 0:
                    times[which].append(seconds)
        ratio, quartiles = paired_ratios(times["plain"], times["fair"])
        run.report(
            part="speed", **case, documents=n_documents, kernel=name, ratio=ratio, quartiles=quartiles,
            plain_ms=1000 * statistics.median(times["plain"]), plain_peak_mib=plain_peak,
            extra_peak_mib=run.peak_mib(lambda model=model: model(dict(features))) - plain_peak,
        )  # fmt: skip


def _features(run: Run, model: SentenceTransformer, n_documents: int, length: int) -> dict[str, Any]:
    """Returns a tokenized batch of documents of equal length, without padding if the model runs so."""
    words = torch.randint(3, VOCABULARY, (n_documents, length), generator=torch.Generator().manual_seed(length))
    transformer: Any = model[0]
    features: dict[str, Any] = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    if transformer.can_flatten_inputs:
        features = dict(transformer.data_collator([{"input_ids": row} for row in words.tolist()]))
        features.pop("labels", None)
    return {k: v.to(run.device) if isinstance(v, Tensor) else v for k, v in features.items()} | {"modality": "text"}


def _save_model(folder: str, shape: dict[str, int], length: int) -> None:
    """Writes a BERT with as many positions, and a tokenizer of numbered words."""
    torch.manual_seed(0)
    config = BertConfig(**shape, vocab_size=VOCABULARY, max_position_embeddings=length, pad_token_id=0)
    BertModel(config).save_pretrained(folder)
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = Whitespace()
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "w3"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **names).save_pretrained(folder)


def _load_model(run: Run, folder: str, dtype: str, attention: str, pooling: str) -> SentenceTransformer:
    model_kwargs: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if attention != "sdpa":
        model_kwargs["device_map"] = run.args.device  # flash attention is refused while a model is on the CPU
    transformer = Transformer(folder, model_kwargs=model_kwargs)
    pool = Pooling(transformer.model.config.hidden_size, pooling_mode=POOLINGS[pooling])
    return SentenceTransformer(modules=[transformer, pool], device=run.args.device)  # type: ignore[arg-type]
