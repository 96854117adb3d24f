"""Wrong arguments of `parallelize`, as users give them, on two ranks; and what they are told."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bascule.diffusers import (
    AutoMesh,
    Cut,
    Keys,
    Mask,
    SparseConfig,
    parallelize,
)
from tests.helpers.inference_toy import TABLE, make_toy

Wrong = tuple[Callable[[], object], str]
"""What a user does on every rank, and what the error says."""


def given(*args: Any, model: Any = None, **kwargs: Any) -> Callable[[], object]:
    """A toy, split by these arguments."""

    def call() -> object:
        made = {key: value() if callable(value) else value for key, value in kwargs.items()}
        made.setdefault("table", TABLE)
        return parallelize(make_toy() if model is None else model(), *args, **made)

    return call


def mesh(ranks: Any, *names: str) -> Callable[[], DeviceMesh]:
    return lambda: DeviceMesh("cpu", ranks, mesh_dim_names=names or None)


def table(**changed: Any) -> Callable[[], object]:
    """The toy's table, but for some of it."""
    return given(ulysses_degree=2, table=replace(TABLE, **changed))


def inputs(**cuts: Any) -> Callable[[], object]:
    return table(inputs={"": {**TABLE.inputs[""], **cuts}})


def configured(heads: int = 6) -> Any:
    """A toy that says how many heads it has."""
    model: Any = make_toy(heads=heads, kv_heads=heads)
    model.config = SimpleNamespace(num_attention_heads=heads)
    return model


def of_plan(**kinds: Any) -> Any:
    """An entry of a plan of diffusers."""
    return SimpleNamespace(**kinds)


PRODUCT = "the product must be 2, of integers, as with ulysses_degree=2"
DEGREES: dict[str, Wrong] = {
    "none given": (given(), PRODUCT),
    "zero": (given(ulysses_degree=0), f"ulysses_degree 0 on 2 ranks: {PRODUCT}"),
    "negative": (given(ring_degree=-2, ulysses_degree=-1), "ring_degree -2 x ulysses_degree -1"),
    "too many": (given(ulysses_degree=4), "ulysses_degree 4 on 2 ranks"),
    "a float": (given(ring_degree=2.0), "ring_degree 2.0"),
    "a text": (given(ring_degree="2"), "ring_degree '2'"),
    "a bool": (given(ring_degree=True, ulysses_degree=2), "ring_degree True"),
    "a product of 4": (given(guidance_degree=2, ulysses_degree=2), "guidance_degree 2 x"),
    "another name": (given(ulysses=2), "parallelize has no argument 'ulysses'"),
    "more than heads": (
        given(ulysses_degree=2, model=lambda: configured(1)),
        "has 1 heads for 2 Ulysses ranks",
    ),
    "other axes": (given(mesh=mesh([0, 1], "tp")), "a mesh with the axes ('tp',): parallelize"),
    "no names": (given(mesh=mesh([0, 1])), "a mesh with the axes ()"),
    "order of axes": (
        given(mesh=mesh([[0, 1]], "ulysses", "ring")),
        "a mesh with the axes ('ulysses', 'ring')",
    ),
    "mesh and degrees": (
        given(mesh=mesh([0, 1], "ring"), ring_degree=2),
        "give a mesh or degrees, not both",
    ),
    "a list of ranks": (given([0, 1]), "mesh is [0, 1]: give a DeviceMesh, 'auto' or AutoMesh"),
    "auto, misspelt": (given("Auto"), "mesh is 'Auto': give a DeviceMesh, 'auto' or AutoMesh"),
    "the class AutoMesh": (given(AutoMesh), "give a DeviceMesh, 'auto' or AutoMesh"),
    "auto and degrees": (given("auto", ring_degree=2), "give degrees, or let 'auto' choose them"),
    "auto, no heads": (given("auto"), "a Toy does not say its num_attention_heads"),
    "passes": (
        given(AutoMesh(num_passes=0), model=configured),
        "num_passes=0",
    ),
    "half a pass": (given(AutoMesh(num_passes=1.5), model=configured), "num_passes=1.5"),  # pyright: ignore[reportArgumentType]
    "a ring of 0": (given(AutoMesh(max_ring_degree=0), model=configured), "max_ring_degree is 0"),
    "nodes of 0": (given(AutoMesh(ranks_per_node=0), model=configured), "ranks_per_node is 0"),
    "a profile's name": (
        given(AutoMesh(num_tokens=9, profile="h100"), model=configured),  # pyright: ignore[reportArgumentType]
        "profile",
    ),
    "no tokens for a profile": (
        given(AutoMesh(profile="h100"), model=configured),  # pyright: ignore[reportArgumentType]
        "without num_tokens",
    ),
    "no mesh fits": (
        given(AutoMesh(max_ring_degree=1), model=lambda: configured(1)),
        "raise max_ring_degree",
    ),
}

SPLIT = {"ulysses_degree": 2}
SETTINGS: dict[str, Wrong] = {
    "vae": (given(vae="none", **SPLIT), "'none'"),
    "text encoders": (given(text_encoders="first", **SPLIT), "'first'"),
    "kernel": (given(kernel="flash3", **SPLIT), "kernel 'flash3': choose one of"),
    "format": (given(comm_dtype="int4", **SPLIT), "comm_dtype 'int4': choose one of int8, e4m3"),
    "sparse, nothing": (lambda: SparseConfig(), "give one of masks, keep and mass"),
    "keep 0": (lambda: SparseConfig(keep=0.0), "keep=0.0"),
    "keep 1.5": (lambda: SparseConfig(keep=1.5), "keep=1.5"),
    "keep in words": (lambda: SparseConfig(keep="half"), "keep='half'"),  # pyright: ignore[reportArgumentType]
    "keep and mass": (lambda: SparseConfig(keep=0.5, mass=0.5), "keep and mass: give one of"),
    "sparse with guidance": (
        given(sparse=lambda: SparseConfig(keep=0.5), guidance_degree=2),
        "use guidance_degree=1, or leave out sparse",
    ),
    "sparse and wire": (
        given(sparse=lambda: SparseConfig(keep=0.5), comm_dtype="int8", **SPLIT),
        "leave out comm_dtype or sparse",
    ),
    "sparse kernel": (lambda: SparseConfig(keep=0.5, kernel="flash3"), "kernel 'flash3'"),
}

TABLES: dict[str, Wrong] = {
    "a list": (given(table=["image"], **SPLIT), "table is ['image']: give a SplitTable"),
    "a text": (given(table="flux", **SPLIT), "table is 'flux': give a SplitTable"),
    "an empty plan": (given(table={}, **SPLIT), "cannot be split by a plan of diffusers"),
    "a plan's module": (
        given(table={"layers": {"x": of_plan(split_dim=1)}}, **SPLIT),
        "Toy",
    ),
    "block": (table(blocks={"layers.*": ("text", "image")}), "names 'layers.*', and Toy has no"),
    "gather": (table(gathers={"proj_out": Cut("image")}), "names 'proj_out', and Toy has no"),
    "argument": (inputs(img=Cut("image")), "names an argument 'img' of Toy"),
    "whole argument": (
        table(replicated=("context", "time", "timestep")),
        "names an argument 'timestep' of Toy",
    ),
    "argument of a module": (
        table(inputs={**TABLE.inputs, "blocks.*": {"tokens": Cut("text")}}),
        "names an argument 'tokens' of blocks.0",
    ),
    "segment": (inputs(image=Cut("pixels")), "'image' in segments, and cuts pixels, text"),
    "segment that is gathered": (table(gathers={"head": Cut("pixels")}), "'pixels'"),
    "segment of keys": (table(attends={"blocks.*.cross": Keys("words")}), "'words'"),
    "segment of a mask": (inputs(text_mask=Mask("words")), "'words'"),
    "segments": (table(segments="text"), "give a tuple of names"),
    "a number for a cut": (inputs(image=1), "give a Cut"),
    "a dim in words": (inputs(image=Cut("image", dim="tokens")), "dim='tokens'"),  # pyright: ignore[reportArgumentType]
}


def is_in_step() -> bool:
    """Whether all ranks still meet in the same call."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item() == dist.get_world_size()
