"""Results of calls that other ranks compute, exchanged when they are first used.

All ranks run the same program, so they exchange at the same point. A pipeline calls its model for
each guidance branch before it uses results, so groups compute branches at the same time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.comm.groups import RankGroup
from bascule.comm.items import ItemMove, Parcel, leaves_of, move_items, parcel
from bascule.diffusers.batch_shares import Form
from bascule.errors import ConfigError

_DEFERRED = frozenset(
    (  # what pipelines make of a result before the next call of the model
        *(Tensor.__getitem__, Tensor.to, Tensor.float, Tensor.neg, Tensor.__neg__),
        *(Tensor.squeeze, Tensor.unsqueeze),
    )
)

_PLACEHOLDER = torch.empty((0,) * 9, device="meta")  # fails in code that does not ask torch
_Item = tuple[int, int]  # number of a call, and of one of its parts
_Make = Callable[[Sequence[Tensor]], Tensor]  # from the values of a call


@dataclass(slots=True, eq=False)
class Branch:
    """A call whose parts are computed by groups of ranks."""

    owners: Sequence[int]  # the group that computes each part
    counts: Sequence[int]  # samples of each part
    computed: Mapping[int, list[Tensor]]  # tensors of this rank's parts, by number of the part
    form: Form  # of the output
    compare: Callable[[], None] | None = None  # compares the inputs on all ranks, if that is due
    deferred: list[_Make] = field(default_factory=list[_Make])
    values: list[Tensor] | None = None  # of the output, and those that were made of them
    error: BaseException | None = None  # why there will be no values

    def defer(self, make: _Make) -> int:
        """Make a tensor of the values when they are here; return its place among them."""
        self.deferred.append(make)
        return len(leaves_of(self.form.nest)) + len(self.deferred) - 1

    def finish(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Join the parts, and make what was deferred before other code changes them in place."""
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
    """The calls of a replica whose results were not used yet."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group  # one rank of each guidance group
        self.sent_bytes = 0  # to the other groups, in the last exchange
        self._waiting: list[Branch] = []
        self._num_exchanges, self._capacity = 0, 8

    @property
    def num_waiting(self) -> int:
        """Parts of calls that wait: groups compute them in turn."""
        return sum(len(branch.owners) for branch in self._waiting)

    def add(self, branch: Branch) -> None:
        """Exchange a call together with the others."""
        self._waiting.append(branch)

    @shared("an exchange of guidance branches")
    def exchange(self) -> None:
        """Send each group the results of the others: a small all-gather and an all-to-all."""
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
        """Drop results of a run that ended before it used them."""
        error = "the result of a guidance branch, of a run that ended: use it before the next run"
        for branch in self._waiting:
            branch.error = ConfigError(error)
        self._waiting.clear()

    def _exchange(self, waiting: Sequence[Branch]) -> None:
        group, owners = self.group, dict[_Item, int]()
        leaves, parcels, error = dict[_Item, list[Tensor]](), list[Parcel](), None
        for number, branch in enumerate(waiting):
            owners |= {(number, part): owner for part, owner in enumerate(branch.owners)}
            leaves |= {(number, part): values for part, values in branch.computed.items()}
        outputs = [leaves_of(branch.form.nest) for branch in waiting]
        device = next(leaf.device for output in outputs for leaf in output)
        try:
            local = [item for item, owner in owners.items() if owner == group.rank]
            parcels = [parcel(leaves[item], device) for item in local]
        except Exception as failure:  # the others must not wait
            error = failure
        sizes = np.array([one.num_bytes for one in parcels], dtype=np.int64)
        self._num_exchanges += 1
        by_rank = agree(
            group.control or group,
            {"calls": str(owners)},
            error,
            what="guidance branches",
            step=self._num_exchanges,
            values=sizes,
            capacity=self._capacity,
        )
        self._capacity = max(self._capacity, *(one.size for one in by_rank))
        source = np.array([*owners.values()])
        num_bytes = np.zeros_like(source)
        for rank, one in enumerate(by_rank):
            num_bytes[source == rank] = one
        # Each item goes to all other ranks.
        others = group.size - 1
        sources, dests = np.repeat(source, group.size), np.tile(np.arange(group.size), source.size)
        copies = sources != dests
        step, name = self._num_exchanges, "guidance branches"
        move = ItemMove(sources[copies], dests[copies], group, device, step, name)
        self.sent_bytes = int(sizes.sum()) * others
        sent = [one for one in parcels for _ in range(others)]
        arrived = move_items(move, sent, np.repeat(num_bytes, others))
        remote = [item for item, owner in owners.items() if owner != group.rank]
        leaves |= zip(remote, arrived, strict=True)
        for number, branch in enumerate(waiting):
            branch.finish([leaves[number, part] for part in range(len(branch.owners))])


class Pending(Tensor):
    """A tensor that may still be on other ranks; its first use fetches it."""

    _branches: Branches
    _branch: Branch
    _place: int

    @classmethod
    def of(cls, branches: Branches, branch: Branch, place: int) -> "Pending":
        """Return the value at a place of a call's output."""
        made = Tensor._make_subclass(cls, _PLACEHOLDER)
        made._branches, made._branch, made._place = branches, branch, place
        return made

    def fetched(self) -> Tensor:
        """Return the tensor itself, after an exchange if it is not here yet."""
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
            # Other arguments may change meanwhile.
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
    """Return the nest with the tensors themselves."""
    return tree_map_only(Pending, Pending.fetched, nest)
