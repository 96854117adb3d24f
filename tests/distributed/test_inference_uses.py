"""Hard uses of a split model: interrupts, threads, copies, replaced modules, ranks that differ."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from bascule.diffusers import Cut, Mask, SparseConfig, SplitTable, parallelize
from tests.helpers.inference_cases import difference, make_mesh
from tests.helpers.inference_toy import (
    CHANNELS,
    TABLE,
    WIDTH,
    Toy,
    direct,
    grads_of,
    make_toy,
    toy_gradients,
    toy_inputs,
    worst,
)
from tests.helpers.ranks import raised_by, run_ranks
from tests.helpers.sparse_reference import one_process

Found = dict[str, Any]


class Passing(TorchFunctionMode):
    """Somebody else's mode."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


def ended_by(kind: type[BaseException], model: Toy, **inputs: Tensor) -> None:
    """A forward pass that is interrupted in its second block, on all ranks."""

    def interrupt(module: nn.Module, *args: Any) -> None:
        raise kind

    hook = model.blocks[1].register_forward_hook(interrupt)
    try:
        model(**inputs)
    except kind:
        return
    finally:
        hook.remove()
    raise AssertionError("nothing was interrupted")


def own_attention() -> float:
    """Attention of other code: how far it is from what torch gives."""
    x = torch.randn(1, 2, 7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = (x @ x.mT / 2).softmax(-1) @ x
    empty = x[:, :, :0].reshape(1, 2, 0, 2, 2)
    assert empty.shape == (1, 2, 0, 2, 2)
    return difference(functional.scaled_dot_product_attention(x, x, x), wanted)


def interrupted() -> Found:
    inputs, other = toy_inputs(), toy_inputs(text=3, image=8)
    model, second, found = make_toy(), make_toy(seed=1), Found()
    wanted, wanted_second = model(**inputs), second(**inputs)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    plain = model.head(x)
    mesh = make_mesh(1, 2)
    handle = parallelize(model, mesh=mesh, table=TABLE)
    for kind in (KeyboardInterrupt, SystemExit, GeneratorExit):
        ended_by(kind, model, **other)
        found[f"attention after {kind.__name__}"] = own_attention()
    found["head after"] = difference(model.head(x), plain)
    block = raised_by(model.blocks[0], *inputs.values(), None)[1]
    found["block after"] = "blocks.0 runs outside of the forward pass" in block
    with handle.parts[0].taking(None):
        found["paused after"] = difference(model(**inputs), wanted)
    ended_by(KeyboardInterrupt, model, **other)
    found["again"] = difference(model(**inputs), wanted)
    found["left on the stack"] = len(_get_current_function_mode_stack())
    other_mode = Passing()
    with other_mode:
        ended_by(KeyboardInterrupt, model, **other)
    found["of others on the stack"] = other_mode in _get_current_function_mode_stack()
    with other_mode:
        found["within another mode"] = difference(model(**inputs), wanted)
    with parallelize(second, mesh=mesh, table=TABLE), torch.device("cpu"):
        ended_by(KeyboardInterrupt, model, **other)
        found["another model"] = difference(second(**inputs), wanted_second)
        ended_by(KeyboardInterrupt, model, **other)
        handle.undo()
        found["after undo"] = difference(model(**inputs), wanted) + own_attention()
    found["at last"] = own_attention(), len(_get_current_function_mode_stack())
    return found


def test_what_ends_a_forward_pass_ends_its_attention() -> None:
    for found in run_ranks(interrupted, 2):
        assert found.pop("block after")
        assert not found.pop("of others on the stack") and found.pop("left on the stack") == 0
        assert found.pop("at last")[1] == 0
        assert max(found.values()) < 1e-12, found


def within_itself() -> Found:
    """A hook that calls the model, a thread that does so meanwhile, and one that does so after."""
    inputs, other = toy_inputs(masked=True), toy_inputs(text=3, image=8)
    model, found = make_toy(), Found()
    wanted, wanted_other = model(**inputs), model(**other)
    inner: list[Tensor] = []
    said: list[tuple[list[str], str]] = []

    def within(module: nn.Module, *args: Any) -> None:
        if not inner:
            inner.append(torch.empty(0))
            inner.append(model(**other))

    def aside(module: nn.Module, *args: Any) -> None:
        if not said:
            thread = threading.Thread(target=lambda: said.append(raised_by(model, **other)))
            thread.start()
            thread.join()

    with parallelize(model, mesh=make_mesh(1, 2), table=TABLE):
        hook = model.blocks[1].register_forward_pre_hook(within)
        found["outer"] = difference(model(**inputs), wanted)
        found["inner"] = difference(inner[1], wanted_other)
        hook.remove()
        hook = model.blocks[0].register_forward_hook(aside)
        found["beside a thread"] = difference(model(**inputs), wanted)
        hook.remove()
        hook = model.blocks[0].register_forward_hook(
            lambda *_: said.append(raised_by(model, **inputs, extra=[inputs["text"]]))
        )
        found["beside what was refused"] = difference(model(**inputs), wanted)
        hook.remove()
    # One living thread moves rows over a group: first another one, then this one.
    group: Any = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ulysses",))
    with parallelize(model, mesh=mesh, table=TABLE):
        outputs: list[Tensor] = []
        for act in (
            lambda: outputs.append(model(**inputs)),
            lambda: ended_by(KeyboardInterrupt, model, **other),
        ):
            thread = threading.Thread(target=act)
            thread.start()
            thread.join()
        found["in a thread"] = difference(outputs[0], wanted)
        found["after a thread was interrupted"] = difference(model(**inputs), wanted)
    return found | {"said": said}


def test_a_model_within_itself_and_threads() -> None:
    for found in run_ranks(within_itself, 2):
        said = found.pop("said")
        assert all("ConfigError" in classes for classes, _ in said) and len(said) == 2
        assert "Toy runs in another thread" in said[0][1] and "of extra" in said[1][1]
        assert max(found.values()) < 1e-12, found


class Adapted(nn.Module):
    """What adapters put in the place of a layer, calling it as `base_layer`."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, CHANNELS, bias=False)
        self.double()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.base_layer(x, *args, **kwargs) + self.up(self.down(x))


class Wrapped(nn.Module):
    """What passes its arguments on, as wrappers for checkpointing do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


# Cuts the text on its way into the first block, where it is the first argument.
LATE = replace(
    TABLE,
    inputs={
        "": {"text_mask": Mask("text"), "image": Cut("image")},
        "blocks.0": {"text": Cut("text")},
    },
    replicated=("text", *TABLE.replicated),
    attends={},
    blocks={"blocks.*": ("text", "image")},
)


class NoCross(nn.Module):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return torch.zeros_like(x)


def replaced() -> Found:
    """An adapter on the last layer, loaded while split, trained, and taken away; wrapped blocks."""
    inputs, model, found = toy_inputs(masked=True), make_toy(), Found()
    head = model.head
    plain = model(**inputs)
    torch.manual_seed(3)
    model.head = adapter = Adapted(head)  # pyright: ignore[reportAttributeAccessIssue]
    wanted, wanted_grads = toy_gradients(model, inputs)
    model.head = head
    with parallelize(model, mesh=make_mesh(1, 2), table=TABLE) as handle:
        found["before"] = difference(model(**inputs), plain)
        model.head = adapter  # pyright: ignore[reportAttributeAccessIssue]
        output, _ = toy_gradients(model, inputs)
        handle.average_gradients()
        found["loaded"] = difference(output, wanted)
        found["trained"] = worst(grads_of(model), wanted_grads)
        found["verified"] = 0.0 if handle.verify(**inputs).ok else 1.0
        del model.head
        model.tail = head
        found["said"] = [raised_by(model, **inputs)[1] for _ in range(2)]
        del model.tail
        model.head = head
        found["unloaded"] = difference(model(**inputs), plain)
        model.head = adapter  # pyright: ignore[reportAttributeAccessIssue]
        model(**inputs)
    found["undone"] = difference(model(**inputs), wanted)
    found["hooks"] = sum("forward" in vars(x) for x in model.modules())
    for block in model.blocks:
        block.cross = NoCross()
    wanted = model(**inputs)
    with parallelize(model, mesh=make_mesh(1, 2), table=LATE) as handle:
        model.blocks[0] = Wrapped(Wrapped(model.blocks[0]))
        found["wrapped"] = difference(model(**inputs), wanted)
        found["wrapped, verified"] = len(handle.verify(**inputs).blocks) - 4
    with parallelize(model, mesh=make_mesh(1, 2), table=LATE):
        found["wrapped before"] = difference(model(**inputs), wanted)
    return found


def test_hooks_follow_the_names_of_modules() -> None:
    for found in run_ranks(replaced, 2):
        said = found.pop("said")
        assert said[0] == said[1] and "names 'head', and Toy has no such module" in said[0]
        assert max(found.values()) < 1e-12, found


def backward_outside() -> Found:
    """Checkpointed blocks that are computed again when the model is not split any more."""
    model, inputs, found = make_toy(), toy_inputs(masked=True), Found()
    _, wanted = toy_gradients(model, inputs)
    plain = model(**inputs)
    for name, degrees in (("ring", (2, 1)), ("Ulysses", (1, 2))):
        model.zero_grad()
        with parallelize(model, mesh=make_mesh(*degrees), table=TABLE) as handle:
            model.run = handle.checkpoint
            output = model(**inputs)
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
        (output * weights + output.square()).mean().backward()
        handle.average_gradients()
        found[name] = worst(grads_of(model), wanted)
        model.run = direct
        found[f"{name}, undone"] = difference(model(**inputs), plain)
    with parallelize(model, mesh=make_mesh(1, 2), table=TABLE):
        model.run = lambda block, *args: checkpoint(block, *args, use_reentrant=False)
        output = model(**inputs)
        found["said"] = raised_by(output.sum().backward)[1]
    return found


def test_backward_after_undo_computes_over_the_mesh_again() -> None:
    for found in run_ranks(backward_outside, 2):
        assert "enable_gradient_checkpointing(handle.checkpoint)" in found.pop("said")
        assert max(found.values()) < 1e-12, found


def guided() -> Found:
    """Gradients of a pass within another one; blocks that are one module; no parameters at all."""
    inputs, other, model = toy_inputs(masked=True), toy_inputs(text=3, image=6), make_toy()
    mesh, found, grads = make_mesh(1, 2), Found(), list[Tensor]()
    run: Callable[..., Any] = direct
    busy = False

    def within(module: nn.Module, *args: Any) -> None:
        nonlocal busy
        if busy:
            return
        busy, image = True, other["image"].clone().requires_grad_()
        model.run = run
        model(**(other | {"image": image})).square().sum().backward()
        model.run, busy = direct, False
        assert image.grad is not None
        grads.append(image.grad)

    hook = model.blocks[1].register_forward_pre_hook(within)
    wanted = model(**inputs)
    with parallelize(model, mesh=mesh, table=TABLE) as handle:
        run, busy = handle.checkpoint, True
        model(**inputs)  # is compared with one process, of which the hook would be a part
        busy = False
        found["outer"] = difference(model(**inputs), wanted)
        dist.all_reduce(grads[1])
        found["inner"] = difference(grads[1] / 2, grads[0])
    hook.remove()
    model.blocks[1] = model.blocks[0]
    sparse_inputs = toy_inputs()
    masks = np.random.default_rng(0).random((1, 2, 6, 5, 5)) < 0.5
    with one_process((5, 9), 4, masks=masks[0]):
        wanted, wanted_grads = toy_gradients(model, sparse_inputs)
    sparse = SparseConfig(masks=masks, block=4)
    with parallelize(model, mesh=mesh, table=TABLE, sparse=sparse) as handle:
        output, _ = toy_gradients(model, sparse_inputs)
        handle.average_gradients()
        found["one module, twice"] = difference(output, wanted) + worst(
            grads_of(model), wanted_grads
        )
    bare, x = Bare(), inputs["image"]
    wanted = bare(x)
    cut = Cut("image")
    table = SplitTable(("image",), {"": {"image": cut}}, {"head": cut}, {})
    with parallelize(bare, ulysses_degree=2, table=table) as handle:
        found["bare"] = difference(bare(x), wanted)
        found["bare, verified"] = 0.0 if handle.verify(image=x).ok else 1.0
    return found


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()

    def forward(self, image: Tensor) -> Tensor:
        x = image[:, None].expand(-1, 2, -1, -1)
        return self.head(functional.scaled_dot_product_attention(x, x, x).mean(1))


def test_guidance_shared_blocks_and_models_without_parameters() -> None:
    for found in run_ranks(guided, 2):
        assert max(found.values()) < 1e-12, found
