"""What users turn on beside a split model: adapters, casting, offload, 8 bits, shards, slices."""

import importlib
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bascule.diffusers import parallelize
from tests.helpers.inference_cases import (
    Case,
    difference,
    in_float64,
    make_inputs,
    make_mesh,
    make_model,
)
from tests.helpers.ranks import on_ranks, raised_by, run_ranks

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow

MODELS = [
    Case("flux", 4, 2, 7, (3, 5)),
    Case("qwen", 4, 2, 7, (3, 5), ("mask",)),
    Case("wan", 4, 2, 7, (3, 5)),
    Case("cogvideox", 4, 2, 7, (3, 5)),
]
Found = dict[str, Any]


def seeded_model(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return make_model(case, dtype)


def blocks_of(model: Any) -> list[nn.Module]:
    lists = [one for one in model.children() if isinstance(one, nn.ModuleList) and len(one) > 1]
    return [block for one in lists for block in one]


class Adapted(nn.Linear):
    """A linear layer with an adapter of low rank, as LoRA is."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__(base.in_features, base.out_features)
        generator = torch.Generator().manual_seed(seed)
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=generator) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=generator) * 0.1)

    def forward(self, input: Tensor) -> Tensor:
        return self.base(input) + input @ self.down.mT @ self.up.mT


def adapt(model: nn.Module, seed: int = 1) -> None:
    replace_layers(model, lambda layer: Adapted(layer, seed))


def cast(model: Any) -> None:
    """Weights are kept at 8 bits, and are wide when they are used."""
    model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)


def offload_groups(model: Any) -> None:
    """Blocks are loaded when they run; onto the host, where there is no other device."""
    cpu = torch.device("cpu")
    model.enable_group_offload(cpu, cpu, offload_type="block_level", num_blocks_per_group=1)


class Quantised(nn.Linear):
    """A linear layer with weights of 8 bits, a scale a row; of what it is given, one a token."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        peaks = base.weight.detach().abs().amax(1, keepdim=True)
        self.bias = base.bias
        del self.weight
        self.register_buffer("scales", peaks / 127)
        self.register_buffer("weight", (base.weight.detach() / peaks * 127).round().to(torch.int8))

    def forward(self, input: Tensor) -> Tensor:
        steps = input.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        rows = (input / steps).round() * steps
        return nn.functional.linear(rows, self.weight * self.get_buffer("scales"), self.bias)


def replace_layers(model: nn.Module, make: Callable[[nn.Linear], nn.Linear]) -> None:
    """All linear layers of the blocks."""
    for block in blocks_of(model):
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if type(layer) is nn.Linear:
                    setattr(parent, name, make(layer))


def quantise(model: nn.Module) -> None:
    replace_layers(model, Quantised)


WAYS: dict[str, Callable[[Any], None]] = {
    "adapters": adapt,
    "casting": cast,
    "group offload": offload_groups,
    "8 bits": quantise,
}


def turned_on(models: list[Case], ways: dict[str, Callable[[Any], None]], every: int) -> Found:
    """By model and what is turned on, before and after parallelize: the error, and the effect.

    Every so-manieth of the ways, other ones for each model.
    """
    torch.set_num_threads(1)
    found = Found()
    meshes = make_mesh(1, 2), make_mesh(2, 1)
    for (place, case), (number, (way, turn_on)) in product(
        enumerate(models), enumerate(ways.items())
    ):
        if (place + number) % every:
            continue
        # In float32, a value that is nearly between two steps of 8 bits is rounded to either.
        dtype = torch.float64 if way == "8 bits" else torch.float32
        with torch.no_grad(), in_float64(dtype):
            inputs = make_inputs(case, dtype)
            plain = seeded_model(case, dtype)(**inputs).sample
            model = seeded_model(case, dtype)
            turn_on(model)
            wanted = model(**inputs).sample
            effect = difference(wanted, plain)
            with parallelize(model, meshes[0]) as handle:
                error = difference(model(**inputs).sample, wanted)
                found[f"{case.model}, {way}"] = error, effect, handle.verify(**inputs).ok
            undone = difference(model(**inputs).sample, wanted) == 0
            late = seeded_model(case, dtype)
            with parallelize(late, meshes[1]):
                turn_on(late)
                error = difference(late(**inputs).sample, wanted)
            found[f"{case.model}, {way}, later"] = error, effect, undone
    return found


def add_lora(model: Any) -> None:
    peft: Any = importlib.import_module("peft")
    torch.manual_seed(3)
    layers = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, target_modules=layers))


def use_torchao(model: Any, config: str) -> None:
    torchao: Any = importlib.import_module("torchao.quantization")
    for block in blocks_of(model):
        torchao.quantize_(block, getattr(torchao, config)())


def use_quanto(model: Any) -> None:
    quanto: Any = importlib.import_module("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)


LIBRARIES: dict[str, Callable[[Any], None]] = {
    "peft": add_lora,
    "torchao int8": partial(use_torchao, config="Int8WeightOnlyConfig"),
    "torchao float8": partial(use_torchao, config="Float8WeightOnlyConfig"),
    "quanto": use_quanto,
}


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.stress)])
def test_what_is_turned_on_gives_what_one_process_gives(every: int) -> None:
    check_turned_on(MODELS, WAYS, every)


@pytest.mark.some(2)
@pytest.mark.parametrize("library", LIBRARIES)
def test_adapters_and_quantised_weights_of_libraries(library: str) -> None:
    pytest.importorskip(library.split()[0].replace("quanto", "optimum.quanto"))
    check_turned_on([MODELS[0], MODELS[2]], {library: LIBRARIES[library]})


def check_turned_on(
    models: list[Case], ways: dict[str, Callable[[Any], None]], every: int = 1
) -> None:
    for found in run_ranks(turned_on, 2, models, ways, every):
        for name, (error, effect, is_ok) in found.items():
            assert error < 1e-5 and is_ok, (name, found[name])
            assert "offload" in name or effect > 1e-4, (name, found[name])


def unlike_adapters() -> Found:
    model, inputs, mesh = seeded_model(MODELS[0]), make_inputs(MODELS[0]), make_mesh(1, 2)
    adapt(model, seed=dist.get_rank())
    said = {"before": raised_by(parallelize, model, mesh)}
    model = seeded_model(MODELS[0])
    with torch.no_grad(), parallelize(model, mesh) as handle:
        adapt(model, seed=dist.get_rank())
        return said | {"after": handle.verify(**inputs).ok}


def test_ranks_with_different_adapters_are_refused_or_found() -> None:
    for found in run_ranks(unlike_adapters, 2):
        classes, text = found["before"]
        assert "CommError" in classes and "disagree on weights" in text
        assert not found["after"]


def quantised_by_tensor() -> list[bool]:
    """Torch's own 8-bit products scale what a layer is given by all tokens that a rank has."""
    from torch.ao.quantization import quantize_dynamic

    model, inputs = seeded_model(MODELS[0]), make_inputs(MODELS[0])
    for block in blocks_of(model):
        quantize_dynamic(block, {nn.Linear}, torch.qint8, inplace=True)
    with torch.no_grad(), parallelize(model, make_mesh(1, 2)) as handle:
        return [handle.verify(**inputs).ok]


def test_scales_of_all_tokens_are_found_to_differ() -> None:
    for found in run_ranks(quantised_by_tensor, 2):
        assert found == [False]


def shard(model: nn.Module, mesh: Any) -> None:
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.stress)])
@on_ranks(2)
def test_a_model_may_be_larger_than_a_rank(every: int) -> None:
    """Weights of the blocks are shared by the ranks that share the tokens.

    Each model before or after parallelize, in turn; or both.
    """
    torch.set_num_threads(1)
    found = Found()
    flat = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    times = ("before", (1, 2)), ("after", (2, 1))
    for place, case in enumerate(MODELS):
        inputs = make_inputs(case)
        with torch.no_grad():
            wanted = seeded_model(case)(**inputs).sample
        for when, degrees in times[place % every :: every]:
            model = seeded_model(case)
            if when == "before":
                shard(model, flat)
            with torch.no_grad(), parallelize(model, make_mesh(*degrees)) as handle:
                if when == "after":
                    shard(model, flat)
                parameters: list[Any] = list(model.parameters())
                share = sum(p.to_local().numel() for p in parameters)
                whole = sum(p.numel() for p in parameters)
                error = difference(model(**inputs).sample, wanted)
                is_ok = handle.verify(**inputs).ok
            found[f"{case.model}, {when}"] = error, share / whole, is_ok
    for name, (error, share, is_ok) in found.items():
        assert error < 1e-6 and share < 0.6 and is_ok, (name, found[name])


def slices_of(case: Case) -> Any:
    """Of Flux heads and feed-forward; of Wan, whose norm is over all heads, the latter."""
    if case.model == "wan":
        return {"ffn.net.0.proj": ColwiseParallel(), "ffn.net.2": RowwiseParallel()}
    wide = "to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"
    plan = {f"attn.{name}": ColwiseParallel() for name in wide}
    plan |= {f"attn.{name}": RowwiseParallel() for name in ("to_out.0", "to_add_out")}
    for name in ("ff", "ff_context"):
        plan |= {f"{name}.net.0.proj": ColwiseParallel(), f"{name}.net.2": RowwiseParallel()}
    return plan


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.stress)])
@on_ranks(4)
def test_slices_of_layers_beside_shares_of_tokens(every: int) -> None:
    """Slices of each block's feed-forward, and of its heads, beside shares of the tokens.

    One model on each axis, or both.
    """
    torch.set_num_threads(1)
    found, models = Found(), (MODELS[0], MODELS[2])
    for place, axis in enumerate(("ulysses", "ring")):
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=(axis, "slices"))
        for case in models[place % every :: every]:
            inputs = make_inputs(case)
            with torch.no_grad():
                wanted = seeded_model(case)(**inputs).sample
            model = seeded_model(case)
            for block in model.transformer_blocks if case.model == "flux" else model.blocks:
                if case.model == "flux":
                    block.attn.heads //= 2
                parallelize_module(block, both["slices"], slices_of(case))
            with torch.no_grad(), parallelize(model, both[axis]) as handle:
                error = difference(model(**inputs).sample, wanted)
                found[f"{case.model}, {axis}"] = error, handle.verify(**inputs).ok
    assert all(error < 1e-6 and is_ok for error, is_ok in found.values()), found
