"""Process groups as the rest sees them: members in order, and the calls that they make together.

The differences between versions of torch, and the few names of it that are not public, live here.
"""

import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world  # pyright: ignore[reportPrivateUsage]

from bascule.comm.guard.calls import Calls
from bascule.comm.staging import Staging
from bascule.comm.world import this_world
from bascule.errors import CommError, ConfigError


@dataclass(frozen=True)
class RankGroup:
    """Ranks that make calls together: a process group, or some members of one.

    Some members need no process group of their own: they send each other messages over that of all,
    with tags that are theirs.

    Torch keeps a group until it is destroyed, and does not end well if somebody else still does
    then: threads of gloo outlive the interpreter and abort the process. So it is only referred to.

    Attributes:
        reference: Gives the process group, or None once it was destroyed.
        rank: This rank's place in `ranks`.
        ranks: Global rank of each member; in any order, the same on all of them.
        places: Of each member, its place in the process group's own order.
        name: How errors call the group.
        key: Tells it from all other groups of this rank, and is the same on all members.
        calls: What its members do together.
        control: The same ranks in a group of the host, where they agree; None: this one.
    """

    reference: Callable[[], dist.ProcessGroup | None]
    rank: int
    ranks: tuple[int, ...]
    places: tuple[int, ...]
    name: str
    key: str = ""
    calls: Calls = field(default_factory=Calls, compare=False, repr=False)
    control: "RankGroup | None" = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> str:
        """Refused: a copy could not make calls.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"the ranks of {self.name!r} cannot be copied or pickled, and neither can what refers "
            "to them (a step, a mesh, a loader): make it anew where it is needed"
        )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """What torch's collectives take.

        Raises:
            CommError: It was destroyed.
        """
        group = self.reference()
        if group is None:
            raise CommError(
                f"the process group {self.name!r} of ranks {list(self.ranks)} was destroyed: build "
                "what uses it again after init_process_group"
            )
        return group

    @cached_property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @cached_property
    def is_part(self) -> bool:
        """Whether the process group has more members: its collectives are none of this group."""
        return self.size < self.process_group.size()

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the process group has its members in the same order."""
        return self.places == tuple(range(self.size))

    @property
    def others(self) -> list[int]:
        """The places of all members but this one."""
        return [place for place in range(self.size) if place != self.rank]

    def part(self, places: Sequence[int], name: str) -> "RankGroup":
        """Some of these ranks, this one included; the same group for the same ranks. No collective.

        Args:
            places: In this group, in the order wanted, the same on all of them.
            name: How errors call it.
        """
        if len(places) == self.size and list(places) == list(range(self.size)):
            return self
        ranks = tuple(self.ranks[place] for place in places)
        backend_places = tuple(self.places[place] for place in places)
        return _view(self.process_group, name, ranks, backend_places)

    @property
    def staging(self) -> Staging:
        """Memory for its exchanges."""
        return self.calls.staging


def stage_cuda() -> None:
    """Let groups of gloo take CUDA tensors from here on: as copies on the host, which are slow.

    So several ranks can share one GPU, which NCCL refuses: to try what ranks do where there are not
    enough GPUs. Call it on every rank after `init_process_group("gloo")`, which ends it, too.
    Exchanges then make the host wait, so CUDA graphs cannot hold them.

    Raises:
        ConfigError: torch.distributed is not initialised.
    """
    this_world().stages_cuda = True


def resolve(mesh_or_group: "DeviceMesh | dist.ProcessGroup | None") -> dist.ProcessGroup:
    """The process group of a one-axis mesh, a group, or (None) the default group.

    Raises:
        ConfigError: The mesh has several axes, this is no group of this rank, or torch.distributed
            is not initialised.
    """
    if mesh_or_group is None:
        if dist.group.WORLD is None:
            raise ConfigError("torch.distributed is not initialised: call init_process_group first")
        return dist.group.WORLD
    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim != 1:
            raise ConfigError(
                f"a mesh with axes {mesh_or_group.mesh_dim_names}: choose one, as in "
                "mesh['name'], whose ranks share the work"
            )
        return mesh_or_group.get_group()
    if isinstance(mesh_or_group, dist.ProcessGroup):
        return mesh_or_group
    raise ConfigError(
        f"{mesh_or_group!r} is no process group of this rank: give a one-axis DeviceMesh, a "
        "process group that this rank is in, or None for all ranks"
    )


def member_of(
    group: dist.ProcessGroup, name: str, *, ranks: Sequence[int] | None = None
) -> RankGroup:
    """This rank's view of an existing group, or of some of its ranks. No collective.

    Args:
        group: This rank is in it.
        name: How errors call it.
        ranks: Its global ranks in the order wanted, the same on all of them; or some of them, this
            one included. Default: the group's.
    """
    members = dist.get_process_group_ranks(group)
    if ranks is None:
        return _view(group, name, tuple(members), tuple(range(len(members))))
    place_of = {rank: place for place, rank in enumerate(members)}
    return _view(group, name, tuple(ranks), tuple(place_of[rank] for rank in ranks))


def _view(
    group: dist.ProcessGroup, name: str, ranks: tuple[int, ...], places: tuple[int, ...]
) -> RankGroup:
    part = f" {name} {ranks}" if len(ranks) < group.size() else ""
    return RankGroup(
        reference=weakref.ref(group),
        rank=places.index(group.rank()),
        ranks=ranks,
        places=places,
        name=name,
        key=group.group_name + part,
        calls=_calls_of(group, part),
    )


def _calls_of(group: dist.ProcessGroup, part: str) -> Calls:
    """The calls of a process group, or of a part of it; what ended the group ended all parts."""
    parts = this_world().calls.setdefault(group, {})
    if part not in parts:
        carries = dist.get_backend_config(group)
        has_cuda = "cuda:" in carries and "cuda:gloo" not in carries
        made = parts[part] = Calls(part, has_tags="cpu:gloo" in carries, has_cuda=has_cuda)
        made.ended = next((calls.ended for calls in parts.values() if calls.ended), None)
    return parts[part]


def calls_in_use() -> dict[str, Calls]:
    """By key, the calls of every group that this rank has used."""
    return {
        group.group_name + part: calls
        for group, parts in list(this_world().calls.items())
        for part, calls in list(parts.items())
    }


def process_groups_in_use() -> list[dist.ProcessGroup]:
    """Every process group that this rank has made calls on."""
    return list(this_world().calls)


@dataclass(frozen=True, slots=True)
class OtherCalls:
    """What other code does in a process group between hosts: DDP, FSDP, the user.

    Attributes:
        group: The group.
        key: Tells it from all others, and is the same on all members.
        num_begun: Collectives and messages that this rank has begun.
    """

    group: dist.ProcessGroup
    key: str
    num_begun: int


def other_calls() -> list[OtherCalls]:
    """Those of every group of gloo that this rank is in."""
    found: list[OtherCalls] = []
    for group in [one for one in list(_world.pg_map) if dist.get_backend(one) == "gloo"]:
        ranks = str(dist.get_process_group_ranks(group))  # names alone may differ between ranks
        key = f"{group.group_name} {zlib.crc32(ranks.encode())}"
        own = sum(calls.num_messages for calls in this_world().calls.get(group, {}).values())
        begun = group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
        found.append(OtherCalls(group, key, begun - own))
    return found


def device_of(group: RankGroup) -> torch.device:
    """A device whose tensors the group carries: the host, if it carries those."""
    carries = dist.get_backend_config(group.process_group)
    if "cpu" in carries:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def device_for(
    device: torch.device | str | None,
    mesh_or_group: "DeviceMesh | dist.ProcessGroup | None",
    group: dist.ProcessGroup,
) -> torch.device:
    """Return where tensors are: the device that was given, or the mesh's or back end's.

    Raises:
        ConfigError: It is not a device of torch, or torch finds none.
    """
    if device is not None:
        try:
            given = torch.device(device)
            if given.type == "cuda" and not torch.cuda.is_available():
                raise ConfigError(f"device={device!r}, and torch finds no CUDA device: give 'cpu'")
            return given
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"device={device!r} is not a device of torch: {error}") from error
    on_cuda = "nccl" in dist.get_backend(group)
    if isinstance(mesh_or_group, DeviceMesh):
        on_cuda = mesh_or_group.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def timeout_of(group: RankGroup, device: torch.device) -> timedelta | None:
    """With what timeout a group was made; None if its back end does not tell.

    Gloo's point-to-point knows only that one, not one set later.
    """
    backend = group.process_group._get_backend(device)
    return getattr(getattr(backend, "options", None), "_timeout", None)


def set_timeout(group: RankGroup, timeout_s: float) -> None:
    """Wait in calls of this group of gloo so long from now on, point-to-point included."""
    timeout = timedelta(seconds=timeout_s)
    backend = group.process_group._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timeout)
    backend.options._timeout = timeout
