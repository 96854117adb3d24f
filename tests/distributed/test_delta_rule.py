"""Gated delta layers of transformers over ranks and in bags, against one process."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule import SequenceParallel, Sequences
from bascule.attention.api import AttentionMesh, SequenceLayout, gather, split
from bascule.data.packs import Pack, make_pack
from bascule.transformers import (
    call_packed,
    context_parallel,
    inputs_of_pack,
    register_attention,
    split_delta_layers,
)
from tests.helpers.cases import COST
from tests.helpers.inference_cases import make_mesh
from tests.helpers.ranks import run_ranks

LENS = [23, 2, 14]
TINY: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 64),
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_attention_heads", "linear_num_value_heads", "num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("head_dim", "linear_key_head_dim"), 8),
    "linear_value_head_dim": 6,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": 0,
    "mlp_only_layers": [0, 1, 2],
}
MASKS = None, "causal"
MODELS = {  # module of transformers, model, configuration
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig"),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig"),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig"),
}


class Wide:
    """torch for a module of transformers, which then rounds nothing to float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_float64() -> Iterator[None]:
    places: list[Any] = [importlib.import_module(modeling(name)) for name in MODELS]
    narrow: Any = Tensor.float
    try:
        Tensor.float = Tensor.double
        for place in places:
            place.torch = Wide()
        yield
    finally:
        Tensor.float = narrow
        for place in places:
            place.torch = torch


def modeling(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


def make(name: str, attention: str = "sdpa") -> Any:
    place: Any = importlib.import_module(modeling(name))
    model, config = MODELS[name]
    kind = getattr(importlib.import_module("transformers"), config)
    names = vars(kind())
    torch.manual_seed(0)
    made = getattr(place, model)._from_config(
        kind(**{k: x for k, x in TINY.items() if k in names}), attn_implementation=attention
    )
    torch.manual_seed(1)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made.double().eval()


def ids_of(lens: Sequence[int]) -> Tensor:
    return torch.randint(1, 60, (sum(lens),), generator=torch.Generator().manual_seed(1))


def loss(logits: Tensor) -> Tensor:
    return (logits * torch.arange(logits.numel()).view(logits.shape).sin()).sum()


def gradients(model: Any, share: float = 1.0) -> dict[str, Tensor]:
    """Gradients, of which the ranks' are averaged, or with a share of 1 added."""
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    for grad in grads.values():
        if dist.is_initialized() and dist.get_world_size() > 1 and share:
            dist.all_reduce(grad)
            grad *= share
    return grads


def worst(logits: Tensor, grads: dict[str, Tensor], wanted: tuple[Tensor, Any]) -> float:
    assert grads.keys() == wanted[1].keys()
    pairs = [(logits, wanted[0]), *((x, wanted[1][name]) for name, x in grads.items())]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-9)) for a, b in pairs)


def alone(name: str, lens: Sequence[int]) -> tuple[Tensor, Any]:
    """Logits (S, words) of each text by itself, and gradients of a loss over all."""
    model = make(name)
    texts = ids_of(lens).split(list(lens))
    logits = torch.cat([model(input_ids=x[None], use_cache=False).logits[0] for x in texts])
    loss(logits).backward()
    return logits.detach(), gradients(model, 0.0)


def over_mesh(name: str, ring: int, lens: Sequence[int], zigzag: bool) -> float:
    world = dist.get_world_size()
    wanted, model = alone(name, lens), make(name)
    mesh = AttentionMesh.of(make_mesh(ring, world // ring))
    layout = SequenceLayout((sum(lens),), *mesh.degrees, zigzag=zigzag)
    places = torch.cat([torch.arange(one) for one in lens])
    own, own_places = (split(x[None], mesh, layout, 1) for x in (ids_of(lens), places))
    with context_parallel(model, mesh, layout):
        logits = model(input_ids=own, position_ids=own_places, use_cache=False).logits
    logits = gather(logits, mesh, layout, 1)[0]
    loss(logits).backward()
    return worst(logits.detach(), gradients(model, 1 / world), wanted)


def in_bags(name: str, spec: str, masks: Any = None) -> float:
    rank = dist.get_rank()
    register_attention()
    wanted, model = alone(name, LENS), make(name, "bascule")
    parallel = SequenceParallel(None, spec, COST)
    step = parallel.plan(Sequences(LENS if rank == 0 else [], masks))
    own = ids_of(LENS) if rank == 0 else torch.zeros(0, dtype=torch.int64)
    logits = call_packed(model, step, input_ids=step.route(x=own)["x"]).logits
    num = step.token_slot.shape[0]
    restored = step.restore(logits[0, :num])
    part = loss(restored) if rank == 0 else restored.sum()
    (part + 0.0 * logits.sum()).backward()
    grads = gradients(model, 1.0)
    return worst(wanted[0] if rank else restored.detach(), grads, wanted)


def in_a_pack(name: str) -> dict[str, float]:
    """With padding at the end, which is a sequence of its own."""
    with in_float64():
        wanted, model = alone(name, LENS), make(name)
        pack, texts = Pack(tokens=sum(LENS) + 5, fixed=True), ids_of(LENS).split(LENS)
        split_delta_layers(model)
        inputs = inputs_of_pack(make_pack([{"input_ids": x} for x in texts], pack), pack, model)
        logits = model(**inputs).logits[0, : sum(LENS)]
        loss(logits).backward()
        return {name: worst(logits.detach(), gradients(model, 0.0), wanted)}


def mesh_errors(names: Sequence[str]) -> dict[str, float]:
    world, found = dist.get_world_size(), dict[str, float]()
    for name in names:
        for ring in (1, 2, 4)[: {1: 1, 2: 2, 4: 3}[world]]:
            for lens in ([39], LENS):
                for zigzag in (False, True)[: 1 + (ring > 1)]:
                    case = f"{name} {ring} {lens} {zigzag}"
                    with in_float64():
                        found[case] = over_mesh(name, ring, lens, zigzag)
    return found


def bag_errors(name: str, specs: Sequence[str]) -> dict[str, float]:
    with in_float64():
        return {f"{spec} {masks}": in_bags(name, spec, masks) for spec in specs for masks in MASKS}


@pytest.mark.parametrize(
    ("world", "names"), [(1, list(MODELS)), (2, list(MODELS)), (4, ["qwen3_next"])]
)
def test_layers_by_heads_are_as_one_process(world: int, names: list[str]) -> None:
    for each in run_ranks(mesh_errors, world, names):
        assert {case: x for case, x in each.items() if not x < 1e-10} == {}


@pytest.mark.parametrize(
    ("world", "specs"), [(1, ["g1n1"]), (2, ["g1n2", "g2n1", "g1r2n1"]), (4, ["g2r2n1", "g2n2"])]
)
def test_sequences_of_a_bag_do_not_mix(world: int, specs: list[str]) -> None:
    for each in run_ranks(bag_errors, world, "qwen3_next", specs):
        assert {case: x for case, x in each.items() if not x < 1e-10} == {}


@pytest.mark.parametrize("name", MODELS)
def test_samples_of_a_pack_do_not_mix(name: str) -> None:
    assert run_ranks(in_a_pack, 1, name)[0][name] < 1e-10
