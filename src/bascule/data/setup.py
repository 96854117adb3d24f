"""What happens once: the ranks of a balanced loader meet and agree on how steps are made."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bascule.comm import groups
from bascule.comm.agree import Statement, agree
from bascule.comm.groups import RankGroup
from bascule.data.leases import Pool, pool_of
from bascule.data.packs import Pack
from bascule.data.redistribute import Rules
from bascule.data.samples.loaded import DataRanks, Ends, Ints
from bascule.data.source import Microbatches, Source
from bascule.errors import ConfigError
from bascule.plan.costs.cost_models import Cost, describe_cost
from bascule.plan.limits import Limits
from bascule.plan.step import Sync

DEFAULT_TIMEOUT_S = 600.0
_LONGEST_TIMEOUT_S = 1e8  # three years; a little more does not fit into gloo's nanoseconds


@dataclass(frozen=True, slots=True)
class Options:
    """Arguments of a `BalancedLoader` that are no rules of its steps; see there.

    Attributes:
        functions: `length_fn`, `weight_fn`, `unpack` and `collate_fn`, by name.
    """

    batch_size: int | None
    pack: Pack | int | None
    prefetch: int
    bytes_per_s: float | None
    timeout_s: float
    cost: Cost
    functions: Mapping[str, Callable[..., Any] | None]

    def check(self, rules: Rules) -> None:
        """Refuse what is out of range.

        Raises:
            ConfigError: Names the argument, its value and the range.
        """
        counts = {
            "accumulate": rules.accumulate,
            "prefetch": self.prefetch,
            "batch_size": self.batch_size,
            "max_bytes_in_flight": rules.max_bytes,
        }
        for name, value in counts.items():
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if not (is_int and value >= 1) and (value is not None or name in _NEEDED):
                raise _wrong(name, value, "must be an integer of at least 1")
        if not (is_number(rules.min_gain) and 0.0 <= rules.min_gain < 1.0):
            raise _wrong("min_gain", rules.min_gain, "a share of the step, from 0 to below 1")
        rate = self.bytes_per_s
        if rate is not None and not (is_number(rate) and 0.0 < rate):
            raise _wrong("bytes_per_s", rate, "must be above zero")
        if not is_timeout(self.timeout_s):
            raise _wrong("timeout_s", self.timeout_s, "must be seconds, above zero")
        for name, value, allowed in (
            ("sync", rules.sync, get_args(Sync)),
            ("ends", rules.ends, get_args(Ends)),
        ):
            if value not in allowed:
                raise _wrong(name, value, f"choose one of {allowed}")
        if not isinstance(rules.limits, Limits | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _wrong("limits", rules.limits, "must be Limits(..) or None")
        if not isinstance(self.pack, Pack | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _wrong("pack", self.pack, "must be Pack(..), its tokens, or None")
        for name, value in {"cost": self.cost, **self.functions}.items():
            if not callable(value) and (value is not None or name in _NEEDED):
                raise _wrong(name, value, "must be a function")
        if self.batch_size is not None and (self.pack or self.functions["unpack"]):
            raise ConfigError(
                f"BalancedLoader(batch_size={self.batch_size}): a pack holds samples up to its "
                "tokens, and ready-made packs come in the loader's lists; leave batch_size out"
            )


def interpret(
    rules: Rules, options: Options, loader: Iterable[Any] | None
) -> tuple[Rules, Options, Source]:
    """What the arguments mean: a pack for its tokens, the limit that follows from it, microbatches.

    Raises:
        ConfigError: An argument is wrong.
    """
    pack = Pack(tokens=options.pack) if isinstance(options.pack, int) else options.pack
    options = dataclasses.replace(options, pack=pack)
    if isinstance(pack, Pack) and rules.limits is None:
        rules = dataclasses.replace(rules, limits=Limits(tokens=pack.tokens))
    options.check(rules)
    grouping, length_fn = None, options.functions["length_fn"]
    is_grouped = pack is not None or options.batch_size is not None
    if options.functions["unpack"] is None and is_grouped and length_fn is not None:
        grouping = Microbatches(
            options.batch_size, None if pack is None else pack.tokens, length_fn
        )
    return rules, options, Source(loader, grouping)


_NEEDED = ("accumulate", "prefetch", "cost", "length_fn")


def is_timeout(value: object) -> bool:
    """Whether it is a number of seconds that ranks can wait."""
    return is_number(value) and 0.0 < value <= _LONGEST_TIMEOUT_S


def is_number(value: object) -> TypeGuard[float]:
    """Whether it can be compared with numbers; nan can, and is neither below nor above."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _wrong(name: str, value: object, limit: str) -> ConfigError:
    return ConfigError(f"BalancedLoader({name}={value!r}): {limit}")


def join(
    mesh_or_group: "DeviceMesh | dist.ProcessGroup | None", axis: str | None, timeout_s: float
) -> tuple[DataRanks, Pool, RankGroup]:
    """All ranks, the groups that their loaders share, and the data-parallel group of this rank.

    Raises:
        ConfigError: The mesh has no such axis.
        CommError: A rank did not come.
    """
    if axis is not None:
        if not isinstance(mesh_or_group, DeviceMesh):
            raise ConfigError(
                f"axis {axis!r} names an axis of a DeviceMesh, and none was given: give the mesh"
            )
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
    pool = pool_of(members, timeout_s)
    return DataRanks(pool.control, places.numpy()), pool, along


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
    ranks: DataRanks, rules: Rules, options: Options, source: Source, error: Exception | None
) -> Sources:
    """Make sure that all ranks were given the same, and find out who loads.

    Raises:
        RemoteConfigError: A rank was given a wrong argument.
        CommError: They were not given the same.
        ConfigError: Samplers do not deal the same, or for other ranks than those that load (on all
            ranks alike).
    """
    settings = {field.name: str(getattr(rules, field.name)) for field in dataclasses.fields(rules)}
    settings |= {name: str(getattr(options, name)) for name in ("bytes_per_s", "timeout_s")}
    for name in ("length_fn", "weight_fn", "unpack"):
        one = options.functions[name]
        settings[name] = getattr(one, "__qualname__", type(one).__qualname__)
    settings["cost"], values = "unknown", np.zeros(7, dtype=np.int64)
    try:
        if error is None:  # else there may be no cost and no source to ask
            settings["cost"] = describe_cost(options.cost)
            values = np.array([source.is_empty, _length_of(source), *source.deal], dtype=np.int64)
    except Exception as met:
        error = met
    statement = Statement(settings, values, error)
    said = agree(ranks.group, statement, what="construction", step=0, capacity=values.size)
    of_rank = np.stack(said)[ranks.leaders]
    places = np.flatnonzero(of_rank[:, 0] == 0)
    deals = of_rank[places, 2:]
    _check_deals(places, deals)
    deal = tuple(deals[0, 2:].tolist()) if places.size else (0, 0, 0)
    return Sources(places, of_rank[places, 1], deal)


def _length_of(source: Source) -> int:
    """Its microbatches, or -1 where it does not know."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return -1


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
