"""The command line without ranks: what a user sees, and what a user's mistake costs."""

import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bascule.cli import COMMANDS, launch, parse
from bascule.cli.inputs import ClusterOptions, InputOptions
from bascule.cli.plan import PlanOptions
from bascule.errors import ConfigError
from bascule.machine.cluster import HardwareProfile
from bascule.options import check_options
from bascule.plan.limits import Limits
from bascule.quantities import percent, seconds
from bascule.workload import save_masks
from bascule.workload.codes import parse_data_codes, sample_lengths, seq_lens
from bascule.workload.tokens import MODELS
from tests.helpers.cli import (
    Console,
    check_golden,
    modules_imported_by,
    options_of,
    refused,
    run,
    sentence,
)
from tests.helpers.sparse_studies import drifting
from tests.helpers.trace_cases import Run

LENGTHS = ("--lengths", "400,30/51")
TRACED = Run(
    ((0.1, 0.3), (0.3, 0.1), (0.2, 0.25), (0.1, 0.2)),
    lens=(((100,), (300,)), ((300, 10), (90,)), ((200,), (250,)), ((50, 50), (200,))),
)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


# What is printed


@pytest.mark.parametrize(
    ("name", "command"),
    {
        "plan": "plan --lengths 4096,300/512/900,40/",
        "plan_idle": "plan --lengths //",
        "plan_even": "plan --lengths 40,40,40/40,40,40,40,40",
        "plan_whole": "plan --lengths 40,40,40/10,10,10,10,90",
        "plan_bags": "plan --lengths 900/40//30 --ranks 8 --topology g2n1+g3r2n1 --wires",
        "plan_of_one": "plan --lengths 40,40",
        "plan_few": "plan --lengths 40/41/2/9 --num-layers 1",
        "plan_auto": "plan --lengths 50000/9,9/8,8/9 --topology auto --ranks-per-node 2",
        "topology": "topology --data g4b2i256f1s0 --steps 2 --rows 3",
        "topology_even": "topology --lengths 40,41/41,40",
        "topology_of_one": "topology --lengths 90000/5/5/5 --num-layers 30",
        "simulate": "simulate --data g2b4i256f1s0,g2b1i512f1s0 --steps 3 --gpu-hour-price 2 "
        "--text-encoder-us 20",
        "sparse": "sparse --masks masks.npz --target 1 --ranks 4",
        "sparse_of_one": "sparse --masks masks.npz --target 1 --ring 3 --layers 1 --steps 1",
        "trace": "trace .",
        "trace_of_one": "trace host_0.pt.trace.json",
    }.items(),
)
def test_the_console(
    capsys: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    TRACED.write(tmp_path)
    save_masks(tmp_path / "masks.npz", np.stack([np.stack([x, ~x]) for x in drifting(3)]))
    code, out, err = run(capsys, *command.split())
    assert code == 0, err
    check_golden(name, out)


def test_the_share_of_wires_is_of_the_time_of_a_rank(capsys: Console) -> None:
    """Two ranks: each computes half, and sends half of 8 d bytes a token to the other."""
    width, tokens, flops, speed, launch = 512, 1000, 1e12, 1e9, 50e-6
    compute = (24 * tokens * width**2 + 4 * 2 * (tokens / 2) ** 2 * width) / flops / 2
    wires = 8 * width * tokens / 2 / 2 / speed + 2 * launch
    machine = "--d-model 512 --num-layers 1 --tflops 1 --intra-gbs 1 --latency-us 50"
    lens = "plan --lengths 500,500/ --topology g2n1 --wires"
    code, out, _ = run(capsys, *f"{lens} {machine}".split())
    assert code == 0
    assert f"Communication takes {percent(wires / (wires + compute))} of the time" in out
    assert re.search(rf"slowest rank +{seconds(wires + compute)}", out)


def test_a_plan_can_be_read_again(capsys: Console) -> None:
    arguments = ("--data", "g2b3i256f1s0", "--topology", "g2n1", "--json", "-")
    code, out, err = run(capsys, "plan", *arguments)
    plan = json.loads(out)
    assert code == 0 and [len(lens) for lens in plan["seq_lens"]] == [3, 3]
    assert plan["topology"] == "g2n1" and "tokens that change ranks" in err


def test_a_ranking_as_json(capsys: Console) -> None:
    code, out, err = run(capsys, "topology", *LENGTHS, "--json", "-")
    ranking = json.loads(out)
    assert code == 0 and re.search(rf"fastest topology +{ranking['rows'][0]['spec']}", err)
    assert ranking["rows"][0]["seconds"] <= ranking["rows"][-1]["seconds"]


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ("--num-heads 8", "g4n1"),
        ("--num-heads 6", "g2n2"),
        ("--num-heads 2", "g2r2n1"),
        ("--model wan2.1-1.3b", "g4n1"),  # of 12 heads
        ("--model cogvideox-2b", "g2n2"),  # of 30
        ("--model cogvideox-2b --d-model 1920", "g4n1"),  # a model of the user's, heads unknown
    ],
)
def test_advice_follows_the_heads(capsys: Console, options: str, best: str) -> None:
    command = f"topology --lengths 100000//94000/ --json - {options}"
    code, out, err = run(capsys, *command.split())
    assert code == 0 and json.loads(out)["best"] == best, err


# Inputs


def test_steps_are_drawn_from_a_manifest(capsys: Console, tmp_path: Path) -> None:
    manifest = tmp_path / "samples.jsonl"
    rows = [f'{{"width": 16, "height": {16 * (k + 1)}}}' for k in range(11)]
    manifest.write_text("\n".join(rows))
    options = InputOptions(manifest=manifest, batch_size=2, ranks=2)
    steps = [options.read(steps_after=k) for k in range(4)]
    drawn = [sorted(n for rank in step for n in rank) for step in steps]
    assert all([len(rank) for rank in step] == [2, 2] for step in steps)
    for epoch in (drawn[:2], drawn[2:]):
        seen = [n for step in epoch for n in step]
        assert len(set(seen)) == 8 and set(seen) <= set(range(1, 12))
    assert drawn[:2] != drawn[2:] and options.read(steps_after=1) == steps[1]
    by_default = InputOptions(manifest=manifest, ranks=2).read()
    assert [len(rank) for rank in by_default] == [4, 4]
    whole = sorted(n for rank in InputOptions(manifest=manifest, ranks=4).read() for n in rank)
    assert whole == list(range(1, 12))  # a small table is one step
    code, out, _ = run(capsys, "plan", "--manifest", str(manifest), "--topology", "g1n2")
    assert code == 0 and "4 samples per rank" in out and out.startswith(f"{manifest}: 11 samples")
    with pytest.raises(ConfigError, match="needs 12 samples per step"):
        InputOptions(manifest=manifest, batch_size=6, ranks=2).read()
    manifest.write_text('{"width": 16, "height": 16, "frames": 34}')
    for model, tokens in (("wan2.1", 9), ("mochi", 6)):
        options = InputOptions(manifest=manifest, model=model, ranks=1)
        assert options.read() == [[tokens]] and options.cost.d_model == MODELS[model].width


def test_later_steps_of_data_codes_are_other_batches(capsys: Console) -> None:
    options = InputOptions(data="g2b3i256f1s0", seed=5, step=3)
    for after in (0, 1, 4):
        codes = parse_data_codes("g2b3i256f1s0")
        expected = seq_lens(sample_lengths(codes, seed=5, step=3 + after))
        assert options.read(steps_after=after) == expected
    taken: list[float] = []
    for step, steps in (("0", "1"), ("1", "1"), ("0", "2")):
        base = ("topology", "--data", "g2b3i256f1s0", "--json", "-")
        ranking = json.loads(run(capsys, *base, "--step", step, "--steps", steps)[1])
        taken += [row["seconds"] for row in ranking["rows"] if row["spec"] == "g1n2"]
    assert taken[2] == pytest.approx((taken[0] + taken[1]) / 2, rel=1e-9)
    assert taken[0] != taken[1]


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 12, 13, 14, 16, 22, 24, 72, 77])
def test_nodes_are_as_large_as_eight_ranks_allow(num_ranks: int) -> None:
    machines = ClusterOptions().machines(num_ranks)
    assert machines.num_ranks == num_ranks and machines.ranks_per_node <= 8
    assert not any(num_ranks % size == 0 for size in range(machines.ranks_per_node + 1, 9))


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({}, {}),
        ({"tflops": 3.0}, {"flops_per_s": 3e12}),
        ({"intra_gbs": 0.5}, {"intra_bytes_per_s": 0.5e9}),
        ({"inter_gbs": 0.25}, {"inter_bytes_per_s": 0.25e9}),  # between nodes, of a plan alone
        ({"latency_us": 0.5}, {"latency_s": 0.5e-6}),
        ({"memory_gb": 4.0}, {"memory_bytes": 4e9}),
        ({"ranks_per_node": 2}, {"num_nodes": 3, "ranks_per_node": 2}),
    ],
)
def test_an_option_replaces_a_number(options: dict[str, Any], changed: dict[str, Any]) -> None:
    known = HardwareProfile.load("h100-datasheet").cluster(1, 6)
    assert PlanOptions(**options).machines(6) == replace(known, **changed)


@pytest.mark.parametrize(
    ("kb_per_token", "max_tokens", "limit"),
    [(10.0, None, 200), (10.0, 150, 150), (10.0, 500, 200), (0.5, None, 4000)],
)
def test_a_rank_holds_what_fits_into_its_memory(
    kb_per_token: float, max_tokens: int | None, limit: int
) -> None:
    """2 MB; and no more tokens than were allowed."""
    options = ClusterOptions(memory_gb=2e-3, kb_per_token=kb_per_token, max_tokens=max_tokens)
    assert options.limits is not None and options.limits.tokens == limit
    assert ClusterOptions(max_tokens=7).limits == Limits(tokens=7)


# Files that commands write


@pytest.mark.parametrize("name", ["plan", "topology", "simulate", "sparse", "trace"])
def test_every_command_writes_its_report(capsys: Console, tmp_path: Path, name: str) -> None:
    (tmp_path / "traces").mkdir()
    command = {
        "plan": ("plan", *LENGTHS, "--picture", str(tmp_path / "a.svg")),
        "topology": ("topology", *LENGTHS),
        "simulate": ("simulate", *LENGTHS, "--topologies", "none"),
        "sparse": ("sparse", "--model", "cogvideox1.5", "--block", "1024", "--ulysses", "2"),
        "trace": ("trace", str(TRACED.write(tmp_path / "traces"))),
    }[name]
    files = {"--json": tmp_path / "a.json", "--report": tmp_path / "a.html"}
    words = [str(word) for pair in files.items() for word in pair]
    code, out, err = run(capsys, *command, *words)
    assert code == 0, err
    for path in (*files.values(), *tmp_path.glob("a.svg")):
        assert path.stat().st_size > 100 and f"written: {path}\n" in out
    json.loads(files["--json"].read_text())


def test_folders_of_traces(capsys: Console, tmp_path: Path) -> None:
    for lengths, folder in (("400,30/51", tmp_path / "few"), ("5/6/7/8", tmp_path / "many")):
        base = ("simulate", "--lengths", lengths, "--topologies", "none")
        code, out, _ = run(capsys, *base, "--traces", str(folder))
        files = sorted((folder / "none").iterdir())
        words = f"{folder / 'none'} (4 files)" if len(files) > 2 else ", ".join(map(str, files))
        assert code == 0 and len(files) >= 2 and f"written: {words}\n" in out
    traces, out_folder = TRACED.write(tmp_path), str(tmp_path / "out")
    code, out, _ = run(capsys, "trace", str(traces), "--out", out_folder)
    assert code == 0 and "rank1.json\n" in out


@pytest.mark.parametrize("option", ["--json", "--picture"])
def test_files_that_could_not_be_written_are_refused_before_any_work(
    capsys: Console, tmp_path: Path, option: str
) -> None:
    for path in (tmp_path, tmp_path / "gone" / "a"):
        message = sentence(capsys, "plan", *LENGTHS, option, str(path))
        assert message.startswith(f"bascule: {option} {path}: ")


# The command line itself


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_the_command_alone(name: str) -> None:
    modules = modules_imported_by("-m", "bascule.cli", name, "--help")
    assert "bascule.options" in modules  # -X importtime does not see the command itself
    assert not modules & {"torch", "scipy", "tyro", "rich", "transformers", "diffusers"}
    assert sum(module.split(".")[0] == "bascule" for module in modules) < 39


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_each_option_once_in_groups_and_an_example(
    capsys: Console, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, text, _ = run(capsys, name, "--help")
    assert code == 0 and max(map(len, text.splitlines())) < 80
    assert not re.search(r"None|\{\w|\bdefault\b.*\(default", text)
    usage, _, *groups, example = text.strip().split("\n\n")
    assert all(re.match(r"[A-Z][a-z ]+:\n  [-A-Z]", group) for group in groups)
    listed = re.findall(r"^  (?:--)?(\S+)", "\n".join(groups), re.MULTILINE)
    names = [field.name.replace("_", "-") for field in fields(options_of(name))]
    assert sorted(option.lower() for option in listed) == sorted(names)
    words = shlex.split(example.removeprefix("For example: bascule "))
    assert words[0] == name and usage.startswith(f"usage: bascule {name} ")
    check_options(parse(words)[1])


def test_planning_on_the_command_line_needs_no_torch() -> None:
    commands = ("plan", *LENGTHS), ("sparse", "--model", "wan2.1", "--block", "1280", "--ring", "2")
    for command in (*commands, ("simulate", *LENGTHS), ("topology", *LENGTHS)):
        modules = modules_imported_by("-m", "bascule.cli", *command)
        assert "bascule.report.page" in modules and "torch" not in modules
        ours = {name for name in modules if name.split(".")[0] == "bascule"}
        assert command[0] != "plan" or len(ours) <= 45


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_begins_as_its_help(capsys: Console, name: str) -> None:
    assert f"  {name:19}{COMMANDS[name]}\n" in run(capsys, "--help")[1]
    with pytest.raises(SystemExit):
        parse([name, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"usage: bascule {name} ") and COMMANDS[name][:20] in text


def test_the_version_and_a_command_that_is_none(capsys: Console) -> None:
    assert run(capsys, "--version")[:2] == (0, f"bascule {version('bascule')}\n")
    text = run(capsys)[1]
    assert "bascule --version" in text and max(map(len, text.splitlines())) <= 80
    assert "no command 'nonsense'; there are inspect, plan" in sentence(capsys, "nonsense")
    assert "no command 'simlate'; did you mean simulate?" in sentence(capsys, "simlate")
    assert run(capsys, "plan", "--no-such-option")[0] == 2


def test_a_reader_may_stop_reading() -> None:
    for words in ("--help", "plan --help"):
        command = f"{sys.executable} -m bascule.cli {words} | true"
        process = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=600)
        assert process.stderr == ""


# What a user's mistake costs


CLIPS = "width,height,n_frames,fps,caption_short,caption_long\n64,64,161,24,a cat,a cat sits\n"
OF_WAN = "--model wan2.1 --max-frames 81"


@pytest.mark.parametrize(
    ("table", "options", "answers"),
    [
        (CLIPS, "", f"--columns text=caption_long {OF_WAN}"),
        (CLIPS, "--columns=fps=fps", f"--columns fps=fps,text=caption_long {OF_WAN}"),
        (CLIPS, "--model=flux.2 --columns text=", f"--columns text= {OF_WAN}"),
        ("width,height,duration\n64,64,9\n", "", f"--fps 16 {OF_WAN}"),
        ("width,height,clip_frames\n64,64,9\n", "", f"--columns frames=clip_frames {OF_WAN}"),
        ("width,height,my text\n64,64,a cat sits\n", "", "--columns 'text=my text'"),
        ("width,height,length\n64,64,9\n", "", "--columns tokens=length"),
        ("width,height\n64,64\n", "--model wan2.1", "--model wan2.1 --columns frames="),
        ("width,height,image,edit_image\n64,64,a,b\n", "", None),
    ],
)
def test_all_questions_of_a_table_have_one_answer_that_runs(
    capsys: Console, tmp_path: Path, table: str, options: str, answers: str | None
) -> None:
    path = tmp_path / "a table.csv"
    path.write_text(table)
    said = sentence(capsys, "inspect", str(path), *options.split())
    command = said.strip().partition(". For example: ")[2]
    if answers is None:  # these pictures are not there, which no option changes
        assert "Then: 1 row cannot be read" in said and "--columns reference=edit_image" in command
        return
    assert command == f"bascule inspect '{path}' {answers}"
    assert run(capsys, *shlex.split(command)[1:])[0] == 0
    said = sentence(capsys, "plan", "--manifest", str(path), "--ranks", "2", *options.split())
    assert run(capsys, *shlex.split(said.partition(". For example: ")[2])[1:])[0] == 0


def test_a_table_may_be_given_as_to_another_command(capsys: Console, tmp_path: Path) -> None:
    path = str(tmp_path / "sizes.csv")
    Path(path).write_text("width,height\n64,64\n")
    assert run(capsys, "inspect", path) == run(capsys, "inspect", "--manifest", path)
    assert "give one table" in sentence(capsys, "inspect")
    assert f"by --manifest {path}" in sentence(capsys, "plan", path)


def test_lengths_without_ranks_are_of_rank_0(capsys: Console) -> None:
    said = "Rank 0 loads all these sequences"
    outputs = [run(capsys, "plan", "--lengths", lens)[1] for lens in ("9,9", "9/9", "9")]
    assert [said in output for output in outputs] == [True, False, False]


PLAN, WAN, BENCH = "plan --lengths 5/6", "sparse --model wan2.1 --block 1280", "bench --ranks 1"
CODES = "bench --data g1b1i256f1s0"


@pytest.mark.parametrize(
    ("arguments", "said"),
    refused(
        ("plan", "give one of"),
        ("topology", "give one of"),
        ("plan --lengths 10 --data g1b1i256f1s0", "give one of"),
        ("plan --lengths 10,x", "10,x"),
        ("plan --lengths=-5/3", "-5"),
        ("plan --lengths=", "give tokens, such as 4096,300/512/900,40"),
        (f"{PLAN} --topology g3n1", "g3n1"),
        (f"{PLAN} --topology g2x1", "topology 'g2x1': write gGnN"),
        (f"{PLAN} --topology g1n1+x", "topology 'g1n1+x': 'x' is not a term; write gGnN"),
        (f"{PLAN} --ranks 1", "2 ranks"),
        (f"{PLAN} --batch-size 2", "only for --manifest"),
        ("plan --data g1b1i256", "g1b1i256"),
        ("plan --file /nonexistent/lengths", "/nonexistent/lengths"),
        (f"{PLAN} --gamma -1", "-1"),
        (f"{PLAN} --json /nonexistent/plan.json", "cannot be written"),
        (f"{PLAN} --max-tokens 5", "rank 1, sequence 0: 6 tokens"),
        (f"{PLAN} --max-tokens 2 --topology auto", "rank 1, sequence 0: 6 tokens exceed the limit"),
        (f"{PLAN} --max-tokens 0", "tokens=0"),
        (f"{PLAN} --kb-per-token 2e7", "rank 1, sequence 0: 6 tokens"),
        ("topology --lengths 5/6 --steps 2", "--steps 2"),
        ("topology --data g2b1i256f1s0 --steps 0", "--steps 0"),
        ("topology --lengths 5/6 --ranks-per-node 3", "--ranks-per-node 3"),
        ("topology --lengths 5/6 --tflops 0", "--tflops 0"),
        ("topology --lengths 5/6 --max-tokens 2", "tokens"),
        ("topology --lengths 5/6 --kb-per-token 9e7", "too little for one token"),
        ("simulate --lengths 5/6 --topologies foo", "give none, padded, buckets, packs, loader"),
        ("simulate --lengths 5/6 --topologies g2x1", "topology 'g2x1': write gGnN"),
        ("simulate --lengths 5/6 --steps 2", "only --data and --manifest"),
        ("simulate --lengths 5/6 --seed 2", "--seed 2: lengths are as given"),
        ("sparse --ranks 8", "not neither"),
        ("sparse --model wan2.1 --masks x.npz --ranks 8", "not both"),
        ("sparse --model sora --ranks 8", "'sora': give wan2.1 or cogvideox1.5"),
        ("sparse --masks /nonexistent/masks.npz --ranks 8", "/nonexistent/masks.npz"),
        ("sparse --masks masks.txt --ranks 8", ".npz"),
        (WAN, "--ranks"),
        (f"{WAN} --ranks 8 --ulysses 3", "1 x 8, 2 x 4, 4 x 2, 8 x 1"),
        (f"{WAN} --ranks 8 --ulysses 4 --ring 4", "--ulysses 4, --ring 4"),
        (f"{WAN} --ring 0", "--ring 0"),
        (f"{WAN} --ranks 2 --layers 0", "--layers 0"),
        (f"{WAN} --ranks 2 --density 1.5", "density=1.5"),
        (f"{WAN} --ranks 2 --seed -1", "-1"),
        (f"{WAN} --ranks 2 --tflops nan", "--tflops nan"),
        (f"{WAN} --ranks 2 --target inf", "--target inf: must be finite"),
        (f"{WAN} --ranks 2 --tolerance -1", "--tolerance -1.0: must be finite, at least 0"),
        (f"{WAN} --ranks 2 --report out.jpg", "out.jpg: must end in .html"),
        (f"{WAN} --ranks 2 --report /nonexistent/out.html", "/nonexistent"),
        (BENCH, "--photos"),
        (f"{BENCH} --photos /nonexistent", "/nonexistent"),
        ("bench --data g3b1i256f1s0 --ranks 2", "3"),
        (f"{CODES} --steps 0", "--steps 0"),
        (f"{CODES} --ranks 1 --num-heads 7", "--num-heads 7"),
        (f"{CODES} --ranks 2 --topology g3n1", "did you mean --topologies?"),
        (f"{CODES} --ranks 2 --topologies g1n2 g3n1", "g3n1 needs 3 ranks, or a multiple"),
        (f"{CODES} --ranks 2 --topologies g2n1 none", "topology 'none': write gGnN"),
        (f"{CODES} --ranks 4 --topologies g2n1 g4n1 g2n2", "g2n2 has the bags of g2n1; leave one"),
        (f"{CODES} --ranks 1 --kernel aten_flash", "use one of cpu_flash"),
        (f"{CODES} --ranks 1 --kernel magic", "cpu_flash"),
        # Of serve, generate, doctor and calibrate, before any rank starts
        (f"serve --api-key-file {__file__}", "give one line of 16 ASCII characters"),
        ("serve --host 0.0.0.0", "--host 0.0.0.0: others can reach this address: give --api-key"),
        ("serve --host example.org", "others can reach this address"),
        ("serve --api-key-file nowhere", "cannot read nowhere"),
        ("serve --model nowhere", "--model nowhere: no nowhere/model_index.json"),
        ("serve --degrees 1 3", "--degrees 3: give powers of two"),
        (
            "serve --degrees 1 4 --ranks 3",
            "a request has at most the 3 ranks here: give",
        ),
        (
            "serve --policy sjf:4 --ranks 2",
            "policy 'sjf:4': the degree of all requests can",
        ),
        ("serve --port 70000", "--port 70000: must be an integer, at least 0 and at most 65,535"),
        ("serve --max-steps 0", "--max-steps 0: must be an integer, at least 1"),
        ("route", "no job: give its URL, http://HOST:PORT"),
        ("route http://a:1 http://a:1", "http://a:1: given twice: give each job once"),
        ("route http://a:1 http://a:1/", "http://a:1/: given twice: give each job once"),
        (
            "route http://a:70000",
            "http://a:70000: not the URL of a job: give http://HOST:PORT alone",
        ),
        ("route a:8000", "a:8000: not the URL of a job: give http://HOST:PORT alone"),
        ("route http://a:1/v1", "http://a:1/v1: not the URL of a job: give http://HOST:PORT alone"),
        ("route http://a:1 --host 0.0.0.0", "others can reach this address: give --api-key-file"),
        ("route http://a:1 --poll-s 0", "--poll-s 0.0: must be"),
        ("generate", "give either --prompt TEXT, once or more, or --prompts FILE"),
        ("generate --prompt x --prompts y", "give either --prompt TEXT"),
        ("generate --prompts nowhere.txt", "cannot read nowhere.txt"),
        ("generate --prompt x --model nowhere", "give the folder of a pipeline of diffusers"),
        ("generate --prompt x --ring 0", "--ring 0: must be an integer, at least 1"),
        ("generate --prompt x --ring 2 --longest-ring 2", "--longest-ring and --ring: a mesh that"),
        ("serve --replicas 2 --degrees 1", "--degrees and --replicas: a mesh that you give sets"),
        ("serve --cache first-block --sparse 0.5", "--cache and --sparse: a cache skips blocks"),
        ("generate --prompt x --compile --cache taylorseer:9", "--compile and --cache: a graph"),
        ("serve --compile --offload", "--compile and --offload: a graph contains no decisions"),
        ("generate --prompt x --offload --cache taylorseer", "--cache and --offload: offload"),
        ("serve --cache taylorseer:0", "give first-block:0.05 or taylorseer:5, or a number from"),
        ("generate --prompt x --cache magic", "--cache magic: give first-block:0.05 or taylorseer"),
        ("serve --guidance-ranks 3", "give a power of two, or also --replicas 1 for one mesh"),
        ("serve --mix 64x64@5", "--mix 64x64@5: only --advise reads it"),
        ("serve --advise --ranks 8", "give one of --arrivals and --mix"),
        ("serve --advise --mix 64x64@5", "--advise: give the number of GPUs"),
        ("serve --advise --mix 64x64@5 --ranks 8", "model 'tiny' is not known: give one of flux.1"),
        ("serve --advise --mix 64x64@5 --ranks 8 --port 9", "--port 9: --advise starts no server"),
        ("generate --prompt x --sparse 1.5", "--sparse 1.5: must be"),
        ("generate --prompt x --height -8", "--height -8: must be an integer, at least 1"),
        ("generate --prompt x --guidance inf", "--guidance inf: must be finite"),
        ("generate --prompt x --fps 0", "--fps 0: must be an integer, at least 1"),
        ("generate --prompt x --json no/where.json", "--json no/where.json: cannot be written"),
        ("doctor --ranks 0", "--ranks 0"),
        ("doctor --ranks 999999999", "--ranks"),
        ("doctor --rounds 0", "--rounds 0"),
        ("doctor --mib 0", "--mib 0"),
        ("doctor --mib 100000", "at most 1,024"),
        ("doctor --tolerance -1", "--tolerance -1"),
        ("doctor --tolerance nan", "--tolerance nan"),
        ("doctor --link-tolerance 1", "--link-tolerance 1"),
        ("doctor --timeout-s 0", "--timeout-s 0"),
        ("doctor --profile /nonexistent/profile.json", "/nonexistent/profile.json"),
        ("calibrate --lengths 100", "--lengths '100': give the shortest and the longest"),
        ("calibrate --lengths a:b", "--lengths"),
        ("calibrate --lengths 0:100", "--lengths: tokens 0: must be an integer, at least 1"),
        ("calibrate --lengths 512:64", "--lengths 512:64"),
        ("calibrate --lengths 10:14", "5 lengths for --points 9; give a wider range"),
        ("calibrate --lengths 1:999999999", "--lengths: tokens"),
        ("calibrate --points 4", "--points 4: must be an integer, at least 5"),
        ("calibrate --rounds 0", "--rounds 0:"),
        ("calibrate --mib 0", "--mib 0:"),
        ("calibrate --ranks 0", "--ranks 0:"),
        ("calibrate --limit nan", "--limit nan: must be finite"),
        ("calibrate --limit -1", "--limit"),
        ("calibrate --timeout-s 0", "--timeout-s"),
        ("calibrate --d-model 0", "--d-model 0:"),
        ("calibrate --num-heads 9999999", "--num-heads"),
        ("calibrate --sparse-tokens -1", "--sparse-tokens"),
        ("calibrate --base h900", "there is no profile 'h900'"),
        ("calibrate --module a:b --num-heads 2", "--num-heads 2: --module a:b has its own"),
        ("calibrate --module a:b --dtype float64", "--dtype float64: --module a:b has its own"),
        ("calibrate --out /nowhere/at/all/x.json", "there is no folder /nowhere/at/all"),
        ("calibrate --report x.pdf", "--report x.pdf: must end in .html"),
        ("calibrate --kernel magic", "kernel 'magic': choose one of"),
        ("calibrate --kernel flash_attn", "flash_attn"),
        ("calibrate --d-model 100 --num-heads 7", "such as --d-model 112"),
        ("calibrate --d-model 12 --num-heads 4", "--d-model 12 and --num-heads 4: a head must"),
        ("calibrate --module nocolon", "give package.module:function"),
        ("calibrate --module a.b:", "give package.module:function"),
        ("calibrate --module no_such.x:make", "there is no no_such on the path of Python"),
        # What would be ignored
        ("plan --lengths 5/6 --d-model 0", "--d-model 0: must be an integer, at least 1"),
        ("plan --lengths 5/6 --num-layers 0", "--num-layers 0: must be an integer, at least 1"),
        ("plan --lengths 5/6 --step 5", "--step 5: lengths are as given"),
        ("topology --lengths 5/6 --seed 5", "--seed 5: lengths are as given"),
        ("plan --lengths 5/6 --tflops 100", "--tflops 100.0: changes nothing without --wires"),
        ("plan --lengths 5/6 --memory-gb 1", "--memory-gb 1.0: limits nothing without --kb-per"),
        ("topology --lengths 5/6 --inter-gbs 1", "--inter-gbs"),
        ("simulate --data g1b1i16f1s0 --vae-us 1 --batch-size 2", "--batch-size 2: only for --man"),
        ("simulate --data g1b1i16f1s0 --vae-us 1 --manifest a", "give one of --lengths"),
        ("simulate-requests --mix 64x64@5 --slo 2", "--slo 2.0: no request has a deadline"),
        ("simulate-requests --mix 64x64@5 --deadline 2 --within 2", "--within 2.0: every request"),
        ("simulate-requests --mix 64x64@5 --loads 1 --rates 1", "--loads 1.0: --rates replaces it"),
        ("bench --data g1b1i16f1s0 --ranks 1 --batch-size 3", "--batch-size 3: --data says"),
        ("bench --data g1b1i16f1s0 --ranks 1 --strict", "--strict: only photos have pixels"),
        ("bench --data g1b1i16f1s0 --ranks 1 --max-tokens 9", "--max-tokens 9: data codes say"),
        ("bench --data g1b1i16f1s0 --ranks 1 --accumulate 2", "--accumulate 2: only with --load"),
        ("serve --model tiny --variant fp16", "--variant fp16: the variants of tiny are none"),
        ("serve --model tiny --keep-gb -1", "--keep-gb -1.0: must be"),
        ("bench --data g1b1i16f1s0 --ranks 1 --clip-frames 3", "--clip-frames 3: only photos"),
        # What the parser refuses is one sentence, too
        (f"{PLAN} --rnaks 3", "--rnaks: there is no such option; did you mean --ranks?"),
        (f"{PLAN} --rank=3", "--rank: there is no such option; did you mean --ranks?"),
        (f"{PLAN} more", "more: there is no such option; see bascule plan --help"),
        (f"{PLAN} --ranks x", "--ranks: give a whole number, not 'x'"),
        (f"{PLAN} --gamma x", "--gamma: give a number, not 'x'"),
        ("plan --lengths", "--lengths: give a value"),
        ("trace", "the following arguments are required: FOLDER"),
        ("bench --dtype x", "--dtype: invalid choice: 'x' (choose from"),
        # Folders, before ranks
        *(
            (f"{line} {path}", f"{line.split()[-1]} {path}: {said}")
            for line in (
                *(f"{CODES} --out", "generate --prompt x --out", "trace . --out"),
                *("simulate --lengths 5 --traces", "serve --spool"),
            )
            for path, said in (
                (__file__, f"{__file__} is a file; give a folder"),
                (f"{__file__}/runs/one", f"{__file__} is a file; give a folder"),
            )
        ),
        # Two options with one file
        (f"{PLAN} --json a.html --report ./a.html", "--json and --report both name"),
        (f"{PLAN} --json a --picture ./a", "--json and --picture both name"),
        ("plan --file x --json x", "--file and --json both name"),
        ("plan --manifest m.csv --picture m.csv", "--manifest and --picture both name"),
        ("simulate --lengths 5 --json a --traces a", "--json and --traces both name"),
        ("trace . --lens a --json a", "--json and --lens both name"),
        ("calibrate --out a --json a", "--json and --out both name"),
        ("bench --data g1b1i64f1s0 --out a.html --report a.html", "--report and --out both name"),
    ),
)
def test_a_users_error_is_one_sentence(
    capsys: Console, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(launch, "result_of_ranks", lambda *_: pytest.fail("ranks were started"))
    assert said in sentence(capsys, *arguments)
