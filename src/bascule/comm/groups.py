"""Process groups: members in order, parts, new ones; and what differs between versions of torch."""

import hashlib
import math
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from bascule.checks import number
from bascule.comm.failures import Calls, ask, read, watch_of_world
from bascule.errors import CommError, ConfigError
from bascule.quantities import seconds

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_NUM_AGREED = 4096
_NUM_VIEWS = 64
_PAUSE_S = 0.1  # longest pause between two looks for the other ranks


class Cache(Generic[K, T]):
    """A cache of the `most` values used last, by key; it drops the value unused longest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[K, T] = {}

    def get(self, key: K, make: Callable[[], T]) -> T:
        """Return the value of a key; make it if there is none."""
        value: Any = self._values.pop(key, self)
        if value is self:  # not in an `except`, which would chain the errors of `make`
            value = make()
        self._values[key] = value  # behind all others
        if len(self._values) > self._most:
            del self._values[next(iter(self._values))]
        return value


class Staging(threading.local):
    """Buffers of a group's exchanges, one per role and thread; the next exchange overwrites them.

    On the host a fresh buffer costs page faults: an all-to-all of 1.8 MB per rank takes 3.3 ms with
    fresh buffers and 1.1 ms with used ones. Allocators of other devices keep their memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[Hashable, Any] = {}  # a view costs more than a small copy

    def take(self, role: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return an uninitialised tensor of a shape, of the dtype and device of `like`."""
        if not like.is_cpu:
            return like.new_empty(shape)
        key = role, shape, like.dtype
        view = self._views.get(key)
        if view is None:
            num_bytes, buffer = math.prod(shape) * like.element_size(), self._buffers.get(role)
            # Plain tensors also where they are made in inference mode, to be written later outside.
            with torch.inference_mode(False):
                if buffer is None or buffer.numel() < num_bytes:
                    buffer = self._buffers[role] = torch.empty(num_bytes, dtype=torch.uint8)
                    self._views.clear()  # they may be of the buffer before
                if len(self._views) >= _NUM_VIEWS:
                    self._views.clear()
                view = self._views[key] = buffer[:num_bytes].view(like.dtype).view(shape)
        return view

    def cut(
        self, role: str, shape: Sequence[int], like: Tensor, parts_of: Callable[[Tensor], T]
    ) -> tuple[Tensor, T]:
        """Return a tensor as `take` does, and views of it, which are made once."""
        key = role, shape, like.dtype, parts_of
        entry = self._views.get(key)
        if entry is None:
            whole = self.take(role, shape, like)
            with torch.inference_mode(False):
                entry = whole, parts_of(whole)
            if like.is_cpu:
                self._views[key] = entry
        return entry


class Part(Calls):
    """Calls of a group or a part of it, signatures agreed on, and reused buffers."""

    def __init__(
        self, key: str = "", ranks: Sequence[int] = (), name: str = "", backends: str = ""
    ) -> None:
        super().__init__(key, ranks, name)
        self.is_gloo = "cpu:gloo" in backends
        self.has_cuda = "cuda:" in backends and "cuda:gloo" not in backends
        self.staging = Staging()
        self._agreed: dict[Hashable, None] = {}

    def has_agreed(self, signature: Hashable) -> bool:
        """Return whether a signature is among the last few thousand that all ranks agreed on."""
        return signature in self._agreed

    def agree(self, signature: Hashable) -> None:
        """Note that all ranks have agreed on a call's signature."""
        self._agreed[signature] = None
        if len(self._agreed) > _NUM_AGREED:  # the oldest is the same on all ranks
            del self._agreed[next(iter(self._agreed))]


class World:
    """Objects of one default process group, which operators of torch look up here."""

    def __init__(self) -> None:
        self.meshes: dict[str, Any] = {}  # by name
        self.device_meshes: dict[Hashable, Any] = {}  # by a DeviceMesh and its groups
        self.meetings: Counter[str] = Counter()  # groups made so far, by name and ranks
        self.stages_cuda = False  # whether groups of gloo take tensors of CUDA
        self._made: dict[Hashable, Any] = {}
        self._numbered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._last = secrets.randbits(40)  # numbers of an earlier world find nothing in this one

    def add(self, *objects: object) -> int:
        """Number objects, by which our operators of torch find them; return the first number."""
        first = self._last + 1
        self._last += len(objects)
        self._numbered.update(zip(range(first, self._last + 1), objects, strict=True))
        return first

    def find(self, number: int) -> Any:
        """Return the object with this number; CommError if it is gone."""
        numbered = self._numbered.get(number)
        if numbered is None:
            raise CommError(
                "a compiled backward pass lost its step: more than two plans came later, or the "
                "process group was destroyed: keep a reference to the step until backward is done"
            )
        return numbered

    def keep(self, mesh: Any) -> None:
        """Let operators find a mesh, for as long as its process groups exist."""
        self.meshes = {name: other for name, other in self.meshes.items() if other.exists}
        pairs = self.device_meshes.items()
        self.device_meshes = {key: other for key, other in pairs if other.exists}
        self.meshes[mesh.name] = mesh

    def cached(self, key: Hashable, make: Callable[[], T], works: Callable[[T], bool]) -> T:
        """Return the object of a key; make it if there is none that still works."""
        if key in self._made and not works(self._made[key]):
            del self._made[key]
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def this_world() -> World:
    """Return the world of the default process group; ConfigError if there is none."""
    objects = watch_of_world().objects
    if World not in objects:
        objects[World] = World()
    return objects[World]


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate with each other: a process group, or some members of one.

    Some members send messages over the whole process group, with tags of their own. This object
    has a weak reference to it: gloo's threads abort the process if a group outlives its end.
    """

    reference: Callable[[], dist.ProcessGroup | None]  # None once it was destroyed
    rank: int  # index of this rank in `ranks`
    ranks: tuple[int, ...]  # global ranks in any order, the same on all of them
    places: tuple[int, ...]  # rank of each member in the process group
    name: str  # for errors
    key: str = ""  # unique among the groups of this rank, and the same on all members
    calls: Part = field(default_factory=Part, compare=False, repr=False)
    # The group of the same ranks on the host, in which they agree; None: this one.
    control: "RankGroup | None" = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> str:
        """Refuse a copy, which could not make calls."""
        wrong = f"the ranks of {self.name!r}, or what holds them, cannot be copied or pickled"
        raise ConfigError(f"{wrong}: make a new step, mesh or loader where you need it")

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Process group for torch's collectives; CommError if it was destroyed."""
        group = self.reference()
        if group is None:
            wrong = f"the process group {self.name!r} of ranks {list(self.ranks)} was destroyed"
            raise CommError(f"{wrong}: after init_process_group, make what uses it again")
        return group

    @cached_property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @cached_property
    def has_all(self) -> bool:
        """True if the process group has no other members."""
        return self.size == self.process_group.size()

    @cached_property
    def is_whole(self) -> bool:
        """True for the whole process group in its own order, which can use its collectives."""
        return self.has_all and self.places == tuple(range(self.size))

    @property
    def others(self) -> list[int]:
        """Ranks of all members but this one, as indices into `ranks`."""
        return [place for place in range(self.size) if place != self.rank]

    @property
    def is_ended(self) -> bool:
        """True if a failure ended the group on any rank; one request to the store."""
        if self.calls.ended is None:
            key = f"ended/{self.process_group.group_name}"
            self.calls.ended = ask(lambda store: read(store, key))
        return self.calls.ended is not None

    def part(self, places: Sequence[int], name: str) -> "RankGroup":
        """Return a view of some ranks in this order, this one among them. No collective."""
        if tuple(places) == tuple(range(self.size)):
            return self
        return member_of(self.process_group, name, ranks=[self.ranks[place] for place in places])


def stage_cuda() -> None:
    """Let gloo groups send CUDA tensors from now on, through slow copies on the host.

    Several ranks can then share one GPU, which NCCL refuses. Call it on every rank after each
    `init_process_group("gloo")`. The host waits for these exchanges, so CUDA graphs cannot
    capture them.

    Raises:
        ConfigError: torch.distributed is not initialised.
    """
    this_world().stages_cuda = True


def resolve(mesh_or_group: "DeviceMesh | dist.ProcessGroup | None") -> dist.ProcessGroup:
    """Return the group of a one-axis mesh, the given process group, or for None the default."""
    if mesh_or_group is None:
        if dist.group.WORLD is None:
            raise ConfigError("torch.distributed is not initialised: call init_process_group first")
        return dist.group.WORLD
    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim != 1:
            wrong = f"the mesh has several axes, {mesh_or_group.mesh_dim_names}"
            raise ConfigError(f"{wrong}: give the one whose ranks share the work, as mesh['name']")
        return mesh_or_group.get_group()
    if isinstance(mesh_or_group, dist.ProcessGroup):
        return mesh_or_group
    wrong = f"{mesh_or_group!r} is no process group of this rank"
    raise ConfigError(f"{wrong}: give a one-axis DeviceMesh, a group of this rank, or None")


def member_of(
    group: dist.ProcessGroup, name: str, *, ranks: Sequence[int] | None = None
) -> RankGroup:
    """Return this rank's view of a group, or of some global ranks in this order. No collective."""
    members = dist.get_process_group_ranks(group)
    chosen = tuple(members if ranks is None else ranks)
    part = "" if ranks is None else f" {name} {chosen}"
    parts = cast(dict[str, Part], watch_of_world().groups.setdefault(group, {}))
    key = group.group_name + part
    if part not in parts:
        made = parts[part] = Part(key, chosen, name, dist.get_backend_config(group))
        made.ended = next((other.ended for other in parts.values() if other.ended), None)
    place_of = {rank: place for place, rank in enumerate(members)}
    return RankGroup(
        reference=weakref.ref(group),
        rank=chosen.index(members[group.rank()]),
        ranks=chosen,
        places=tuple(place_of[rank] for rank in chosen),
        name=name,
        key=key,
        calls=parts[part],
    )


def device_of(group: RankGroup) -> torch.device:
    """Return a device whose tensors the group can send: the host, if possible."""
    carries = dist.get_backend_config(group.process_group)
    if "cpu" in carries:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def device_for(
    device: torch.device | str | None,
    mesh_or_group: "DeviceMesh | dist.ProcessGroup | None",
    group: dist.ProcessGroup,
) -> torch.device:
    """Return the user's device, checked; for None, the device of the mesh or back end."""
    if device is not None:
        try:
            chosen = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"device={device!r} is not a device of torch: {error}") from None
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device={device!r}, but torch finds no CUDA device: give 'cpu'")
        return chosen
    on_cuda = "nccl" in dist.get_backend(group)
    if isinstance(mesh_or_group, DeviceMesh):
        on_cuda = mesh_or_group.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the timeout that a group was made with; None if the back end has no such option."""
    backend = group._get_backend(device)
    return getattr(getattr(backend, "options", None), "_timeout", None)


def set_timeout(group: RankGroup, timeout_s: float) -> None:
    """Set the longest wait in calls of a group of gloo, point-to-point included."""
    timeout = timedelta(seconds=timeout_s)
    backend = group.process_group._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timeout)
    backend.options._timeout = timeout


def new_group(
    ranks: Sequence[int], name: str, timeout_s: float, *, backend: str | None = None
) -> RankGroup:
    """Create a group of global ranks; only they need to call, in the same order for all groups.

    CommError if a rank comes later than `timeout_s`, which is also the timeout of the group's
    collectives. `backend` None: the back end of the default group.
    """
    number("timeout_s", timeout_s, 1e-3, 1e7)
    in_order, watch, meetings = sorted(ranks), watch_of_world(), this_world().meetings
    meeting = f"{name} of ranks {in_order}"
    calls = Calls(f"{meeting}/{meetings[meeting]}", in_order, name)
    parts = watch.groups.setdefault(resolve(None), {})
    parts[calls.key], watch.reason = calls, None

    def meet() -> None:
        _meet(calls, timeout_s)
        meetings[meeting] += 1
        made.append(_connect(in_order, calls.key, f"bascule {name}", timeout_s, backend))

    made = list[dist.ProcessGroup]()
    calls.begin("new_group")
    try:
        calls.wait("new_group", meet)
    finally:
        del parts[calls.key]
    watch.forget()  # what ended before does not concern this one
    return member_of(made[0], name)


def _meet(calls: Calls, timeout_s: float) -> None:
    """Wait for all ranks; after `timeout_s` leave the meeting and raise RuntimeError."""
    counted, opened = f"bascule/meeting/{calls.key}", f"bascule/met/{calls.key}"
    size, deadline = len(calls.ranks), time.monotonic() + timeout_s
    if ask(lambda store: store.add(counted, 1)) == size:  # the last one calls all together
        ask(lambda store: store.set(opened, ""))
        return
    pause_s = 0.001
    while calls.ended is None and time.monotonic() < deadline:
        if ask(lambda store: store.check([opened])):
            return
        time.sleep(pause_s := min(2 * pause_s, _PAUSE_S))
    if ask(lambda store: store.add(counted, -1)) < size - 1:
        raise RuntimeError(f"not all of ranks {list(calls.ranks)} came within {seconds(timeout_s)}")
    ask(lambda store: store.add(counted, 1))  # the last one came just now


def _connect(
    ranks: list[int], meeting: str, description: str, timeout_s: float, backend: str | None
) -> dist.ProcessGroup:
    """Make the group of ranks that met, named by where: `dist.new_group` names it by a count."""
    world = resolve(None)
    default_backend, store = c10d._world.pg_map[world]
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend or default_backend),
        store,
        cast(Any, hashlib.sha256(meeting.encode()).hexdigest()),
        timeout=timedelta(seconds=timeout_s),
        device_id=world.bound_device_id,
        group_desc=description,
    )
    assert isinstance(group, dist.ProcessGroup), f"rank outside its own group {ranks}"
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    if "cuda:nccl" in dist.get_backend_config(group) and torch.cuda.is_available():
        # NCCL connects in the first call, which all members must make; parts of it come later.
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return group
