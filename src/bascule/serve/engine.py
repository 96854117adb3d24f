"""The engine: requests of one pipeline run on blocks of ranks, and move between blocks.

Every rank runs one request at a time, by the pipeline's unchanged `__call__`. Between two steps the
first rank of a block tells the others how to go on. A rank that joins makes the same call: zeros
replace the transformer's outputs of earlier steps, then it takes over the last step's result and
the states of schedulers and generators. A rank that leaves ends its call by an exception.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bascule.arrays import Ints
from bascule.attention.api import AttentionOptions
from bascule.comm.agree import agree, agree_on
from bascule.comm.failures import leave, shared, watch_of_world
from bascule.comm.groups import member_of, new_group, resolve
from bascule.comm.items import leaves_of, mapped, rebuilt
from bascule.comm.mesh import AttentionMesh, group_of
from bascule.comm.quantized import CommDtype
from bascule.diffusers.caches import hooks_of
from bascule.diffusers.compiling import compile_in_place
from bascule.diffusers.degrees import Shape, shape_of
from bascule.diffusers.guidance import GuidedModel
from bascule.diffusers.pending import Branches
from bascule.diffusers.pipeline_run import (
    TRANSFORMERS,
    execution_device,
    random_states,
    set_random_states,
)
from bascule.diffusers.request import Request, models_of
from bascule.diffusers.sparse_layers import SparseConfig, SparseLayers
from bascule.diffusers.split_model import SplitModel, Way
from bascule.diffusers.tables import table_of
from bascule.diffusers.verify import check_table
from bascule.encoders.encoder import EncoderOptions
from bascule.encoders.tiled_vae import TiledVAE
from bascule.errors import CommError, ConfigError
from bascule.generate.generating import sound_rate
from bascule.plan.requests import Block
from bascule.serve.blocks import places_of, shape_of_block
from bascule.serve.kept import read_state, write_state
from bascule.serve.orders import Orders
from bascule.serve.post import Message, Post, Ticket
from bascule.stand_in import Override

_ENCODERS = "encode_prompt", "encode_image"  # methods of pipelines; what they return travels
_GO_ON, _MOVE, _PAUSE, _CANCEL = range(4)
_ACTIONS = {"go on": _GO_ON, "move": _MOVE, "pause": _PAUSE, "cancel": _CANCEL}


class _Left(Exception):  # noqa: N818 - no error
    """This rank leaves a request, which continues elsewhere or ends."""


class _Failed(Exception):  # noqa: N818 - an outcome of a request
    """A request fails, and all of its ranks know."""


@dataclass(slots=True)
class _Run:
    """A request while this rank computes it."""

    id: str
    block: Block
    ticket: Ticket | None  # of its stored state, until all ranks have fetched it
    arguments: dict[str, Any]
    seed: int
    state: dict[str, Any] | None  # for this rank to take over when it joins
    first_step: int = 0  # number of steps done before this rank joined
    generator: torch.Generator = field(default_factory=torch.Generator)
    num_done: int = 0  # steps
    is_begun: bool = False  # its transformer was called
    encoded: list[Any] = field(default_factory=list[Any])  # results of encoder calls, in order
    num_encoded: int = 0  # encoder calls of this rank
    specs: dict[str, Any] = field(default_factory=dict[str, Any])  # of outputs, by transformer
    schedulers: list[Any] = field(default_factory=list[Any])  # that took steps; some are copies
    stepped: list[Any] = field(default_factory=list[Any])  # results of schedulers in this step
    latents: list[Tensor] = field(default_factory=list[Tensor])  # after the last step
    since: float = 0.0  # perf_counter at the last report
    num_called: int = 0  # calls of its transformers


class Engine:
    """Runner of a pipeline's requests on blocks of ranks; each rank of the job makes and runs one.

    Split tables shard the transformers. The ranks that start a request encode its prompts. Only
    the first rank decodes the output: the others leave after the last step. On rank 0, `orders`
    starts and moves requests.

    Args:
        pipeline: On the device of this rank, with the same weights on all ranks.
        timeout_s: Longest wait of a rank for another rank of its block.
        shape: Mesh of all ranks, with `data` replicas. Each request stays on one replica, and
            blocks count replicas. Default: blocks of 1, 2, 4, .. ranks.
        num_groups: Guidance groups of a block, if it has as many ranks; only without `shape`.
        longest_ring: Most ranks of a ring, and so of a block; only without `shape`. Default: any.
        sparse: Selects the blocks of attention to compute. Default: all.
        comm_dtype: Sends attention's rows in 8 bits, as in `parallelize`.
        compiles: True compiles the transformers, for each degree.
        shares_tiles: True lets all ranks of a request stay to decode the tiles of its VAE.
        save_every: Steps between two events "saved" of a request; 0 for none.

    Attributes:
        stays: Whether requests keep their ranks, because a cache has results of their steps.

    Raises:
        ConfigError: The pipeline has no callback after each step, or a cache that requests would
            share; no split table fits; the shape does not fit; or settings exclude each other.
        CommError: The weights of ranks differ.
    """

    @shared("the start of an engine")
    def __init__(
        self,
        pipeline: Any,
        *,
        timeout_s: float = 600.0,
        shape: Shape | None = None,
        num_groups: int = 1,
        longest_ring: int | None = None,
        sparse: SparseConfig | None = None,
        comm_dtype: CommDtype | None = None,
        compiles: bool = False,
        shares_tiles: bool = False,
        save_every: int = 0,
    ) -> None:
        world = member_of(resolve(None), "world")
        attention = AttentionOptions(None, None, comm_dtype)
        ask = partial(_request_of, pipeline, shape, num_groups, attention, sparse)
        group = world if world.size > 1 else None
        request = agree_on(group, ask, Request.settings, what="the start of an engine")
        self._pipeline, self._rank, ranks = pipeline, world.rank, range(world.size)
        self._sparse, self._compiles, self._shares_tiles = sparse, compiles, shares_tiles
        self._save_every = save_every
        pipeline.set_progress_bar_config(disable=True)
        self._device = execution_device(pipeline, request.models[0])
        self.stays = bool(_caches_in(request.models))
        self._control = new_group(ranks, "serve", timeout_s, backend="gloo")
        attending = new_group(ranks, "serve attention", timeout_s)
        shapes, self._size = {1: replace(request.shape, data=1)}, world.size // request.shape.data
        if shape is None:
            configs: list[Any] = [getattr(model, "config", None) for model in request.models]
            num_heads = min(getattr(config, "num_attention_heads", None) or 1 for config in configs)
            degrees = [1 << k for k in range(world.size.bit_length())]
            shapes = {degree: shape_of_block(degree, num_heads, num_groups) for degree in degrees}
            shapes = {d: shape for d, shape in shapes.items() if shape.ring <= (longest_ring or d)}
            self._size = 1
        self._places = places_of(self._control, attending, shapes, self._size)
        self.degrees = [block.degree for block in self._places]  # of this rank; rank 0 has all
        self._post = Post(new_group(ranks, "serve post", timeout_s, backend="gloo"), timeout_s)
        self._mail, self._is_over = self._post.mail(), False
        self._run: _Run | None = None
        self.orders = None
        if self._rank == 0:
            self.orders = Orders(self._post, world.size // self._size, self._size)
        settings = AttentionMesh(None, None, None), request.attention, sparse
        pairs = zip(request.models, request.tables, strict=True)
        self._splits = [SplitModel(*pair, *settings, check=check_table) for pair in pairs]
        groups = [Branches(place.branches) for place in self._places.values() if place.branches]
        self._guided = [GuidedModel(split, groups[0]) for split in self._splits if groups]
        self._compiled: dict[Block, list[Any]] = {}  # compiled calls of the models, if any
        self._tiled: dict[tuple[int, ...], TiledVAE] = {}  # by ranks
        self._undo = ExitStack()
        for split in (*self._guided, *self._splits):
            self._undo.callback(split.remove)
        for owner, name, around in self._overrides():
            with_copies = name == "step"
            self._undo.callback(Override(owner, name, around, with_copies=with_copies).remove)

    def _overrides(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        for name in TRANSFORMERS:
            if isinstance(model := getattr(self._pipeline, name, None), nn.Module):
                yield model, "__call__", partial(self._transform, name)
        for name in _ENCODERS:
            if hasattr(self._pipeline, name):
                yield self._pipeline, name, self._encode
        if hasattr(getattr(self._pipeline, "vae", None), "decode"):
            yield self._pipeline.vae, "decode", self._decode
        yield self._pipeline.scheduler, "step", self._step  # of copies, too

    # --- the loop of a rank -----------------------------------------------------------------------

    @shared("the engine")
    def run(self) -> None:
        """Run the requests that `orders` sends, until it says stop; call this in the main thread.

        Raises:
            CommError: A rank is gone, or failed while others wait for it.
        """
        reason = ""
        try:
            with torch.inference_mode():
                while (message := self._take())["kind"] != "stop":
                    if message["kind"] == "run":
                        self._serve(message)
            agree(self._control, {}, what="the end of the engine")  # all events are sent
            if self._rank == 0:
                self._post.end(self._mail)
            agree(self._control, {}, what="the end of the engine")  # rank 0 has read them
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            with suppress(RuntimeError):  # the store is gone
                for rank in range(self._control.size):
                    self._mail.send(rank, "over", reason=reason)
            raise
        finally:
            self._undo.close()
            self._post.end(self._mail)
            if self.orders is not None:
                self.orders.end(reason)

    def _take(self, wait_s: float | None = None) -> Message:
        """Return the next message; raises Empty if none arrives in this time."""
        message = self._post.inbox.get(timeout=wait_s)
        if message["kind"] == "over":
            self._is_over = True
            raise CommError(f"the engine has ended: {message['reason']}")
        return message

    def _serve(self, message: Message) -> None:
        """Run a request until it ends or leaves this rank."""
        ticket = Ticket(*message["ticket"])
        fields = self._post.fetch(self._mail, ticket, self._device)
        run = _Run(block=Block(*message["block"]), ticket=ticket, **fields)
        if run.state is not None:
            run.first_step, run.encoded = run.state["step"], run.state["encoded"]
            run.specs = run.state["specs"]
        self._use(run.block)
        self._run = run
        try:
            output = self._call(run)
            self._meet(run)  # where all ranks decode
            if self._leads(run):
                self._synchronize()
                self._report(run, "done", ticket=self._post.keep(output))
        except _Left:
            pass
        except Exception as error:  # pipelines refuse sizes and texts in their own ways
            self._fail(run, error)
        finally:
            self._run = None

    def _call(self, run: _Run) -> Any:
        def step_ends(_: Any, __: int, ___: Any, carried: dict[str, Any]) -> dict[str, Any]:
            run.num_done += 1
            if run.num_done == run.first_step:
                carried |= self._join(run)
            run.latents = leaves_of([run.stepped, carried.get("latents")])
            if run.num_done > run.first_step:
                self._boundary(run, carried)
            run.stepped.clear()
            return carried

        for module, hook in _caches_in([split.model for split in self._splits]):
            hook.reset_state(module)
        torch.manual_seed(run.seed)  # for draws without the generator
        run.since = time.perf_counter()
        output = self._pipeline(
            **run.arguments,
            generator=run.generator.manual_seed(run.seed),
            callback_on_step_end=step_ends,
            callback_on_step_end_tensor_inputs=self._pipeline._callback_tensor_inputs,
            return_dict=False,
        )
        return output[0] if sound_rate(self._pipeline) is None else list(output[:2])

    def _fail(self, run: _Run, error: Exception) -> None:
        """End a request on all ranks of its block; raises if the engine has ended."""
        if self._is_over:
            raise error
        reason = str(error)
        if not isinstance(error, _Failed | ConfigError):
            reason = f"{type(error).__name__}: {error}"
        if not isinstance(error, _Failed):
            if self._places[run.block].whole is not None:
                leave(error, f"request {run.id!r}")
            with suppress(_Failed):
                self._meet(run, error=error)
        watch_of_world().forget()  # the ranks go on, so no failure note may stay
        if self._leads(run):
            self._report(run, "failed", reason=reason)
            self._release(run)

    def _leads(self, run: _Run) -> bool:
        return run.block.first * self._size == self._rank

    # --- stand-ins for methods of the pipeline ----------------------------------------------------

    def _encode(self, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            return encode(*args, **kwargs)
        run.num_encoded += 1
        if run.num_encoded > len(run.encoded):
            run.encoded.append(encode(*args, **kwargs))
        return run.encoded[run.num_encoded - 1]

    def _transform(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            return call(*args, **kwargs)
        if not run.is_begun:
            run.is_begun = True
            if run.state is None:
                self._boundary(run, {})
            elif run.first_step == 0:  # joins before the first step
                self._join(run)
        run.num_called += 1  # calls whose result other ranks computed count, too
        if run.num_done < run.first_step:
            return mapped(run.specs[name], self._zeros, lambda nest: isinstance(nest, dict))
        for split in self._splits:
            if split.sparse is not None:
                split.sparse.passes.number = run.num_called - 1
        output = call(*args, **kwargs)
        run.specs.setdefault(name, output)  # `_state` takes its shapes and dtypes
        return output

    def _zeros(self, spec: Mapping[str, Any]) -> Tensor:
        return torch.zeros(spec["shape"], dtype=getattr(torch, spec["dtype"]), device=self._device)

    def _decode(self, decode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            return decode(*args, **kwargs)
        whole = self._places[run.block].whole
        if whole is not None and self._shares_tiles:
            if whole.ranks not in self._tiled:
                vae, group = self._pipeline.vae, group_of(whole.ranks).process_group
                settings = EncoderOptions(features_for="all", device=self._device)
                self._tiled[whole.ranks] = TiledVAE(vae, mesh_or_group=group, options=settings)
            decode = self._tiled[whole.ranks].decode
        output = decode(*args, **kwargs)
        _check_numbers("pixels of the output", leaves_of(output))
        return output

    def _step(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        output, run, scheduler = step(*args, **kwargs), self._run, step.args[0]
        if run is not None:
            if run.state is not None and run.num_done + 1 == run.first_step:
                output = rebuilt(output, iter(run.state["stepped"][len(run.stepped)]))
            run.stepped.append(output)
            if all(scheduler is not other for other in run.schedulers):
                run.schedulers.append(scheduler)
        return output

    # --- between two steps ------------------------------------------------------------------------

    def _boundary(self, run: _Run, carried: Mapping[str, Any]) -> None:
        """Continue, move to other ranks or leave, as the first rank of the block decides."""
        decision, ticket = np.zeros(3, np.int64), None
        if self._leads(run):
            _check_numbers(f"latents of step {run.num_done}", run.latents)  # waits for the device
            self._synchronize()
            since = time.perf_counter()
            self._report(run, "step")
            is_due = self._save_every > 0 and run.num_done % self._save_every == 0
            if is_due and 0 < run.num_done != self._num_steps:
                with suppress(ConfigError):  # its state cannot travel
                    saved = self._post.keep(self._state(run, carried))
                    self._report(run, "saved", ticket=saved)
            run.since = since  # the next step's seconds contain this report and agreement
            decision, ticket = self._decide(run, carried)
        action, first, degree = self._meet(run, decision).tolist()
        self._release(run)
        if action == _MOVE:
            self._move(run, Block(first, degree), ticket)
        elif action != _GO_ON:
            if self._leads(run):
                self._report(run, "paused" if action == _PAUSE else "cancelled", ticket=ticket)
            raise _Left

    def _decide(self, run: _Run, carried: Mapping[str, Any]) -> tuple[Ints, Ticket | None]:
        """Return [action, *block], and the ticket of the state for joining ranks."""
        order, block, ticket = self._order(run), run.block, None
        action = _ACTIONS[order["action"]]
        if action == _MOVE:
            block = Block(*order["block"])
        is_last = run.num_done > 0 and run.num_done == self._num_steps
        if is_last and not self._shares_tiles and action in (_GO_ON, _MOVE):  # one rank decodes
            block = Block(block.first, 1)
            action = _GO_ON if block == run.block else _MOVE
        joining = set(block.ranks) - set(run.block.ranks)
        if action == _PAUSE or (action == _MOVE and (joining or (self.stays and not is_last))):
            try:
                ticket = self._post.keep(self._state(run, carried))
            except ConfigError as error:
                self._report(run, "refused", reason=str(error))
                action, block = _GO_ON, run.block
        return np.array([action, *block], np.int64), ticket

    def _order(self, run: _Run) -> Message:
        """Return the next order for this request; drop stale ones of other requests."""
        wait_s: float | None = 0.0
        with suppress(Empty):
            while True:
                order = self._take(wait_s)
                if order["kind"] != "order" or order["id"] != run.id:
                    continue
                if order["action"] != "halt":
                    run.since = time.perf_counter()  # halting is no step
                    return order
                self._report(run, "halted")
                wait_s = None
        return {"action": "go on"}

    def _move(self, run: _Run, block: Block, ticket: Ticket | None) -> None:
        joining = sorted(set(block.ranks) - set(run.block.ranks))
        if run.block.first == self._rank:
            for rank in joining:
                self._mail.send(rank, "run", id=run.id, ticket=ticket, block=block)
        if self._rank not in block.ranks:
            raise _Left
        run.block, run.ticket = block, ticket
        self._use(block)
        self._enter(run, waits=bool(joining))

    def _join(self, run: _Run) -> dict[str, Any]:
        """Restore the state after the earlier steps; return tensors for the pipeline's next one."""
        state, run.state = run.state, None
        assert state is not None
        write_state(self._keepers(run), state["kept"])
        set_random_states(self._device, [run.generator], state["random"])
        self._enter(run, waits=True)
        return state["carried"]

    def _enter(self, run: _Run, *, waits: bool) -> None:
        """Begin to compute on a block; with `waits` once all of its ranks are ready."""
        since = time.perf_counter()
        if waits:
            self._meet(run)
        if self._leads(run):
            self._report(run, "moved", seconds=time.perf_counter() - since)
        self._release(run)
        run.since = time.perf_counter()

    def _meet(
        self, run: _Run, decision: Ints | None = None, error: Exception | None = None
    ) -> Ints:
        """Return the decision of the block's first rank; _Failed on all ranks if one failed."""
        local = np.zeros(0, np.int64) if decision is None else decision
        whole = self._places[run.block].whole
        control = None if whole is None else whole.control
        if control is None:
            if error is not None:
                raise _Failed(str(error))
            return local
        try:
            what = f"request {run.id!r}"
            return agree(control, {}, error, what=what, values=local, capacity=3)[0]
        except CommError as failure:
            if control.calls.ended is not None:  # the group is broken: the others cannot know
                raise
            raise _Failed(str(failure).removeprefix("step 0, ")) from None

    def _use(self, block: Block) -> None:
        """Let models compute on a block, and drop their caches of another block."""
        place, is_new = self._places[block], block not in self._compiled
        branches = None if place.branches is None else Branches(place.branches)
        for guided in self._guided:
            guided.share_among(branches)
        for split in self._splits:
            sparse = None if self._sparse is None else SparseLayers(self._sparse, place.mesh)
            split.switch(Way(place.mesh, sparse))
            if is_new and self._compiles:
                undo = compile_in_place(split.model, "default", None, split.prepare)
                self._undo.callback(undo)
        if is_new:
            self._compiled[block] = [split.model._compiled_call_impl for split in self._splits]
        for split, call in zip(self._splits, self._compiled[block], strict=True):
            split.model._compiled_call_impl = call

    def _release(self, run: _Run) -> None:
        """Drop the stored state: all ranks of the block have fetched it."""
        if run.ticket is not None and self._leads(run):
            self._post.drop(self._mail, run.ticket)
        run.ticket = None

    def _state(self, run: _Run, carried: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that another rank needs to continue a request."""
        if self.stays:
            what = "a cache has results of the steps of its tokens on its ranks"
            raise ConfigError(f"{what}, so requests cannot change ranks: leave them in place")
        if self._num_steps is not None and run.num_done > self._num_steps:
            what = f"a {type(self._pipeline).__name__} denoises in several loops"
            raise ConfigError(f"{what}, so its requests cannot change ranks: leave them in place")
        sent = {id(tensor) for tensor in leaves_of([run.encoded, run.stepped])}
        own = {name: x for name, x in carried.items() if not sent.issuperset(map(id, leaves_of(x)))}
        state = {
            "step": run.num_done,
            "encoded": run.encoded,
            "specs": mapped(run.specs, _spec_of),
            "carried": own,
            "stepped": [leaves_of(output) for output in run.stepped],
            "kept": read_state(self._keepers(run)),
            "random": random_states(self._device, [run.generator]),
        }
        return {"id": run.id, "arguments": run.arguments, "seed": run.seed, "state": state}

    def _keepers(self, run: _Run) -> dict[str, Any]:
        return {"pipeline": self._pipeline, "schedulers": run.schedulers}

    @property
    def _num_steps(self) -> int | None:
        return getattr(self._pipeline, "num_timesteps", None)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)

    def _report(self, run: _Run, what: str, **facts: Any) -> None:
        facts = {"seconds": time.perf_counter() - run.since} | facts
        facts |= {"step": run.num_done, "num_steps": self._num_steps if run.is_begun else None}
        self._mail.send(0, "event", what=what, id=run.id, block=run.block, **facts)


def _request_of(
    pipeline: Any,
    shape: Shape | None,
    num_groups: int,
    attention: AttentionOptions,
    sparse: SparseConfig | None,
) -> Request:
    """Return the checked models, tables and settings; refuse pipelines that cannot change ranks."""
    whole = Shape(guidance=num_groups) if shape is None else shape_of(None, shape)
    models = models_of(pipeline)
    takes = inspect.signature(pipeline.__call__).parameters
    name = type(pipeline).__name__
    if "callback_on_step_end" not in takes:
        what = f"a {name} has no callback at the end of a step, where requests change ranks"
        raise ConfigError(f"{what}: use a pipeline with callback_on_step_end")
    cache = "cache-dit" if any("_is_cached" in vars(model) for model in models) else ""
    for module, hook in _caches_in(models):
        try:
            hook.reset_state(module)
        except NotImplementedError:
            cache = type(hook).__name__
    if cache:
        what = f"requests would share the cache ({cache}) of the transformer of this {name}"
        raise ConfigError(f"{what}: disable it, or enable another cache of diffusers")
    tables = [table_of(model, None) for model in models]
    return Request(models=models, tables=tables, shape=whole, attention=attention, sparse=sparse)


def _caches_in(models: Sequence[nn.Module]) -> list[tuple[nn.Module, Any]]:
    """List the hooks of caches of steps, each with its module."""
    hooks = [hook for model in models for hook in hooks_of(model, model.modules())]
    return [(module, hook) for _, module, hook in hooks if hook._is_stateful]


def _check_numbers(what: str, tensors: list[Tensor]) -> None:
    """Refuse tensors with NaN or infinity, of which the output would be black."""
    floats = {id(tensor): tensor for tensor in tensors if tensor.is_floating_point()}
    if not all(tensor.sum(dtype=torch.float64).isfinite() for tensor in floats.values()):
        fault = f"the {what} are NaN or infinite"
        raise ConfigError(f"{fault}, as where float16 overflows: give --dtype bfloat16 or float32")


def _spec_of(output: Tensor) -> dict[str, Any]:
    return {"shape": list(output.shape), "dtype": str(output.dtype).removeprefix("torch.")}
