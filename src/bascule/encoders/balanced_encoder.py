"""BalancedEncoder: items go to the ranks that have time to encode them, and their features back."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from bascule.comm.agree import Statement, agree, agree_on
from bascule.comm.groups import RankGroup
from bascule.comm.guard.failures import explained, told
from bascule.comm.samples.nests import leaves_of
from bascule.comm.samples.sample_bytes import Parcel, parcel
from bascule.comm.samples.sample_moves import (
    ItemMove,
    move_items,
    move_items_with_gradients,
    num_rows,
    tied,
)
from bascule.encoders.encoder_tables import (
    EncoderOptions,
    Item,
    Length,
    called_with,
    filled,
    table_of,
)
from bascule.encoders.features import Features, attach
from bascule.encoders.item_measures import ItemMeasures, contents_of, weights_of
from bascule.encoders.item_plans import Encoding, ItemPlan, Loaded, plan_items
from bascule.errors import ConfigError
from bascule.parallel import ParallelOptions, SequenceParallel
from bascule.plan.checks import number, shown
from bascule.plan.costs.cost_models import Cost, describe_cost

if TYPE_CHECKING:
    from bascule.encoders.installed import Installed

_FIRST_CAPACITY = 128  # integers a rank that the first gather has room for
_DEFAULT = EncoderOptions()
_GETTING = {"owner": 0, "all": None, "first": 1}  # ranks that get what all of them gave


class BalancedEncoder:
    """An encoder whose items are encoded by the ranks that have time, in place of their owners.

    Features come back to the rank that gave the item, in its order, as if it had encoded them
    itself; so do gradients, both ways. All ranks make it, and call it, at the same points, also
    those without items. Every rank calls the module: one without items encodes the cheapest one of
    all once more, without counting it, so FSDP's and DDP's ranks always meet. Gradients of
    parameters are those of other ranks' items, too: they are right after averaging over the ranks.

    Nothing is recorded where neither the parameters nor the items of any rank require a gradient.

    Attributes:
        module: The encoder, unedited.
        last: What the last step moved, and what that saved; None if no rank had an item.

    Args:
        module: Maps items to features; plain, in DistributedDataParallel, or sharded by FSDP2. Its
            arguments and outputs hold items along the first dim; see `EncoderTable`. It has the
            same weights on all ranks.
        length_fn: Tokens of an item, at least 1, from its arguments by name; or a pair of tokens
            and of how many pairs of a query and a key attention computes. Default: as the table
            for the module's class says.
        cost: Predicts what an item costs from its tokens, and pairs, where there are any.
        mesh_or_group: A one-axis DeviceMesh, a process group, or None for the default group.
        options: What is seldom changed.

    Raises:
        ConfigError: An argument is wrong here. RemoteConfigError: on another rank.
        CommError: Ranks disagree, or one is gone.
    """

    @told("construction of a BalancedEncoder")
    def __init__(
        self,
        module: nn.Module,
        *,
        length_fn: Callable[[Item], Length] | None = None,
        cost: Cost,
        mesh_or_group: "DeviceMesh | dist.ProcessGroup | None" = None,
        options: EncoderOptions = _DEFAULT,
    ) -> None:
        self.module, self.cost, self.options = module, cost, options
        self.last: Encoding | None = None
        self._number, self._capacity = 0, _FIRST_CAPACITY
        rest = ParallelOptions(device=options.device)
        self._parallel = SequenceParallel(
            *(mesh_or_group, "g1n1", cost),
            limits=options.limits,
            timeout_s=options.timeout_s,
            options=rest,
        )
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self._inner: nn.Module = inner
        self.table = table_of(inner) if options.table is None else options.table
        is_owned = options.features_for == "owner"
        args = inner, self.table, length_fn, self._parallel.device, is_owned
        self._measures = ItemMeasures(*args)
        error = None
        parts = [(name, str(p.dtype), *p.shape) for name, p in inner.named_parameters()]
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
        settings = {
            "module": f"{type(inner).__name__} with parameters of shapes {digest}",
            "home_tolerance": str(options.home_tolerance),
            "features_for": str(options.features_for),
            "weights": "",
            "settings": "",
        }
        try:
            if length_fn is None and self.table.length is None:
                raise ConfigError(
                    f"no lengths are known for a {type(inner).__name__}: give length_fn, which "
                    "says the tokens of an item"
                )
            number("home_tolerance", options.home_tolerance)
            if options.features_for not in _GETTING:
                raise ConfigError(
                    f"features_for={shown(options.features_for)}: choose one of {list(_GETTING)}"
                )
            settings["settings"] = self.table.settings(inner) if self.table.settings else ""
            settings["weights"] = weights_of(inner)
        except Exception as met:  # whatever it is, the others must not wait
            error = met
        agree_on(self._agreeing, settings, error, what="construction")

    @told("items of a balanced encoder")
    def __call__(self, items: Sequence[Item]) -> Features:
        """Encode items, each on the rank that has time.

        Two small gathers; two all-to-alls where an item moves, none where that does not pay.

        Args:
            items: Those of this rank, may be empty. Each is what the module takes for one item
                alone, by name.

        Returns:
            What the module gives for each alone, in their order. See `Features.attach`.

        Raises:
            RemoteConfigError: An item of a rank is wrong (on all ranks).
            CommError: Encoding failed on a rank (on all ranks), or one is gone.
            PlanError: The limits cannot be kept (on all ranks).
        """
        return self.encode(items)

    @told("a call of a balanced encoder")
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives for these arguments, each item computed by the rank that has time.

        Tensors may have no rows. A loss of every rank must depend on what it gets, if any does.

        Raises:
            As calling with items; ConfigError: no rank has an item (on all ranks).
        """
        return self.call_after(None, args, kwargs).together

    def call_after(self, token: Tensor | None, args: Sequence[Any], kwargs: Item) -> Features:
        """`call`, whose backward pass comes before that of the token; item by item."""
        items, error = list[Item](), None
        try:
            items = self.table.cut(called_with(self._function, args, kwargs))
        except Exception as met:  # whatever it is, the others must not wait
            error = met
        return self.encode(items, token, error)

    def install(self, model: nn.Module) -> "Installed":
        """Let a model that contains the module use this encoder, in every forward pass from now on.

        The model is not edited: while the part that holds the module computes, a stand-in is in
        the module's place. Ranks whose batch has no images, or videos, take part. Shard or wrap
        the model before.

        Returns:
            Its `undo()` takes the encoder out again.

        Raises:
            ConfigError: The model does not contain the module.
        """
        from bascule.encoders.installed import Installed

        return Installed(self, model)

    def take_part(self, token: Tensor | None) -> Features:
        """Be there when other ranks encode, without an item."""
        return self.encode([], token)

    @property
    def _agreeing(self) -> RankGroup:
        """The ranks, on the host."""
        group = self._parallel.group.control
        assert group is not None
        return group

    @property
    def _function(self) -> Callable[..., Any]:
        return getattr(self._inner, self.table.method or "forward")

    def encode(
        self,
        items: Sequence[Item],
        after: Tensor | None = None,
        error: Exception | None = None,
        what: str = "",
        given: Any = None,
    ) -> Features:
        """Calling with items, for who prepares them.

        Args:
            items: As for calling.
            after: The token before whose backward pass this one's comes.
            error: What this rank met while it prepared them; then all ranks raise.
            what: What all ranks must do alike besides.
            given: What the items were made of. Default: the items.
        """
        self._number += 1
        loaded, parcels = self._agree(items, error, what, items if given is None else given)
        self.last = None
        if not loaded.num_items:
            return Features([], after, None)
        limits, tolerance = self.options.limits, self.options.home_tolerance
        aligned = self._is_sharded, self.table.is_alone
        plan = plan_items(loaded, self.cost, limits, tolerance, *aligned)
        self.last = plan.report
        with _recording(loaded.needs_gradient):
            token = self._first_token(after) if loaded.needs_gradient else None
            arrived, token = self._send(plan, items, parcels, token)
            features = self._return(plan, self._compute(plan, arrived), token)
        if not loaded.needs_gradient:
            features.token = after
        return features

    def _agree(
        self, items: Sequence[Item], error: Exception | None, what: str, given: Any
    ) -> tuple[Loaded, list[Parcel]]:
        """What all ranks loaded; or the same error on all of them."""
        parallel, parcels = self._parallel, list[Parcel]()
        own = np.zeros(1, np.int64)
        names = ("call", "cost", "settings", "gradients", "is sharded", "items")
        settings: dict[str, str] = dict.fromkeys(names, "")
        try:
            settings["call"], settings["cost"] = what, describe_cost(self.cost)
            settings["settings"] = self.table.settings(self._inner) if self.table.settings else ""
            trains = torch.is_grad_enabled() and any(
                p.requires_grad for p in self._inner.parameters()
            )
            settings["gradients"] = f"enabled {torch.is_grad_enabled()}, of parameters {trains}"
            settings["is sharded"] = str(self._is_sharded)
            if error is None:
                measured = [self._measures.of(place, one) for place, one in enumerate(items)]
                parcels = [one for one, _ in measured]
                wants = torch.is_grad_enabled() and any(
                    x.requires_grad for one in items for x in one.values() if isinstance(x, Tensor)
                )
                if not self._measures.travel:
                    settings["items"] = contents_of(leaves_of(given))
                    if wants or trains:
                        raise ConfigError(
                            f"features_for={self.options.features_for!r} has no gradients: encode "
                            "under torch.no_grad(), or let each rank give its own items"
                        )
                own = np.array([wants + 2 * trains, *(n for _, ns in measured for n in ns)])
        except Exception as met:  # whatever it is, the others must not wait
            error = met
        said = agree(
            parallel._planning.group,
            Statement(settings, own.astype(np.int64), error),
            what="items",
            step=self._number,
            capacity=self._capacity,
        )
        self._capacity = max(self._capacity, *(part.size for part in said))
        num_getting = _GETTING[self.options.features_for]
        num_getting = len(said) if num_getting is None else num_getting
        return Loaded.of(said, parallel.rank, num_getting), parcels

    def _first_token(self, after: Tensor | None) -> Tensor:
        device = self._parallel.device
        return torch.zeros((), device=device, requires_grad=True) if after is None else after

    def _send(
        self, plan: ItemPlan, items: Sequence[Item], parcels: Sequence[Parcel], token: Tensor | None
    ) -> tuple[dict[int, Item], Tensor | None]:
        """The items that this rank computes, by id."""
        parallel, loaded = self._parallel, plan.loaded
        if not plan.moves:
            return dict(zip(loaded.own.tolist(), items, strict=True)), token
        ids, dest = plan.needed
        move = self._move(loaded.owner[ids], dest, "items")
        sent = (ids[loaded.owner[ids] == parallel.rank] - loaded.first).tolist()
        args = [parcels[one] for one in sent], loaded.rows[ids]
        if token is not None and loaded.items_need_gradient:
            arrived, token = move_items_with_gradients(move, [items[i] for i in sent], *args, token)
        else:
            arrived = move_items(move, *args)
        return dict(zip(ids[dest == parallel.rank].tolist(), arrived, strict=True)), token

    def _compute(self, plan: ItemPlan, arrived: dict[int, Item]) -> "_Computed":
        """What this rank computes, agreed to be without an error."""
        parts, unused, template, error = dict[int, list[Tensor]](), list[Tensor](), None, None
        parcels, rank, meets = list[Parcel](), self._parallel.rank, self._is_sharded
        loaded = plan.loaded
        try:
            for of in plan.passes[rank]:
                items = [arrived[one] for one in of.ids.tolist()]
                with explained(f"step {self._number}: encoding") if meets else nullcontext():
                    template = self._call_module(self.table.join(items))
                found = self.table.parts(template, items)
                if of.is_dummy:
                    unused += [x for own in found for x in own if x.requires_grad]
                else:
                    parts |= dict(zip(of.ids.tolist(), found, strict=True))
            ids, _ = plan.sent(loaded.needs_gradient)
            for one in np.unique(ids[plan.rank_of[ids] == rank]).tolist():
                own = [x.detach() for x in parts[one]]
                parcels.append(parcel(own, self._parallel.device))
        except Exception as met:  # whatever it is, the others must not wait
            if meets:  # they may wait within the module, which being told of it ends
                raise
            error = met
        said = agree(
            self._agreeing,
            Statement({}, np.array([num_rows(one) for one in parcels], np.int64), error),
            what="encoding",
            step=self._number,
            capacity=self._capacity,
        )
        return _Computed(parts, unused, template, parcels, said)

    def _call_module(self, arguments: Item) -> Any:
        if self.table.method is None:
            return self.module(**arguments)
        return getattr(self.module, self.table.method)(**arguments)

    def _return(self, plan: ItemPlan, computed: "_Computed", token: Tensor | None) -> Features:
        """The features of what this rank gets, in the order of the items."""
        parts, rank, template = computed.parts, self._parallel.rank, computed.template
        if token is not None:
            token = tied(token, computed.unused)
        ids, dest = plan.sent(token is not None)
        if ids.size:
            source, rows = plan.rank_of[ids], np.zeros(plan.rank_of.size, np.int64)
            for of, said in enumerate(computed.rows):
                rows[np.unique(ids[source == of])] = said
            move = self._move(source, dest, "features")
            if token is None:
                arrived = move_items(move, computed.parcels, rows[ids], plan.starts(rows))
            else:
                sent = [parts[one] for one in sorted(parts)]
                args = sent, computed.parcels, rows[ids], token
                arrived, token = move_items_with_gradients(move, *args)
            parts |= dict(zip(ids[dest == rank].tolist(), arrived, strict=True))
        wanted, getting = plan.wanted
        leaves = [parts[one] for one in wanted[getting == rank].tolist()]
        if token is not None and not ids.size and computed.unused:
            leaves = [[attach(x, [token]) for x in own] for own in leaves]
        outputs = [filled(template, own) for own in leaves]
        return Features(outputs, token, template)

    def _move(self, source: Any, dest: Any, name: str) -> ItemMove:
        parallel = self._parallel
        return ItemMove(source, dest, parallel.group, parallel.device, self._number, name)

    @property
    def _is_sharded(self) -> bool:
        """Whether ranks meet in every forward pass, as those of FSDP do."""
        return any(isinstance(module, FSDPModule) for module in self._inner.modules())


@dataclass(frozen=True, slots=True, eq=False)
class _Computed:
    """What a rank computed: tensors of each item, and rows on the wire of those of all ranks."""

    parts: dict[int, list[Tensor]]
    unused: list[Tensor]
    template: Any
    parcels: list[Parcel]
    rows: Sequence[Any]


@contextmanager
def _recording(is_needed: bool) -> Iterator[None]:
    """Gradients, where any rank needs them."""
    with torch.set_grad_enabled(is_needed and torch.is_grad_enabled()):
        yield
