"""Encodes a large collection on a Ray cluster and makes a FlexIndex of it.

Every node needs the same Python and packages, ``pip install 'fair-calibration[ray]'``, and sees SOURCE, FOLDER and a
local MODEL under the same paths, on a file system that they share such as NFS. A model by its Hugging Face name is
downloaded by every node: pin it with --revision. The node that assembles the index needs pyterrier-dr, too.

    ray start --head                                  # on the first node
    ray start --address=FIRST:6379                    # on each of the others
    ray job submit --address http://FIRST:8265 --working-dir examples -- \
        python ray_cluster.py BAAI/bge-m3 /shared/corpus /shared/build --workers 8 --gpus 1 --flex /shared/index.flex

Run it again after an interruption: it resumes with the shards that are missing. Without a cluster, on this machine:

    python examples/ray_cluster.py MODEL corpus.jsonl build --address local --workers 2
"""

from __future__ import annotations

import argparse
import logging
from functools import partial
from pathlib import Path

import ray

from fair_calibration import FairConfig, FairSentenceTransformer
from fair_indexing import assemble_flex, build_on_ray


def main() -> None:
    """Encodes the collection, and assembles the index."""
    args = parse_arguments()
    ray.init(address=args.address)
    done = build_on_ray(
        partial(
            load_model,
            args.model,
            FairConfig(strength=args.strength),
            revision=args.revision,
            max_seq_length=args.max_seq_length,
        ),
        args.source,
        args.folder,
        workers=args.workers,
        num_cpus=args.cpus,
        num_gpus=args.gpus,
        shard_size=args.shard_size,
        docno_field=args.docno_field,
        text_field=args.text_field,
    )
    print(f"{done.completion.documents} vectors in {args.folder}, {done.encoded} encoded now")
    if args.flex:
        print(f"{assemble_flex(done.shards, args.flex)} is complete")


def load_model(
    model: str, config: FairConfig, *, revision: str | None, max_seq_length: int | None
) -> FairSentenceTransformer:
    """Loads the model, in each worker once: on its GPU, or on the CPU if workers have none."""
    fair = FairSentenceTransformer(model, config=config, revision=revision)
    if max_seq_length is not None:
        fair.max_seq_length = max_seq_length
    return fair


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a sentence-transformers name, or a folder that all nodes see")
    parser.add_argument("source", help="a file of JSON lines or Parquet, or a folder of such files, that all nodes see")
    parser.add_argument("folder", help="the output folder, which all nodes see")
    parser.add_argument("--address", default="auto", help="address of the cluster (default: that of this node)")
    parser.add_argument("--workers", type=int, default=2, help="number of workers (default: 2)")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of each worker (default: 1)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each worker, 1 on GPU nodes (default: 0)")
    parser.add_argument("--strength", type=float, default=0.5, help="strength of the calibration (default: 0.5)")
    parser.add_argument("--revision", help="revision of the model on the hub")
    parser.add_argument("--max-seq-length", type=int, help="tokens per document (default: the model's)")
    parser.add_argument("--shard-size", type=int, default=4096, help="documents per shard (default: 4096)")
    parser.add_argument("--docno-field", default="docno", help="the column of the docnos (default: docno)")
    parser.add_argument("--text-field", default="text", help="the column of the texts (default: text)")
    parser.add_argument("--flex", type=Path, help="a new folder for the FlexIndex")
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    main()
