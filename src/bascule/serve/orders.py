"""Orders of rank 0 to the ranks of an engine, and events that it gets back from them."""

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bascule.generate.options import Lora
from bascule.plan.requests import Block
from bascule.serve.post import Mail, Message, Post, Ticket, unpack

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a request, or of all requests of a batch.

    Of a batch: "step": its members have taken a step, or at 0 done steps their prompts are encoded;
    they may change ranks. "halted": it waits for an order. "moved": it continues on `block`.
    "paused": `tickets` are the states of its members. "refused": it could not move or pause, for
    `reason`, and continues. Of a request: "boarded": it has joined its batch. "cancelled". "done":
    `output` is there. "failed": for `reason`. "saved": `output` is a copy of its state, packed. Of
    the engine: "ended", by an error if there is a `reason`. Rank 0 itself queues "asked" and
    "written". "adapter": one rank, of `block`, followed the order `request_id`, or not by `reason`.
    """

    kind: str
    request_id: str  # of a batch's first member; empty for "ended"
    time: float  # `time.monotonic` of rank 0 when it got the event
    block: Block  # ranks of the request; after a move the new ones
    step: int = 0  # number of steps done
    num_steps: int | None = None  # of the request; None if the pipeline does not say
    # Of the step or all encoding; "moved": the first rank's wait for others; "done": the decoding.
    seconds: float = 0.0
    reason: str = ""  # for people to read
    output: Any = None  # the pipeline's: PIL images, frames, arrays or tensors; or a state
    # Of a batch: by request, `step` and `num_steps`, the first request first.
    members: Mapping[str, tuple[int, int | None]] = field(default_factory=dict[str, Any])
    tickets: Mapping[str, Ticket] = field(default_factory=dict[str, Ticket])

    def by_request(self) -> "list[Event]":
        """Return the event of each of its requests."""
        if len(self.members) < 2:
            return [self]
        return [
            replace(self, request_id=request_id, step=step, num_steps=num_steps)
            for request_id, (step, num_steps) in self.members.items()
        ]


class Orders:
    """Sender of orders to the ranks of an engine, and queue of events; on rank 0, not thread-safe.

    A batch has a name that is never used again. Ranks follow an order when the step of their batch
    ends, and ignore orders for others. The scheduler gives each rank one batch, and each batch one
    order at a time, but for members that board or are cancelled. `num_ranks` counts replicas of
    `size` ranks, if requests get whole replicas.
    """

    size = 1
    batches = True  # whether a batch may have several members

    def __init__(self, post: Post, num_ranks: int, size: int = 1) -> None:
        self._post, self._mail, self.num_ranks, self.size = post, post.mail(), num_ranks, size
        self.world_size = num_ranks * size
        self._is_over = False
        self.events = queue.SimpleQueue[Event]()  # in the order in which rank 0 got them
        post.on_event = self._hear

    def keep(
        self,
        request_id: str,
        arguments: dict[str, Any] | Tensor,
        seed: int,
        lora: Sequence[Lora] = (),
    ) -> Ticket:
        """Store a request and return its ticket; ConfigError if an argument cannot be sent.

        A new one by its arguments; a saved one by its packed state, which has all.
        """
        if isinstance(arguments, Tensor):
            return self._post.keep_packed(arguments)
        item = {"id": request_id, "arguments": arguments, "seed": seed, "state": None}
        return self._post.keep(item | {"lora": list(map(asdict, lora))})

    def run(self, batch: str, block: Block, members: Sequence[tuple[str, Ticket]]) -> None:
        """Let idle ranks begin requests, or continue them from their states."""
        self._send(block, "run", to_all=True, batch=batch, members=members, block=block)

    def order(self, at: Block, batch: str, action: str, **what: Any) -> None:
        """Tell a running batch what to do after its step.

        "halt": wait for another order. "go on". "move" to a `block` of idle ranks or its own ones.
        "pause": its first rank stores its members' states. "cancel": the request `id` ends, the
        others go on. "board": take in the request `id` from its `ticket`.
        """
        self._send(at, "order", batch=batch, action=action, **what)

    def adapt(self, number: str, name: str, path: str | None, digest: str | None) -> None:
        """Let each rank load an adapter, or remove it (no path), when it next looks for orders."""
        settings = {"id": number, "name": name, "path": path, "digest": digest}
        self._send(Block(0, self.num_ranks), "adapter", to_all=True, **settings)

    def drop(self, ticket: Ticket) -> None:
        """Let the rank that stores a state drop it."""
        if not self._is_over:
            self._post.drop(self._mail, ticket)

    def stop(self) -> None:
        """End `Engine.run` on all ranks, none of which has a request."""
        self._send(Block(0, self.num_ranks), "stop", to_all=True)

    def abort(self, reason: str) -> None:
        """End the engine by an error on all ranks, even during requests."""
        self._send(Block(0, self.num_ranks), "over", to_all=True, reason=reason)

    def are_alive(self) -> bool:
        """Wait for a sign of life of each rank; return whether all gave one. Thread-safe."""
        return self._post.hears_all()

    def tell(self, kind: str, request_id: str = "", reason: str = "") -> None:
        """Queue an event of rank 0 itself."""
        block = Block(0, self.num_ranks)
        self.events.put(Event(kind, request_id, time.monotonic(), block, reason=reason))

    def end(self, reason: str) -> None:
        """Queue "ended"; later orders are not sent, as nobody would read them."""
        self._is_over = True
        self.tell("ended", reason=reason)

    def ranks_of(self, block: Block | None) -> range:
        """Return the ranks of a block, which may count replicas; none without a block."""
        if block is None:
            return range(0)
        return range(block.first * self.size, (block.first + block.degree) * self.size)

    def _hear(self, mail: Mail, message: Message) -> None:
        """Queue the event of a message, in the thread of the post."""
        now, kind, output = time.monotonic(), message["what"], None
        if kind == "adapter":
            block, reason = Block(*message["block"]), message["reason"]
            return self.events.put(Event(kind, message["id"], now, block, reason=reason))
        if kind in ("done", "saved"):
            ticket = Ticket(*message["ticket"])
            output = self._post.fetch_packed(mail, ticket, "result")
            output = unpack(output, _HOST) if kind == "done" else output
            self._post.drop(mail, ticket)
        members = {
            name: (step, num_steps) for name, (step, num_steps) in message["members"].items()
        }
        tickets = {name: Ticket(*ticket) for name, ticket in message.get("tickets", {}).items()}
        first, (step, num_steps) = next(iter(members.items()))
        facts = {"seconds": message["seconds"], "reason": message.get("reason", "")}
        facts |= {"output": output, "members": members, "tickets": tickets}
        block = Block(*message["block"])
        self.events.put(Event(kind, first, now, block, step, num_steps, **facts))

    def _send(self, to: Block, kind: str, *, to_all: bool = False, **message: Any) -> None:
        """Send a message to the first rank of a block, or to all of them."""
        if not self._is_over:
            ranks = self.ranks_of(to)
            for rank in ranks if to_all else ranks[:1]:
                self._mail.send(rank, kind, **message)
