"""Each option of each command changes the result, or is refused by name: none is ignored."""

import importlib
import json
import re
import shutil
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from bascule.cli import COMMANDS
from bascule.machine.cluster import HardwareProfile
from bascule.options import Outputs, RankOptions
from bascule.train.options import RunOptions
from bascule.workload import save_masks
from bascule.workload.options import ManifestOptions
from tests.helpers.cli import Console, run
from tests.helpers.trace_cases import Run

LENGTHS = "--lengths 4096,300,700/512,2000/900,40/7/30//5/6"
CODES = "--data g4b3i256f1s0,g4b2i512f1s0"
TABLE = (
    "--manifest a.jsonl --model wan2.1 --columns frames=n,fps=rate,text=caption --batch-size 3 "
    "--ranks 8"
)
NODES = "--ranks-per-node 4"
BAGS = f"--topology g5n1+g2n1+g1n1 --wires {NODES}"
SERVED = "--requests 20 --loads 0.9 --seeds 1"
MIX = f"--mix 1024x1024@25=0.6 512x512@5 {SERVED}"
MASKED = "--block 4096 --target 1.0"
SIMULATED = f"--topologies none g5n1+g2n1+g1n1 {NODES}"

CONTEXTS = {  # of each command: lines that read every kind of source, in every way of counting
    "plan": [
        *(f"{source} --topology g2n4" for source in (LENGTHS, "--file a.txt", CODES, TABLE)),
        *(f"{source} {BAGS}" for source in (LENGTHS, CODES, TABLE)),
    ],
    "topology": [
        f"{LENGTHS} {NODES}",
        f"--file a.txt {NODES}",
        f"{CODES} {NODES} --steps 1",
        f"{TABLE} {NODES} --steps 1",
    ],
    "simulate": [
        *(f"{SIMULATED} {source}" for source in (LENGTHS, "--file a.txt")),
        *(f"{SIMULATED} {source} --steps 1" for source in (CODES, f"{CODES} --vae-us 9", TABLE)),
    ],
    "simulate-requests": [
        "--arrivals a-requests.jsonl --policies srtf balanced --ranks 2",
        MIX,
        f"{MIX} --deadline 2",
    ],
    "sparse": [
        f"--masks a.npz --ulysses 2 --ring 2 {MASKED}",
        f"--masks a.npz --ranks 4 {MASKED}",
        "--model cogvideox1.5 --block 4096 --ranks 4",
    ],
    "trace": ["a-traces"],
    "inspect": ["a.jsonl --model wan2.1 --columns frames=n,fps=rate,text=caption"],
}

VALUES: dict[str, str] = {  # of each option, so that its command has another result
    "accumulate": "2", "arrivals": "b-requests.jsonl", "batch_size": "2", "block": "512",
    "bucket": "256:16", "columns": "frames=n2,fps=rate,text=caption", "currency": "EUR",
    "d_model": "512", "data": "g8b1i512f1s0", "deadline": "0.01", "degrees": "1", "density": "0.2",
    "file": "b.txt", "fps": "6", "gamma": "30", "gpu_hour_price": "3", "guidance_ranks": "2",
    "batch_s": "512x512=0.1,0.11",
    "head_dim": "16",
    "inter_gbs": "900", "intra_gbs": "0.01", "kb_per_token": "1.8e5",
    "latency_us": "900", "layers": "1", "lengths": "9,90/9/80/9////", "lens": "b-lens.jsonl",
    "loads": "0.3", "lost_nodes": "1", "manifest": "b.jsonl", "masks": "b.npz",
    "max_frames": "5", "max_tokens": "450", "memory_gb": "8000", "mix": "512x512@9",
    "model": "ltx2", "move_ms": "50000", "num_heads": "7", "num_layers": "7", "out": "out",
    "params_b": "0.5", "passes": "forward", "picture": "picture.svg",
    "policies": "sjf fifo", "profile": "b-profile.json", "ranks": "16", "ranks_per_node": "2",
    "rates": "0.01", "requests": "11", "ring": "4", "rows": "2", "seed": "5",
    "seeds": "2", "shard_ranks": "2", "slow_links": "0:900",
    "slow_ranks": "0:3", "slo": "0.01", "step": "3", "steps": "3", "target": "1.3",
    "text_encoder_us": "30", "tflops": "10", "tokenizer": "./no-tokenizer", "tolerance": "0.0001",
    "topologies": "none g2n4", "topology": "g4n2", "traces": "traces", "train_steps": "77",
    "ulysses": "4", "vae_us": "40", "within": "0.01",
    "compare": "", "set_speeds": "", "skip_bad": "", "wires": "",
}  # fmt: skip
OTHER_VALUES = {
    ("simulate-requests", "passes"): "2", ("simulate-requests", "ranks"): "4",
    ("sparse", "model"): "wan2.1", ("sparse", "ranks"): "4", ("sparse", "steps"): "1",
    ("trace", "topology"): "g2n1",
}  # fmt: skip
WITH = {
    "memory_gb": "--kb-per-token 5e7",
    "currency": "--gpu-hour-price 2",
    "lost_nodes": "--topologies none loader",
    "set_speeds": "--slow-ranks 0:3",
}  # what must stand beside an option
PRINTED = {"compare", "rows"}  # these change what is printed, not the JSON
# The last by test_manifests.py
ELSEWHERE = {"json", "report", "tokenizer"}


TESTS = {  # files whose tests set the options of commands with ranks, and look at the result
    "bench": "test_bench.py test_bench_loader.py test_encoder_stages.py test_cli.py",
    "generate": "test_generate_command.py test_generation.py",
    "serve": "test_service.py test_service_turns.py test_door.py test_serve_engine.py serving.py "
    "test_serve_faults.py test_serve_options.py test_advise.py",
    "route": "test_route.py routers.py",
    "doctor": "test_doctor.py test_doctor_ranks.py",
    "calibrate": "test_calibrate_ranks.py test_calibrate_blocks.py test_calibration.py",
}
TESTED_ONCE = Outputs, RankOptions, ManifestOptions, RunOptions  # options of several commands


def kind_of(command: str) -> Any:
    module = importlib.import_module(f"bascule.cli.{command.replace('-', '_')}")
    return get_type_hints(module.run)["options"]


def fields_of(command: str) -> list[str]:
    return [field.name for field in fields(kind_of(command))]


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files "a" of the contexts and "b" of the values, in the working directory."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "width": 64 * (k % 5 + 2), "height": 64 * (k % 3 + 2), "n": (1, 9, 33)[k % 3],
            "n2": 17, "rate": 24, "caption": "word " * (k % 7 * 9),
        }
        for k in range(96)
    ]  # fmt: skip
    write_lines("a.jsonl", rows)
    write_lines("b.jsonl", rows[::-1])
    write_lines("bad.jsonl", [*rows, rows[0] | {"width": -1}])
    Path("a.txt").write_text("4096,300,700\n512,2000\n900,40\n7\n30\n\n5\n6\n")
    Path("b.txt").write_text("5\n6\n7\n80\n" * 2)
    sizes = [(2048, 20, 0.0), (1024, 20, 1.0), (256, 10, 1.5), (512, 10, 2.0)]
    asked = [{"width": w, "height": w, "steps": n, "arrival_s": at} for w, n, at in sizes * 3]
    write_lines("a-requests.jsonl", asked)
    write_lines("b-requests.jsonl", asked[:7])
    generator = np.random.default_rng(0)
    for name in ("a.npz", "b.npz"):
        density = generator.random((2, 2, 8, 16, 1))
        save_masks(Path(name), generator.random((2, 2, 8, 16, 16)) < density)
    lens = (((100,), (300,)), ((300, 10), (90,)), ((200,), (250,)), ((50, 50), (200,)))
    machine = HardwareProfile.load("h100-datasheet")
    replace(machine, matmul_flops_per_s=5e13, launch_s=1e-3).save(Path("b-profile.json"))
    Path("a-traces").mkdir()
    Run(((0.1, 0.3), (0.3, 0.1), (0.2, 0.25), (0.1, 0.2)), lens=lens).write(Path("a-traces"))
    steps = [
        {"step": 5 + step, "rank": rank, "lens": [7 * n + rank for n in of_rank]}
        for step, of_step in enumerate(lens)
        for rank, of_rank in enumerate(of_step)
    ]
    write_lines("b-lens.jsonl", steps)


def write_lines(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("\n".join(map(json.dumps, rows)))


def result_of(capsys: Console, words: str, option: str) -> tuple[int, Any]:
    """Exit code, and the result: the message, what is printed, or all numbers with the files."""
    before = {path.name for path in Path.cwd().iterdir()}
    code, out, err = run(capsys, *words.split(), "--json", "-")
    if code:
        return code, err
    if option in PRINTED:
        return code, err
    made = {path for path in Path.cwd().iterdir() if path.name not in before}
    for path in made:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return code, (numbers(json.loads(out)), len(made))


def numbers(value: Any) -> Any:
    """JSON without names of machines, which quote options, and without seconds of the clock."""
    if isinstance(value, dict):
        told = "machine", "profile", "plan ms", "planning_ms"
        return {key: numbers(item) for key, item in value.items() if key not in told}
    return [numbers(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("command", CONTEXTS)
def test_an_option_changes_the_result_or_is_refused(
    capsys: Console, inputs: None, command: str
) -> None:
    changed, ignored = set[str](), list[str]()
    positional = {"trace": {"folder"}, "inspect": {"manifest", "table"}}.get(command, set())

    @cache
    def without(line: str, is_printed: bool) -> tuple[int, Any]:
        return result_of(capsys, line, "rows" if is_printed else "")

    for context in CONTEXTS[command]:
        for option in set(fields_of(command)) - ELSEWHERE - positional:
            value = OTHER_VALUES.get((command, option)) or VALUES[option]
            flag = f"--{option.replace('_', '-')}"
            table = "bad.jsonl" if option == "skip_bad" else "a.jsonl"
            line = f"{command} {context.replace('a.jsonl', table)} {WITH.get(option, '')}"
            if flag in context and not value:
                continue  # a switch that is on
            base = without(line, option in PRINTED)
            code, result = result_of(capsys, f"{line} {flag} {value}", option)
            assert code in (0, 2), result
            if (code, result) == (0, base[1]):
                ignored.append(f"{line} {flag} {value}")
            elif code == 0 or "limit" in result:
                changed.add(option)
    assert not ignored, "\n".join(ignored)
    assert {*fields_of(command)} - ELSEWHERE - positional == changed


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_set_by_a_test(command: str) -> None:
    """Of commands that start ranks, which are too slow for one loop over their options."""
    if command in CONTEXTS:
        return
    folder, kind, here = Path(__file__).parents[1], kind_of(command), Path(__file__).name
    shared = [one for one in TESTED_ONCE if issubclass(kind, one)]
    names = {field.name for one in shared for field in fields(one)}
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    lines = texts["test_cli.py"].splitlines()
    texts["its lines"] = "\n".join(line for line in lines if f'"{command} ' in line)
    for option in fields_of(command):
        files = " ".join(TESTS.values()) if option in names else TESTS[command]
        sets = re.compile(rf'--{option.replace("_", "-")}\b|\b{option}=|"{option}":')
        names_of_files = *files.split(), here, "its lines"
        assert any(sets.search(texts[name]) for name in names_of_files), option


def test_a_default_that_is_spelled_out_is_no_mistake(capsys: Console) -> None:
    code, _, err = run(capsys, *"plan --lengths 5/6 --step 0 --seed 0".split())
    assert code == 0, err
