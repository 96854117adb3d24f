"""What rank 0 tells the ranks of an engine about requests, and what it hears from them."""

import queue
import time
from dataclasses import dataclass
from typing import Any

import torch

from bascule.plan.requests import Block
from bascule.serve.post import Mail, Message, Post, Ticket

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Event:
    """News of a request.

    Attributes:
        kind: "step": `step` steps are done (0: its prompts are encoded), and the request may change
            ranks. "halted": it waits for an order. "moved": it goes on, on `block`. "paused":
            `ticket` is its state. "cancelled". "done": `output` is there. "failed": for `reason`.
            "refused": it could not move or pause, for `reason`, and goes on. "ended": the engine
            ended, for `reason` unless it was told to stop. "asked" and "written": of rank 0 itself.
        request_id: Empty for "ended".
        time: When rank 0 knew, by its `time.monotonic`.
        block: The ranks that computed, or after a move compute, it.
        step: Steps done.
        num_steps: Of the request; None if the pipeline does not say.
        seconds: That the step took, or the encoding; for "moved" that the first rank waited for the
            others, for "done" that decoding took.
        reason: For people.
        output: Images of PIL, frames, arrays or tensors, as the pipeline returns them first.
        ticket: Of the state of a request that is paused.
    """

    kind: str
    request_id: str
    time: float
    block: Block
    step: int = 0
    num_steps: int | None = None
    seconds: float = 0.0
    reason: str = ""
    output: Any = None
    ticket: Ticket | None = None


class Orders:
    """Sends orders to the ranks of an engine; on rank 0, for one thread at a time.

    Ranks follow orders when their step ends, and leave out those for requests that they do not
    compute. That a rank has one request, and a request one order at a time, the scheduler sees to.

    Attributes:
        num_ranks: Of the engine; replicas, where these take the place of ranks in blocks.
        events: What ranks did, in the order in which it became known.
    """

    def __init__(self, post: Post, num_ranks: int, size: int = 1) -> None:
        self._post, self._mail, self.num_ranks, self._size = post, post.mail(), num_ranks, size
        self._is_over = False
        self.events = queue.SimpleQueue[Event]()
        post.on_event = self._hear

    def keep(self, request_id: str, arguments: dict[str, Any], seed: int) -> Ticket:
        """Return the ticket of a request that begins; ConfigError if an argument cannot travel."""
        item = {"id": request_id, "arguments": arguments, "seed": seed, "state": None}
        return self._post.keep(item)

    def run(self, request_id: str, block: Block, ticket: Ticket) -> None:
        """Let free ranks begin a request, or go on with its state."""
        self._send(block, "run", to_all=True, id=request_id, ticket=ticket, block=block)

    def order(self, at: Block, request_id: str, action: str, block: Block | None = None) -> None:
        """Order what becomes of a request after its step, which ranks compute.

        "halt": it waits for another order. "go on" as it is. "move" to a block of ranks that are
        free, or its own. "pause": its first rank keeps its state. "cancel".
        """
        self._send(at, "order", id=request_id, action=action, block=block)

    def drop(self, ticket: Ticket) -> None:
        """Let the holder of a state forget it."""
        if not self._is_over:
            self._post.drop(self._mail, ticket)

    def stop(self) -> None:
        """End `run` of the engine on all ranks, none of which has a request."""
        self._send(Block(0, self.num_ranks), "stop", to_all=True)

    def abort(self, reason: str) -> None:
        """End the engine by an error on all ranks, also where requests run."""
        self._send(Block(0, self.num_ranks), "over", to_all=True, reason=reason)

    def are_alive(self) -> bool:
        """Wait for a sign of life of each rank; return whether all gave one; in any thread."""
        return self._post.hears_all()

    def tell(self, kind: str, request_id: str = "", reason: str = "") -> None:
        """Queue news of rank 0 itself after those of the ranks."""
        block = Block(0, self.num_ranks)
        self.events.put(Event(kind, request_id, time.monotonic(), block, reason=reason))

    def end(self, reason: str) -> None:
        """Report that the engine has ended; what is sent from now on, nobody would read."""
        self._is_over = True
        self.tell("ended", reason=reason)

    def _hear(self, mail: Mail, message: Message) -> None:
        """Take news, in the thread of the post."""
        now, what = time.monotonic(), message["what"]
        ticket = Ticket(*message["ticket"]) if message.get("ticket") else None
        output = None
        if what == "done" and ticket is not None:
            output = self._post.fetch(mail, ticket, _HOST, "result")
            self._post.drop(mail, ticket)
            ticket = None
        facts = {name: message[name] for name in ("step", "num_steps", "seconds")}
        facts |= {"reason": message.get("reason", ""), "output": output, "ticket": ticket}
        self.events.put(Event(what, message["id"], now, Block(*message["block"]), **facts))

    def _send(self, to: Block, kind: str, *, to_all: bool = False, **message: Any) -> None:
        """Send a message to the first rank of a block, or to all of them."""
        if not self._is_over:
            first, num = to.first * self._size, to.degree * self._size if to_all else 1
            for rank in range(first, first + num):
                self._mail.send(rank, kind, **message)
