"""parallelize: exact on odd shapes, undone without a trace, gradients right under averaging."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from bascule.diffusers import parallelize
from bascule.errors import ConfigError
from tests.helpers.inference_cases import difference, make_mesh
from tests.helpers.inference_toy import (
    TABLE,
    grads_of,
    make_toy,
    toy_gradients,
    toy_inputs,
    worst,
)
from tests.helpers.ranks import run_ranks

MESHES = [  # ring, Ulysses
    *[(1, 2), (2, 1)],
    *(pytest.param(*mesh, marks=pytest.mark.stress) for mesh in [(2, 2), (1, 4), (4, 1)]),
]
SHAPES: list[dict[str, Any]] = [
    {"text": 5, "image": 9, "masked": True},
    {"text": 1, "image": 1, "batch": 3},
    {"text": 0, "image": 6},
    {"text": 8, "image": 3, "masked": True},
]


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def compare(ring: int, ulysses: int) -> list[tuple[float, float, bool]]:
    """Output, gradients, and whether undo() left the model as it was."""
    found: list[tuple[float, float, bool]] = []
    mesh = make_mesh(ring, ulysses)
    for sizes in ({"heads": 6, "kv_heads": 6}, {"heads": 6, "kv_heads": 3}):
        model = make_toy(**sizes)
        for shape in SHAPES:
            inputs = toy_inputs(**shape)
            wanted, wanted_grads = toy_gradients(model, inputs)
            with parallelize(model, mesh=mesh, table=TABLE) as handle:
                output, _ = toy_gradients(model, inputs)
                handle.average_gradients()
            grads = grads_of(model)
            undone = hooks_of(model) == 0 and torch.equal(model(**inputs), wanted)
            found.append((difference(output, wanted), worst(grads, wanted_grads), undone))
    return found


@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
def test_forward_and_training_step_of_ones_own_model(ring: int, ulysses: int) -> None:
    for found in run_ranks(compare, ring * ulysses, ring, ulysses):
        for out, grads, undone in found:
            assert out < 1e-10 and grads < 1e-12 and undone, found


def watched() -> tuple[list[int], list[str], list[float]]:
    """Modes within the blocks at six calls of one form, and what is told between two forms."""
    model, modes = make_toy(), list[int]()
    inputs = [toy_inputs(text=5, image=9, masked=True), toy_inputs(text=3, image=10)]
    wanted = [model(**one) for one in inputs]
    size = dist.get_world_size()
    with parallelize(model, ring_degree=size, table=TABLE) as handle, torch.no_grad():
        handle.verify(**toy_inputs(text=2, image=3))  # else the first call is compared
        next(model.blocks[0].children()).register_forward_hook(
            lambda *_: modes.append(len(_get_current_function_mode_stack()))
        )
        errors = [difference(model(**inputs[0]), wanted[0]) for _ in range(6)]
        first, watched = str(handle.explain()), modes.copy()
        errors.append(difference(model(**inputs[1]), wanted[1]))
        told = [first, str(handle.explain())]
        model(**inputs[0])  # a seventh call, which is not counted
        return watched, [*told, str(handle.explain())], errors


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_call_of_a_form_is_counted_and_one_rank_attends_as_the_model_does(
    num_ranks: int,
) -> None:
    for modes, told, errors in run_ranks(watched, num_ranks):
        assert modes == [1] + 5 * [0 if num_ranks == 1 else 1]
        assert told[0] == told[2] != told[1]
        assert max(errors) < 1e-10


def averaged() -> dict[str, float]:
    """Two samples on two pairs of ranks: DDP and FSDP average over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ulysses"))
    batches = [toy_inputs(text=5, image=9, seed=seed) for seed in (1, 2)]
    reference = make_toy()
    each = [toy_gradients(reference, batch)[1] for batch in batches]
    wanted = {name: (each[0][name] + each[1][name]) / 2 for name in each[0]}
    mine = batches[mesh.get_local_rank("dp")]
    found: dict[str, float] = {}
    model = make_toy()
    parallelize(model, mesh=mesh["ulysses"], table=TABLE)
    toy_gradients(DistributedDataParallel(model), mine)
    found["DDP"] = worst(grads_of(model), wanted)
    wrapped = DistributedDataParallel(make_toy())
    with parallelize(wrapped, mesh=mesh["ulysses"], table=TABLE) as handle:
        toy_gradients(wrapped, mine)
        assert handle.model is wrapped.module and handle.explain(wrapped).model == "Toy"
    found["DDP, split within"] = worst(grads_of(wrapped.module), wanted)
    model = make_toy()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with parallelize(model, mesh=mesh["ulysses"], table=TABLE) as handle:
        toy_gradients(model, mine)
        grads = {name: grad.full_tensor() for name, grad in grads_of(model).items()}  # pyright: ignore
        found["FSDP"] = worst(grads, wanted)
        found["verify"] = 0.0 if handle.verify(**batches[0]).ok else 1.0
    return found


def test_gradients_are_right_under_the_averaging_of_ddp_and_fsdp() -> None:
    for found in run_ranks(averaged, 4):
        assert max(found.values()) < 1e-12, found


def checkpointed() -> dict[str, Any]:
    """Both forward passes, of other lengths, run before the backward of the first."""
    model = make_toy()
    inputs = [toy_inputs(text=5, image=9, masked=True), toy_inputs(text=3, image=10)]

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        first, second = (model(**one) for one in inputs)
        first.square().mean().backward()
        second.square().mean().backward()
        return grads_of(model)

    wanted = step()
    with parallelize(model, ring_degree=2, table=TABLE) as handle:
        model.run = lambda block, *args: checkpoint(block, *args, use_reentrant=False)
        said = refused(step)
        model.run = handle.checkpoint
        step()
        handle.average_gradients()
    return {"said": said, "worst": worst(grads_of(model), wanted)}


def test_recomputation_uses_the_lengths_of_its_own_forward_pass() -> None:
    for found in run_ranks(checkpointed, 2):
        assert "enable_gradient_checkpointing(handle.checkpoint)" in found["said"]
        assert found["worst"] < 1e-12


def refused(act: Callable[[], object]) -> str:
    try:
        act()
    except (ConfigError, ValueError) as error:
        assert not _get_current_function_mode_stack()
        return str(error)
    return "nothing was refused"


def side_by_side() -> list[float]:
    """Two models on different meshes, in turn and one within the other; a third stays whole."""
    models = [make_toy(seed) for seed in range(3)]
    inputs = toy_inputs(text=5, image=9, masked=True)
    wanted = [model(**inputs) for model in models]
    inner: list[Tensor] = []
    with (
        parallelize(models[0], mesh=make_mesh(2, 2), table=TABLE),
        parallelize(models[1], mesh=make_mesh(1, 4), table=TABLE),
    ):
        found = [models[i](**inputs) for i in (0, 1, 2, 1, 0)]

        def within(module: nn.Module, args: Any) -> None:
            inner.append(models[1](**inputs))

        hook = models[0].blocks[1].register_forward_pre_hook(within)
        found.append(models[0](**inputs))
        hook.remove()
    wanted = [wanted[i] for i in (0, 1, 2, 1, 0, 0, 1)]
    return [difference(a, b) for a, b in zip((*found, *inner), wanted, strict=True)]


def test_models_on_different_meshes_do_not_meet() -> None:
    for errors in run_ranks(side_by_side, 4):
        assert max(errors) < 1e-12, errors


def after_an_error() -> dict[str, Any]:
    model, inputs = make_toy(), toy_inputs()
    wanted = model(**inputs)
    found: dict[str, Any] = {}

    def fail(module: nn.Module, *args: Any) -> None:
        raise ValueError("in the middle")

    def interrupt(module: nn.Module, *args: Any) -> None:
        raise KeyboardInterrupt

    with parallelize(model, ulysses_degree=2, table=TABLE):
        for name in ("blocks.1", "blocks.1.cross", "head", ""):
            module = model.get_submodule(name)
            for register in (module.register_forward_pre_hook, module.register_forward_hook):
                hook = register(fail)
                assert refused(lambda: model(**inputs)) == "in the middle"
                hook.remove()
        hook = model.blocks[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):  # calls no hooks: the next forward pass tidies up
            model(**inputs)
        hook.remove()
        found["split"] = difference(model(**inputs), wanted)
        found["frame"] = len(_get_current_function_mode_stack())
    found["undone"] = torch.equal(model(**inputs), wanted) and hooks_of(model) == 0
    return found


def test_an_error_in_the_middle_leaves_nothing_behind() -> None:
    for found in run_ranks(after_an_error, 2):
        assert found["split"] < 1e-12 and found["frame"] == 0 and found["undone"]
