"""What commands write: said, checked before any work, and never one file over another."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.helpers.cli import run
from tests.helpers.trace_cases import Run

LENGTHS = ("--lengths", "400,30/51")
COMMANDS = {
    "plan": ("plan", *LENGTHS),
    "topology": ("topology", *LENGTHS),
    "simulate": ("simulate", *LENGTHS, "--topologies", "none"),
    "sparse": ("sparse", "--model", "cogvideox1.5", "--block", "1024", "--ulysses", "2"),
}
MASKS = ("sparse", "--masks", "m.npy", "--ulysses", "2")


def told(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_what_it_wrote(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    pytest.importorskip("plotly")
    files = {"--report": tmp_path / "a.html"}
    if command != "sparse":
        files["--json"] = tmp_path / "a.json"
    if command == "plan":
        files["--picture"] = tmp_path / "a.svg"
    given = [str(word) for pair in files.items() for word in pair]
    code, out, err = run(capsys, *COMMANDS[command], *given)
    assert code == 0, err
    for path in files.values():
        assert path.stat().st_size > 100 and f"written: {path}\n" in out


def test_a_ranking_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *COMMANDS["topology"], "--json", "-")
    found = json.loads(out)
    assert code == 0 and f"best: {found['rows'][0]['spec']}" in err
    assert found["rows"][0]["seconds"] <= found["rows"][-1]["seconds"]


def test_folders_of_traces_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "made"
    code, out, _ = run(capsys, *COMMANDS["simulate"], "--traces", str(folder))
    named = ", ".join(str(folder / "none" / f"rank{rank}.json") for rank in range(2))
    assert code == 0 and f"written: {named}\n" in out
    many = ("simulate", "--lengths", "5/6/7/8", "--topologies", "none")
    code, out, _ = run(capsys, *many, "--traces", str(tmp_path / "many"))
    assert code == 0 and f"written: {tmp_path / 'many' / 'none'} (4 files)\n" in out
    (tmp_path / "traces").mkdir()
    traces = Run(((0.1, 0.3), (0.3, 0.1), (0.2, 0.25))).write(tmp_path / "traces")
    to = tmp_path / "to.json"
    code, out, _ = run(
        capsys, "trace", str(traces), "--json", str(to), "--out", str(tmp_path / "o")
    )
    assert code == 0 and f"written: {to}\n" in out and "rank1.json\n" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*COMMANDS["plan"], "--json", "a.html", "--report", "./a.html"), "--json and --report"),
        ((*COMMANDS["plan"], "--json", "a", "--picture", "b/../a"), "--json and --picture"),
        (("plan", "--file", "x", "--json", "x"), "--file and --json"),
        (("plan", "--manifest", "m.csv", "--picture", "m.csv"), "--manifest and --picture"),
        (("topology", "--file", "x.html", "--report", "x.html"), "--file and --report"),
        ((*COMMANDS["simulate"], "--json", "a", "--traces", "a"), "--json and --traces"),
        (("trace", ".", "--json", "a", "--out", "a"), "--json and --out"),
        (("trace", ".", "--lens", "a", "--json", "a"), "--lens and --json"),
        ((*MASKS, "--report", "m.npy"), "--masks and --report"),
        (("calibrate", "--out", "a", "--json", "a"), "--out and --json"),
        (("bench", "--data", "g1b1i64f1s0", "--out", "a.html", "--report", "a.html"), "--out and"),
    ],
)
def test_two_options_with_one_file(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2 and said in err and "written over" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("option", ["--json", "--picture"])
def test_files_that_could_not_be_written_are_told_before_any_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    for path in (tmp_path, tmp_path / "gone" / "a"):
        code, out, err = run(capsys, *COMMANDS["plan"], option, str(path))
        assert code == 2 and out == "" and err.startswith(f"bascule: {option} {path}: ")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert (code, out) == (0, f"bascule {version('bascule')}\n")
    assert "bascule --version" in run(capsys, "--help")[1]


@pytest.mark.parametrize("command", [*COMMANDS, "trace"])
def test_without_a_report_nothing_needs_plotly(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)  # an import of it fails
    folder = Run(((0.1, 0.3), (0.3, 0.1), (0.2, 0.25))).write(tmp_path)
    code, _, err = run(capsys, *COMMANDS.get(command, ("trace", str(folder))))
    assert code == 0, err
