"""Function modes, hooks, processors and forwards of others on a split model: as in one process."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from bascule.diffusers import SparseConfig, context_parallel, parallelize
from tests.helpers.inference_cases import Case, difference, make_inputs, make_model
from tests.helpers.inference_toy import TABLE, Toy, direct, make_toy, toy_inputs
from tests.helpers.ranks import raised_by, run_ranks

Found = dict[str, Any]
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


def modes() -> Found:
    """The error of the output, and of what a mode kept, by mode, mesh, place and call.

    Without masks: torch's own attention is then of any kernel.
    """
    found, inputs = Found(), toy_inputs()
    flux, of_flux = Case("flux", 4, 2, 7, (3, 5)), make_inputs(Case("flux", 4, 2, 7, (3, 5)))
    torch.manual_seed(0)
    plain: Any = make_model(flux)

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
        for kind in (Maps, Blurred, Left):
            for place, first in ((0, True), (1, False)):
                wanted = passes(make_toy(), kind(), inputs, "model", first=first)
                model = make_toy()
                with parallelize(model, table=TABLE, **MESHES[place]):
                    made = passes(model, kind(), inputs, "model", first=first)
                name = f"{kind.__name__}, {place}, first {first}"
                found[f"toy, {name}"] = apart(made, wanted), difference(wanted[0], model(**inputs))
                wanted = passes(plain, kind(), of_flux, "attention", first=first)
                del plain.transformer_blocks[0].attn.forward
                with parallelize(plain, **MESHES[place]):
                    made = passes(plain, kind(), of_flux, "attention", first=first)
                    del plain.transformer_blocks[0].attn.forward
                effect = difference(wanted[0], plain(**of_flux).sample)
                found[f"flux, {name}"] = apart(made, wanted), effect
    return found


def apart(made: list[Tensor], wanted: list[Tensor]) -> float:
    return max(difference(a, b) for a, b in zip(made, wanted, strict=True))


def test_modes_of_others_see_what_one_process_shows_them() -> None:
    for found in run_ranks(modes, 2):
        for name, (error, effect) in found.items():
            assert error < (1e-10 if "toy" in name else 1e-5), (name, error)
            assert "Maps" in name or effect > 1e-4, (name, effect)


def other_modes() -> list[float | str]:
    """The gradients of a blurred model; attention of a mesh; what is refused by name."""
    found = list[float | str]()
    inputs, model = toy_inputs(), make_toy()
    grads = list[Tensor]()
    for is_split in (False, True):
        model.zero_grad()
        if is_split:
            with parallelize(model, table=TABLE, ring_degree=2) as handle, Blurred():
                model(**inputs).square().mean().backward()
                handle.average_gradients()
        else:
            with Blurred():
                model(**inputs).square().mean().backward()
        grads.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    found.append(difference(grads[1], grads[0]))
    from torch.distributed.device_mesh import init_device_mesh

    mesh, own = init_device_mesh("cpu", (2,), mesh_dim_names=("ulysses",)), dist.get_rank()
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    mine = slice(4 * own, 4 * own + 4)
    with Blurred():
        wanted = scaled_dot_product_attention(x, x, x)[:, :, mine]
        with context_parallel(mesh):
            part = x[:, :, mine]
            found.append(difference(scaled_dot_product_attention(part, part, part), wanted))

    def refused(act: Callable[[Toy], object], **more: Any) -> None:
        model = make_toy()
        with torch.no_grad(), parallelize(model, table=TABLE, ring_degree=2, **more) as handle:
            more["handle"] = handle
            act(model)

    def of(model: Toy, **changes: Any) -> None:
        with Left():
            model(**{**inputs, **changes})

    def of_compiled(model: Toy) -> None:
        call = torch.compile(model, backend="eager", fullgraph=True)
        with Left():
            call(**inputs)

    cross = toy_inputs(4, 10) | {"context": torch.randn(2, 7, 4, dtype=torch.float64)}
    found.append(raised_by(refused, lambda model: of(model, **cross))[1])  # each has 7 queries
    config = SparseConfig(keep=0.5, block=2)
    found.append(raised_by(refused, of, sparse=config)[1])
    found.append(raised_by(refused, of_compiled)[1])
    return found


def test_what_no_rank_can_show_a_mode_is_refused_by_name() -> None:
    for *errors, keys, sparse, compiled in run_ranks(other_modes, 2):
        assert max(errors) < 1e-6, errors
        assert (
            "Left (a TorchFunctionMode) is entered around attention of 7 tokens to 7 that every"
            in keys
        )
        assert "Left (a TorchFunctionMode) is entered around block-sparse attention" in sparse
        assert "compiled attention" in compiled


GUIDED = [Case("cogview4", 4, 1, 7, (6, 10)), Case("hunyuan_image", 4, 1, 7, (6, 10), ("mask",))]


def guided() -> Found:
    """Passes without hooks, with those of guidance, without and with them again."""
    guiders: Any = importlib.import_module("diffusers.guiders")
    hooks: Any = importlib.import_module("diffusers.hooks")
    found = Found()

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
            torch.manual_seed(0)
            model, inputs = make_model(case), make_inputs(case) | {"return_dict": False}
            for number, (name, skips) in enumerate(kinds.items()):
                if place and name == "attention":  # which diffusers cannot leave out there
                    continue
                wanted = passes(model, skips)
                with parallelize(model, **MESHES[(place + number) % 2]):
                    made = passes(model, skips)
                effect = difference(wanted[1], wanted[0])
                found[f"{case.model}, {name}"] = apart(made, wanted), effect
        layers: Any = importlib.import_module("diffusers.hooks.layer_skip")
        energy: Any = importlib.import_module("diffusers.hooks.smoothed_energy_guidance_utils")
        said = list[str]()
        with parallelize(model, ulysses_degree=2):
            model(**inputs)
            config = energy.SmoothedEnergyGuidanceConfig([1], fqn="transformer_blocks")
            energy._apply_smoothed_energy_guidance_hook(model, config, 1.0, "smoothed")
            said.append(raised_by(model, **inputs)[1])
            vars(model)["_diffusers_hook"].remove_hook("smoothed", recurse=True)
            config = hooks.LayerSkipConfig([1], fqn="transformer_blocks", dropout=0.5)
            layers.apply_layer_skip(model, config)
            said.append(raised_by(model, **inputs)[1])
        found["said"] = said
    return found


def test_guidance_that_skips_layers_or_scores() -> None:
    pytest.importorskip("diffusers")
    for found in run_ranks(guided, 2):
        smoothed, random = found.pop("said")
        assert "hook SmoothedEnergyGuidanceHook on a Linear" in smoothed
        assert "hook TransformerBlockSkipHook" in random
        for name, (error, effect) in found.items():
            assert error < 1e-5 and effect > 1e-4, (name, error, effect)


class Softmax:
    """A processor that computes attention by itself."""

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return hidden_states, args[0]


def changed() -> Found:
    """What is changed after a call: processors, and the forward of a class."""
    flux: Any = importlib.import_module("diffusers.models.transformers.transformer_flux")
    case = Case("flux", 4, 2, 7, (3, 5))
    inputs, found = make_inputs(case) | {"return_dict": False}, Found()

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

    def none() -> Any:
        return mock.patch.object(flux, "FluxAttnProcessor", flux.FluxAttnProcessor)

    def patched(owner: Any, forward: Any) -> Callable[[], Any]:
        return lambda: mock.patch.object(owner, "forward", forward)

    ways: dict[str, tuple[Callable[[Any], object], Callable[[], Any]]] = {
        "processor": (lambda model: model.set_attn_processor(Own()), none),
        "fused": (lambda model: model.fuse_qkv_projections(), none),
        "blocks of a class": (
            lambda _: None,
            patched(flux.FluxSingleTransformerBlock, doubled),
        ),
        "model of a class": (lambda _: None, patched(flux.FluxTransformer2DModel, negative)),
    }
    with torch.no_grad():
        for place, (name, (change, patch)) in enumerate(ways.items()):
            torch.manual_seed(0)
            model: Any = make_model(case)
            plain = model(**inputs)[0]
            with parallelize(model, **MESHES[place % 2]):
                first = model(**inputs)[0]
                change(model)
                with patch():
                    made = model(**inputs)[0]
                again = model(**inputs)[0]
            with patch():
                wanted = model(**inputs)[0]
            errors = apart([first, made, again], [plain, wanted, model(**inputs)[0]])
            found[name] = errors, difference(wanted, plain), "forward" in vars(model)
        torch.manual_seed(0)
        model = make_model(case)
        with parallelize(model, ulysses_degree=2):
            model(**inputs)
            model.transformer_blocks[1].attn.set_processor(Softmax())
            found["said"] = raised_by(model, **inputs)[1]
    return found


def test_what_changes_after_a_call_is_followed() -> None:
    pytest.importorskip("diffusers")
    for found in run_ranks(changed, 2):
        said = found.pop("said")
        assert "transformer_blocks.1.attn did not call" in said and "processor Softmax" in said
        for name, (error, effect, is_left) in found.items():
            assert error < 1e-5 and not is_left, (name, error)
            assert name == "fused" or effect > 1e-4, (name, effect)


def one_group_fails() -> list[Any]:
    """A call of which one guidance group alone meets an error; then the next image."""
    model, inputs = make_toy(), toy_inputs(batch=1)
    wanted = model(**inputs)

    def fail(module: nn.Module, args: Any) -> None:
        if bool(inputs["time"].sum() > 100) and dist.get_rank() == 0:
            raise ValueError("too late an hour")

    model.blocks[0].register_forward_pre_hook(fail)
    found = list[Any]()
    with torch.no_grad(), parallelize(model, table=TABLE, guidance_degree=2):
        for hour, is_first in ((1e3, True), (1.0, False), (1e3, False), (1.0, False)):
            time, inputs["time"] = inputs["time"], inputs["time"] * hour

            def call() -> Tensor:
                results = [model(**inputs) for _ in range(3)]
                return results[0] + results[1] + results[2]

            found.append(raised_by(call)[1] if hour > 1 else difference(call(), 3 * wanted))
            inputs["time"] = time
            assert is_first == (len(found) == 1)
    return found


def test_all_guidance_groups_hear_of_an_error_that_one_meets() -> None:
    first, second = run_ranks(one_group_fails, 2)
    for own, others in ((first[0], second[0]), (first[2], second[2])):
        assert own == "too late an hour", own
        assert "rank 0 of group" in others and "too late an hour" in others
    assert max(first[1], first[3], second[1], second[3]) < 1e-10


class Foreign(Toy):
    """A model of another module, whose forward was replaced."""


Foreign.__module__ = "elsewhere"


class NoAttention(nn.Module):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


def caches_of_others() -> list[str]:
    toy, guided = make_toy(), Foreign().double()
    found = list[str]()
    with torch.no_grad():
        with parallelize(make_toy(), table=TABLE, ulysses_degree=2) as handle:
            handle.model(**toy_inputs())
            cast(Any, handle.model).blocks[1].joint = NoAttention()
            found.append(raised_by(handle.model, **toy_inputs())[1])
        cast(Any, toy)._is_cached = True  # as cache-dit leaves it
        ways: list[dict[str, Any]] = [MESHES[0], {"guidance_degree": 2}]
        for degrees in ways:
            with parallelize(toy, table=TABLE, **degrees):
                found.append(raised_by(toy, **toy_inputs(batch=1))[1])
        with (
            mock.patch.object(Foreign, "forward", Toy.forward),
            parallelize(guided, table=TABLE, guidance_degree=2),
        ):
            found.append(raised_by(guided, **toy_inputs(batch=1))[1])
    return found


def test_caches_of_others_are_refused_by_name() -> None:
    for local, split, guided, replaced in run_ranks(caches_of_others, 2):
        assert "blocks.1 did not call" in local and local.endswith("let it call that function")
        assert "the cache of cache-dit" in split and "the cache of cache-dit" in guided
        assert "Foreign with guidance over ranks and a forward of tests." in replaced


def skipping(skipped: Sequence[int | None], degrees: dict[str, Any]) -> list[str]:
    """Each rank leaves out a block of its own choice, in the third pass."""
    model, inputs = make_toy(num_blocks=4, heads=4, kv_heads=4), toy_inputs()
    mine = skipped[dist.get_rank()]

    def run(block: nn.Module, *args: Any) -> Any:
        return (
            args[:2] if mine is not None and block is model.blocks[mine] else direct(block, *args)
        )

    with torch.no_grad(), parallelize(model, table=TABLE, **degrees):
        for _ in range(2):
            model(**inputs)
        model.run = run
        return [raised_by(model, **inputs)[1]]


SKIPPED: dict[str, tuple[list[int | None], dict[str, Any]]] = {
    "as many": ([1, 2], MESHES[0]),
    "as many, ring": ([1, 2], MESHES[1]),
    "fewer": ([None, 3], MESHES[0]),
    "fewer, ring": ([0, None], MESHES[1]),
    "both": ([1, None, None, None], {"ring_degree": 2, "ulysses_degree": 2}),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_ranks_that_leave_out_unlike_blocks_hear_it(name: str) -> None:
    skipped, degrees = SKIPPED[name]
    for (said,) in run_ranks(skipping, len(skipped), skipped, degrees):
        if "as many" in name:
            assert "disagree on the blocks that attended" in said
            assert "ranks [0]: blocks.0, blocks.2, blocks.3; ranks [1]: blocks.0, blocks.1" in said
        else:
            assert (
                "run different code, for example because a cache of steps" in said
                and "waits in" in said
            ), said
