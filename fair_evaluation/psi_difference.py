"""Tests whether two systems differ in PSI, with a paired bootstrap over queries.

The queries of both systems get the same weights (`fair_evaluation.resampling`). Deviations are taken from the mean of
the resampled differences rather than from the observed difference, as resampling adds a bias of its own to PSI.

docs/evaluation.md has the share of rejections in simulations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fair_evaluation.measures import Array, position_sensitivity_index
from fair_evaluation.position_result import Interval, PositionEvaluation
from fair_evaluation.resampling import UnitTotals, add_up_units, check_bootstrap, draw_weights, is_biased

_SHOWN = 5  # records named in an error
_TIE = 1e-12  # smaller differences are rounding errors


@dataclass(frozen=True, kw_only=True)
class PsiDifference:
    """The difference in PSI of two systems on the same queries.

    Attributes:
        names: The names of the systems.
        psi: The PSI of each system.
        difference: The PSI of the first minus that of the second; if positive, the second is fairer.
        interval: The confidence interval of the difference, symmetric about it. It contains 0 if and only if
            ``p_value > 1 - confidence``, apart from ties.
        p_value: The two-sided p-value of the hypothesis that both systems have the same PSI.
        bias: The bias of the difference, as estimated by the bootstrap. If it exceeds a quarter of ``standard_error``,
            the two PSIs are biased unequally, because of small groups or different means: use fewer groups or more
            queries.
        standard_error: The standard error of the difference.
        confidence: The confidence level of the interval.
        n_queries: The number of different queries.
        n_resamples: The number of resamples of the bootstrap.
        seed: Seed of the bootstrap.
    """

    names: tuple[str, str]
    psi: tuple[float, float]
    difference: float
    interval: Interval
    p_value: float
    bias: float
    standard_error: float
    confidence: float
    n_queries: int
    n_resamples: int
    seed: int

    def __str__(self) -> str:
        first, second = (name or number for name, number in zip(self.names, ("first", "second"), strict=True))
        text = (
            f"PSI {self.psi[0]:.3f} ({first}) - {self.psi[1]:.3f} ({second}) = {self.difference:.3f} "
            f"[{self.interval[0]:.3f}, {self.interval[1]:.3f}], p = {self.p_value:.4f} ({self.n_queries} queries, "
            f"{self.n_resamples} resamples)"
        )
        if is_biased(self.bias, self.standard_error):
            text += f"\nnote: the difference is biased, here by about {self.bias:.3f} or more"
        return text


def psi_test(
    a: PositionEvaluation,
    b: PositionEvaluation,
    *,
    confidence: float = 0.95,
    n_resamples: int = 10_000,
    seed: int = 0,
) -> PsiDifference:
    """Tests whether two systems differ in PSI, with a paired bootstrap over queries.

    Args:
        a: The evaluation of the first system, from scores of queries; or one of its ``lengths``.
        b: That of the second system, with the same queries, groups and units.
        confidence: The confidence level of the interval.
        n_resamples: The number of resamples; the p-value is at least ``1 / (n_resamples + 1)``.
        seed: Seed of the bootstrap.

    Raises:
        TypeError: ``a`` or ``b`` is not a `PositionEvaluation`.
        ValueError: The systems were evaluated on different queries or groups or without scores of queries, or fewer
            than two groups have queries.
    """
    check_bootstrap(confidence, n_resamples)
    rows = _pair(a, b)
    codes, groups = pd.factorize(rows["group"])
    if len(groups) < 2:
        raise ValueError(f"a, b: expected queries in at least two groups, got them in {list(groups)}")
    unit = pd.factorize(rows["unit"], sort=True)[0].astype(np.int64)
    first, second = (
        add_up_units(unit, codes.astype(np.int64), rows[column].to_numpy(dtype=np.float64), len(groups))
        for column in ("score_a", "score_b")
    )
    psi, drawn = resample_psi(first, second, n_resamples=n_resamples, seed=seed)
    difference = psi[0] - psi[1]
    reach, p_value = _decide(difference, drawn, confidence)
    return PsiDifference(
        names=(a.name, b.name),
        psi=psi,
        difference=difference,
        interval=(difference - reach, difference + reach),
        p_value=p_value,
        bias=float(drawn.mean()) - difference,
        standard_error=float(drawn.std()),
        confidence=float(confidence),
        n_queries=int(rows["qid"].nunique()),
        n_resamples=int(n_resamples),
        seed=seed,
    )


def resample_psi(a: UnitTotals, b: UnitTotals, *, n_resamples: int, seed: int) -> tuple[tuple[float, float], Array]:
    """Returns the PSI of two systems on the same units, and the difference of PSI in each resample, shape (R,)."""
    psi = position_sensitivity_index
    drawn = [
        psi(a.group_means(weights)) - psi(b.group_means(weights))
        for weights in draw_weights(len(a.sums), n_resamples=n_resamples, seed=seed)
    ]
    return (psi(a.group_means()), psi(b.group_means())), np.concatenate(drawn)


def _decide(difference: float, drawn: Array, confidence: float) -> tuple[float, float]:
    """Returns half the width of the interval, and the p-value."""
    deviations = np.abs(drawn - drawn.mean())
    extreme = int((deviations >= abs(difference) - _TIE).sum())
    return float(np.quantile(deviations, confidence)), (1 + extreme) / (len(drawn) + 1)


def _pair(a: PositionEvaluation, b: PositionEvaluation) -> pd.DataFrame:
    """Returns the rows of both systems, paired by query and group."""
    keys = ["qid", "group", "unit"]
    rows = _rows("a", a).merge(_rows("b", b), on=keys, how="outer", suffixes=("_a", "_b"), indicator=True)
    if (alone := rows["_merge"] != "both").any():
        found = rows.loc[alone, ["qid", "group"]].itertuples(index=False, name=None)
        raise ValueError(
            f"a, b: expected the same queries in the same groups and units, got {int(alone.sum())} rows of one system "
            f"alone, such as {list(found)[:_SHOWN]}"
        )
    return rows


def _rows(name: str, result: PositionEvaluation) -> pd.DataFrame:
    if not isinstance(result, PositionEvaluation):
        raise TypeError(f"{name}: expected a PositionEvaluation, got {type(result).__name__}")
    if result.rows is None:
        raise ValueError(f"{name}: expected an evaluation of queries, got one of group scores alone (from_mteb)")
    return result.rows.astype({"qid": object, "group": object, "unit": object})  # so that 1 and "1" can be compared
