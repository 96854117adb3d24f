"""The parts of `bascule train` that need no ranks."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bascule.errors import ConfigError
from bascule.options import check_options
from bascule.plan.costs import TransformerCost
from bascule.plan.plan import plan_batch
from bascule.train.checkpoints import check_facts, newest_checkpoint, step_of
from bascule.train.model import cost_of, model_config
from bascule.train.options import Schedule, TrainOptions, schedule_of, settings_of, split
from bascule.train.training_run import PARTS, MetricsLog, StepReports, prepare
from bascule.workload.streams import SyntheticStream
from tests.helpers.cli import Console, run

CODES, ALBUM = "g1b2i32f1s0,g1b1i64f1s0", Path("album")


def test_the_cost_of_a_model_knows_its_heads() -> None:
    options = TrainOptions(data=CODES, gamma=0.5, num_heads=6)
    config = model_config(options, SyntheticStream(CODES, rank=0, world_size=2, seed=0))
    cost = cost_of(options, config, lambda: 0, torch.device("cpu"))
    assert cost == TransformerCost(192, gamma=0.5, num_layers=4, num_heads=6)
    # Of 6 heads on 4 ranks two have two each: by hand, one sequence of 4 blocks of width 192.
    flops = 4 * (24 * 1000 * 192**2 + 0.5 * 4 * 1000**2 * 192 * 4 / 3)
    plan = plan_batch([[1000], [], [], []], "g4n1", cost)
    assert plan.loads.tolist() == pytest.approx([flops / 4 / 1e12] * 4)


def test_a_step_has_the_same_samples_whatever_the_ranks() -> None:
    schedule = Schedule(batch_size=5, num_samples=13, accumulate=2)
    assert schedule.num_steps == 3
    steps = [schedule.microbatches(step) for step in range(3)]
    assert [[list(part) for part in step] for step in steps] == [
        [[0, 1], [2, 3, 4]],
        [[5, 6], [7, 8, 9]],
        [[10], [11, 12]],
    ]
    for num_ranks in (1, 2, 7):
        assert [n for part in split(range(5), num_ranks) for n in part] == list(range(5))


def test_a_last_step_with_fewer_samples_than_microbatches() -> None:
    assert Schedule(4, 5, 3).microbatches(1) == [range(4, 5)]


def test_steps_come_from_epochs_or_codes_or_defaults() -> None:
    album = TrainOptions(photos=ALBUM, epochs=2, batch_size=4)
    assert schedule_of(album, 11).num_steps == 6
    assert schedule_of(TrainOptions(data=CODES, steps=7), None) == Schedule(3, 21, 1)
    assert schedule_of(TrainOptions(photos=ALBUM), 11) == Schedule(8, 800, 1)


def test_numbered_samples_of_codes_are_those_of_their_ranks() -> None:
    by_number = SyntheticStream(CODES, world_size=2, seed=3)
    for step in (0, 2):
        batches = [SyntheticStream(CODES, rank=r, world_size=2, seed=3).batch(step) for r in (0, 1)]
        numbers = range(3 * step, 3 * step + 3)
        found, single = by_number.samples(numbers), [by_number.samples([n]) for n in numbers]
        for name in ("image", "text", "pooled", "sample_ids"):  # to the bit, whatever the batch
            whole = getattr(found, name)
            assert torch.equal(whole, torch.cat([getattr(batch, name) for batch in batches]))
            assert torch.equal(whole, torch.cat([getattr(one, name) for one in single]))
        assert found.seq_lens == [shape.seq_len for shape in by_number.shapes(numbers)]
    assert by_number.samples([]).seq_lens == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of --photos FOLDER, --manifest TABLE and --data CODES"),
        ({"data": CODES, "batch_size": 0}, "--batch-size 0: must be an integer, at least 1"),
        ({"data": CODES, "save_every": 0}, "--save-every 0: must be an integer, at least 1"),
        ({"data": CODES, "keep": 0}, "--keep 0: must be an integer, at least 1"),
        ({"data": CODES, "steps": 10**10}, "--steps 10000000000: must be .* at most 1000000000"),
        ({"data": CODES, "lr": 0.0}, "--lr 0.0: must be finite, at least 1e-30"),
        ({"data": CODES, "epochs": 2}, "--epochs 2: data codes have no end; give --steps"),
        ({"data": CODES, "epochs": 2, "steps": 3}, "--steps 3 and --epochs 2: give one"),
        ({"data": CODES, "accumulate": 4}, "--accumulate 4: a step has 3 samples; .* at most 3"),
        ({"data": "g1b0i32f1s0"}, "--data g1b0i32f1s0: no sample; give a code with b1"),
        ({"data": "g1"}, "g1"),
        ({"data": CODES, "topology": "g3n1"}, "g3n1"),
        ({"data": CODES, "num_heads": 5}, "num_heads 5 does not divide d_model 192"),
        ({"photos": Path("nowhere")}, "nowhere must be a folder of photos"),
        ({"photos": Path(__file__).parent}, "no readable photo in"),
        (
            {"photos": ALBUM, "vae": "tiny", "data": CODES},
            "give one of --photos FOLDER, --manifest",
        ),
        ({"data": CODES, "vae": "tiny"}, "--vae tiny: only photos have pixels; give --photos"),
        ({"data": CODES, "skip_bad": True}, "--skip-bad: only for --manifest"),
        ({"data": CODES, "model": "wan2.1"}, "--model wan2.1: only for --manifest; --d-model"),
        ({"data": CODES, "encode_ahead": True}, "--encode-ahead: nothing is encoded; give --vae"),
    ],
)
def test_what_is_wrong_is_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as met:
        check_options(TrainOptions(**options))
        prepare(TrainOptions(**options), world_size=2)
    assert "\n" not in str(met.value)


def a_checkpoint(folder: Path, step: int, **changes: str) -> Path:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    options = TrainOptions(data=CODES)
    settings = settings_of(options, CODES, schedule_of(options, None)) | changes
    (path / "run.json").write_text(json.dumps({"num_samples": 3 * step, "settings": settings}))
    return path


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nowhere") is None
    assert newest_checkpoint(tmp_path) is None
    a_checkpoint(tmp_path, 90)
    newest = a_checkpoint(tmp_path, 100)
    (tmp_path / "step-00000110.tmp").mkdir()
    (tmp_path / "step-x").mkdir()
    assert newest_checkpoint(tmp_path) == newest and step_of(newest) == 100


def test_a_run_goes_on_only_with_its_own_settings(tmp_path: Path) -> None:
    a_checkpoint(tmp_path, 3)
    options: dict[str, Any] = {"data": CODES, "out": tmp_path, "resume": True}
    found = prepare(TrainOptions(**options, topology="g2n1", ranks=2), world_size=2)
    assert found.checkpoint == tmp_path / "step-00000003"
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"seed": 1}, "saved with --seed 0, and this run has --seed 1: give the same, or another"),
        ({"data": "g1b3i32f1s0"}, "--data g1b2i32f1s0,g1b1i64f1s0, and this run has --data g1b3i3"),
        ({"batch_size": 2}, "--batch-size 3, and this run has --batch-size 2"),
        ({"resume": False}, "has the checkpoint step-00000003 of an earlier run: go on with --res"),
    )
    for changed, told in changes:
        with pytest.raises(ConfigError, match=told):
            prepare(TrainOptions(**(options | changed)))


def test_a_run_has_the_samples_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    path.write_text("width,height\n64,64\n32,32\n")
    options: dict[str, Any] = {"manifest": path, "epochs": 3, "batch_size": 2, "out": tmp_path}
    run = prepare(TrainOptions(**options), world_size=2)
    assert run.schedule.num_steps == 3 and run.settings["--manifest"] == run.data.digest
    with pytest.raises(ConfigError, match="--bucket 720p: only for --manifest"):
        prepare(TrainOptions(data=CODES, out=tmp_path, bucket="720p"))


def test_a_run_that_would_leave_samples_out_or_has_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "step-00000003"
    path.mkdir()
    with pytest.raises(ConfigError, match="is no checkpoint of bascule train"):
        check_facts(path, {}, Schedule(1, 1, 1))
    (path / "run.json").write_text(json.dumps({"num_samples": 11, "settings": {}}))
    check_facts(path, {}, Schedule(4, 11, 1))
    with pytest.raises(ConfigError, match=r"a run of 11 samples .* give the same --epochs"):
        check_facts(path, {}, Schedule(4, 22, 1))


def record(work: list[float], lens: list[list[int]]) -> dict[str, Any]:
    plan = plan_batch(lens, "g1n2", TransformerCost(64), planner="lpt")
    seconds = np.ones((2, len(PARTS)))
    reports = StepReports()
    for step in (1, 2):
        told = reports.report(step, 0.5, [plan], seconds, np.array(work)[:, None])
    return told


def test_a_record_names_the_slowest_rank_and_why() -> None:
    told = record([1.0, 1.0], [[100], [100]])
    assert told["slowest"]["why"] == "ranks are even"
    assert told["makespan_s"] == {"predicted": 1.0, "measured": 1.0}
    assert told["tokens"] == 200 and told["sequences"] == 2 and told["topology"] == "g1n2"
    told = record([1.0, 3.0], [[100], [100]])
    assert told["slowest"] | {"took": 1.5} == {
        "rank": 1,
        "planned": 1.0,
        "took": 1.5,
        "why": "slower than planned",
    }
    assert told["imbalance"] == {"predicted": 1.0, "measured": 1.5}
    slowest = record([3.0, 1.0], [[300], [100]])["slowest"]
    assert slowest["why"] == "more work was planned for it"
    assert json.loads(json.dumps(told)) == told


def test_records_after_the_checkpoint_are_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    log = MetricsLog(tmp_path, 2)
    log.write({"step": 3, "loss": 0.5, "imbalance": {"measured": 1.5}, "topology": "g1n2"})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert {one.name for one in tmp_path.iterdir()} <= {"metrics.jsonl", "tensorboard"}
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert sorted(found.Tags()["scalars"]) == ["imbalance/measured", "loss"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_record_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path, 0)
    with Path("/dev/full").open("w") as full, contextlib.suppress(OSError):
        monkeypatch.setattr(log, "_file", full)
        with pytest.raises(ConfigError, match=r"metrics\.jsonl: cannot be written: No space left"):
            log.write({"step": 1})
        monkeypatch.undo()
        log.close()
        full.close()


def test_a_user_error_is_one_line_and_starts_no_rank(capsys: Console) -> None:
    code, out, err = run(capsys, "train", "--data", CODES, "--accumulate", "9", "--ranks", "2")
    assert (code, out) == (2, "")
    assert err == "bascule: --accumulate 9: a step has 3 samples; give at most 3\n"
