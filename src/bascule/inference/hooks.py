"""The hooks by which a table acts on a model: torch's own, and gone when removed."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bascule.attention.mesh import AttentionMesh
from bascule.comm.quantize import Wire
from bascule.errors import ConfigError
from bascule.inference.forward import Attended, Forward
from bascule.inference.sparse import SparseLayers, SparsePass
from bascule.inference.sparse_config import SparseConfig
from bascule.inference.tables import Cut, SplitTable, modules_of


class SplitModel:
    """A model with a table's hooks.

    Attributes:
        model: As it was given.
        table: What is cut and gathered.
        mesh: The ranks.
        sparse: The plans of block-sparse attention; None for dense attention.
        blocks: By name, each block of the table, and the segments of what it returns.
        forward: The forward pass that runs, if any.
        last: What the last one that ended well attended to, unless compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        table: SplitTable,
        mesh: AttentionMesh,
        wire: Wire | None = None,
        sparse: SparseConfig | None = None,
    ) -> None:
        if any(isinstance(hook, _Begin) for hook in model._forward_pre_hooks.values()):
            raise ConfigError(
                f"{type(model).__name__} is split over ranks already: call undo() of its handle"
            )
        self.model, self.table, self.mesh, self.wire = model, table, mesh, wire
        self.sparse = None if sparse is None else SparseLayers(sparse, mesh, table.segments)
        self.blocks = {
            name: (module, segments)
            for pattern, segments in table.blocks.items()
            for name, module in modules_of(model, pattern).items()
        }
        self.forward: Forward | None = None
        self.last: Attended | None = None
        self._is_paused = False
        self._hooks: list[RemovableHandle] = []
        try:
            self._install()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take the hooks away; the model is as it was."""
        self.leave()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def enter(self, forward: Forward) -> None:
        """Begin a forward pass."""
        forward.__enter__()
        self.forward = forward

    def leave(self) -> None:
        """End the forward pass that runs, if any."""
        if self.forward is not None:
            self.forward.__exit__(None, None, None)
            self.forward = None

    @contextmanager
    def resumed(self, forward: Forward) -> Iterator[None]:
        """Compute parts of an earlier forward pass again."""
        self.enter(forward)
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model computes all tokens, without communication."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextmanager
    def using(self, sparse: SparseLayers) -> Iterator[None]:
        """Other plans, and their mesh."""
        before = self.mesh, self.sparse
        self.mesh, self.sparse = sparse.mesh, sparse
        try:
            yield
        finally:
            self.mesh, self.sparse = before

    @property
    def is_split(self) -> bool:
        """Whether it has its hooks."""
        return bool(self._hooks)

    @property
    def is_paused(self) -> bool:
        """Whether hooks do nothing."""
        return self._is_paused

    def _install(self) -> None:
        model, table = self.model, self.table
        begin = _Begin(self, _parameters(model))
        self._hooks.append(model.register_forward_pre_hook(begin, with_kwargs=True))
        self._hooks.append(model.register_forward_hook(self._end, always_call=True))
        for name, (block, _) in self.blocks.items():
            self._hooks.append(block.register_forward_pre_hook(self._begin_block(name)))
            self._hooks.append(block.register_forward_hook(self._end_block(name)))
        for pattern, cuts in table.inputs.items():
            if pattern:
                for module in modules_of(model, pattern).values():
                    hook = self._cut_inputs(_parameters(module), cuts)
                    self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        for pattern, cuts in table.outputs.items():
            for name, module in modules_of(model, pattern).items():
                self._hooks.append(module.register_forward_hook(self._cut_outputs(name, cuts)))
        for pattern, cut in table.gathers.items():
            for module in modules_of(model, pattern).values():
                self._hooks.append(module.register_forward_hook(self._gather(cut)))
        for pattern in table.local:
            for module in modules_of(model, pattern).values():
                self._hooks.append(module.register_forward_pre_hook(self._enter_local))
                self._hooks.append(
                    module.register_forward_hook(self._leave_local, always_call=True)
                )

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        try:
            if output is not None and self.forward is not None:
                self.last = self.forward.end() or self.last
        finally:
            self.leave()

    def _begin_block(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self._is_paused:
                return
            if self.forward is None:
                raise ConfigError(
                    f"{name} runs outside of the forward pass of its model, which is split over "
                    "ranks: for gradient checkpointing use handle.checkpoint, as in "
                    "enable_gradient_checkpointing(handle.checkpoint)"
                )
            self.forward.begin_block(name)

        return hook

    def _end_block(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.forward is not None and not self.forward.has_attended:
                raise ConfigError(
                    f"{name} did not call F.scaled_dot_product_attention, so its attention was not "
                    "over the mesh: set_attention_backend('native'), and no cache of blocks"
                )

        return hook

    def _cut_inputs(self, names: Sequence[str], cuts: Mapping[str, Cut]) -> Callable[..., Any]:
        def change(name: str, value: Any) -> Any:
            assert self.forward is not None
            return self.forward.split(value, cuts[name], name) if name in cuts else value

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.forward is not None:
                return _changed(names, args, kwargs, change)

        return hook

    def _cut_outputs(self, name: str, cuts: Mapping[int, Cut]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if self.forward is None:
                return None
            parts = list(output)
            for place, cut in cuts.items():
                parts[place] = self.forward.split(parts[place], cut, f"output {place} of {name}")
            return tuple(parts)

        return hook

    def _gather(self, cut: Cut) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Any:
            if self.forward is not None:
                return self.forward.gather(output, cut)

        return hook

    def _enter_local(self, module: nn.Module, args: Any) -> None:
        if self.forward is not None:
            self.forward.enter_local()

    def _leave_local(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.forward is not None:
            self.forward.leave_local()


class _Begin:
    """The first hook of a forward pass: cuts inputs, and puts attention on the mesh."""

    def __init__(self, split_model: SplitModel, names: Sequence[str]) -> None:
        self._of, self._names = split_model, names

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        of, table = self._of, self._of.table
        if of.is_paused:
            return None
        of.leave()  # of a forward pass that a KeyboardInterrupt ended, which calls no hooks
        sparse = None if of.sparse is None else SparsePass(of.sparse)
        forward, cuts = Forward(of.mesh, table, of.wire, sparse), table.inputs.get("", {})
        known = {*cuts, *table.whole, *table.masks}

        def change(name: str, value: Any) -> Any:
            if name not in known and _holds_tensors(value):
                raise ConfigError(
                    f"{type(module).__name__} over ranks: the split table does not say what to do "
                    f"with the tensors of {name}; leave it out, or add it to `inputs` or `whole`"
                )
            if name in table.masks and value is not None:
                return forward.take_mask(value, table.masks[name], name)
            return forward.split(value, cuts[name], name) if name in cuts else value

        arguments = _changed(self._names, args, kwargs, change)
        of.enter(forward)
        return arguments


def _parameters(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of a module, in order."""
    return tuple(inspect.signature(module.forward).parameters)


def _changed(
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    change: Callable[[str, Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a module, each as `change` makes it of its name and value."""
    named = [names[place] if place < len(names) else "" for place in range(len(args))]
    return (
        tuple(change(name, value) for name, value in zip(named, args, strict=True)),
        {name: change(name, value) for name, value in kwargs.items()},
    )


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensors(one) for one in value)
    return isinstance(value, Tensor)
