"""Results of calls that other ranks compute, exchanged when they are first used.

All ranks run the same program, so they use a result at the same point, and exchange there. A
pipeline calls its model for each branch of guidance before it puts the results together, so each
group of ranks computes a branch at the same time, without an edit.
"""

from collections.abc import Callable, Mapping, Sequence
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
    (
        *(Tensor.__getitem__, Tensor.to, Tensor.float, Tensor.neg, Tensor.__neg__),
        *(Tensor.squeeze, Tensor.unsqueeze),
    )
)
"""Functions from a result to another tensor that pipelines call before the next model call."""

_PLACEHOLDER = torch.empty((0,) * 9, device="meta")
"""The memory of a result for code that does not ask torch: it fails."""

_Item = tuple[int, int]
"""Number of a call, and of one of its parts."""


class Branch:
    """A call whose parts are computed by groups of ranks.

    Args:
        parts: The group that computes each part, and its number of samples.
        computed: Tensors of the parts that this rank computed, by number of the part.
        form: Of the output.
        compare: Compares the inputs on all ranks; None if that is not due.

    Attributes:
        num_values: Tensors of the output, and those that were made of them since.
        device: Of the output.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, int]],
        computed: Mapping[int, list[Tensor]],
        form: Form,
        compare: Callable[[], None] | None = None,
    ) -> None:
        self.owners, self._counts = zip(*parts, strict=True)
        self.computed, self._form, self.compare = computed, form, compare
        leaves = leaves_of(form.nest)
        self.num_values = len(leaves)
        self.device = leaves[0].device if leaves else torch.device("cpu")
        self._deferred = list[Callable[[Sequence[Tensor]], Tensor]]()
        self._values: list[Tensor] | None = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Return whether the values are here, or never will be."""
        return self._values is not None or self._error is not None

    @property
    def values(self) -> list[Tensor]:
        """Tensors of the output, and those that were made of them."""
        if self._error is not None:
            raise self._error
        assert self._values is not None
        return self._values

    def defer(self, make: Callable[[Sequence[Tensor]], Tensor]) -> int:
        """Make a tensor of the values when they are here; return its place among them."""
        self._deferred.append(make)
        self.num_values += 1
        return self.num_values - 1

    def finish(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Join the parts, and make what was deferred before other code changes them in place."""
        values, rest = list[Tensor](), [iter(leaves) for leaves in parts]
        for is_list in self._form.are_lists:
            if is_list:  # an entry for each sample
                counted = zip(rest, self._counts, strict=True)
                values += [next(part) for part, count in counted for _ in range(count)]
                continue
            column = [next(part) for part in rest]
            values.append(column[0] if len(column) == 1 else torch.cat(column))
        for make in self._deferred:
            values.append(make(values))
        self._values = values

    def fail(self, error: BaseException) -> None:
        """Raise an error where the values are used."""
        self._error = error


class Branches:
    """The calls of a replica whose results were not used yet.

    Attributes:
        sent_bytes: To the other groups, in the last exchange.

    Args:
        group: One rank of each guidance group.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._waiting: list[Branch] = []
        self._num_exchanges, self._capacity = 0, 8
        self.sent_bytes = 0

    @property
    def num_waiting(self) -> int:
        """Parts of calls that wait: groups compute them in turn."""
        return sum(len(branch.owners) for branch in self._waiting)

    def add(self, branch: Branch) -> None:
        """Exchange a call together with the others."""
        self._waiting.append(branch)

    @shared("an exchange of guidance branches")
    def exchange(self) -> None:
        """Send each group the results of the others; all ranks come here at the same point.

        A small all-gather and an all-to-all, and one more gather for each call whose inputs are
        compared.
        """
        waiting, self._waiting = self._waiting, []
        try:
            for branch in waiting:
                if branch.compare is not None:
                    branch.compare()
            self._exchange(waiting)
        except BaseException as error:
            for branch in waiting:
                branch.fail(error)
            raise

    def forget(self) -> None:
        """Drop results of a run that ended before it used them."""
        error = "the result of a guidance branch, of a run that ended: use it before the next run"
        for branch in self._waiting:
            branch.fail(ConfigError(error))
        self._waiting.clear()

    def _exchange(self, waiting: Sequence[Branch]) -> None:
        group, owners = self.group, dict[_Item, int]()
        leaves, parcels, error = dict[_Item, list[Tensor]](), list[Parcel](), None
        for number, branch in enumerate(waiting):
            owners |= {(number, part): owner for part, owner in enumerate(branch.owners)}
            leaves |= {(number, part): values for part, values in branch.computed.items()}
        device = waiting[0].device
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
    """A tensor that may be on other ranks still; its first use fetches it.

    Torch calls `__torch_function__` in place of every function and attribute of a tensor. Slices,
    casts and signs give another tensor that waits: many pipelines take a part of a result before
    they call their model for the next branch.
    """

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
        if not self._branch.is_done:
            with torch.no_grad():
                self._branches.exchange()
        return self._branch.values[self._place]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        own = args[0] if args else None
        if func in _DEFERRED and isinstance(own, Pending) and not own._branch.is_done:
            others = args[1:]
            if all(map(_is_constant, tree_leaves((others, named)))):  # others may change meanwhile
                place = own._place
                made = own._branch.defer(lambda values: func(values[place], *others, **named))
                return Pending.of(own._branches, own._branch, made)
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


def leaves_without_gradients(output: Any) -> list[Tensor]:
    """Return the tensors of a model's output; refuse gradients, which no exchange brings back."""
    leaves = leaves_of(output)
    if any(leaf.requires_grad for leaf in leaves):
        raise ConfigError(
            "guidance over ranks has no gradients: call the pipeline, or the model, under "
            "torch.no_grad()"
        )
    return leaves
