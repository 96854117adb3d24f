"""Messages between ranks over the job's store, and items that a rank stores for others to fetch.

A thread of each rank waits for messages and sends the items, so a rank need not stop computing for
others, and two ranks may fetch from each other.
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

from bascule.comm import threads
from bascule.comm.collectives import Transfers, broadcast
from bascule.comm.groups import RankGroup, member_of
from bascule.comm.items import leaves_of, mapped, parcel, read

Message = dict[str, Any]
logger = logging.getLogger(__name__)

_WAIT = timedelta(hours=1)  # longest wait in the store, repeated without end
_BEAT_S = 1.0  # between two signs of life
_SILENT_S = 30.0  # without signs of life, after which a rank is given up
_SIGNATURE_BYTES = 32


class Ticket(NamedTuple):
    """Address of an item that a rank stores."""

    holder: int
    key: str
    num_bytes: int


class Mail:
    """Message boxes of all ranks in the store; each thread needs an object of its own.

    Messages are signed, as the store accepts them from anybody who reaches its port.
    """

    def __init__(self, name: str, secret: bytes) -> None:
        job: Any = c10d._get_default_store()
        self._name, self._secret, self._store = name, secret, job.clone()

    def send(self, rank: int, kind: str, **message: Any) -> None:
        """Put a message into a rank's box; the rank reads a sender's messages in order."""
        key = f"{self._name}/{rank}/{self._store.add(f'{self._name}/{rank}', 1)}"
        text = json.dumps({"kind": kind, **message}).encode()
        self._store.set(key, self._signature(key, text) + text)

    def take(self, rank: int, number: int) -> Message:
        """Wait for and remove a rank's message `number` (1 = first); {} if its signature fails."""
        key = f"{self._name}/{rank}/{number}"
        while True:
            try:
                self._store.wait([key], _WAIT)
                break
            except dist.DistNetworkError:
                raise
            except RuntimeError as error:  # each store of torch has its own error for a timeout
                if "timeout" not in str(error).lower():
                    raise
        message: bytes = self._store.get(key)
        self._store.delete_key(key)
        signature, text = message[:_SIGNATURE_BYTES], message[_SIGNATURE_BYTES:]
        is_ours = hmac.compare_digest(signature, self._signature(key, text))
        return json.loads(text) if is_ours else {}

    def _signature(self, key: str, text: bytes) -> bytes:
        return hmac.digest(self._secret, f"{key} ".encode() + text, "sha256")

    def count_signs(self, rank: int, num_new: int = 0) -> int:
        """Add to the signs of life of a rank; return how many it has given."""
        return self._store.add(f"{self._name}/life/{rank}", num_new)


class Post:
    """Message box of this rank, read by a thread, and the items that it stores for others.

    Another thread gives signs of life, and tells all ranks if the next rank gives none.

    Args:
        group: All ranks, in a gloo group for this purpose alone.
        silent_s: Seconds without a sign of life, 30 at most, after which a rank counts as dead.
    """

    def __init__(self, group: RankGroup, silent_s: float = _SILENT_S) -> None:
        self._group, self._name = group, f"bascule/serve/{group.key}"
        self._rank = group.ranks[group.rank]
        self._neighbour = group.ranks[(group.rank + 1) % group.size]
        # Beats are counted, not timed, so that a suspended machine gives nobody up.
        self._most_silent = max(2, round(min(silent_s, _SILENT_S) / _BEAT_S))
        self.on_event: Callable[[Mail, Message], None] | None = None  # called in the thread
        secret = torch.frombuffer(bytearray(secrets.token_bytes(32)), dtype=torch.uint8)
        self._secret = bytes(broadcast(group, "the secret of the post", secret).tolist())
        self._items: dict[str, Tensor] = {}
        self._numbers = count()
        self.inbox = queue.SimpleQueue[Message]()  # messages for the rank
        self.adapter_orders = queue.SimpleQueue[Message]()  # also in the inbox, to wake the rank
        self._thread = threading.Thread(target=self._run, name="bascule post", daemon=True)
        self._thread.start()
        self._is_over = threading.Event()
        threads.start(self._beat, "bascule beat", self._end_beat)

    def mail(self) -> Mail:
        """Return the boxes of all ranks, for one thread."""
        return Mail(self._name, self._secret)

    def keep(self, item: Any) -> Ticket:
        """Store a copy of an item on the host; ConfigError if something in it cannot be sent."""
        return self.keep_packed(pack(item))

    def keep_packed(self, packed: Tensor) -> Ticket:
        """Store a packed item."""
        key = str(next(self._numbers))
        self._items[key] = packed
        return Ticket(self._rank, key, packed.numel())

    def fetch(self, mail: Mail, ticket: Ticket, device: torch.device, name: str = "state") -> Any:
        """Fetch an item from its rank. Each fetching thread of a rank needs its own `name`."""
        return unpack(self.fetch_packed(mail, ticket, name), device)

    def fetch_packed(self, mail: Mail, ticket: Ticket, name: str) -> Tensor:
        """Fetch an item as its bytes."""
        if ticket.holder == self._rank:
            return self._items[ticket.key]
        mail.send(ticket.holder, "fetch", key=ticket.key, to=self._rank, name=name)
        received = torch.empty(ticket.num_bytes, dtype=torch.uint8)
        Transfers(self._pair(name, ticket.holder, self._rank), name, {}, {0: received}).wait()
        return received

    def drop(self, mail: Mail, ticket: Ticket) -> None:
        """Let the rank that stores an item drop it, after all have fetched it."""
        mail.send(ticket.holder, "drop", key=ticket.key)

    def hears_all(self) -> bool:
        """Wait for a sign of life of each rank; return False if one gives none, or at the end."""
        with suppress(RuntimeError):  # the store is gone
            mail = self.mail()
            before = {rank: mail.count_signs(rank) for rank in self._group.ranks}
            for _ in range(self._most_silent):
                if self._is_over.wait(_BEAT_S):
                    break
                if all(mail.count_signs(rank) > signs for rank, signs in before.items()):
                    return True
        return False

    def end(self, mail: Mail) -> None:
        """End the threads, after the messages sent so far."""
        self._is_over.set()
        with suppress(RuntimeError):  # the store is gone, and the thread with it
            mail.send(self._rank, "end")
            self._thread.join(10.0)

    def _pair(self, name: str, holder: int, to: int) -> RankGroup:
        return member_of(self._group.process_group, name, ranks=(holder, to))

    def _end_beat(self) -> float:
        self._is_over.set()
        return _BEAT_S

    def _beat(self) -> None:
        """Give a sign of life once a second, and watch the next rank's signs."""
        mail, signs, num_silent = self.mail(), 0, 0
        with suppress(RuntimeError):  # the store is gone, as the other thread says
            while True:
                mail.count_signs(self._rank, 1)
                before, signs = signs, mail.count_signs(self._neighbour)
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
            for number in count(1):
                message = mail.take(self._rank, number)
                match message.get("kind"):
                    case None:
                        logger.warning("ignored a message that no rank of this job signed")
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
                    case kind:
                        if kind == "adapter":
                            self.adapter_orders.put(message)
                        self.inbox.put(message)
        except BaseException as error:  # the store or a rank is gone
            self.inbox.put({"kind": "over", "reason": f"{type(error).__name__}: {error}"})


@torch.inference_mode(False)
def pack(item: Any) -> Tensor:
    """Return an item with tensors, arrays and pictures as bytes; ConfigError for other objects."""
    on_device = [not tensor.is_cpu for tensor in leaves_of(item)]
    on_host = mapped(item, lambda tensor: tensor.detach().cpu())
    on_host = mapped(on_host, _of_picture, lambda nest: isinstance(nest, Image.Image))
    content = parcel({"item": on_host, "on_device": on_device})
    packed = torch.zeros(content.num_bytes, dtype=torch.uint8)
    content.write(packed)
    return packed


def unpack(packed: Tensor, device: torch.device) -> Any:
    """Return a packed item; its tensors are copies, on the host or this device as before."""
    content = read(packed)
    item, on_device = content["item"], iter(content["on_device"])
    item = mapped(item, lambda leaf: leaf.to(device) if next(on_device) else leaf.clone())
    return mapped(item, _to_picture, lambda nest: isinstance(nest, dict) and "picture" in nest)


def _of_picture(picture: Image.Image) -> Message:
    if picture.mode == "P":  # a palette is not in its bytes
        picture = picture.convert("RGBA")
    return {"picture": picture.tobytes(), "mode": picture.mode, "size": list(picture.size)}


def _to_picture(fields: Message) -> Image.Image:
    return Image.frombytes(fields["mode"], tuple(fields["size"]), fields["picture"])
