"""Split models: wrappers (stand-ins) replace `forward` of the modules that a split table names."""

import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bascule.attention.api import AttentionMesh, AttentionOptions
from bascule.attention.kernels.registry import FunctionKernel
from bascule.comm.failures import leave
from bascule.comm.groups import this_world
from bascule.diffusers import recorded
from bascule.diffusers.arguments import SameInputs, holds_tensors, parameters_of
from bascule.diffusers.caches import Caches
from bascule.diffusers.forward_pass import ForwardPass, PassRecord, Shares
from bascule.diffusers.race import Race
from bascule.diffusers.sparse_layers import SparseConfig, SparseLayers, SparsePass
from bascule.diffusers.split_table import (
    Cut,
    Input,
    Keys,
    Link,
    Output,
    SplitTable,
    check_table,
    links_to,
    modules_of,
)
from bascule.diffusers.tables import TABLES
from bascule.errors import ConfigError
from bascule.sdpa import modes_of_others, num_modes, refuse_modes
from bascule.stand_in import StandIn


@dataclass(frozen=True, slots=True)
class Way:
    """The mesh and the settings with which a split model computes a call."""

    mesh: AttentionMesh
    sparse: SparseLayers | None = None  # plans of block-sparse attention
    compares: bool = True  # ranks compare their inputs when these have a new signature
    make_pass: Callable[..., ForwardPass] = ForwardPass
    race: Race | None = None  # passes without gradients that are faster alone are computed alone


@dataclass(slots=True)
class Role:
    """The tasks that the split table gives a module."""

    is_block: bool = False
    scope: tuple[str, ...] | Keys | None = None  # segments attended to; None: as the module around
    names: Sequence[str] = ()  # of the module's arguments, in order
    inputs: dict[str, Input] = field(default_factory=dict[str, Input])
    outputs: dict[int, Cut] = field(default_factory=dict[int, Cut])
    gather: Cut | None = None


_Value = TypeVar("_Value")
Check = Callable[["SplitModel", Callable[[], Any]], None]
"""Compares a call over the mesh with one process; its second argument repeats the call."""


class SplitModel:
    """A model that is split over ranks as a table says.

    Wrappers (stand-ins) belong to names of modules. A module that later replaces another one, such
    as an adapter, gets a wrapper before the next forward pass. Copies of the model are not split.

    Attributes:
        way: How the next calls are computed; None: unsplit, on this rank.
        blocks: By name, each block and the segments of its outputs.
        forward: The running pass over a mesh, if there is one.
        is_running: Whether a call of the model runs, over a mesh or on this rank alone.
        last: The attention of the last pass that was not compiled.
        hooked: Modules that may have hooks of other libraries.
    """

    def __init__(
        self,
        model: nn.Module,
        table: SplitTable,
        mesh: AttentionMesh | None,
        options: AttentionOptions | None = None,
        sparse: SparseConfig | None = None,
        input_tolerance: float = 0.0,
        *,
        check: Check | None = None,
    ) -> None:
        """Split a model; check the first call on each mesh if the table is not bascule's."""
        self.model, self.table = model, table
        self.options = options or AttentionOptions()
        kernel = self.options.kernel
        # a back end of diffusers that is the kernel: attention modules may be set to it, too
        self.backend = kernel.name if isinstance(kernel, FunctionKernel) else None
        if sparse is not None and table.copied:
            raise ConfigError(
                f"block-sparse attention deals tokens to the ranks, but every rank has "
                f"{' and '.join(table.copied)} of {type(model).__name__} whole: leave out sparse"
            )
        layers = None if sparse is None or mesh is None else SparseLayers(sparse, mesh)
        self.way = None if mesh is None else Way(mesh, layers)
        # For compiled code: the number by which operators find this model, and the last pass.
        self._number = 0 if sparse is None else this_world().add(self)
        self._last_ticket = torch.zeros(2, dtype=torch.int64)
        self.blocks: dict[str, tuple[nn.Module, tuple[Output, ...]]] = {}
        self.forward: ForwardPass | None = None
        self.is_running = False
        self.last: PassRecord | None = None
        self.inputs = SameInputs(model, input_tolerance)
        is_tested = any(table is tested for tested in TABLES.values())  # by tests of bascule
        self._check = None if is_tested else check
        self._checked = set[str]()  # names of meshes
        self._names = parameters_of(model)
        self._records: dict[object, PassRecord | None] = {}  # by mesh and signature of the inputs
        self._shares: dict[object, Shares] = {}  # by mesh, sparse or dense
        self._caches = Caches(model, table, lambda: self.forward and self.forward.mesh.whole)
        self._links: tuple[Link, ...] = ()
        self._stand_ins: list[StandIn] = []
        self._classes: dict[type[nn.Module], object] = {}  # the `forward` of each module's class
        self.hooked: list[nn.Module] = []
        self._model_stand_in: StandIn | None = None
        self._backend: Any = None  # name of ours among diffusers' attention back ends
        self._install()

    @property
    def is_split(self) -> bool:
        """True while the wrappers are in place."""
        return self._model_stand_in is not None

    @property
    def sparse(self) -> SparseLayers | None:
        """The plans of block-sparse attention, if calls use it."""
        return None if self.way is None else self.way.sparse

    @property
    def is_checked(self) -> bool:
        """True if the table agreed with one process on this mesh."""
        return self.way is not None and self.way.mesh.name in self._checked

    @is_checked.setter
    def is_checked(self, fits: bool) -> None:
        assert self.way is not None
        (self._checked.add if fits else self._checked.discard)(self.way.mesh.name)

    @property
    def has_cache(self) -> bool:
        """True if a cache may skip blocks; refuses a cache that ranks cannot use."""
        is_shared = self.way is not None and self.way.mesh.whole is not None
        return self._caches.any_used(self.hooked, is_shared)

    @property
    def plain_forward(self) -> Callable[..., Any]:
        """The model's `forward` without wrapper and hooks."""
        return self.model.forward if self._model_stand_in is None else self._model_stand_in.method

    def remove(self) -> None:
        """Remove all wrappers: the model is as it was before the split."""
        self._remove_stand_ins()
        self._caches.leave()
        if self._backend is not None:
            diffusers: Any = importlib.import_module("diffusers.models.attention_dispatch")
            registry = diffusers._AttentionBackendRegistry
            for table in (registry._backends, registry._constraints, registry._supported_arg_names):
                table.pop(self._backend, None)
            self._backend = None

    def switch(self, way: Way) -> None:
        """Switch later calls to another mesh, whose ranks compare their first inputs."""
        self.way = way
        self.inputs.restart()

    @contextmanager
    def taking(self, way: Way | None) -> Iterator[None]:
        """Compute calls within this scope in another way; None: unsplit, on this rank."""
        before, self.way = self.way, way
        try:
            yield
        finally:
            self.way = before

    @contextmanager
    def recomputing(self, forward: ForwardPass | None) -> Iterator[None]:
        """Recompute modules of an earlier call, in its pass over a mesh; None: on this rank."""
        was_split, before = self.is_split, (self.forward, self.is_running)
        if not was_split:
            self._install()
        self.forward, self.is_running = forward, True
        try:
            with nullcontext() if forward is None else forward.recomputing():
                yield
        except BaseException as error:
            leave(error, f"recomputation of {type(self.model).__name__}")
            raise
        finally:
            self.forward, self.is_running = before
            if not was_split:
                self.remove()

    # --- a call of the model ----------------------------------------------------------------------

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Prepare a compiled call: wrap replaced modules, check caches, compare inputs."""
        if modes := modes_of_others():
            refuse_modes(modes, "a compiled model")
        self._follow()
        if self.way is not None:
            named = dict(zip(self._names, args, strict=False)) | dict(kwargs)
            self._check_call(self.way, named, signature_of(named))
            self._check_first(self.way, self.plain_forward, args, kwargs)

    def _follow(self) -> None:
        """Renew all stand-ins if a module, a `forward` or a class's `forward` was replaced."""
        for parent, key, child in self._links:
            if parent._modules.get(key) is not child:
                return self._attach()
        for stand_in in self._stand_ins:
            above = vars(stand_in.owner).get(stand_in.name)
            # a second stand-in of ours may lie above it; anything else is a hook of others
            if above is not stand_in and getattr(above, "method", None) is not stand_in:
                return self._attach()
        for kind, forward in self._classes.items():
            if kind.forward is not forward:
                return self._attach()
        return None

    def _check_call(self, way: Way, named: Mapping[str, Any], signature: object) -> None:
        """Check the hooks of step caches, and compare the ranks' inputs if that is due."""
        whole = way.mesh.whole
        is_hooked = any(["_diffusers_hook" in vars(module) for module in self.hooked])
        if self._caches.is_on or is_hooked or "_is_cached" in vars(self.model):
            self._caches.prepare(self.hooked, whole is not None, is_sparse=way.sparse is not None)
        if way.compares and whole is not None:
            if (compare := self.inputs.comparison(whole, named, signature)) is not None:
                compare()

    def _call(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass of the model; the stand-in for its `forward`."""
        way = self.way
        if way is None or way.race is None or torch.compiler.is_compiling():
            return self._compute(way, forward, args, kwargs)
        named = dict(zip(self._names, args, strict=False)) | dict(kwargs)
        signature = signature_of(named)

        def alone() -> Any:
            self._check_call(way, named, (way.mesh.name, signature))
            return self._compute(None, forward, args, kwargs)

        split = partial(self._compute, way, forward, args, kwargs)
        may_race = not (torch.is_grad_enabled() or self.has_cache or self.sparse)
        return way.race.run(signature, split, alone) if may_race else split()

    def _compute(
        self, way: Way | None, forward: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Run a forward pass of the model in a way; None: unsplit, on this rank."""
        before = self.forward, self.is_running
        current: ForwardPass | None = None
        try:
            if way is None:
                self.forward, self.is_running = None, True
                return forward(*args, **kwargs)
            current = self._begin(way, args, kwargs)
            if not torch.compiler.is_compiling():
                forward = self.plain_forward  # read again: the class may have another by now
                self.forward = current
                self._check_first(way, forward, args, kwargs)
            cuts = self.table.inputs.get("", {})
            shares = current.cut_arguments(self._names, cuts, args, kwargs)
            self.forward, self.is_running = current, True
            with current if current.is_around and not current.is_inserted else nullcontext():
                output = forward(*shares[0], **shares[1])
            if not torch.compiler.is_compiling():
                signature = current.signature
                if current.shapes is not None:
                    record = current.end()
                    self._records[signature] = record or self._records.get(signature)
                # without a record, a compiler traced only the beginning of the pass
                self.last = self._records.get(signature) or self.last
            elif current.sparse is not None:
                self._last_ticket = recorded.end(current.sparse.ticket)
            return output
        except BaseException as error:  # ranks that wait for this one read the reason
            if way is not None and not torch.compiler.is_compiling():
                leave(error, f"forward pass of {type(self.model).__name__}")
            raise
        finally:
            self.forward, self.is_running = before
            if current is not None and current.is_inserted:
                current.take_out()

    def _check_first(
        self, way: Way, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Check the table by the first call on a mesh; after a refusal, by the next one, too."""
        check = self._check
        if check is None or way.mesh.whole is None or self.is_checked or self.has_cache:
            return
        # The table says nothing about sparse blocks.
        with self.taking(replace(way, sparse=None, race=None)):
            self.is_checked = True
            try:
                check(self, partial(self._call, forward, *args, **kwargs))
            except BaseException:
                self.is_checked = False
                raise

    def _begin(self, way: Way, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ForwardPass:
        named = dict(zip(self._names, args, strict=False)) | dict(kwargs)
        if torch.compiler.is_compiling():
            self._check_inputs(way, named)
            sparse = None
            if way.sparse is not None:
                ticket = recorded.begin(self._last_ticket, self._number)
                sparse = SparsePass(way.sparse, ticket)
            current = ForwardPass(way.mesh, self.table, self.options, sparse)
            current.is_around = not current.is_whole
            return current
        if self.forward is not None and self.forward.thread != threading.get_ident():
            raise ConfigError(
                f"{type(self.model).__name__} runs in another thread: call it from one at a time"
            )
        sparse = None if way.sparse is None else SparsePass(way.sparse)
        mesh_key = way.mesh.name, sparse is not None
        signature = mesh_key, signature_of(named)
        if signature not in self._records:
            self._check_inputs(way, named)
        self._follow()
        self._check_call(way, named, signature)
        shares = self._shares.setdefault(mesh_key, {})
        settings = way.mesh, self.table, self.options, sparse, shares
        current = way.make_pass(*settings, signature=signature)
        # Neither plans of sparse attention nor what a cache leaves out follow from the signature.
        is_counted = sparse is not None or self._caches.is_on or signature not in self._records
        if is_counted and current.shapes is None:
            current.shapes = Counter()
        current.thread, current.depth = threading.get_ident(), num_modes()
        if self._number or not self.blocks:
            current.is_around = current.shapes is not None or not current.is_whole
        if sparse is not None:
            _register(current)
        return current

    def begin_recorded(self) -> Tensor:
        """Begin a pass of block-sparse attention in compiled code; return its first ticket."""
        assert self.way is not None and self.way.sparse is not None
        sparse = SparsePass(self.way.sparse)
        current = ForwardPass(self.way.mesh, self.table, self.options, sparse)
        self.way.sparse.hold(current)
        return _register(current)

    def _check_inputs(self, way: Way, named: Mapping[str, Any]) -> None:
        """Refuse inputs that the table does not know, or excludes."""
        table, name = self.table, type(self.model).__name__
        for argument, value in named.items():
            if argument in table.refused and value is not None:
                raise ConfigError(f"{name} over ranks, with {argument}: {table.refused[argument]}")
            in_table = *table.inputs.get("", ()), *table.replicated, *table.refused
            if argument in in_table or way.mesh.whole is None or not holds_tensors(value):
                continue
            advice = "leave it out, or add it to `inputs` or `replicated`"
            if isinstance(value, Mapping):  # as joint_attention_kwargs
                key = next(key for key, entry in value.items() if holds_tensors(entry))
                argument, advice = f"{argument}[{key!r}]", "leave it out"
            if "ip_" in argument:
                advice = (
                    "call unload_ip_adapter() and leave out ip_adapter_image, or share branches "
                    "(guidance_degree) and images (data_degree) over the ranks instead"
                )
            raise ConfigError(
                f"{name} over ranks: the split table does not say what to do with the tensors of "
                f"{argument}; {advice}"
            )

    # --- a call of one of its modules -------------------------------------------------------------

    def _run(
        self, name: str, role: Role, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a module in its role; the stand-in for its `forward`."""
        current = self.forward
        if current is None:
            if role.is_block and not self.is_running:
                raise ConfigError(
                    f"{name} runs outside of the forward pass of its model, which is split over "
                    "ranks: call the model itself, which must not be a generator; to checkpoint, "
                    "call enable_gradient_checkpointing(handle.checkpoint)"
                )
            return forward(*args, **kwargs)
        if role.is_block:
            current.has_attended = False
            if current.sparse is not None and not torch.compiler.is_compiling():
                current.sparse.begin_block(name, is_again=current.is_recomputed)
        inputs: tuple[Sequence[Any], dict[str, Any]] = args, kwargs
        if role.inputs:
            inputs = current.cut_arguments(role.names, role.inputs, args, kwargs)
        if role.scope is not None:
            current.scopes.append(role.scope)
        try:
            output = forward(*inputs[0], **inputs[1])
        finally:
            if role.scope is not None:
                current.scopes.pop()
        if role.is_block:
            has_attended = current.has_attended or current.is_whole
            if has_attended and not torch.compiler.is_compiling():
                current.attended.append(name)
            if self._caches.is_on or not has_attended:
                self._caches.end_block(name, has_attended, current.sparse is not None)
        if role.outputs:
            cuts = role.outputs[0] if isinstance(output, Tensor) else role.outputs
            output = current.cut(output, cuts, f"the output of {name}")
        return output if role.gather is None else current.gather(output, role.gather)

    def _run_attention(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run an attention module within the pass's mode, below the hooks of others.

        Function modes that these hooks enter are then around ours, which shows them all tokens.
        """
        current = self.forward
        if current is None or (current.is_whole and current.shapes is None):
            return forward(*args, **kwargs)
        processor: Any = getattr(module, "processor", None)
        backend, is_compiling = getattr(processor, _BACKEND, ""), torch.compiler.is_compiling()
        is_ours = not is_compiling and self._backend and backend in (None, self.backend)
        if is_compiling and (modes := modes_of_others()):
            refuse_modes(modes, "compiled attention")
        before, current.has_attended = current.has_attended, False
        if is_ours:  # our back end enters the mode only around its one attention call
            processor._attention_backend = self._backend
            try:
                output = forward(*args, **kwargs)
            finally:
                processor._attention_backend = backend
        elif current.is_around and (is_compiling or current.is_innermost()):
            output = forward(*args, **kwargs)
        else:
            with current:
                output = forward(*args, **kwargs)
        if not (current.has_attended or current.is_whole) and current.scopes[-1]:
            raise ConfigError(_why_local(name, processor))
        current.has_attended |= before
        return output

    # --- stand-ins --------------------------------------------------------------------------------

    def _install(self) -> None:
        check_model(self.model, self.table)
        try:
            self._attach()
        except BaseException:
            self.remove()
            raise

    def _remove_stand_ins(self) -> None:
        for stand_in in (*reversed(self._stand_ins), self._model_stand_in):
            if stand_in is not None:
                stand_in.remove()
        self._stand_ins, self._model_stand_in = [], None

    def _attach(self) -> None:
        """Replace all stand-ins by new ones, for the modules that the table names now."""
        model, table, roles = self.model, self.table, dict[str, Role]()
        modules: dict[str, nn.Module] = {}

        def roles_in(patterns: Mapping[str, _Value]) -> Iterator[tuple[str, Role, _Value]]:
            for pattern, value in patterns.items():
                for name, module in modules_of(model, pattern).items():
                    modules[name] = module
                    yield name, roles.setdefault(name, Role()), value

        self.blocks = {}
        for name, role, segments in roles_in(table.blocks):
            role.is_block, self.blocks[name] = True, (modules[name], segments)
        of_modules = {pattern: cuts for pattern, cuts in table.inputs.items() if pattern}
        for name, role, cuts in roles_in(of_modules):
            role.names, role.inputs = parameters_of(modules[name]), role.inputs | dict(cuts)
        for _, role, places in roles_in(table.outputs):
            role.outputs |= places
        for _, role, cut in roles_in(table.gathers):
            role.gather = cut
        for _, role, scope in roles_in(table.attends):
            role.scope = scope
        inner = [name for name, role in roles.items() if role.is_block or role.scope]
        attending = {
            f"{name}.{path}" if path else name: module
            for name in inner
            for path, module in _attending(modules[name]).items()
        }
        processors = [getattr(module, "processor", None) for module in attending.values()]
        if self._backend is None and any(hasattr(processor, _BACKEND) for processor in processors):
            self._backend = _register_backend(self)
        self._remove_stand_ins()
        self._names = parameters_of(model)
        self._model_stand_in = StandIn(*_forward_holder(model), self._call)
        within = [child for module in attending.values() for child in module.children()]
        self.hooked = [model, *modules.values(), *attending.values(), *within]
        kinds = {type(module) for module in (model, *modules.values())}
        self._classes = {kind: kind.forward for kind in kinds}
        # With block-sparse attention every call counts, so the mode is around the whole model.
        for name, module in attending.items() if not self._number else ():
            run = partial(self._run_attention, name, module)
            self._stand_ins.append(StandIn(*_forward_holder(module), run))
        for name, role in roles.items():
            # Dynamo caches a limited number of graphs for each code object, and needs one for each
            # module with stand-ins within: these get copies of the code.
            is_apart = any(other.startswith(f"{name}.") for other in (*roles, *attending))
            run = MethodType(_copy_of(SplitModel._run), self) if is_apart else self._run
            self._stand_ins.append(StandIn(modules[name], "forward", partial(run, name, role)))
        self._links = links_to(model, [*roles, *attending])


def _register(current: ForwardPass) -> Tensor:
    """Register a pass of block-sparse attention for operators; return its first ticket."""
    assert current.sparse is not None
    current.sparse.ticket[0] = this_world().add(current)
    return current.sparse.ticket.clone()


def _copy_of(function: Any) -> Any:
    """Return a copy of a function, with a code object of its own."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def signature_of(inputs: Any) -> object:
    """Return names, types, shapes and dtypes of inputs; leave out numbers, which steps change."""
    if isinstance(inputs, Tensor):
        return type(inputs), inputs.shape, inputs.dtype
    if isinstance(inputs, Mapping):
        parts = list[object]()
        for name, value in inputs.items():
            if isinstance(value, Tensor):  # without a call
                parts += [name, type(value), value.shape, value.dtype]
            else:
                parts += [name, signature_of(value)]
        return tuple(parts)
    if isinstance(inputs, list | tuple):
        return tuple([signature_of(value) for value in inputs])
    return type(inputs)


def check_model(model: nn.Module, table: SplitTable) -> None:
    """Refuse a model that is split already, or that a table does not fit."""
    for owner, name in _holders(model):
        around = getattr(getattr(owner, name, None), "around", None)
        if isinstance(getattr(around, "__self__", None), SplitModel):
            raise ConfigError(
                f"{type(model).__name__} is split over ranks already: call undo() of its handle"
            )
    for pattern in (*table.blocks, *table.outputs, *table.gathers, *table.attends):
        if pattern:
            modules_of(model, pattern)
    check_table(model, table)


def _attending(module: nn.Module) -> dict[str, nn.Module]:
    """Return the attention modules of diffusers within a module, by path; without any, itself."""
    named = module.named_modules()
    within = {path: part for path, part in named if path and hasattr(part, "set_processor")}
    return within or {"": module}


_BACKEND = "_attention_backend"


def _why_local(name: str, processor: Any) -> str:
    """Explain why a module did not attend over the mesh, and say what to do."""
    advice, backend = "let it call that function", getattr(processor, _BACKEND, "")
    if processor is not None:
        kind = type(processor).__name__
        advice = f"its processor {kind} attends by itself: {advice}, or use set_attn_processor"
    if backend is None:  # the one that is active in all of diffusers
        diffusers: Any = importlib.import_module("diffusers.models.attention_dispatch")
        backend = diffusers._AttentionBackendRegistry.get_active_backend()[0]
    backend = str(getattr(backend, "value", backend))
    if backend and "native" not in backend:
        advice = f"its back end is {backend}: call set_attention_backend('native')"
    cause = "F.scaled_dot_product_attention, so its attention was not over the mesh"
    return f"{name} did not call {cause}: {advice}"


def _register_backend(split: SplitModel) -> Any:
    """Register a diffusers back end that runs the default one inside the mode of a pass."""
    diffusers: Any = importlib.import_module("diffusers.models.attention_dispatch")
    label = f"bascule {id(split)}"
    name = str.__new__(diffusers.AttentionBackendName, label)  # this enum is closed
    name._name_ = name._value_ = label

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        args = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        # NATIVE calls the function that the mode replaces. A kernel wins over the back end that is
        # active in all of diffusers.
        backend = diffusers.AttentionBackendName.NATIVE if split.backend else None
        forward = split.forward
        if forward is None or (forward.is_around and forward.is_innermost()):
            forward = nullcontext()
        with forward:
            return diffusers.dispatch_attention_fn(*args, backend=backend)

    diffusers._AttentionBackendRegistry.register(name)(attend)
    return name


def _forward_holder(model: nn.Module) -> tuple[Any, str]:
    """Return owner and name of a module's `forward` below hooks, which undo stand-ins above."""
    for owner, name in _holders(model):
        method = getattr(owner, name, None)
        while isinstance(method, StandIn):
            method = method.method
        if getattr(method, "__self__", None) is model:
            return owner, name
    return model, "forward"


def _holders(model: nn.Module) -> list[tuple[Any, str]]:
    first = getattr(vars(model).get("_diffusers_hook"), "_fn_refs", None) or [None]
    of_hooks = [(first[0], name) for name in ("original_forward", "forward")]
    return [(model, "_old_forward"), *of_hooks, (model, "forward")]
