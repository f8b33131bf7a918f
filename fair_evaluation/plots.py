"""Draws figures of evaluations by position. They are returned and not shown: ``figure.savefig("name.pdf")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fair_evaluation.reflection import Reflection


def plot_attention(profile: pd.DataFrame, *, n_baskets: int | None = None) -> Figure:
    """Draws the attention of each segment in each layer as two heat maps, before and after calibration.

    Args:
        profile: The result of `attention_profile`. With rows per head, the mean over heads is drawn.
        n_baskets: Draws the documents with this number of baskets; None means the number that most of them have.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: A column is missing, or no document has this number of baskets.
    """
    _require(
        profile, "profile", ("layer", "n_baskets", "segment", "basket", "documents", "share_plain", "share_calibrated")
    )
    found = sorted(set(profile["n_baskets"].tolist()))
    if n_baskets is None:
        n_baskets = commonest_baskets(profile)
    if n_baskets not in found:
        raise ValueError(f"n_baskets: the profile has documents of {found} baskets, got {n_baskets}")
    of_these = profile[profile["n_baskets"] == n_baskets]
    label = of_these["basket"].astype("string").fillna(of_these["segment"])
    labels = list(dict.fromkeys(label))
    # There may be calibrated documents and too short ones with the same number of baskets.
    weighted = of_these[["share_plain", "share_calibrated"]].mul(of_these["documents"], axis=0)
    by = [of_these["layer"], label.rename("label")]
    means = weighted.groupby(by).sum().div(of_these["documents"].groupby(by).sum(), axis=0)
    tables = {name: means[f"share_{name}"].unstack()[labels] for name in ("plain", "calibrated")}
    largest = max(float(table.to_numpy().max()) for table in tables.values())
    figure = _figure(2 * (1.2 + 0.55 * len(labels)), 1.2 + 0.3 * len(tables["plain"]))
    axes = figure.subplots(1, 2, sharey=True)
    for ax, (title, table) in zip(axes, tables.items(), strict=True):
        image = ax.imshow(table.to_numpy(), vmin=0, vmax=largest, aspect="auto", cmap="viridis")
        ax.set_xticks(range(len(labels)), labels)
        ax.set_yticks(range(len(table)), [str(layer) for layer in table.index])
        ax.set(title=title, xlabel="basket")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="share of attention")
    return figure


def commonest_baskets(profile: pd.DataFrame) -> int:
    """Returns the number of baskets that most documents of an attention profile have; of a tie the larger number."""
    # The shares of a document sum to 1 over its segments, so that this counts every document equally often.
    documents = (profile["documents"] * profile["share_plain"]).groupby(profile["n_baskets"]).sum().round(3)
    return int(documents[documents == documents.max()].index.max())


def plot_reflection(reflections: Mapping[str, Reflection], *, by: str = "position") -> Figure:
    """Draws the similarity of document and segment by position, with one line and its interval per model.

    Args:
        reflections: Results of `segment_reflection`, by the name in the legend.
        by: The rows to draw: "position", "as_written" or "content".

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There are no reflections, or ``by`` is unknown.
    """
    if not reflections:
        raise ValueError("reflections: expected at least one, got none")
    figure = _figure(4.5, 3.2)
    ax = figure.subplots()
    for name, reflection in reflections.items():
        frame = reflection.frame[reflection.frame["by"] == by]
        if frame.empty:
            raise ValueError(f"by: expected one of {sorted(set(reflection.frame['by']))}, got {by!r}")
        positions = frame["position"].to_numpy()
        (line,) = ax.plot(positions, frame["similarity"], marker="o", label=name)
        ax.fill_between(positions, frame["low"], frame["high"], color=line.get_color(), alpha=0.2, linewidth=0)
    ax.set(
        xlabel="segment as written (0: the first)" if by == "content" else "position of the segment (0: the first)",
        ylabel="similarity to the document",
        xticks=positions,
    )
    ax.legend(frameon=False)
    return figure


def plot_groups(scores: pd.DataFrame, *, ylabel: str = "nDCG@10") -> Figure:
    """Draws the mean scores of position groups with their intervals, one line per system.

    Args:
        scores: A frame with the columns ``name`` (the system), ``group``, ``mean``, ``low`` and ``high``. Systems and
            groups are drawn in the order in which they first occur.
        ylabel: The name of the measure.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: A column is missing, there are no rows, a group of a system occurs twice, or a mean is outside its
            interval.
    """
    _require(scores, "scores", ("name", "group", "mean", "low", "high"))
    if scores.duplicated(["name", "group"]).any():
        twice = scores.loc[scores.duplicated(["name", "group"]), ["name", "group"]].iloc[0].tolist()
        raise ValueError(f"scores: expected one row per name and group, got {twice} twice")
    if not ((scores["low"] <= scores["mean"]) & (scores["mean"] <= scores["high"])).all():
        raise ValueError("scores: expected low <= mean <= high in every row")
    groups = list(dict.fromkeys(scores["group"]))
    names = list(dict.fromkeys(scores["name"]))
    figure = _figure(max(4.5, 1.0 + 0.9 * len(groups)), 3.2)
    ax = figure.subplots()
    # Shifted, so that the intervals of different systems do not overlap.
    for shift, name in zip(np.linspace(-0.15, 0.15, len(names)) if len(names) > 1 else [0.0], names, strict=True):
        of_name = scores[scores["name"] == name]
        x = np.array([groups.index(group) for group in of_name["group"]]) + shift
        errors = [of_name["mean"] - of_name["low"], of_name["high"] - of_name["mean"]]
        ax.errorbar(x, of_name["mean"], yerr=errors, marker="o", capsize=3, label=name)
    ax.set_xticks(range(len(groups)), [str(group) for group in groups])
    ax.set(xlabel="position of the answer", ylabel=ylabel)
    ax.legend(frameon=False)
    return figure


def _figure(width: float, height: float) -> Figure:
    """Creates a figure of a size in inches, without a window and outside pyplot's global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "fair-calibration[evaluation]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def _require(frame: pd.DataFrame, name: str, columns: Sequence[str]) -> None:
    if missing := [column for column in columns if column not in frame]:
        raise ValueError(f"{name}: expected the columns {list(columns)}, {missing} are missing")
    if frame.empty:
        raise ValueError(f"{name}: expected at least one row, got none")
