"""Compares a source with the shards that were encoded from it, and finds those that are still to be encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tqdm import tqdm

from fair_indexing.files import digest_strings
from fair_indexing.records import Source, Window
from fair_indexing.shard import ShardEntry


class SourceChangedError(ValueError):
    """The source no longer holds the documents that were encoded from it."""


class PendingShards:
    """The shards of a source that are still to be encoded, in the order of the source.

    Attributes:
        documents: The number of documents read so far.
    """

    def __init__(
        self, source: Source, shard_size: int, existing: Mapping[int, ShardEntry], wanted: Callable[[int], bool]
    ) -> None:
        """Takes the source, the existing shards by their first document, and whether a shard is to be encoded."""
        self.source = source
        self.shard_size = shard_size
        self.existing = existing
        self.wanted = wanted
        self.documents = 0

    def __iter__(self) -> Iterator[Window]:
        """Reads the source once, and yields the documents of each shard that is wanted and does not exist.

        Raises:
            SourceChangedError: An existing shard was encoded from other documents than the source now holds.
            ValueError: A record cannot be indexed; it is named.
            TypeError: A docno or a text is not a string.
        """
        self.documents = 0
        for window in self.source.windows(self.shard_size):
            self.documents += len(window.docnos)
            entry = self.existing.get(window.start)
            if entry is None:
                if self.wanted(window.start):
                    yield window
            elif changed := _changed(entry, window):
                first, last = (self.source.locate(n) for n in (window.start, window.start + len(window.docnos) - 1))
                raise SourceChangedError(
                    f"source: {changed} from {first} to {last} are not those that were encoded before: the source has "
                    "changed. Use it as it was, or build into another folder"
                )
        if beyond := [start for start in self.existing if start >= self.documents]:
            raise SourceChangedError(
                f"source: {self.source.name} has {self.documents} documents, but those from number {min(beyond)} on "
                "were encoded before: the source has changed. Use it as it was, or build into another folder"
            )


def check_source(
    source: Source, shard_size: int, existing: Mapping[int, ShardEntry], *, show_progress_bar: bool = False
) -> int:
    """Reads all documents, compares them with the existing shards, and returns their number; errors as above."""
    pending = PendingShards(source, shard_size, existing, lambda _: True)
    with tqdm(total=source.documents, desc="Checking", unit="doc", disable=not show_progress_bar) as bar:
        for _ in pending:
            bar.update(pending.documents - bar.n)
    return pending.documents


def _changed(entry: ShardEntry, window: Window) -> str:
    if len(window.docnos) != entry.count:
        return f"the {len(window.docnos)} documents (there were {entry.count})"
    changes = {"docnos": (entry.docnos, window.docnos), "texts": (entry.texts, window.texts)}
    return " and ".join(name for name, (old, now) in changes.items() if digest_strings(now) != old)
