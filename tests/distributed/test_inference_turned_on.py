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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bascule.diffusers import parallelize
from tests.helpers.inference_cases import (
    USED,
    Case,
    difference,
    in_float64,
    make_inputs,
    make_mesh,
    same,
    seeded_model,
    shard,
)
from tests.helpers.ranks import on_ranks, raised_by, run_ranks

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow

FLUX, _, WAN, _ = USED


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


def check_turned_on(
    models: list[Case], ways: dict[str, Callable[[Any], None]], every: int = 1
) -> None:
    """Compare each model with what is turned on, before and after parallelize, with one process.

    Every so-manieth of the ways, other ones for each model.
    """
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
            model, late = seeded_model(case, dtype), seeded_model(case, dtype)
            turn_on(model)
            wanted = model(**inputs).sample
            assert "offload" in way or difference(wanted, plain) > 1e-4, (case, way)
            with parallelize(model, meshes[0]) as handle:
                same(model(**inputs).sample, wanted, 1e-5, (case, way))
                assert handle.verify(**inputs).ok, (case, way)
            same(model(**inputs).sample, wanted, 0.0, (case, way, "undone"))
            with parallelize(late, meshes[1]):
                turn_on(late)
                same(late(**inputs).sample, wanted, 1e-5, (case, way, "later"))


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
@on_ranks(2)
def test_what_is_turned_on_gives_what_one_process_gives(every: int) -> None:
    check_turned_on(USED, WAYS, every)


@pytest.mark.some(2)
@pytest.mark.parametrize("library", LIBRARIES)
def test_adapters_and_quantised_weights_of_libraries(library: str) -> None:
    pytest.importorskip(library.split()[0].replace("quanto", "optimum.quanto"))
    run_ranks(check_turned_on, 2, [FLUX, WAN], {library: LIBRARIES[library]})


@on_ranks(2)
def test_ranks_with_different_adapters_are_refused_or_found() -> None:
    model, mesh = seeded_model(FLUX), make_mesh(1, 2)
    adapt(model, seed=dist.get_rank())
    classes, text = raised_by(parallelize, model, mesh)
    assert "CommError" in classes and "disagree on weights" in text
    model = seeded_model(FLUX)
    with torch.no_grad(), parallelize(model, mesh) as handle:
        adapt(model, seed=dist.get_rank())
        assert not handle.verify(**make_inputs(FLUX)).ok


@on_ranks(2)
def test_scales_of_all_tokens_are_found_to_differ() -> None:
    """Torch's own 8-bit products scale what a layer is given by all tokens that a rank has."""
    from torch.ao.quantization import quantize_dynamic

    model = seeded_model(FLUX)
    for block in blocks_of(model):
        quantize_dynamic(block, {nn.Linear}, torch.qint8, inplace=True)
    with torch.no_grad(), parallelize(model, make_mesh(1, 2)) as handle:
        assert not handle.verify(**make_inputs(FLUX)).ok


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.stress)])
@on_ranks(2)
def test_a_model_may_be_larger_than_a_rank(every: int) -> None:
    """Weights of the blocks are shared by the ranks that share the tokens.

    Each model before or after parallelize, in turn; or both.
    """
    flat = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    times = ("before", (1, 2)), ("after", (2, 1))
    for place, case in enumerate(USED):
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
                assert share < 0.6 * whole, (case, when)
                same(model(**inputs).sample, wanted, 1e-6, (case, when))
                assert handle.verify(**inputs).ok, (case, when)


def slices_of(case: Case) -> Any:
    """Of Flux heads and feed-forward; of Wan, whose norm is over all heads, the latter."""
    if case == WAN:
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
    for place, axis in enumerate(("ulysses", "ring")):
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=(axis, "slices"))
        for case in (FLUX, WAN)[place % every :: every]:
            inputs = make_inputs(case)
            with torch.no_grad():
                wanted = seeded_model(case)(**inputs).sample
            model = seeded_model(case)
            for block in model.transformer_blocks if case.model == "flux" else model.blocks:
                if case.model == "flux":
                    block.attn.heads //= 2
                parallelize_module(block, both["slices"], slices_of(case))
            with torch.no_grad(), parallelize(model, both[axis]) as handle:
                same(model(**inputs).sample, wanted, 1e-6, (case, axis))
                assert handle.verify(**inputs).ok, (case, axis)
