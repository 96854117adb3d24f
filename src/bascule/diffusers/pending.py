"""Results of calls that other ranks make, exchanged when they are first used.

All ranks run the same program, so all of them use a result at the same point, and meet there. A
pipeline that calls its model for each branch of guidance, and then puts the results together, so
lets each group of ranks compute a branch at the same time, without being edited.
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
"""What pipelines do with a result before they call their model again. Each gives a tensor."""


_PLACEHOLDER = torch.empty((0,) * 9, device="meta")
"""What code sees that takes the memory of a tensor without asking torch: it fails."""


class Branch:
    """A call whose parts are computed by groups of ranks.

    Args:
        parts: The group that computes each part, and of how many samples it is.
        own: By number, the tensors of each part that this rank computed.
        form: What the call returns.
        compare: Compares what the call was given on all ranks; None if that is not to be done.

    Attributes:
        num_values: Tensors that the call gives, and those that were made of them since.
        device: Where they are.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, int]],
        own: Mapping[int, list[Tensor]],
        form: Form,
        compare: Callable[[], None] | None = None,
    ) -> None:
        self.owners, self._counts = zip(*parts, strict=True)
        self.own, self._form, self.compare = dict(own), form, compare
        leaves = leaves_of(form.nest)
        self.num_values = len(leaves)
        self.device = leaves[0].device if leaves else torch.device("cpu")
        self._deferred = list[Callable[[Sequence[Tensor]], Tensor]]()
        self._whole: list[Tensor] | None = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Return whether the parts of all groups are here, or never will be."""
        return self._whole is not None or self._error is not None

    @property
    def whole(self) -> list[Tensor]:
        """Its tensors, and those that were made of them.

        Raises:
            CommError: The exchange failed.
        """
        if self._error is not None:
            raise self._error
        assert self._whole is not None
        return self._whole

    def defer(self, make: Callable[[Sequence[Tensor]], Tensor]) -> int:
        """Make another tensor of its tensors when they are here; its place among them."""
        self._deferred.append(make)
        self.num_values += 1
        return self.num_values - 1

    def finish(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Take the parts. What was deferred is made now, before anybody writes into them."""
        whole, left = list[Tensor](), [iter(leaves) for leaves in parts]
        for is_list in self._form.are_lists:
            if is_list:  # an entry for each sample
                counted = zip(left, self._counts, strict=True)
                whole += [next(part) for part, count in counted for _ in range(count)]
                continue
            column = [next(part) for part in left]
            whole.append(column[0] if len(column) == 1 else torch.cat(column))
        for make in self._deferred:
            whole.append(make(whole))
        self._whole = whole

    def fail(self, error: BaseException) -> None:
        """There will be no parts."""
        self._error = error


class Branches:
    """The calls of a replica whose results nobody has used yet.

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
        """Exchange it together with the others."""
        self._waiting.append(branch)

    @shared("an exchange of guidance branches")
    def exchange(self) -> None:
        """Give each group what the others computed; all ranks come here at the same point.

        A small all-gather, and an all-to-all. One more gather for each call whose inputs are
        compared.

        Raises:
            CommError: Ranks do not wait for the same, were given different inputs, or one is gone.
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
        """Leave out what a run that was broken off did not use."""
        error = "the result of a guidance branch, of a run that ended: use it before the next run"
        for branch in self._waiting:
            branch.fail(ConfigError(error))
        self._waiting.clear()

    def _exchange(self, waiting: Sequence[Branch]) -> None:
        items = [
            (number, part, owner)
            for number, branch in enumerate(waiting)
            for part, owner in enumerate(branch.owners)
        ]
        found: dict[tuple[int, int], list[Tensor]] = {
            (number, part): own
            for number, branch in enumerate(waiting)
            for part, own in branch.own.items()
        }
        self._num_exchanges += 1
        found |= self._moved(items, found, waiting[0].device)
        for number, branch in enumerate(waiting):
            branch.finish([found[number, part] for part in range(len(branch.owners))])

    def _moved(
        self,
        items: Sequence[tuple[int, int, int]],
        found: Mapping[tuple[int, int], list[Tensor]],
        device: torch.device,
    ) -> dict[tuple[int, int], list[Tensor]]:
        """What the other groups computed, by call and part."""
        group, parcels, error = self.group, list[Parcel](), None
        try:
            own = [found[item[:2]] for item in items if item[2] == group.rank]
            parcels = [parcel(leaves, device) for leaves in own]
        except Exception as met:  # whatever it is, the others must not wait
            error = met
        sizes = np.array([one.num_bytes for one in parcels], dtype=np.int64)
        said = agree(
            group.control or group,
            {"calls": str(items)},
            error,
            what="guidance branches",
            step=self._num_exchanges,
            values=sizes,
            capacity=self._capacity,
        )
        self._capacity = max(self._capacity, *(own.size for own in said))
        owners = np.array([owner for _, _, owner in items])
        num_bytes = np.zeros_like(owners)
        for owner, own in enumerate(said):
            num_bytes[owners == owner] = own
        # Each item goes to all other ranks.
        source, dest = np.repeat(owners, group.size), np.tile(np.arange(group.size), owners.size)
        copies, others = source != dest, group.size - 1
        step, name = self._num_exchanges, "guidance branches"
        move = ItemMove(source[copies], dest[copies], group, device, step, name)
        self.sent_bytes = int(sizes.sum()) * others
        sent = [one for one in parcels for _ in range(others)]
        arrived = move_items(move, sent, np.repeat(num_bytes, others))
        theirs = [item[:2] for item in items if item[2] != group.rank]
        return dict(zip(theirs, arrived, strict=True))


class Pending(Tensor):
    """A tensor that may be on other ranks still; whatever is done with it fetches it first.

    But for slices, casts and signs, which give another one that waits: many pipelines take a part
    of a result before they call their model for the next branch. Torch calls `__torch_function__`
    in place of every function and attribute of a tensor.
    """

    _branches: Branches
    _branch: Branch
    _place: int

    @classmethod
    def of(cls, branches: Branches, branch: Branch, place: int) -> "Pending":
        """The tensor at a place of what a call gives."""
        made = Tensor._make_subclass(cls, _PLACEHOLDER)
        made._branches, made._branch, made._place = branches, branch, place
        return made

    def fetched(self) -> Tensor:
        """The tensor itself; an exchange where it is not here yet."""
        if not self._branch.is_done:
            with torch.no_grad():
                self._branches.exchange()
        return self._branch.whole[self._place]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What torch calls instead of each of its functions."""
        named = dict(kwargs or {})
        own = args[0] if args else None
        if func in _DEFERRED and isinstance(own, Pending) and own._may_wait(args[1:], named):
            return own._later(func, args[1:], named)
        return func(*fetched(args), **fetched(named))

    def _may_wait(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether what is made of it can be made later: of nothing that may change until then."""
        return not self._branch.is_done and all(map(_is_constant, tree_leaves((args, kwargs))))

    def _later(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> "Pending":
        place = self._place
        made = self._branch.defer(lambda whole: func(whole[place], *args, **kwargs))
        return Pending.of(self._branches, self._branch, made)


def _is_constant(value: object) -> bool:
    if isinstance(value, slice):
        return all(map(_is_constant, (value.start, value.stop, value.step)))
    return value is ... or isinstance(
        value, int | float | str | torch.dtype | torch.device | torch.memory_format | None
    )


def fetched(nest: Any) -> Any:
    """The same with the tensors themselves."""
    return tree_map_only(Pending, Pending.fetched, nest)


def leaves_without_gradients(output: Any) -> list[Tensor]:
    """The tensors of what a model returns.

    Raises:
        ConfigError: They have gradients, which no exchange brings back.
    """
    leaves = leaves_of(output)
    if any(leaf.requires_grad for leaf in leaves):
        raise ConfigError(
            "guidance over ranks has no gradients: call the pipeline, or the model, under "
            "torch.no_grad()"
        )
    return leaves
