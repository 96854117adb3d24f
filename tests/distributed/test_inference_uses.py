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
from tests.helpers.inference_cases import make_mesh, same, same_gradients
from tests.helpers.inference_toy import (
    TABLE,
    WIDTH,
    Adapted,
    Toy,
    direct,
    grads_of,
    loss_of,
    make_toy,
    toy_gradients,
    toy_inputs,
)
from tests.helpers.ranks import on_ranks, raised_by
from tests.helpers.sparse_reference import one_process


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


def own_attention() -> None:
    """Attention of other code is what torch gives."""
    x = torch.randn(1, 2, 7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    empty = x[:, :, :0].reshape(1, 2, 0, 2, 2)
    assert empty.shape == (1, 2, 0, 2, 2)
    same(functional.scaled_dot_product_attention(x, x, x), (x @ x.mT / 2).softmax(-1) @ x)


@on_ranks(2)
def test_what_ends_a_forward_pass_ends_its_attention() -> None:
    inputs, other = toy_inputs(), toy_inputs(text=3, image=8)
    model, second = make_toy(), make_toy(seed=1)
    wanted, wanted_second = model(**inputs), second(**inputs)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    plain = model.head(x)
    mesh = make_mesh(1, 2)
    handle = parallelize(model, mesh=mesh, table=TABLE)
    for kind in (KeyboardInterrupt, SystemExit, GeneratorExit):
        ended_by(kind, model, **other)
        own_attention()
    same(model.head(x), plain)
    block = raised_by(model.blocks[0], *inputs.values(), None)[1]
    assert "blocks.0 runs outside of the forward pass" in block
    with handle.parts[0].taking(None):
        same(model(**inputs), wanted, what="paused")
    ended_by(KeyboardInterrupt, model, **other)
    same(model(**inputs), wanted, what="again")
    assert not _get_current_function_mode_stack()
    other_mode = Passing()
    with other_mode:
        ended_by(KeyboardInterrupt, model, **other)
    assert other_mode not in _get_current_function_mode_stack()
    with other_mode:
        same(model(**inputs), wanted, what="within another mode")
    with parallelize(second, mesh=mesh, table=TABLE), torch.device("cpu"):
        ended_by(KeyboardInterrupt, model, **other)
        same(second(**inputs), wanted_second, what="another model")
        ended_by(KeyboardInterrupt, model, **other)
        handle.undo()
        same(model(**inputs), wanted, what="after undo")
        own_attention()
    own_attention()
    assert not _get_current_function_mode_stack()


@on_ranks(2)
def test_a_model_within_itself_and_threads() -> None:
    """A hook that calls the model, a thread that does so meanwhile, and one that does so after."""
    inputs, other = toy_inputs(masked=True), toy_inputs(text=3, image=8)
    model = make_toy()
    wanted, wanted_other = model(**inputs), model(**other)
    inner: list[Tensor] = []
    errors: list[tuple[list[str], str]] = []

    def within(module: nn.Module, *args: Any) -> None:
        if not inner:
            inner.append(torch.empty(0))
            inner.append(model(**other))

    def aside(module: nn.Module, *args: Any) -> None:
        if not errors:
            thread = threading.Thread(target=lambda: errors.append(raised_by(model, **other)))
            thread.start()
            thread.join()

    with parallelize(model, mesh=make_mesh(1, 2), table=TABLE):
        hook = model.blocks[1].register_forward_pre_hook(within)
        same(model(**inputs), wanted, what="outer")
        same(inner[1], wanted_other, what="inner")
        hook.remove()
        hook = model.blocks[0].register_forward_hook(aside)
        same(model(**inputs), wanted, what="beside a thread")
        hook.remove()
        hook = model.blocks[0].register_forward_hook(
            lambda *_: errors.append(raised_by(model, **inputs, extra=[inputs["text"]]))
        )
        same(model(**inputs), wanted, what="beside what was refused")
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
        same(outputs[0], wanted, what="in a thread")
        same(model(**inputs), wanted, what="after a thread was interrupted")
    (first, in_thread), (second, extra) = errors
    assert "ConfigError" in first and "ConfigError" in second
    assert "Toy runs in another thread" in in_thread and "of extra" in extra


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


@on_ranks(2)
def test_hooks_follow_the_names_of_modules() -> None:
    """An adapter on the last layer, loaded while split, trained, and taken away; wrapped blocks."""
    inputs, model = toy_inputs(masked=True), make_toy()
    head: Any = model.head
    plain = model(**inputs)
    torch.manual_seed(3)
    adapter: Any = Adapted(head)
    model.head = adapter
    wanted, wanted_grads = toy_gradients(model, inputs)
    model.head = head
    with parallelize(model, mesh=make_mesh(1, 2), table=TABLE) as handle:
        same(model(**inputs), plain, what="before")
        model.head = adapter
        output, _ = toy_gradients(model, inputs)
        handle.average_gradients()
        same(output, wanted, what="loaded")
        same_gradients(grads_of(model), wanted_grads)
        assert handle.verify(**inputs).ok
        del model.head
        model.tail = head
        first, second = (raised_by(model, **inputs)[1] for _ in range(2))
        assert first == second and "names 'head', and Toy has no such module" in first
        del model.tail
        model.head = head
        same(model(**inputs), plain, what="unloaded")
        model.head = adapter
        model(**inputs)
    same(model(**inputs), wanted, what="undone")
    assert not any("forward" in vars(module) for module in model.modules())
    for block in model.blocks:
        block.cross = NoCross()
    wanted = model(**inputs)
    with parallelize(model, mesh=make_mesh(1, 2), table=LATE) as handle:
        model.blocks[0] = Wrapped(Wrapped(model.blocks[0]))
        same(model(**inputs), wanted, what="wrapped")
        assert len(handle.verify(**inputs).blocks) == 4
    with parallelize(model, mesh=make_mesh(1, 2), table=LATE):
        same(model(**inputs), wanted, what="wrapped before")


@on_ranks(2)
def test_backward_after_undo_computes_over_the_mesh_again() -> None:
    """Checkpointed blocks that are computed again when the model is not split any more."""
    model, inputs = make_toy(), toy_inputs(masked=True)
    _, wanted = toy_gradients(model, inputs)
    plain = model(**inputs)
    for degrees in ((2, 1), (1, 2)):
        model.zero_grad()
        with parallelize(model, mesh=make_mesh(*degrees), table=TABLE) as handle:
            model.run = handle.checkpoint
            output = model(**inputs)
        loss_of(output).backward()
        handle.average_gradients()
        same_gradients(grads_of(model), wanted)
        model.run = direct
        same(model(**inputs), plain, what=degrees)
    with parallelize(model, mesh=make_mesh(1, 2), table=TABLE):
        model.run = lambda block, *args: checkpoint(block, *args, use_reentrant=False)
        text = raised_by(model(**inputs).sum().backward)[1]
        assert "enable_gradient_checkpointing(handle.checkpoint)" in text


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()

    def forward(self, image: Tensor) -> Tensor:
        x = image[:, None].expand(-1, 2, -1, -1)
        return self.head(functional.scaled_dot_product_attention(x, x, x).mean(1))


@on_ranks(2)
def test_guidance_shared_blocks_and_models_without_parameters() -> None:
    """Gradients of a pass within another one; blocks that are one module; no parameters at all."""
    inputs, other, model = toy_inputs(masked=True), toy_inputs(text=3, image=6), make_toy()
    mesh, grads = make_mesh(1, 2), list[Tensor]()
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
        same(model(**inputs), wanted, what="outer")
        dist.all_reduce(grads[1])
        same(grads[1] / 2, grads[0], what="inner")
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
        same(output, wanted, what="one module, twice")
        same_gradients(grads_of(model), wanted_grads)
    bare, x = Bare(), inputs["image"]
    wanted = bare(x)
    cut = Cut("image")
    table = SplitTable(("image",), {"": {"image": cut}}, {"head": cut}, {})
    with parallelize(bare, ulysses_degree=2, table=table) as handle:
        same(bare(x), wanted, what="bare")
        assert handle.verify(image=x).ok
