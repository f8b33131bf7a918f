"""The commands that evaluate and diagnose models and tune their settings (`fair_calibration.commands`).

Each command prints a table or a few lines, and ends with what to do next.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fair_calibration.commands import PROGRAM, Command, positive_int, strength

if TYPE_CHECKING:
    import pandas as pd
    from sentence_transformers import SentenceTransformer

    from fair_calibration import FairSentenceTransformer
    from fair_evaluation.truncation import TruncationSummary

EMBEDDED = "embedded"
"""Stands for the texts that come with the package, where a command takes a file of texts."""


def add_truncation(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``truncation``."""
    _add_model_and_texts(parser)


def run_truncation(args: argparse.Namespace) -> None:
    """Prints how many documents lose how many tokens."""
    texts = _open_texts(args)
    from fair_evaluation.truncation import summarize_truncation

    model = _load(args)
    summary = summarize_truncation(model, texts, show_progress_bar=not args.quiet)
    print(summary)
    if summary.truncated:
        print(f"Next: {_remedy(model, summary)}")


def add_attention(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``attention``."""
    _add_model_and_texts(parser)
    _add_settings(parser)
    _add_output(parser)
    parser.add_argument(
        "--baskets",
        type=positive_int,
        metavar="N",
        help="draw the documents of N baskets (default: the number that most documents have)",
    )


def run_attention(args: argparse.Namespace) -> None:
    """Prints how much attention each basket gets in each layer, before and after calibration."""
    if args.baskets is not None and args.plot is None:
        raise ValueError("--baskets: it chooses the documents that are drawn, so it needs --plot")
    _check_outputs(args)
    texts = list(_open_texts(args))
    from fair_evaluation.attention_profile import attention_profile, count_baskets
    from fair_evaluation.plots import plot_attention
    from fair_evaluation.truncation import summarize_truncation

    fair = _load_calibrated(args)
    if args.baskets is not None:  # before anything is encoded
        found = count_baskets(fair, texts)
        if args.baskets not in found:
            raise ValueError(f"--baskets: there are documents of {sorted(found)} baskets, none of {args.baskets}")
    profile = attention_profile(fair, texts, show_progress_bar=not args.quiet)
    _print_table(profile, args)
    print(_describe_attention(profile))
    if (summary := summarize_truncation(fair, texts)).truncated:
        print(f"{summary.truncated} of {summary.documents} documents are truncated: {_remedy(fair, summary)}")
    if args.plot is not None:
        plot_attention(profile, n_baskets=args.baskets).savefig(args.plot)
        print(f"Picture: {args.plot}")
    print(f"Next: {_command('reflection', args)} --compare shows what this does to the document vectors.")


def add_reflection(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``reflection``."""
    _add_model_and_texts(parser)
    _add_settings(parser)
    parser.add_argument("--compare", action="store_true", help="measure the plain model as well")
    parser.add_argument("--segments", type=positive_int, default=4, help="segments per document (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (default: 0)")
    _add_output(parser)


def run_reflection(args: argparse.Namespace) -> None:
    """Prints how similar document vectors are to those of their segments, by the position of the segment."""
    _check_outputs(args)
    texts = list(_open_texts(args))
    import pandas as pd

    from fair_calibration import uncalibrate
    from fair_evaluation.plots import plot_reflection
    from fair_evaluation.reflection import segment_reflection
    from fair_evaluation.truncation import summarize_truncation

    fair = _load_calibrated(args)
    summary = summarize_truncation(fair, texts)
    if summary.documents - summary.truncated < 2:  # before anything is encoded
        raise ValueError(
            f"{summary.truncated} of {summary.documents} documents are longer than the model reads, and reflection is "
            f"measured on whole documents: {_remedy(fair, summary)}"
        )
    models: dict[str, SentenceTransformer] = {"plain": uncalibrate(fair)} if args.compare else {}
    models["calibrated"] = fair
    results = {
        name: segment_reflection(
            model, texts, n_segments=args.segments, seed=args.seed, show_progress_bar=not args.quiet
        )
        for name, model in models.items()
    }
    frames = [result.frame[result.frame["by"] == "position"].assign(model=name) for name, result in results.items()]
    _print_table(pd.concat(frames, ignore_index=True), args)
    for name, result in results.items():
        values, counts = result.summary, result.counts
        print(
            f"{name}: slope {values.slope:+.3f} [{values.slope_low:+.3f}, {values.slope_high:+.3f}], "
            f"largest difference {values.max_min:.3f} ({counts.measured} of {counts.documents} documents, "
            f"{counts.too_short} too short, {counts.truncated} truncated)"
        )
    print(
        "A slope of 0 means that every position is reflected equally well, not that it is reflected well: where the "
        "similarity fell at every position, the vectors have become less specific, and retrieval may be worse."
    )
    if summary.truncated:
        print(f"{summary.truncated} documents are left out, as they would be truncated: {_remedy(fair, summary)}")
    if args.plot is not None:
        plot_reflection(results).savefig(args.plot)
        print(f"Picture: {args.plot}")
    print(f"Next: {_command('tune', args)} chooses a strength for these documents.")


def add_tune(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``tune``."""
    _add_model_and_texts(parser)
    parser.add_argument(
        "--strengths",
        type=strength,
        nargs="+",
        default=[0.25, 0.5, 0.75, 1.0],
        help="strengths to try (default: 0.25 0.5 0.75 1)",
    )
    parser.add_argument("--basket-sizes", type=positive_int, nargs="+", help="basket sizes to try as well")
    parser.add_argument("--max-texts", type=positive_int, default=32, help="documents to draw (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawing (default: 0)")


def run_tune(args: argparse.Namespace) -> None:
    """Prints the settings under which the documents are found best, wherever in them the query's words stand."""
    texts = list(_open_texts(args))
    from fair_evaluation.truncation import summarize_truncation
    from fair_evaluation.tuning import tune

    model = _load(args)
    result = tune(
        model,
        texts,
        strengths=args.strengths,
        basket_sizes=args.basket_sizes,
        max_texts=args.max_texts,
        seed=args.seed,
        show_progress_bar=not args.quiet,
    )
    print(result)
    if result.counts.truncated:
        print(f"Documents were cut: {_remedy(model, summarize_truncation(model, texts))}")
    print(
        "Next: give these settings to calibrate(model, FairConfig.from_json(...)) in Python, or as --config to other "
        "commands.\n"
        f"as JSON: {result.config.to_json()}"
    )


def add_underflow(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``underflow``."""
    _add_model_and_texts(parser, max_seq_length=False)
    parser.add_argument(
        "--lengths", type=positive_int, nargs="+", default=[512], help="sequence lengths in tokens (default: 512)"
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=["float32", "bfloat16", "float16"],
        default=["float32", "bfloat16", "float16"],
        help="data types of the weights (default: all three)",
    )
    _add_output(parser, plot=False)


def run_underflow(args: argparse.Namespace) -> None:
    """Prints the share of attention weights that are exactly 0, by length, layer, head and data type."""
    _check_outputs(args)
    texts = None if args.texts == EMBEDDED else list(_open_texts(args))
    from fair_evaluation.underflow import diagnose_underflow

    table = diagnose_underflow(_load(args), lengths=args.lengths, dtypes=args.dtypes, texts=texts)
    _print_table(table, args)
    shares = table.groupby(["length", "dtype"], sort=False)["share_zero"].mean().reset_index()
    for length, dtype, share in shares.itertuples(index=False):
        print(f"{dtype} at {length} tokens: {share:.1%} of the weights are exactly 0, over all layers and heads")
    print("Weights that are 0 cannot be calibrated by any strength; docs/underflow.md says which models this concerns.")


def add_probes(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``probes``."""
    parser.add_argument("model", help="the model whose tokenizer counts: a name or a folder")
    parser.add_argument(
        "passages", help=f"JSON lines with the field 'text', or '{EMBEDDED}' for the passages of the package"
    )
    parser.add_argument("output", type=Path, help="the file to write")
    parser.add_argument(
        "--questions", help="the field of the questions (default: one sentence of each passage becomes its question)"
    )
    parser.add_argument("--title", help="the field of a title, which becomes a question")
    parser.add_argument("--article", help="the field that names the article of a passage")
    parser.add_argument("--length", type=positive_int, default=510, help="tokens per document (default: 510)")
    parser.add_argument("--places", type=positive_int, default=3, help="passages per document (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawing (default: 0)")
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")


def run_probes(args: argparse.Namespace) -> None:
    """Writes documents in which each passage stands once at every place."""
    _check_outputs(args)
    if args.passages != EMBEDDED:
        _check_file("passages", args.passages)
    from fair_evaluation.passages import hold_out_sentences, read_passages
    from fair_evaluation.position_collections import load_passages
    from fair_evaluation.probe_files import write_probes
    from fair_evaluation.probes import build_probes

    if args.passages == EMBEDDED:
        passages: Any = load_passages()
    else:
        passages = read_passages(args.passages, questions=args.questions, title=args.title, article=args.article)
        if args.questions is None and args.title is None:
            passages = hold_out_sentences(passages)
    probes = build_probes(passages, length=args.length, places=args.places, tokenizer=_load(args), seed=args.seed)
    n_documents = write_probes(probes, args.output, show_progress_bar=not args.quiet)
    print(f"{n_documents} documents in {args.output}, {n_documents // args.places} in each of {args.places} rotations")
    print(
        "Next: read them with fair_evaluation.probe_files.read_probes. Index every rotation by itself, search it with "
        "its own queries, and evaluate all of them together with from_run(..., position='place', unit='question')."
    )


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``evaluate``."""
    parser.add_argument(
        "scores",
        help="a CSV file with the columns qid, score and position, or place: a group, or a number from 0 to 1",
    )
    parser.add_argument("--against", help="such a file of a second system, whose PSI is compared")
    parser.add_argument("--length-column", help="the column of document lengths, to evaluate by length as well")
    parser.add_argument("--order", nargs="+", help="all groups, from the beginning of documents to the end")
    parser.add_argument("--json", type=Path, help="a file to write the results to")


def run_evaluate(args: argparse.Namespace) -> None:
    """Prints scores by position with intervals, and tests the difference in PSI of two systems."""
    _check_outputs(args)
    paths = [args.scores, *([args.against] if args.against else [])]
    for path in paths:
        _check_file("scores" if path == args.scores else "--against", path)
    import pandas as pd

    from fair_evaluation import evaluate_positions, psi_test

    results = []
    for path in paths:
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


COMMANDS = (
    Command(
        "truncation", "how many documents are longer than the model reads", "evaluation", add_truncation, run_truncation
    ),
    Command(
        "attention",
        "how much attention each part of the documents gets, before and after calibration",
        "evaluation",
        add_attention,
        run_attention,
    ),
    Command(
        "reflection",
        "how similar document vectors are to those of their own segments, by position",
        "evaluation",
        add_reflection,
        run_reflection,
    ),
    Command("tune", "choose the strength on documents alone, without labels", "evaluation", add_tune, run_tune),
    Command(
        "underflow",
        "which attention weights are exactly 0, by layer and head",
        "evaluation",
        add_underflow,
        run_underflow,
    ),
    Command(
        "probes",
        "write documents in which each passage stands once at every place, as JSON lines",
        "evaluation",
        add_probes,
        run_probes,
    ),
    Command(
        "evaluate",
        "scores by position with intervals, from a table of scores",
        "evaluation",
        add_evaluate,
        run_evaluate,
    ),
)


def _add_model_and_texts(parser: argparse.ArgumentParser, *, max_seq_length: bool = True) -> None:
    parser.add_argument("model", help="a sentence-transformers name or folder, plain or calibrated")
    parser.add_argument(
        "texts",
        nargs="?",
        default=EMBEDDED,
        help="a .txt file with one document per line, or JSON lines with the field 'text' (default: documents of three "
        "passages that come with the package)",
    )
    if max_seq_length:
        parser.add_argument("--max-seq-length", type=positive_int, help="tokens at which documents are truncated")
    parser.add_argument("--limit", type=positive_int, help="use only the first LIMIT documents")
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strength", type=strength, help="strength of the calibration (default: the model's own, or 0.5)"
    )
    parser.add_argument(
        "--config", help="settings of the calibration: the name of a preset, or JSON as FairConfig.to_json writes it"
    )


def _add_output(parser: argparse.ArgumentParser, *, plot: bool = True) -> None:
    parser.add_argument("--output", type=Path, help="a CSV file to write the table to")
    if plot:
        parser.add_argument("--plot", type=Path, help="a picture to draw, such as plot.png")


def _check_outputs(args: argparse.Namespace) -> None:
    """Checks that the files can be written at the end, before anything is encoded."""
    for name in ("output", "plot", "json"):
        path = getattr(args, name, None)
        if path is not None and (not path.parent.is_dir() or path.is_dir()):
            problem = "is a folder" if path.is_dir() else f"there is no folder {str(path.parent)!r}"
            raise ValueError(f"--{name}: cannot write {str(path)!r}: {problem}")
    if getattr(args, "plot", None) is not None:
        from matplotlib.backend_bases import FigureCanvasBase

        kinds = FigureCanvasBase.get_supported_filetypes()
        if args.plot.suffix.removeprefix(".").lower() not in kinds:
            raise ValueError(f"--plot: expected a name that ends in one of {sorted(kinds)}, got {str(args.plot)!r}")


def _check_file(name: str, path: str) -> None:
    if not Path(path).is_file():
        raise ValueError(f"{name}: {'a folder' if Path(path).is_dir() else 'no file'} at {path!r}, expected a file")


def _load(args: argparse.Namespace) -> SentenceTransformer:
    """Loads the model without calibrating it, so that it may be of a kind that cannot be calibrated."""
    from fair_calibration.loading import load_plain

    return load_plain(args.model, max_seq_length=getattr(args, "max_seq_length", None))


def _load_calibrated(args: argparse.Namespace) -> FairSentenceTransformer:
    """Loads the model with the calibration that the arguments ask for."""
    from fair_calibration.loading import load_calibrated

    names = ("config", "strength", "max_seq_length")
    return load_calibrated(args.model, **{name: getattr(args, name, None) for name in names})


def _command(name: str, args: argparse.Namespace) -> str:
    """Returns the command line of another command for the same model and documents."""
    length = [] if args.max_seq_length is None else ["--max-seq-length", str(args.max_seq_length)]
    return shlex.join([PROGRAM, name, args.model, args.texts, *length])


def _remedy(model: SentenceTransformer, summary: TruncationSummary) -> str:
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


def _open_texts(args: argparse.Namespace) -> Iterator[str]:
    """Yields the documents; what is wrong with the file or its first document is reported at once."""
    if args.texts != EMBEDDED:
        _check_file("texts", args.texts)
    texts = islice(_read_texts(args.texts), args.limit)
    first = next(texts, None)
    if first is None:
        raise ValueError(f"texts: expected at least one document, {args.texts} has none")
    return chain([first], texts)


def _read_texts(source: str) -> Iterator[str]:
    if source == EMBEDDED:
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
                raise ValueError(f"{source}, line {number}: expected a string in the field 'text', got {text!r}")
            yield text


def _print_table(table: pd.DataFrame, args: argparse.Namespace) -> None:
    print(table.to_string(index=False, float_format="{:.3f}".format, na_rep="-"))
    if args.output is not None:
        table.to_csv(args.output, index=False)
        print(f"Table: {args.output}")


def _describe_attention(profile: pd.DataFrame) -> str:
    """Returns one line about the first and the last basket, over all layers."""
    from fair_evaluation.plots import commonest_baskets

    n_baskets = commonest_baskets(profile)
    rows = profile[(profile["n_baskets"] == n_baskets) & (profile["segment"] == "basket")]
    n_documents = int(rows[(rows["layer"] == 0) & (rows["basket"] == 0)]["documents"].sum())
    weights = rows["documents"]
    parts = []
    for column in ("share_plain", "share_calibrated"):
        shares = (rows[column] * weights).groupby(rows["basket"]).sum()
        shares = shares / shares.sum()
        parts.append((shares.iloc[0], shares.iloc[-1]))
    (first, last), (first_after, last_after) = parts
    return (
        f"Overall, in the {n_documents} documents of {n_baskets} baskets (mean over all layers): the first basket gets "
        f"{first:.1%} of the attention on baskets before and {first_after:.1%} after calibration, the last one "
        f"{last:.1%} and {last_after:.1%}; even shares are {1 / n_baskets:.1%}."
    )
