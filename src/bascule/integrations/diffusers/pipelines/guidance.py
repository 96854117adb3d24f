"""Guidance over groups of ranks: each computes a part of a batch, or every so many-th call.

A pipeline guides in one of two ways. Either it calls its model once, with a batch of negative and
positive samples: the batch is shared. Or it calls it once for each: groups take turns, and go on
with a `Pending` result where another group computes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bascule.comm.guard.failures import telling
from bascule.comm.samples.nests import leaves_of, mapped, rebuilt
from bascule.errors import ConfigError
from bascule.integrations.diffusers.arguments import SameInputs, parameters_of
from bascule.integrations.diffusers.hooks import SplitModel
from bascule.integrations.diffusers.pipelines.batch_shares import batch_of, share_of
from bascule.integrations.diffusers.pipelines.branch_caches import branch_of
from bascule.integrations.diffusers.pipelines.pending import (
    EVERYONE,
    Branch,
    Branches,
    Pending,
    fetched,
    leaves_without_gradients,
)


class GuidedModel:
    """A model whose calls are computed by the guidance groups of a replica.

    It is called as torch calls a compiled module: in place of the module's own call, which copies
    and pickles of the model do not have. A function around the model that torch compiles calls the
    model itself, so each group then computes everything: results are the same, and no faster.

    Args:
        part: The model, with the hooks of its mesh; its parameters are not sharded.
        branches: Of the replica, for all of its models.
    """

    def __init__(self, part: SplitModel, branches: Branches) -> None:
        self.model, self._part, self._branches = part.model, part, branches
        self._unbatched, self._names = part.table.unbatched, parameters_of(part.model)
        self.inputs = SameInputs(part.model)
        self._is_paused = False
        self._cached = list[str]()  # branches that a cache knows, in the order of their first calls
        # What the model returns, around tensors without values: by what it was asked for.
        self._forms: dict[tuple[Any, ...], Any] = {}
        self._own: Callable[..., Any] | None = None
        self._is_installed = False

    def install(self) -> None:
        """Take the place of the model's own call, compiled or not."""
        self._own = self.model._compiled_call_impl
        self.model._compiled_call_impl = self._call
        self._is_installed = True

    def remove(self) -> None:
        """Give the model its own call back."""
        if self._is_installed:
            self.model._compiled_call_impl = self._own
        self._is_installed = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Each group computes every call itself."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        own = self._own or self.model._call_impl
        args, kwargs = fetched(args), fetched(kwargs)
        if self._is_paused:
            return own(*args, **kwargs)
        with telling(f"a guidance branch of {type(self.model).__name__}"):
            return self._share(own, args, kwargs)

    def _share(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group, names = self._branches.group, self._names
        compare = self.inputs.due(group, args, kwargs)
        batch = batch_of(names, args, kwargs, self._unbatched)
        asked = len(args), *((name, _kind(kwargs[name])) for name in sorted(kwargs))
        form, is_shared = self._forms.get(asked), batch >= group.size
        blocks = [block for block, _ in self._part.blocks.values()]
        cached = branch_of(self.model, blocks, is_shared=is_shared)
        if is_shared:
            owners = range(group.size)
            samples = slice(
                batch * group.rank // group.size, batch * (group.rank + 1) // group.size
            )
            args, kwargs = share_of(names, args, kwargs, self._unbatched, (batch, samples))
            own_part = group.rank
        else:
            owners, own_part = [self._branches.next_owner], 0
            if cached is not None:  # what it keeps is in one group
                self._cached += [] if cached in self._cached else [cached]
                owners = [self._cached.index(cached) % group.size]
            if form is None:  # so that all know what the model returns
                owners = [EVERYONE]
        computed: Mapping[int, list[Tensor]] = {}
        if compare is not None and (is_shared or owners == [EVERYONE]):
            compare()
            compare = None  # else where ranks meet anyway: here, they would take turns in computing
        if len(owners) > 1 or owners[0] in (EVERYONE, group.rank):
            output = own(*args, **kwargs)
            computed = {own_part: leaves_without_gradients(output)}
            if form is None:
                form = self._forms[asked] = mapped(output, lambda leaf: leaf.new_empty(0))
        device = next((leaf.device for leaf in leaves_of(form)), torch.device("cpu"))
        places = range(len(leaves_of(form)))
        branch = Branch(owners, computed, len(places), device, compare)
        self._branches.add(branch)
        return rebuilt(form, iter([Pending.of(self._branches, branch, i) for i in places]))


def check_guided(model: nn.Module) -> None:
    """Refuse a model whose ranks must all call it together.

    Raises:
        ConfigError: Its parameters are sharded.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            f"{type(model).__name__} is sharded by FSDP, whose ranks compute every call together: "
            "use guidance_degree=1, or do not shard it"
        )


def _kind(value: Any) -> Any:
    """What of an argument may decide the form of what a model returns, as `return_dict`."""
    return value if isinstance(value, bool) else type(value).__name__
