"""Balanced encoders: features and all gradients are those without balancing."""

import logging
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import bascule
from bascule.costs import Cluster, PolynomialCost
from bascule.encoders import BalancedEncoder, step_costs
from tests.helpers.encoder_cases import (
    Toy,
    balanced,
    batch_of,
    check_failing_image,
    check_gradients,
    check_items,
    check_padded_texts,
    check_vlm,
    gradients_of,
    items_of,
    joined_leaves,
    tower_of,
)
from tests.helpers.oracle import packed_attention
from tests.helpers.ranks import by_one_rank, on_ranks, raised_by, run_ranks
from tests.helpers.vlm_models import QWENS, make_model

NUM_RANKS = [3, pytest.param(4, marks=pytest.mark.stress)]
LENGTHS = {
    2: [[[18, 6, 30], []]],
    3: [[[6, 24, 12, 18, 30], [], [2, 5]], [[1], [3, 3], [2]]],
    4: [[[30, 12, 6, 18] * 3, [1, 5, 2, 4] * 3, [3, 1, 3] * 4, [5] * 12], [[24], [], [], []]],
}
TEXTS = {3: [[2], [9, 5, 5, 9, 1], []], 4: [[], [7, 7, 3, 8], [2], []]}
PIXELS = {
    3: [[(1, 8, 8)], [(5, 16, 16), (1, 8, 16), (1, 8, 8), (1, 8, 8)], []],
    4: [[], [(1, 8, 8)], [(1, 16, 16), (5, 8, 8), (1, 8, 8), (1, 8, 8)], []],
}


def all_items(kinds: list[str], cases: list[list[list[Any]]], ways: list[str]) -> list[str]:
    said = list[str]()
    for kind in kinds:
        for per_rank in cases:
            for way in ways:
                # Wan's and Qwen-Image's call their encoder once for every few frames: FSDP would
                # wait forever.
                if way == "fsdp" and kind in ("wan", "qwen"):
                    continue
                # Without features that lead to it, no rank without items comes to the encoder.
                if way != "recomputed" or all(per_rank):
                    said.append(check_items(kind, per_rank, way))
    return said


@pytest.mark.parametrize("size", [2, *NUM_RANKS])
def test_nested_outputs_and_gradients_are_those_without_balancing(size: int) -> None:
    ways = ["plain", "frozen inputs", "fsdp", "ddp", "checkpoint", "recomputed"]
    said = run_ranks(all_items, size, ["toy"], LENGTHS[size], ways)
    assert all(one == said[0] for one in said)
    if size == 3:  # rank 0 encodes an item of rank 1, and rank 2 that of rank 0, also once more
        assert said[0][-6:] == ["2 of 4 items moved: imbalance 1.00 instead of 2.00"] * 6


@pytest.mark.some(2)
@pytest.mark.parametrize("size", NUM_RANKS)
@pytest.mark.parametrize("kinds", [["t5", "umt5", "clip"], ["kl", "wan", "qwen"]], ids=str)
def test_texts_and_images_are_encoded_alike_on_any_rank(kinds: list[str], size: int) -> None:
    pytest.importorskip("transformers" if "t5" in kinds else "diffusers")
    items: Any = (TEXTS if "t5" in kinds else PIXELS)[size]
    said = run_ranks(all_items, size, kinds, [items], ["plain", "fsdp"] if size < 4 else ["plain"])
    assert all(one == said[0] for one in said)
    assert all("items moved" in one and "none" not in one for one in said[0]), said[0]


SHAPES = {
    3: [[(1, 2)], [(2, 3), (5, 4), (1, 2), (3, 3)], []],
    4: [[], [(2, 2)], [(2, 3), (6, 4), (1, 2), (3, 3)], []],
}
TILES = {3: [[(1, 2)], [(2, 2), (2, 1), (1, 1)], []], 4: [[], [(2, 2)], [(1, 2), (2, 2)], []]}
PROJECTED = ("internvl", "llava_onevision")
"""Models that have a layer of their own between tower and text."""
VIDEOS = {3: [True, True, False], 4: [True, False, False, False]}


def all_vlms(name: str, ways: list[str]) -> list[str]:
    said, size = list[str](), torch.distributed.get_world_size()
    for way in ways:
        videos = [False] * size if name == "internvl" else VIDEOS[size]
        if name == "llava_onevision" and way == "fsdp":
            continue  # transformers finds no hidden states then, with or without balancing
        shapes = TILES[size] if name == "llava_onevision" else SHAPES[size]
        if name in PROJECTED and way == "fsdp":  # FSDP waits for ranks that do not project
            shapes = [own or [(1, 1)] for own in shapes]
        said.append(check_vlm(name, shapes, videos, way))
    return said


@pytest.mark.parametrize(
    ("name", "size", "ways"),
    [
        ("qwen2_vl", 3, ["plain", "fsdp", "ddp"]),
        ("llava_onevision", 3, ["checkpoint", "frozen"]),
        *(
            pytest.param(name, size, [], marks=pytest.mark.stress)
            for name in (*QWENS, *PROJECTED)
            for size in (3, 4)
        ),
    ],
)
def test_a_vlm_that_is_not_edited_trains_alike(name: str, size: int, ways: list[str]) -> None:
    """In these ways, or in all."""
    pytest.importorskip("transformers")
    if not ways:
        ways = ["plain", "fsdp"] if size == 4 else ["plain", "fsdp", "checkpoint", "frozen"]
        if name not in PROJECTED:
            ways += ["ddp"]  # without balancing it would wait for ranks without images
    said = run_ranks(all_vlms, size, name, ways)
    assert all(one == said[0] for one in said)
    assert all("items moved: imbalance" in one for one in said[0]), said[0]


def of_transformers() -> tuple[list[str], list[str], str]:
    """Padded texts; a long video that ranks share, also above the limit; a wrong image."""
    texts = [check_padded_texts(kind) for kind in ("t5", "umt5", "clip")]
    image, limits = (1, 4, 4), bascule.Limits(tokens=17 * 16)
    long = [[(64, 4, 4)], [image, image], [image], [image]]
    videos = [check_items(name, long, "fsdp", limits=limits) for name in QWENS]
    videos += [check_items(name, long) for name in QWENS]
    return texts, videos, check_failing_image()[1]


def test_texts_are_padded_videos_are_cut_and_images_refused() -> None:
    pytest.importorskip("transformers")
    said = run_ranks(of_transformers, 4)
    assert all(one == said[0] for one in said)
    texts, videos, refused = said[0]
    assert texts == ["3 of 6 items moved: imbalance 1.33 instead of 3.33"] * 3
    assert all(one.endswith("imbalance 1.00 instead of 3.76") for one in videos), videos
    assert "differ in their number of items" in refused and "rank 1" in refused


@on_ranks(3)
def test_what_is_wrong_on_one_rank_is_the_same_error_on_all() -> None:
    """Items of rank 1, calls and weights that are refused; last an item of one that is sharded."""
    rank, toy = torch.distributed.get_rank(), Toy()
    encoder = balanced("toy", toy)
    x, ids = torch.ones(1, 4, 4, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int64)
    good = [{"x": x, "ids": ids}] * 3
    fails = [{"x": x, "ids": ids + 13}]  # in the module, wherever it is encoded
    bad: dict[str, list[dict[str, Any]]] = {
        "ValueError('item 13 cannot be encoded')": fails,
        "item 0: length_fn is 0; it must be an integer": [{"x": x[:, :0], "ids": ids}],
        "differ in their number of items": [{"x": x.expand(2, 4, 4), "ids": ids}],
        "item 0: ": [{"x": x, "ids": ids, "scale": object()}],  # cannot travel
        "item 0: KeyError('x')": [{"y": x}],
    }

    def refuse(words: str, call: Any, *args: Any) -> None:
        said = kinds, text = raised_by(call, *args)
        assert words in text, text
        assert {"CommError", "ConfigError"} & set(kinds)
        assert said == by_one_rank(lambda: said)

    for words, items in bad.items():
        refuse(words, encoder, items if rank == 1 else (2 - rank // 2) * good)
    refuse("no rank has an item to encode", encoder.call, x[:0], ids[:0])
    refuse(
        "does not accept these arguments: too many positional arguments",
        encoder.call,
        x,
        ids,
        1.0,
        2.0,
    )
    with torch.set_grad_enabled(rank == 0):
        refuse("disagree on gradients", encoder, good)
    assert len(encoder(good)) == 3  # all of them can go on
    for change in ("a weight", "a buffer"):
        other = Toy()
        other.register_buffer("scale", torch.tensor([True]))
        with torch.no_grad():
            other.outer.bias[1] += 1e-15 * (rank == 1 and change == "a weight")
            other.get_buffer("scale")[0] = rank == 0 or change != "a buffer"
        refuse("disagree on weights", balanced, "toy", other)
    fully_shard(toy.inner)
    fully_shard(toy)
    said = raised_by(balanced("toy", toy), fails if rank == 1 else good)[1]
    assert "item 13" in said, said


@on_ranks(3)
def test_items_stay_where_moving_does_not_pay_and_limits_hold() -> None:
    """How items move by default, by choices, and within limits; also groups that are made."""
    items, toy = items_of("toy", [[6, 4, 2], [4, 4, 4], []][torch.distributed.get_rank()]), Toy()

    def encode(**options: Any) -> str:
        encoder = balanced("toy", toy, **options)
        encoder(items)
        assert str(encoder.last) == by_one_rank(str, encoder.last)
        return str(encoder.last)

    groups = torch.distributed.distributed_c10d._world.pg_map
    before = len(groups)
    assert encode().endswith(even := "items moved: imbalance 1.00 instead of 1.50")
    assert len(groups) - before == 1, "one process group can do all"
    stays = "none of 6 items moved: imbalance 1.50 as given; no plan gains enough"
    assert encode(locality_tolerance=0.5) == stays
    assert encode(limits=bascule.Limits(tokens=8)).endswith(even)
    for limits in (bascule.Limits(tokens=7), bascule.Limits(num_bytes=400)):
        assert raised_by(encode, limits=limits)[0][0] == "PlanError"

    # Exchanges that take longer than predicted stop, and are measured again later.
    encoder: Any = balanced("toy", toy, cluster=Cluster(1, 3, 1e12, 1e12, 1e9, 1e9, 0.0))
    encoder.cost, encoder._moving_s, move = PolynomialCost(0.0, 1e-3, 0.0), 0.0, encoder._move

    def move_slowly(*args: Any) -> Any:
        time.sleep(0.05)
        return move(*args)

    encoder._move = move_slowly
    moved = list[bool]()
    for encoder._step in (*range(6), 98, 99, 100):
        with torch.no_grad():
            features = encoder(items)
        moved.append(encoder.last.num_moved > 0)
        torch.testing.assert_close(
            joined_leaves(features), joined_leaves([toy(**item) for item in items])
        )
    assert moved == [True] * 5 + [False] * 2 + [True, False]


class Backbone(nn.Module):
    """One attention over each sequence of features, with or without bags."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.qkv, self.out = nn.Linear(3, 3 * 8).double(), nn.Linear(8, 1).double()

    def qkv_of(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(tokens).view(-1, 3, 2, 4).unbind(1)
        return q, k, v

    def loss(self, attended: Tensor, ids: Tensor) -> Tensor:
        return (self.out(attended.flatten(1))[:, 0] * (1 + ids).sin()).sum()


LINEAR = PolynomialCost(quadratic=0.0, linear=1.0, constant=0.0)
CARRIED = Cluster(1, 2, 1e12, 1e9, 1e-3, 1e-3, 0.0)
"""On these wires nothing pays."""


def encoder_before_bags(topology: str, stays: bool) -> tuple[str, list[float], list[float]]:
    """Loss and gradients of both; loads of ranks, planned together and apart."""
    rank, lens = torch.distributed.get_rank(), [[6, 5, 3], [3]]
    items = items_of("toy", lens[rank])
    ids = torch.arange(sum(lens[rank]), dtype=torch.float64) + 100 * rank
    plain, toy, expected, backbone = Toy(), Toy(), Backbone(), Backbone()
    tokens = torch.cat([plain(**item).first[0] for item in items])
    loss = expected.loss(packed_attention(*expected.qkv_of(tokens), lens[rank])[0], ids)
    loss.backward()
    encoder = balanced("toy", toy, cluster=CARRIED if stays else None)
    features = encoder(items)
    assert encoder.last is not None
    assert encoder.last.num_moved == (0 if stays else 1)
    parallel = bascule.SequenceParallel(None, topology, LINEAR)
    apart = parallel.plan(lens[rank])
    step = parallel.plan(lens[rank], initial_loads=encoder.last.loads) if stays else apart
    moved = step.route(tokens=torch.cat([one.first[0] for one in features]), ids=ids)
    found = backbone.loss(step.attend(*backbone.qkv_of(moved["tokens"])), moved["ids"])
    both = torch.stack([found.detach(), loss.detach()])
    torch.distributed.all_reduce(both)
    torch.testing.assert_close(both[0], both[1], rtol=1e-10, atol=1e-11)
    features.attach(found).backward()
    for ours, theirs in ((toy, plain), (backbone, expected)):
        check_gradients(gradients_of(ours), gradients_of(theirs))
    after = (apart.plan.loads + encoder.last.loads).tolist()
    return str(encoder.last), step.plan.loads.tolist(), after


SHARED = [("g1n2", False), ("g2n1", False), ("g1n2", True)]


def all_before_bags() -> list[tuple[str, list[float], list[float]]]:
    return [encoder_before_bags(*case) for case in SHARED]


def test_an_encoder_and_bags_share_a_step() -> None:
    """A backbone is planned on top of what the encoder leaves uneven."""
    (first, second, carried), other = run_ranks(all_before_bags, 2)
    assert [first, second, carried] == other
    assert first[0].startswith("1 of 4 items moved") and second[0] == first[0]
    said, together, apart = carried
    assert said.startswith("none of 4 items moved: imbalance 1.65 as given")
    assert max(together) == 17.0 and max(apart) >= 22.0  # of 34 together


def chosen() -> list[tuple[str, int, list[str]]]:
    """What a loader balances under DDP, FSDP2 and neither; what was said; how often."""
    name, found = "qwen2_5_vl", list[tuple[str, int, list[str]]]()
    sample = batch_of(name, 0, [(2, 2), (3, 4)], True)
    sample["input_ids"] = sample["input_ids"][0]
    cost, patches = LINEAR, sum(len(sample[f"pixel_values{kind}"]) for kind in ("", "_videos"))
    tokens, said = len(sample["input_ids"]), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("bascule.encoders.step_costs").addHandler(handler)
    for wrap in (DistributedDataParallel, fully_shard, lambda model: model):
        model: Any = make_model(name)
        inner, wrapped = model, wrap(model)
        encoder = BalancedEncoder(tower_of(inner), cost=cost)
        for costs in ("auto", "one", "two", "two", "one"):
            said.clear()
            one = step_costs(wrapped, encoder, cost=cost, costs=costs)  # pyright: ignore
            work = float(one.cost(one.length_fn(sample)))
            want = tokens if one.installed else tokens + patches
            assert abs(work / want - 1) < 1e-5, (work, want)
            if one.installed:
                one.installed.undo()
            found.append((costs, 2 if one.installed else 1, list(said)))
    tower_of(inner).requires_grad_(False)
    frozen = step_costs(inner, encoder, cost=cost)
    assert abs(float(frozen.cost(frozen.length_fn(sample))) / (tokens + patches / 3) - 1) < 1e-5
    return found


def test_the_sum_is_balanced_under_ddp_and_each_part_where_a_model_is_sharded() -> None:
    pytest.importorskip("transformers")
    found, other = run_ranks(chosen, 2)
    assert found == other
    numbers = [[number for _, number, _ in found[i : i + 5]] for i in (0, 5, 10)]
    assert numbers == [[1, 1, 2, 2, 1], [2, 1, 2, 2, 1], [1, 1, 2, 2, 1]]
    said = [[len(texts) for *_, texts in found[i : i + 5]] for i in (0, 5, 10)]
    assert said == [[0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 0, 0]]  # each is said once
    texts = [text for *_, texts in found for text in texts]
    assert 'costs="one" is faster' in texts[0] and 'costs="two" is faster' in texts[1]
    assert "cannot tell where ranks wait" in texts[2]
