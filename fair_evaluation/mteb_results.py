"""Evaluation by position of results that MTEB saved; MTEB itself need not be installed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fair_evaluation.position_result import PositionEvaluation

_SCORE = "ndcg_at_10"


def from_mteb(
    result: Mapping[str, Any] | str | os.PathLike[str], *, name: str | None = None
) -> dict[str, PositionEvaluation]:
    """Evaluates the result of a position task of `mteb_fair`.

    Such a result has the mean score and the number of queries of each group, but no scores of single queries. So there
    are no intervals and no `psi_test`. To get these, have MTEB save its rankings
    (``prediction_folder``) and use `from_run`.

    Args:
        result: The path of the task's JSON file, or its content.
        name: The name of the system; None means the name of the task.

    Returns:
        The evaluation of each subset (language) by name; ``lengths`` has the length classes of PosIR, q1 to q4.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a result of MTEB with one split, or its task has no position groups.
    """
    where = "result" if isinstance(result, Mapping) else os.fspath(result)
    content = result if isinstance(result, Mapping) else json.loads(Path(result).read_text(encoding="utf-8"))
    splits = content.get("scores") if isinstance(content, Mapping) else None
    if not isinstance(splits, Mapping) or len(splits) != 1:
        raise ValueError(
            f"{where}: expected a result of MTEB with the scores of one split, got {_keys(splits or content)}"
        )
    (entries,) = splits.values()
    name = str(content.get("task_name", "")) if name is None else name
    return {str(entry["hf_subset"]): _evaluate(entry, name, where) for entry in entries}


def _evaluate(entry: Mapping[str, Any], name: str, where: str) -> PositionEvaluation:
    groups = [key.removesuffix("_n") for key in entry if key.endswith("_n")]
    groups = [group for group in groups if f"{group}_{_SCORE}" in entry]
    if not groups:
        raise ValueError(
            f"{where}: expected scores of position groups, such as 'end_{_SCORE}' and 'end_n', which the tasks of "
            f"mteb_fair have; got {_keys(entry)}"
        )
    # A length class has measures of its own: q1_psi beside q1_bin00_n.
    partitions = [key.removesuffix("_psi") for key in entry if key.endswith("_psi")]
    members = {p: [group for group in groups if group.startswith(f"{p}_")] for p in partitions}
    inner = {group for found in members.values() for group in found}
    lengths = {
        p: _measure({g.removeprefix(f"{p}_"): (entry[f"{g}_{_SCORE}"], entry[f"{g}_n"]) for g in found}, f"{name} {p}")
        for p, found in members.items()
        if any(entry[f"{g}_n"] for g in found)
    }
    main = {g: (entry[f"{g}_{_SCORE}"], entry[f"{g}_n"]) for g in groups if g not in inner}
    return _measure(main, name, lengths)


def _measure(
    groups: Mapping[str, tuple[float | None, int]], name: str, lengths: Mapping[str, PositionEvaluation] | None = None
) -> PositionEvaluation:
    means, counts = zip(*groups.values(), strict=True)
    places = (np.arange(len(groups)) + 0.5) / len(groups)
    frame = pd.DataFrame({"group": list(groups), "position": places, "n": counts})
    frame = frame.assign(mean=np.array(means, dtype=np.float64), low=np.nan, high=np.nan)
    empty = frame.loc[frame["n"] == 0, "group"].tolist()
    notes = (f"no queries in {', '.join(empty)}: the measures leave these groups out",) if empty else ()
    return PositionEvaluation(
        name=name, measure="nDCG@10", groups=frame, n_queries=None, lengths=lengths or {}, notes=notes
    )


def _keys(value: Any) -> str:
    return f"the keys {list(value)[:8]}" if isinstance(value, Mapping) else type(value).__name__
