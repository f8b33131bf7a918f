"""``python -m fair_calibration``: does a model favour the beginning of documents, on texts of your own?

The commands print a table; ``--output`` writes it as CSV, and ``--plot`` draws it.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    parser = build_parser()
    args = parser.parse_args(arguments)
    try:
        args.run(args)
    except (OSError, TypeError, ValueError) as error:
        parser.exit(2, f"fair_calibration: error: {' '.join(str(error).split())}\n")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m fair_calibration",
        description="Evaluation and diagnosis of dense encoders by position in the document.",
        epilog="Begin with: python -m fair_calibration reflection MODEL TEXTS --compare",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    truncation = commands.add_parser("truncation", help="how many documents lose how much at max_seq_length")
    _add_model_and_texts(truncation)
    truncation.set_defaults(run=_truncation)

    attention = commands.add_parser(
        "attention", help="how much attention each part of the documents gets, before and after calibration"
    )
    _add_model_and_texts(attention)
    _add_settings(attention)
    _add_output(attention)
    attention.set_defaults(run=_attention)

    reflection = commands.add_parser(
        "reflection", help="how similar document vectors are to those of their own segments, by position"
    )
    _add_model_and_texts(reflection)
    _add_settings(reflection)
    reflection.add_argument("--segments", type=int, default=4, help="segments per document (default: 4)")
    reflection.add_argument("--seed", type=int, default=0)
    _add_output(reflection)
    reflection.set_defaults(run=_reflection)

    tune = commands.add_parser("tune", help="choose the strength by your documents alone, without labels")
    _add_model_and_texts(tune)
    tune.add_argument("--strengths", type=float, nargs="+", default=[0.25, 0.5, 0.75, 1.0])
    tune.add_argument("--basket-sizes", type=int, nargs="+", help="to try as well")
    tune.add_argument("--max-texts", type=int, default=32, help="documents drawn (default: 32)")
    tune.add_argument("--seed", type=int, default=0)
    tune.set_defaults(run=_tune)

    underflow = commands.add_parser("underflow", help="which attention weights are exactly 0, by layer and head")
    _add_model_and_texts(underflow)
    underflow.add_argument("--lengths", type=int, nargs="+", default=[512], help="in tokens (default: 512)")
    underflow.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    _add_output(underflow, plot=False)
    underflow.set_defaults(run=_underflow)

    probes = commands.add_parser("probes", help="documents with each passage in each place, as JSON lines")
    probes.add_argument("model", help="whose tokenizer counts: a name or a folder")
    probes.add_argument("passages", help="JSON lines with the field 'text', or 'embedded'")
    probes.add_argument("output", help="the file to write")
    probes.add_argument(
        "--questions", help="the field of the questions; without, a sentence is taken out and asked for"
    )
    probes.add_argument("--title", help="the field of a title that is asked for")
    probes.add_argument("--article", help="the field that says which passages are of one article")
    probes.add_argument("--length", type=int, default=510, help="tokens of a document (default: 510)")
    probes.add_argument("--places", type=int, default=3, help="passages per document (default: 3)")
    probes.add_argument("--seed", type=int, default=0)
    probes.add_argument("--quiet", action="store_true", help="no progress bar")
    probes.set_defaults(run=_probes)

    evaluate = commands.add_parser("evaluate", help="scores by position with intervals, from a table of scores")
    evaluate.add_argument("scores", help="a CSV file with the columns qid, score and position (a group, or 0 to 1)")
    evaluate.add_argument("--against", help="the same of a second system: tests the difference in PSI")
    evaluate.add_argument("--length-column", help="the column of document lengths, for classes of length")
    evaluate.add_argument("--order", nargs="+", help="all groups, from the beginning of documents to the end")
    evaluate.add_argument("--json", type=Path, help="a file to write the result to")
    evaluate.set_defaults(run=_evaluate)
    return parser


def _add_model_and_texts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a sentence-transformers name or folder, plain or calibrated")
    parser.add_argument(
        "texts",
        nargs="?",
        default="embedded",
        help="a .txt file with one document a line, or JSON lines with the field 'text' (default: documents of three "
        "passages that come with the package)",
    )
    parser.add_argument("--max-seq-length", type=int, help="tokens at which documents are truncated")
    parser.add_argument("--limit", type=int, help="take the first so many documents")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strength", type=float, default=0.5, help="of the calibration (default: 0.5)")
    parser.add_argument("--config", help="all settings of the calibration as JSON, as FairConfig.to_json writes them")
    if parser.prog.endswith("reflection"):
        parser.add_argument("--compare", action="store_true", help="the plain model and the calibrated one")


def _add_output(parser: argparse.ArgumentParser, *, plot: bool = True) -> None:
    parser.add_argument("--output", type=Path, help="a CSV file to write the table to")
    if plot:
        parser.add_argument("--plot", type=Path, help="a picture to draw, such as plot.png")


def _load(args: argparse.Namespace) -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(args.model)
    if getattr(args, "max_seq_length", None) is not None:
        model.max_seq_length = args.max_seq_length
    return model


def _texts(args: argparse.Namespace) -> Iterator[str]:
    return islice(_all_texts(args.texts), args.limit)


def _all_texts(source: str) -> Iterator[str]:
    if source == "embedded":
        from fair_evaluation.position_collections import build_collections, load_passages

        for document in build_collections(load_passages())[0].documents:
            yield document["text"]
        return
    with Path(source).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if Path(source).suffix == ".txt":
                yield line.strip()
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{source}, line {number}: expected JSON with the field 'text' ({error!r})") from error
            if not isinstance(text, str):
                raise ValueError(f"{source}, line {number}: expected a text in the field 'text', got {text!r}")
            yield text


def _calibrated(args: argparse.Namespace) -> tuple[SentenceTransformer, Any]:
    from fair_calibration import FairConfig, calibrate

    plain = _load(args)
    config = FairConfig.from_json(args.config) if args.config else FairConfig(strength=args.strength)
    return plain, calibrate(plain, config)


def _show(table: pd.DataFrame, args: argparse.Namespace) -> None:
    print(table.to_string(index=False, float_format="{:.3f}".format, na_rep="-"))
    if args.output is not None:
        table.to_csv(args.output, index=False)


def _truncation(args: argparse.Namespace) -> None:
    from fair_evaluation.truncation import summarize_truncation

    print(summarize_truncation(_load(args), _texts(args), show_progress_bar=not args.quiet))


def _attention(args: argparse.Namespace) -> None:
    from fair_evaluation.attention_profile import attention_profile
    from fair_evaluation.plots import plot_attention

    _, fair = _calibrated(args)
    profile = attention_profile(fair, _texts(args), show_progress_bar=not args.quiet)
    _show(profile, args)
    if args.plot is not None:
        plot_attention(profile).savefig(args.plot)


def _reflection(args: argparse.Namespace) -> None:
    from fair_evaluation.plots import plot_reflection
    from fair_evaluation.reflection import segment_reflection

    plain, fair = _calibrated(args)
    models = {"plain": plain, "calibrated": fair} if args.compare else {"calibrated": fair}
    texts = list(_texts(args))
    results = {
        name: segment_reflection(
            model, texts, n_segments=args.segments, seed=args.seed, show_progress_bar=not args.quiet
        )
        for name, model in models.items()
    }
    frames = [result.frame[result.frame["by"] == "position"].assign(model=name) for name, result in results.items()]
    _show(pd.concat(frames, ignore_index=True), args)
    for name, result in results.items():
        summary, counts = result.summary, result.counts
        print(
            f"{name}: slope {summary.slope:+.3f} [{summary.slope_low:+.3f}, {summary.slope_high:+.3f}], 0 is fair; "
            f"largest difference {summary.max_min:.3f} ({counts.measured} of {counts.documents} documents, "
            f"{counts.too_short} too short, {counts.truncated} truncated)"
        )
    if args.plot is not None:
        plot_reflection(results).savefig(args.plot)


def _tune(args: argparse.Namespace) -> None:
    from fair_evaluation.tuning import tune

    result = tune(
        _load(args),
        _texts(args),
        strengths=args.strengths,
        basket_sizes=args.basket_sizes,
        max_texts=args.max_texts,
        seed=args.seed,
        show_progress_bar=not args.quiet,
    )
    print(result)
    print(f"as JSON: {result.config.to_json()}")


def _underflow(args: argparse.Namespace) -> None:
    from fair_evaluation.underflow import diagnose_underflow

    texts = None if args.texts == "embedded" else list(_texts(args))
    _show(diagnose_underflow(_load(args), lengths=args.lengths, dtypes=args.dtypes, texts=texts), args)


def _probes(args: argparse.Namespace) -> None:
    from fair_evaluation.passages import hold_out_sentences, read_passages
    from fair_evaluation.position_collections import load_passages
    from fair_evaluation.probe_files import write_probes
    from fair_evaluation.probes import build_probes

    if args.passages == "embedded":
        passages: Any = load_passages()
    else:
        passages = read_passages(args.passages, questions=args.questions, title=args.title, article=args.article)
        if args.questions is None and args.title is None:
            passages = hold_out_sentences(passages)
    probes = build_probes(passages, length=args.length, places=args.places, tokenizer=_load(args), seed=args.seed)
    n_documents = write_probes(probes, args.output, show_progress_bar=not args.quiet)
    print(f"{n_documents} documents in {args.output}")


def _evaluate(args: argparse.Namespace) -> None:
    from fair_evaluation import evaluate_positions, psi_test

    results = []
    for path in [args.scores, *([args.against] if args.against else [])]:
        rows = pd.read_csv(path, dtype={"qid": str})
        results.append(evaluate_positions(rows, length=args.length_column, order=args.order, name=Path(path).stem))
        print(results[-1])
    if args.against:
        print(psi_test(*results))
    if args.json is not None:
        args.json.write_text(json.dumps([result.to_dict() for result in results], indent=1), encoding="utf-8")
