"""The simulator: seconds by hand, sums that must agree, and batches at the edge."""

# pyright: reportArgumentType=false
# What the types forbid is what is tried here.

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bascule
from bascule.errors import ConfigError
from bascule.machine.cluster import TRAINING, HardwareProfile, Passes
from bascule.machine.costs import TransformerCost
from bascule.plan.offer import Offer
from bascule.plan.topology_search import suggest_topology
from bascule.quantities import number
from bascule.sim.placements import NOTHING, TOKENS, Loaded, Placement, policy_of, split
from bascule.sim.results import SimulatedRun
from bascule.sim.seconds import KINDS, EncoderStage, Sharding, exchange_seconds
from bascule.sim.simulation import SimulationOptions, segments_of, simulate
from bascule.workload.codes import SampleShape, parse_data_codes, sample_lengths, seq_lens
from bascule.workload.traces import read_traces, step_parts, write_steps
from tests.helpers.cli import Console, run
from tests.helpers.pages import ROOT

MODEL = TransformerCost(256, gamma=0.5, num_layers=3)
MACHINE = HardwareProfile(
    device="paper",
    matmul_flops_per_s=1e12,
    intra_bytes_per_s=2e9,
    inter_bytes_per_s=1e9,
    memory_bytes=1e9,
    launch_s=1e-5,
    host_s=0.25,
    peak_flops_per_s=4e12,
    pack_bytes_per_s=5e9,
    piece_s=1e-4,
)
FREE = replace(MACHINE, host_s=None, pack_bytes_per_s=None, piece_s=None, launch_s=0.0)
PASSES = Passes(4.0, 6.0, 3.0, "step")
POLICIES = (
    *("none", "padded", "buckets", "packs", "loader"),
    *("g1n8", "g2n4", "g4n2", "g4r2n1", "g1n2+g2n1+g4n1", "knapsack g8n1"),
)
TWO = [[[1000], [400]]]
CODES = "g4b3i64f1s0,g3b1i512f1s0,g1b0i16f1s0"


def simulated(
    data: Any, name: str, profile: HardwareProfile = MACHINE, **options: Any
) -> SimulatedRun:
    chosen = SimulationOptions(**{"passes": PASSES, "num_steps": 3} | options)
    found = simulate(data, profile=profile, model=MODEL, topologies=[name], options=chosen)
    return found.runs[0]


def forward_flops(tokens: int) -> tuple[float, float]:
    """Linear and attention, written out: KnapFormer, equation 1."""
    return 3 * 24 * tokens * 256**2, 3 * 4 * tokens**2 * 256


def test_ranks_that_keep_what_they_loaded() -> None:
    found = simulated([[[1000, 50], [400]]], "none", sharding=Sharding(10**6, 1))
    work = [sum(forward_flops(n)[0] * 4 + 0.5 * forward_flops(n)[1] * 6 for n in ranks)
            for ranks in ([1000, 50], [400])]  # fmt: skip
    seconds = np.array(work) / 1e12
    assert found.spent_on("compute")[0] == pytest.approx(seconds)
    assert (found.spent_on("host") == 0.25).all()
    # Two replicas of all parameters in a node: the gradients, 4 bytes each, travel once.
    reduced = 4e6 / 2e9
    late = np.maximum(reduced * 2 / 3 - seconds * 3 / 4, 0)
    assert found.spent_on("reduce_scatter")[0] == pytest.approx(reduced / 3 + late)
    busy = seconds + 0.25 + reduced / 3 + late
    assert found.spent_on("waiting")[0] == pytest.approx(busy.max() - busy)
    assert found.fbl_s == pytest.approx(busy.max())
    assert found.tokens_per_s == pytest.approx(1450 / busy.max())
    flops = 4 * sum(sum(forward_flops(n)) for n in (1000, 50, 400))
    assert found.hfu == pytest.approx(flops / busy.max() / 8e12)
    loads = [MODEL([1000, 50]).sum(), MODEL([400]).sum()]
    assert found.wir == pytest.approx(max(loads) / min(loads))
    assert found.idle_share == pytest.approx((busy.max() - busy).sum() / (2 * busy.max()))
    assert found.most_activation_bytes == 1050 * 256 * (2 * 3 + 34)


def test_a_bag_shares_and_pays_for_it() -> None:
    found = simulated(TWO, "g2n1", sharding=Sharding(1, 1))
    compute = sum(
        (4 * forward_flops(n)[0] + 0.5 * 6 * forward_flops(n)[1]) / 2e12 for n in (1000, 400)
    )
    assert found.spent_on("compute")[0] == pytest.approx([compute] * 2)
    # Three passes; 3 layers; q, k, v and the output of 700 tokens: half leaves, all is packed.
    num_bytes = 3 * 3 * 4 * 2 * 256 * 700
    launches = 3 * 3 * 2 * 1e-5
    wires = num_bytes / 2 / 2e9 + num_bytes / 5e9 + launches
    assert found.spent_on("ulysses")[0] == pytest.approx([wires] * 2)
    # Two sequences of two pieces in each layer and pass, behind the compute that hides them.
    pieces = 3 * 3 * 2 * 2 * 1e-4
    assert found.spent_on("host")[0] == pytest.approx([0.25 + max(pieces - compute, 0)] * 2)
    # Each rank gets half of what the other loaded; in, out, and the backward of both.
    routed = 4 * 2 * 256 * 500 / 2e9 + 4 * 1e-5
    assert found.spent_on("routing")[0] == pytest.approx([routed] * 2)


def test_wires_between_nodes_are_slower() -> None:
    near = simulated([[[1000], []]], "g2n1", FREE)
    far = simulated([[[1000], []]], "g2n1", FREE, ranks_per_node=1, sharding=Sharding(1, 1))
    for kind in ("ulysses", "routing"):
        assert far.spent_on(kind)[0] == pytest.approx(2 * near.spent_on(kind)[0])
    slow = replace(MACHINE, piece_s=0.1)  # the host takes longer than the device
    shown = 3 * 3 * 2 * 2 * 0.1 - simulated(TWO, "g2n1", slow).spent_on("compute")[0]
    assert simulated(TWO, "g2n1", slow).spent_on("host")[0] == pytest.approx(0.25 + shown)


def test_what_ranks_send_and_receive_is_what_routes_say() -> None:
    """Token by token, against the index tables that move them; ranks in nodes of 3."""
    rng = np.random.default_rng(0)
    for spec in ("g1n12", "g2n6", "g4n3", "g3n2+g6n1", "g12n1"):
        batch = [rng.integers(1, 40, rng.integers(0, 4)).tolist() for _ in range(12)]
        plan = bascule.plan_batch(batch, spec, MODEL)
        source = plan.source_ranks
        placed = Placement(plan.topology, source, plan.seq_lens, source, plan.bag_of, TOKENS)
        wires = ((1.0, 1e12), (1e12, 1.0))
        near, far = (
            exchange_seconds(
                placed, replace(MACHINE, intra_bytes_per_s=a, inter_bytes_per_s=b).cluster(4, 3), 1
            )
            for a, b in wires
        )
        sent = np.array([plan.route(rank).send_splits for rank in range(12)])
        is_near = np.equal.outer(np.arange(12) // 3, np.arange(12) // 3)
        for found, where in ((near, is_near & ~np.eye(12, dtype=bool)), (far, ~is_near)):
            exact = np.maximum((sent * where).sum(axis=1), (sent * where).sum(axis=0))
            # Chunks differ by a token, where the simulator shares evenly.
            assert np.abs(found - exact).max() <= 12


def test_parameters_of_a_node_and_replicas_between_nodes() -> None:
    """Gathered in bf16 within the node; reduced in float32 there, and an S-th between nodes."""
    cluster = MACHINE.cluster(2, 2)
    gather, reduce = Sharding(10**6).seconds(MODEL, cluster)
    assert gather == pytest.approx(2e6 / 2 / 2e9)
    assert reduce == pytest.approx(4e6 / 2 / 2e9 + 4e6 / 2 / 1e9)
    gather, reduce = Sharding(10**6, 4).seconds(MODEL, cluster)
    assert gather == pytest.approx(2e6 * 3 / 4 / 2e9)  # both ranks' links to the other node
    assert reduce == pytest.approx(2 * gather)
    gather, _ = Sharding().seconds(MODEL, cluster)
    assert gather == pytest.approx(2 * 12 * 256**2 * 3 / 2 / 2e9)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("data", "profile"),
    [
        (CODES, MACHINE),
        (CODES, FREE),
        ([[[5, 7, 0]]] * 2, MACHINE),  # one rank
        ([[[3], [], [], [], [], [], [], []]] * 2, MACHINE),
        ([[[60_000], [1], [2], [3], [], [5], [6], [7]]] * 2, MACHINE),
        ([[[1]] * 8, [[]] * 8], MACHINE),  # a microbatch of nothing
    ],
    ids=["priced", "free", "one rank", "one sequence", "a giant", "nothing"],
)
def test_all_ranks_end_together(name: str, data: Any, profile: HardwareProfile) -> None:
    """Every part is at least 0, one rank waits for nobody, and the parts of all add up alike."""
    num_ranks = 8 if data is CODES else len(data[0])
    if num_ranks == 1:
        name = "g1n1" if name[0] == "g" else "knapsack g1n1" if name[0] == "k" else name
    stage = EncoderStage("text", sample_s=1e-3, text_token_s=1e-5, image_token_s=1e-6)
    found = simulated(data, name, profile, stages=(stage,), accumulate=2)
    assert found.seconds.shape[1:] == (len(KINDS), num_ranks)
    for seconds in (found.seconds, found.hidden):
        assert np.isfinite(seconds).all() and (seconds >= 0).all()
    assert (found.spent_on("waiting").min(axis=1) == 0).all()
    ends = found.seconds.sum(axis=1)
    assert ends == pytest.approx(np.broadcast_to(ends[:, :1], ends.shape))
    assert found.fbl_s == pytest.approx(2 * ends[:, 0].mean())
    assert found.hfu is not None and 0 < found.hfu < 1
    if num_ranks == 1:
        assert found.wir == 1.0 and found.idle_share == 0.0
        assert not found.spent_on("routing").any() and not found.spent_on("reduce_scatter").any()
    if data is not CODES:
        tokens = sum(sum(map(sum, batch)) for batch in data)
        is_dealt = name in ("buckets", "packs")  # which may drop the end of the run
        assert found.tokens.sum() <= tokens if is_dealt else found.tokens.sum() == tokens


def loaded(num_batches: int = 5) -> list[Loaded]:
    rng = np.random.default_rng(0)
    made: list[Loaded] = []
    for _ in range(num_batches):
        counts = rng.integers(0, 9, 4)
        lens = rng.integers(0, 900, counts.sum())
        made.append(
            Loaded(Offer.of([counts], lens), np.stack([lens // 2, lens - lens // 2], axis=1))
        )
    return made


def test_padding_makes_all_of_a_rank_as_long_as_its_longest() -> None:
    for given, placed in zip(
        loaded(), policy_of("padded", MODEL, MACHINE.cluster(1, 4))(loaded()), strict=True
    ):
        for rank in range(4):
            lens = given.batch.lens[given.batch.owner == rank]
            inside = placed.source == rank
            assert (placed.lens[inside] == lens).all()
            assert (placed.computed[inside] == max(lens, default=0)).all()


@pytest.mark.parametrize("name", ["buckets", "packs"])
def test_samples_dealt_anew_are_those_of_the_run(name: str) -> None:
    """None twice; only those of the last microbatch may be missing."""
    placed = list(policy_of(name, MODEL, MACHINE.cluster(1, 4))(loaded()))
    given = np.concatenate([one.batch.lens for one in loaded()])
    dealt = np.concatenate([one.lens[one.lens > 0] for one in placed])
    left = np.bincount(given, minlength=900) - np.bincount(dealt, minlength=900)
    assert (left[1:] >= 0).all() and dealt.size > 0.7 * given.size
    budget = given.sum() / 20
    for one in placed:
        held = np.bincount(one.bag_of, one.computed, 4)
        assert one.moves == NOTHING
        if name == "packs":
            assert (held == held[0]).all() and held[0] == max(np.ceil(budget), given.max())
        else:
            longest, counts = one.lens.max(), np.bincount(one.bag_of, minlength=4)
            assert (counts == counts[0]).all()
            assert held.max() <= max(1.5 * budget, longest)


def test_the_loader_hides_what_fits_behind_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [[[900, 900], [100, 100]]]
    monkeypatch.setattr("bascule.sim.seconds.SAMPLE_BYTES", 1.0)
    hidden = simulated(data, "loader", FREE)
    assert not hidden.spent_on("loader").any()
    assert hidden.hidden[0, 1] == pytest.approx([900 / 1e9] * 2)
    monkeypatch.setattr("bascule.sim.seconds.LOADER_BYTES_PER_S", 100.0)
    slow = simulated(data, "loader", FREE)
    rest = hidden.fbl_s
    assert slow.spent_on("loader")[0] == pytest.approx([9.0 - rest] * 2)
    assert slow.hidden[0, 1] == pytest.approx([rest] * 2)
    assert slow.fbl_s == pytest.approx(9.0)


def test_encoders_run_where_samples_are() -> None:
    data = "g1b4i64f1s0,g1b0i16f1s0"
    texts = EncoderStage("T5", sample_s=0.5)
    uneven = simulated(data, "none", FREE, stages=(texts,))
    assert (uneven.spent_on("encoders") == [2.0, 0.0]).all()
    even = simulated(data, "none", FREE, stages=(replace(texts, is_balanced=True),))
    assert (even.spent_on("encoders") == 1.0).all()
    moved = simulated(data, "loader", FREE, stages=(texts,))
    assert moved.spent_on("encoders").sum(axis=1) == pytest.approx([2.0] * 3)
    assert (moved.spent_on("encoders") > 0).all()
    by_token = EncoderStage("both", text_token_s=1.0, image_token_s=100.0)
    one = simulated(data, "none", FREE, stages=(by_token,), num_steps=1)
    images = (one.tokens[0] - one.spent_on("encoders")[0, 0]) / (1 - 100)
    assert images == pytest.approx(round(images)) and 4 * 15 <= images <= 4 * 17


def test_ranks_wait_behind_each_balanced_encoder() -> None:
    data = [[[SampleShape(5, 6), SampleShape(0, 2, cross_tokens=4)], [SampleShape(4, 0)]]]
    text = EncoderStage("text_encoder", text_token_s=1.0)
    vae = EncoderStage("vae", image_token_s=1.0)
    owner = simulated(data, "none", FREE, stages=(text, vae), num_steps=1)
    assert owner.stage_s[0].tolist() == [[9.0, 4.0], [8.0, 0.0]]
    assert owner.fbl_s == pytest.approx(17.0, rel=1e-3)
    even = [replace(stage, is_balanced=True) for stage in (text, vae)]
    balanced = simulated(data, "none", FREE, stages=tuple(even), num_steps=1)
    assert balanced.stage_s[0].max(axis=1).tolist() == [8.0, 6.0]  # 5 | 4 + 4, 6 | 2
    assert balanced.fbl_s == pytest.approx(14.0, rel=1e-3)
    found = balanced.to_dict()
    assert found["stages"]["vae"] == {"imbalance": 1.5, "seconds": 6.0}
    assert np.ptp(balanced.seconds.sum(axis=1)) < 1e-9
    assert balanced.means["text_encoder"] == 6.5 and "encoders" not in balanced.means


def test_the_command_compares_encoders_on_their_owners_and_in_balance(
    capsys: Console, tmp_path: Path
) -> None:
    path, page = tmp_path / "found.json", tmp_path / "page.html"
    data = ("--data", "g1b8i512f1s0,g1b8i256f1s0", "--steps", "2", "--topologies", "none", "g2n1")
    stages = ("--text-encoder-us", "5", "--vae-us", "60")
    files = ("--json", str(path), "--report", str(page), "--traces", str(tmp_path / "traces"))
    code, out, err = run(capsys, "simulate", *data, *stages, *files)
    assert code == 0, err
    runs = {one["name"]: one for one in json.loads(path.read_text())["runs"]}
    assert list(runs) == ["none", "g2n1", "none + encoders", "g2n1 + encoders"]
    assert runs["g2n1 + encoders"]["fbl_s"] < 0.9 * runs["g2n1"]["fbl_s"]
    vae = [runs[name]["stages"]["vae"] for name in ("none", "none + encoders")]
    assert vae[0]["imbalance"] > 1.5 and vae[1]["imbalance"] == pytest.approx(1.0, abs=1e-2)
    assert vae[0]["seconds"] == pytest.approx(8 * 1024 * 60e-6, rel=0.04)
    assert "vae" in out and "text encoder" in page.read_text()
    assert (tmp_path / "traces" / "none_+_encoders").is_dir()
    code, _, err = run(capsys, "simulate", "--lengths", "5/6", "--vae-us", "1")
    assert code == 2 and "lengths do not tell texts from images" in err


def test_a_slow_rank_holds_all_up_unless_plans_know_it() -> None:
    data = [[[400] * 8] * 4]  # 32 equal sequences
    alone = {"profile": FREE, "sharding": Sharding(1, 1)}
    usual = simulated(data, "loader", **alone).fbl_s
    slow = partial(simulated, data, **alone, slow_ranks={1: 2.0})
    assert slow("none").fbl_s == slow("loader").fbl_s == pytest.approx(2 * usual)
    # Of speeds 1, 1/2, 1 and 1, the slow rank gets 4 or 5: the others have 10 in 8's time.
    for name in ("loader", "g1n4"):
        known = slow(name, set_speeds=True)
        assert known.spent_on("compute").max() == pytest.approx(usual * 10 / 8), name
    assert slow("none", set_speeds=True).fbl_s == pytest.approx(2 * usual)
    stage = EncoderStage("T5", sample_s=1.0)
    assert slow("none", stages=(stage,)).stage_s[0, 0].tolist() == [8.0, 16.0, 8.0, 8.0]


def test_a_slow_link_is_as_links_of_its_rate_where_they_pass_it() -> None:
    data, nodes = [[[900, 100], [300], [500], [70]]], {"ranks_per_node": 2}
    slower = replace(FREE, inter_bytes_per_s=1e9 / 5)
    usual, link, all_links = (
        partial(simulated, data, **nodes, **options)
        for options in (
            {"profile": FREE},
            {"profile": FREE, "slow_links": {3: 5.0}},
            {"profile": slower},
        )
    )
    for kind in ("all_gather", "reduce_scatter"):  # of rings over all nodes
        assert (link("none").spent_on(kind) == all_links("none").spent_on(kind)).all()
    assert link("none").fbl_s > usual("none").fbl_s
    across = link("g4n1").spent_on("ulysses")  # all ranks wait for the slow one
    assert (across == all_links("g4n1").spent_on("ulysses")).all()
    assert (across > usual("g4n1").spent_on("ulysses")).all()
    inside = link("g2n2")
    assert (inside.spent_on("ulysses") == usual("g2n2").spent_on("ulysses")).all()
    ratio = inside.spent_on("routing") / np.maximum(usual("g2n2").spent_on("routing"), 1e-30)
    assert 1 < ratio[0, 3] <= 5 and (ratio[0, :3] <= 1).all()
    moved = [run("loader").hidden[0, 1, 3] for run in (usual, link)]
    assert 0 < moved[0] < moved[1] <= 5 * moved[0]


def test_ranks_that_are_left_load_what_a_lost_node_had() -> None:
    data = [[[1], [2], [3, 4], [5]]]
    found = simulated(data, "none", ranks_per_node=2, lost_nodes=1)
    dealt = simulated([[[1, 3, 5], [2, 4]]], "none")  # the third and fifth, and the fourth sample
    assert (found.seconds == dealt.seconds).all() and found.tokens == dealt.tokens
    shapes = [[[SampleShape(9, 1)], [SampleShape(0, 2)], [SampleShape(0, 3)], [SampleShape(0, 4)]]]
    text = EncoderStage("T5", text_token_s=1.0)
    texts = simulated(shapes, "none", ranks_per_node=2, lost_nodes=1, stages=(text,))
    assert texts.stage_s[0, 0].tolist() == [9.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slow_ranks": {2: 2.0}}, r"slow_ranks: a rank is 2; .* at most 1"),
        ({"slow_links": {0: 0.5}}, r"slow_links: the factor of rank 0 is 0\.5; .* at least 1"),
        ({"slow_ranks": [1.0, 2.0]}, "give factors by rank"),
        ({"lost_nodes": 2, "ranks_per_node": 1}, "lost_nodes: nodes left is 0"),
    ],
    ids=str,
)
def test_troubles_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulated(TWO, "none", **options)


def test_the_command_says_what_is_wrong_in_all_steps(capsys: Console) -> None:
    line = "simulate --lengths 900/300/200/100 --topologies none loader --ranks-per-node 2"
    code, out, err = run(capsys, *line.split(), "--slow-ranks", "1:1.5", "--lost-nodes", "1")
    assert code == 0, err
    said = " ".join(out.split())
    assert "In all steps, rank 1 computes 1.5 times as long, nodes gone: 1." in said
    assert "In all steps" not in run(capsys, *line.split())[1]
    for wrong, message in {
        "--slow-links 1": "--slow-links 1: give RANK:TIMES, such as 5:1.5",
        "--set-speeds": "--set-speeds: only --slow-ranks have other speeds: give both",
    }.items():
        code, _, err = run(capsys, *line.split(), *wrong.split())
        assert code == 2 and message in err


def test_what_a_run_is_worth() -> None:
    options = SimulationOptions(num_steps=3, train_steps=5000, gpu_hour_price=2.5)
    names = ["none", "g8n1", "packs"]
    found = simulate(CODES, profile=MACHINE, model=MODEL, topologies=names, options=options)
    now, bags, packed = found.runs
    hours = 5000 * now.fbl_s * 8 / 3600
    assert found.gpu_hours(now) == pytest.approx(hours) and found.saved_gpu_hours(now) == 0
    assert found.gpu_hours(bags) == pytest.approx(5000 * bags.fbl_s * 8 / 3600)  # same tokens
    # Packs hold other tokens a step: hours are for as many tokens, not for as many steps.
    tokens = float(now.tokens.mean()) * 5000
    assert found.gpu_hours(packed) == pytest.approx(tokens / packed.tokens_per_s * 8 / 3600)
    saved = hours - (found.gpu_hours(bags) or 0.0)
    assert found.saved_money(bags) == pytest.approx(2.5 * saved)
    told = found.to_dict()
    assert told["compared_with"] == "none" and told["train_steps"] == 5000
    assert (
        np.isinf(now.wir)
        and json.loads(json.dumps(told, allow_nan=False))["runs"][0]["wir"] is None
    )
    assert told["runs"][1]["saved_gpu_hours"] == pytest.approx(saved)
    assert told["runs"][1]["speedup"] == pytest.approx(bags.tokens_per_s / now.tokens_per_s)
    text = " ".join(found.table().split())
    assert "none: what you do now" in text and f"{number(saved)} " in text
    assert "width 256, 3 layers, gamma 0.500, 0.00236 billion parameters" in text
    assert "1.88 sequences per rank and microbatch on average; steps simulated: 3" in text
    assert simulate(CODES, profile=MACHINE, model=MODEL, topologies=names).saved_money(now) is None
    # An epoch has the tokens of the data, whichever row comes first.
    epoch = replace(options, is_epoch=True)
    for order in (names, names[::-1]):
        epochs = simulate(CODES, profile=MACHINE, model=MODEL, topologies=order, options=epoch)
        of_packs = next(run for run in epochs.runs if run.name == "packs")
        assert epochs.gpu_hours(of_packs) == pytest.approx(found.gpu_hours(packed))


def test_bags_that_the_simulation_chooses() -> None:
    data = [[[9000, 40], [50], [60], [70]]]
    found = simulate(data, profile=FREE, model=MODEL, topologies=["none", "auto"])
    cluster = replace(FREE.cluster(1, 4), passes=TRAINING)
    best = suggest_topology(data, MODEL, cluster).rows[0].spec
    assert found.runs[1].name == f"auto {best}" and best != "g1n4"
    named = simulate(data, profile=FREE, model=MODEL, topologies=["none", best])
    assert found.runs[1].fbl_s == named.runs[1].fbl_s < found.runs[0].fbl_s


def answered(memory: float, names: list[str], data: Any = CODES, **options: Any) -> str:
    found = simulate(
        data,
        profile=replace(FREE, memory_bytes=memory),
        model=MODEL,
        topologies=names,
        options=SimulationOptions(train_steps=500, **options),
    )
    return found.to_report().answer


WIDTH = 256 * (2 * 3 + 34)
"""Bytes of activations of a token."""


def test_samples_beyond_the_memory_are_accumulated() -> None:
    """By hand: 1000 and 400 tokens of a rank, one after another; the other rank has 600."""
    data, options = [[[1000, 400], [600]]], {"sharding": Sharding(10**6, 1)}
    roomy = simulated(data, "none", **options)
    found = simulated(data, "none", replace(MACHINE, memory_bytes=1100.0 * WIDTH), **options)
    assert (roomy.parts, found.parts, found.accumulate) == (1, 2, 2)
    assert found.given_bytes == roomy.most_activation_bytes == 1400 * WIDTH
    assert found.activation_bytes.tolist() == [[1000 * WIDTH, 600 * WIDTH], [400 * WIDTH, 0]]
    assert found.tokens.tolist() == [1600, 400] and found.flops.sum() == pytest.approx(
        roomy.flops.sum()
    )
    computed = [run.spent_on("compute").sum(axis=0) for run in (found, roomy)]
    assert computed[0] == pytest.approx(computed[1])
    step = 0.0
    for longest in (1000, 400):
        linear, attention = forward_flops(longest)
        work, reduced = (4 * linear + 0.5 * 6 * attention) / 1e12, 4e6 / 2e9
        step += work + 0.25 + reduced / 3 + max(reduced * 2 / 3 - work * 3 / 4, 0)
    assert found.fbl_s == pytest.approx(step)


def test_parts_hold_the_samples_of_their_rank() -> None:
    run = loaded()
    for num_parts in (1, 2, 3, 9):
        parts = split(run, num_parts)
        assert len(parts) == num_parts * len(run)
        for place, given in enumerate(run):
            cut = parts[place * num_parts :][:num_parts]
            for rank in range(4):
                mine = np.concatenate([x.kinds[x.batch.owner == rank] for x in cut])
                kinds = given.kinds[given.batch.owner == rank]
                assert sorted(mine.tolist()) == sorted(kinds.tolist())
            assert all((x.kinds.sum(axis=1) == x.batch.lens).all() for x in cut)
            most = [np.bincount(x.batch.owner, x.batch.lens, 4) for x in cut]
            longest = max(given.batch.lens, default=0)
            assert np.ptp(most, axis=0).max() <= longest  # longest first: nearly even


def test_the_answer() -> None:
    data = [[[900, 800, 40], [50]]]
    for memory, names, said in (
        (1e9, ["none"], "loads (none), ranks wait 44.7 % of the time."),
        (1e9, ["none"], "of the time. Nothing here is faster: leave it as it is."),
        (1e9, ["none", "g2n1"], "bascule (g2n1) is 1."),
        (1e9, ["none", "g2n1"], " CHF) in 500 steps."),
        (1e9, ["g2n1", "none"], "Leave it as it is: none is 0."),
        (1e9, ["g2n1", "loader"], "saves 0.00119 of 0.00793 GPU-hours (0.00 CHF)"),
        (
            1000.0 * WIDTH,
            ["none", "g2n1"],
            "activations need 17.8 MB, and a rank has 10.2 MB; in 2 microbatches they fit",
        ),
        (600.0 * WIDTH, ["none", "g2n1"], "one sample at a time does not fit either. Speed"),
        (
            600.0 * WIDTH,
            ["none", "g2n1", "loader"],
            "over g2n1 in 2 microbatches, the first row that fits. Nothing here is faster.",
        ),
        (1.0, ["none", "g2n1"], "Nothing here fits, even with one sample per rank at a time."),
    ):
        answer = answered(memory, names, data, gpu_hour_price=2.0, currency="CHF")
        assert said in answer, answer
    even = answered(1e12, ["none", "loader"], [[[500], [495]]])
    assert "Leave it as it is: bascule (loader) is 1.00x as fast" in even
    rival = answered(1e12, ["none", "g8n1", "packs"])
    assert "packs is" in rival and "without bascule, and changes which samples" in rival


def test_rows_say_why() -> None:
    for data, name, said in (
        (TWO, "none", "ranks wait 32.6 %"),
        (TWO, "none", "for one long sequence"),
        (TWO, "loader", "which only sharing it among ranks makes faster"),
        ([[[500] * 3, [500]]], "none", "for the rank with most work"),
        ([[[500], [500]]], "none", "ranks hardly wait"),
        (TWO, "g2n1", "exchanges take"),
        ([[[500, 100], [500, 100]]], "padded", "40.0 % of the computed tokens are padding"),
        (TWO, "buckets", "changes which samples train together"),
    ):
        assert said in simulated(data, name, FREE).to_dict()["why"], (data, name)
    for name, whose in (("none", "today's practice"), ("knapsack g2n1", "KnapFormer")):
        assert simulated(TWO, name).whose == whose
    assert {simulated(TWO, name).whose for name in ("loader", "auto", "g2n1")} == {"bascule"}


def test_activations_beyond_the_memory_are_told() -> None:
    data = [[[900, 40], [50]]]
    tight = replace(MACHINE, memory_bytes=600.0 * WIDTH)
    found = simulate(data, profile=tight, model=MODEL, topologies=["none", "g2n1"])
    (told,) = found.warnings
    assert told.startswith("as given, activations of a rank exceed its memory of 6.14 MB")
    assert "9.63 MB in none. " in told and "larger bags" in told
    none, bags = found.to_dict()["runs"]
    assert (none["fits"], none["speedup"], none["gpu_hours"]) == (False, None, None)
    assert (none["parts"], none["given_activation_bytes"]) == (2, 940 * WIDTH)
    assert bags["fits"] and bags["speedup"] == 1.0 and found.to_dict()["compared_with"] == "g2n1"
    assert "none, does not fit" in found.table() and "warning: as given" in found.table()
    roomy = simulate(data, profile=MACHINE, model=MODEL, topologies=["none"])
    assert roomy.warnings == [] and "does not fit" not in roomy.table()
    unknown = replace(FREE, memory_bytes=None)
    assert replace(found, profile=unknown).warnings == []
    limited = replace(MODEL, bytes_per_token=1e6)  # no plan keeps the limit
    (bags,) = simulate(data, profile=tight, model=limited, topologies=["auto"]).to_dict()["runs"]
    assert not bags["fits"]


def test_simulated_steps_read_as_measured_ones(tmp_path: Path) -> None:
    options = SimulationOptions(num_steps=4, accumulate=2, ranks_per_node=4)
    found = simulate(
        "g2b3i256f1s0,g2b2i512f1s0",
        profile="h100-knapformer",
        model=TransformerCost(3072, gamma=0.426, num_layers=57),
        topologies=["none", "g1n2+g2n1"],
        options=options,
    )
    for run_of in found.runs:
        folder = tmp_path / run_of.name
        write_steps(folder, segments_of(run_of), found.num_ranks)
        traces, notes = read_traces(folder)
        parts = step_parts(traces, notes)

        def summed(*kinds: str, seconds: Any = run_of) -> Any:
            each = np.sum([seconds.spent_on(kind) for kind in kinds], axis=0)
            return each.reshape(4, 2, -1).sum(axis=1)

        assert parts.notes == () and parts.steps.tolist() == [0, 1, 2, 3]
        near: Any = partial(np.testing.assert_allclose, atol=1e-5)
        near(parts.step_seconds, run_of.microbatch_s.reshape(4, 2).sum(axis=1))
        near(parts.compute, summed("compute", "encoders"))
        near(parts.rest, summed("host"))
        exchanges = ("ulysses", "ring", "routing", "loader", "all_gather", "reduce_scatter")
        near(parts.communication + parts.waiting, summed("waiting", *exchanges))
        near(parts.waiting, summed("waiting"), atol=2e-3)  # unlike exposed reductions


# KnapFormer's Table 1 (FLUX on 32 H100) against the simulator; four of its rows were fitted


FLUX = TransformerCost(3072, gamma=0.426, num_layers=57)
LOW = "g32b32i256f1s0"
MIXED = "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0"
NAMES = ("none", "g1n32", "g2n16", "g4n8", "g8n4")
WIR = {LOW: (1.22, 1.00, 1.00, 1.00, 1.00), MIXED: (17.14, 3.92, 1.27, 1.01, 1.00)}
FBL = {LOW: (3.13, 2.95, 3.30, 3.51, 4.30), MIXED: (4.64, 4.62, 2.92, 2.62, 2.52)}
TPS = {LOW: (147.63, 156.48, 139.77, 131.63, 107.28), MIXED: (58.58, 58.95, 93.08, 103.74, 108.06)}
HFU = {LOW: (24.72, 26.20, 23.40, 22.04, 17.96), MIXED: (14.54, 14.63, 23.10, 25.74, 26.81)}
FITTED = {LOW: ("none", "g1n32", "g8n4"), MIXED: ("none",)}


@pytest.fixture(scope="module")
def rows() -> dict[str, tuple[SimulatedRun, ...]]:
    topologies = ["none", *(f"knapsack {name}" for name in NAMES[1:])]
    options = SimulationOptions(num_steps=50, sharding=Sharding(11_900_000_000, 8))
    return {
        data: simulate(
            data, profile="h100-knapformer", model=FLUX, topologies=topologies, options=options
        ).runs
        for data in (LOW, MIXED)
    }


@pytest.mark.parametrize("data", [LOW, MIXED])
def test_every_printed_cell(rows: dict[str, tuple[SimulatedRun, ...]], data: str) -> None:
    """WIR within 3 %; seconds of held-out cells within 5 %, of fitted ones within 2 %."""
    for place, (name, found) in enumerate(zip(NAMES, rows[data], strict=True)):
        within = 0.02 if name in FITTED[data] else 0.05
        assert found.wir == pytest.approx(WIR[data][place], rel=0.03), name
        assert found.fbl_s == pytest.approx(FBL[data][place], rel=within), name
        assert found.tokens_per_s == pytest.approx(TPS[data][place] * 1e3, rel=0.05), name
        assert found.hfu == pytest.approx(HFU[data][place] / 100, rel=0.05), name


@pytest.mark.parametrize("data", [LOW, MIXED])
def test_bascule_topology_ranks_as_the_table_does(data: str) -> None:
    cluster = replace(HardwareProfile.load("h100-knapformer").cluster(4, 8), passes=TRAINING)
    codes = parse_data_codes(data)
    batches = [seq_lens(sample_lengths(codes, seed=0, step=step)) for step in range(6)]
    ranked = [row.spec for row in suggest_topology(batches, FLUX, cluster).rows]
    printed = sorted(NAMES[1:], key=lambda name: FBL[data][NAMES.index(name)])
    assert [name for name in ranked if name in NAMES] == printed


def test_the_page_quotes_the_results() -> None:
    """Every row of its table, the constants, and how large the errors are at most."""
    page = (ROOT / "docs" / "simulate.md").read_text()
    results = json.loads((ROOT / "benchmarks" / "results" / "simulate.json").read_text())
    known = HardwareProfile.load("h100-knapformer")
    assert results["constants"] == {name: getattr(known, name) for name in results["constants"]}
    for name, value in results["fitted_again"].items():
        assert results["constants"][name] == pytest.approx(value, rel=2e-3)
    rows = [line.split("|")[2:-1] for line in page.splitlines() if " | fitted |" in line]
    rows += [line.split("|")[2:-1] for line in page.splitlines() if " | held out |" in line]
    cells = sorted(results["table_1"], key=lambda cell: not cell["is_fitted"])
    for row, cell in zip(rows, cells, strict=True):
        name, is_fitted, wir, _, fbl, printed, error, tps = (text.strip() for text in row)
        assert (name, is_fitted == "fitted") == (cell["balancer"], cell["is_fitted"])
        assert (wir, fbl) == (f"{cell['wir']:.2f}", f"{cell['fbl_s']:.2f}")
        assert float(printed) == cell["fbl_s_printed"]
        assert float(error.rstrip(" %")) == pytest.approx(100 * cell["fbl_s_error"], abs=0.06)
        for column in ("tokens_per_s", "hfu"):
            found = 100 * cell[f"{column}_error"]
            assert float(tps.rstrip(" %")) == pytest.approx(found, abs=0.2)
    held = [abs(cell["fbl_s_error"]) for cell in cells if not cell["is_fitted"]]
    assert max(held) < 0.05
    found = results["growth"]
    assert found["the same, seconds of a core"] <= 10
    assert all(value < 1.2 for name, value in found.items() if name.startswith("exponent"))
