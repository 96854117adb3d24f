"""BalancedEncoder: items go to the ranks that have time to encode them, and their features back."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from bascule.comm.agree import Statement, agree, agree_on
from bascule.comm.clocks import Clock, start_clock
from bascule.comm.groups import RankGroup
from bascule.comm.guard.failures import IS_ENOUGH, explained, told
from bascule.comm.items import (
    ROW_BYTES,
    ItemMove,
    Parcel,
    leaves_of,
    move_items,
    move_items_with_gradients,
    num_rows,
    parcel,
    tied,
)
from bascule.encoders.features import Computed, Features, attach
from bascule.encoders.item_offers import Describing, Offer
from bascule.encoders.item_prices import Prices
from bascule.encoders.items import (
    GETTING,
    SETTINGS,
    EncoderOptions,
    Item,
    Length,
    called_with,
    contents_of,
    filled,
    settings_of,
    table_of,
)
from bascule.encoders.own_speed import OwnSpeed, first_prices
from bascule.encoders.plan import Encoding, ItemPlan, Loaded, plan_items
from bascule.errors import ConfigError
from bascule.parallel import ParallelOptions, SequenceParallel
from bascule.plan.costs import Cost, describe_cost

if TYPE_CHECKING:
    from bascule.encoders.installed import Installed

_FIRST_CAPACITY = 128  # integers a rank that the first gather has room for
_DEFAULT = EncoderOptions()


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
        last: What the last step moved and saved; None if no rank had an item.

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
        self._parallel = SequenceParallel(
            *(mesh_or_group, "g1n1", cost),
            limits=options.limits,
            cluster=options.cluster,
            timeout_s=options.timeout_s,
            options=ParallelOptions(device=options.device),
        )
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self._inner: nn.Module = inner
        self.table = table_of(inner) if options.table is None else options.table
        num_ranks, has_limits = self._parallel.group.size, options.limits is not None
        self._describing = Describing(
            *(inner, self.table, length_fn, self._parallel.device),
            Describing.num_pieces_of(num_ranks, has_limits),
            options.features_for == "owner",
        )
        error: Exception | None = None
        settings: dict[str, str] = dict.fromkeys(SETTINGS, "")
        try:
            if length_fn is None and self.table.length is None:
                raise ConfigError(
                    f"no lengths are known for a {type(inner).__name__}: give length_fn, which "
                    "says the tokens of an item"
                )
            settings = settings_of(inner, self.table, options)
        except Exception as met:  # whatever it is, the others must not wait
            error = met
        agree_on(self._agreeing, settings, error, what="construction")
        self._speed = OwnSpeed(
            first_prices(options.cluster, self._parallel.group, self._parallel.device)
        )

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

    def hand_over(self) -> None:
        """Let another thread call it from here on, as behind training; all ranks alike."""
        self._parallel.group.calls.hand_over()

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
        at_once: int = 0,
    ) -> Features:
        """Calling with items, for who prepares them.

        Args:
            items: As for calling.
            after: The token before whose backward pass this one's comes.
            error: What this rank met while it prepared them; then all ranks raise.
            what: What all ranks must do alike besides.
            given: What the items were made of. Default: the items.
            at_once: Most items of a call; 0: any number.
        """
        self._number += 1
        loaded, offer = self._agree(items, error, what, given or items, at_once)
        self.last = None
        if not loaded.num_items:
            return Features([], after, None)
        prices = self._speed.prices(loaded)
        plan, self.last = plan_items(
            *(loaded, self.cost, prices),
            limits=self.options.limits,
            home_tolerance=self.options.home_tolerance,
            is_aligned=self._is_sharded,
        )
        with torch.set_grad_enabled(loaded.needs_gradient and torch.is_grad_enabled()):
            token = after if loaded.needs_gradient else None
            if loaded.needs_gradient and token is None:
                token = torch.zeros((), device=self._parallel.device, requires_grad=True)
            arrived, token = self._send(plan, offer, token)
            computed = self._compute(plan, arrived)
            self._learn(loaded, prices, computed)
            features = self._return(plan, offer, computed, token)
        if not loaded.needs_gradient:
            features.token = after
        return features

    def _agree(
        self, items: Sequence[Item], error: Exception | None, what: str, given: Any, at_once: int
    ) -> tuple[Loaded, Offer]:
        """What all ranks loaded; or the same error on all of them."""
        parallel, offer = self._parallel, Offer()
        own = np.zeros(3, np.int64)
        names = ("call", "cost", "settings", "gradients", "is sharded", "items")
        settings: dict[str, str] = dict.fromkeys(names, "")
        try:
            settings["call"], settings["cost"] = what, describe_cost(self.cost)
            settings["settings"] = self.table.settings(self._inner) if self.table.settings else ""
            records = torch.is_grad_enabled()
            trains = records and any(p.requires_grad for p in self._inner.parameters())
            settings["gradients"] = f"enabled {records}, of parameters {trains}"
            settings["is sharded"] = str(self._is_sharded)
            if error is None:
                offer = self._describing.offer(items)
                flags = (records and offer.wants_gradient) + 2 * trains
                if not self._describing.travel:
                    settings["items"] = contents_of(leaves_of(given))
                    if flags:
                        raise ConfigError(
                            f"features_for={self.options.features_for!r} has no gradients: encode "
                            "under torch.no_grad(), or let each rank give its own items"
                        )
                own = np.array([flags, self._speed.spent_ns(), at_once, *offer.numbers])
        except Exception as met:  # whatever it is, the others must not wait
            error = met
        said = agree(
            parallel._planning.group,
            Statement(settings, own, error),
            what="items",
            step=self._number,
            capacity=self._capacity,
        )
        self._capacity = max(self._capacity, *(part.size for part in said))
        num_getting = GETTING[self.options.features_for]
        num_getting = len(said) if num_getting is None else num_getting
        return Loaded.of(said, parallel.rank, num_getting), offer

    def _learn(self, loaded: Loaded, prices: Prices, computed: Computed) -> None:
        """What the calls took, and features take on the wire."""
        num_bytes = ROW_BYTES * sum(int(rows[0]) for rows in computed.rows)
        units = float(loaded.costs(self.cost, prices).sum())
        self._speed.keep(computed.clocks, loaded, units, num_bytes)

    def _send(
        self, plan: ItemPlan, offer: Offer, token: Tensor | None
    ) -> tuple[dict[int, Item], Tensor | None]:
        """The items that this rank computes, by id."""
        rank, loaded, (ids, dest) = self._parallel.rank, plan.loaded, plan.needed
        owner = loaded.owner[ids]
        stays = (owner == dest) | (owner < 0)
        held = {
            one: offer.items[one - loaded.first] for one in ids[stays & (dest == rank)].tolist()
        }
        if stays.all():
            return held, token
        ids, owner, dest = ids[~stays], owner[~stays], dest[~stays]
        move = self._move(owner, dest, "items")
        sent = (ids[owner == rank] - loaded.first).tolist()
        args = [offer.parcels[one] for one in sent], loaded.rows[ids]
        if token is not None and loaded.items_need_gradient:
            items = [offer.items[one] for one in sent]
            arrived, token = move_items_with_gradients(move, items, *args, token)
        else:
            arrived = move_items(move, *args)
        return held | dict(zip(ids[dest == rank].tolist(), arrived, strict=True)), token

    def _compute(self, plan: ItemPlan, arrived: dict[int, Item]) -> Computed:
        """What this rank computes, agreed to be without an error."""
        parts, unused, template, error = dict[int, list[Tensor]](), list[Tensor](), None, None
        parcels, clocks, rank = list[Parcel](), list[Clock](), self._parallel.rank
        rows, meets, device = np.zeros(1, np.int64), self._is_sharded, self._parallel.device
        ended: Exception | None = None
        try:
            for of in plan.passes[rank]:
                items = [arrived[one] for one in of.ids.tolist()]
                clock = start_clock(device)
                with explained(f"step {self._number}: encoding") if meets else nullcontext():
                    template = self._call_module(self.table.join(items))
                clock.stop()
                found = self.table.parts(template, items)
                if of.is_dummy:
                    unused += [x for own in found for x in own if x.requires_grad]
                else:
                    clocks.append(clock)
                    parts |= dict(zip(of.ids.tolist(), found, strict=True))
            sizes = [x.numel() * x.element_size() for own in parts.values() for x in own]
            ids, _ = plan.sent
            leaving = np.unique(ids[plan.rank_of[ids] == rank]).tolist()
            parcels = [parcel([x.detach() for x in parts[one]], device) for one in leaving]
            rows = np.array([sum(sizes) // ROW_BYTES, *map(num_rows, parcels)])
        except IS_ENOUGH as met:  # a recomputation, of which the others may need more
            ended = met
        except Exception as met:  # whatever it is, the others must not wait
            if meets:  # they may wait within the module, which being told of it ends
                raise
            error = met
        said = agree(
            self._agreeing,
            Statement({}, rows.astype(np.int64), error),
            what="encoding",
            step=self._number,
            capacity=self._capacity,
        )
        if ended is not None:
            raise ended
        return Computed(parts, unused, template, parcels, said, clocks)

    def _call_module(self, arguments: Item) -> Any:
        if self.table.method is None:
            return self.module(**arguments)
        return getattr(self.module, self.table.method)(**arguments)

    def _return(
        self, plan: ItemPlan, offer: Offer, computed: Computed, token: Tensor | None
    ) -> Features:
        loaded, rank, parts = plan.loaded, self._parallel.rank, dict(computed.parts)
        if token is not None:
            token = tied(token, computed.unused)
        wanted, getting = plan.wanted
        own = wanted[getting == rank].tolist()
        stayed = [one for one in own if one in parts]
        ids, dest = plan.sent
        if ids.size:
            source, rows = plan.rank_of[ids], np.zeros(loaded.num_items, np.int64)
            for place, said in enumerate(computed.rows):
                rows[np.unique(ids[source == place])] = said[1:]
            move = self._move(source, dest, "features")
            if token is None:
                arrived = move_items(move, computed.parcels, rows[ids], plan.starts(rows))
            else:
                sent = [parts[one] for one in ids[source == rank].tolist()]
                args = move, sent, computed.parcels, rows[ids]
                arrived, token = move_items_with_gradients(*args, token)
            parts |= dict(zip(ids[dest == rank].tolist(), arrived, strict=True))
        if token is not None and (plan.moves or computed.unused):
            # Not views: who gets them may write into them.
            parts |= {one: [x.clone() for x in attach(parts[one], [token])] for one in stayed}
        leaves = offer.whole([parts[one] for one in own]) if own else []
        outputs = [filled(computed.template, own) for own in leaves]
        return Features(outputs, token, computed.template)

    def _move(self, source: Any, dest: Any, name: str) -> ItemMove:
        parallel = self._parallel
        return ItemMove(source, dest, parallel.group, parallel.device, self._number, name)

    @property
    def _is_sharded(self) -> bool:
        """Whether ranks meet in every forward pass, as those of FSDP do."""
        return any(isinstance(module, FSDPModule) for module in self._inner.modules())
