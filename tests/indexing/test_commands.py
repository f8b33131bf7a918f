"""The commands build, status and assemble, on a tiny model and a small file."""

from __future__ import annotations

import errno
import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fair_calibration import FairConfig, FairSentenceTransformer
from fair_calibration.commands import main
from fair_indexing.shards import ShardFolder
from fair_indexing.text_encoder import TextEncoder
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
    assert capsys.readouterr().out == (
        "3 documents were truncated at 64 tokens, and what is cut off cannot be found; --max-seq-length raises the "
        "limit if the model can read more\n"
        f"7 vectors of 32 dimensions in {folder}, 7 of them encoded now\n"
        f"Next: fair-calibration assemble {folder} --flex INDEX makes an index for PyTerrier (or --npy).\n"
    )
    assert main([*arguments, "--strength", "0.5", "--max-seq-length", "64", "--tokens-per-batch", "500"]) == 0
    assert "0 of them encoded now" in capsys.readouterr().out

    assert main(["status", folder, "--verify"]) == 0
    out = capsys.readouterr().out
    assert f"model: {model} (weights " in out
    assert '"basket_size": 8' in out
    assert "documents: 7 of 7 in 2 of 2 shards of 4\ncomplete\nNext: fair-calibration assemble" in out

    assert main(["assemble", folder, "--npy", str(tmp_path / "npy")]) == 0
    fair = FairSentenceTransformer(model, config=CONFIG, device="cpu")
    fair.max_seq_length = 64
    expected = fair.encode_document(TEXTS, strength=0.5, normalize_embeddings=True)
    assert np.abs(np.load(tmp_path / "npy" / "vectors.npy") - expected).max() < 1e-6
    assert main(["assemble", folder, "--flex", str(tmp_path / "flex")]) == 0
    assert f"{tmp_path / 'flex'} is complete" in (out := capsys.readouterr().out)
    assert "Next: " in out


def test_status_of_what_is_not_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = ShardFolder.create(tmp_path / "b", manifest())
    shards.write(0, list("abcd"), np.ones((4, 2), dtype=np.float32), texts=list("abcd"))
    assert main(["status", str(shards.folder)]) == 1
    assert "documents: 4 of 10 in 1 of 3 shards of 4\nThe build is not complete; the same build command" in (
        capsys.readouterr().out
    )
    (shards.folder / "shards" / "000000000000" / "vectors.npy").write_bytes(b"")
    shards.finish(4)
    assert main(["status", str(shards.folder), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "vectors.npy: the file is damaged" in out
    assert "Documents of damaged shards are encoded again: the same build command" in out


def test_parts(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, n in ((0, 4), (1, 3)):
        assert main([*arguments, "--part", f"{i}/2"]) == 0
        assert (
            f"{n} vectors encoded now in part {i} of 2 of {tmp_path / 'b'}\nNext: after all" in capsys.readouterr().out
        )
    assert main(["status", str(tmp_path / "b")]) == 1
    assert main(arguments) == 0
    assert "7 vectors of 32 dimensions" in (out := capsys.readouterr().out)
    assert "0 of them encoded now" in out


@pytest.mark.parametrize("value", ["2/2", "1", "a/2", "-1/2", "1/"])
def test_parts_that_do_not_exist(arguments: list[str], value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*arguments, f"--part={value}"])
    assert (
        f"argument --part: expected I/N with I from 0 to N - 1, such as 0/4, got '{value}'" in capsys.readouterr().err
    )


def test_plain(arguments: list[str], tmp_path: Path) -> None:
    arguments = arguments[: arguments.index("--config")]
    assert main([*arguments, "--plain"]) == 0
    assert ShardFolder(tmp_path / "b").manifest.encoder.fair_config is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--plain"], "--plain: a plain model has no --strength and no --config"),
        (["--text-field", "text"], "expected 'text', the record has ['_id', 'body']"),
        (
            ["--devices", "cpu", "cuda:99"],
            "--devices: expected devices of this machine, such as 'cpu' or 'cuda:0', got",
        ),
        (
            ["--device", "cuda:99"],
            "--device: expected devices of this machine, such as 'cpu' or 'cuda:0', got 'cuda:99'",
        ),
        (["--max-seq-length", "1000000"], "max_seq_length: the model has positions for 130 tokens, got 1000000"),
        (["--part", "0/2", "--ray", "2"], "--part: --ray divides the build into parts itself; leave --part out"),
        (["--config", "{bad"], "config: expected the name of a preset"),
        (["--config", "[1]"], "config: expected a JSON object of settings"),
        (["--config", ""], "config: expected the name of a preset"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *change]) == 2
    (line,) = [s for s in capsys.readouterr().err.splitlines() if s.startswith("fair-calibration build: error: ")]
    assert message in line


@pytest.mark.parametrize("option", ["--tokens-per-batch", "--shard-size", "--max-seq-length", "--ray"])
@pytest.mark.parametrize("value", ["0", "-5", "many"])
def test_numbers_that_are_out_of_range(
    arguments: list[str], option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main([*arguments, option, value])
    assert exit.value.code == 2
    assert f"argument {option}: expected an integer of at least 1, got '{value}'" in capsys.readouterr().err


def test_output_folders_are_checked_before_the_model_is_loaded(
    arguments: list[str],
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("fair_calibration.loading.load_calibrated", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    for folder in (source, str(tmp_path / "full")):
        arguments[3] = folder
        assert main(arguments) == 2
        message = f"folder: expected a new or an empty folder, or one with a build, got {folder!r}"
        assert capsys.readouterr().err.strip() == f"fair-calibration build: error: {message}"


def test_paths_that_do_not_exist(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for place, message in ((1, "model: there is no folder './nope'"), (2, "source: no such file: nope")):
        changed = [*arguments]
        changed[place] = "./nope"
        assert main(changed) == 2
        assert message in capsys.readouterr().err
    for command in (["status", "nope"], ["assemble", "nope", "--npy", "x"]):
        assert main(command) == 2
        assert "folder: there is no folder 'nope'" in capsys.readouterr().err


def test_an_interruption_is_one_line_that_says_what_is_kept(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    encode, batches = TextEncoder._encode, []

    def interrupted(self: TextEncoder, tokenized: Any, batch: list[int]) -> Any:
        if len(batches) == 2:
            raise KeyboardInterrupt
        batches.append(len(batch))
        return encode(self, tokenized, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TextEncoder, "_encode", interrupted)
        assert main([*arguments, "--tokens-per-batch", "100"]) == 130
    n = sum(batches)
    assert [line for line in capsys.readouterr().err.splitlines() if "fair-calibration" in line] == [
        f"fair-calibration build: interrupted {n} of 7 documents are kept in {tmp_path / 'b'}; the same command resumes"
    ]
    assert main(["status", str(tmp_path / "b")]) == 1
    assert f"unfinished shard: {n} more documents are encoded" in capsys.readouterr().out
    assert main([*arguments, "--tokens-per-batch", "100"]) == 0


def test_an_assembled_index_can_be_verified(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = str(tmp_path / "flex")
    assert main(arguments) == 0
    assert main(["assemble", str(tmp_path / "b"), "--flex", index]) == 0
    capsys.readouterr()
    assert main(["status", index]) == 0
    assert "documents: 7 in an assembled index\ncomplete" in capsys.readouterr().out
    assert main(["status", index, "--verify"]) == 0
    assert "verified: every byte" in capsys.readouterr().out
    os.truncate(tmp_path / "flex" / "vecs.f4", 100)
    assert main(["status", index]) == 2
    assert "vecs.f4: the file is damaged, expected 896 bytes, got 100" in capsys.readouterr().err


def test_a_damaged_source_is_one_line(
    arguments: list[str], source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray(gzip.compress(Path(source).read_bytes()))
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "docs.jsonl.gz").write_bytes(data)
    arguments[2] += ".gz"
    assert main(arguments) == 2
    assert "fair-calibration build: error: " in (error := capsys.readouterr().err)
    assert "docs.jsonl.gz: the file is damaged after line" in error


def test_a_full_disk_says_how_to_go_on(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        error = OSError(errno.ENOSPC, "No space left on device")
        error.add_note("run the build again")
        raise error

    monkeypatch.setattr(sys.modules["fair_indexing.builder"], "build", full)
    assert main(arguments) == 2
    assert "No space left on device run the build again" in capsys.readouterr().err
