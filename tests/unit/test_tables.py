"""Split tables: they fit the installed models."""

import inspect
import itertools
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bascule.comm.mesh import AttentionMesh
from bascule.diffusers import SparseConfig, SplitTable, tables
from bascule.diffusers.split_model import SplitModel
from bascule.diffusers.split_table import Keys, Mask, modules_of
from bascule.diffusers.tables import TABLES, WITHOUT_TABLE, table_of
from bascule.errors import ConfigError
from tests.helpers.inference_cases import CASES, make_inputs, make_model

LAYERS = """num_layers num_mmdit_layers num_single_dit_layers num_single_layers n_layers depth
    num_hidden_layers""".split()
# What a model has only if asked for.
OPTIONS: dict[str, dict[str, Any]] = {
    "SD3Transformer2DModel": {"dual_attention_layers": (0, 1)},
    "SD3ControlNetModel": {"dual_attention_layers": (0, 1)},
    "ZImageTransformer2DModel": {"siglip_feat_dim": 8},
    "WanVACETransformer3DModel": {"vace_layers": [0, 1]},
    "WanAnimateTransformer3DModel": {"inject_face_latents_blocks": 1},
    "HunyuanVideoTransformer3DModel": {"image_condition_type": "token_replace"},
    "HunyuanVideoFramepackTransformer3DModel": dict.fromkeys(
        ("has_image_proj", "has_clean_x_embedder"), True
    ),
    "HiDreamImageTransformer2DModel": {"patch_size": 2, "caption_channels": [8, 8]},
}


PLAIN = set(
    """return_dict joint_attention_kwargs attention_kwargs img_shapes controlnet_blocks_repeat
    skip_layers image_noise_mask patch_size f_patch_size num_ref_tokens ref_fixed_timestep
    motion_encode_batch_size enable_diffusion_forcing num_frames height width fps
    audio_num_frames isolate_modalities spatio_temporal_guidance_blocks use_cross_timestep
    cross_attention_kwargs conditioning_scale sequence_length vision_token_shapes
    sound_token_shapes action_token_shapes""".split()
)
"""Arguments without tensors."""


@cache
def make(name: str) -> nn.Module:
    """A model without storage, of two layers of each kind."""
    kind = getattr(pytest.importorskip("diffusers"), name)
    layers = dict.fromkeys({*LAYERS} & {*inspect.signature(kind).parameters}, 2)
    with torch.device("meta"):
        return kind(**layers | OPTIONS.get(name, {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_a_table_names_arguments_and_modules_that_exist(name: str) -> None:
    model, table = make(name), TABLES[name]
    assert table_of(model) is table
    arguments = set(inspect.signature(model.forward).parameters)
    for pattern, cuts in table.inputs.items():
        for module in modules_of(model, pattern).values():
            assert set(cuts) <= set(inspect.signature(module.forward).parameters)
    assert {*table.replicated, *table.refused, *table.unbatched} <= arguments
    for pattern in (*table.outputs, *table.gathers, *table.blocks, *table.attends):
        assert modules_of(model, pattern)
    cuts = [cut for one in (table.outputs, *table.inputs.values()) for cut in one.values()]
    cuts += table.gathers.values()  # some by the place of an argument
    parts = [part for cut in cuts for part in (cut.values() if isinstance(cut, Mapping) else [cut])]
    named = [one.segment if isinstance(one, Mask) else one.segments for one in parts]
    segments = {name for one in named for name in ((one,) if isinstance(one, str) else one)}
    keys = [one.segments for one in table.attends.values() if isinstance(one, Keys)]
    over = [one for one in table.attends.values() if not isinstance(one, Keys)]
    assert segments == {*table.segments, *itertools.chain(*over)}
    assert {*itertools.chain(*keys), *table.nonempty} <= segments


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_what_to_do_with_every_argument_that_may_hold_tensors(name: str) -> None:
    """Diffusers may add arguments: a new one must be put into the table."""
    model, table = make(name), TABLES[name]
    told = {*table.inputs.get("", ()), *table.replicated, *table.refused}
    assert set(inspect.signature(model.forward).parameters) <= told | PLAIN


def test_the_readme_counts_them() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"[{len(TABLES)} models of diffusers]" in readme


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1, 1)) for _ in range(11))


def test_a_star_is_one_part_of_a_name() -> None:
    names = list(modules_of(Mine(), "blocks.*"))
    assert names == [f"blocks.{i}" for i in range(11)]
    assert list(modules_of(Mine(), "blocks.1")) == ["blocks.1"]
    assert len(modules_of(Mine(), "blocks.*.0")) == 11
    assert list(modules_of(Mine(), "")) == [""]
    with pytest.raises(ConfigError, match=r"names 'block\.\*', and Mine has no such module"):
        modules_of(Mine(), "block.*")


def test_subclasses_use_the_table_of_their_base_and_others_are_told_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Derived(Mine):
        pass

    with pytest.raises(ConfigError, match=r"no split table for Derived: .*table=SplitTable"):
        table_of(Derived())
    table = SplitTable(("text",), {}, {}, {})
    monkeypatch.setattr(tables, "TABLES", {"Mine": table})
    with pytest.raises(ConfigError, match="no split table"):  # a class of that name elsewhere
        table_of(Derived())
    monkeypatch.setattr(Mine, "__module__", "diffusers.models.mine")
    assert table_of(Derived()) is table


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_TABLE)
def test_models_that_no_table_can_split_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no split table for {name}: .*: run it on each rank"):
        table_of(make(name))
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert f"`{name}`" in page


def test_block_sparse_attention_needs_tokens_that_ranks_share() -> None:
    table = SplitTable(("text",), {}, {}, {}, copied=("text",))
    with pytest.raises(ConfigError, match="every rank has text of Mine whole: leave out sparse"):
        SplitModel(Mine(), table, AttentionMesh(None, None, None), sparse=SparseConfig(keep=0.5))


def test_the_docs_list_every_table_and_every_table_has_a_case() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    section = page.partition("\n## Models of diffusers\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(TABLES)
    pytest.importorskip("diffusers")
    made = {case.model: type(make_model(case)) for case in CASES}
    assert set(TABLES) <= {cls.__name__ for cls in made.values()}


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ("flux2", {"kv_cache_mode": "extract"}, "with kv_cache_mode: a cache of keys"),
        ("cogview4", {"attention_mask": 1}, "with attention_mask: the model adds it"),
        ("pixart", {"attention_mask": 1}, "with attention_mask: the model pads it"),
        ("allegro", {"attention_mask": 1}, "with attention_mask: the model pads it"),
        (
            "bria",
            {"controlnet_single_block_samples": [1]},
            "controlnet_single.*the model adds them",
        ),
    ],
)
def test_arguments_that_ranks_cannot_share_are_refused(
    model: str, given: dict[str, Any], said: str
) -> None:
    pytest.importorskip("diffusers")
    case = next(case for case in CASES if case.model == model)
    whole = make_model(case)
    split = SplitModel(whole, table_of(whole), AttentionMesh(None, None, None))
    with pytest.raises(ConfigError, match=said):
        whole(**make_inputs(case), **given)
    split.remove()
    whole(**make_inputs(case))


def test_a_mode_is_of_unions_alone() -> None:
    """Pipelines with several nets give one, which nets that are no unions pass over."""
    pytest.importorskip("diffusers")
    case = next(case for case in CASES if case.model == "flux_controlnet")
    net, inputs = make_model(case), make_inputs(case) | {"return_dict": False}
    expected = net(**inputs)[0][0]
    split = SplitModel(net, table_of(net), AttentionMesh(None, None, None))
    output = net(**inputs, controlnet_mode=torch.tensor([[-1]]))[0][0]
    split.remove()
    assert torch.equal(output, expected)
    net.union = True
    with pytest.raises(ConfigError, match="FluxControlNetModel that is a union, whose text"):
        table_of(net)
