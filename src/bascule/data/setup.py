"""What happens once: the ranks of a balanced loader meet and agree on how steps are made."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bascule.arrays import Ints
from bascule.comm import groups
from bascule.comm.agree import Statement, agree
from bascule.comm.groups import RankGroup
from bascule.comm.new_groups import is_timeout
from bascule.data.leases import Pool, pool_of
from bascule.data.packs import Pack, make_pack
from bascule.data.redistribute import Rules
from bascule.data.samples.loaded import DataRanks, Ends, Sample
from bascule.data.samples.offers import Handlers, collate_and_pin, one
from bascule.data.source import Microbatches, Source
from bascule.errors import ConfigError
from bascule.plan.checks import is_int, real
from bascule.plan.costs import Cost, describe_cost
from bascule.plan.limits import Limits
from bascule.plan.step import Sync

DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How a BalancedLoader loads, moves and collates, where the defaults do not fit.

    Attributes:
        axis: Name of the data-parallel axis, in a mesh with several. Ranks that differ in other
            axes only (tensor or pipeline parallel) get the same batches; the first of them loads.
        batch_size: Samples of a microbatch, where the loader gives samples one by one.
        unpack: Samples of each item of the loader, for ready-made packs (see `packs.unpack`). Then
            lists of items are kept as microbatches.
        weight_fn: What a sample counts in the global mean, for `loss_scale`: a whole number, such
            as its labels for a mean over tokens. Default: 1.
        limits: What a rank can hold in a microbatch; hard.
        ends: "drop_last": the epoch ends where the first rank cannot fill a step. "pad_empty" and
            "finish": it ends when all ranks have run out, and those that ran out earlier get
            samples of the others. With "finish", a microbatch may be empty; otherwise it then holds
            a copy of the step's shortest sample, with a loss_scale of 0; unless no rank has a
            sample for the step.
        min_gain: Share of the predicted step that balancing must save for samples to move.
        bytes_per_s: Bytes that a rank exchanges in a second, against which the gain of a cost in
            seconds is weighed. None measures it once, when the loader is made.
        max_bytes_in_flight: Most bytes received in steps that were not used up; hard.
        prefetch: Steps made ahead.
        collate_fn: A microbatch from a list of samples. Default: the DataLoader's, or
            `default_collate`. Not called for an empty microbatch, whose data are None.
        pin_memory: Whether tensors are put into pinned memory.
        timeout_s: Longest wait for other ranks, their loaders included; the same on all.
    """

    axis: str | None = None
    batch_size: int | None = None
    unpack: Callable[[Any], list[Sample]] | None = None
    weight_fn: Callable[[Sample], int] | None = None
    limits: Limits | None = None
    ends: Ends = "drop_last"
    min_gain: float = 0.02
    bytes_per_s: float | None = None
    max_bytes_in_flight: int | None = None
    prefetch: int = 2
    collate_fn: Callable[[list[Sample]], Any] | None = None
    pin_memory: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S


DEFAULT_OPTIONS = LoaderOptions()


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """The arguments of a `BalancedLoader`, as one rank was given them; see there."""

    loader: Iterable[Any] | None
    cost: Cost
    length_fn: Callable[[Sample], int]
    accumulate: int
    sync: Sync
    pack: Pack | int | None
    options: LoaderOptions

    @property
    def rules(self) -> Rules:
        """How steps are made; a pack limits the tokens of a rank."""
        chosen, limits = self.options, self.options.limits
        if limits is None and isinstance(self.pack, Pack):
            limits = Limits(tokens=self.pack.tokens)
        return Rules(
            accumulate=self.accumulate,
            sync=self.sync,
            limits=limits,
            ends=chosen.ends,
            min_gain=chosen.min_gain,
            max_bytes=chosen.max_bytes_in_flight,
        )

    def check(self) -> None:
        """Refuse what is out of range.

        Raises:
            ConfigError: Names the argument, its value and the range.
        """
        chosen = self.options
        if not isinstance(chosen, LoaderOptions):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _wrong("options", chosen, "must be LoaderOptions(..)")
        _check_counts({"accumulate": self.accumulate})
        _check_choice("sync", self.sync, get_args(Sync))
        if not isinstance(self.pack, Pack | None):
            raise _wrong("pack", self.pack, "must be Pack(..), its tokens, or None")
        _check_functions({"cost": self.cost, "length_fn": self.length_fn})
        _check_options(chosen)
        if chosen.batch_size is not None and (self.pack or chosen.unpack):
            raise ConfigError(
                f"LoaderOptions(batch_size={chosen.batch_size}): a pack holds samples up to its "
                "tokens, and ready-made packs come in the loader's lists; leave batch_size out"
            )
        if chosen.collate_fn is not None and self.pack is not None:
            raise ConfigError(
                "LoaderOptions(collate_fn=..): a pack is one sequence of all its samples, and is "
                "collated by nothing else; leave collate_fn out, or pack"
            )

    def handlers(self, source: Source) -> Handlers:
        """What is done with samples; the DataLoader's own way to collate them is the default."""
        chosen, pack = self.options, self.pack
        collate = source.collate_fn if chosen.collate_fn is None else chosen.collate_fn
        if isinstance(pack, Pack):
            collate = partial(make_pack, pack=pack)
        collate = collate_and_pin(collate, takes_none=pack is not None, pin=chosen.pin_memory)
        weight_fn = one if chosen.weight_fn is None else chosen.weight_fn
        return Handlers(self.length_fn, weight_fn, chosen.unpack, collate)


def interpret(given: Given) -> tuple[Given, Source]:
    """What the arguments mean: a pack for its tokens, and microbatches.

    Raises:
        ConfigError: An argument is wrong.
    """
    pack = Pack(tokens=given.pack) if isinstance(given.pack, int) else given.pack
    given = dataclasses.replace(given, pack=pack)
    given.check()
    chosen, grouping = given.options, None
    if chosen.unpack is None and (pack is not None or chosen.batch_size is not None):
        tokens = None if pack is None else pack.tokens
        grouping = Microbatches(chosen.batch_size, tokens, given.length_fn)
    return given, Source(given.loader, grouping)


def _check_options(options: LoaderOptions) -> None:
    names = ("prefetch", "batch_size", "max_bytes_in_flight")
    _check_counts({name: getattr(options, name) for name in names})
    gain, rate, limits = options.min_gain, options.bytes_per_s, options.limits
    share = real(gain)
    if share is None or not 0.0 <= share < 1.0:
        raise _wrong("min_gain", gain, "a share of the step, from 0 to below 1")
    if rate is not None and (real(rate) or 0.0) <= 0.0:
        raise _wrong("bytes_per_s", rate, "must be above zero")
    if not is_timeout(options.timeout_s):
        raise _wrong("timeout_s", options.timeout_s, "must be seconds, above zero")
    _check_choice("ends", options.ends, get_args(Ends))
    if not isinstance(limits, Limits | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _wrong("limits", limits, "must be Limits(..) or None")
    names = ("weight_fn", "unpack", "collate_fn")
    _check_functions({name: getattr(options, name) for name in names})


def _check_counts(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if not (is_int(value) and value >= 1) and (value is not None or name in _NEEDED):
            raise _wrong(name, value, "must be an integer of at least 1")


def _check_choice(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise _wrong(name, value, f"choose one of {allowed}")


def _check_functions(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if not callable(value) and (value is not None or name in _NEEDED):
            raise _wrong(name, value, "must be a function")


_NEEDED = ("accumulate", "prefetch", "cost", "length_fn")


def _wrong(name: str, value: object, limit: str) -> ConfigError:
    owner = "LoaderOptions" if name in LoaderOptions.__dataclass_fields__ else "BalancedLoader"
    return ConfigError(f"{owner}({name}={value!r}): {limit}")


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
    ranks: DataRanks, given: Given, source: Source, error: Exception | None
) -> Sources:
    """Make sure that all ranks were given the same, and find out who loads.

    Raises:
        RemoteConfigError: A rank was given a wrong argument.
        CommError: They were not given the same.
        ConfigError: Samplers do not deal the same, or for other ranks than those that load (on all
            ranks alike).
    """
    settings, values = dict.fromkeys(_SETTINGS, ""), np.zeros(7, dtype=np.int64)
    try:
        if error is None:  # else what was given may be anything
            settings = _settings(given)
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


_RULES = tuple(field.name for field in dataclasses.fields(Rules))
_FUNCTIONS = ("length_fn", "weight_fn", "unpack")
_SETTINGS = (*_RULES, "bytes_per_s", "timeout_s", *_FUNCTIONS, "cost")


def _settings(given: Given) -> dict[str, str]:
    """What must be the same on all ranks, as text."""
    rules, chosen = given.rules, given.options
    functions = (given.length_fn, chosen.weight_fn, chosen.unpack)
    names = (getattr(one, "__qualname__", type(one).__qualname__) for one in functions)
    values = [str(getattr(rules, name)) for name in _RULES]
    values += [str(chosen.bytes_per_s), str(chosen.timeout_s), *names, describe_cost(given.cost)]
    return dict(zip(_SETTINGS, values, strict=True))


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
