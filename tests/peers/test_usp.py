"""The functions that take what xDiT's and ParaAttention's take: their parameters, their numbers.

Without the packages, their parameters are those recorded here, of the versions named.
"""

import ast
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bascule.attention.api import AttentionMesh, SequenceLayout, split
from bascule.errors import ConfigError
from bascule.integrations.xdit import in_batch_attn_func, unified_attn_func, usp
from tests.helpers.mesh_cases import difference, make_mesh, reference, three
from tests.helpers.ranks import run_ranks

Defaults = dict[str, str | None]  # by parameter, the source of its default

# xfuser 0.7.0, xfuser/model_executor/layers/usp.py
XFUSER_USP: Defaults = {
    "query": None,
    "key": None,
    "value": None,
    "dropout_p": "0.0",
    "is_causal": "False",
    "joint_query": "None",
    "joint_key": "None",
    "joint_value": "None",
    "joint_strategy": "None",
    "attn_layer": "None",
    "combine_qkv_a2a": "None",
    "backend": "None",
    "attention_kwargs": "None",
    "head_balance_layer": "None",
    "kv_head_repeat": "1",
}
# para-attn 0.3.38, para_attn/para_attn_interface.py
PARA_ATTN_SDPA: Defaults = {
    "query": None,
    "key": None,
    "value": None,
    "attn_mask": "None",
    "dropout_p": "0.0",
    "is_causal": "False",
    "scale": "None",
}
PARA_ATTN: dict[str, Defaults] = {
    "ulysses_attn_func": PARA_ATTN_SDPA | {"mesh": "None", "attn_func": "None"},
    "ring_attn_func": PARA_ATTN_SDPA | {"mesh": "None"},
    "in_batch_attn_func": PARA_ATTN_SDPA,
}


def installed(package: str, file: str, function: str) -> Defaults | None:
    """The parameters of a function of a package, from its source: it need not import here."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    tree = ast.parse((Path(found.submodule_search_locations[0]) / file).read_text())
    definitions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    arguments = next(node for node in definitions if node.name == function).args
    names = [arg.arg for arg in arguments.args]
    plain: list[ast.expr | None] = [None] * (len(names) - len(arguments.defaults))
    values = [*plain, *arguments.defaults, *arguments.kw_defaults]
    names += [arg.arg for arg in arguments.kwonlyargs]
    return {
        name: None if value is None else ast.unparse(value)
        for name, value in zip(names, values, strict=True)
    }


def check_takes(ours: Callable[..., object], theirs: Defaults, bound: tuple[str, ...] = ()) -> None:
    """Every parameter of theirs is one of ours, in the same place, with the same default."""
    known = inspect.signature(ours).parameters
    positional = [name for name, p in known.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    in_place = [name for name in theirs if name in positional]
    assert positional[: len(in_place)] == in_place
    for name, default in theirs.items():
        if name not in bound:
            empty = known[name].default is inspect.Parameter.empty
            assert (None if empty else repr(known[name].default)) == default, name


def test_takes_what_xdit_calls_usp_with() -> None:
    theirs = installed("xfuser", "model_executor/layers/usp.py", "USP") or XFUSER_USP
    check_takes(usp(AttentionMesh(None, None, None)), theirs)


@pytest.mark.parametrize("name", PARA_ATTN)
def test_takes_what_para_attention_calls(name: str) -> None:
    theirs = installed("para_attn", "para_attn_interface.py", name) or PARA_ATTN[name]
    # ParaAttention's default mesh is the world; there is no such default here.
    ours = in_batch_attn_func if name == "in_batch_attn_func" else unified_attn_func
    check_takes(ours, theirs, bound=("mesh",))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def as_xdit_calls(ring: int, ulysses: int) -> dict[str, float]:
    """`USP` with text before or after the image, on every rank; uneven images by a layout."""
    mesh, errors = make_mesh(ring, ulysses), dict[str, float]()
    for num_image in (6 * ring * ulysses, 29):
        image = SequenceLayout((num_image,), ring, ulysses)
        attend = usp(mesh, None if num_image != 29 else image)
        q, k, v = whole = three(normal(seed, 2, 12, num_image, 4) for seed in range(3))
        local = three(split(x, mesh, image, 2) for x in whole)
        text = three(normal(seed, 2, 12, 7, 4) for seed in range(3, 6))
        alone = reference(q, k, v, None, False)
        errors[f"{num_image} image"] = difference(attend(*local), split(alone, mesh, image, 2))
        for strategy in ("front", "rear"):
            joined = three(
                torch.cat((t, x) if strategy == "front" else (x, t), dim=2)
                for x, t in zip(whole, text, strict=True)
            )
            want = reference(*joined, None, False)
            sizes = [7, num_image] if strategy == "front" else [num_image, 7]
            parts = list(want.split(sizes, dim=2))
            at = 1 if strategy == "front" else 0
            parts[at] = split(parts[at], mesh, image, 2)
            found = attend(*local, 0.0, False, *text, strategy, head_balance_layer=object())
            errors[f"{num_image} {strategy}"] = difference(found, torch.cat(parts, dim=2))
    found = attend(local[0], local[1][:, :4], local[2][:, :4], kv_head_repeat=3)
    want = reference(q, k[:, :4], v[:, :4], None, False)
    errors["grouped"] = difference(found, split(want, mesh, image, 2))
    return errors


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_usp_is_exact(ring: int, ulysses: int) -> None:
    for errors in run_ranks(as_xdit_calls, ring * ulysses, ring, ulysses):
        assert max(errors.values()) < 1e-10, errors


def as_para_attention_calls(ring: int, ulysses: int) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (1, ring, ulysses), mesh_dim_names=("batch", "ring", "ulysses"))
    length = 5 * ring * ulysses
    layout = SequenceLayout((length,), ring, ulysses)
    ranks = AttentionMesh.of(mesh["ring", "ulysses"])
    q, k, v = (normal(seed, 2, 6, length, 4) for seed in range(3))
    local = three(split(x, ranks, layout, 2) for x in (q, k, v))
    mask = normal(7, 2, 1, length, length) < 0.5
    want = split(reference(q, k, v, mask, False), ranks, layout, 2)
    errors = {"mask": difference(unified_attn_func(*local, mask, mesh=mesh), want)}
    want = split(reference(q, k, v, None, True), ranks, layout, 2)
    found = unified_attn_func(*local, None, 0.0, True, scale=0.5, mesh=mesh)
    errors["causal"] = difference(found, want)
    folded = three(x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v))
    together = reference(*folded, None, False)[0].unflatten(1, (2, length)).transpose(0, 1)
    found = in_batch_attn_func(*local, mesh=mesh)
    errors["in batch"] = difference(found, split(together, ranks, layout, 2))
    if ring == 1:
        group = mesh.get_group("ulysses")
        found = unified_attn_func(*local, mesh=group)
        want = split(reference(q, k, v, None, False), ranks, layout, 2)
        errors["group"] = difference(found, want)
    return errors


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (2, 2)])
def test_para_attention_functions_are_exact(ring: int, ulysses: int) -> None:
    for errors in run_ranks(as_para_attention_calls, ring * ulysses, ring, ulysses):
        assert max(errors.values()) < 1e-10, errors


def beside_para_attention() -> float:
    from para_attn.para_attn_interface import (  # pyright: ignore[reportMissingImports]
        ulysses_attn_func,
    )

    group = dist.group.WORLD
    assert group is not None
    local = three(normal(3 * dist.get_rank() + seed, 2, 6, 5, 4) for seed in range(3))
    theirs = ulysses_attn_func(*local, scale=0.3, mesh=group)
    return difference(unified_attn_func(*local, scale=0.3, mesh=group), theirs)


def test_the_numbers_of_para_attention() -> None:
    pytest.importorskip("para_attn")
    assert max(run_ranks(beside_para_attention, 2)) < 1e-10


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dropout_p": 0.1}, "dropout_p is 0.1"),
    ({"backend": 3}, "backend 3"),
    ({"attention_kwargs": {"valid_kv_len": 3}}, "valid_kv_len"),
    ({"kv_head_repeat": 2}, "give 1"),
    ({"attn_layer": torch.nn.Identity()}, "PipeFusion"),
    ({"joint_strategy": "front"}, "0 joint tensors"),
    ({"joint_key": torch.zeros(1, 4, 2, 8), "joint_strategy": "rear"}, "1 joint tensors"),
    ({"joint_strategy": "middle"}, "'middle'"),
    ({"backend": "sdpa"}, "sdpa"),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED)
def test_what_usp_cannot_do_is_refused(arguments: dict[str, Any], text: str) -> None:
    q = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ConfigError, match=text):
        usp(AttentionMesh(None, None, None))(q, q, q, **arguments)


def test_what_para_attention_cannot_ask_for_is_refused() -> None:
    q, mesh = torch.zeros(1, 4, 3, 8), AttentionMesh(None, None, None)
    with pytest.raises(ConfigError, match="log-sum-exp"):
        unified_attn_func(q, q, q, mesh=mesh, attn_func=torch.add)  # pyright: ignore
    with pytest.raises(ConfigError, match="enable_gqa"):
        unified_attn_func(q, q[:, :2], q[:, :2], mesh=mesh)
    with pytest.raises(ConfigError, match="no mask"):
        in_batch_attn_func(q, q, q, is_causal=True, mesh=mesh)


def compiled_errors() -> list[float]:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("batch", "ring", "ulysses"))
    attend = usp(mesh)
    local = three(normal(3 * dist.get_rank() + seed, 2, 6, 5, 4) for seed in range(3))
    text = three(normal(seed, 2, 6, 3, 4) for seed in range(3))

    def as_xdit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, 0.0, False, *text, "rear").sin()

    def as_para_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return unified_attn_func(q, k, v, mesh=mesh).sin()

    def in_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return in_batch_attn_func(q, k, v, mesh=mesh).sin()

    functions = (as_xdit, as_para_attention, in_batch)
    compile_ = torch.compile(fullgraph=True, backend="aot_eager")
    return [difference(compile_(fn)(*local), fn(*local)) for fn in functions]


def test_they_compile_to_one_graph() -> None:
    for errors in run_ranks(compiled_errors, 2):
        assert max(errors) < 1e-10, errors
