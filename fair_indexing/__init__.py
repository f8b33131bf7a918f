"""Encodes large collections: batches by tokens, builds that can be resumed, several GPUs and Ray clusters."""

from fair_indexing.assemble import assemble_flex, assemble_npy, assemble_parquet
from fair_indexing.build import Build, build
from fair_indexing.check import check_index
from fair_indexing.encode import encode_texts
from fair_indexing.shards import ShardFolder
from fair_indexing.stream import EncodedWindow, encode_stream

__all__ = [
    "Build",
    "EncodedWindow",
    "ShardFolder",
    "assemble_flex",
    "assemble_npy",
    "assemble_parquet",
    "build",
    "check_index",
    "encode_stream",
    "encode_texts",
]
