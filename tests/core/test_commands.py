"""The frame of the command line: commands of entry points, errors in one line, a bare install."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fair_calibration import commands
from fair_calibration.commands import Command, main

BARE = """
import sys
import fair_calibration  # with the packages that transformers uses where they are installed
for name in ("pandas", "scipy", "pyarrow", "pyterrier", "mteb", "matplotlib", "ray"):
    sys.modules[name] = None  # importing it raises a ModuleNotFoundError
from fair_calibration.commands import main
sys.exit(main(sys.argv[1:]))
"""


def run_bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line where the packages of the extras cannot be imported."""
    return subprocess.run([sys.executable, "-c", BARE, *arguments], capture_output=True, text=True)


def test_help_on_a_bare_install() -> None:
    process = run_bare("--help")
    assert process.returncode == 0
    assert process.stdout.startswith("usage: fair-calibration ")
    assert "reflection" in process.stdout
    process = run_bare("evaluate", "--help")
    assert process.returncode == 0
    assert "--against" in process.stdout


def test_missing_package_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "scores.csv").write_text("qid,score,position\n")
    process = run_bare("evaluate", str(tmp_path / "scores.csv"))
    assert process.returncode == 2
    assert process.stderr == (
        "fair-calibration evaluate: error: the package 'pandas' is not installed, which this command needs: "
        'pip install "fair-calibration[evaluation]"\n'
    )


def test_as_a_module_and_as_a_script() -> None:
    script = Path(sys.executable).with_name("fair-calibration")
    for program in ([sys.executable, "-m", "fair_calibration"], [str(script)]):
        process = subprocess.run([*program, "--help"], capture_output=True, text=True)
        assert process.returncode == 0
        assert process.stdout.startswith("usage: fair-calibration ")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int | None]], None]:
    """Returns a function that makes a command ``go`` of a function."""

    def use_function(run: Callable[[argparse.Namespace], int | None]) -> None:
        command = Command("go", "goes", "some", lambda _: None, run)
        monkeypatch.setattr(commands, "find_commands", lambda: [command])

    return use_function


def test_exit_status(use: Callable[..., None]) -> None:
    use(lambda _: None)
    assert main(["go"]) == 0
    use(lambda _: 1)
    assert main(["go"]) == 1


def raising(error: BaseException, *notes: str) -> Callable[[argparse.Namespace], int | None]:
    for note in notes:
        error.add_note(note)

    def run(_: argparse.Namespace) -> int | None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "notes", "line", "status"),
    [
        (ValueError("two\n lines"), ["and a note"], "error: two lines and a note", 2),
        (MemoryError(), [], "error: MemoryError", 2),
        (ImportError("figures need matplotlib"), [], "error: figures need matplotlib", 2),
        (FileNotFoundError(2, "No such file", "x"), [], "error: [Errno 2] No such file: 'x'", 2),
        (KeyboardInterrupt(), ["Run it again."], "interrupted Run it again.", 130),
        (KeyboardInterrupt(), [], "interrupted", 130),
    ],
)
def test_errors_are_one_line(
    error: BaseException,
    notes: list[str],
    line: str,
    status: int,
    use: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(raising(error, *notes))
    assert main(["go"]) == status
    assert capsys.readouterr().err == f"fair-calibration go: {line}\n"


def test_no_other_error_is_hidden(use: Callable[..., None]) -> None:
    use(raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["go"])


def test_the_api_reference_lists_the_commands() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{each.name}` | {each.help} | {each.extra} |" for each in commands.find_commands()]
