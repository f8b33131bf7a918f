"""``python -m fair_indexing``: encodes a collection into shards, says how far it is, makes an index of them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sentence_transformers import SentenceTransformer

from fair_calibration import FairConfig, FairSentenceTransformer
from fair_calibration.validation import validate_positive_int
from fair_indexing.assemble import FORMATS
from fair_indexing.build import SHARD_SIZE, build
from fair_indexing.pool import check_devices
from fair_indexing.ray_data import build_on_ray
from fair_indexing.shards import IncompleteBuildError, ShardFolder

_SHOWN = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 for a build that is not complete or damaged, 2 for an error."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    parser = build_parser()
    args = parser.parse_args(arguments)
    try:
        status: int = args.run(args)
    except (ImportError, MemoryError, OSError, TypeError, ValueError) as error:
        lines = [str(error), *getattr(error, "__notes__", ())]
        parser.exit(2, f"fair_indexing: error: {' '.join(' '.join(lines).split())}\n")
    return status


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m fair_indexing",
        description="Encodes large collections with calibrated attention; a run that ended early is gone on with.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser("build", help="encode a collection into the shards of a folder, or go on with it")
    command.add_argument("model", help="a sentence-transformers name or folder, plain or calibrated")
    command.add_argument("source", help="a file of JSON lines or Parquet, or a folder of such files")
    command.add_argument("folder", help="of the build")
    command.add_argument("--strength", type=float, help="of the calibration (default: the model's own, or 0.5)")
    command.add_argument("--config", help="all settings of the calibration as JSON, as FairConfig.to_json writes them")
    command.add_argument("--plain", action="store_true", help="no calibration")
    command.add_argument("--max-seq-length", type=int, help="tokens at which documents are truncated")
    command.add_argument("--docno-field", default="docno", help="the column of the docnos (default: docno)")
    command.add_argument("--text-field", default="text", help="the column of the texts (default: text)")
    command.add_argument(
        "--shard-size", type=int, default=SHARD_SIZE, help=f"documents per shard (default: {SHARD_SIZE})"
    )
    command.add_argument("--tokens-per-batch", type=int, help="the most tokens of a forward pass")
    command.add_argument("--device", help="where to run (default: a GPU if there is one)")
    command.add_argument("--devices", nargs="+", help="several, with a process each, such as cuda:0 cuda:1")
    command.add_argument("--ray", type=int, metavar="N", help="with N workers of Ray; RAY_ADDRESS is that of a cluster")
    command.add_argument("--cpus-per-worker", type=float, default=1, help="of Ray (default: 1)")
    command.add_argument("--gpus-per-worker", type=float, default=0, help="of Ray (default: 0)")
    command.add_argument("--no-resume", action="store_true", help="refuse a folder that holds a build")
    command.add_argument("--quiet", action="store_true", help="no progress bar")
    command.set_defaults(run=_build)

    command = commands.add_parser("status", help="how far a build is, and what it is of")
    command.add_argument("folder", help="of the build")
    command.add_argument("--verify", action="store_true", help="read all shards and compare their checksums")
    command.set_defaults(run=_status)

    command = commands.add_parser("assemble", help="make one index of a complete build")
    command.add_argument("folder", help="of the build")
    outputs = command.add_mutually_exclusive_group(required=True)
    outputs.add_argument("--flex", type=Path, help="a new folder, for pyterrier_dr.FlexIndex")
    outputs.add_argument("--npy", type=Path, help="a new folder, of vectors.npy and docnos.jsonl")
    outputs.add_argument("--parquet", type=Path, help="a new folder, of vectors.parquet")
    command.set_defaults(run=_assemble)
    return parser


def _load_model(args: argparse.Namespace) -> SentenceTransformer:
    if args.device is not None:
        check_devices([args.device], name="--device")
    if args.plain:
        model = SentenceTransformer(args.model, device=args.device)
    else:
        model = FairSentenceTransformer(args.model, config=args.config, device=args.device)
    if args.max_seq_length is not None:
        model.max_seq_length = args.max_seq_length
    return model


def _read_config(text: str) -> FairConfig:
    try:
        return FairConfig.from_json(text)
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"--config: expected what FairConfig.to_json writes, got {text[:_SHOWN]!r} ({error})"
        ) from error


def _build(args: argparse.Namespace) -> int:
    if args.plain and (args.strength is not None or args.config is not None):
        raise ValueError("--plain: a plain model has no --strength and no --config")
    if args.config is not None:
        args.config = _read_config(args.config)
    if args.max_seq_length is not None:
        validate_positive_int("--max-seq-length", args.max_seq_length)
    if args.ray is not None and args.devices:
        raise ValueError("--devices: with --ray every worker has one device; give --gpus-per-worker 1")
    settings = {
        "strength": args.strength,
        "shard_size": args.shard_size,
        "resume": not args.no_resume,
        "docno_field": args.docno_field,
        "text_field": args.text_field,
        "model_name": args.model,
        "tokens_per_batch": args.tokens_per_batch,
        "show_progress_bar": not args.quiet,
    }
    if args.ray is not None:
        done = build_on_ray(
            partial(_load_model, args),
            args.source,
            args.folder,
            workers=args.ray,
            num_cpus=args.cpus_per_worker,
            num_gpus=args.gpus_per_worker,
            **settings,
        )
    else:
        done = build(_load_model(args), args.source, args.folder, devices=args.devices, **settings)
    n = done.completion
    print(f"{n.documents} vectors of {n.dimension} dimensions in {args.folder}, {done.encoded} encoded now")
    return 0


def _status(args: argparse.Namespace) -> int:
    shards = ShardFolder(args.folder)
    damaged: list[str] = []
    if args.verify:
        whole, damaged = shards.verify()
        entries = list(whole.values())
    else:
        entries = list(shards.entries())
    encoder = shards.manifest.encoder
    print(f"model: {encoder.model} (weights {encoder.weights})")
    print(
        "calibration: "
        + ("none" if encoder.fair_config is None else FairConfig.from_dict(encoder.fair_config).to_json())
    )
    total = shards.manifest.source.get("documents")
    n = sum(entry.count for entry in entries)
    print(f"documents: {n}{f' of {total}' if total is not None else ''} in {len(entries)} shards")
    for line in damaged:
        print(f"damaged: {line}")
    try:
        shards.completion()
    except IncompleteBuildError:
        print("not complete: run the build again to go on with it")
        return 1
    print("damaged: run the build again to encode anew what is" if damaged else "complete")
    return 1 if damaged else 0


def _assemble(args: argparse.Namespace) -> int:
    name, out = next((name, out) for name in FORMATS if (out := getattr(args, name)) is not None)
    print(f"{FORMATS[name](args.folder, out)} is complete")
    return 0
