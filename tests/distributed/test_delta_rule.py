"""Gated delta layers of transformers over ranks and in bags, against one process."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bascule import SequenceParallel, Sequences
from bascule.attention.api import AttentionMesh, SequenceLayout, gather, split
from bascule.data.packs import Pack, make_pack
from bascule.transformers import (
    call_packed,
    context_parallel,
    delta_rule,
    inputs_of_pack,
    register_attention,
    split_delta_layers,
)
from tests.helpers.calls_made import ALL_TO_ALL, calls_made
from tests.helpers.cases import COST
from tests.helpers.inference_cases import make_mesh
from tests.helpers.ranks import on_ranks, raised_by, run_ranks

Wanted = tuple[Tensor, dict[str, Tensor]]

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


stressed = partial(pytest.param, marks=pytest.mark.stress)


def modeling(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


def make(name: str, attention: str = "sdpa", **sizes: Any) -> Any:
    place: Any = importlib.import_module(modeling(name))
    model, config = MODELS[name]
    kind = getattr(importlib.import_module("transformers"), config)
    names = vars(kind())
    torch.manual_seed(0)
    made = getattr(place, model)._from_config(
        kind(**{k: x for k, x in (TINY | sizes).items() if k in names}),
        attn_implementation=attention,
    )
    torch.manual_seed(1)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made.double().eval()


def ids_of(lens: Sequence[int]) -> Tensor:
    return torch.randint(1, 60, (sum(lens),), generator=torch.Generator().manual_seed(1))


def loss(logits: Tensor) -> Tensor:
    return (logits * torch.arange(logits.numel()).view(logits.shape).sin()).sum()


def gradients(model: Any, share: float | None = None) -> dict[str, Tensor]:
    """Gradients; with a share, of which those of all ranks are added, and multiplied by it."""
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    for grad in grads.values() if share is not None else ():
        dist.all_reduce(grad)
        grad *= share
    return grads


def worst(logits: Tensor, grads: dict[str, Tensor], wanted: Wanted) -> float:
    assert grads.keys() == wanted[1].keys()
    pairs = [(logits, wanted[0]), *((x, wanted[1][name]) for name, x in grads.items())]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-9)) for a, b in pairs)


def alone(name: str, lens: Sequence[int], **sizes: Any) -> Wanted:
    """Logits (S, words) of each text by itself, and gradients of a loss over all."""
    model, texts = make(name, **sizes), ids_of(lens).split(list(lens))
    logits = torch.cat([model(input_ids=x[None], use_cache=False).logits[0] for x in texts])
    loss(logits).backward()
    return logits.detach(), gradients(model)


def checkpointed(model: Any, is_reentrant: bool) -> Any:
    model.train().activation_checkpointing_enable({"use_reentrant": is_reentrant})
    return model


def over_mesh(model: Any, ring: int, lens: Sequence[int], zigzag: bool, ends: str = "") -> Any:
    """Logits and gradients over a mesh; it may end before or after backward."""
    world, places = dist.get_world_size(), torch.cat([torch.arange(one) for one in lens])
    mesh = AttentionMesh.of(make_mesh(ring, world // ring))
    layout = SequenceLayout((sum(lens),), *mesh.degrees, zigzag=zigzag)
    own, own_places = (split(x[None], mesh, layout, 1) for x in (ids_of(lens), places))
    with ExitStack() as scope:
        scope.enter_context(context_parallel(model, mesh, layout))
        logits = model(input_ids=own, position_ids=own_places, use_cache=False).logits
        if ends == "before backward":
            scope.close()
        logits = gather(logits, mesh, layout, 1)[0]
        loss(logits).backward()
    return logits.detach(), gradients(model, 1 / world)


def in_bags(model: Any, spec: str, masks: Any = None) -> Any:
    """Logits, all on the first rank, and gradients: DDP makes means, which ranks have alike."""
    rank = dist.get_rank()
    step = SequenceParallel(None, spec, COST).plan(Sequences(LENS if rank == 0 else [], masks))
    own = ids_of(LENS) if rank == 0 else torch.zeros(0, dtype=torch.int64)
    logits = call_packed(model, step, input_ids=step.route(x=own)["x"]).logits
    restored = step.restore(logits[0, : step.token_slot.shape[0]])
    part = loss(restored) if rank == 0 else restored.sum()
    (part + 0.0 * logits.sum()).backward()
    return restored.detach(), gradients(getattr(model, "module", model), 1.0)


def bag_error(name: str, wanted: Wanted, model: Any, *args: Any) -> float:
    logits, grads = in_bags(model, *args)
    return worst(wanted[0] if dist.get_rank() else logits, grads, wanted)


def in_a_pack(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """With padding at the end, which is a sequence of its own."""
    pack, texts = Pack(tokens=sum(LENS) + 5, fixed=True), ids_of(LENS).split(LENS)
    inputs = inputs_of_pack(make_pack([{"input_ids": x} for x in texts], pack), pack, model)
    logits = model(**inputs).logits[0, : sum(LENS)]
    loss(logits).backward()
    return logits.detach(), gradients(model)


@in_float64()
def mesh_errors(names: Sequence[str], rings: Sequence[int]) -> dict[str, float]:
    found = dict[str, float]()
    for name, lens in product(names, ([39], LENS)):
        wanted = alone(name, lens)
        for ring, zigzag in product(rings, (False, True)):
            if ring > 1 or not zigzag:
                out, grads = over_mesh(make(name), ring, lens, zigzag)
                found[f"{name} {ring} {lens} {zigzag}"] = worst(out, grads, wanted)
    return found


@in_float64()
def bag_errors(specs: Sequence[str]) -> dict[str, float]:
    """Also with few heads, of which some ranks have none, and with DDP: it wants all gradients."""
    register_attention()
    name = "qwen3_next"
    wanted, found = alone(name, LENS), dict[str, float]()
    for spec, masks in product(specs, MASKS):
        found[f"{spec} {masks}"] = bag_error(name, wanted, make(name, "bascule"), spec, masks)
    few = {"linear_num_value_heads": 2, "linear_num_key_heads": 1}
    wanted, model = alone(name, LENS, **few), make(name, "bascule", **few)
    found["few heads"] = bag_error(name, wanted, model, specs[0])
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(make(name, "bascule", **few))
        for again in range(2):  # a parameter without a gradient would be an error
            model.zero_grad()
            found[f"DDP {again}"] = bag_error(name, wanted, model, specs[0])
    return found


@in_float64()
def pack_errors(names: Sequence[str]) -> dict[str, float]:
    found = dict[str, float]()
    for name in names:
        model = make(name)
        split_delta_layers(model)
        found[name] = worst(*in_a_pack(model), alone(name, LENS))
    return found


@in_float64()
def recomputed(name: str) -> dict[str, Any]:
    """Errors with checkpoints of each kind, and what is raised by a mesh that ended."""
    register_attention()
    wanted, found = alone(name, LENS), dict[str, Any]()
    for is_reentrant in (True, False):
        model = checkpointed(make(name), is_reentrant)
        out, grads = over_mesh(model, 1, LENS, False)
        found[f"mesh {is_reentrant}"] = worst(out, grads, wanted)
        model = checkpointed(make(name, "bascule"), is_reentrant)
        found[f"bags {is_reentrant}"] = bag_error(name, wanted, model, "g2n1")
        model = checkpointed(make(name), is_reentrant)
        split_delta_layers(model)
        found[f"pack {is_reentrant}"] = worst(*in_a_pack(model), wanted)
        model = checkpointed(make(name), is_reentrant)
        raised_by(over_mesh, model, 1, LENS, False, "before backward")  # as attention alone does
    return found


@in_float64()
def recomputed_without_attention(name: str) -> dict[str, float]:
    """Errors where backward comes after the mesh, and no layer attends, which would raise."""
    sizes: dict[str, Any] = {"layer_types": ["linear_attention"] * 3}
    found = dict[str, float]()
    wanted = alone(name, LENS, **sizes)
    for is_reentrant in (True, False):
        model = checkpointed(make(name, **sizes), is_reentrant)
        out, grads = over_mesh(model, 1, LENS, False, "before backward")
        found[str(is_reentrant)] = worst(out, grads, wanted)
    return found


@pytest.mark.parametrize(
    ("world", "errors", "args"),
    [
        pytest.param(1, mesh_errors, (list(MODELS), [1]), id="heads, 1 rank"),
        pytest.param(2, mesh_errors, (list(MODELS), [1, 2]), id="heads, 2 ranks"),
        pytest.param(4, mesh_errors, (["qwen3_next"], [2]), id="heads, 4 ranks"),
        stressed(4, mesh_errors, (["qwen3_next"], [1, 4]), id="heads, other rings"),
        pytest.param(1, bag_errors, (["g1n1"],), id="bags, 1 rank"),
        pytest.param(2, bag_errors, (["g2n1", "g1n2", "g1r2n1"],), id="bags, 2 ranks"),
        pytest.param(4, bag_errors, (["g2r2n1"],), id="bags, 4 ranks"),
        stressed(4, bag_errors, (["g2n2"],), id="bags, two of two ranks"),
        pytest.param(1, pack_errors, (list(MODELS),), id="pack"),
        *(
            pytest.param(2, recomputed, (name,), id=f"checkpoints, {name}")
            for name in ("qwen3_next", "olmo_hybrid")
        ),
        *(
            pytest.param(2, recomputed_without_attention, (name,), id=f"after the mesh, {name}")
            for name in ("qwen3_next", "qwen3_5")
        ),
    ],
)
def test_layers_by_heads_are_as_one_process(
    world: int, errors: Callable[..., dict[str, float]], args: tuple[Any, ...]
) -> None:
    for each in run_ranks(errors, world, *args):
        assert {case: x for case, x in each.items() if not x < 1e-10} == {}


@on_ranks(2)
def test_rows_of_a_batch_and_narrow_dtypes() -> None:
    """Logits of two rows in bfloat16, in which decays are float32."""
    model, rows = make("qwen3_next").bfloat16(), ids_of([20, 20]).view(2, 20)
    wanted = model(input_ids=rows, use_cache=False).logits
    mesh = AttentionMesh.of(make_mesh(2, 1))
    layout = SequenceLayout((20,), *mesh.degrees)
    own, places = (split(x, mesh, layout, 1) for x in (rows, torch.arange(20).expand(2, -1)))
    with torch.no_grad(), context_parallel(model, mesh, layout):
        logits = model(input_ids=own, position_ids=places, use_cache=False).logits
    assert (gather(logits, mesh, layout, 1) - wanted).norm() < 0.02 * wanted.norm()


@on_ranks(2)
@in_float64()
@torch.no_grad()
def test_traffic_counts_what_layers_by_heads_exchange() -> None:
    register_attention()
    model, rank = make("qwen3_next", "bascule"), dist.get_rank()
    step = SequenceParallel(None, "g2n1", COST).plan(LENS if rank == 0 else [])
    own = step.route(x=ids_of(LENS) if rank == 0 else torch.zeros(0, dtype=torch.int64))["x"]
    call_packed(model, step, input_ids=own)
    before = step.traffic
    with calls_made() as made:
        call_packed(model, step, input_ids=own)
    after = step.traffic
    assert after.routed == before.routed and after.ring == 0
    own, other = (int(step.plan.tokens[place]) for place in (rank, 1 - rank))
    # Each of two layers: a key head has 8 + 8 values, its two value heads 6 + 1 + 1 each, and
    # 6 each come back. Attention: two query heads, a key and a value head of 8 each, and two.
    values = 2 * (32 * own + 12 * other) + 4 * 8 * own + 2 * 8 * other
    assert after.heads - before.heads == made.sent_bytes[ALL_TO_ALL] == 8 * values
    assert min(own, other) > 0


def replaced(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@on_ranks(2)
@in_float64()
def test_undo_leaves_nothing_and_other_calls_are_as_before() -> None:
    register_attention()
    name = "qwen3_5"
    place: Any = importlib.import_module(modeling(name))
    before, model, ids = dict(vars(place)), make(name), ids_of(LENS)[None]

    def answers() -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits
        text = model.generate(ids, max_new_tokens=3, do_sample=False)
        return torch.cat([logits.flatten(), text.flatten()])

    wanted = answers()
    undo = split_delta_layers(model)
    over_mesh(model, 1, LENS, False)
    assert replaced(model) == ["model.layers.0.linear_attn", "model.layers.2.linear_attn"]
    assert torch.equal(answers(), wanted)
    model.set_attn_implementation("bascule")
    in_bags(model, "g2n1")
    over_mesh(model, 1, LENS, False)
    split_delta_layers(model)()  # they follow already
    assert len(replaced(model)) == 2
    undo()
    assert model.config._attn_implementation == "bascule"
    model.set_attn_implementation("sdpa")
    assert replaced(model) == [] and torch.equal(answers(), wanted)
    assert dict(vars(place)) == before


@on_ranks(2)
@in_float64()
def test_kernels_of_transformers_get_one_sequence_and_some_heads() -> None:
    """So they need no bounds: two layers, each key head with two value heads."""
    place: Any = importlib.import_module(modeling("qwen3_next"))
    conv, delta = place.causal_conv1d_fn, place.torch_chunk_gated_delta_rule
    sizes: list[tuple[int, ...]] = []  # tokens, channels, and heads of values

    def convolve(x: Tensor, *args: Any, **settings: Any) -> Tensor:
        sizes.append((x.shape[2], x.shape[1]))
        return conv(x, *args, **settings)

    def scan(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Any:
        sizes[-1] += (v.shape[2],)
        assert settings.keys() == {"g", "beta", "use_qk_l2norm_in_kernel"}
        return delta(q, k, v, **settings)

    model = make("qwen3_next")
    over_mesh(model, 1, LENS, False)  # compares at first use
    with patch.multiple(place, causal_conv1d_fn=convolve, torch_chunk_gated_delta_rule=scan):
        over_mesh(model, 1, LENS, False)
    assert sizes == [(length, 8 + 8 + 2 * 6, 2) for length in LENS] * 2


@on_ranks(2)
def test_refusals() -> None:
    register_attention()
    model, ids = make("qwen3_next", "bascule"), torch.ones(1, 4, dtype=torch.int64)
    mesh, apart = AttentionMesh.of(make_mesh(1, 2)), make("qwen3_next")

    def within(replicated: tuple[int, ...], use_cache: bool) -> None:
        layout = SequenceLayout((2, 4), 1, 2, replicated=replicated)
        own, places = (split(x[None], mesh, layout, 1) for x in (ids_of([6]), torch.arange(6)))
        with context_parallel(model, mesh, layout):
            model(own, position_ids=places, use_cache=use_cache)

    def two_texts() -> None:
        apart(ids, cu_seq_lens_q=torch.tensor([0, 1, 4]), use_cache=False)

    within((), False)
    cannot = "can't keep packed sequences apart"  # transformers, which has no packages for it here
    assert "use_cache=False" in raised_by(within, (), True)[1]
    assert "do not support replicated tokens" in raised_by(within, (0,), False)[1]
    assert "plan without masks" in raised_by(in_bags, model, "g2n1", "full")[1]
    assert cannot in raised_by(two_texts)[1]
    undo = split_delta_layers(apart)
    two_texts()
    undo()
    with patch.multiple(delta_rule, has_conv=lambda: True, has_fla=lambda: True):
        split_delta_layers(apart)
        assert cannot in raised_by(two_texts)[1]
