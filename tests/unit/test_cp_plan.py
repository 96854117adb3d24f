"""Split tables from diffusers' plans: what is read, and what a plan does not say is refused."""

from functools import cache
from typing import Any

import pytest
import torch
from diffusers.models._modeling_parallel import ContextParallelInput as In
from diffusers.models._modeling_parallel import ContextParallelOutput as Out
from torch import Tensor, nn

from bascule.diffusers import Cut, SplitTable
from bascule.diffusers.cp_plan import table_from_plan
from bascule.diffusers.tables import FLUX, table_of
from bascule.errors import ConfigError


class Attention(nn.Module):
    def set_processor(self, processor: Any) -> None: ...


class Blind(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, Attention())

    def forward(self, hidden_states: Tensor) -> None: ...


class Block(Blind):
    def forward(self, hidden_states: Tensor, encoder_hidden_states: Any = None) -> None: ...


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module, refiner: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.rope, self.proj_out = nn.Identity(), nn.Identity()
        if refiner is not None:
            self.refiner = nn.ModuleList([refiner])

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        controlnet_block_samples: Any = None,
        attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> None: ...


INPUTS = {"hidden_states": In(1, 3), "encoder_hidden_states": In(1, 3)}
INPUTS |= {"encoder_attention_mask": In(1, 2)}
PLAN = {"": INPUTS, "rope": {0: In(0, 2, split_output=True)}, "proj_out": Out(1, 3)}


def test_one_attention_in_each_block_is_over_text_and_image() -> None:
    table = table_from_plan(Model(Block("attn"), Block("attn")), PLAN)
    image, text = Cut("image", 1, 3), Cut("text", 1, 3)
    assert table.segments == ("text", "image")
    assert table.inputs == {"": {"hidden_states": image, "encoder_hidden_states": text}}
    assert table.outputs == {"rope": {0: Cut((), 0, 2)}}
    assert table.gathers == {"proj_out": Cut("image", 1)}
    assert table.blocks == {"blocks.0.attn": (), "blocks.1.attn": ()}
    assert table.replicated == ("timestep",) and not table.attends
    # what a plan cuts like a token, or leaves out
    assert table.refused.keys() == {"encoder_attention_mask", "controlnet_block_samples"}


def test_text_that_is_attended_to_alone_is_not_cut_nor_its_mask() -> None:
    table = table_from_plan(Model(Block("attn1", "attn2")), PLAN)
    assert table.segments == ("image",)
    assert table.inputs == {"": {"hidden_states": Cut("image", 1, 3)}}
    assert table.blocks == {"blocks.0.attn1": ()} and table.attends == {"blocks.0.attn2": ()}
    assert table.replicated == ("encoder_hidden_states", "encoder_attention_mask", "timestep")


@pytest.mark.parametrize(
    ("model", "plan", "said"),
    [
        (Model(), PLAN, "no attention module of diffusers"),
        (
            Model(Block("attn"), refiner=Block("attn")),
            PLAN,
            "which tokens attn of refiner.0 attend to",
        ),
        (Model(Block("attn1", "attn2", "attn3")), PLAN, "attn1, attn2, attn3 of blocks.0"),
        (Model(Blind("attn1", "attn2")), PLAN, "which tokens blocks.0.attn2 attends to"),
        (Model(Block("attn1", "attn2"), Block("attn")), PLAN, "some of its blocks attend"),
        (Model(Block("attn")), {"proj_out": Out(1)}, "where to shard and gather"),
        (Model(Block("attn")), {"": {"hidden_states": In(1)}}, "where to shard and gather"),
        (Model(Block("attn")), {**PLAN, "rope": [Out(1), Out(1)]}, "gathers several outputs"),
        (Model(Block("attn")), {**PLAN, "rope": [In(1), In(2)]}, "parts of 0 of 'rope' unlike"),
        (Model(Block("attn")), {**PLAN, "blocks.*.attn": Out(1)}, "gathers after blocks.0.attn"),
        (Model(Block("attn")), {**PLAN, "head": Out(1)}, "names 'head', and Model has no such"),
    ],
)
def test_gaps_of_a_plan_are_refused(model: nn.Module, plan: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.").replace("*", r"\*")):
        table_from_plan(model, plan)


def test_a_joint_attention_beside_another_is_refused() -> None:
    block = Block("attn1", "attn2")
    block.get_submodule("attn1").add_q_proj = nn.Linear(1, 1)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match=r"which tokens blocks\.0\.attn2 attends to"):
        table_from_plan(Model(block), PLAN)


def test_layers_that_a_smaller_model_lacks_are_left_out() -> None:
    plan = {**PLAN, **{f"blocks.{i}.ff": Out(1) for i in range(40)}}
    block = Block("attn")
    block.ff = nn.Identity()
    assert set(table_from_plan(Model(block), plan).gathers) == {"proj_out", "blocks.0.ff"}


def test_what_is_given_comes_first_then_our_own_tables_then_plans() -> None:
    model = Model(Block("attn"))
    given = SplitTable(("x",), {}, {}, {})
    assert table_of(model, given) is given
    assert table_of(model, PLAN) == table_from_plan(model, PLAN)
    with pytest.raises(ConfigError, match=r"no split table for Model: .*context_parallel\(mesh\)"):
        table_of(model)

    class Planned(Model):
        _cp_plan = PLAN

    assert table_of(Planned(Block("attn"))) == table_from_plan(model, PLAN)


@cache
def real(name: str) -> Any:
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        return getattr(diffusers, name)(num_layers=2)


def test_our_table_of_flux_comes_before_its_plan() -> None:
    model = real("FluxTransformer2DModel")
    assert table_of(model) is FLUX
    plan = model._cp_plan
    assert isinstance(plan, dict) and table_of(model, plan) != FLUX


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("HeliosTransformer3DModel", "by a plan of diffusers"),  # each attention sees its history
        ("MiniMaxH3Transformer3DModel", "by a plan of diffusers"),  # a refiner of its own
        ("LTX2VideoTransformer3DModel", "by a plan of diffusers"),  # sound, and attention to it
        # Linear attention is a sum over all tokens; one call is for each image.
        (
            "SanaTransformer2DModel",
            r"no split table for Sana.*linear attention.*run it on each rank",
        ),
        ("QwenImage21Transformer2DModel", r"no split table for QwenImage21.*context_parallel"),
    ],
)
def test_models_whose_plan_does_not_suffice(name: str, words: str) -> None:
    model = real(name)
    with pytest.raises(ConfigError, match=words):
        table_of(model, getattr(model, "_cp_plan", None))
