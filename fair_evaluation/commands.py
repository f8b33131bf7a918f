"""The commands of this package (`fair_calibration.commands`), with those that build test data and evaluate scores.

Each command prints a table or a few lines, and ends with what to do next.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from fair_calibration.commands import PROGRAM, Command, integer_from, positive_int
from fair_evaluation.command_arguments import EMBEDDED, add_model_and_texts, input_file, output_file, read_texts
from fair_evaluation.model_commands import (
    add_attention,
    add_reflection,
    add_tune,
    add_underflow,
    run_attention,
    run_reflection,
    run_truncation,
    run_tune,
    run_underflow,
)


def add_probes(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``probes``."""
    parser.add_argument("model", help="the model whose tokenizer counts: a name or a folder")
    parser.add_argument(
        "passages",
        type=input_file,
        help="JSON lines with the field 'text', or a .txt file with one passage per line; one sentence of each becomes "
        f"its question. '{EMBEDDED}' stands for the passages of the package",
    )
    parser.add_argument("output", type=output_file, help="the file of JSON lines to write, one document per line")
    parser.add_argument(
        "--questions", action="store_true", help="the passages have questions, in the format of load_passages"
    )
    parser.add_argument("--length", type=positive_int, default=510, help="tokens per document (default: 510)")
    parser.add_argument("--places", type=integer_from(2), default=3, help="places per document (default: 3)")
    parser.add_argument("--seed", type=integer_from(0), default=0, help="seed of the drawing (default: 0)")


def run_probes(args: argparse.Namespace) -> None:
    """Writes documents in which each passage stands once at every place."""
    from fair_calibration.loading import load_plain
    from fair_evaluation.position_collections import Passage, load_passages
    from fair_evaluation.probes import build_probes
    from fair_evaluation.sentences import hold_out_sentences

    if args.questions or args.passages == EMBEDDED:
        passages = load_passages(None if args.passages == EMBEDDED else args.passages)
    else:
        named = ((f"p{number}", text) for number, text in enumerate(read_texts(args.passages)))
        plain = (Passage(article=name, passage_id=name, text=text, questions=()) for name, text in named)
        passages = list(hold_out_sentences(plain))
    collections = build_probes(
        passages, length=args.length, places=args.places, tokenizer=load_plain(args.model), seed=args.seed
    )
    lines = []
    for rotation, collection in enumerate(collections):
        queries = defaultdict(list)
        for query in collection.queries:
            queries[query.docno].append(asdict(query))
        for document in collection.documents:
            line = {"rotation": rotation, **document, "queries": queries[document["docno"]]}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    args.output.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(
        f"{len(lines)} documents in {args.output}, {len(collections[0].documents)} in each of {args.places} rotations"
    )
    print(
        "Next: index the documents of every rotation by themselves, search them with their own queries, and evaluate "
        "all rotations together with from_run(..., position='place', unit='question')."
    )


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``evaluate``."""
    parser.add_argument(
        "scores",
        type=input_file,
        help="a CSV file with the columns qid, score and position, or place: a group, or a number from 0 to 1",
    )
    parser.add_argument("--against", type=input_file, help="such a file of a second system, whose PSI is compared")
    parser.add_argument("--length-column", help="the column of document lengths, to evaluate by length as well")
    parser.add_argument("--order", nargs="+", help="all groups, from the beginning of documents to the end")
    parser.add_argument("--json", type=output_file, help="a file to write the results to")


def run_evaluate(args: argparse.Namespace) -> None:
    """Prints scores by position with intervals, and tests the difference in PSI of two systems."""
    import pandas as pd

    from fair_evaluation import evaluate_positions, psi_test

    results = []
    for path in [args.scores, *([args.against] if args.against else [])]:
        try:
            rows = pd.read_csv(path, dtype={"qid": str})
            results.append(evaluate_positions(rows, length=args.length_column, order=args.order, name=Path(path).stem))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        print(results[-1])
    if args.against:
        print(psi_test(*results))
    if args.json is not None:
        args.json.write_text(json.dumps([result.to_dict() for result in results], indent=1), encoding="utf-8")
        print(f"Results: {args.json}")
    if not args.against:
        print(f"Next: {PROGRAM} evaluate {args.scores} --against OTHER.csv tests the difference to another system.")


COMMANDS = tuple(
    Command(name, text, "evaluation", add_arguments, run)
    for name, text, add_arguments, run in (
        ("truncation", "how many documents are longer than the model reads", add_model_and_texts, run_truncation),
        (
            "attention",
            "how much attention each part of the documents gets, before and after calibration",
            add_attention,
            run_attention,
        ),
        (
            "reflection",
            "how similar document vectors are to those of their own segments, by position",
            add_reflection,
            run_reflection,
        ),
        ("tune", "choose the strength on documents alone, without labels", add_tune, run_tune),
        ("underflow", "which attention weights are exactly 0, by layer and head", add_underflow, run_underflow),
        (
            "probes",
            "write documents in which each passage stands once at every place, as JSON lines",
            add_probes,
            run_probes,
        ),
        ("evaluate", "scores by position with intervals, from a table of scores", add_evaluate, run_evaluate),
    )
)
