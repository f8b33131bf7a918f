"""What the commands of this package share: their arguments, their documents, and what they print at the end."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from fair_calibration.commands import positive_int, strength
from fair_calibration.texts import check_texts

if TYPE_CHECKING:
    import pandas as pd
    from sentence_transformers import SentenceTransformer

    from fair_calibration import FairSentenceTransformer
    from fair_evaluation.truncation import TruncationSummary

EMBEDDED = "embedded"
"""Stands for the texts that come with the package, where a command takes a file of texts."""
PICTURES = (".jpg", ".pdf", ".png", ".svg")


def add_model_and_texts(parser: argparse.ArgumentParser, *, max_seq_length: bool = True) -> None:
    """Adds the arguments of a command that looks at a model and documents."""
    parser.add_argument("model", help="a sentence-transformers name or folder, plain or calibrated")
    parser.add_argument(
        "texts",
        nargs="?",
        type=input_file,
        default=EMBEDDED,
        help="a .txt file with one document per line, or JSON lines with the field 'text' (default: documents of three "
        "passages that come with the package)",
    )
    if max_seq_length:
        parser.add_argument("--max-seq-length", type=positive_int, help="tokens at which documents are truncated")
    parser.add_argument("--limit", type=positive_int, help="use only the first LIMIT documents")
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the settings of the calibration."""
    parser.add_argument(
        "--strength", type=strength, help="strength of the calibration (default: the model's own, or 0.5)"
    )
    parser.add_argument(
        "--config", help="settings of the calibration: the name of a preset, or JSON as FairConfig.to_json writes it"
    )


def add_outputs(parser: argparse.ArgumentParser, *, plot: bool = True) -> None:
    """Adds the files that a command writes."""
    parser.add_argument("--output", type=output_file, help="a CSV file to write the table to")
    if plot:
        parser.add_argument("--plot", type=picture_file, help="a picture to draw, such as plot.png")


def input_file(text: str) -> str:
    """Reads an argument that is a file, or the texts of the package."""
    if text != EMBEDDED and not Path(text).is_file():
        problem = "a folder" if Path(text).is_dir() else "no file"
        raise argparse.ArgumentTypeError(f"{problem} at {text!r}, expected a file")
    return text


def output_file(text: str) -> Path:
    """Reads an argument that is a file to be written, and checks that it can be before anything is encoded."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"there is no folder {str(path.parent)!r}"
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {problem}")
    return path


def picture_file(text: str) -> Path:
    """Reads an argument that is a picture to be drawn."""
    if Path(text).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"expected a name that ends in one of {', '.join(PICTURES)}, got {text!r}")
    return output_file(text)


def load_plain(args: argparse.Namespace) -> SentenceTransformer:
    """Loads the model without calibrating it, so that it may be of a kind that cannot be calibrated."""
    from fair_calibration import loading

    return loading.load_plain(args.model, max_seq_length=getattr(args, "max_seq_length", None))


def load_calibrated(args: argparse.Namespace) -> FairSentenceTransformer:
    """Loads the model with the calibration that the arguments ask for."""
    from fair_calibration import loading

    return loading.load_calibrated(
        args.model, config=args.config, strength=args.strength, max_seq_length=args.max_seq_length
    )


def open_texts(args: argparse.Namespace) -> Iterator[str]:
    """Yields the documents; what is wrong with the first one is reported at once."""
    texts = islice(read_texts(args.texts), args.limit)
    first = next(texts, None)
    if first is None:
        raise ValueError(f"texts: expected at least one document, {args.texts} has none")
    return chain([first], texts)


def read_texts(source: str) -> Iterator[str]:
    """Yields the texts of a .txt file or of JSON lines, or the documents that come with the package."""
    if source == EMBEDDED:
        from fair_evaluation.position_collections import build_collections, load_passages

        yield from (document["text"] for document in build_collections(load_passages())[0].documents)
        return
    with Path(source).open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{source}, line {number}"
            try:
                decoded = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: expected text in UTF-8 ({error})") from error
            if not decoded.strip():
                continue
            text: object = decoded.strip()
            if Path(source).suffix != ".txt":
                try:
                    record = json.loads(decoded)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{where}: expected a JSON object with the field 'text' ({error})") from error
                if not isinstance(record, dict) or "text" not in record:
                    raise ValueError(
                        f"{where}: expected a JSON object with the field 'text', got {decoded.strip()[:60]!r}"
                    )
                text = record["text"]
            if not isinstance(text, str):
                raise ValueError(f"{where}: expected a string in the field 'text', got {text!r}")
            check_texts([text], [where], named="at")
            yield text


def print_table(table: pd.DataFrame, args: argparse.Namespace) -> None:
    """Prints a table, and writes it to the file that the arguments name."""
    print(table.to_string(index=False, float_format="{:.3f}".format, na_rep="-"))
    if args.output is not None:
        table.to_csv(args.output, index=False)
        print(f"Table: {args.output}")


def remedy(model: SentenceTransformer, summary: TruncationSummary) -> str:
    """Returns what to do about documents that are longer than the model reads."""
    from fair_calibration.loading import model_position_limit

    limit = model_position_limit(model)
    if limit is None or limit > (summary.max_tokens or limit):
        return (
            f"the model reads {summary.max_tokens} tokens and could read more; give --max-seq-length "
            f"{limit or summary.longest} (max_seq_length in Python)."
        )
    return (
        f"the model has positions for {limit} tokens and the longest document has {summary.longest}; split long "
        "documents into passages, or take a model that reads longer ones."
    )
