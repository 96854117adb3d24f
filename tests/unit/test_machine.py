"""Costs, machines and the seconds of work on them: by hand, from files, over all meshes."""

import dataclasses
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bascule.errors import ConfigError
from bascule.machine.cluster import (
    FORWARD,
    KNOWN_PROFILES,
    LIMITS,
    TRAINING,
    BagShape,
    Cluster,
    HardwareProfile,
    Passes,
    Seconds,
    Work,
    exposed_ring,
    passes_of,
)
from bascule.machine.costs import (
    IterationFit,
    PolynomialCost,
    TransformerCost,
    describe_cost,
    unit_seconds,
)
from bascule.machine.mesh_choice import DenoisingStep, InferenceMesh, choose_mesh, step_seconds
from bascule.quantities import amount, number
from tests.helpers.cli import Console, run

WIDTH, LAYERS, TOKENS = 100, 3, 1000
COST = TransformerCost(WIDTH, num_layers=LAYERS)
CLUSTER = Cluster(2, 4, 1e12, 80e9, 1e6, 1e5, 0.25)
COMPUTE_S = LAYERS * (24 * TOKENS * WIDTH**2 + 4 * TOKENS**2 * WIDTH) / 1e12


# What sequences cost


def test_flux_block_by_hand() -> None:
    """d = 3072: 24 d^2 FLOPs a token, 4 d a pair of tokens."""
    for seq_len in (1, 512, 4608, 16384):
        linear, attention = 226_492_416e-12 * seq_len, 12_288e-12 * seq_len**2
        for cost, expected in (
            (TransformerCost(3072), linear + attention),
            (TransformerCost(3072, gamma=0.0), linear),
            (TransformerCost(gamma=0.426), linear + 0.426 * attention),
            (TransformerCost(num_layers=57), 57 * (linear + attention)),
        ):
            assert cost(seq_len) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int64, np.float32])
def test_lengths_of_any_type_neither_wrap_nor_lose_precision(dtype: type) -> None:
    lens = np.array([[60_000], [0]], dtype=dtype)
    expected = (24 * 60_000 * 3072**2 + 4 * 60_000**2 * 3072) / 1e12
    np.testing.assert_allclose(TransformerCost(3072)(lens), [[expected], [0.0]], rtol=1e-14)
    assert PolynomialCost(1.0, 0.0, 0.0)(lens)[0, 0] == 60_000.0**2
    exact = (24 * 2**40 * 3072**2 + 4 * 2**80 * 3072) / 10**12
    assert TransformerCost(3072)([2**40])[0] == pytest.approx(exact, rel=1e-14)
    assert TransformerCost()([]).shape == (0,) and PolynomialCost(1, 2, 3)([]).dtype == np.float64


def test_polynomial_by_hand() -> None:
    cost = PolynomialCost(quadratic=2.0, linear=3.0, constant=5.0, overhead=100.0)
    np.testing.assert_array_equal(cost([[0, 1], [2, 10]]), [[5.0, 10.0], [19.0, 235.0]])
    assert cost([10], [7]) == [2.0 * 7 + 3.0 * 10 + 5.0]
    assert PolynomialCost(*(np.float32(x) for x in (1, 2, 3))) == PolynomialCost(1, 2, 3)  # type: ignore[arg-type]


def test_seconds_are_flops_times_the_measured_rate() -> None:
    cost = TransformerCost(3072, gamma=0.5, seconds_per_unit=2e-3)
    np.testing.assert_allclose(cost.seconds([100, 5000]), cost([100, 5000]) * 2e-3, rtol=1e-15)
    assert unit_seconds(cost) == 2e-3 and unit_seconds(PolynomialCost(0.0, 1.0, 0.0)) == 1.0
    assert unit_seconds(TransformerCost(8)) is None and unit_seconds(np.sqrt) is None


def test_what_ranks_compare_of_a_fitted_cost_is_what_they_plan_by() -> None:
    fits = [IterationFit((off, off, off, off), (), off, 9, 0) for off in (0.1, 0.1 + 1e-15)]
    own, other = (PolynomialCost(1e-9, 1e-6, 0.0, fit=fit) for fit in fits)
    assert own.fit != other.fit
    assert describe_cost(own) == describe_cost(other)
    assert describe_cost(own) != describe_cost(PolynomialCost(1e-9, 2e-6, 0.0))


# Seconds of work


def test_compute_is_measured_or_converted_or_seconds_already() -> None:
    assert CLUSTER.compute_seconds(COST, [TOKENS]) == pytest.approx([COMPUTE_S])
    measured = replace(COST, seconds_per_unit=7.0)
    assert CLUSTER.compute_seconds(measured, [TOKENS]) == pytest.approx([COMPUTE_S * 7])
    assert CLUSTER.compute_seconds(np.sqrt, [4.0]) == pytest.approx([2.0])


@pytest.mark.parametrize("ring", [1, 2, 5])
@pytest.mark.parametrize("exchange_s", [0.0, 0.5, 2.0, 9.0])
def test_all_rounds_but_the_last_hide_an_exchange(ring: int, exchange_s: float) -> None:
    """Round by round, as in equation 4 of db-SP."""
    compute_s = 3.0
    rounds = [compute_s / ring] * ring
    took = sum(max(one, exchange_s) for one in rounds[:-1]) + rounds[-1]
    assert compute_s + exposed_ring(exchange_s, compute_s, ring) == pytest.approx(took)
    work = Work(compute_s=compute_s, attention_s=compute_s, ring_bytes=(ring - 1) * exchange_s)
    wires = Cluster(2, ring, 1.0, 1.0, 1.0, 0.5, 0.0).wires
    near, far = BagShape(ring, ring), BagShape(ring, ring, is_in_node=False)
    assert wires.seconds(work, near).total == pytest.approx(took)
    slow = wires.seconds(work, far).total
    assert slow == pytest.approx(compute_s + exposed_ring(2 * exchange_s, compute_s, ring))


WORK = Work(compute_s=6.0, attention_s=2.0, heads_bytes=30.0, num_exchanges=2, num_kernels=8)


def test_the_slowest_rank_of_a_mesh() -> None:
    wires = {"intra_bytes_per_s": 10.0, "inter_bytes_per_s": 2.0, "launch_s": 0.25}
    paper = profile(matmul_flops_per_s=100.0, attention_flops_per_s=50.0, **wires)
    near = paper.forward_seconds([WORK] * 4, BagShape.aligned(1, 4, 4))
    assert near == Seconds(6.0, 3.0, 0.0, 0.5)
    # Of the three others, one is in the node and two are not.
    far = paper.forward_seconds([WORK] * 4, BagShape.aligned(1, 4, 2))
    assert far.heads_s == pytest.approx(30.0 / 3 * (1 / 10.0 + 2 / 2.0))
    # Launches show where they take longer than the device.
    many = paper.forward_seconds([replace(WORK, num_kernels=40)], BagShape())
    assert many.launch_s == 0.5 + (10.0 - 6.0)
    idle = replace(WORK, compute_s=2.0)
    slowest = paper.forward_seconds([WORK, idle, idle, idle], BagShape.aligned(1, 4, 4))
    assert slowest.total == pytest.approx(9.5) and slowest.waiting_s == pytest.approx(3.0)
    both = slowest + slowest
    assert both.total == pytest.approx(19.0) and "waiting 6.00 s" in str(both)


def test_a_step_is_its_passes() -> None:
    cluster = replace(CLUSTER, pack_bytes_per_s=1e7, piece_s=1e-4)
    passes, bag = Passes(4.0, 6.0, 3.0, "step"), BagShape.aligned(1, 4, 4)
    lens = np.array([700])

    def seconds(cost: TransformerCost, passes: Passes) -> tuple[Seconds, float]:
        machine = replace(cluster, passes=passes)
        return machine.sequence_seconds(cost, bag, lens), machine.host_seconds(cost, bag)

    linear = cluster.compute_seconds(replace(COST, gamma=0.0), lens)
    attention = cluster.compute_seconds(COST, lens) - linear
    before, after = seconds(COST, FORWARD), seconds(COST, passes)
    assert after[0].compute_s == pytest.approx(4 * linear + 6 * attention)
    assert after[0].heads_s == pytest.approx(3 * before[0].heads_s)
    assert after[0].launch_s == pytest.approx(3 * before[0].launch_s)
    assert after[1] == pytest.approx(3 * before[1])
    forward = replace(COST, seconds_per_unit=2.0)
    found = seconds(forward, passes)[0]
    assert found.compute_s == pytest.approx((4 * linear + 6 * attention) * 2.0)
    assert found.heads_s == pytest.approx(3 * before[0].heads_s)
    assert FORWARD.cost(COST) is COST
    assert passes_of("step") is TRAINING and TRAINING.linear == 4


# The mesh of a denoising step

STEP = DenoisingStep(num_tokens=4608, num_heads=24, head_dim=128, num_layers=57, num_passes=2)
H100 = HardwareProfile.load("h100-datasheet")


def profile(**others: Any) -> HardwareProfile:
    rates = {"matmul_flops_per_s": 4e14, "attention_flops_per_s": 3e14, "launch_s": 1e-5}
    wires = {"intra_bytes_per_s": 2e11, "inter_bytes_per_s": 2e10}
    return HardwareProfile(device="test", **{**rates, **wires, **others})


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6, 8, 12, 16])
@pytest.mark.parametrize("tokens", [77, 4608, 118_800])
@pytest.mark.parametrize(("heads", "passes", "most"), [(24, 2, None), (5, 3, 4), (12, 1, 2)])
def test_the_choice_is_the_fastest_of_all_factorizations(
    num_ranks: int, tokens: int, heads: int, passes: int, most: int | None
) -> None:
    step = DenoisingStep(tokens, heads, 128, 30, passes)
    meshes = itertools.product(*(range(1, end + 1) for end in (passes, most or num_ranks, heads)))
    possible = [InferenceMesh(*mesh) for mesh in meshes if math.prod(mesh) == num_ranks]
    if not possible:
        with pytest.raises(ConfigError, match="raise max_ring_degree"):
            choose_mesh(step, num_ranks, max_ring_degree=most)
        return
    choice = choose_mesh(step, num_ranks, ranks_per_node=8, max_ring_degree=most, profile=profile())
    seconds = [step_seconds(step, mesh, 8, profile()) for mesh in possible]
    assert len(choice.meshes) == len(possible)
    assert choice.chosen.seconds == min(seconds)
    assert [mesh.seconds for mesh in choice.meshes] == sorted(seconds)
    assert len(str(choice).splitlines()) == 1 + len(possible)


def test_the_seconds_of_a_step_follow_the_formulas() -> None:
    width, alone = 24 * 128, step_seconds(STEP, InferenceMesh(1, 1, 1), 8, profile())
    layer = 24 * 4608 * width**2 / 4e14 + 4 * 4608**2 * width / 3e14
    assert alone == pytest.approx(2 * 57 * layer)
    guided = step_seconds(STEP, InferenceMesh(2, 1, 1), 8, profile())
    assert guided == pytest.approx(alone / 2 + 1e-5)
    sent = 8 * width * 4608 / 4 / 4  # bytes of a rank to each other one
    near = 57 * 2 * (layer / 4 + 2e-5 + 3 * sent / 2e11)
    assert step_seconds(STEP, InferenceMesh(1, 1, 4), 8, profile()) == pytest.approx(near)
    far = 57 * 2 * (layer / 4 + 2e-5 + sent / 2e11 + 2 * sent / 2e10)
    assert step_seconds(STEP, InferenceMesh(1, 1, 4), 2, profile()) == pytest.approx(far)
    slow = profile(intra_bytes_per_s=1e9)  # what a ring passes on is longer than its round
    attention = 4 * 4608**2 / 2 * width / 3e14
    turn = 1e-5 + 4 * width * 4608 / 2 / 1e9 - attention / 2
    ring = 57 * 2 * (layer / 2 + turn)
    assert step_seconds(STEP, InferenceMesh(1, 2, 1), 8, slow) == pytest.approx(ring)


def test_without_a_profile_guidance_comes_first_then_heads_in_a_node_then_a_ring() -> None:
    def chosen(num_ranks: int, **others: Any) -> tuple[int, int, int]:
        mesh = choose_mesh(STEP, num_ranks, **others).chosen
        return mesh.guidance, mesh.ring, mesh.ulysses

    assert chosen(2) == (2, 1, 1) and chosen(8) == (2, 1, 4)
    assert chosen(3) == (1, 1, 3)
    assert chosen(16, ranks_per_node=4) == (2, 2, 4)
    assert chosen(64) == (2, 2, 16)
    told = str(choose_mesh(STEP, 8))
    assert told.startswith("guidance 2 x ring 1 x Ulysses 4: guidance groups first")
    uneven = DenoisingStep(num_tokens=99, num_heads=8, head_dim=64, num_layers=2, num_passes=3)
    assert choose_mesh(uneven, 4).chosen == InferenceMesh(1, 1, 4)  # 2 groups would wait
    assert choose_mesh(STEP, 8, profile=H100).chosen.guidance == 2


# Profiles

MEASURED = HardwareProfile(device="two cores", source="measured", launch_s=math.pi / 3e5, host_s=1)


@pytest.mark.parametrize("one", [H100, MEASURED, HardwareProfile(device="nothing known")])
def test_what_is_saved_is_loaded_exactly(tmp_path: Path, one: HardwareProfile) -> None:
    path, other = tmp_path / "machine.json", tmp_path / "other.json"
    one.save(path)
    assert HardwareProfile.load(path) == one
    saved = json.loads(path.read_text())
    assert saved == {"bascule": "hardware profile", "version": 1, **dataclasses.asdict(one)}
    # Another tool may write it: keys in another order, and only those that are known.
    known = {name: value for name, value in saved.items() if value is not None}
    other.write_text(json.dumps(dict(reversed(known.items()))))
    assert HardwareProfile.load(str(other)) == one
    path.write_text(json.dumps(saved | {"attention": {"launch_s": 1.0}}))  # as once was saved
    assert HardwareProfile.load(path) == one


def test_it_says_whether_anybody_measured_it() -> None:
    assert str(H100).endswith("10.0 µs per launch; assumed from a data sheet, not measured")
    assert "544 TFLOP/s, 180 GB/s in a node, 25.0 GB/s between nodes" in str(H100)
    assert str(MEASURED) == "two cores: 10.5 µs per launch; measured"
    assert str(HardwareProfile(device="new")) == "new: no numbers; given, not measured"


@pytest.mark.parametrize("name", KNOWN_PROFILES)
def test_a_known_profile_says_that_nobody_measured_it(name: str) -> None:
    known = HardwareProfile.load(name)
    assert "not measured" in str(known) and known.numbers and known.note
    machine = known.cluster(2, 8)
    assert (machine.num_ranks, machine.memory_bytes) == (16, known.memory_bytes)
    assert machine.pack_bytes_per_s == known.pack_bytes_per_s
    assert machine.piece_s == (known.piece_s or 0.0)
    if known.source == "datasheet":
        assert known.peak_flops_per_s is not None
        sustained = known.matmul_flops_per_s
        assert sustained == pytest.approx(0.55 * known.peak_flops_per_s, rel=1e-3)
        assert amount(known.peak_flops_per_s, "FLOP/s") in known.note


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((b"{", "not valid JSON"), (b"\xff", "cannot read"), (b"[1, 2]", "no hardware profile")),
        (b"{}", "no hardware profile.*l40s-datasheet"),
        (b'{"bascule": "hardware profile", "version": 1}', "HardwareProfile holds no fields"),
        ({"launch_s": [1.0]}, r"launch_s=\[1\.0\]"),
        ({"intra_bytes_per_s": math.nan}, "intra_bytes_per_s=nan"),
        ({"version": 2}, "no hardware profile of version 1"),
        ({"flops": 1.0}, "flops; it must hold device, source, .*, note"),
    ],
)
def test_a_file_that_holds_no_profile(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "machine.json"
    is_text = isinstance(content, bytes)
    path.write_bytes(content if is_text else json.dumps(H100.to_dict() | content).encode())
    with pytest.raises(ConfigError, match=message) as error:
        HardwareProfile.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", LIMITS)
def test_an_extreme_is_named_by_file_and_key(capsys: Console, tmp_path: Path, name: str) -> None:
    """Not by what is computed of it: a step has three passes of the launches, for example."""
    path, (least, most) = tmp_path / "mine.json", LIMITS[name]
    values = HardwareProfile.load("h100-knapformer").to_dict()
    given = ("--lengths", "90/50", "--topologies", "none", "g2n1", "--profile", str(path))
    for value in (least / 3, least, most, most * 3):
        path.write_text(json.dumps(values | {name: value}))
        code, _, err = run(capsys, "simulate", *given)
        assert code == (0 if least <= value <= most else 2), err
        if code:
            assert err.startswith(f"bascule: {path}: HardwareProfile({name}="), err
            bound = number(most) if most >= 1e15 else f"{most:,.0f}"
            assert f"at least {least:g} and at most {bound}" in err
