from __future__ import annotations

from fair_calibration.nearest_names import nearest_names


def test_nearest() -> None:
    assert nearest_names("bge-m4", ["BAAI/BGE-M3", "bge-m3", "other"], n=1) == ["bge-m3"]
    assert nearest_names("posir", ["PosIR"]) == ["PosIR"]
    assert nearest_names("demo", ["DemoX", "Dema", "deme", "dome", "PositionDemoRetrieval"], n=2) == [
        "DemoX",
        "PositionDemoRetrieval",
    ]
    assert nearest_names("demo", ["DiDeMoT2V", "PositionDemoRetrieval"], n=1) == ["PositionDemoRetrieval"]
    assert nearest_names("????", ["abc"]) == []
