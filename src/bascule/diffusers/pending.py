"""Results of model calls that other ranks compute, exchanged when a result is first used.

All ranks run the same program, so they exchange at the same point. A pipeline calls its model for
each guidance branch before it uses results, so groups compute branches at the same time.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from bascule.arrays import Ints
from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup
from bascule.comm.items import ItemMove, Parcel, leaves_of, mapped, move_items, parcel
from bascule.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a call: rows of tensors, or entries of lists, which may have unlike sizes."""

    number: int
    are_listed: bool = False  # entries of lists, as for Z-Image

    def part(self, place: int, num_parts: int) -> slice:
        """Return the slice of one part's samples; sizes of parts differ by one at most."""
        return slice(self.number * place // num_parts, self.number * (place + 1) // num_parts)


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """The structure of a call's output, without its values."""

    nest: Any  # the output with empty tensors
    are_lists: tuple[bool, ...]  # True for each leaf that is a list with one entry a sample

    @classmethod
    def of(cls, output: Any, samples: Samples, num_local: int) -> "Form":
        """Return the structure of the output for all samples, given the output for `num_local`."""
        are_lists = list[bool]()

        def is_column(value: Any) -> bool:
            is_list = samples.are_listed and isinstance(value, list) and len(value) == num_local
            return isinstance(value, Tensor) or is_list

        def widen(column: Any) -> Any:
            are_lists.append(isinstance(column, list))
            if isinstance(column, Tensor):
                return column.new_empty(0)
            return [column[0].new_empty(0)] * samples.number

        return cls(mapped(output, widen, is_column), tuple(are_lists))


def samples_of(inputs: Mapping[str, Any], unbatched: Collection[str]) -> Samples:
    """Return the samples in the first argument with a batch; one if no argument has a batch."""
    for name, value in inputs.items():
        if name in unbatched:
            continue
        if isinstance(value, Tensor) and value.dim() > 0:
            return Samples(value.shape[0])
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return Samples(len(value), are_listed=True)
    return Samples(1)


def share_of(
    inputs: Mapping[str, Any], unbatched: Collection[str], samples: Samples, part: slice
) -> dict[str, Any]:
    """Reduce the arguments of a call to a part of its samples; tensors are views."""
    return {
        name: value if name in unbatched else _cut(name, value, samples, part)
        for name, value in inputs.items()
    }


def _cut(name: str, value: Any, samples: Samples, part: slice) -> Any:
    batch = samples.number
    if isinstance(value, Tensor):
        if value.dim() == 0 or value.shape[0] == 1:  # for all samples
            return value
        if value.shape[0] != batch:
            wrong = f"{name} has the shape {tuple(value.shape)} in a call of {batch} samples"
            raise ConfigError(f"{wrong}: give (batch, ..), or name it in a table's `unbatched`")
        return value[part]
    if isinstance(value, Mapping):
        return {key: _cut(f"{name}.{key}", x, samples, part) for key, x in value.items()}
    if not isinstance(value, list | tuple) or not value:
        return value
    is_listed = isinstance(value[0], list | tuple | Tensor) and len(value) == batch
    if is_listed and samples.are_listed:
        return value[part]
    if isinstance(value[0], Tensor) and all(x.shape[:1] == (batch,) for x in value):
        return type(value)(x[part] for x in value)
    return value[part] if is_listed else value


_DEFERRED = frozenset(
    (  # functions that pipelines apply to a result before the next call of the model
        *(Tensor.__getitem__, Tensor.to, Tensor.float, Tensor.neg, Tensor.__neg__),
        *(Tensor.squeeze, Tensor.unsqueeze),
    )
)

_PLACEHOLDER = torch.empty((0,) * 9, device="meta")  # code that bypasses torch functions fails
_Item = tuple[int, int]  # number of a call, and number of a part in it
_Make = Callable[[Sequence[Tensor]], Tensor]  # from the values of a call


@dataclass(slots=True, eq=False)
class Branch:
    """A call of the model whose parts groups of ranks compute."""

    owners: Sequence[int]  # the group that computes each part
    counts: Sequence[int]  # samples of each part
    computed: Mapping[int, list[Tensor]]  # tensors of this rank's parts, by number of the part
    form: Form  # of the output
    compare: Callable[[], None] | None = None  # compares the inputs of ranks before the exchange
    deferred: list[_Make] = field(default_factory=list[_Make])
    values: list[Tensor] | None = None  # tensors of the output, then results of `deferred`
    failure: Exception | None = None  # an error of this rank, which the exchange tells to others
    error: BaseException | None = None  # why there will be no values

    def defer(self, make: _Make) -> int:
        """Call `make` once the values arrive; return the place of its tensor in `values`."""
        self.deferred.append(make)
        return len(leaves_of(self.form.nest)) + len(self.deferred) - 1

    def finish(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Join the parts, and make deferred tensors before other code changes values in place."""
        values, rest = list[Tensor](), [iter(leaves) for leaves in parts]
        for is_list in self.form.are_lists:
            if is_list:  # an entry for each sample
                counted = zip(rest, self.counts, strict=True)
                values += [next(part) for part, count in counted for _ in range(count)]
                continue
            column = [next(part) for part in rest]
            values.append(column[0] if len(column) == 1 else torch.cat(column))
        for make in self.deferred:
            values.append(make(values))
        self.values = values


class Branches:
    """The calls of a replica whose results the ranks have not exchanged yet."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group  # one rank of each guidance group
        self.sent_bytes = 0  # to the other groups, in the last exchange
        self._waiting: list[Branch] = []
        self._num_exchanges, self._capacity = 0, 8

    @property
    def num_waiting(self) -> int:
        """Number of parts whose results wait for the exchange; groups compute parts in turn."""
        return sum(len(branch.owners) for branch in self._waiting)

    @property
    def failure(self) -> Exception | None:
        """This rank's first failure since the last exchange, which other ranks do not know yet."""
        return next((branch.failure for branch in self._waiting if branch.failure), None)

    def add(self, branch: Branch) -> None:
        """Add a call to the next exchange."""
        self._waiting.append(branch)

    @shared("an exchange of guidance branches")
    def exchange(self) -> None:
        """Send each group the results of the others by a small all-gather and an all-to-all."""
        waiting, self._waiting = self._waiting, []
        try:
            for branch in waiting:
                if branch.compare is not None:
                    branch.compare()
            self._exchange(waiting)
        except BaseException as error:
            for branch in waiting:
                branch.error = error
            raise

    def forget(self) -> None:
        """Drop results that the last run did not use."""
        error = "result of a guidance branch of a run that ended: use it before the next run"
        for branch in self._waiting:
            branch.error = ConfigError(error)
        self._waiting.clear()

    def _exchange(self, waiting: Sequence[Branch]) -> None:
        group, owners = self.group, dict[_Item, int]()
        leaves, parcels = dict[_Item, list[Tensor]](), list[Parcel]()
        error = next((branch.failure for branch in waiting if branch.failure), None)
        for number, branch in enumerate(waiting):
            owners |= {(number, part): owner for part, owner in enumerate(branch.owners)}
            leaves |= {(number, part): values for part, values in branch.computed.items()}
        outputs = [leaves_of(branch.form.nest) for branch in waiting]
        device = next(leaf.device for output in outputs for leaf in output)
        try:
            local = [item for item, owner in owners.items() if owner == group.rank]
            parcels = [] if error else [parcel(leaves[item], device) for item in local]
        except Exception as failure:  # the others must not wait
            error = failure
        sizes = np.array([sent.num_bytes for sent in parcels], dtype=np.int64)
        self._num_exchanges += 1
        step, name, settings = self._num_exchanges, "guidance branches", {"calls": str(owners)}
        numbers: Any = {"values": sizes, "capacity": self._capacity}
        by_rank = agree_or_raise(group, error, settings, what=name, step=step, **numbers)
        self._capacity = max(self._capacity, *(received.size for received in by_rank))
        source = np.array([*owners.values()])
        num_bytes = np.zeros_like(source)
        for rank, received in enumerate(by_rank):
            num_bytes[source == rank] = received
        # Each item goes to all other ranks.
        others = group.size - 1
        sources, dests = np.repeat(source, group.size), np.tile(np.arange(group.size), source.size)
        copies = sources != dests
        move = ItemMove(sources[copies], dests[copies], group, device, step, name)
        self.sent_bytes = int(sizes.sum()) * others
        outgoing = [sent for sent in parcels for _ in range(others)]
        arrived = move_items(move, outgoing, np.repeat(num_bytes, others))
        remote = [item for item, owner in owners.items() if owner != group.rank]
        leaves |= zip(remote, arrived, strict=True)
        for number, branch in enumerate(waiting):
            branch.finish([leaves[number, part] for part in range(len(branch.owners))])


def agree_or_raise(
    group: RankGroup, error: Exception | None, settings: Mapping[str, str] = {}, **more: Any
) -> list[Ints]:
    """Call `agree`; a rank that failed raises its error unchanged."""
    try:
        return agree(group.control or group, settings, error, **more)
    except Exception:
        if error is not None:
            raise error from None
        raise


class Pending(Tensor):
    """A tensor that other ranks may still compute; its first use exchanges the results."""

    _branches: Branches
    _branch: Branch
    _place: int

    @classmethod
    def of(cls, branches: Branches, branch: Branch, place: int) -> "Pending":
        """Return a placeholder for the tensor at a place in a call's `values`."""
        made = Tensor._make_subclass(cls, _PLACEHOLDER)
        made._branches, made._branch, made._place = branches, branch, place
        return made

    def fetched(self) -> Tensor:
        """Return the real tensor; if it has not arrived, exchange the results first."""
        branch = self._branch
        if branch.values is None and branch.error is None:
            with torch.no_grad():
                self._branches.exchange()
        if branch.error is not None:
            raise branch.error
        assert branch.values is not None
        return branch.values[self._place]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        first = args[0] if args else None
        if func in _DEFERRED and isinstance(first, Pending):
            branch, place, others = first._branch, first._place, args[1:]
            is_open = branch.values is None and branch.error is None
            # Arguments that are not constants may change before the exchange.
            if is_open and all(map(_is_constant, tree_leaves((others, named)))):
                made = branch.defer(lambda values: func(values[place], *others, **named))
                return Pending.of(first._branches, branch, made)
        return func(*fetched(args), **fetched(named))


def _is_constant(value: object) -> bool:
    if isinstance(value, slice):
        return all(map(_is_constant, (value.start, value.stop, value.step)))
    return value is ... or isinstance(
        value, int | float | str | torch.dtype | torch.device | torch.memory_format | None
    )


def fetched(nest: Any) -> Any:
    """Replace pending tensors in nested containers by the real tensors."""
    return tree_map_only(Pending, Pending.fetched, nest)
