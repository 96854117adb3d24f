"""Which rank encodes which item, and whether moving pays."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from bascule.comm.items import leaves_of
from bascule.encoders.items import TABLES, EncoderTable, form_of, split_frames, table_of
from bascule.encoders.plan import CallSettings, Encoding, ItemPlan, plan_items
from bascule.errors import PlanError
from bascule.machine.cluster import Cluster
from bascule.machine.costs import PolynomialCost, TransformerCost
from bascule.plan.limits import Limits
from bascule.plan.metrics import imbalance
from bascule.plan.offer import Offer
from bascule.plan.plan import plan_batch
from bascule.plan.solver.solve import assign

TOKENS = PolynomialCost(0.0, 1.0, 0.0)


def given_of(lens: Sequence[Any], pairs: Sequence[float] = (), num_bytes: int = 512) -> Offer:
    left, words = iter(pairs or [-1.0] * sum(map(len, lens))), list[Any]()
    for own in lens:
        columns = {"num_bytes": [num_bytes] * len(own), "pairs": [next(left) for _ in own]}
        words.append(Offer.of([[len(own)]], own, **columns).to_words())
    return Offer.from_words(words)


def spread(items: Offer, cost: Any, *, flags: int = 0, **more: Any) -> tuple[ItemPlan, Encoding]:
    """Flags are 1 if an item requires a gradient, 2 if a parameter does."""
    gradients = {"items_need_gradient": flags == 1, "needs_gradient": flags > 0}
    is_aligned = more.pop("is_aligned", False)
    settings = CallSettings(items.counts.shape[1], is_aligned=is_aligned, **gradients)
    return plan_items(items, settings, cost, **more)


def test_pairs_and_not_squares_are_the_cost_of_attention() -> None:
    cost = TransformerCost(1, gamma=1e9)  # nothing but attention
    decided, report = spread(given_of([[9, 9, 9], []], [100.0, 50.0, 50.0]), cost)
    assert sorted(decided.rank_of.tolist()) in ([0, 0, 1], [0, 1, 1])
    assert decided.rank_of[1] == decided.rank_of[2] != decided.rank_of[0]
    assert report.balanced == pytest.approx(1.0)
    _, alike = spread(given_of([[9, 9, 9], []]), cost)
    assert alike.balanced == pytest.approx(4 / 3)


def test_a_rank_without_items_needs_the_cheapest_one() -> None:
    decided, report = spread(given_of([[7, 3], [], []]), TOKENS, is_aligned=True)
    dummies = [[of.is_dummy for of in own] for own in decided.passes]
    assert sorted(dummies) == [[False], [False], [True]]
    assert sorted(ids.tolist() for ids in decided.needed) == [[0], [1], [1]]
    assert decided.item_moves[0].size and "1 of 2 items moved" in str(report)
    assert sorted(report.loads) == [0.0, 3.0, 7.0]


def test_what_all_ranks_gave_is_spread_and_goes_to_who_gets_it() -> None:
    items = given_of([[4, 3, 2, 1]])
    for num_getting in (3, 1):
        decided, report = plan_items(items, CallSettings(3, num_getting, at_once=1), TOKENS)
        assert decided.first(2) == 0
        assert not decided.item_moves[0].size and report.loaded == 3.0 and report.num_moved == 4
        assert np.bincount(decided.rank_of, [4, 3, 2, 1]).tolist() == [4, 3, 3]
        assert [[of.ids.size for of in own] for own in decided.passes] == [[1], [1], [1, 1]]
        ids, source, dest = decided.feature_moves
        assert (source == decided.rank_of[ids]).all() and (source != dest).all()
        assert ids.size == (8 if num_getting == 3 else 3)


# Rank 0 has 4 + 2 + 2 tokens and rank 1 four. Evening them out moves an item of 2 tokens: 512 bytes
# there, and as many of features back.
GIVEN = [[4, 2, 2], [4]]


def weigh(byte_s: float, flags: int = 0, launch_s: float = 0.0, **more: Any) -> Any:
    cluster = Cluster(1, 2, 1.0, 1.0, 1 / byte_s, 1 / byte_s, launch_s)
    return spread(given_of(GIVEN), TOKENS, flags=flags, cluster=cluster, **more)


@pytest.mark.parametrize(
    ("flags", "gain", "num_bytes", "launches"),
    [(0, 2.0, 1024, 3), (2, 6.0, 1536, 4), (1, 6.0, 2048, 5)],
    ids=["no gradients", "of parameters", "of items"],
)
def test_items_move_only_where_the_gain_is_more_than_what_travels_takes(
    flags: int, gain: float, num_bytes: int, launches: int
) -> None:
    at_most = (gain - 0.1 * launches) / num_bytes
    for factor, num_moved in ((0.99, 1), (1.01, 0)):
        _, report = weigh(factor * at_most, flags, 0.1)
        assert report.num_moved == num_moved
        assert report.gain_s == pytest.approx(gain) and report.exchange_bytes == num_bytes
        seconds = factor * at_most * num_bytes + 0.1 * launches
        assert report.exchange_s == pytest.approx(seconds)
        assert f"costs {seconds:.3g} s to save {gain:.2f} s" in str(report)
        assert sorted(report.loads) == ([6.0, 6.0] if num_moved else [4.0, 8.0])


def test_what_the_host_needs_to_move_anything_is_in_the_price() -> None:
    """Where it is more than any plan could gain, none is searched."""
    cluster, items = Cluster(1, 2, 1.0, 1.0, 1e9, 1e9, 0.0), given_of(GIVEN)
    for moving_s, slower, num_moved, gain_s in (
        (1.9, 1.0, 1, 2.0),
        (2.1, 1.0, 0, None),
        (0.95, 2.0, 1, 2.0),
        (0.95, 2.2, 0, None),
    ):
        settings = CallSettings(2, moving_s=moving_s, slower=slower)
        _, report = plan_items(items, settings, TOKENS, cluster=cluster)
        assert report.num_moved == num_moved and report.gain_s == gain_s
        assert report.exchange_s is None or report.exchange_s == pytest.approx(1.9, rel=1e-5)


def test_without_a_cluster_moving_is_taken_to_pay() -> None:
    _, report = spread(given_of(GIVEN), TOKENS)
    assert report.num_moved == 1 and report.gain_s is None
    assert str(report) == "1 of 4 items moved: imbalance 1.00 instead of 1.33"


def test_what_does_not_pay_moves_all_the_same_where_a_rank_cannot_hold_its_items() -> None:
    assert weigh(1e9, limits=Limits(tokens=8))[1].num_moved == 0
    assert weigh(1e9, limits=Limits(tokens=7))[1].num_moved == 1
    with pytest.raises(PlanError):
        weigh(1e9, limits=Limits(tokens=5))


def test_what_is_even_as_given_stays_without_a_search() -> None:
    for given, tolerance in (([[4], [2, 2]], 0.0), ([[51], [50]], 0.02), ([[9], [1]], 0.0)):
        _, report = spread(given_of(given), TOKENS, locality_tolerance=tolerance)
        assert report.num_moved == 0 and report.gain_s is None
        assert "as given; no plan gains enough" in str(report)


def test_a_cluster_prices_flops_and_the_wires_between_nodes() -> None:
    cost = TransformerCost(1000)
    loaded = given_of([[4096, 4096], [1], [4096], [4096]], num_bytes=512_000)
    for num_nodes, num_moved in ((1, 1), (2, 1), (4, 0)):
        made = Cluster(num_nodes, 4 // num_nodes, 1e15, 1.0, 1e11, 1e7, 0.0)
        _, report = spread(loaded, cost, cluster=made)
        assert report.num_moved == num_moved
        wanted = (2 - num_moved) * float(cost(4096)) * 1e-3
        assert max(report.loads) == pytest.approx(wanted, rel=1e-3)


# How items are cut from a call and put together, and how long they are


GRIDS = torch.tensor([(1, 4, 6), (3, 2, 2), (2, 10, 6), (1, 2, 14)])


def qwen() -> Any:
    transformers = pytest.importorskip("transformers")
    vision = {"depth": 4, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
    vision |= {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 8}
    vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(vision_config=vision).vision_config
    name = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"
    module = __import__(name, fromlist=["x"])
    return module.Qwen2_5_VisionTransformerPretrainedModel(config)


def test_pairs_are_those_of_the_windows_and_frames_that_the_model_makes() -> None:
    from transformers.vision_utils import get_vision_window_index

    model = qwen()
    for grid in GRIDS:
        _, bounds = get_vision_window_index(grid[None], 2, 16, 4)
        windows = bounds.diff().double()
        full = float(grid[0] * (grid[1] * grid[2]) ** 2)
        expected = (full + 3 * float((windows**2).sum())) / 4
        length = table_of(model).length
        assert length is not None
        assert length(model, {"grid_thw": grid[None]}) == (int(grid.prod()), expected)


def test_only_items_of_one_form_go_into_one_call() -> None:
    device, x = torch.device("cpu"), torch.ones(1, 4)
    base = form_of({"x": x, "scale": 1.0}, device)
    assert form_of({"x": torch.zeros(5, 4), "scale": 1.0}, device) == base
    others = [{"x": x}, {"x": x, "scale": 2.0}, {"x": x.double(), "scale": 1.0}]
    others += [{"x": torch.ones(1, 5), "scale": 1.0}, {"y": x, "scale": 1.0}]
    assert base not in {form_of(other, device) for other in others}


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_of_a_class_that_there_is(name: str) -> None:
    pytest.importorskip(name.partition(".")[0])
    path, _, cls = name.rpartition(".")
    found = getattr(__import__(path, fromlist=[cls]), cls)
    assert f"{found.__module__}.{found.__qualname__}" == name
    assert TABLES[name].method is None or callable(getattr(found, TABLES[name].method or ""))


def test_a_module_of_no_known_class_has_one_row_an_item_and_no_length() -> None:
    assert table_of(nn.Linear(1, 1)) == EncoderTable()


TOWERS = [name for name, table in TABLES.items() if table.split]
SMALL = {"depth": 3, "embed_dim": 32, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
SMALL |= {"out_hidden_size": 16, "patch_size": 4, "spatial_merge_size": 2, "window_size": 16}
SMALL |= {"fullatt_block_indexes": [1], "num_position_embeddings": 64}
SMALL |= {"deepstack_visual_indexes": [1]}


def tower(name: str) -> Any:
    """A tower of a known class, with no weight of zero that could hide a wrong position."""
    path, _, of_class = name.rpartition(".")
    cls: Any = getattr(pytest.importorskip(path), of_class)
    config = cls.config_class() if cls.config_class else cls.__annotations__["config"]()
    for key in SMALL.keys() & vars(config).keys():
        setattr(config, key, SMALL[key])
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = cls(config).double().eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model


@pytest.mark.parametrize("name", TOWERS)
def test_a_video_is_cut_into_runs_of_frames_that_the_tower_computes_alone(name: str) -> None:
    """The sum of all outputs, deepstack features too, and the gradients are those of the whole."""
    model, num_frames = tower(name), 7
    table, grid = table_of(model), torch.tensor([(num_frames, 4, 8)])
    values = model.config.in_channels * model.config.temporal_patch_size * 4**2
    patches = torch.randn(num_frames * 32, values, dtype=torch.float64, requires_grad=True)
    assert table.split is not None
    item, found = {"hidden_states": patches, "grid_thw": grid}, list[list[torch.Tensor]]()
    for num_ranks, want in ((1, [7]), (2, [4, 2, 1]), (3, [3, 2, 1, 1]), (9, [1] * 7)):
        pieces = table.split(item, num_ranks)
        assert [int(piece["grid_thw"][0, 0]) for piece in pieces] == want
        assert torch.equal(torch.cat([piece["hidden_states"] for piece in pieces]), patches)
        columns = zip(*(leaves_of(dict(model(**piece))) for piece in pieces), strict=True)
        outputs = [torch.cat(column) for column in columns]
        loss = torch.stack([x.sin().sum() for x in outputs]).sum()
        found.append([*outputs, *torch.autograd.grad(loss, [patches, *model.parameters()])])
    assert len(found[0]) > 3
    for of_pieces in found[1:]:
        torch.testing.assert_close(of_pieces, found[0], rtol=1e-10, atol=1e-10)


def test_videos_of_another_tower_stay_whole() -> None:
    """A subclass may let frames attend to each other; a sharded module has its class's name."""
    known = qwen()
    known.__class__ = type("Sharded", (FSDPModule, type(known)), {})
    assert table_of(known).split is split_frames
    known.__class__ = type("WithTime", (type(qwen()),), {})
    assert table_of(known) == replace(table_of(qwen()), split=None)


@pytest.mark.parametrize(
    ("num_frames", "images"),
    [(64, []), (64, [300, 700]), (96, [500, 100, 900]), (130, [60, 800]), (512, [900, 40])],
)
def test_frames_of_one_long_video_make_ranks_even(num_frames: int, images: list[int]) -> None:
    """Rank 0 has a video, the others images, of so many patches; 1.02 where whole frames can."""
    patches, cost = 16 * 36, TransformerCost(1280, num_layers=32)
    best = np.inf
    for places in product(range(4), repeat=len(images)):
        loads = np.bincount(np.array(places, int), cost(images), 4).astype(np.float64)
        for _ in range(num_frames):
            loads[loads.argmin()] += cost(patches)
        best = min(best, imbalance(loads))
    grid = torch.tensor([(num_frames, 16, 36)])
    item = {"hidden_states": torch.empty(int(grid.prod()), 0), "grid_thw": grid}
    frames = [int(piece["grid_thw"][0, 0]) for piece in split_frames(item, 4)]
    assert len(frames) <= 4 * 6
    lens = [[count * patches for count in frames], [], [], []]
    pairs = [float(count * patches**2) for count in frames] + [float(n**2) for n in images]
    for place, length in enumerate(images):
        lens[1 + place].append(length)
    _, report = spread(given_of(lens, pairs), cost, locality_tolerance=0.02)
    assert report.loaded > 3 and report.balanced <= max(1.02, best + 1e-9)
    assert best <= 1.02 or images == [300, 700]


NUM_RANKS, SAMPLES_A_RANK = 4, 16
LANGUAGE, TOWER = TransformerCost(3584, num_layers=28), TransformerCost(1280, num_layers=32)


def photos_and_texts(seed: int) -> tuple[list[list[int]], list[int]]:
    """Of each sample, patches of photos and frames of clips, of real sizes; its tokens of text."""
    skimage = pytest.importorskip("skimage")
    images = pytest.importorskip("PIL.Image")
    folder = Path(skimage.__file__).parent / "data"
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in (".jpg", ".png")]
    sides = list[tuple[int, int]]()
    for path in paths:
        with images.open(path) as image:
            sides.append(image.size)
    random = np.random.default_rng(seed)
    num = NUM_RANKS * SAMPLES_A_RANK
    counts = random.choice([0, 0, 0, 0, 0, 1, 2, 6], num)
    chosen = [[sides[i] for i in random.integers(len(sides), size=count)] for count in counts]
    frames = [random.choice([1, 1, 1, 4], len(own)) for own in chosen]  # of every fourth, a clip
    patches = [
        [4 * (w // 28) * (h // 28) for (w, h), f in zip(*both, strict=True) for _ in range(f)]
        for both in zip(chosen, frames, strict=True)
    ]
    return patches, np.clip(random.lognormal(7.0, 1.2, num), 16, 16384).astype(int).tolist()


def imbalances(patches: list[list[int]], tokens: list[int], rank_of: Any) -> tuple[float, float]:
    """Of the language model, and of the tower where photos are encoded by who has the sample."""
    towers = np.array([TOWER(own).sum() for own in patches])
    language, tower = (
        imbalance(np.bincount(rank_of, each, NUM_RANKS).astype(np.float64))
        for each in (LANGUAGE(tokens), towers)
    )
    return language, tower


@pytest.mark.parametrize("seed", range(4))
def test_two_stages_are_even_where_one_cost_leaves_one_of_them_uneven(seed: int) -> None:
    patches, texts = photos_and_texts(seed)
    tokens = [text + sum(own) // 4 for text, own in zip(texts, patches, strict=True)]
    both = LANGUAGE(tokens) + [TOWER(own).sum() for own in patches]
    one = imbalances(patches, tokens, assign(both, NUM_RANKS).bin_of)
    assert max(one) >= 1.2

    # What the loader does with the cost of the language model, and the encoder with its own.
    plan = plan_batch(np.split(np.array(tokens), NUM_RANKS), f"g1n{NUM_RANKS}", LANGUAGE)
    language, as_given = imbalances(patches, tokens, plan.bag_of)
    held = [np.flatnonzero(plan.bag_of == rank).tolist() for rank in range(NUM_RANKS)]
    owned = [[n for i in own for n in patches[i]] for own in held]
    _, report = spread(given_of(owned), TOWER)
    assert report.loaded == pytest.approx(as_given) and as_given > 1.02
    assert language <= 1.02 and report.balanced <= 1.02
