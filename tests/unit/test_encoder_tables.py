"""How items are cut from a call and put together, and how long they are."""

from typing import Any

import pytest
import torch
from torch import nn

from bascule.comm.items import joined, leaves_of, mapped
from bascule.encoders.items import TABLES, EncoderTable, called_with, form_of, table_of

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


def test_items_of_one_row_each() -> None:
    table = EncoderTable()
    items = table.cut({"x": torch.eye(3), "mask": torch.ones(3, 2), "scale": 2.0})
    assert [item["x"].shape for item in items] == [(1, 3)] * 3
    assert table.cut({"x": torch.eye(3)[:0]}) == []


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


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_a_video_is_cut_into_runs_of_frames_that_the_tower_computes_by_themselves(
    most: int,
) -> None:
    model = qwen().double().eval()
    table, grid = table_of(model), torch.tensor([(5, 4, 6)])
    patches = torch.randn(120, 3 * 2 * 4 * 4, dtype=torch.float64)
    item = {"hidden_states": patches, "grid_thw": grid}
    assert table.split is not None
    pieces = table.split(item, most)
    frames = [int(piece["grid_thw"][0, 0]) for piece in pieces]
    assert len(frames) == min(most, 5) and sum(frames) == 5 and max(frames) - min(frames) <= 1
    assert torch.equal(torch.cat([piece["hidden_states"] for piece in pieces]), patches)
    whole, apart = model(**item), [model(**piece) for piece in pieces]
    for name in ("last_hidden_state", "pooler_output"):
        found = torch.cat([getattr(one, name) for one in apart])
        torch.testing.assert_close(found, getattr(whole, name), rtol=1e-10, atol=1e-12)
