"""Encodes large collections: batches by tokens, builds that can be resumed, several GPUs, machines and Ray clusters."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fair_indexing.assemble import assemble_flex, assemble_npy
    from fair_indexing.builder import Build, build
    from fair_indexing.check import check_index
    from fair_indexing.encode import encode_texts
    from fair_indexing.ray_build import build_on_ray
    from fair_indexing.shards import ShardFolder
    from fair_indexing.stream import EncodedWindow, encode_stream

__all__ = [
    "Build",
    "EncodedWindow",
    "ShardFolder",
    "assemble_flex",
    "assemble_npy",
    "build",
    "build_on_ray",
    "check_index",
    "encode_stream",
    "encode_texts",
]

# The command line imports this package also where its extra is not installed, so names are imported when used.
_MODULES = {
    "Build": "builder",
    "EncodedWindow": "stream",
    "ShardFolder": "shards",
    "assemble_flex": "assemble",
    "assemble_npy": "assemble",
    "build": "builder",
    "build_on_ray": "ray_build",
    "check_index": "check",
    "encode_stream": "stream",
    "encode_texts": "encode",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
