"""What happens once: the ranks of a balanced loader meet and agree on how steps are made."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bascule.comm import groups
from bascule.comm.agree import Statement, agree
from bascule.comm.groups import RankGroup
from bascule.data.loaded import DataRanks, Ends, Ints
from bascule.data.packs import Pack
from bascule.data.redistribute import Rules
from bascule.data.source import Source
from bascule.errors import ConfigError
from bascule.plan.cost import Cost, describe_cost
from bascule.plan.step import Sync


def check_options(
    rules: Rules,
    batch_size: int | None,
    pack: Pack | None,
    unpack: object,
    prefetch: int,
    bytes_per_s: float | None,
) -> None:
    """Refuse what is out of range.

    Raises:
        ConfigError: Names the argument, its value and the range.
    """
    counts = {
        "accumulate": rules.accumulate,
        "prefetch": prefetch,
        "batch_size": batch_size,
        "max_bytes_in_flight": rules.max_bytes,
    }
    for name, value in counts.items():
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_int and value >= 1):
            raise ConfigError(f"BalancedLoader({name}={value!r}): must be an integer of at least 1")
    if not 0.0 <= rules.min_gain < 1.0:
        raise ConfigError(
            f"BalancedLoader(min_gain={rules.min_gain!r}): a share of the step, from 0 to below 1"
        )
    if bytes_per_s is not None and not 0.0 < bytes_per_s:
        raise ConfigError(f"BalancedLoader(bytes_per_s={bytes_per_s!r}): must be above zero")
    for name, value, allowed in (
        ("sync", rules.sync, get_args(Sync)),
        ("ends", rules.ends, get_args(Ends)),
    ):
        if value not in allowed:
            raise ConfigError(f"BalancedLoader({name}={value!r}): choose one of {allowed}")
    if batch_size is not None and (pack is not None or unpack is not None):
        raise ConfigError(
            f"BalancedLoader(batch_size={batch_size}): a pack holds samples up to its tokens, and "
            "ready-made packs come in the loader's lists; leave batch_size out"
        )


def join(
    mesh_or_group: "DeviceMesh | dist.ProcessGroup | None", axis: str | None, timeout_s: float
) -> tuple[DataRanks, RankGroup]:
    """All ranks with a group of the loader's own; and the data-parallel group of this rank.

    Raises:
        ConfigError: The mesh has no such axis.
        CommError: A rank did not come.
    """
    if axis is not None:
        if not isinstance(mesh_or_group, DeviceMesh):
            raise ConfigError(f"axis {axis!r} is one of a DeviceMesh: give the mesh too")
        names = mesh_or_group.mesh_dim_names or ()
        if axis not in names:
            raise ConfigError(f"axis {axis!r}: the mesh has the axes {names}")
        along = groups.member_of(mesh_or_group.get_group(axis), "data-parallel")
        by_place = mesh_or_group.mesh.movedim(names.index(axis), 0).flatten(1)
    else:
        along = groups.member_of(groups.resolve(mesh_or_group), "data-parallel")
        by_place = torch.tensor(along.ranks)[:, None]
    order = by_place.flatten().argsort()
    members = by_place.flatten()[order].tolist()
    places = torch.arange(by_place.shape[0]).repeat_interleave(by_place.shape[1])[order]
    group = groups.new_group(members, "loader", timeout_s, backend="gloo")
    return DataRanks(group, places.numpy()), along


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """The data-parallel ranks that load samples.

    Attributes:
        places: (n,) which of the data-parallel ranks they are.
        num_microbatches: (n,) of an epoch; -1 where a loader does not know.
        deal: Samples, shuffle and seed of their `ResumableSampler`s; zeros without.
    """

    places: Ints
    num_microbatches: Ints
    deal: tuple[int, ...]

    def epoch_length(self, rules: Rules) -> int | None:
        """Microbatches of an epoch on each rank; None if a loader does not know."""
        numbers = self.num_microbatches
        if not numbers.size or numbers.min() < 0:
            return None
        if rules.ends == "drop_last":
            return int(numbers.min()) // rules.accumulate * rules.accumulate
        return -(-int(numbers.max()) // rules.accumulate) * rules.accumulate


def agree_on_settings(
    ranks: DataRanks,
    rules: Rules,
    cost: Cost,
    bytes_per_s: float | None,
    functions: Mapping[str, object],
    source: Source,
    error: Exception | None,
) -> Sources:
    """Make sure that all ranks were given the same, and find out who loads.

    Raises:
        RemoteConfigError: A rank was given a wrong argument.
        CommError: They were not given the same.
        ConfigError: Samplers do not deal the same, or for other ranks than those that load (on all
            ranks alike).
    """
    settings = {field.name: str(getattr(rules, field.name)) for field in dataclasses.fields(rules)}
    settings |= {"cost": describe_cost(cost), "bytes_per_s": str(bytes_per_s)}
    for name, one in functions.items():
        settings[name] = getattr(one, "__qualname__", type(one).__qualname__)
    try:
        number = len(source)
    except TypeError:
        number = -1
    values = np.array([source.is_empty, number, *source.deal], dtype=np.int64)
    statement = Statement(settings, values, error)
    said = agree(ranks.group, statement, what="construction", step=0, capacity=values.size)
    of_rank = np.stack(said)[ranks.leaders]
    places = np.flatnonzero(of_rank[:, 0] == 0)
    deals = of_rank[places, 2:]
    _check_deals(places, deals)
    deal = tuple(deals[0, 2:].tolist()) if places.size else (0, 0, 0)
    return Sources(places, of_rank[places, 1], deal)


def _check_deals(places: Ints, deals: Ints) -> None:
    """Refuse samplers that together lose or repeat samples; alike on all ranks.

    Raises:
        ConfigError: Names the data-parallel rank, what it has, and what it should have.
    """
    for index, place in enumerate(places.tolist()):
        share, num_shares, *dealt = deals[index].tolist()
        if num_shares and (share, num_shares) != (index, places.size):
            raise ConfigError(
                f"the ResumableSampler of data-parallel rank {place} has rank={share} and "
                f"num_ranks={num_shares}, so samples would be lost or repeated: give it "
                f"rank={index} and num_ranks={places.size}, of the ranks whose loader is not None"
            )
        if dealt != deals[0, 2:].tolist():
            raise ConfigError(
                f"the ResumableSamplers of data-parallel ranks {places[0]} and {place} have "
                f"(num_samples, shuffle, seed) = {tuple(deals[0, 2:].tolist())} and "
                f"{tuple(dealt)}, so samples would be lost or repeated: give all ranks the same"
            )
