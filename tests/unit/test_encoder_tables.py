"""How items are cut from a call and put together, and how long they are."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bascule.comm.samples.nests import joined, leaves_of, mapped
from bascule.encoders.encoder_tables import TABLES, EncoderTable, called_with, form_of, table_of
from bascule.encoders.item_plans import Loaded, plan_items
from bascule.errors import ConfigError
from bascule.plan.costs.cost_models import PolynomialCost, TransformerCost

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


def test_patches_of_images_are_cut_and_joined() -> None:
    sizes = GRIDS.prod(-1).tolist()
    table = table_of(qwen())
    patches = torch.arange(sum(sizes) * 2.0).view(-1, 2)
    call = {"hidden_states": patches, "grid_thw": GRIDS, "return_dict": True}
    items = table.cut(call)
    assert [len(item["hidden_states"]) for item in items] == sizes
    again = table.join(items)
    assert torch.equal(again["hidden_states"], patches) and torch.equal(again["grid_thw"], GRIDS)
    assert again["return_dict"] is True
    merged = table.parts((patches[::4], [patches]), items)
    assert [[len(leaf) for leaf in own] for own in merged] == [[n // 4, n] for n in sizes]
    assert torch.equal(torch.cat([own[0] for own in merged]), patches[::4])
    with pytest.raises(ConfigError, match="cannot be cut into 4 items of sizes"):
        table.parts(patches[:-1], items)
    with pytest.raises(ConfigError, match="do not hold as many items"):
        table.cut({**call, "hidden_states": patches[:-1]})


def test_items_of_one_row_each() -> None:
    table = EncoderTable()
    items = table.cut({"x": torch.eye(3), "mask": torch.ones(3, 2), "scale": 2.0})
    assert [item["x"].shape for item in items] == [(1, 3)] * 3
    assert table.cut({"x": torch.eye(3)[:0]}) == []
    with pytest.raises(ConfigError, match="do not hold as many items"):
        table.cut({"x": torch.eye(3), "mask": torch.ones(2, 2)})
    with pytest.raises(ConfigError, match="without dims"):
        table.cut({"x": torch.tensor(1.0)})
    with pytest.raises(ConfigError, match="cannot be cut into 3 items"):
        table.parts(torch.tensor(1.0), items)


def test_only_items_of_one_form_go_into_one_call() -> None:
    device, x = torch.device("cpu"), torch.ones(1, 4)
    base = form_of({"x": x, "scale": 1.0}, device)
    assert form_of({"x": torch.zeros(5, 4), "scale": 1.0}, device) == base
    others = [{"x": x}, {"x": x, "scale": 2.0}, {"x": x.double(), "scale": 1.0}]
    others += [{"x": torch.ones(1, 5), "scale": 1.0}, {"y": x, "scale": 1.0}]
    assert base not in {form_of(other, device) for other in others}


def test_arguments_get_their_names() -> None:
    def encode(x: int, y: int | None = None, **rest: Any) -> None: ...

    assert called_with(encode, (1,), {"y": None, "z": 3}) == {"x": 1, "z": 3}
    with pytest.raises(ConfigError, match="cannot be called so: missing a required"):
        called_with(encode, (), {})

    def packed(*images: int) -> None: ...

    with pytest.raises(ConfigError, match="without names"):
        called_with(packed, (1, 2), {})


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_of_a_class_that_there_is(name: str) -> None:
    pytest.importorskip(name.partition(".")[0])
    path, _, cls = name.rpartition(".")
    found = getattr(__import__(path, fromlist=[cls]), cls)
    assert f"{found.__module__}.{found.__qualname__}" == name
    assert TABLES[name].method is None or callable(getattr(found, TABLES[name].method or ""))


def test_a_module_of_no_known_class_has_one_row_an_item_and_no_length() -> None:
    assert table_of(nn.Linear(1, 1)) == EncoderTable()


def test_nests_keep_their_types() -> None:
    class Sampled:
        def __init__(self, parameters: torch.Tensor, deterministic: bool = False) -> None:
            self.parameters, self.deterministic = parameters, deterministic

    nest = {"a": (torch.ones(2), [None, 3]), "b": Sampled(torch.zeros(2), True)}
    twice = joined([nest, mapped(nest, lambda x: x + 1)])
    assert [leaf.tolist() for leaf in leaves_of(twice)] == [[1, 1, 2, 2], [0, 0, 1, 1]]
    assert twice["a"][1] == [None, 3] and twice["b"].deterministic


def loaded_of(lens: list[list[int]], pairs: list[float] | None = None) -> Loaded:
    flat = [n for own in lens for n in own]
    bits = np.array(pairs or [-1.0] * len(flat), np.float64).view(np.int64).tolist()
    said, at = list[Any](), 0
    for own in lens:
        rows = [[n, bits[at + i], 0, 1, 8 * n] for i, n in enumerate(own)]
        at += len(own)
        said.append(np.array([0, *np.array(rows, np.int64).flatten()], np.int64))
    return Loaded.of(said, 0)


def test_pairs_and_not_squares_are_the_cost_of_attention() -> None:
    cost = TransformerCost(1, gamma=1e9)  # nothing but attention
    plan = plan_items(loaded_of([[9, 9, 9], []], [100.0, 50.0, 50.0]), cost, None, 0.0, False)
    assert sorted(plan.rank_of.tolist()) in ([0, 0, 1], [0, 1, 1])
    assert plan.rank_of[1] == plan.rank_of[2] != plan.rank_of[0]
    assert plan.report.balanced == pytest.approx(1.0)
    alike = plan_items(loaded_of([[9, 9, 9], []]), cost, None, 0.0, False)
    assert alike.report.balanced == pytest.approx(4 / 3)


def test_a_rank_without_items_needs_the_cheapest_one() -> None:
    plan = plan_items(loaded_of([[7, 3], [], []]), PolynomialCost(0.0, 1.0, 0.0), None, 0.0, True)
    dummies = [[of.is_dummy for of in own] for own in plan.passes]
    assert sorted(dummies) == [[False], [False], [True]]
    ids, ranks = plan.needed
    assert sorted(ids.tolist()) == [0, 1, 1] and sorted(ranks.tolist()) == [0, 1, 2]
    assert plan.moves and "1 of 2 items moved" in str(plan.report)


def test_what_all_ranks_gave_is_spread_and_goes_to_who_gets_it() -> None:
    numbers = [(n, -1, 0, 0, 8) for n in (4, 3, 2, 1)]
    said = [np.array([0, *(x for one in numbers for x in one)])] * 3
    for num_getting in (3, 1):
        loaded = Loaded.of(said, 2, num_getting)
        assert loaded.num_items == 4 and loaded.own.tolist() == [0, 1, 2, 3]
        cost = PolynomialCost(quadratic=0.0, linear=1.0, constant=0.0)
        plan = plan_items(loaded, cost, None, 0.0, False, True)
        assert not plan.moves and plan.report.loaded == 3.0 and plan.report.num_moved == 4
        assert np.bincount(plan.rank_of, [4, 3, 2, 1]).tolist() == [4, 3, 3]
        assert [[of.ids.size for of in own] for own in plan.passes] == [[1], [1], [1, 1]]
        ids, dest = plan.sent(False)
        source = plan.rank_of[ids]
        assert (np.diff(source) >= 0).all() and (source != dest).all()
        assert ids.size == (8 if num_getting == 3 else 3)
        rows = np.array([10, 20, 30, 40])
        for one, rank, start in zip(ids, source, plan.starts(rows), strict=True):
            before = [i for i in range(one) if plan.rank_of[i] == rank]
            assert start == rows[before].sum()
