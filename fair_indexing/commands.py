"""The commands that encode collections and assemble indexes (`fair_calibration.commands`)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fair_calibration.commands import PROGRAM, Command, positive_int, strength

_RESUME = "the same build command resumes it"


def add_build(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``build``."""
    parser.add_argument("model", help="a sentence-transformers name or folder, plain or calibrated")
    parser.add_argument("source", help="a file of JSON lines or Parquet, or a folder of such files")
    parser.add_argument("folder", help="the output folder: new, empty, or holding an interrupted build")
    parser.add_argument(
        "--strength", type=strength, help="strength of the calibration (default: the model's own, or 0.5)"
    )
    parser.add_argument(
        "--config", help="settings of the calibration: the name of a preset, or JSON as FairConfig.to_json writes it"
    )
    parser.add_argument("--plain", action="store_true", help="encode without calibration")
    parser.add_argument("--max-seq-length", type=positive_int, help="tokens at which documents are truncated")
    parser.add_argument("--docno-field", default="docno", help="the column of the docnos (default: docno)")
    parser.add_argument("--text-field", default="text", help="the column of the texts (default: text)")
    parser.add_argument(
        "--shard-size",
        type=positive_int,
        help="documents per shard (default: that of the build in the folder, or 4096 for a new one)",
    )
    parser.add_argument("--tokens-per-batch", type=positive_int, help="the most tokens of a forward pass")
    parser.add_argument("--device", help="where to encode (default: a GPU if there is one)")
    parser.add_argument("--devices", nargs="+", help="several devices, each with its own process: cuda:0 cuda:1")
    parser.add_argument(
        "--part",
        type=_part,
        metavar="I/N",
        help="encode only part I of N, from 0/N on, beside other processes; a last call without --part completes the "
        "build",
    )
    parser.add_argument(
        "--ray",
        type=positive_int,
        metavar="N",
        help="encode with N workers of Ray; RAY_ADDRESS is the address of a cluster",
    )
    parser.add_argument("--cpus-per-worker", type=float, default=1, help="CPUs of each Ray worker (default: 1)")
    parser.add_argument("--gpus-per-worker", type=float, default=0, help="GPUs of each Ray worker (default: 0)")
    parser.add_argument("--no-resume", action="store_true", help="refuse a folder that holds a build")
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")


def run_build(args: argparse.Namespace) -> None:
    """Encodes a collection into the shards of a folder, or resumes an interrupted build."""
    if args.plain and (args.strength is not None or args.config is not None):
        raise ValueError("--plain: a plain model has no --strength and no --config")
    if args.ray is not None and args.devices:
        raise ValueError("--devices: with --ray every worker has one device; give --gpus-per-worker 1")
    if args.ray is not None and args.part is not None:
        raise ValueError("--part: --ray divides the build into parts itself; leave --part out")
    from fair_calibration.loading import load_calibrated, load_plain
    from fair_calibration.model_source import find_model
    from fair_indexing.builder import build
    from fair_indexing.pool import check_devices
    from fair_indexing.records import open_source
    from fair_indexing.shards import ShardFolder

    open_source(args.source, docno_field=args.docno_field, text_field=args.text_field).started()  # before loading
    if (folder := Path(args.folder)).exists() and not ShardFolder.exists(folder):
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else [folder.name]
        if any(not name.startswith(".") for name in names):
            raise ValueError(f"folder: expected a new or an empty folder, or one with a build, got {args.folder!r}")
    if args.ray is not None:
        find_model(args.model)  # else only the workers, which load it, would find out
    if args.device is not None:
        check_devices([args.device], name="--device")
    if args.devices:
        check_devices(args.devices, name="--devices")
    options = {"max_seq_length": args.max_seq_length, "device": args.device}
    load_model: Callable[[], Any]
    if args.plain:
        load_model = partial(load_plain, args.model, **options)
    else:
        load_model = partial(load_calibrated, args.model, config=args.config, strength=args.strength, **options)
    settings = {
        "shard_size": args.shard_size,
        "resume": not args.no_resume,
        "docno_field": args.docno_field,
        "text_field": args.text_field,
        "model_name": args.model,
        "tokens_per_batch": args.tokens_per_batch,
        "show_progress_bar": not args.quiet,
    }
    if args.ray is None:
        model = load_model()
        done = build(model, args.source, args.folder, part=args.part, devices=args.devices, **settings)
        if n_truncated := getattr(getattr(model, "counts", None), "truncated", 0):
            print(
                f"{n_truncated} documents were truncated at {model.max_seq_length} tokens, and what is cut off cannot "
                "be found; --max-seq-length raises the limit if the model can read more"
            )
    else:
        from fair_indexing.ray_build import build_on_ray

        done = build_on_ray(
            load_model,
            args.source,
            args.folder,
            workers=args.ray,
            num_cpus=args.cpus_per_worker,
            num_gpus=args.gpus_per_worker,
            **settings,
        )
    if (n := done.completion) is None:
        print(f"{done.encoded} vectors encoded now in part {args.part[0]} of {args.part[1]} of {args.folder}")
        print("Next: after all parts, the same command without --part completes the build.")
    else:
        print(f"{n.documents} vectors of {n.dimension} dimensions in {args.folder}, {done.encoded} of them encoded now")
        print(f"Next: {PROGRAM} assemble {args.folder} --flex INDEX makes an index for PyTerrier (or --npy).")


def _part(text: str) -> tuple[int, int]:
    i, slash, n = text.partition("/")
    if not (slash and i.isdecimal() and n.isdecimal() and int(i) < int(n)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 0 to N - 1, such as 0/4, got {text!r}")
    return int(i), int(n)


def add_status(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``status``."""
    parser.add_argument("folder", help="the folder of a build, or of an assembled index")
    parser.add_argument("--verify", action="store_true", help="read all files and compare their checksums")


def run_status(args: argparse.Namespace) -> int:
    """Prints how many documents a build or an index holds and what made them; returns 1 if it is not complete."""
    from fair_indexing.check import RECORD

    if (Path(args.folder) / RECORD).exists():
        return _index_status(args)
    return _build_status(args)


def _index_status(args: argparse.Namespace) -> int:
    from fair_indexing.assemble import read_manifest
    from fair_indexing.check import check_index

    check_index(args.folder, full=args.verify)
    manifest = read_manifest(args.folder)
    _print_encoder(manifest.encoder)
    print(f"documents: {manifest.source.get('documents')} in an assembled index")
    print(
        "verified: every byte is as it was written" if args.verify else "complete; --verify compares every byte as well"
    )
    return 0


def _build_status(args: argparse.Namespace) -> int:
    from fair_indexing.checkpoints import count_checkpointed
    from fair_indexing.shards import IncompleteBuildError, ShardFolder

    if not Path(args.folder).is_dir():
        raise ValueError(f"folder: there is no folder {args.folder!r}")
    shards = ShardFolder(args.folder)
    damaged: list[str] = []
    if args.verify:
        whole, damaged = shards.verify()
        entries = list(whole.values())
    else:
        entries = list(shards.entries())
    total = shards.manifest.source.get("documents")
    n = sum(entry.count for entry in entries)
    _print_encoder(shards.manifest.encoder)
    n_shards = len(entries) if total is None else f"{len(entries)} of {-(-total // shards.shard_size)}"
    print(f"documents: {n}{'' if total is None else f' of {total}'} in {n_shards} shards of {shards.shard_size}")
    if unfinished := count_checkpointed(shards.folder):
        print(f"unfinished shard: {unfinished} more documents are encoded")
    for line in damaged:
        print(f"damaged: {line}")
    try:
        shards.completion()
    except IncompleteBuildError:
        print(f"The build is not complete; {_RESUME}.")
        return 1
    if damaged:
        print(f"Documents of damaged shards are encoded again: {_RESUME}.")
        return 1
    print(f"complete\nNext: {PROGRAM} assemble {args.folder} --flex INDEX")
    return 0


def _print_encoder(encoder: Any) -> None:
    config = encoder.fair_config
    print(f"model: {encoder.model} (weights {encoder.weights})")
    print(f"settings: {'none, the plain model' if config is None else json.dumps(config)}")


def add_assemble(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``assemble``."""
    parser.add_argument("folder", help="the folder of a complete build")
    outputs = parser.add_mutually_exclusive_group(required=True)
    outputs.add_argument("--flex", type=Path, help="a new folder for pyterrier_dr.FlexIndex")
    outputs.add_argument("--npy", type=Path, help="a new folder with vectors.npy and docnos.jsonl")


def run_assemble(args: argparse.Namespace) -> None:
    """Assembles the shards of a complete build into one index."""
    from fair_indexing.assemble import assemble_flex, assemble_npy

    if not Path(args.folder).is_dir():
        raise ValueError(f"folder: there is no folder {args.folder!r}")
    if args.flex is not None:
        out = assemble_flex(args.folder, args.flex)
        opened = f"pyterrier_fair.FairIndex({str(out)!r}, FairBiEncoder(MODEL)).retriever() searches it"
    else:
        out = assemble_npy(args.folder, args.npy)
        opened = f"numpy.load({str(out / 'vectors.npy')!r}, mmap_mode='r') opens the vectors"
    print(f"{out} is complete; {args.folder} is no longer needed\nNext: {opened}.")


COMMANDS = (
    Command(
        "build",
        "encode a collection into the shards of a folder, or resume an interrupted build",
        "indexing",
        add_build,
        run_build,
    ),
    Command("status", "how far a build is, or whether an index is undamaged", "indexing", add_status, run_status),
    Command("assemble", "make one index of a complete build", "indexing", add_assemble, run_assemble),
)
