"""The orders that rank 0 gives the ranks of an engine, and the news it gets."""

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from bascule.serve.blocks import Block, Event
from bascule.serve.post import Mail, Message, Post, Ticket

_HOST = torch.device("cpu")
_ENDS = "cancelled", "done", "failed"
_LEAVES = "paused", *_ENDS


@dataclass(slots=True)
class _Record:
    """A request that has not ended."""

    block: Block  # that computes it, or did before it was paused
    last: Event | None = None
    ticket: Ticket | None = None  # of its state, while it is paused
    order: str = ""  # that it is to follow at the next end of a step
    is_cancelled: bool = False  # after that


class Controller:
    """Starts requests and moves them between blocks of ranks; any thread of rank 0 may call it.

    Orders return at once. The ranks follow them when their step ends, and `events` has what they
    did; an order for a request that has ended, or rests, is left out. A request has one order at a
    time, and a rank one request, which is the scheduler's to see to.

    Attributes:
        num_ranks: Of the engine; replicas, where these take the place of ranks in blocks.
        events: `Event`s in the order in which they became known.
    """

    def __init__(self, post: Post, num_ranks: int, size: int = 1) -> None:
        self._post, self._mail, self.num_ranks, self._size = post, post.mail(), num_ranks, size
        self.events = queue.SimpleQueue[Event]()
        self._lock = threading.Lock()
        self._records: dict[str, _Record] = {}
        self._users: dict[int, str] = {}  # ids of requests, by rank
        self._is_closed = False
        post.on_event = self._handle

    @property
    def is_closed(self) -> bool:
        """True if no request can start any more."""
        return self._is_closed

    @property
    def free_ranks(self) -> list[int]:
        """Ranks that no request has, or is to get."""
        with self._lock:
            return [rank for rank in range(self.num_ranks) if rank not in self._users]

    def start(self, request_id: str, arguments: Mapping[str, Any], seed: int, block: Block) -> None:
        """Start a request on free ranks.

        Args:
            request_id: Unlike those of all requests that have not ended.
            arguments: Of the pipeline: numbers, texts, arrays, tensors and images of PIL.
            seed: Of its noise.
            block: Ranks that are free.

        Raises:
            ConfigError: An argument cannot travel.
        """
        item = {"id": request_id, "arguments": dict(arguments), "seed": seed, "state": None}
        ticket = self._post.keep(item)
        with self._lock:
            if not self._is_closed:
                self._records[request_id] = _Record(block)
                self._run(request_id, block, ticket)

    def move(self, request_id: str, block: Block) -> None:
        """Let a request go on with other ranks, all of them its own or free, after its step."""
        with self._lock:
            if self._order(request_id, "move", block):
                self._take(request_id, block)

    def halt(self, request_id: str) -> None:
        """Let a request wait, after its step, for what is ordered then."""
        with self._lock:
            self._order(request_id, "halt")

    def go_on(self, request_id: str) -> None:
        """Let a halted request go on as it is."""
        with self._lock:
            if (record := self._records.get(request_id)) is not None:
                self._send(record.block, "order", id=request_id, action="go on")

    def pause(self, request_id: str) -> None:
        """Stop a request after its step; the rank that led it keeps its state."""
        with self._lock:
            self._order(request_id, "pause")

    def resume(self, request_id: str, block: Block) -> None:
        """Let a paused request go on, on free ranks."""
        with self._lock:
            record = self._records.get(request_id)
            if record is not None and record.ticket is not None and not self._is_closed:
                self._run(request_id, block, record.ticket)
                record.block, record.ticket = block, None

    def cancel(self, request_id: str) -> None:
        """End a request after its step."""
        with self._lock:
            if request_id in self._records:
                self._cancel(request_id)

    def close(self) -> None:
        """End all requests after their steps, and then `run` on all ranks."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                if not self._records:
                    self._stop()
                for request_id in list(self._records):
                    self._cancel(request_id)

    # --- news, in the thread of the post ----------------------------------------------------------

    def _handle(self, mail: Mail, message: Message) -> None:
        now, what, request_id = time.monotonic(), message["what"], message["id"]
        ticket = Ticket(*message["ticket"]) if message.get("ticket") else None
        output, block = None, Block(*message["block"])
        if what == "done" and ticket is not None:
            output = self._post.fetch(mail, ticket, _HOST, "result")
            self._post.drop(mail, ticket)
        facts = {name: message[name] for name in ("step", "num_steps", "seconds")}
        facts |= {"reason": message.get("reason", ""), "output": output}
        with self._lock:
            self._records[request_id].last = event = Event(what, request_id, now, block, **facts)
            self.events.put(event)
            if what != "step":
                self._note(request_id, what, block, ticket)

    def _note(self, request_id: str, what: str, block: Block, ticket: Ticket | None) -> None:
        record = self._records[request_id]
        record.block, record.order, record.ticket = block, "", ticket
        kept = () if what in _LEAVES else block.ranks
        users = self._users.items()
        self._users = {rank: one for rank, one in users if one != request_id or rank in kept}
        if what in _ENDS:
            self._forget(request_id)
        elif record.is_cancelled:
            self._cancel(request_id)

    def end(self, reason: str) -> None:
        """Report that the engine has ended."""
        with self._lock:
            self._is_closed = True
            block = Block(0, self.num_ranks)
            self.events.put(Event("ended", "", time.monotonic(), block, reason=reason))

    # --- with the lock ----------------------------------------------------------------------------

    def _forget(self, request_id: str) -> None:
        del self._records[request_id]
        if self._is_closed and not self._records:
            self._stop()

    def _stop(self) -> None:
        self._send(Block(0, self.num_ranks), "stop", to_all=True)

    def _cancel(self, request_id: str) -> None:
        record = self._records[request_id]
        if record.ticket is not None:
            self._post.drop(self._mail, record.ticket)
            assert record.last is not None  # that it is paused
            self.events.put(replace(record.last, kind="cancelled", time=time.monotonic()))
            self._forget(request_id)
        elif record.order:
            record.is_cancelled = True
        else:
            self._order(request_id, "cancel")

    def _take(self, request_id: str, block: Block) -> None:
        self._users |= dict.fromkeys(block.ranks, request_id)

    def _run(self, request_id: str, block: Block, ticket: Ticket) -> None:
        self._take(request_id, block)
        self._send(block, "run", to_all=True, id=request_id, ticket=ticket, block=block)

    def _order(self, request_id: str, action: str, block: Block | None = None) -> bool:
        """Give an order, unless a request has ended, rests or has one; return whether it was given.

        News of a step may be older than the rest that followed it.
        """
        record = self._records.get(request_id)
        if record is None or record.order or record.ticket is not None:
            return False
        record.order = action
        self._send(record.block, "order", id=request_id, action=action, block=block)
        return True

    def _send(self, to: Block, kind: str, *, to_all: bool = False, **message: Any) -> None:
        """Send a message to the first rank of a block, or to all of them."""
        first, num = to.first * self._size, to.degree * self._size if to_all else 1
        for rank in range(first, first + num):
            self._mail.send(rank, kind, **message)
