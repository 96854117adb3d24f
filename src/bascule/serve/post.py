"""Messages between ranks by the store of their job, and items that a rank keeps for others.

A thread of each rank waits for its messages. It hands items out itself, so a rank that computes
need not stop for others, and two ranks may fetch from each other.
"""

import hmac
import json
import logging
import queue
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from bascule.comm.collectives import Transfers, broadcast
from bascule.comm.groups import RankGroup, member_of
from bascule.comm.items import leaves_of, mapped, parcel, read

Message = dict[str, Any]
logger = logging.getLogger(__name__)

_LONG = timedelta(hours=1)  # of one wait; the next follows
_BEAT_S = 1.0  # between two signs of life
_SILENT_S = 30.0  # without them, after which a rank is given up
_SIGNED = 32  # bytes of a signature


class Ticket(NamedTuple):
    """An item that a rank keeps."""

    holder: int
    key: str
    num_bytes: int


class Mail:
    """The boxes of all ranks, over a connection to the store; each thread has its own object.

    Messages are signed, as the store takes them from anybody who reaches its port.
    """

    def __init__(self, name: str, secret: bytes) -> None:
        job: Any = c10d._get_default_store()
        self._name, self._secret, self._store = name, secret, job.clone()

    def send(self, rank: int, kind: str, **message: Any) -> None:
        """Put a message into the box of a rank; all of one sender are read in order."""
        key = f"{self._name}/{rank}/{self._store.add(f'{self._name}/{rank}', 1)}"
        text = json.dumps({"kind": kind, **message}).encode()
        self._store.set(key, self._signature(key, text) + text)

    def take(self, rank: int, place: int) -> Message:
        """Wait for the message of a place, counted from 1, and take it out; {} from a stranger."""
        key = f"{self._name}/{rank}/{place}"
        while True:
            try:
                self._store.wait([key], _LONG)
                break
            except dist.DistNetworkError:
                raise
            except RuntimeError as error:  # the stores of torch have errors of their own for this
                if "timeout" not in str(error).lower():
                    raise
        sent: bytes = self._store.get(key)
        self._store.delete_key(key)
        text = sent[_SIGNED:]
        is_ours = hmac.compare_digest(sent[:_SIGNED], self._signature(key, text))
        return json.loads(text) if is_ours else {}

    def _signature(self, key: str, text: bytes) -> bytes:
        return hmac.digest(self._secret, f"{key} ".encode() + text, "sha256")

    def sign(self, rank: int, more: int) -> int:
        """Add to the signs of life of a rank, and return how many there are."""
        return self._store.add(f"{self._name}/life/{rank}", more)


class Post:
    """The box of this rank, read by a thread, and the items it keeps.

    Another thread gives signs of life, and tells all ranks if those of the next rank stop.

    Args:
        group: All ranks, over a group of gloo of its own.
        silent_s: Seconds without a sign of life, 30 at most, after which a rank is given up.

    Attributes:
        inbox: Messages for the rank.
        on_event: Gets events in the thread, with its mail.
    """

    def __init__(self, group: RankGroup, silent_s: float = _SILENT_S) -> None:
        self._group, self._name = group, f"bascule/serve/{group.key}"
        self._rank = group.ranks[group.rank]
        self._neighbour = group.ranks[(group.rank + 1) % group.size]
        # Beats are counted, not clocked: a machine that was paused lost no time.
        self._most_silent = max(2, round(min(silent_s, _SILENT_S) / _BEAT_S))
        self.on_event: Callable[[Mail, Message], None] | None = None
        own = torch.frombuffer(bytearray(secrets.token_bytes(_SIGNED)), dtype=torch.uint8)
        self._secret = bytes(broadcast(group, "the secret of the post", own).tolist())
        self._items: dict[str, Tensor] = {}
        self._numbers = count()
        self.inbox = queue.SimpleQueue[Message]()
        self._thread = threading.Thread(target=self._run, name="bascule post", daemon=True)
        self._thread.start()
        self._is_over = threading.Event()
        threading.Thread(target=self._beat, name="bascule beat", daemon=True).start()

    def mail(self) -> Mail:
        """Return the boxes of all ranks, for one thread."""
        return Mail(self._name, self._secret)

    def keep(self, item: Any) -> Ticket:
        """Keep a copy of an item on the host; ConfigError if something in it cannot travel."""
        packed = pack(item)
        key = str(next(self._numbers))
        self._items[key] = packed
        return Ticket(self._rank, key, packed.numel())

    def fetch(self, mail: Mail, ticket: Ticket, device: torch.device, name: str = "state") -> Any:
        """Return an item. Threads of a rank that fetch do so under names of their own."""
        if ticket.holder == self._rank:
            return unpack(self._items[ticket.key], device)
        mail.send(ticket.holder, "fetch", key=ticket.key, to=self._rank, name=name)
        received = torch.empty(ticket.num_bytes, dtype=torch.uint8)
        Transfers(self._pair(name, ticket.holder, self._rank), name, {}, {0: received}).wait()
        return unpack(received, device)

    def drop(self, mail: Mail, ticket: Ticket) -> None:
        """Let the holder forget an item, after all have fetched it."""
        mail.send(ticket.holder, "drop", key=ticket.key)

    def hears_all(self) -> bool:
        """Wait for a sign of life of each rank; return whether all came before the end."""
        with suppress(RuntimeError):  # the store is gone
            mail = self.mail()
            before = {rank: mail.sign(rank, 0) for rank in self._group.ranks}
            for _ in range(self._most_silent):
                if self._is_over.wait(_BEAT_S):
                    break
                if all(mail.sign(rank, 0) > signs for rank, signs in before.items()):
                    return True
        return False

    def end(self, mail: Mail) -> None:
        """End the thread after the messages that are there."""
        self._is_over.set()
        with suppress(RuntimeError):  # the store is gone, and the thread with it
            mail.send(self._rank, "end")
            self._thread.join(10.0)

    def _pair(self, name: str, holder: int, to: int) -> RankGroup:
        return member_of(self._group.process_group, name, ranks=(holder, to))

    def _beat(self) -> None:
        """Give a sign of life once a second, and watch the next rank's signs."""
        mail, signs, num_silent = self.mail(), 0, 0
        with suppress(RuntimeError):  # the store is gone, as the other thread says
            while True:
                mail.sign(self._rank, 1)
                before, signs = signs, mail.sign(self._neighbour, 0)
                num_silent = num_silent + 1 if signs == before > 0 else 0
                if num_silent == self._most_silent:
                    reason = f"no sign of life from rank {self._neighbour} for {num_silent} s"
                    for rank in self._group.ranks:
                        mail.send(rank, "over", reason=reason)
                if self._is_over.wait(_BEAT_S):
                    return

    def _run(self) -> None:
        try:
            mail = self.mail()
            for place in count(1):
                message = mail.take(self._rank, place)
                match message.get("kind"):
                    case None:
                        logger.warning("a message that no rank of this job sent is left out")
                    case "end":
                        return
                    case "fetch":
                        name, to = message["name"], message["to"]
                        item = {1: self._items[message["key"]]}
                        Transfers(self._pair(name, self._rank, to), name, item, {}).wait()
                    case "drop":
                        self._items.pop(message["key"], None)
                    case "event" if self.on_event is not None:
                        self.on_event(mail, message)
                    case _:
                        self.inbox.put(message)
        except BaseException as error:  # of the store or of a rank that is gone
            self.inbox.put({"kind": "over", "reason": f"{type(error).__name__}: {error}"})


@torch.inference_mode(False)
def pack(item: Any) -> Tensor:
    """Return an item with tensors, arrays and pictures as bytes; ConfigError if it cannot go."""
    on_device = [not tensor.is_cpu for tensor in leaves_of(item)]
    on_host = mapped(mapped(item, lambda tensor: tensor.detach().cpu()), _of_picture, _is_picture)
    made = parcel({"item": on_host, "on_device": on_device})
    packed = torch.zeros(made.num_bytes, dtype=torch.uint8)
    made.write(packed)
    return packed


def unpack(packed: Tensor, device: torch.device) -> Any:
    """Return the item that was packed, with tensors of its own on the host or this device."""
    made = read(packed)
    on_device = iter(made["on_device"])
    item = mapped(made["item"], lambda leaf: leaf.to(device) if next(on_device) else leaf.clone())
    return mapped(item, _to_picture, lambda nest: isinstance(nest, dict) and "picture" in nest)


def _is_picture(nest: Any) -> bool:
    return isinstance(nest, Image.Image)


def _of_picture(picture: Image.Image) -> Message:
    if picture.mode == "P":  # its colors are not in its bytes
        picture = picture.convert("RGBA")
    return {"picture": picture.tobytes(), "mode": picture.mode, "size": list(picture.size)}


def _to_picture(fields: Message) -> Image.Image:
    return Image.frombytes(fields["mode"], tuple(fields["size"]), fields["picture"])
