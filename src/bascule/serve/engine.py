"""The engine: batches of a pipeline's requests run on blocks of ranks, and move between blocks.

Each request of a batch runs by the pipeline's unchanged `__call__`, in a fiber. A fiber parks where
it calls a transformer; equal calls of all requests are then computed as one. All park between two
steps, where the first rank of a block tells the others how the batch goes on. A rank that joins
makes the same calls: zeros replace the transformer's outputs of earlier steps, then it takes over
the last step's result and the states of schedulers and generators. A rank that leaves ends its
calls by an exception. Other ranks are only met in the main thread.
"""

import inspect
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
from bascule.diffusers.arguments import parameters_of
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
from bascule.diffusers.tables import table_of, unwrapped
from bascule.diffusers.verify import check_table
from bascule.encoders.encoder import EncoderOptions
from bascule.encoders.tiled_vae import TiledVAE
from bascule.errors import CommError, ConfigError
from bascule.generate.generating import sound_rate
from bascule.plan.requests import Block
from bascule.serve.adapters import Adapters
from bascule.serve.blocks import places_of, shape_of_block
from bascule.serve.fibers import Fiber, ask, is_within
from bascule.serve.kept import read_state, with_own_state, write_state
from bascule.serve.merging import Inputs, fits, merged, parts_of
from bascule.serve.orders import Orders
from bascule.serve.post import Message, Post, Ticket
from bascule.stand_in import Override

_ENCODERS = "encode_prompt", "encode_image"  # methods of pipelines; what they return travels
_GO_ON, _MOVE, _PAUSE, _CANCEL, _BOARD = range(5)
_ACTIONS = {"go on": _GO_ON, "move": _MOVE, "pause": _PAUSE, "cancel": _CANCEL, "board": _BOARD}
_NOTHING = np.zeros(3, np.int64)  # decided
_BOUNDARY = "boundary"  # where a fiber parks between two steps


class _Left(Exception):  # noqa: N818 - no error
    """This rank leaves a batch, which continues elsewhere or ends."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A call of a transformer, for which a fiber parks."""

    name: str  # of the transformer in the pipeline
    call: Callable[..., Any]
    inputs: Inputs
    number: int  # of the request's calls before


class _Branches(Branches):
    """Results of guidance branches, which the main thread exchanges."""

    def exchange(self) -> None:
        """Send each group the results of the others."""
        ask(super().exchange) if is_within() else super().exchange()


@dataclass(slots=True, eq=False)
class _Run:
    """A request while this rank computes it."""

    id: str
    ticket: Ticket | None  # of its stored state, until all ranks have fetched it
    arguments: dict[str, Any]
    seed: int
    state: dict[str, Any] | None  # for this rank to take over when it joins
    lora: list[Any]  # its choice of adapters
    pipeline: Any = None  # with its own state
    fiber: Any = None  # runs its call of the pipeline
    first_step: int = 0  # number of steps done before this rank joined
    generator: torch.Generator = field(default_factory=torch.Generator)
    random: Sequence[Tensor] = ()  # states of torch's generators, while other requests use these
    num_done: int = 0  # steps
    is_begun: bool = False  # its transformer was called
    encoded: list[Any] = field(default_factory=list[Any])  # results of encoder calls, in order
    num_encoded: int = 0  # encoder calls of this rank
    specs: dict[str, Any] = field(default_factory=dict[str, Any])  # of outputs, by transformer
    schedulers: list[Any] = field(default_factory=list[Any])  # that took steps; some are copies
    stepped: list[Any] = field(default_factory=list[Any])  # results of schedulers in this step
    carried: dict[str, Any] = field(default_factory=dict[str, Any])  # tensors between two steps
    num_called: int = 0  # calls of its transformers
    seconds: float = 0.0  # for which it last ran
    error: Exception | None = None  # why it fails here

    @property
    def num_steps(self) -> int | None:
        """Steps in total; None before the first one, or if the pipeline does not say."""
        return getattr(self.pipeline, "num_timesteps", None) if self.is_begun else None

    @property
    def is_last(self) -> bool:
        """True after its last step."""
        return self.num_done > 0 and self.num_done == self.num_steps


@dataclass(slots=True)
class _Batch:
    """Requests that this rank computes together."""

    name: str
    block: Block
    members: dict[str, _Run] = field(default_factory=dict[str, _Run])  # in one order on all ranks
    boarding: str = ""  # id of a member that has just boarded
    since: float = 0.0  # perf_counter at the last report
    is_halted: bool = False
    kept: deque[Message] = field(default_factory=deque[Message])  # an order to follow next


class Engine:
    """Runner of a pipeline's requests on blocks of ranks; each rank of the job makes and runs one.

    Split tables shard the transformers. The ranks that start a request encode its prompts. Only
    the first rank decodes the output: the others leave after the last step. On rank 0, `orders`
    starts and moves batches of requests. With `sparse`, each batch has one request.

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
        self._mail = self._post.mail()
        self._batch: _Batch | None = None
        self._active: _Run | None = None  # the request that last ran
        self.adapters = Adapters(pipeline)
        if compiles:  # each choice of adapters gets a graph of its own; torch's limit is 8
            torch._dynamo.config.recompile_limit = 64
        self.orders = None
        if self._rank == 0:
            self.orders = Orders(self._post, world.size // self._size, self._size)
            self.orders.batches = sparse is None and not self.stays
        settings = AttentionMesh(None, None, None), request.attention, sparse
        pairs = zip(request.models, request.tables, strict=True)
        self._splits = [SplitModel(*pair, *settings, check=check_table) for pair in pairs]
        self._split_of = {
            name: (split, parameters_of(split.model))
            for name in TRANSFORMERS
            for split in self._splits
            if isinstance(model := getattr(pipeline, name, None), nn.Module)
            and unwrapped(model) is split.model
        }
        groups = [_Branches(place.branches) for place in self._places.values() if place.branches]
        self._guided = [GuidedModel(split, groups[0]) for split in self._splits if groups]
        self._compiled: dict[Block, list[Any]] = {}  # compiled calls of the models, if any
        self._tiled: dict[tuple[int, ...], TiledVAE] = {}  # by ranks
        self._undo = ExitStack()
        for split in (*self._guided, *self._splits):
            self._undo.callback(split.remove)
        for owner, name, around in self._overrides():
            with_copies = name in ("step", *_ENCODERS)  # each request has its own
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
        yield self._pipeline.scheduler, "step", self._step

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
            raise CommError(f"the engine has ended: {message['reason']}")
        if message["kind"] == "adapter":
            self._adapt()
        return message

    def _adapt(self, run: _Run | None = None) -> None:
        """Load and remove adapters as rank 0 ordered; let models use those of a request."""
        while not (orders := self._post.adapter_orders).empty():
            order = orders.get()
            facts = {"id": order["id"], "block": Block(self._rank, 1)}
            self._mail.send(0, "event", what="adapter", reason=self.adapters.follow(order), **facts)
        if run is not None:
            self.adapters.use(run.lora)

    def _serve(self, message: Message) -> None:
        """Run a batch until it ends or leaves this rank."""
        batch = self._batch = _Batch(message["batch"], Block(*message["block"]))
        self._use(batch.block)
        try:
            if self._admit(batch, message["members"]):
                self._enter(batch, waits=True)
            else:
                self._boundary(batch)
            while batch.members:
                self._advance(batch)
                self._boundary(batch)
        except _Left:
            pass
        finally:
            for run in batch.members.values():
                if run.fiber is not None:
                    run.fiber.cancel()
            self._batch = self._active = None

    def _leads(self, batch: _Batch) -> bool:
        return batch.block.first * self._size == self._rank

    # --- the requests of a batch ------------------------------------------------------------------

    def _admit(self, batch: _Batch, members: Sequence[tuple[str, Any]]) -> bool:
        """Begin requests, or take over their states; return whether there are states."""
        batch.since, runs = time.perf_counter(), list[_Run]()
        for request_id, address in members:
            ticket = Ticket(*address)
            fields = self._post.fetch(self._mail, ticket, self._device)
            run = batch.members[request_id] = _Run(ticket=ticket, **fields)
            run.pipeline = with_own_state(self._pipeline, {})
            if run.state is not None:
                run.first_step, run.encoded = run.state["step"], run.state["encoded"]
                run.specs = run.state["specs"]
            runs.append(run)
        have_states = any(run.state is not None for run in runs)
        for run in runs:
            run.fiber = Fiber(partial(self._call, run), f"bascule request {run.id}")
            self._resume(run)
        return have_states

    def _resume(self, run: _Run, answer: Any = None, error: Exception | None = None) -> None:
        """Let a request run until it calls a transformer, is between two steps, or has ended."""
        since, fiber = time.perf_counter(), run.fiber
        self._activate(run)
        fiber.resume(answer, error)
        while callable(fiber.asked):
            try:
                answer, error = fiber.asked(), None
            except Exception as failure:
                answer, error = None, failure
            fiber.resume(answer, error)
        run.seconds = time.perf_counter() - since
        if isinstance(fiber.error, Exception):  # pipelines refuse sizes and texts in their own ways
            run.error = fiber.error

    def _activate(self, run: _Run) -> None:
        """Give torch's generators the states that a request left them in."""
        if run is not self._active:
            if self._active is not None:
                self._active.random = random_states(self._device, [])
            if run.random:
                set_random_states(self._device, [], run.random)
            self._active = run

    def _advance(self, batch: _Batch) -> None:
        """Compute a step: let all members run until they are between two steps or have ended."""
        for run in batch.members.values():
            self._resume(run)
        while True:
            self._end_members(batch)
            calling = [run for run in batch.members.values() if isinstance(run.fiber.asked, _Call)]
            if not calling:
                return
            answers = list[tuple[_Run, Any, Exception | None]]()
            while calling:
                alike = [run for run in calling if run is calling[0] or self._fit(calling[0], run)]
                calling = [run for run in calling if run not in alike]
                answers += self._compute(batch, alike)
            for answer in answers:
                self._resume(*answer)

    def _fit(self, run: _Run, other: _Run) -> bool:
        call, other_call = run.fiber.asked, other.fiber.asked
        split = self._split_of[call.name][0]
        is_same = call.name == other_call.name and run.lora == other.lora
        return is_same and fits(call.inputs, other_call.inputs, split.table)

    def _compute(
        self, batch: _Batch, runs: Sequence[_Run]
    ) -> list[tuple[_Run, Any, Exception | None]]:
        """Return the outputs of equal calls of requests, or errors."""
        calls: list[_Call] = [run.fiber.asked for run in runs]
        first = calls[0]
        split = self._split_of[first.name][0]
        if split.sparse is not None:
            split.sparse.passes.number = first.number
        try:
            self._adapt(runs[0])
            if len(runs) == 1:
                return [(runs[0], first.call(**first.inputs), None)]
            inputs = [call.inputs for call in calls]
            output = first.call(**merged(inputs, split.table))
            outputs = parts_of(output, first.inputs, split.table, len(runs))
            return [(run, output, None) for run, output in zip(runs, outputs, strict=True)]
        except Exception as failure:
            error = failure
        if len(runs) > 1 and not isinstance(error, CommError):  # maybe too little memory
            if self._places[batch.block].whole is not None:
                leave(error, f"batch {batch.name!r}")  # others may compute meanwhile
            try:
                self._meet(batch, what=", apart")  # on all ranks
            except CommError as lost:
                raise error from lost
            watch_of_world().forget()
            return [answer for run in runs for answer in self._compute(batch, [run])]
        return [(run, None, error) for run in runs]

    def _end_members(self, batch: _Batch) -> None:
        """Report requests that have ended, once all ranks know which have failed."""
        ended = [run for run in batch.members.values() if run.fiber.is_over]
        tickets = dict[str, Ticket]()
        for run in ended if self._leads(batch) else ():
            if run.error is None:
                try:
                    tickets[run.id] = self._post.keep(run.fiber.result)
                except ConfigError as error:
                    run.error = error
        if ended:
            self._meet(batch)
        for run in ended:
            if batch.members.pop(run.id, None) is None:
                if run.id in tickets:
                    self._post.drop(self._mail, tickets[run.id])
            elif self._leads(batch):
                self._report(batch, "done", run, seconds=run.seconds, ticket=tickets[run.id])
                batch.since += run.seconds  # the others' step is without its decoding

    # --- in the fiber of a request ----------------------------------------------------------------

    @property
    def _run(self) -> _Run | None:
        """The request of this thread, if it is a fiber."""
        return self._active if is_within() else None

    @torch.inference_mode()
    def _call(self, run: _Run) -> Any:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_device(self._device)

        def step_ends(_: Any, __: int, ___: Any, carried: dict[str, Any]) -> dict[str, Any]:
            run.num_done += 1
            if run.num_done == run.first_step:
                carried |= self._join(run)
            elif run.num_done > run.first_step:
                latents = leaves_of([run.stepped, carried.get("latents")])
                _check_numbers(f"latents of step {run.num_done}", latents)
                run.carried = carried
                ask(_BOUNDARY)
            run.stepped.clear()
            return carried

        for module, hook in _caches_in([split.model for split in self._splits]):
            hook.reset_state(module)
        torch.manual_seed(run.seed)  # for draws without the generator
        output = run.pipeline(
            **run.arguments,
            generator=run.generator.manual_seed(run.seed),
            callback_on_step_end=step_ends,
            callback_on_step_end_tensor_inputs=run.pipeline._callback_tensor_inputs,
            return_dict=False,
        )
        self._synchronize()
        return output[0] if sound_rate(run.pipeline) is None else list(output[:2])

    def _join(self, run: _Run) -> dict[str, Any]:
        """Restore the state after the earlier steps; return tensors for the pipeline's next one."""
        state, run.state = run.state, None
        assert state is not None
        write_state(self._keepers(run), state["kept"])
        set_random_states(self._device, [run.generator], state["random"])
        run.carried = state["carried"]
        ask(_BOUNDARY)
        return run.carried

    def _encode(self, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            return encode(*args, **kwargs)
        run.num_encoded += 1
        if run.num_encoded > len(run.encoded):
            run.encoded.append(ask(partial(self._encoded, run, encode, *args, **kwargs)))
        return run.encoded[run.num_encoded - 1]

    def _encoded(self, run: _Run, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Encode in the main thread."""
        self._adapt(run)
        return encode(*args, **kwargs)

    def _transform(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            return call(*args, **kwargs)
        if not run.is_begun:
            run.is_begun = True
            if run.state is None:
                ask(_BOUNDARY)
            elif run.first_step == 0:  # joins before the first step
                self._join(run)
        run.num_called += 1  # calls whose result other ranks computed count, too
        if run.num_done < run.first_step:
            return mapped(run.specs[name], self._zeros, lambda nest: isinstance(nest, dict))
        inputs = dict(zip(self._split_of[name][1], args, strict=False)) | kwargs
        output = ask(_Call(name, call, inputs, run.num_called - 1))
        run.specs.setdefault(name, output)  # `_state` takes its shapes and dtypes
        return output

    def _zeros(self, spec: Mapping[str, Any]) -> Tensor:
        return torch.zeros(spec["shape"], dtype=getattr(torch, spec["dtype"]), device=self._device)

    def _decode(self, decode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            return decode(*args, **kwargs)
        return ask(partial(self._decoded, decode, *args, **kwargs))

    def _decoded(self, decode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Decode in the main thread."""
        assert self._batch is not None
        whole = self._places[self._batch.block].whole
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

    def _boundary(self, batch: _Batch) -> None:
        """Do what the first rank of the block decides, until the batch goes on, moves or leaves."""
        if any(run.error is not None for run in batch.members.values()):
            self._meet(batch)
        if batch.members and self._leads(batch):
            self._synchronize()
            since = time.perf_counter()
            self._report(batch, "step")
            for run in batch.members.values() if self._save_every else ():
                if run.num_done and not run.num_done % self._save_every and not run.is_last:
                    with suppress(ConfigError):  # its state cannot travel
                        self._report(batch, "saved", run, ticket=self._post.keep(self._state(run)))
            batch.since = since  # the next step's seconds contain this report and agreement
        while batch.members:
            self._finish(batch)
            decision, order, tickets = _NOTHING, Message(), dict[str, Ticket]()
            if self._leads(batch):
                decision, order, tickets = self._decide(batch)
            decided = self._meet(batch, decision)
            if decided is None:  # without these members the first rank may decide otherwise
                if "kind" in order:  # it was sent
                    batch.kept.append(order)
                for ticket in tickets.values():
                    self._post.drop(self._mail, ticket)
                continue
            action, first, degree = decided.tolist()
            if action == _GO_ON:
                return None
            if action == _MOVE:
                return self._move(batch, Block(first, degree), tickets)
            if action == _PAUSE:
                if self._leads(batch):
                    self._report(batch, "paused", tickets=tickets)
                raise _Left
            if action == _CANCEL:
                run = batch.members.pop(list(batch.members)[first])
                run.fiber.cancel()
                if self._leads(batch):
                    self._report(batch, "cancelled", run)
            else:
                self._board(batch, order)
        return None

    def _board(self, batch: _Batch, order: Message) -> None:
        """Take another request in."""
        if self._leads(batch):
            for rank in self._ranks_of(batch.block)[1:]:
                self._mail.send(rank, **order | {"kind": "member"})
        else:
            while order.get("kind") != "member" or order["batch"] != batch.name:
                order = self._take()
        batch.boarding = order["id"]
        self._admit(batch, [(order["id"], order["ticket"])])
        self._meet(batch)  # it has boarded, or failed, before the next order
        batch.since = time.perf_counter()

    def _finish(self, batch: _Batch) -> None:
        """Let the first rank decode requests after their last step, while others go on."""
        last = [run for run in batch.members.values() if run.is_last]
        if len(last) in (0, len(batch.members)) or self._shares_tiles or batch.block.degree == 1:
            return
        if self._leads(batch):
            alone = _Batch(batch.name, Block(batch.block.first, 1), {run.id: run for run in last})
            with self._without_others(alone.block):
                while alone.members:
                    self._advance(alone)
            batch.since = time.perf_counter()
        for run in last:
            batch.members.pop(run.id).fiber.cancel()

    @contextmanager
    def _without_others(self, block: Block) -> Iterator[None]:
        """Compute calls on a block, of which other ranks know nothing."""
        with ExitStack() as stack:
            for split in self._splits:  # some pipelines denoise once more
                stack.enter_context(split.taking(Way(self._places[block].mesh)))
            for guided in self._guided:
                stack.enter_context(guided.suspended())
            if self._compiles:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def _decide(self, batch: _Batch) -> tuple[Ints, Message, dict[str, Ticket]]:
        """Return [action, *block], the order for it, and tickets of states for joining ranks."""
        order, block, tickets = self._order(batch), batch.block, dict[str, Ticket]()
        action, runs = _ACTIONS[order["action"]], batch.members.values()
        if action == _CANCEL:
            block = Block(list(batch.members).index(order["id"]), 0)
        if action == _MOVE:
            block = Block(*order["block"])
        are_last = all(run.is_last for run in runs) and not self._shares_tiles
        if are_last and action in (_GO_ON, _MOVE):  # one rank decodes
            block = Block(block.first, 1)
            action = _GO_ON if block == batch.block else _MOVE
        joining = set(block.ranks) - set(batch.block.ranks)
        if action == _PAUSE or (action == _MOVE and (joining or (self.stays and not are_last))):
            try:
                for run in runs:
                    tickets[run.id] = self._post.keep(self._state(run))
            except ConfigError as error:
                while tickets:
                    self._post.drop(self._mail, tickets.popitem()[1])
                self._report(batch, "refused", reason=str(error))
                action, block, order = _GO_ON, batch.block, Message()
        return np.array([action, *block], np.int64), order, tickets

    def _order(self, batch: _Batch) -> Message:
        """Return the next order for this batch; drop stale ones of others."""
        with suppress(Empty):
            while True:
                wait_s = None if batch.is_halted else 0.0
                order = batch.kept.popleft() if batch.kept else self._take(wait_s)
                if order["kind"] != "order" or order["batch"] != batch.name:
                    continue
                if order["action"] == "cancel" and order["id"] not in batch.members:
                    continue  # it has ended
                if order["action"] != "halt":
                    batch.since = time.perf_counter()  # halting is no step
                    batch.is_halted &= order["action"] in ("cancel", "board")
                    return order
                self._report(batch, "halted")
                batch.is_halted = True
        return {"action": "go on"}

    def _move(self, batch: _Batch, block: Block, tickets: dict[str, Ticket]) -> None:
        ranks, before = self._ranks_of(block), self._ranks_of(batch.block)
        joining = sorted(set(ranks) - set(before))
        if self._leads(batch):
            facts = {"batch": batch.name, "block": block, "members": [*tickets.items()]}
            for rank in joining:
                self._mail.send(rank, "run", **facts)
        if self._rank not in ranks:
            raise _Left
        batch.block = block
        for run in batch.members.values():
            run.ticket = tickets.get(run.id)
        self._use(block)
        self._enter(batch, waits=bool(joining))

    def _ranks_of(self, block: Block) -> range:
        return range(block.first * self._size, (block.first + block.degree) * self._size)

    def _enter(self, batch: _Batch, *, waits: bool) -> None:
        """Begin to compute on a block; with `waits` once all of its ranks are ready."""
        since = time.perf_counter()
        if waits:
            self._meet(batch)
        if self._leads(batch) and batch.members:
            self._report(batch, "moved", seconds=time.perf_counter() - since)
        batch.since = time.perf_counter()

    def _meet(self, batch: _Batch, decision: Ints = _NOTHING, what: str = "") -> Ints | None:
        """Return what the block's first rank decided; None if requests fail, as all ranks now know.

        All ranks have then fetched the states of members.
        """
        errors = {run.id: run.error for run in batch.members.values() if run.error is not None}
        reasons = {request_id: _reason(error) for request_id, error in errors.items()}
        whole = self._places[batch.block].whole
        control = None if whole is None else whole.control
        if control is not None:
            for request_id, error in errors.items():
                leave(error, f"request {request_id!r}")
            text = json.dumps(reasons).encode() if reasons else b""
            words = np.frombuffer(text.ljust(-(-len(text) // 8) * 8), np.int64)
            values, what = np.concatenate([decision, words]), f"batch {batch.name!r}{what}"
            try:
                rows = agree(control, {}, what=what, values=values, capacity=decision.size)
            except CommError as lost:
                raise next(iter(errors.values()), lost) from lost
            for rank, row in zip(control.ranks, rows, strict=True):
                said = json.loads(row[decision.size :].tobytes() or "{}")
                for request_id, reason in said.items():
                    reasons.setdefault(request_id, f"rank {rank}: {reason}")
            decision = rows[0][: decision.size]
        if reasons:
            watch_of_world().forget()  # the ranks go on, so no failure note may stay
        leads = self._leads(batch)
        for run in list(batch.members.values()):
            if run.ticket is not None and leads:
                self._post.drop(self._mail, run.ticket)
            run.ticket = None
            if run.id in reasons:
                run.fiber.cancel()
                del batch.members[run.id]
                if leads:
                    self._report(batch, "failed", run, reason=reasons[run.id])
            elif run.id == batch.boarding and leads:
                self._report(batch, "boarded", run, seconds=run.seconds)
        batch.boarding = ""
        return None if reasons else decision

    def _use(self, block: Block) -> None:
        """Let models compute on a block, and drop their caches of another block."""
        place, is_new = self._places[block], block not in self._compiled
        branches = None if place.branches is None else _Branches(place.branches)
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

    def _state(self, run: _Run) -> dict[str, Any]:
        """Return the state that another rank needs to continue a request."""
        if self.stays:
            what = "a cache has results of the steps of its tokens on its ranks"
            raise ConfigError(f"{what}, so requests cannot change ranks: leave them in place")
        if run.num_steps is not None and run.num_done > run.num_steps:
            what = f"a {type(self._pipeline).__name__} denoises in several loops"
            raise ConfigError(f"{what}, so its requests cannot change ranks: leave them in place")
        self._activate(run)
        sent = {id(tensor) for tensor in leaves_of([run.encoded, run.stepped])}
        own = {
            name: x for name, x in run.carried.items() if not sent.issuperset(map(id, leaves_of(x)))
        }
        state = {
            "step": run.num_done,
            "encoded": run.encoded,
            "specs": mapped(run.specs, _spec_of),
            "carried": own,
            "stepped": [leaves_of(output) for output in run.stepped],
            "kept": read_state(self._keepers(run)),
            "random": random_states(self._device, [run.generator]),
        }
        item = {"id": run.id, "arguments": run.arguments, "seed": run.seed, "lora": run.lora}
        return item | {"state": state}

    def _keepers(self, run: _Run) -> dict[str, Any]:
        return {"pipeline": run.pipeline, "schedulers": run.schedulers}

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)

    def _report(self, batch: _Batch, what: str, run: _Run | None = None, **facts: Any) -> None:
        """Tell rank 0 about a request, or about all of a batch."""
        facts = {"seconds": time.perf_counter() - batch.since} | facts
        runs = batch.members.values() if run is None else [run]
        members = {run.id: (run.num_done, run.num_steps) for run in runs}
        facts |= {"batch": batch.name, "block": batch.block, "members": members}
        self._mail.send(0, "event", what=what, **facts)


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


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def _spec_of(output: Tensor) -> dict[str, Any]:
    return {"shape": list(output.shape), "dtype": str(output.dtype).removeprefix("torch.")}
