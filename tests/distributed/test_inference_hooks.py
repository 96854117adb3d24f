"""Function modes, hooks, processors and forwards of others on a split model: as in one process."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from bascule.diffusers import SparseConfig, context_parallel, parallelize
from tests.helpers.inference_cases import (
    USED,
    Case,
    difference,
    make_inputs,
    same,
    same_gradients,
    seeded_model,
)
from tests.helpers.inference_toy import (
    TABLE,
    Toy,
    direct,
    grads_of,
    make_toy,
    toy_gradients,
    toy_inputs,
)
from tests.helpers.misuse import Softmax
from tests.helpers.ranks import on_ranks, raised_by

pytest.importorskip("diffusers")

FLUX = USED[0]
MESHES: list[dict[str, Any]] = [{"ulysses_degree": 2}, {"ring_degree": 2}]


class Seeing(TorchFunctionMode):
    """Somebody's own mode, which does something with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is scaled_dot_product_attention:
            named = dict(kwargs or {})
            qkv = [named.pop(name) for name in ("query", "key", "value") if name in named] or args
            return self.attend(func, *qkv, **named)  # diffusers names q, k and v, others do not
        return func(*args, **(kwargs or {}))

    def attend(self, func: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **more: Any) -> Any:
        raise NotImplementedError


class Maps(Seeing):
    def attend(self, func: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **more: Any) -> Any:
        self.kept.append((q @ k.mT).softmax(-1))
        return func(q, k, v, *args, **more)


class Blurred(Seeing):
    def attend(self, func: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **more: Any) -> Any:
        return func(q.mean(2, keepdim=True).expand_as(q), k, v, *args, **more)


class Left(Seeing):
    def attend(self, func: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **more: Any) -> Any:
        return v if q.shape[2] == v.shape[2] else func(q, k, v, *args, **more)


def around(owner: nn.Module, mode: TorchFunctionMode) -> None:
    """Enter a mode around a module, as a hook does."""
    forward = owner.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    owner.forward = call


@on_ranks(2)
def test_modes_of_others_see_what_one_process_shows_them() -> None:
    """Output, and what a mode kept, by mode, mesh, place and call.

    Without masks: torch's own attention is then of any kernel.
    """
    inputs = toy_inputs()
    plain, of_flux = seeded_model(FLUX), make_inputs(FLUX)

    def passes(model: nn.Module, mode: Seeing, given: Any, where: str, first: bool) -> list[Tensor]:
        """The outputs without the mode, or only once it is around it, and what it kept."""
        if not first:
            model(**given)
        if where == "attention":
            around(model.get_submodule("transformer_blocks.0.attn"), mode)
            out = model(**given)[0]
        else:
            with mode, torch.device("cpu"):
                out = model(**given)
        kept = mode.kept[-4:]  # a first call with a user's table is tried out before
        return [out if isinstance(out, Tensor) else out[0], *kept]

    with torch.no_grad():
        for kind, (place, first) in product((Maps, Blurred, Left), ((0, True), (1, False))):
            wanted = passes(make_toy(), kind(), inputs, "model", first=first)
            model = make_toy()
            with parallelize(model, table=TABLE, **MESHES[place]):
                made = passes(model, kind(), inputs, "model", first=first)
            all_same(made, wanted, 1e-10)
            assert kind is Maps or difference(wanted[0], model(**inputs)) > 1e-4
            wanted = passes(plain, kind(), of_flux, "attention", first=first)
            del plain.transformer_blocks[0].attn.forward
            with parallelize(plain, **MESHES[place]):
                made = passes(plain, kind(), of_flux, "attention", first=first)
                del plain.transformer_blocks[0].attn.forward
            all_same(made, wanted)
            assert kind is Maps or difference(wanted[0], plain(**of_flux).sample) > 1e-4


def all_same(made: list[Tensor], wanted: list[Tensor], limit: float = 1e-5) -> None:
    for found, expected in zip(made, wanted, strict=True):
        same(found, expected, limit)


@on_ranks(2)
def test_what_no_rank_can_show_a_mode_is_refused_by_name() -> None:
    """The gradients of a blurred model; attention of a mesh; what is refused by name."""
    inputs, model = toy_inputs(), make_toy()
    with Blurred():
        _, wanted_grads = toy_gradients(model, inputs)
    with parallelize(model, table=TABLE, ring_degree=2) as handle, Blurred():
        toy_gradients(model, inputs)
        handle.average_gradients()
    same_gradients(grads_of(model), wanted_grads)
    mesh, own = init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",)), dist.get_rank()
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    mine = slice(4 * own, 4 * own + 4)
    with Blurred():
        wanted = scaled_dot_product_attention(x, x, x)[:, :, mine]
        with context_parallel(mesh):
            part = x[:, :, mine]
            same(scaled_dot_product_attention(part, part, part), wanted, 1e-6)

    def refused(act: Callable[[Toy], object], **options: Any) -> str:
        def call() -> None:
            model = make_toy()
            with torch.no_grad(), parallelize(model, table=TABLE, ring_degree=2, **options):
                act(model)

        return raised_by(call)[1]

    def within_mode(model: Toy, **changes: Any) -> None:
        with Left():
            model(**{**inputs, **changes})

    def compiled(model: Toy) -> None:
        call = torch.compile(model, backend="eager", fullgraph=True)
        with Left():
            call(**inputs)

    cross = toy_inputs(4, 10) | {"context": torch.randn(2, 7, 4, dtype=torch.float64)}
    entered = "Left (a TorchFunctionMode) is entered around"
    text = refused(lambda model: within_mode(model, **cross))  # each has 7 queries
    assert f"{entered} attention of 7 tokens to 7 that every" in text
    text = refused(within_mode, sparse=SparseConfig(keep=0.5, block=2))
    assert f"{entered} block-sparse attention" in text
    assert "compiled attention" in refused(compiled)


GUIDED = [Case("cogview4", 4, 1, 7, (6, 10)), Case("hunyuan_image", 4, 1, 7, (6, 10), ("mask",))]


@on_ranks(2)
def test_guidance_that_skips_layers_or_scores() -> None:
    """Passes without hooks, with those of guidance, without and with them again."""
    guiders: Any = importlib.import_module("diffusers.guiders")
    hooks: Any = importlib.import_module("diffusers.hooks")

    def passes(model: Any, skips: dict[str, bool]) -> list[Tensor]:
        config = hooks.LayerSkipConfig(indices=[1], fqn="transformer_blocks", **skips)
        guider = guiders.SkipLayerGuidance(
            skip_layer_config=[config], skip_layer_guidance_start=0.0
        )
        guider.set_state(step=1, num_inference_steps=100, timestep=torch.tensor(500))
        outputs = [model(**inputs)[0]]
        for _ in range(2):
            guider._count_prepared = guider.num_conditions - 1
            guider.prepare_models(model)
            outputs.append(model(**inputs)[0])
            guider.cleanup_models(model)
            outputs.append(model(**inputs)[0])
        return outputs

    kinds = {
        "block": {},
        "attention": {"skip_ff": False},
        "scores": {"skip_attention": False, "skip_attention_scores": True, "skip_ff": False},
    }
    model, inputs = nn.Module(), dict[str, Any]()
    with torch.no_grad():
        for place, case in enumerate(GUIDED):
            model, inputs = seeded_model(case), make_inputs(case) | {"return_dict": False}
            for number, (name, skips) in enumerate(kinds.items()):
                if place and name == "attention":  # which diffusers cannot leave out there
                    continue
                wanted = passes(model, skips)
                with parallelize(model, **MESHES[(place + number) % 2]):
                    all_same(passes(model, skips), wanted)
                assert difference(wanted[1], wanted[0]) > 1e-4, name
        layers: Any = importlib.import_module("diffusers.hooks.layer_skip")
        energy: Any = importlib.import_module("diffusers.hooks.smoothed_energy_guidance_utils")
        with parallelize(model, ulysses_degree=2):
            model(**inputs)
            config = energy.SmoothedEnergyGuidanceConfig([1], fqn="transformer_blocks")
            energy._apply_smoothed_energy_guidance_hook(model, config, 1.0, "smoothed")
            text = raised_by(model, **inputs)[1]
            assert "hook SmoothedEnergyGuidanceHook on a Linear" in text
            vars(model)["_diffusers_hook"].remove_hook("smoothed", recurse=True)
            config = hooks.LayerSkipConfig([1], fqn="transformer_blocks", dropout=0.5)
            layers.apply_layer_skip(model, config)
            assert "hook TransformerBlockSkipHook" in raised_by(model, **inputs)[1]


@on_ranks(2)
def test_what_changes_after_a_call_is_followed() -> None:
    """Processors, and the forward of a class."""
    flux: Any = importlib.import_module("diffusers.models.transformers.transformer_flux")
    inputs = make_inputs(FLUX) | {"return_dict": False}

    class Own(flux.FluxAttnProcessor):
        """Doubles what attention adds."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            made = super().__call__(*args, **kwargs)
            return tuple(2 * x for x in made) if isinstance(made, tuple) else 2 * made

    plain_block = flux.FluxSingleTransformerBlock.forward
    plain_model = flux.FluxTransformer2DModel.forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        text, image = plain_block(self, *args, **kwargs)
        return text, 2 * image

    def negative(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (-plain_model(self, *args, **kwargs)[0],)

    def patched(owner: Any, forward: Any) -> Callable[[], Any]:
        return lambda: mock.patch.object(owner, "forward", forward)

    ways: dict[str, tuple[Callable[[Any], object], Callable[[], Any]]] = {
        "processor": (lambda model: model.set_attn_processor(Own()), nullcontext),
        "fused": (lambda model: model.fuse_qkv_projections(), nullcontext),
        "blocks of a class": (lambda _: None, patched(flux.FluxSingleTransformerBlock, doubled)),
        "model of a class": (lambda _: None, patched(flux.FluxTransformer2DModel, negative)),
    }
    with torch.no_grad():
        for place, (name, (change, patch)) in enumerate(ways.items()):
            model = seeded_model(FLUX)
            plain = model(**inputs)[0]
            with parallelize(model, **MESHES[place % 2]):
                first = model(**inputs)[0]
                change(model)
                with patch():
                    made = model(**inputs)[0]
                again = model(**inputs)[0]
            with patch():
                wanted = model(**inputs)[0]
            all_same([first, made, again], [plain, wanted, model(**inputs)[0]])
            assert name == "fused" or difference(wanted, plain) > 1e-4, name
            assert "forward" not in vars(model), name
        model = seeded_model(FLUX)
        with parallelize(model, ulysses_degree=2):
            model(**inputs)
            model.transformer_blocks[1].attn.set_processor(Softmax())
            text = raised_by(model, **inputs)[1]
            assert "transformer_blocks.1.attn did not call" in text and "processor Softmax" in text


@on_ranks(2)
def test_all_guidance_groups_hear_of_an_error_that_one_meets() -> None:
    """A call of which one guidance group alone meets an error; then the next image."""
    model, inputs = make_toy(), toy_inputs(batch=1)
    wanted = model(**inputs)

    def fail(module: nn.Module, args: Any) -> None:
        if bool(inputs["time"].sum() > 100) and dist.get_rank() == 0:
            raise ValueError("too late an hour")

    model.blocks[0].register_forward_pre_hook(fail)
    with torch.no_grad(), parallelize(model, table=TABLE, guidance_degree=2):
        for hour in (1e3, 1.0, 1e3, 1.0):
            time, inputs["time"] = inputs["time"], inputs["time"] * hour

            def call() -> Tensor:
                results = [model(**inputs) for _ in range(3)]
                return results[0] + results[1] + results[2]

            if hour == 1.0:
                same(call(), 3 * wanted, 1e-10)
            else:
                text = raised_by(call)[1]
                assert "too late an hour" in text, text
                assert (text == "too late an hour") == (dist.get_rank() == 0), text
                assert dist.get_rank() == 0 or "rank 0 of group" in text, text
            inputs["time"] = time


class Foreign(Toy):
    """A model of another module, whose forward was replaced."""


Foreign.__module__ = "elsewhere"


class NoAttention(nn.Module):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


@on_ranks(2)
def test_caches_of_others_are_refused_by_name() -> None:
    toy, guided = make_toy(), Foreign().double()
    with torch.no_grad():
        with parallelize(make_toy(), table=TABLE, ulysses_degree=2) as handle:
            handle.model(**toy_inputs())
            cast(Any, handle.model).blocks[1].joint = NoAttention()
            text = raised_by(handle.model, **toy_inputs())[1]
            assert "blocks.1 did not call" in text and text.endswith("let it call that function")
        cast(Any, toy)._is_cached = True  # as cache-dit leaves it
        ways: list[dict[str, Any]] = [MESHES[0], {"guidance_degree": 2}]
        for degrees in ways:
            with parallelize(toy, table=TABLE, **degrees):
                assert "the cache of cache-dit" in raised_by(toy, **toy_inputs(batch=1))[1]
        with (
            mock.patch.object(Foreign, "forward", Toy.forward),
            parallelize(guided, table=TABLE, guidance_degree=2),
        ):
            text = raised_by(guided, **toy_inputs(batch=1))[1]
            assert "Foreign has a forward of tests." in text


SKIPPED: dict[str, tuple[list[int | None], dict[str, Any]]] = {
    "as many": ([1, 2], MESHES[0]),
    "as many, ring": ([1, 2], MESHES[1]),
    "fewer": ([None, 3], MESHES[0]),
    "fewer, ring": ([0, None], MESHES[1]),
    "both": ([1, None, None, None], {"ring_degree": 2, "ulysses_degree": 2}),
}


@pytest.mark.parametrize("name", SKIPPED)
@on_ranks(lambda name: len(SKIPPED[name][0]))
def test_ranks_that_leave_out_unlike_blocks_hear_it(name: str) -> None:
    """Each rank leaves out a block of its own choice, in the third pass."""
    skipped, degrees = SKIPPED[name]
    model, inputs = make_toy(num_blocks=4, heads=4, kv_heads=4), toy_inputs()
    mine = skipped[dist.get_rank()]

    def run(block: nn.Module, *args: Any) -> Any:
        is_skipped = mine is not None and block is model.blocks[mine]
        return args[:2] if is_skipped else direct(block, *args)

    with torch.no_grad(), parallelize(model, table=TABLE, **degrees):
        for _ in range(2):
            model(**inputs)
        model.run = run
        text = raised_by(model, **inputs)[1]
    if "as many" in name:
        assert "disagree on the blocks that attended" in text, text
        assert "ranks [0]: blocks.0, blocks.2, blocks.3; ranks [1]: blocks.0, blocks.1" in text
    else:
        assert "run different code, for example because a cache of steps" in text, text
        assert "waits in" in text, text
