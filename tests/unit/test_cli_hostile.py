"""The command line under hostile input: an answer or one sentence, soon, in little memory."""

import json
import os
import resource
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from bascule.files import MAX_LINE
from bascule.machine.cluster import HardwareProfile
from tests.helpers.cli import Console, refused, run, sentence

HUGE, LONG, LENGTHS = "9" * 400, "9" * 30, "--lengths 500,400/300,2"
SYNTHETIC, BENCH = "sparse --model wan2.1 --ranks 2", "bench --data g1b1i16f1s0 --ranks 1"


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What would take all memory fails instead; one more GiB is enough."""
    monkeypatch.setenv("COLUMNS", "200")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("command", ["plan", "topology"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    refused(
        ("--data g99999999b4i256f1s0", "at most 131,072"),
        ("--data g999999999b999999999i999999999f999999999s0", "at most 131,072"),
        ("--data g1b999999999i256f1s0", "at most 1048576 samples"),
        ("--data g1b1i256f1s0,g999999999b1i256f1s0", "g999999999b1i256f1s0"),
        ("--data g131072b8i16f1s0,g1b1i16f1s0", "at most 131,072"),
        ("--data g2b1048576i16f1s0", "at most 1048576"),
        ("--data g1b1i999999999f1s0", "use fewer pixels or frames"),
        ("--data g1b1i256f999999999s0", "use fewer pixels or frames"),
        (f"--data {'g1b1i256f1s0,' * 9999}", "data codes 'g1b1"),
        ("--data g1b1i256f1s0 --ranks 999999999", "--ranks 999999999"),
        (f"--data g1b1i256f1s0 --seed {2**64}", "2^64-1"),
        ("--data g1b1i256f1s0 --step -1", "2^64-1"),
        ("--lengths 1,\u0663/4", "not a length"),
        ("--lengths 1_0", "not a length"),
        (f"--lengths {'9' * 9999}", "not a length"),
        (f"--lengths {LONG}", "not a length"),
        ("--lengths 1e3", "not a length"),
        (f"--lengths {2**40 + 1}", "2^40"),
        (f"{LENGTHS} --ranks 999999999", "--ranks 999999999"),
        (f"{LENGTHS} --ranks -3", "--ranks -3"),
        (f"{LENGTHS} --d-model {HUGE}", "--d-model 999"),
        (f"{LENGTHS} --num-layers {'9' * 200}", "--num-layers 999"),
        (f"{LENGTHS} --gamma 1e308", "gamma=1e+308"),
        (f"{LENGTHS} --max-tokens {HUGE}", "tokens=999"),
        (f"{LENGTHS} --kb-per-token 1e-320", "--kb-per-token 1e-320"),
        (f"{LENGTHS} --kb-per-token 1 --memory-gb nan", "memory"),
        (f"{LENGTHS} --kb-per-token 1 --memory-gb inf", "memory"),
        (f"{LENGTHS} --kb-per-token 1 --memory-gb -1", "memory"),
    ),
)
def test_numbers_beyond_what_can_be_planned_for(
    capsys: Console, command: str, arguments: list[str], said: str
) -> None:
    assert said in sentence(capsys, command, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--file", "a\nb"], r"a\nb"),
        *refused(
            ("plan --lengths 2147483648", "2147483647"),
            (f"plan {LENGTHS} --topology g1n999999999", "131072"),
            (f"plan {LENGTHS} --wires --latency-us 1e308", "--latency-us"),
            (f"plan {LENGTHS} --topology g2n1 --wires --intra-gbs 1e-320", "intra"),
            ("topology --data g8b1i256f1s0 --steps 999999999", "fewer --steps"),
            (f"topology --data g8b1i256f1s0 --step {2**64 - 1}", "2^64-1"),
            (f"topology {LENGTHS} --rows 0", "--rows 0"),
            ("sparse --model wan2.1 --ranks 99999999999999", "--ranks"),
            ("sparse --model wan2.1 --ranks 32768", "at most 512"),
            ("sparse --model wan2.1 --ring 999999999", "--ring"),
            (f"{SYNTHETIC} --block 1", "larger blocks"),
            (f"{SYNTHETIC} --block {LONG}", "--block"),
            (f"{SYNTHETIC} --head-dim {HUGE}", "--head-dim"),
            (f"{SYNTHETIC} --layers 999999999", "--layers"),
            (f"{SYNTHETIC} --steps 999999999", "--steps"),
            (f"{SYNTHETIC} --density 1e-300", "density"),
            (f"{SYNTHETIC} --seed {HUGE}", "2^64-1"),
            (f"{SYNTHETIC} --tflops inf", "--tflops inf"),
            (f"{BENCH} --seed {2**64}", "--seed"),
            (f"{BENCH} --lr inf", "--lr inf"),
            (f"{BENCH} --gamma nan", "--gamma nan"),
            (f"{BENCH} --timeout-s 1e30", "--timeout-s"),
            (f"{BENCH} --steps {LONG}", "--steps"),
            (f"{BENCH} --max-tokens {LONG}", "--max-tokens"),
            ("bench --data g1b1i60000f1s0 --ranks 1", "visual tokens"),
            ("bench --data g1b1i16f1s0 --ranks 999999999", "--ranks"),
        ),
    ],
)
def test_options_beyond_their_range(capsys: Console, arguments: list[str], said: str) -> None:
    assert said in sentence(capsys, *arguments)


def test_options_at_the_end_of_their_range(capsys: Console) -> None:
    for command in (
        f"plan {LENGTHS} --max-tokens {2**53}",
        f"plan {LENGTHS} --kb-per-token 1e-20 --memory-gb 900000",
        f"plan {LENGTHS} --gamma 1e30 --num-layers {2**31}",
        "plan --lengths 2147483647/2147483647",
        "plan --lengths 2147483648/ --topology g2n1",
        f"topology {LENGTHS} --rows 999999999999",
        "topology --data g16b1024i16f1s0",  # fewer than 20 batches by default
    ):
        code, out, err = run(capsys, *command.split())
        assert code == 0 and "nan" not in out and not err
        assert "Compared: 1 batch on" in out or "g16" not in command


def lengths_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Names of files that hold no lengths, and what a sentence says of each."""
    texts = {"empty": "", "word": "x" * 300_000, "float": "1e30\n", "nul": "1,2\0,3\n"}
    texts |= {"inf.json": "[Infinity, 1]", "null.json": "[null]", "object.json": '{"a": 1}'}
    texts |= {"line": "1," * (MAX_LINE // 2 + 1), "many": "5 " * (2**20 + 1)}
    texts |= {"ranks": "\n" * (2**17 + 1)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
        yield name, name
    (folder / "binary").write_bytes(bytes(range(256)))
    yield "binary", "cannot read"
    (folder / "folder").mkdir()
    yield "folder", "Is a directory"
    os.mkfifo(folder / "pipe")
    yield "pipe", "a pipe or a device"
    yield "absent", "No such file"
    with (folder / "sparse").open("wb") as file:
        file.truncate(2**40)
    yield "sparse", "a line has more than"
    (folder / "loop").symlink_to(folder / "loop")
    yield "loop", "symbolic links"
    yield "x" * 300, "too long"


def test_files_that_hold_no_lengths(capsys: Console, tmp_path: Path) -> None:
    for name, said in lengths_files(tmp_path):
        message = sentence(capsys, "plan", "--file", str(tmp_path / name), "--ranks", "2")
        assert said in message, (name, message)
    for device in ("/dev/zero", "/dev/null", "/dev/stdin"):
        if not Path(device).resolve().is_file():
            assert "a pipe or a device" in sentence(capsys, "plan", "--file", device)


def test_manifests_that_hold_no_samples(capsys: Console, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, content, said in (
        ("folder.csv", None, "holds no samples"),
        ("pipe.jsonl", None, "a pipe or a device"),
        ("m.jsonl", '{"width":256,"height":256,"frames":1e30}', "frames is 1e+30"),
        ("m.jsonl", '{"width":99999999999,"height":99999999999}', "width is 99999999999"),
        ("m.jsonl", f'{{"width":{"9" * 9999},"height":16}}', "cannot be read as .jsonl"),
        ("m.jsonl", '{"width":NaN,"height":16}', "nan"),
        ("m.jsonl", "[" * 100_000, "cannot be read as .jsonl"),
        ("m.jsonl", f'["{"x" * 100_000}"]', "give a list of rows"),
        ("m.csv", "width,height\n\u0663,\u0664\n", "width is"),
        ("m.csv", f"width,height\n256,{'9' * 9999}\n", "height is"),
        ("m.csv", f"{'a' * 300_000},height\n1,2\n", "field"),
        ("m.csv", 'width,height\n"16,16\n', "does not end with one"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content, encoding="utf-8")
        for command in ("plan", "topology"):
            path = str(tmp_path / name)
            assert said in sentence(capsys, command, "--manifest", path, "--ranks", "2")


def test_masks_that_are_none(capsys: Console, tmp_path: Path) -> None:
    def npy(header: str) -> bytes:
        text = header.encode().ljust(117) + b"\n"
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text

    def bomb(name: str, content: bytes) -> None:
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("masks.npy", content)

    form = "{'descr': '|b1', 'fortran_order': False, 'shape': (%s), }"
    (tmp_path / "huge.npy").write_bytes(npy(form % "999999999999, 99999999, 4"))
    (tmp_path / "negative.npy").write_bytes(npy(form % "-1, 4, 4"))
    (tmp_path / "unclosed.npy").write_bytes(npy(form % "((((1, 4, 4"))
    (tmp_path / "folder.npy").mkdir()
    bomb("claims.npz", npy(form % "40, 100000, 100000") + b"\1" * 1000)
    bomb("text.npz", b"abc")
    bomb("unclosed.npz", npy(form % "((((1, 4, 4"))
    np.savez(tmp_path / "shape.npz", packed=np.zeros(1, np.uint8), shape=np.array([10**6] * 3))
    for name in ("pipe.npy", "pipe.npz"):
        os.mkfifo(tmp_path / name)
    for path in sorted(tmp_path.iterdir()):
        message = sentence(capsys, "sparse", "--masks", str(path), "--ranks", "2")
        assert path.name in message and ("a pipe or a device" in message or path.stem != "pipe")


def test_profiles_that_are_none(capsys: Console, tmp_path: Path) -> None:
    head = '"bascule": "hardware profile", "version": 1'
    fields = asdict(HardwareProfile(device="x"))
    values = "1" + "0" * 400, "1e308", "1e999", "-1e-320", "[1]", "9" * 9999
    for place, value in enumerate(values):
        text = json.dumps(fields | {"launch_s": 7.0}).replace("7.0", value)
        (tmp_path / f"{place}.json").write_text(f"{{{head}, {text[1:]}")
    os.mkfifo(tmp_path / "pipe.json")
    base = "sparse --model wan2.1 --block 1280 --ring 2 --profile".split()
    for path in sorted(tmp_path.iterdir()):
        assert path.name in sentence(capsys, *base, str(path))
    HardwareProfile(device="new").save(path := tmp_path / "new.json")
    for command, said in (
        (f"plan {LENGTHS} --kb-per-token 1", "has no memory: give"),
        (f"plan {LENGTHS} --wires", "new has no matmul_flops"),
        (f"topology {LENGTHS}", "new has no matmul_flops"),
        ("sparse --model wan2.1 --block 1280 --ring 2", "new has no attention_flops_per_s"),
    ):
        assert said in sentence(capsys, *command.split(), "--profile", str(path))
