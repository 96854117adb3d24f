"""Orders of rank 0 to the ranks of an engine, and events that it gets back from them."""

import queue
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bascule.plan.requests import Block
from bascule.serve.post import Mail, Message, Post, Ticket, unpack

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a request.

    Its kind is "step": `step` steps are done (0: its prompts are encoded), and the request may
    change ranks. "halted": it waits for an order. "moved": it continues on `block`. "paused":
    `ticket` is its state. "cancelled". "done": `output` is there. "failed": for `reason`.
    "refused": it could not move or pause, for `reason`, and continues. "saved": `output` is a copy
    of its state, packed. "ended": the engine ended, by an error if there is a `reason`. Rank 0
    itself queues "asked" and "written".
    """

    kind: str
    request_id: str  # empty for "ended"
    time: float  # `time.monotonic` of rank 0 when it got the event
    block: Block  # ranks of the request; after a move the new ones
    step: int = 0  # number of steps done
    num_steps: int | None = None  # of the request; None if the pipeline does not say
    # Of the step or the encoding; "moved": the first rank's wait for others; "done": the decoding.
    seconds: float = 0.0
    reason: str = ""  # for people to read
    output: Any = None  # the pipeline's first: PIL images, frames, arrays or tensors; or a state
    ticket: Ticket | None = None  # of a paused request's state


class Orders:
    """Sender of orders to the ranks of an engine, and queue of events; on rank 0, not thread-safe.

    Ranks follow an order when their step ends, and ignore orders for requests they do not compute.
    The scheduler gives each rank one request, and each request one order, at a time. `num_ranks`
    counts replicas of `size` ranks, if requests get whole replicas.
    """

    size = 1

    def __init__(self, post: Post, num_ranks: int, size: int = 1) -> None:
        self._post, self._mail, self.num_ranks, self.size = post, post.mail(), num_ranks, size
        self._is_over = False
        self.events = queue.SimpleQueue[Event]()  # in the order in which rank 0 got them
        post.on_event = self._hear

    def keep(self, request_id: str, arguments: dict[str, Any] | Tensor, seed: int) -> Ticket:
        """Store a request and return its ticket; ConfigError if an argument cannot be sent.

        A new one by its arguments; a saved one by its packed state, which has all.
        """
        if isinstance(arguments, Tensor):
            return self._post.keep_packed(arguments)
        item = {"id": request_id, "arguments": arguments, "seed": seed, "state": None}
        return self._post.keep(item)

    def run(self, request_id: str, block: Block, ticket: Ticket) -> None:
        """Let idle ranks begin a request, or continue it from its state."""
        self._send(block, "run", to_all=True, id=request_id, ticket=ticket, block=block)

    def order(self, at: Block, request_id: str, action: str, block: Block | None = None) -> None:
        """Tell a running request what to do after its step.

        "halt": wait for another order. "go on". "move" to a block of idle ranks or its own ones.
        "pause": its first rank stores its state. "cancel".
        """
        self._send(at, "order", id=request_id, action=action, block=block)

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
        ticket = Ticket(*message["ticket"]) if message.get("ticket") else None
        if kind in ("done", "saved") and ticket is not None:
            output = self._post.fetch_packed(mail, ticket, "result")
            output = unpack(output, _HOST) if kind == "done" else output
            self._post.drop(mail, ticket)
            ticket = None
        facts = {name: message[name] for name in ("step", "num_steps", "seconds")}
        facts |= {"reason": message.get("reason", ""), "output": output, "ticket": ticket}
        self.events.put(Event(kind, message["id"], now, Block(*message["block"]), **facts))

    def _send(self, to: Block, kind: str, *, to_all: bool = False, **message: Any) -> None:
        """Send a message to the first rank of a block, or to all of them."""
        if not self._is_over:
            ranks = self.ranks_of(to)
            for rank in ranks if to_all else ranks[:1]:
                self._mail.send(rank, kind, **message)
