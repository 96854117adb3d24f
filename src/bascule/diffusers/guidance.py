"""Guidance over groups of ranks: each group computes a part of a batch, or every n-th call.

Groups split the batch if a pipeline calls its model once for negative and positive samples. If it
calls the model once for each, groups take turns; results of other groups are `Pending`.
"""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bascule.comm.failures import shared
from bascule.comm.items import leaves_of, mapped
from bascule.diffusers.arguments import SameInputs, parameters_of
from bascule.diffusers.caches import branch_of
from bascule.diffusers.pending import (
    Branch,
    Branches,
    Form,
    Pending,
    agree_or_raise,
    fetched,
    samples_of,
    share_of,
)
from bascule.diffusers.split_model import SplitModel, signature_of
from bascule.errors import ConfigError
from bascule.stand_in import Override


class GuidedModel(Override):
    """Lets the guidance groups of a replica compute the calls of a model."""

    def __init__(self, split: SplitModel, branches: Branches) -> None:
        self.model, self._split, self.branches = split.model, split, branches
        self._unbatched, self._names = split.table.unbatched, parameters_of(split.model)
        self.inputs = SameInputs(split.model, split.inputs.tolerance)
        self._cached = list[str]()  # branches of a diffusers cache, in the order of first calls
        self._forms: dict[object, Form] = {}  # structures of outputs, by kind of call
        # In a user's compiled code around the model, each group computes all calls.
        super().__init__(split.model, "__call__", self._call)

    def share_among(self, branches: Branches | None) -> None:
        """Switch to other groups (None: no sharing), and forget the structures of outputs."""
        self._is_on = branches is not None
        self.branches = branches or self.branches
        self._forms.clear()
        self._cached.clear()
        self.restart()

    def restart(self) -> None:
        """Begin a run: compare its first calls, and forget pending results of the last run."""
        self.inputs.restart()
        self.branches.forget()

    def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with shared(f"a guidance branch of {type(self.model).__name__}"):
            inputs = dict(zip(self._names, fetched(args), strict=False)) | fetched(kwargs)
            ordered = {name: inputs[name] for name in self._names if name in inputs}
            return self._share(call, ordered | inputs)

    def _share(self, call: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
        group, sparse = self.branches.group, self._split.sparse
        num_passes = 0 if sparse is None else sparse.passes.number
        compare = self.inputs.comparison(group, inputs, signature_of(inputs))
        samples = samples_of(inputs, self._unbatched)
        num_parts = max(1, min(samples.number, group.size))
        owners = self._owners(num_parts)
        # Boolean arguments as `return_dict` decide the form of the output.
        kinds = tuple((name, x if isinstance(x, bool) else type(x)) for name, x in inputs.items())
        kind = samples.number if samples.are_listed else 0, kinds
        form = self._forms.get(kind)
        if compare is not None and (form is None or num_parts == group.size):
            compare()
            compare = None  # else `exchange` compares: to wait here would let no group compute
        parts = [samples.part(place, num_parts) for place in range(num_parts)]
        counts = [part.stop - part.start for part in parts]
        computed: Mapping[int, list[Tensor]] = {}
        error, output = self.branches.failure, None
        if form is None or group.rank in owners:  # all groups compute the first call of a kind
            place = owners.index(group.rank) if group.rank in owners else 0
            try:
                if num_parts > 1:
                    inputs = share_of(inputs, self._unbatched, samples, parts[place])
                output = None if error else call(**inputs)
                if any(leaf.requires_grad for leaf in leaves_of(output)):
                    raise ConfigError(  # no exchange brings gradients back
                        "guidance over ranks has no gradients: call it under torch.no_grad()"
                    )
            except Exception as failure:  # others may not have it: the exchange tells them
                error = failure
            computed = {place: leaves_of(output)} if group.rank in owners else {}
            if form is None:
                agree_or_raise(group, error, what="first call of a guidance branch")
                form = self._forms[kind] = Form.of(output, samples, counts[place])
        if sparse is not None:  # also count passes that other groups compute
            sparse.passes.number = num_passes + 1
        branch = Branch(owners, counts, computed, form, compare, failure=error)
        self.branches.add(branch)
        places = count()
        return mapped(form.nest, lambda _: Pending.of(self.branches, branch, next(places)))

    def _owners(self, num_parts: int) -> list[int]:
        """Return the group of each part of the next call; a branch with a cache keeps its group."""
        num_groups = self.branches.group.size
        modules, forward = self._split.hooked, self._split.plain_forward
        cached = branch_of(self.model, forward, modules, num_parts, num_groups)
        first = 0 if num_parts == num_groups else self.branches.num_waiting
        if cached is not None:
            self._cached += [] if cached in self._cached else [cached]
            first = self._cached.index(cached) * num_parts
        return [(first + place) % num_groups for place in range(num_parts)]


def check_guided(model: nn.Module) -> None:
    """Refuse a model that FSDP shards."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            f"{type(model).__name__} is sharded by FSDP: use guidance_degree=1, or do not shard it"
        )
