"""The commands of ``python -m fair_indexing``, on a tiny model and a small file."""

from __future__ import annotations

import errno
import gzip
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fair_calibration import FairConfig, FairSentenceTransformer
from fair_indexing import cli
from fair_indexing.cli import build_parser, main
from fair_indexing.shards import ShardFolder
from tests.core.tiny_models import documents
from tests.indexing.manifests import manifest

TEXTS = documents([50, 12, 30, 90, 64, 21, 77])
CONFIG = FairConfig(strength=0.8, basket_size=8)


@pytest.fixture(scope="module")
def model(tiny_folder: Callable[..., Path]) -> str:
    return str(tiny_folder("bert", "cls"))


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"_id": f"d{i}", "body": text}) + "\n" for i, text in enumerate(TEXTS)))
    return str(path)


@pytest.fixture
def arguments(model: str, source: str, tmp_path: Path) -> list[str]:
    fields = ["--docno-field", "_id", "--text-field", "body", "--shard-size", "4", "--quiet"]
    return ["build", model, source, str(tmp_path / "b"), *fields, "--config", CONFIG.to_json()]


def test_build_status_assemble(
    arguments: list[str], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "b")
    assert main([*arguments, "--strength", "0.5", "--max-seq-length", "64", "--tokens-per-batch", "500"]) == 0
    assert capsys.readouterr().out == f"7 vectors of 32 dimensions in {folder}, 7 encoded now\n"
    assert main([*arguments, "--strength", "0.5", "--max-seq-length", "64", "--tokens-per-batch", "500"]) == 0
    assert "0 encoded now" in capsys.readouterr().out

    assert main(["status", folder, "--verify"]) == 0
    out = capsys.readouterr().out
    assert f"model: {model} (weights " in out
    assert '"basket_size": 8' in out
    assert "documents: 7 of 7 in 2 shards\ncomplete\n" in out

    assert main(["assemble", folder, "--npy", str(tmp_path / "npy")]) == 0
    fair = FairSentenceTransformer(model, config=CONFIG, device="cpu")
    fair.max_seq_length = 64
    expected = fair.encode_document(TEXTS, strength=0.5, normalize_embeddings=True)
    assert np.abs(np.load(tmp_path / "npy" / "vectors.npy") - expected).max() < 1e-6
    for name in ("flex", "parquet"):
        assert main(["assemble", folder, f"--{name}", str(tmp_path / name)]) == 0
        assert f"{tmp_path / name} is complete" in capsys.readouterr().out


def test_status_of_what_is_not_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = ShardFolder.create(tmp_path / "b", manifest())
    shards.write(0, list("abcd"), np.ones((4, 2), dtype=np.float32), texts=list("abcd"))
    assert main(["status", str(shards.folder)]) == 1
    assert "documents: 4 of 10 in 1 shards\nnot complete" in capsys.readouterr().out
    (shards.folder / "shards" / "000000000000" / "vectors.npy").write_bytes(b"")
    shards.finish(4)
    assert main(["status", str(shards.folder), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "vectors.npy: the file is damaged" in out
    assert "run the build again to encode anew what is" in out


def test_plain(arguments: list[str], tmp_path: Path) -> None:
    arguments = arguments[: arguments.index("--config")]
    assert main([*arguments, "--plain"]) == 0
    assert ShardFolder(tmp_path / "b").manifest.encoder.fair_config is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--strength", "2"], "strength: expected a number in [0, 1], got 2.0"),
        (["--plain"], "--plain: a plain model has no --strength and no --config"),
        (["--text-field", "text"], "expected 'text', the record has ['_id', 'body']"),
        (["--devices", "cpu", "cuda:99"], "devices: expected devices of this machine, such as 'cpu' or 'cuda:0', got"),
        (
            ["--device", "cuda:99"],
            "--device: expected devices of this machine, such as 'cpu' or 'cuda:0', got 'cuda:99'",
        ),
        (["--max-seq-length", "-5"], "--max-seq-length: expected an integer of at least 1, got -5"),
        (["--max-seq-length", "0"], "--max-seq-length: expected an integer of at least 1, got 0"),
        (
            ["--config", "{bad"],
            "--config: expected what FairConfig.to_json writes, got '{bad' (Expecting property name",
        ),
        (
            ["--config", "[1]"],
            "--config: expected what FairConfig.to_json writes, got '[1]' (values: expected a mapping",
        ),
        (["--config", ""], "--config: expected what FairConfig.to_json writes, got '' (Expecting value"),
        (["--shard-size", "0"], "shard_size: expected an integer of at least 1, got 0"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main([*arguments, *change])
    assert exit.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fair_indexing: error: ")]
    assert message in line


def test_a_damaged_source_is_one_line(
    arguments: list[str], source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray(gzip.compress(Path(source).read_bytes()))
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "docs.jsonl.gz").write_bytes(data)
    arguments[2] += ".gz"
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "fair_indexing: error: " in (error := capsys.readouterr().err)
    assert "docs.jsonl.gz: the file is damaged after line" in error


def test_a_full_disk_says_how_to_go_on(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        error = OSError(errno.ENOSPC, "No space left on device")
        error.add_note("run the build again")
        raise error

    monkeypatch.setattr(cli, "build", full)
    with pytest.raises(SystemExit):
        main(arguments)
    assert "No space left on device run the build again" in capsys.readouterr().err


def test_it_is_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fair_indexing", "assemble", "nowhere", "--npy", "x"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_module("fair_indexing", run_name="__main__")
    assert exit.value.code == 2
    assert "fair_indexing: error: folder: nowhere holds no build" in capsys.readouterr().err


def test_all_commands_have_help() -> None:
    assert {"build", "status", "assemble"} <= set(build_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr,arg-type,operator]
