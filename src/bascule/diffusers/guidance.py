"""Guidance over groups of ranks: each computes a part of a batch, or every so many-th call.

A pipeline guides in one of two ways. Either it calls its model once, with a batch of negative and
positive samples: the batch is shared. Or it calls it once for each: groups take turns, and go on
with a `Pending` result where another group computes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bascule.comm.failures import shared
from bascule.comm.items import rebuilt
from bascule.diffusers.arguments import SameInputs, form_of, parameters_of
from bascule.diffusers.batch_shares import (
    Form,
    Samples,
    samples_of,
    share_of,
)
from bascule.diffusers.branch_caches import branch_of
from bascule.diffusers.pending import (
    Branch,
    Branches,
    Pending,
    fetched,
    leaves_without_gradients,
)
from bascule.diffusers.split_model import SplitModel
from bascule.errors import ConfigError
from bascule.stand_in import Override


class GuidedModel(Override):
    """A model whose calls are computed by the guidance groups of a replica.

    A function around the model that torch compiles calls the model itself, so each group then
    computes everything: results are the same, and no faster.

    Attributes:
        branches: Of the replica, for all of its models.

    Args:
        part: The model over its mesh; its parameters are not sharded.
        branches: As above.
    """

    def __init__(self, part: SplitModel, branches: Branches) -> None:
        self.model, self._part, self.branches = part.model, part, branches
        self._unbatched, self._names = part.table.unbatched, parameters_of(part.model)
        self.inputs = SameInputs(part.model)
        self._cached = list[str]()  # branches that a cache knows, in the order of their first calls
        self._forms: dict[tuple[Any, ...], Form] = {}  # of outputs, by what decides it
        super().__init__(part.model, "__call__", self._call)

    def restart(self) -> None:
        """Begin a run: compare its first calls, and forget pending results of the last one."""
        self.inputs.restart()
        self.branches.forget()

    def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with shared(f"a guidance branch of {type(self.model).__name__}"):
            return self._share(call, fetched(args), fetched(kwargs))

    def _share(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        group, names = self.branches.group, self._names
        inputs = dict(zip(names, args, strict=False)) | kwargs
        compare = self.inputs.due(group, inputs, form_of(inputs))
        samples = samples_of(names, args, kwargs, self._unbatched)
        num_parts = max(1, min(samples.number, group.size))
        owners = self._owners(num_parts)
        asked = self._asked(args, kwargs, samples)
        form = self._forms.get(asked)
        if compare is not None and (form is None or num_parts == group.size):
            compare()
            compare = None  # else where ranks meet anyway: here, they would take turns in computing
        computed: Mapping[int, list[Tensor]] = {}
        if form is None or group.rank in owners:  # at first all, to know what the model returns
            place = owners.index(group.rank) if group.rank in owners else 0
            own = samples.part(place, num_parts)
            if num_parts > 1:
                args, kwargs = share_of(names, args, kwargs, self._unbatched, samples, own)
            output = call(*args, **kwargs)
            leaves = leaves_without_gradients(output)
            computed = {place: leaves} if group.rank in owners else {}
            if form is None:
                form = self._forms[asked] = Form.of(output, samples, own.stop - own.start)
        counts = [len(range(samples.number)[samples.part(i, num_parts)]) for i in range(num_parts)]
        branch = Branch(list(zip(owners, counts, strict=True)), computed, form, compare)
        places = range(branch.num_values)
        self.branches.add(branch)
        return rebuilt(form.nest, iter([Pending.of(self.branches, branch, i) for i in places]))

    def _owners(self, num_parts: int) -> list[int]:
        """The groups that compute the parts of the next call: they take turns.

        What a cache keeps is in one group: a branch that it knows has the same in every step.
        """
        num_groups = self.branches.group.size
        blocks = [block for block, _ in self._part.blocks.values()]
        cached = branch_of(self.model, blocks, num_parts, num_groups)
        first = 0 if num_parts == num_groups else self.branches.num_waiting
        if cached is not None:
            self._cached += [] if cached in self._cached else [cached]
            first = self._cached.index(cached) * num_parts
        return [(first + place) % num_groups for place in range(num_parts)]

    def _asked(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], samples: Samples
    ) -> tuple[Any, ...]:
        """What decides the form of what the model returns, as `return_dict`."""
        kinds = [(name, _kind(kwargs[name])) for name in sorted(kwargs)]
        return samples.number if samples.are_listed else 0, *map(_kind, args), *kinds


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
    """What of an argument may decide it."""
    return value if isinstance(value, bool) else type(value).__name__
