"""Balanced encoders: features and all gradients are those without balancing."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import bascule
from bascule.encoders import BalancedEncoder, EncoderOptions
from tests.helpers.encoder_cases import (
    check_failing_image,
    check_gradients,
    check_items,
    check_long_video,
    check_padded_texts,
    check_vlm,
    gradients_of,
)
from tests.helpers.oracle import packed_attention
from tests.helpers.ranks import raised_by, run_ranks
from tests.helpers.vlm_models import QWENS

COST = bascule.PolynomialCost(quadratic=0.0, linear=1.0, constant=0.0)


@dataclass
class Both:
    """An output that is nested."""

    first: Tensor
    rest: tuple[Tensor, dict[str, Tensor | None]]


class Toy(nn.Module):
    """Items (1, L, 4) of unlike L; an output that is nested."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.outer = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()

    def forward(self, x: Tensor, ids: Tensor, scale: float = 1.0) -> Both:
        if bool((ids == 13).any()):
            raise ValueError("item 13 cannot be encoded")
        hidden = torch.tanh(self.inner(x) * scale).cumsum(1)
        return Both(self.outer(hidden), (hidden.mean(1), {"ids": ids, "none": None}))


def items_of(rank: int, counts: list[int], requires_grad: bool = True) -> list[dict[str, Any]]:
    """Of unlike lengths; every one has its own number."""
    generator = torch.Generator().manual_seed(rank)
    items = list[dict[str, Any]]()
    for i in range(counts[rank]):
        length = int(torch.randint(1, 6, (), generator=generator)) * (1 + 5 * (rank == 0))
        x = torch.randn(1, length, 4, generator=generator, dtype=torch.float64)
        ids = torch.tensor([[100 * rank + i]])
        items.append({"x": x.requires_grad_(requires_grad), "ids": ids, "scale": 0.5})
    return items


def loss_of(features: list[Both], rank: int) -> Tensor:
    """Weighs every number of every feature by itself, its rank and its place."""
    total = torch.zeros((), dtype=torch.float64)
    for place, one in enumerate(features):
        weights = torch.arange(one.first.numel(), dtype=torch.float64).view_as(one.first)
        total = total + (one.first * weights.sin() * (place + 1 + 10 * rank)).sum()
        total = total + (one.rest[0] ** 2).sum()
    return total


def length_of(item: dict[str, Any]) -> int:
    return item["x"].shape[1]


def summed(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    torch.distributed.all_reduce(total)
    return total


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def check_toy(counts: list[int], way: str) -> str:
    rank = torch.distributed.get_rank()
    items, plain, toy = items_of(rank, counts), Toy(), Toy()
    expected = [plain(**item) for item in items]
    (loss_of(expected, rank) + 0.0 * sum(p.sum() for p in plain.parameters())).backward()
    expected_inputs = [item["x"].grad.clone() for item in items]
    for item in items:
        item["x"].grad = None
        item["x"].requires_grad_(way != "frozen inputs")
    module: nn.Module = toy
    if way == "fsdp":
        fully_shard(toy.inner)
        fully_shard(toy)
    if way == "ddp":
        module = nn.parallel.DistributedDataParallel(toy)
    encoder, kept = BalancedEncoder(module, length_fn=length_of, cost=COST), list[Any]()

    def encode(marker: Tensor) -> Tensor:
        features = encoder(items)
        kept[:] = features
        return features.attach(loss_of(features, rank) + 0.0 * marker)

    marker = torch.zeros((), requires_grad=True)
    if way == "checkpoint":
        loss = checkpoint(encode, marker, use_reentrant=False)
        assert isinstance(loss, Tensor)
    else:
        loss = encode(marker)
    assert len(kept) == len(expected)
    for found, one in zip(kept, expected, strict=True):
        close(found.first, one.first)
        close(found.rest[0], one.rest[0])
        torch.testing.assert_close(found.rest[1], one.rest[1])
    loss.backward()
    if way != "frozen inputs":
        for item, grad in zip(items, expected_inputs, strict=True):
            close(item["x"].grad, grad)
    check_gradients(gradients_of(toy, way == "ddp"), gradients_of(plain))
    return str(encoder.last)


def all_ways(counts: list[int]) -> list[str]:
    ways = ("plain", "frozen inputs", "fsdp", "ddp", "checkpoint")
    return [check_toy(counts, way) for way in ways]


@pytest.mark.some(2)
@pytest.mark.parametrize("counts", [[3, 0], [5, 0, 2], [12, 12, 12, 12], [1, 0, 0, 0]])
def test_features_and_gradients_are_those_without_balancing(counts: list[int]) -> None:
    said = run_ranks(all_ways, len(counts), counts)
    assert all(one == said[0] for one in said)
    print(said[0])


SHAPES = {
    2: [[(2, 3), (4, 4), (1, 2), (3, 3)], []],
    3: [[(1, 2)], [(2, 3), (5, 4), (1, 2), (3, 3)], []],
    4: [[], [(2, 2)], [(2, 3), (6, 4), (1, 2), (3, 3)], []],
}
TILES = {
    2: [[(1, 2), (2, 2), (1, 1)], []],
    3: [[(1, 2)], [(2, 2), (2, 1), (1, 1)], []],
    4: [[], [(2, 2)], [(1, 2), (2, 2), (1, 2)], []],
}
PROJECTED = ("internvl", "llava_onevision")
"""Models that have a layer of their own between tower and text."""
VIDEOS = {2: [False, True], 3: [True, True, False], 4: [True, False, False, False]}


def all_vlms(names: list[str], ways: list[str]) -> list[str]:
    said, size = list[str](), torch.distributed.get_world_size()
    for name in names:
        for way in ways:
            videos = [False] * size if name == "internvl" else VIDEOS[size]
            if name == "llava_onevision" and way == "fsdp":
                continue  # transformers finds no hidden states then, with or without balancing
            shapes = TILES[size] if name == "llava_onevision" else SHAPES[size]
            if name in PROJECTED and way == "fsdp":  # FSDP waits for ranks that do not project
                shapes = [own or [(1, 1)] for own in shapes]
            said.append(check_vlm(name, shapes, videos, way))
    return said


NUM_RANKS = [2, 3, pytest.param(4, marks=pytest.mark.stress)]


@pytest.mark.some(4)
@pytest.mark.parametrize("size", NUM_RANKS)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", *PROJECTED])
def test_a_vlm_that_is_not_edited_trains_alike(name: str, size: int) -> None:
    pytest.importorskip("transformers")
    ways = ["plain", "fsdp", "checkpoint", "frozen"] if size == 2 else ["plain", "fsdp"]
    if name not in PROJECTED:
        ways += ["ddp"]  # without balancing it would wait for ranks without images
    said = run_ranks(all_vlms, size, [name], ways)
    assert all(one == said[0] for one in said)
    assert all("items moved: imbalance" in one for one in said[0]), said[0]


TEXTS = {2: [[3, 9, 4, 4], []], 3: [[2], [9, 5, 5, 9, 1], []], 4: [[], [7, 7, 3, 8], [2], []]}
PIXELS = {
    2: [[(1, 16, 16), (5, 8, 16), (1, 8, 8), (1, 8, 16)], []],
    3: [[(1, 8, 8)], [(5, 16, 16), (1, 8, 16), (1, 8, 8), (1, 8, 8)], []],
    4: [[], [(1, 8, 8)], [(1, 16, 16), (5, 8, 8), (1, 8, 8), (1, 8, 8)], []],
}


def all_items(kinds: list[str], ways: list[str]) -> list[str]:
    given = (TEXTS if "t5" in kinds else PIXELS)[torch.distributed.get_world_size()]
    cases = [(kind, way) for kind in kinds for way in ways]
    # Wan's and Qwen-Image's call their encoder once for every few frames: FSDP would wait forever.
    cases = [(kind, way) for kind, way in cases if way != "fsdp" or kind not in ("wan", "qwen")]
    return [check_items(kind, given, way) for kind, way in cases]


@pytest.mark.some(2)
@pytest.mark.parametrize("size", NUM_RANKS)
@pytest.mark.parametrize("kinds", [["t5", "umt5", "clip"], ["kl", "wan", "qwen"]], ids=str)
def test_texts_and_images_are_encoded_alike_on_any_rank(kinds: list[str], size: int) -> None:
    pytest.importorskip("transformers" if "t5" in kinds else "diffusers")
    said = run_ranks(all_items, size, kinds, ["plain", "fsdp"] if size < 4 else ["plain"])
    assert all(one == said[0] for one in said)
    assert all("items moved" in one and "none" not in one for one in said[0]), said[0]


def all_padded(kinds: list[str]) -> list[str]:
    return [check_padded_texts(kind) for kind in kinds]


def test_a_padded_batch_of_texts_is_encoded_as_by_the_module() -> None:
    pytest.importorskip("transformers")
    said = run_ranks(all_padded, 3, ["t5", "umt5", "clip"])
    assert said[0] == ["3 of 6 items moved: imbalance 1.00 instead of 2.50"] * 3


def failures() -> list[tuple[list[str], str]]:
    rank = torch.distributed.get_rank()
    encoder = BalancedEncoder(Toy(), length_fn=length_of, cost=COST)
    x, ids = torch.ones(1, 4, 4, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int64)
    good = [{"x": x, "ids": ids}] * 3
    bad: list[list[dict[str, Any]]] = [
        [{"x": x, "ids": ids + 13}],  # fails in the module, wherever it is encoded
        [{"x": x[:, :0], "ids": ids}],  # has no length
        [{"x": x.expand(2, 4, 4), "ids": ids}],  # is two items
        [{"x": x, "ids": ids, "scale": object()}],  # cannot travel
        [{"y": x}],  # has no x
    ]
    said = [raised_by(encoder, items if rank == 1 else good) for items in bad]
    said.append(raised_by(encoder.call, x[:0], ids[:0]))
    said.append(raised_by(encoder.call, x, ids, 1.0, 2.0))
    with torch.set_grad_enabled(rank == 0):
        said.append(raised_by(encoder, good))
    assert len(encoder(good)) == 3  # all of them can go on
    return said


def test_an_item_that_fails_is_the_same_error_on_all_ranks() -> None:
    said = run_ranks(failures, 3)
    assert said[0] == said[1] == said[2]
    texts = [
        "ValueError('item 13 cannot be encoded')",
        "rank 1 of group 'encoder': item 0: length_fn is 0; it must be an integer",
        "do not hold as many items each",
        "item 0: ",
        "item 0: KeyError('x')",
        "no rank has an item to encode",
        "the encoder cannot be called so: too many positional arguments",
        "disagree on gradients",
    ]
    for (kinds, text), expected in zip(said[0], texts, strict=True):
        assert expected in text, text
        assert {"CommError", "ConfigError"} & set(kinds)


def fails_when_sharded() -> tuple[list[str], str]:
    rank, toy = torch.distributed.get_rank(), Toy()
    fully_shard(toy.inner)
    fully_shard(toy)
    encoder = BalancedEncoder(toy, length_fn=length_of, cost=COST)
    x, ids = torch.ones(1, 4, 4, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int64)
    kinds, text = raised_by(encoder, [{"x": x, "ids": ids + 13 * (rank == 1)}])
    return kinds, text


def test_a_sharded_encoder_that_fails_on_a_rank_ends_the_others() -> None:
    said = run_ranks(fails_when_sharded, 2)
    assert "item 13" in said[1][1]
    assert "item 13" in said[0][1], said[0]


def test_a_wrong_image_of_a_model_is_the_same_error_on_all_ranks() -> None:
    pytest.importorskip("transformers")
    said = run_ranks(check_failing_image, 3)
    assert said[0] == said[1] == said[2]
    assert "do not hold as many items each" in said[0][1] and "rank 1" in said[0][1]


def choices() -> list[str]:
    rank = torch.distributed.get_rank()
    lengths = [[6, 4, 2], [4, 4, 4], []][rank]
    x, ids = torch.ones(1, 8, 4, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int64)
    items = [{"x": x[:, :n], "ids": ids} for n in lengths]
    said = list[str]()

    def encode(**options: Any) -> str:
        encoder = BalancedEncoder(
            Toy(),
            length_fn=length_of,
            cost=COST,
            options=EncoderOptions(**options),
        )
        encoder(items)
        return str(encoder.last)

    said.append(encode())
    said.append(encode(home_tolerance=0.5))
    said.append(encode(limits=bascule.Limits(tokens=8)))
    said.append(raised_by(encode, limits=bascule.Limits(tokens=7))[0][0])
    said.append(raised_by(encode, limits=bascule.Limits(num_bytes=400))[0][0])
    return said


def test_items_stay_where_moving_does_not_pay_and_limits_hold() -> None:
    said = run_ranks(choices, 3)
    assert said[0] == said[1] == said[2]
    even = "items moved: imbalance 1.00 instead of 1.50"
    assert said[0][0].endswith(even) and said[0][2].endswith(even)
    assert said[0][1] == (
        "none of 6 items moved: no plan gains enough over the imbalance of 1.50 as given"
    )
    assert said[0][3:] == ["PlanError", "PlanError"]


def unlike_weights() -> list[tuple[list[str], str]]:
    rank, said = torch.distributed.get_rank(), list[tuple[list[str], str]]()
    BalancedEncoder(Toy(), length_fn=len, cost=COST)
    for change in ("a weight", "a buffer"):
        toy = Toy()
        toy.register_buffer("scale", torch.tensor([True]))
        with torch.no_grad():
            toy.outer.bias[1] += 1e-15 * (rank == 1 and change == "a weight")
            toy.get_buffer("scale")[0] = rank == 0 or change != "a buffer"
        said.append(raised_by(BalancedEncoder, toy, length_fn=len, cost=COST))
    return said


def test_ranks_with_unlike_weights_are_refused() -> None:
    said = run_ranks(unlike_weights, 2)
    assert said[0] == said[1]
    for kinds, text in said[0]:
        assert "CommError" in kinds and "disagree on weights" in text


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


CARRIED = bascule.Cluster(1, 2, 1e12, 1e9, 1e-3, 1e-3, 0.0)
"""On these wires nothing pays."""


def encoder_before_bags(topology: str, stays: bool) -> tuple[str, list[float], list[float]]:
    """Loss and gradients of both; what each rank has to do, planned together and apart."""
    rank, lens = torch.distributed.get_rank(), [[6, 5, 3], [3]]
    items = [
        {"x": one["x"][:, : lens[rank][place]].detach(), "ids": one["ids"]}
        for place, one in enumerate(items_of(0, [3, 3]))
        if place < len(lens[rank])
    ]
    ids = torch.arange(sum(lens[rank]), dtype=torch.float64) + 100 * rank
    plain, toy, expected, backbone = Toy(), Toy(), Backbone(), Backbone()
    tokens = torch.cat([plain(**item).first[0] for item in items])
    loss = expected.loss(packed_attention(*expected.qkv_of(tokens), lens[rank])[0], ids)
    loss.backward()
    options = EncoderOptions(cluster=CARRIED if stays else None)
    encoder = BalancedEncoder(toy, length_fn=length_of, cost=COST, options=options)
    features = encoder(items)
    assert encoder.last is not None
    assert encoder.last.num_moved == (0 if stays else 1)
    parallel = bascule.SequenceParallel(None, topology, COST)
    apart = parallel.plan(lens[rank])
    step = parallel.plan(lens[rank], carried_loads=encoder.last.loads) if stays else apart
    moved = step.route(tokens=torch.cat([one.first[0] for one in features]), ids=ids)
    found = backbone.loss(step.attend(*backbone.qkv_of(moved["tokens"])), moved["ids"])
    close(summed(found.detach()), summed(loss.detach()))
    features.attach(found).backward()
    for ours, theirs in ((toy, plain), (backbone, expected)):
        check_gradients(gradients_of(ours), gradients_of(theirs))
    after = (apart.plan.loads + encoder.last.loads).tolist()
    return str(encoder.last), step.plan.loads.tolist(), after


@pytest.mark.parametrize("topology", ["g1n2", "g2n1"])
def test_an_encoder_and_bags_share_a_step(topology: str) -> None:
    said = run_ranks(encoder_before_bags, 2, topology, False)
    assert said[0] == said[1] and said[0][0].startswith("1 of 4 items moved")


def test_a_backbone_is_planned_on_top_of_what_the_encoder_left_uneven() -> None:
    (said, together, apart), other = run_ranks(encoder_before_bags, 2, "g1n2", True)
    assert (said, together, apart) == other
    assert said.startswith("none of 4 items moved: at the imbalance of 1.65 as given")
    assert max(together) == 17.0 and max(apart) >= 22.0  # of 34 together


def recomputed() -> tuple[str, str]:
    """A step that is recomputed, and one that is not; nothing but features leads to the encoder."""
    rank, said = torch.distributed.get_rank(), list[str]()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(1, 8, 4, generator=generator, dtype=torch.float64)
    items = [{"x": x[:, :n], "ids": torch.tensor([[n]])} for n in ([1], [3, 3], [2])[rank]]
    grads = list[dict[str, Tensor]]()
    for recomputes in (False, True):
        toy = Toy()
        encoder = BalancedEncoder(toy, length_fn=length_of, cost=COST)

        def encode(marker: Tensor, encoder: BalancedEncoder = encoder) -> Tensor:
            return torch.cat([one.first.flatten() for one in encoder(items)])

        marker = torch.zeros((), requires_grad=True)
        found = checkpoint(encode, marker, use_reentrant=False) if recomputes else encode(marker)
        assert isinstance(found, Tensor)
        (found * torch.arange(found.numel()).sin()).sum().backward()
        grads.append(gradients_of(toy))
        said.append(str(encoder.last))
    check_gradients(*grads)
    return said[0], said[1]


def test_ranks_recompute_together_also_one_whose_items_all_leave_it() -> None:
    # Rank 0 encodes an item of rank 1, and rank 2 that of rank 0.
    for one in run_ranks(recomputed, 3):
        assert one == ("2 of 4 items moved: imbalance 1.00 instead of 2.00",) * 2


def long_videos() -> list[tuple[str, str]]:
    return [check_long_video(name) for name in QWENS]


def test_a_video_is_shared_by_ranks_and_one_above_the_limit_is_cut() -> None:
    pytest.importorskip("transformers")
    said = run_ranks(long_videos, 3)
    assert said[0] == said[1] == said[2]
    for shared, limited in said[0]:
        assert shared.endswith("imbalance 1.00 instead of 3.00")
        assert limited == shared


def num_groups_made() -> int:
    """Process groups that an encoder makes, of ranks whose back end takes tensors of the host."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    before = len(groups)
    BalancedEncoder(Toy(), length_fn=len, cost=COST)
    return len(groups) - before


def test_an_encoder_makes_one_process_group_where_one_can_do_all() -> None:
    assert run_ranks(num_groups_made, 2) == [1, 1]
