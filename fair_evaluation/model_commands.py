"""The commands that look into a model: ``truncation``, ``attention``, ``reflection``, ``tune`` and ``underflow``."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from fair_calibration.commands import PROGRAM, integer_from, positive_int, strength
from fair_evaluation.command_arguments import (
    EMBEDDED,
    add_model_and_texts,
    add_outputs,
    add_settings,
    load_calibrated,
    load_plain,
    open_texts,
    print_table,
    remedy,
)

if TYPE_CHECKING:
    import pandas as pd
    from sentence_transformers import SentenceTransformer

DTYPES = ("float32", "bfloat16", "float16")


def run_truncation(args: argparse.Namespace) -> None:
    """Prints how many documents lose how many tokens."""
    texts = open_texts(args)
    from fair_evaluation.truncation import summarize_truncation

    model = load_plain(args)
    summary = summarize_truncation(model, texts, show_progress_bar=not args.quiet)
    print(summary)
    if summary.truncated:
        print(f"Next: {remedy(model, summary)}")


def add_attention(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``attention``."""
    add_model_and_texts(parser)
    add_settings(parser)
    add_outputs(parser)
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
    texts = list(open_texts(args))
    from fair_evaluation.attention_profile import attention_profile, count_baskets
    from fair_evaluation.plots import plot_attention
    from fair_evaluation.truncation import summarize_truncation

    fair = load_calibrated(args)
    if args.baskets is not None and args.baskets not in (found := count_baskets(fair, texts)):
        raise ValueError(f"--baskets: there are documents of {list(found)} baskets, none of {args.baskets}")
    profile = attention_profile(fair, texts, show_progress_bar=not args.quiet)
    print_table(profile, args)
    print(_describe_attention(profile))
    if (summary := summarize_truncation(fair, texts)).truncated:
        print(f"{summary.truncated} of {summary.documents} documents are truncated: {remedy(fair, summary)}")
    if args.plot is not None:
        plot_attention(profile, n_baskets=args.baskets).savefig(args.plot)
        print(f"Picture: {args.plot}")
    print(f"Next: {_command('reflection', args)} --compare shows what this does to the document vectors.")


def _describe_attention(profile: pd.DataFrame) -> str:
    """Returns one line about the first and the last basket, over all layers."""
    from fair_evaluation.plots import commonest_baskets

    n_baskets = commonest_baskets(profile)
    rows = profile[(profile["n_baskets"] == n_baskets) & (profile["segment"] == "basket")]
    if n_baskets == 1:
        return "Most documents have a single basket, in which there is nothing to calibrate: give longer ones."
    n_documents = int(rows[(rows["layer"] == 0) & (rows["basket"] == 0)]["documents"].sum())
    shares = rows[["share_plain", "share_calibrated"]].mul(rows["documents"], axis=0).groupby(rows["basket"]).sum()
    shares = shares / shares.sum()
    first, last = shares.iloc[0], shares.iloc[-1]
    return (
        f"Overall, in documents of {n_baskets} baskets ({n_documents} here, mean over all layers): the first basket "
        f"gets {first['share_plain']:.1%} of the attention on baskets before and {first['share_calibrated']:.1%} after "
        f"calibration, the last one {last['share_plain']:.1%} and {last['share_calibrated']:.1%}; even shares are "
        f"{1 / n_baskets:.1%}."
    )


def add_reflection(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``reflection``."""
    add_model_and_texts(parser)
    add_settings(parser)
    parser.add_argument("--compare", action="store_true", help="measure the plain model as well")
    parser.add_argument("--segments", type=integer_from(2), default=4, help="segments per document (default: 4)")
    parser.add_argument("--seed", type=integer_from(0), default=0, help="seed of the bootstrap (default: 0)")
    add_outputs(parser)


def run_reflection(args: argparse.Namespace) -> None:
    """Prints how similar document vectors are to those of their segments, by the position of the segment."""
    texts = list(open_texts(args))
    if len(texts) < 2:
        raise ValueError("texts: expected at least two documents, since the slope is a mean with an interval, got one")
    import pandas as pd

    from fair_calibration import uncalibrate
    from fair_evaluation.plots import plot_reflection
    from fair_evaluation.reflection import segment_reflection
    from fair_evaluation.truncation import summarize_truncation

    fair = load_calibrated(args)
    summary = summarize_truncation(fair, texts)
    if summary.documents - summary.truncated < 2:  # before anything is encoded
        raise ValueError(
            f"{summary.truncated} of {summary.documents} documents are longer than the model reads, and reflection is "
            f"measured on whole documents: {remedy(fair, summary)}"
        )
    models: dict[str, SentenceTransformer] = {"plain": uncalibrate(fair)} if args.compare else {}
    results = {
        name: segment_reflection(
            model, texts, n_segments=args.segments, seed=args.seed, show_progress_bar=not args.quiet
        )
        for name, model in {**models, "calibrated": fair}.items()
    }
    frames = [result.frame[result.frame["by"] == "position"].assign(model=name) for name, result in results.items()]
    print_table(pd.concat(frames, ignore_index=True), args)
    for name, result in results.items():
        values = result.summary
        print(
            f"{name}: slope {values.slope:+.3f} [{values.slope_low:+.3f}, {values.slope_high:+.3f}], "
            f"largest difference {values.max_min:.3f} ({result.counts})"
        )
    print(
        "A slope of 0 means that every position is reflected equally well, not that it is reflected well: where the "
        "similarity fell at every position, the vectors have become less specific, and retrieval may be worse."
    )
    if summary.truncated:
        print(f"{summary.truncated} documents are left out, as they would be truncated: {remedy(fair, summary)}")
    if args.plot is not None:
        plot_reflection(results).savefig(args.plot)
        print(f"Picture: {args.plot}")
    print(f"Next: {_command('tune', args)} chooses a strength for these documents.")


def _command(name: str, args: argparse.Namespace) -> str:
    """Returns the command line of another command for the same model and documents."""
    names = ["max_seq_length", "limit", *(("config", "strength") if name == "reflection" else ())]
    given = [(n, getattr(args, n, None)) for n in names]
    options = [part for n, value in given if value is not None for part in (f"--{n.replace('_', '-')}", str(value))]
    return shlex.join([PROGRAM, name, args.model, args.texts, *options])


def add_tune(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``tune``."""
    add_model_and_texts(parser)
    parser.add_argument(
        "--strengths",
        type=strength,
        nargs="+",
        default=[0.25, 0.5, 0.75, 1.0],
        help="strengths to try (default: 0.25 0.5 0.75 1)",
    )
    parser.add_argument("--basket-sizes", type=positive_int, nargs="+", help="basket sizes to try as well")
    parser.add_argument("--max-texts", type=positive_int, default=32, help="documents to draw (default: 32)")
    parser.add_argument("--seed", type=integer_from(0), default=0, help="seed of the drawing (default: 0)")


def run_tune(args: argparse.Namespace) -> None:
    """Prints the settings under which the documents are found best, wherever in them the query's words stand."""
    texts = list(open_texts(args))
    from fair_evaluation.truncation import summarize_truncation
    from fair_evaluation.tuning import tune

    model = load_plain(args)
    options = {name: getattr(args, name) for name in ("strengths", "basket_sizes", "max_texts", "seed")}
    result = tune(model, texts, **options, show_progress_bar=not args.quiet)
    print(result)
    if result.counts.truncated:
        print(f"Documents were cut: {remedy(model, summarize_truncation(model, texts))}")
    print(
        "Next: give these settings to calibrate(model, FairConfig.from_json(...)) in Python, or as --config to other "
        f"commands.\nas JSON: {result.config.to_json()}"
    )


def add_underflow(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``underflow``."""
    add_model_and_texts(parser, max_seq_length=False)
    parser.add_argument(
        "--lengths", type=positive_int, nargs="+", default=[512], help="sequence lengths in tokens (default: 512)"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="data types of the weights (default: all three)"
    )
    add_outputs(parser, plot=False)


def run_underflow(args: argparse.Namespace) -> None:
    """Prints the share of attention weights that are exactly 0, by length, layer, head and data type."""
    texts = None if args.texts == EMBEDDED else list(open_texts(args))
    from fair_evaluation.underflow import diagnose_underflow

    table = diagnose_underflow(load_plain(args), lengths=args.lengths, dtypes=args.dtypes, texts=texts)
    print_table(table, args)
    shares = table.groupby(["length", "dtype"], sort=False)["share_zero"].mean().reset_index()
    for length, dtype, share in shares.itertuples(index=False):
        print(f"{dtype} at {length} tokens: {share:.1%} of the weights are exactly 0, over all layers and heads")
    print("Weights that are 0 cannot be calibrated by any strength; docs/underflow.md says which models this concerns.")
