from __future__ import annotations

from mteb_fair.names import nearest


def test_nearest() -> None:
    assert nearest("bge-m4", ["BAAI/BGE-M3", "bge-m3", "other"], n=1) == ["bge-m3"]
    assert nearest("posir", ["PosIR"]) == ["PosIR"]
    assert nearest("demo", ["DemoX", "Dema", "deme", "dome", "PositionDemoRetrieval"], n=2) == [
        "DemoX",
        "PositionDemoRetrieval",
    ]
    assert nearest("demo", ["DiDeMoT2V", "PositionDemoRetrieval"], n=1) == ["PositionDemoRetrieval"]
    assert nearest("????", ["abc"]) == []
