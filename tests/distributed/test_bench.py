"""The main job, as a user starts it: two local ranks, real photos and synthetic streams."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bascule import TransformerCost, plan_batch
from bascule.bench.comparison import Comparison
from bascule.bench.options import BenchOptions
from bascule.cli import main
from bascule.quantities import percent
from bascule.workload.codes import parse_data_codes, sample_lengths, seq_lens
from tests.helpers.bench import bench, benched
from tests.helpers.browser import data_of
from tests.helpers.jobs import in_a_job
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).parents[2]
COST_OF_BLOCK = TransformerCost(192, gamma=0.5)
BF16 = ("--dtype", "bfloat16")


@pytest.mark.nightly
def test_loss_falls_and_both_curves_coincide(photos: Path, tmp_path: Path) -> None:
    options = ("--batch-size", "3", "--steps", "16", "--lr", "0.005")
    done, result, steps = benched(tmp_path, "--photos", str(photos), *options)
    assert len(steps) == 16
    assert sum(step["plan"]["moved_tokens"] > 0 for step in steps) > 8
    assert result["balanced"]["imbalance"] < result["unbalanced"]["imbalance"]
    for arm in ("loss_unbalanced", "loss_balanced"):
        losses = [step[arm] for step in steps]
        assert sum(losses[-6:]) < 0.8 * sum(losses[:6]), losses
    assert result["loss_difference"] < 1e-4
    assert result["grad_difference_first"] < 1e-5
    assert result["setting"]["skipped_photos"] == 1
    assert "broken.png" in done.stderr and done.stderr.count("broken.png") == 1
    assert "speed-up" in done.stdout


@pytest.mark.stress
def test_a_corrupt_photo_stops_a_strict_run(photos: Path, tmp_path: Path) -> None:
    done = bench(tmp_path, "--photos", str(photos), "--strict")
    assert done.returncode == 2
    assert "broken.png" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "options", [("--checkpoint",), *(pytest.param(o, marks=pytest.mark.stress) for o in ((), BF16))]
)
def test_streams_with_an_idle_rank_and_a_bag(tmp_path: Path, options: tuple[str, ...]) -> None:
    some = ("--data", "g1b0i64f1s0,g1b3i128f1s0", "--topologies", "g2n1", "--steps", "2")
    done, result, steps = benched(tmp_path, *some, *options)
    assert result["balanced"]["wir"] == pytest.approx(1.0)
    assert result["unbalanced"]["imbalance"] == pytest.approx(2.0)
    assert result["predicted_ratio"] == pytest.approx(2.0)
    assert result["loss_difference"] < (1e-2 if "bfloat16" in options else 1e-5)
    assert result["options"]["steps"] == 2 and result["options"]["lr"] == 1e-3
    assert result["options"]["checkpoint"] is ("--checkpoint" in options)
    assert result["options"]["photos"] is None and result["options"]["out"] == str(tmp_path)
    assert "compute only" in done.stdout and "one sequence alone" not in done.stdout
    assert "(FBL)" in done.stdout and "unknown" not in done.stdout
    assert result["balanced"]["hfu"] is None and "HFU" not in done.stdout  # no peak is known
    done_flops = result["balanced"]["flops_per_s"] * sum(step["seconds_balanced"] for step in steps)
    forward = sum(step["plan"]["forward_flops"] for step in steps)
    assert done_flops == pytest.approx((4 if "--checkpoint" in options else 3) * forward)


def trained_in_turns() -> tuple[list[list[int]], list[list[float]], list[list[dict[str, Any]]]]:
    """The order of the ways in each step, how far gradients are from way 0's, and the records."""
    options = BenchOptions(
        data="g1b3i64f1s0,g2b0i64f1s0,g1b1i256f1s0",
        topologies=("g1n4", "g2n1+g1n2", "g4n1"),
        gamma=0.5,
        d_model=32,
        num_heads=4,
        num_single=1,
        warmup=1,
        steps=3,
        dtype="float64",
    )
    orders, apart, records = [[]], [], []
    train = Comparison._train

    def watched(self: Comparison, way: int, step: int) -> Any:
        orders[-1].append(way)
        return train(self, way, step)

    with mock.patch.object(Comparison, "_train", watched):
        comparison = Comparison(options, torch.device("cpu"))
        for of_step in comparison.run():
            records.append(of_step)
            orders.append([])
            reference, *others = (  # this rank's part of them
                torch.cat([cast(Any, one.grad).to_local().flatten() for one in x.parameters()])
                for x in comparison._models
            )
            squares = torch.stack([reference, *(x - reference for x in others)]).square().sum(1)
            dist.all_reduce(squares)
            apart.append((squares[1:] / squares[0]).sqrt().tolist())
    return orders[:-1], apart, records


def test_every_topology_has_the_gradients_of_training_without() -> None:
    """On four ranks, two of which load nothing; each way is the first in turn."""
    for orders, apart, records in run_ranks(trained_in_turns, 4):
        assert orders[0] == [0, 1, 2, 3, 1, 2, 3, 0]  # the warm-up, too
        assert [order[0] for order in orders[1:]] == [2, 3]
        assert all(sorted(order) == list(range(4)) for order in orders[1:])
        assert max(map(max, apart)) < 1e-10
        for of_step, distances in zip(records, apart, strict=True):
            assert [one["topology"] for one in of_step] == ["g1n4", "g2n1+g1n2", "g4n1"]
            assert [one["grad_difference"] for one in of_step] == pytest.approx(
                distances, abs=1e-14
            )
            assert len({one["seconds_unbalanced"] for one in of_step}) == 1
            assert all(0 < one["cpu_seconds_balanced"] for one in of_step)
            imbalances = [one["plan"]["imbalance"] for one in of_step]
            assert imbalances[2] == pytest.approx(1.0) and imbalances[0] == max(imbalances) > 1.1
            assert all(one["plan"]["moved_tokens"] > 0 for one in of_step[1:])


@pytest.mark.nightly
def test_topologies_are_compared_in_one_run(tmp_path: Path) -> None:
    data, page = "g1b0i64f1s0,g1b2i128f1s0", tmp_path / "page.html"
    some = ("--steps", "3", "--gamma", "0.5", "--dtype", "float64", "--report", str(page))
    bags = ("--topologies", "g1n2", "g2n1")
    done, result, steps = benched(tmp_path, "--data", data, *bags, *some)
    ways = result["topologies"]
    assert list(ways) == ["g1n2", "g2n1"] == result["options"]["topologies"]
    codes, cost = parse_data_codes(data), TransformerCost(32, gamma=0.5)
    batches = [seq_lens(sample_lengths(codes, seed=0, step=step)) for step in (1, 2, 3)]
    for name, one in ways.items():
        rows = [step for step in steps if step["topology"] == name]
        assert [row["step"] for row in rows] == [0, 1, 2]
        for arm in ("", "cpu_"):
            before, after = (
                sum(row[f"{arm}seconds_{way}"] for row in rows)
                for way in ("unbalanced", "balanced")
            )
            assert one[f"{arm or 'measured_'}ratio"] == pytest.approx(before / after)
        plans = [plan_batch(batch, name, cost) for batch in batches]
        before = sum(plan.unbalanced_loads(cost).max() for plan in plans)
        predicted = before / sum(plan.makespan for plan in plans)
        assert one["predicted_ratio"] == pytest.approx(predicted)
        assert one["balanced"]["imbalance"] == pytest.approx(np.mean([x.imbalance for x in plans]))
        assert one["loss_difference"] < 1e-12 and one["grad_difference"] < 1e-10
        assert one["sent_bytes_per_step"] > 0 and name in done.stdout and name in page.read_text()
    fastest = max(ways, key=lambda name: ways[name]["measured_ratio"])
    assert result["setting"]["topology"] == fastest
    assert {key: result[key] for key in ways[fastest]} == ways[fastest]
    assert f"{fastest} was the fastest of 2 topologies" in done.stdout


def command_line(*arguments: str) -> None:
    main(list(arguments))


@pytest.mark.nightly
def test_the_benchmark_of_topologies(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks, tiny; its clips are such that no topology of single ranks can gain."""
    pytest.importorskip("skimage")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    training = import_module("training")
    for (num_ranks, mix), codes in training.SCENARIOS.items():
        batch = seq_lens(sample_lengths(parse_data_codes(codes), seed=0, step=1))
        plans = [plan_batch(batch, bags, COST_OF_BLOCK) for bags in training.BAGS[num_ranks]]
        before = plans[0].unbalanced_loads(COST_OF_BLOCK).max()
        gains = [before / plan.makespan for plan in plans]
        if mix == "images and videos":
            assert gains[0] == pytest.approx(1.0) and max(gains) > 1.5
    monkeypatch.setattr(
        training,
        "QUICK_SCENARIOS",
        {(2, "clips"): training.QUICK_SCENARIOS[2, "images and videos"]},
    )

    def command(*arguments: str) -> None:
        if arguments[0] == "bench":
            assert in_a_job(command_line, *arguments).returncode == 0
        else:
            command_line(*arguments)

    monkeypatch.setattr(training, "bascule", command)
    result = training.topologies(quick=True)["scenarios"]["2 ranks, clips"]
    rows = result["topologies"]
    assert list(rows) == ["g1n2", "g2n1"]
    measured = {name: row["wall_ratio"] for name, row in rows.items()}
    assert result["fastest"] == max(measured, key=lambda name: measured[name])
    assert result["advised"] == "g1n2"  # on these wires clips so short are not worth a bag
    assert result["advised_share"] == measured["g1n2"] / max(measured.values())
    assert rows["g1n2"]["predicted_ratio"] == rows["g1n2"]["simulated_ratio"] == pytest.approx(1.0)
    assert rows["g2n1"]["predicted_ratio"] > 1.2 and rows["g2n1"]["simulated_ratio"] < 1
    assert all(row["grad_difference"] < 1e-3 for row in rows.values())


@pytest.mark.nightly
def test_a_sequence_that_binds_is_told_once(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    table = tmp_path / "samples.csv"
    table.write_text("width,height\n64,64\n256,256\n")
    data = "--manifest", str(table), "--batch-size", "1", "--steps", "1", "--gamma", "0"
    options = ("--report", str(page), "--peak-tflops", "0.01")
    done, result, _ = benched(tmp_path, *data, *options)
    assert done.stdout.count("warning: ") == 1
    assert "warning: in 1 of 1 step one sequence alone" in done.stdout
    shown = data_of(page.read_text())
    assert result["single_binds_steps"] == 1
    assert "measured_ratio" not in shown and "Nothing was moved" in done.stdout
    assert shown["wir_balanced"] == result["balanced"]["wir"]
    assert "one sequence alone" in page.read_text()
    # Two layers of width 32, of 16 and of 256 tokens; forward, and backward as two of them.
    forward = 2 * sum(24 * tokens * 32**2 + 4 * tokens**2 * 32 for tokens in (16, 256))
    for arm in ("unbalanced", "balanced"):
        hfu = 3 * forward / result[arm]["fbl_median_s"] / (2 * 0.01e12)
        assert result[arm]["hfu"] == pytest.approx(hfu)
        assert f" {percent(hfu)} " in done.stdout
    understood = f"{table}: 2 samples; tokens follow from width, height."
    assert understood in done.stdout and understood in page.read_text()
    assert done.stdout.count(str(table)) == 1  # by the first rank
    assert bench(tmp_path, "--data", "g2b1i64f1s0", "--steps", "1").returncode == 0
    kept = [json.loads((tmp_path / f"summary{n}.json").read_text()) for n in (".1", "")]
    assert kept[0] == result and kept[1]["options"]["data"] == "g2b1i64f1s0"
    assert (tmp_path / "steps.1.jsonl").is_file()


@pytest.mark.nightly
def test_stages_of_several_topologies(photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    encoders = ("--vae", "tiny", "--dtype", "float64")
    some = ("--batch-size", "2", "--steps", "2", "--gamma", "1", "--max-tokens", "256")
    bags = ("--topologies", "g1n2", "g2n1")
    _, result, _ = benched(tmp_path, "--photos", str(photos), *some, *encoders, *bags)
    ways = result["topologies"]
    stages = [ways[name]["stages"] for name in bags[1:]]
    assert stages[0]["vae"]["balanced"] != stages[1]["vae"]["balanced"]  # each has a clock
    before, after = (
        [one[stage][arm]["imbalance_predicted"] for one in stages]
        for stage, arm in (("vae", "balanced"), ("transformer", "balanced"))
    )
    assert before[0] == before[1]  # encoders are balanced alike
    assert after[0] > after[1] == pytest.approx(1.0)
    for one in ways.values():
        assert one["grad_difference"] < 1e-10
        assert one["stages"]["step"]["predicted_ratio"] == one["predicted_ratio"]


@pytest.mark.nightly
def test_stages_of_steps_from_pixels_and_captions(photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    encoders = ("--vae", "tiny", "--text-encoder", "tiny", "--dtype", "float64")
    page = tmp_path / "page.html"
    some = ("--batch-size", "2", "--steps", "2", "--gamma", "1", "--max-tokens", "256")
    options = ("--photos", str(photos), *some, *encoders, "--report", str(page))
    _, result, steps = benched(tmp_path, *options)
    assert result["loss_difference"] < 1e-12 and result["grad_difference"] < 1e-10
    stages = result["stages"]
    assert list(stages) == ["text_encoder", "vae", "transformer", "step"]
    assert stages["step"]["predicted_ratio"] == result["predicted_ratio"]
    for name in ("text_encoder", "vae", "transformer"):
        arms = stages[name]["unbalanced"], stages[name]["balanced"]
        assert all(arm["imbalance_measured"] >= 1 and arm["seconds_measured"] > 0 for arm in arms)
        assert arms[0]["imbalance_predicted"] >= arms[1]["imbalance_predicted"]
        assert name.replace("_", " ") in page.read_text()
    vae = stages["vae"]
    assert vae["balanced"]["imbalance_predicted"] < vae["unbalanced"]["imbalance_predicted"]
    assert vae["predicted_ratio"] > 1
    for step in steps:
        for arm in step["stages"].values():
            for one in arm.values():
                both = zip(one["work"], one["seconds"], strict=True)
                assert len(one["predicted"]) == 2 and all(work <= whole for work, whole in both)
    assert "Stages, measured" in page.read_text()
    assert data_of(page.read_text())["measured_ratio"] == result["measured_ratio"]
