"""The torch hooks by which a split table acts on a model; removing them undoes it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bascule.attention.api import AttentionMesh, AttentionOptions
from bascule.comm.failures import leave
from bascule.diffusers.arguments import (
    SameInputs,
    changed,
    form_of,
    holds_tensors,
    parameters_of,
)
from bascule.diffusers.caches import Caches
from bascule.diffusers.forward_pass import CountingForward, Forward
from bascule.diffusers.module_hooks import Hook, Register, after, before
from bascule.diffusers.running import Running
from bascule.diffusers.sparse_config import SparseConfig
from bascule.diffusers.sparse_layers import SparseLayers, SparsePass
from bascule.diffusers.split_table import (
    Cut,
    Keys,
    Link,
    Mask,
    SplitTable,
    check_table,
    links_to,
    modules_of,
)
from bascule.diffusers.work import Attended
from bascule.errors import ConfigError
from bascule.sdpa.call_mode import error_of, is_called


class SplitModel:
    """A model with a table's hooks.

    Hooks belong to names: what takes the place of a module later, as an adapter does, gets them
    before the next forward pass. Copies of the model do not have them.

    Attributes:
        model: As it was given.
        table: What is cut and gathered.
        mesh: The ranks.
        options: How rows of attention travel, and what computes.
        sparse: The plans of block-sparse attention; None for dense attention.
        blocks: By name, each block of the table, and the segments of what it returns.
        last: What the last forward pass that ended well attended to, unless compiled.
        is_alone: Whether calls that begin now compute all tokens on this rank; see `over`.
    """

    def __init__(
        self,
        model: nn.Module,
        table: SplitTable,
        mesh: AttentionMesh,
        options: AttentionOptions | None = None,
        sparse: SparseConfig | None = None,
    ) -> None:
        self.model, self.table, self.mesh = model, table, mesh
        self.options = options or AttentionOptions()
        self.sparse = None if sparse is None else SparseLayers(sparse, mesh)
        self.blocks: dict[str, tuple[nn.Module, tuple[str | tuple[str, ...], ...]]] = {}
        self.last: Attended | None = None
        self.is_alone = False
        self._running = Running(model)
        self._is_paused = self._is_over = False
        self.inputs = SameInputs(model)
        self._names = parameters_of(model)
        self._known: dict[object, Attended] = {}  # by form of inputs
        self._caches = Caches(model, table, lambda: self.forward)
        self._links: tuple[Link, ...] = ()
        self._hooks: list[RemovableHandle] = []
        self._hooks_of_modules: list[RemovableHandle] = []
        self._install()

    @property
    def forward(self) -> Forward | None:
        """The forward pass that runs, if any."""
        return self._running.current

    @property
    def is_running(self) -> bool:
        """Return whether a forward pass runs, in any thread."""
        return self._running.is_any

    @property
    def is_split(self) -> bool:
        """Return whether it has its hooks."""
        return bool(self._hooks)

    @property
    def has_cache(self) -> bool:
        """Return whether a cache may leave out blocks.

        Raises:
            ConfigError: Ranks might leave out different ones.
        """
        return self._caches.are_used([block for block, _ in self.blocks.values()])

    def remove(self) -> None:
        """Take the hooks away; the model is as it was."""
        self._running.end_all()
        for hook in (*self._hooks, *self._hooks_of_modules):
            hook.remove()
        self._hooks.clear()
        self._hooks_of_modules.clear()
        self._caches.leave()

    @contextmanager
    def resumed(self, forward: Forward) -> Iterator[None]:
        """Compute parts of an earlier forward pass again, also after `remove`."""
        was_split = self.is_split
        if not was_split:
            self._install()
        try:
            with self._running.resumed(forward):
                yield
        except BaseException as error:
            self._tell(error, "recomputation")
            raise
        finally:
            if not was_split:
                self.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model computes all tokens, without communication."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def over(self, mesh: AttentionMesh | None) -> Iterator[None]:
        """Calls of the model within are shared by the ranks of a mesh; None: by no others.

        What they are given is known to be the same.
        """
        before = self.mesh, self.is_alone, self._is_over
        self.mesh, self.is_alone, self._is_over = mesh or self.mesh, mesh is None, True
        try:
            yield
        finally:
            self.mesh, self.is_alone, self._is_over = before

    @contextmanager
    def using(self, sparse: SparseLayers) -> Iterator[None]:
        """Other plans, and their mesh."""
        before = self.mesh, self.sparse
        self.mesh, self.sparse = sparse.mesh, sparse
        try:
            yield
        finally:
            self.mesh, self.sparse = before

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        """Follow replaced modules, look at caches, compare inputs of a new form; return the form.

        Raises:
            ConfigError: A module is gone, or a cache is on that ranks cannot use.
            CommError: Ranks are given different inputs.
        """
        if any(parent._modules.get(key) is not child for parent, key, child in self._links):
            self._hook_modules()
        blocks = [block for block, _ in self.blocks.values()]
        self._caches.prepare(blocks, is_sparse=self.sparse is not None)
        inputs = dict(zip(self._names, args, strict=False)) | dict(kwargs)
        form = self.mesh.degrees, form_of(inputs)
        if not (self._is_paused or self._is_over):
            self.inputs.check(self.mesh.whole, inputs, form)
        return form

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Forward | None:
        """A call of the model has begun: its forward pass, yet to be entered; None while paused.

        Raises:
            ConfigError: The model runs in another thread, or has a cache that ranks cannot use.
            CommError: Ranks are given different inputs.
        """
        self._running.forget_ended()
        if self._is_paused or self.is_alone:
            return None
        sparse = None if self.sparse is None else SparsePass(self.sparse)
        given = self.model, self.mesh, self.table, self.options, sparse
        if torch.compiler.is_compiling():
            return Forward(*given)
        form = self.prepare(args, kwargs)
        # Neither plans of sparse attention nor what a cache leaves out follow from the form.
        counts = form not in self._known or sparse is not None or self._caches.is_on
        return CountingForward(*given, form=form) if counts else Forward(*given, form=form)

    def enter(self, forward: Forward) -> None:
        """What follows belongs to this forward pass."""
        self._running.begin(forward)

    def _install(self) -> None:
        check_model(self.model, self.table)
        begin = _Begin(self, parameters_of(self.model))
        self._hooks.append(self.model.register_forward_pre_hook(begin, with_kwargs=True))
        self._hooks.append(self.model.register_forward_hook(Hook(self._end), always_call=True))
        try:
            self._hook_modules()
        except BaseException:
            self.remove()
            raise

    def _hook_modules(self) -> None:
        """Hook the modules that now have the names of the table, and those alone."""
        model, table = self.model, self.table
        blocks = {
            name: (module, segments)
            for pattern, segments in table.blocks.items()
            for name, module in modules_of(model, pattern).items()
        }
        wanted: list[tuple[str, nn.Module, Register]] = []
        for name, (block, _) in blocks.items():
            wanted.append((name, block, before(self._begin_block(name))))
            wanted.append((name, block, after(self._end_block(name))))
        for pattern, cuts in table.inputs.items():
            for name, module in modules_of(model, pattern).items() if pattern else ():
                cut = self._cut_inputs(parameters_of(module), cuts)
                wanted.append((name, module, before(cut, with_kwargs=True)))
        for pattern, cuts in table.outputs.items():
            for name, module in modules_of(model, pattern).items():
                wanted.append((name, module, after(self._cut_outputs(name, cuts))))
        for pattern, cut in table.gathers.items():
            for name, module in modules_of(model, pattern).items():
                wanted.append((name, module, after(self._gather(cut))))
        for pattern, segments in table.attends.items():
            for name, module in modules_of(model, pattern).items():
                wanted.append((name, module, before(self._enter_part(segments))))
                wanted.append((name, module, after(self._leave_part, always_call=True)))
        for hook in self._hooks_of_modules:
            hook.remove()
        self._hooks_of_modules = [register(module) for _, module, register in wanted]
        self._links = links_to(model, [name for name, _, _ in wanted])
        self.blocks = blocks

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._tell(error_of(module), "forward pass")
        forward = self._running.of_call()
        if forward is None:
            return
        try:
            if output is not None and not torch.compiler.is_compiling():
                attended = forward.end()
                if attended is not None:
                    self._known[forward.form] = attended
                self.last = self._known.get(forward.form, self.last)
        finally:
            self._running.end(forward)

    def _tell(self, error: BaseException | None, where: str) -> None:
        """Let ranks that wait for this one know that it does not come."""
        if error is not None:
            leave(error, f"{where} of {type(self.model).__name__}")

    def _begin_block(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self._is_paused:
                return
            forward = self.forward
            if forward is None and self.is_alone and is_called(self.model):
                return
            if forward is None:
                raise ConfigError(
                    f"{name} runs outside of the forward pass of its model, which is split over "
                    "ranks: call the model itself, which must not be a generator; for gradient "
                    "checkpointing use handle.checkpoint, as in "
                    "enable_gradient_checkpointing(handle.checkpoint)"
                )
            forward.begin_block(name)

        return hook

    def _end_block(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            forward = self.forward
            if forward is not None:
                forward.end_block()
                self._caches.end_block(name, forward.has_attended or not forward.sees_attention())

        return hook

    def _cut_inputs(
        self, names: Sequence[str], cuts: Mapping[str, Cut | Mask]
    ) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            forward = self.forward
            if forward is None:
                return None

            def change(name: str, value: Any) -> Any:
                return forward.split(value, cuts[name], name) if name in cuts else value

            return changed(names, args, kwargs, change)

        return hook

    def _cut_outputs(self, name: str, cuts: Mapping[int, Cut]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            forward = self.forward
            if forward is None:
                return None
            is_one = isinstance(output, Tensor)
            parts = [output] if is_one else list(output)
            for place, cut in cuts.items():
                parts[place] = forward.split(parts[place], cut, f"output {place} of {name}")
            return parts[0] if is_one else tuple(parts)

        return hook

    def _gather(self, cut: Cut) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Any:
            forward = self.forward
            return None if forward is None else forward.gather(output, cut)

        return hook

    def _enter_part(self, segments: tuple[str, ...] | Keys) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            forward = self.forward
            if forward is not None:
                forward.enter_part(segments)

        return hook

    def _leave_part(self, module: nn.Module, args: Any, output: Any) -> None:
        forward = self.forward
        if forward is not None:
            forward.leave_part()


def check_model(model: nn.Module, table: SplitTable) -> None:
    """Refuse a model that is split already, or that a table does not fit.

    Raises:
        ConfigError: Says which.
    """
    if any(isinstance(hook, _Begin) for hook in model._forward_pre_hooks.values()):
        raise ConfigError(
            f"{type(model).__name__} is split over ranks already: call undo() of its handle"
        )
    for pattern in (*table.blocks, *table.outputs, *table.gathers, *table.attends):
        if pattern:
            modules_of(model, pattern)
    check_table(model, table)


class _Begin(Hook):
    """The first hook of a forward pass: cuts inputs, and puts attention on the mesh."""

    def __init__(self, split_model: SplitModel, names: Sequence[str]) -> None:
        super().__init__(self._begin)
        self._of, self._names = split_model, names

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        of, table = self._of, self._of.table
        forward, cuts = of.begin(args, kwargs), table.inputs.get("", {})
        if forward is None:
            return None
        known = {*cuts, *table.replicated, *table.refused}

        def change(name: str, value: Any) -> Any:
            if name not in known and holds_tensors(value):
                raise ConfigError(
                    f"{type(module).__name__} over ranks: the split table does not say what to do "
                    f"with the tensors of {name}; leave it out, or add it to `inputs` or "
                    "`replicated`"
                )
            if name in table.refused and value is not None:
                raise ConfigError(
                    f"{type(module).__name__} over ranks, with {name}: {table.refused[name]}"
                )
            return forward.split(value, cuts[name], name) if name in cuts else value

        arguments = changed(self._names, args, kwargs, change)
        of.enter(forward)
        return arguments
