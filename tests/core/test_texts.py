from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fair_calibration.texts import check_texts


def test_texts_are_accepted() -> None:
    check_texts([])
    check_texts(["", "a", "ä", "\U0001f41d"])
    check_texts(("a", "b"), names=["d1", "d2"])


@pytest.mark.parametrize("missing", [None, float("nan"), np.float64("nan"), pd.NA, pd.NaT])
def test_missing_texts(missing: object) -> None:
    with pytest.raises(ValueError, match=r"texts: 2 of 3 texts are missing \(document 0, 2\); drop these records, or"):
        check_texts([missing, "a", missing])


def test_records_are_named() -> None:
    names = [f"d{i}" for i in range(8)]
    with pytest.raises(
        ValueError, match=r"body: 8 of 8 texts are missing \(docno 'd0', 'd1', 'd2', 'd3', 'd4', \.\.\.\)"
    ):
        check_texts([None] * 8, names, what="body", named="docno")
    with pytest.raises(TypeError, match=r"texts: expected str, got bytes, int \(document 1, 2\)"):
        check_texts(["a", 1, b"b"])
    with pytest.raises(ValueError, match=r"texts: 1 of 2 texts contain a lone surrogate, .* \(document 1\)"):
        check_texts(["a", "b\ud800"])


def test_one_text_and_other_numbers_of_names() -> None:
    with pytest.raises(TypeError, match="texts: expected a list of str, got one str, 'bees'"):
        check_texts("bees")
    with pytest.raises(ValueError, match="names: expected one for each of 1 texts, got 2"):
        check_texts(["a"], names=[1, 2])
