"""A model with stand-ins for `forward` of the modules that a split table names."""

import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

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
from bascule.diffusers.tables import is_tested
from bascule.errors import ConfigError
from bascule.sdpa import modes_of_others, num_modes, refuse_modes
from bascule.stand_in import StandIn


@dataclass(frozen=True, slots=True)
class Way:
    """The way in which calls of a split model are computed."""

    mesh: AttentionMesh
    sparse: SparseLayers | None = None  # plans of block-sparse attention
    compares: bool = True  # the inputs of ranks, at the first call of a form
    make_pass: Callable[..., ForwardPass] = ForwardPass


@dataclass(slots=True)
class Role:
    """What the table asks of a module."""

    is_block: bool = False
    scope: tuple[str, ...] | Keys | None = None  # attended to; None: as in the module around
    names: Sequence[str] = ()  # of its arguments, in order
    inputs: dict[str, Input] = field(default_factory=dict[str, Input])
    outputs: dict[int, Cut] = field(default_factory=dict[int, Cut])
    gather: Cut | None = None


Check = Callable[["SplitModel", Callable[[], Any]], None]
"""Compares a call over the mesh, given by a function that repeats it, with one process."""


class SplitModel:
    """A model that is split by a table.

    Stand-ins belong to names: what takes the place of a module later, as an adapter does, gets one
    before the next forward pass. Copies of the model are whole.

    Attributes:
        way: How calls that begin now are computed; None: whole, on this rank.
        blocks: Modules by name, with the segments of what each returns.
        forward: The pass over a mesh that runs now, if there is one.
        is_running: Whether a call of the model runs, over a mesh or alone.
        last: What the last pass that was not compiled attended to.
        hooked: Modules that may have hooks of others.
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
        """Split a model; its first call on each mesh is checked if the table is not ours."""
        self.model, self.table = model, table
        self.options = options or AttentionOptions()
        kernel = self.options.kernel
        # that a module may also be set to
        self.backend = kernel.name if isinstance(kernel, FunctionKernel) else None
        if sparse is not None and table.copied:
            raise ConfigError(
                f"block-sparse attention deals tokens to the ranks, and every rank has "
                f"{' and '.join(table.copied)} of {type(model).__name__} whole: leave out sparse"
            )
        layers = None if sparse is None or mesh is None else SparseLayers(sparse, mesh)
        self.way = None if mesh is None else Way(mesh, layers)
        # For compiled code: the number by which it finds this, and the pass that the next follows.
        self._number = 0 if sparse is None else this_world().add(self)
        self._last_ticket = torch.zeros(2, dtype=torch.int64)
        self.blocks: dict[str, tuple[nn.Module, tuple[Output, ...]]] = {}
        self.forward: ForwardPass | None = None
        self.is_running = False
        self.last: PassRecord | None = None
        self.inputs = SameInputs(model, input_tolerance)
        self._check = None if is_tested(table) else check
        self._checked = set[str]()  # names of meshes
        self._names = parameters_of(model)
        self._records: dict[object, PassRecord | None] = {}  # by form of inputs
        self._shares: dict[object, Shares] = {}  # by place on a mesh
        self._caches = Caches(model, table, lambda: self.forward and self.forward.mesh.whole)
        self._links: tuple[Link, ...] = ()
        self._stand_ins: list[StandIn] = []
        self._classes: dict[type[nn.Module], object] = {}  # classes of modules, and their `forward`
        self.hooked: list[nn.Module] = []
        self._of_model: StandIn | None = None
        self._backend: Any = None  # of attention, as diffusers names it
        self._install()

    @property
    def is_split(self) -> bool:
        """True while its stand-ins are there."""
        return self._of_model is not None

    @property
    def sparse(self) -> SparseLayers | None:
        """The plans of block-sparse attention."""
        return None if self.way is None else self.way.sparse

    @property
    def is_checked(self) -> bool:
        """True if the table was compared with one process on this mesh, and fits."""
        return self.way is not None and self.way.mesh.name in self._checked

    @is_checked.setter
    def is_checked(self, fits: bool) -> None:
        assert self.way is not None
        (self._checked.add if fits else self._checked.discard)(self.way.mesh.name)

    @property
    def has_cache(self) -> bool:
        """True if a cache may leave out blocks; refuses one that ranks cannot use."""
        is_over = self.way is not None and self.way.mesh.whole is not None
        return self._caches.are_used(self.hooked, is_over)

    @property
    def plain_forward(self) -> Callable[..., Any]:
        """The `forward` that is split, below hooks."""
        return self.model.forward if self._of_model is None else self._of_model.method

    def remove(self) -> None:
        """Take the stand-ins away; the model is as it was."""
        self._take_away()
        self._caches.leave()
        if self._backend is not None:
            diffusers: Any = importlib.import_module("diffusers.models.attention_dispatch")
            registry = diffusers._AttentionBackendRegistry
            for table in (registry._backends, registry._constraints, registry._supported_arg_names):
                table.pop(self._backend, None)
            self._backend = None

    def use(self, way: Way) -> None:
        """Compute on another mesh from now on; its ranks compare their first inputs."""
        self.way = way
        self.inputs.restart()

    @contextmanager
    def taking(self, way: Way | None) -> Iterator[None]:
        """Compute the calls within in another way; None: whole, on this rank."""
        before, self.way = self.way, way
        try:
            yield
        finally:
            self.way = before

    @contextmanager
    def recomputing(self, forward: ForwardPass | None) -> Iterator[None]:
        """Compute modules of an earlier call again: of its pass over a mesh, or alone."""
        was_split, before = self.is_split, (self.forward, self.is_running)
        if not was_split:
            self._install()
        self.forward, self.is_running = forward, True
        try:
            with nullcontext() if forward is None else forward.again():
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
        """Prepare a compiled call: follow replaced modules and caches, compare inputs."""
        if modes := modes_of_others():
            refuse_modes(modes, "a compiled model")
        self._follow()
        if self.way is not None:
            named = dict(zip(self._names, args, strict=False)) | dict(kwargs)
            self._compare(self.way, named, form_of(named))
            assert self._of_model is not None
            self._check_first(self.way, self._of_model.method, args, kwargs)

    def _follow(self) -> None:
        """Put stand-ins where modules were replaced, and look at the caches."""
        for parent, key, child in self._links:
            if parent._modules.get(key) is not child:
                return self._place()
        for one in self._stand_ins:
            above = vars(one.owner).get(one.name)  # a hook of others; or another stand-in of ours
            if above is not one and getattr(above, "method", None) is not one:
                return self._place()
        for kind, forward in self._classes.items():
            if kind.forward is not forward:  # somebody replaced the class's own
                return self._place()
        return None

    def _compare(self, way: Way, named: Mapping[str, Any], form: object) -> None:
        """Look at the caches, and compare the inputs of ranks where that is to be done."""
        whole = way.mesh.whole
        is_hooked = ["_diffusers_hook" in vars(module) for module in self.hooked]
        if self._caches.is_on or True in is_hooked or "_is_cached" in vars(self.model):
            self._caches.prepare(self.hooked, whole is not None, is_sparse=way.sparse is not None)
        if way.compares and whole is not None:
            if (compare := self.inputs.comparison(whole, named, form)) is not None:
                compare()

    def _call(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass of the model; takes the place of its `forward`."""
        before, way = (self.forward, self.is_running), self.way
        current: ForwardPass | None = None
        try:
            if way is None:
                self.forward, self.is_running = None, True
                return forward(*args, **kwargs)
            current = self._begin(way, args, kwargs)
            if not torch.compiler.is_compiling():
                forward = self.plain_forward  # as it is now: a class may have a new one
                self.forward = current
                if self._check is not None:
                    self._check_first(way, forward, args, kwargs)
            cuts = self.table.inputs.get("", {})
            shares = current.cut_arguments(self._names, cuts, args, kwargs)
            self.forward, self.is_running = current, True
            with current if current.is_around and not current.is_inserted else nullcontext():
                output = forward(*shares[0], **shares[1])
            if not torch.compiler.is_compiling():
                self._end(current)
            elif current.sparse is not None:
                self._last_ticket = recorded.end(current.sparse.ticket)
            return output
        except BaseException as error:  # ranks that wait for this one read that it does not come
            if way is not None and not torch.compiler.is_compiling():
                leave(error, f"forward pass of {type(self.model).__name__}")
            raise
        finally:
            self.forward, self.is_running = before
            if current is not None and current.is_inserted:
                current.take_out()

    def _check_first(
        self,
        way: Way,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Check the table by the first call on a mesh; what was refused stays refused."""
        is_due = self._check is not None and way.mesh.whole is not None
        if not is_due or self.is_checked or self.has_cache:
            return
        with self.taking(replace(way, sparse=None)):  # its choice of blocks is not the table's
            self.is_checked = True
            try:
                assert self._check is not None
                self._check(self, partial(self._call, forward, *args, **kwargs))
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
                f"{type(self.model).__name__} runs in another thread, and its ranks attend "
                "together: let one thread at a time call it"
            )
        sparse = None if way.sparse is None else SparsePass(way.sparse)
        place = way.mesh.name, sparse is not None
        form = place, form_of(named)
        if form not in self._records:
            self._check_inputs(way, named)
        self._follow()
        self._compare(way, named, form)
        shares = self._shares.setdefault(place, {})
        current = way.make_pass(way.mesh, self.table, self.options, sparse, shares, form=form)
        # Neither plans of sparse attention nor what a cache leaves out follow from the form.
        is_counted = sparse is not None or self._caches.is_on or form not in self._records
        if is_counted and current.shapes is None:
            current.shapes = Counter()
        current.thread, current.depth = threading.get_ident(), num_modes()
        if self._number or not self.blocks:
            current.is_around = current.shapes is not None or not current.is_whole
        if sparse is not None:
            _numbered(current)
        return current

    def begin_recorded(self) -> Tensor:
        """Begin a pass of block-sparse attention in compiled code; return its first ticket."""
        assert self.way is not None and self.way.sparse is not None
        sparse = SparsePass(self.way.sparse)
        current = ForwardPass(self.way.mesh, self.table, self.options, sparse)
        self.way.sparse.hold(current)
        return _numbered(current)

    def _check_inputs(self, way: Way, named: Mapping[str, Any]) -> None:
        """Refuse inputs that the table does not know, or excludes."""
        table, name = self.table, type(self.model).__name__
        for argument, value in named.items():
            if argument in table.refused and value is not None:
                raise ConfigError(f"{name} over ranks, with {argument}: {table.refused[argument]}")
            known = *table.inputs.get("", ()), *table.replicated, *table.refused
            if argument in known or way.mesh.whole is None or not holds_tensors(value):
                continue
            advice = "leave it out, or add it to `inputs` or `replicated`"
            if isinstance(value, Mapping):  # as joint_attention_kwargs
                key = next(key for key, x in value.items() if holds_tensors(x))
                argument = f"{argument}[{key!r}]"
                advice = "leave it out"
            if "ip_" in argument:
                advice = (
                    "IP adapters attend to the tokens of a picture, which no table knows: call the "
                    "pipeline without ip_adapter_image after unload_ip_adapter(), or share its "
                    "branches (guidance_degree) and images (data_degree) over the ranks instead"
                )
            raise ConfigError(
                f"{name} over ranks: the split table does not say what to do with the tensors of "
                f"{argument}; {advice}"
            )

    def _end(self, current: ForwardPass) -> None:
        if current.shapes is not None:
            record = current.end()
            self._records[current.form] = record or self._records.get(current.form)
        # None where a compiler traced the beginning alone
        self.last = self._records.get(current.form) or self.last

    # --- a call of one of its modules -------------------------------------------------------------

    def _run(
        self, name: str, role: Role, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a module in its role; takes the place of its `forward`."""
        current = self.forward
        if current is None:
            if role.is_block and not self.is_running:
                raise ConfigError(
                    f"{name} runs outside of the forward pass of its model, which is split over "
                    "ranks: call the model itself, which must not be a generator; for gradient "
                    "checkpointing use handle.checkpoint, as in "
                    "enable_gradient_checkpointing(handle.checkpoint)"
                )
            return forward(*args, **kwargs)
        if role.is_block:
            current.has_attended = False
            if current.sparse is not None:
                current.begin_block(name)
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
            output = self._cut_outputs(current, name, role.outputs, output)
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
        """Run a module that attends within our mode, below the hooks of others.

        Their function modes are then around ours, which shows them what one process would.
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
        if is_ours:  # our back end enters the mode, which then sees few functions of torch
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

    def _cut_outputs(
        self, current: ForwardPass, name: str, cuts: Mapping[int, Cut], output: Any
    ) -> Any:
        is_one = isinstance(output, Tensor)
        outputs = [output] if is_one else list(output)
        for place, cut in cuts.items():
            outputs[place] = current.cut(outputs[place], cut, f"output {place} of {name}")
        return outputs[0] if is_one else tuple(outputs)

    # --- stand-ins --------------------------------------------------------------------------------

    def _install(self) -> None:
        check_model(self.model, self.table)
        try:
            self._place()
        except BaseException:
            self.remove()
            raise

    def _take_away(self) -> None:
        for one in (*reversed(self._stand_ins), self._of_model):
            if one is not None:
                one.remove()
        self._stand_ins, self._of_model = [], None

    def _place(self) -> None:
        """Put stand-ins on the modules that now have the names of the table, and those alone."""
        model, table, roles = self.model, self.table, dict[str, Role]()
        modules: dict[str, nn.Module] = {}

        def role_of(name: str, module: nn.Module) -> Role:
            modules[name] = module
            return roles.setdefault(name, Role())

        self.blocks = {}
        for pattern, segments in table.blocks.items():
            for name, module in modules_of(model, pattern).items():
                self.blocks[name] = module, segments
                role_of(name, module).is_block = True
        for pattern, cuts in table.inputs.items():
            for name, module in modules_of(model, pattern).items() if pattern else ():
                role = role_of(name, module)
                role.names, role.inputs = parameters_of(module), role.inputs | dict(cuts)
        for pattern, places in table.outputs.items():
            for name, module in modules_of(model, pattern).items():
                role_of(name, module).outputs |= places
        for pattern, cut in table.gathers.items():
            for name, module in modules_of(model, pattern).items():
                role_of(name, module).gather = cut
        for pattern, scope in table.attends.items():
            for name, module in modules_of(model, pattern).items():
                role_of(name, module).scope = scope
        # With sparse, all passes count, so the mode is around the model.
        inner = [name for name, role in roles.items() if role.is_block or role.scope]
        attending = {
            f"{name}.{path}" if path else name: module
            for name in inner
            for path, module in _attending(modules[name]).items()
        }
        processors = [getattr(module, "processor", None) for module in attending.values()]
        if self._backend is None and any(hasattr(one, _BACKEND) for one in processors):
            self._backend = _registered(self)
        self._take_away()
        self._names = parameters_of(model)
        self._of_model = StandIn(*_innermost(model), self._call)
        within = [child for module in attending.values() for child in module.children()]
        self.hooked = [model, *modules.values(), *attending.values(), *within]
        self._classes = {type(one): type(one).forward for one in (model, *modules.values())}
        for name, module in attending.items() if not self._number else ():
            run = partial(self._run_attention, name, module)
            self._stand_ins.append(StandIn(*_innermost(module), run))
        for name, role in roles.items():
            # Dynamo caches graphs by code object, a limited number, and tells blocks with stand-ins
            # within apart: each of these gets a copy of the code.
            is_apart = any(other.startswith(f"{name}.") for other in (*roles, *attending))
            run = MethodType(_again(SplitModel._run), self) if is_apart else self._run
            self._stand_ins.append(StandIn(modules[name], "forward", partial(run, name, role)))
        self._links = links_to(model, [*roles, *attending])


def _numbered(current: ForwardPass) -> Tensor:
    """Let operators find a pass of block-sparse attention by its ticket."""
    assert current.sparse is not None
    current.sparse.ticket[0] = this_world().add(current)
    return current.sparse.ticket.clone()


def _again(function: Any) -> Any:
    """Return the same function with a code object of its own."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def form_of(inputs: Any) -> object:
    """Return names, shapes and dtypes; not numbers, of which some change with every step."""
    if isinstance(inputs, Tensor):
        return inputs.shape, inputs.dtype
    if isinstance(inputs, Mapping):
        parts = list[object]()
        for name, x in inputs.items():
            is_nested = isinstance(x, Mapping | list | tuple)
            parts += [name, form_of(x)] if is_nested else [name, type(x)]
            if isinstance(x, Tensor):
                parts += [x.shape, x.dtype]
        return tuple(parts)
    if isinstance(inputs, list | tuple):
        return tuple([form_of(x) for x in inputs])
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
    """Return the modules of diffusers within that attend, by path; without any, the module."""
    within = {
        path: one for path, one in module.named_modules() if hasattr(one, "set_processor") and path
    }
    return within or {"": module}


_BACKEND = "_attention_backend"


def _why_local(name: str, processor: Any) -> str:
    """Return why a module ran without attention over the mesh, and what to do."""
    how, backend = "let it call that function", getattr(processor, _BACKEND, "")
    if processor is not None:
        kind, other = type(processor).__name__, "or give the model another by set_attn_processor"
        how = f"its processor {kind} attends by itself: let it call that function, {other}"
    if backend is None:  # the one that is active in all of diffusers
        diffusers: Any = importlib.import_module("diffusers.models.attention_dispatch")
        backend = diffusers._AttentionBackendRegistry.get_active_backend()[0]
    backend = str(getattr(backend, "value", backend))
    if backend and "native" not in backend:
        how = f"its back end is {backend}: call set_attention_backend('native')"
    over = "F.scaled_dot_product_attention, so its attention was not over the mesh"
    return f"{name} did not call {over}: {how}"


def _registered(split: SplitModel) -> Any:
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
        # Torch's calls what the mode replaces; a kernel goes before what diffusers has at large.
        backend = diffusers.AttentionBackendName.NATIVE if split.backend else None
        forward = split.forward
        if forward is None or (forward.is_around and forward.is_innermost()):
            forward = nullcontext()
        with forward:
            return diffusers.dispatch_attention_fn(*args, backend=backend)

    diffusers._AttentionBackendRegistry.register(name)(attend)
    return name


def _innermost(model: nn.Module) -> tuple[Any, str]:
    """Return the holder of a model's `forward` below hooks, which drop what is above them."""
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
