"""How mean pooling's fast path cuts its work: rows, heads, groups of sequences, runs of baskets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fair_calibration.method import all_rows, visible_baskets
from tests.core.cases import assert_close, assert_fast_equals_reference, make_case, masked_variants


def test_rows_that_see_nothing_of_a_basket_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible_baskets, "SHORTEST_RUN", 6)
    case = make_case((20,), isolate="none").to(torch.float32)  # 5 baskets of 4
    position = torch.arange(20)
    causal = position <= position[:, None]
    window = causal & (position > position[:, None] - 6)
    rows: list[tuple[int, int, bool]] = []
    attend_with_lse = all_rows.attend_with_lse

    def spy(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append((query.shape[2], key.shape[2], kwargs["visible"] is not None))
        return attend_with_lse(query, key, *args, **kwargs)

    monkeypatch.setattr(all_rows, "attend_with_lse", spy)
    monkeypatch.setattr(all_rows, "_ROWS_PER_BLOCK", 12)
    for masked, expected in (
        (replace(case, mask=causal[None, None]), [12, 8, 4, 8, 8, 8, 8, 4]),  # rows 0 to 11, then 12 to 19
        (replace(case, causal=True), [12, 8, 4, 8, 8, 8, 8, 4]),
        (replace(case, mask=window[None, None]), [9, 8, 4, 1, 5, 8, 4]),
    ):
        rows.clear()
        assert_fast_equals_reference(masked)
        on_cpu = [n_rows for n_rows, n_keys, _ in rows[: len(expected)]]
        assert on_cpu == expected
    rows.clear()
    replace(case, causal=True).fast()
    assert [masked for _, _, masked in rows] == [True, True, True, False, False, False, True, True]


def test_rows_and_heads_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible_baskets, "SHORTEST_RUN", 99)
    variants = masked_variants(make_case((23, 11), isolate="bos", n_heads=4, n_kv=2).to(torch.float32))
    attend_with_lse = all_rows.attend_with_lse
    for name, case in variants.items():
        with monkeypatch.context() as patch:
            whole, on_accelerator = case.fast(), case.fast_on_accelerator()
            shapes: set[tuple[int, int]] = set()

            def spy(
                query: torch.Tensor, *args: Any, shapes: set[tuple[int, int]] = shapes, **kwargs: Any
            ) -> tuple[torch.Tensor, torch.Tensor]:
                shapes.add((query.shape[1], query.shape[2]))
                return attend_with_lse(query, *args, **kwargs)

            patch.setattr(all_rows, "attend_with_lse", spy)
            patch.setattr(all_rows, "_ROWS_PER_BLOCK", 5)
            patch.setattr(all_rows, "_CPU_BYTES", 1)
            rows = case.rows()  # rows of padding that see no token depend on the blocks
            assert_close(case.fast()[rows], whole[rows], 1e-6)
            # One of two key-value heads, 23 and 11 rows in blocks of 5; of each those that see any of a basket.
            assert {n_heads for n_heads, _ in shapes} == {2}
            assert max(n_rows for _, n_rows in shapes) == 5
            if name == "none":
                assert shapes == {(2, 5), (2, 3), (2, 1)}
            shapes.clear()
            patch.setattr(all_rows, "_DEVICE_BYTES", 1)
            assert_close(case.fast_on_accelerator()[rows], on_accelerator[rows], 1e-6)
            assert shapes == {(4, 1)}


def test_a_run_of_baskets_takes_one_call_per_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible_baskets, "SHORTEST_RUN", 3)
    attend_with_lse = all_rows.attend_with_lse
    shapes: list[tuple[int, ...]] = []

    def spy(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append((*query.shape[:3], key.shape[2]))
        return attend_with_lse(query, key, *args, **kwargs)

    monkeypatch.setattr(all_rows, "attend_with_lse", spy)
    monkeypatch.setattr(all_rows, "_ROWS_PER_BLOCK", 16)
    case = make_case((23, 23), isolate="bos", n_heads=4, n_kv=2).to(torch.float32)  # 6 baskets of 4, one of 2
    case.fast()
    assert shapes == [(2, 6, 16, 4)] * 4 + [(2, 6, 7, 4)] * 4
    shapes.clear()
    replace(case, causal=True).fast()
    # Rows 0 to 15 see none of their four baskets alike, rows 16 to 22 the first four of six.
    assert [shape for shape in shapes if shape[1] == 4] == [(2, 4, 7, 4)] * 4
    assert len(shapes) == 2 * 4 + 4 + 2 * 2


def test_sequences_with_equally_many_baskets_are_worked_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def groups(*lengths: int, side: str = "right") -> list[tuple[int, int]]:
        case = make_case(lengths, isolate="bos", side=side)
        return [(group.start, group.stop) for group in all_rows._groups(case.baskets, 8)]

    assert groups(14, 15, 16, 9, 9) == [(0, 3), (3, 5)]
    assert groups(14, 15, 2, 14, 15, 16) == [(0, 2), (3, 6)]  # one is too short to be calibrated
    assert groups(14, 14, 16, side="left") == [(0, 2), (2, 3)]  # the content of the last begins elsewhere
    monkeypatch.setattr(all_rows, "_CPU_BYTES", 0)
    assert groups(14, 14) == [(0, 1), (1, 2)]
