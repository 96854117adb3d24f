"""BalancedEncoder: items go to the ranks that have time to encode them, and their features back."""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from bascule.arrays import Ints
from bascule.checks import choice, fields, number, of_type
from bascule.comm.agree import agree
from bascule.comm.failures import STOPS_RECOMPUTING, shared
from bascule.comm.groups import device_for, new_group, resolve
from bascule.comm.items import (
    ItemMove,
    Parcel,
    leaves_of,
    move_items,
    move_items_with_gradients,
    parcel,
    rebuilt,
    tied,
)
from bascule.comm.values import contents_of, values_digest
from bascule.encoders.items import (
    EncoderTable,
    Features,
    Item,
    Length,
    LocalItems,
    attach,
    called_with,
    prepare,
    table_of,
)
from bascule.encoders.plan import CallSettings, Encoding, ItemPlan, plan_items
from bascule.errors import ConfigError
from bascule.machine.cluster import Cluster
from bascule.machine.costs import Cost, describe_cost
from bascule.plan.limits import Limits
from bascule.plan.offer import Offer

_FIRST_CAPACITY = 128  # integers a rank that the first gather has room for
_PIECES_A_RANK = 4  # of a long item: as even as whole items of that size would be


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """Options of a BalancedEncoder, where the defaults do not fit.

    Attributes:
        table: The items of a call. Default: the one for the module's class.
        limits: Hard limits of a rank: tokens, items, and bytes of items.
        locality_tolerance: Share by which the slowest rank may exceed the best plan, so that fewer
            items move.
        cluster: Prices of computing and exchanging: items move only where that pays. Costs are in
            seconds, or those of a TransformerCost. Default: moving is free.
        device: Where the tensors are. Default: the mesh's, or the group's back end's.
        timeout_s: Longest wait of a collective.
        features_for: "owner": each rank gives its own items and gets their features. "all": every
            rank gives the same items, as in inference, and gets all features. "first": likewise,
            for the first rank alone. The last two have no gradients.
    """

    table: EncoderTable | None = None
    limits: Limits | None = None
    locality_tolerance: float = 0.02
    cluster: Cluster | None = None
    device: torch.device | str | None = None
    timeout_s: float = 600.0
    features_for: Literal["owner", "all", "first"] = "owner"

    @shared("EncoderOptions")  # ranks that go on to encode do not wait for this one
    def __post_init__(self) -> None:
        fields(
            self,
            table=(of_type, EncoderTable, "an EncoderTable"),
            limits=(of_type, Limits, "Limits(tokens=..), or None"),
            locality_tolerance=number,
            cluster=(of_type, Cluster, "a Cluster(num_nodes, ranks_per_node, ..), or None"),
            timeout_s=(number, 1e-3, 1e7),
            features_for=(choice, "owner", "all", "first"),
        )


_DEFAULT = EncoderOptions()


@dataclass(frozen=True, slots=True, eq=False)
class _Computed:
    """The features that a rank computed."""

    parts: dict[int, list[Tensor]]  # of each item, by id
    unused: list[Tensor]  # computed so that others do not wait
    template: Any  # an output of the module
    parcels: dict[int, Parcel]  # of the features that leave, by id


class BalancedEncoder:
    """An encoder whose items are encoded by the ranks that have time, in place of their owners.

    Features come back to the rank that gave the item, in its order; so do gradients, both ways. All
    ranks make it, and call it, at the same points. A rank without an item encodes the cheapest one
    once more, without counting it, so that ranks of FSDP and DDP always meet. Gradients of
    parameters are right after averaging over the ranks. None are recorded where neither the
    parameters nor the items of any rank require them.

    Attributes:
        last: Report of the last step, see `Encoding`; None if no rank had an item. Where installed,
            that of the last kind with items; `Installed.encodings` has those of all kinds.

    Args:
        module: Maps items to features; plain, in DistributedDataParallel, or sharded by FSDP2, with
            the same weights on all ranks. Its arguments and outputs hold items along the first dim;
            see `EncoderTable`.
        length_fn: Tokens of an item, at least 1, from its arguments by name; or tokens, and pairs
            of a query and a key in attention. Default: that of the table for the module's class.
        cost: Predicts the cost of an item by its tokens, and pairs, if there are any.
        mesh_or_group: A one-axis DeviceMesh, a process group, or None for the default group.

    Raises:
        ConfigError: An argument is wrong here. RemoteConfigError: on another rank.
        CommError: Ranks disagree, or one is gone.
    """

    @shared("construction of a BalancedEncoder")
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
        self.table, self.last = options.table or EncoderTable(), cast(Encoding | None, None)
        self._step, self._capacity = 0, _FIRST_CAPACITY
        self._inner = module.module if isinstance(module, DistributedDataParallel) else module
        group = resolve(mesh_or_group)
        ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
        self._host = new_group(ranks, "encoder", options.timeout_s, backend="gloo")
        self._group, error, settings = self._host, None, dict[str, str]()
        try:
            self.table = options.table or table_of(self._inner)
            self._length = length_fn or self._length_by_table()
            self._device = device_for(options.device, mesh_or_group, group)
            # Ranks of FSDP meet in every forward pass.
            self._is_sharded = any(isinstance(part, FSDPModule) for part in self._inner.modules())
            if options.cluster is not None:
                options.cluster.check_world(self._host.size)
            settings = self._settings()
        except Exception as failure:  # whatever it is, the others must not wait
            error = failure
        agree(self._host, settings, error, what="construction")
        if backend != "gloo":
            made = new_group(ranks, "features", options.timeout_s, backend=backend)
            self._group = replace(made, control=self._host)

    def __call__(self, items: Sequence[Item]) -> Features:
        """Encode items, each on the rank that has time; return the outputs in their order.

        An item is the arguments of the module for it alone, by name. See `Features.attach`. Two
        small gathers; two all-to-alls where an item moves.
        """
        return self.encode(items)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for these arguments, each item by the rank that has time.

        If a rank's loss depends on the output, every rank's must.
        """
        return self.call_after(None, args, kwargs).together

    def call_after(self, token: Tensor | None, args: Sequence[Any], kwargs: Item) -> Features:
        """Make a `call`, item by item, whose backward pass comes before that of the token."""
        items, error = list[Item](), None
        function = getattr(self._inner, self.table.method or "forward")
        try:
            items = self.table.cut(called_with(function, args, kwargs))
        except Exception as failure:  # whatever it is, the others must not wait
            error = failure
        return self.encode(items, token, error)

    def install(self, model: nn.Module) -> "Installed":
        """Use this encoder in every forward pass of a model that has the module, until `undo()`.

        The model is not edited: a stand-in is in the module's place while its parent computes.
        Ranks without images, or videos, take part. Shard or wrap the model before.
        """
        return Installed(self, model)

    @shared("a call of a balanced encoder")
    def encode(
        self,
        items: Sequence[Item],
        after: Tensor | None = None,
        error: Exception | None = None,
        *,
        call: str = "",
        inputs: Any = None,
        at_once: int = 0,
    ) -> Features:
        """Encode items; this backward pass comes before that of `after`.

        All ranks raise if one has an `error`, or if `call` differs. The items were made of
        `inputs`, by default they are these; `at_once` are at most in a call, 0: any number.
        """
        self._step += 1
        offer, settings, local = self._agree(items, error, call, inputs or items, at_once)
        self.last = None
        if not offer.lens.size:
            return Features([], after, None)
        plan, self.last = plan_items(
            *(offer, settings, self.cost),
            cluster=self.options.cluster,
            limits=self.options.limits,
            locality_tolerance=self.options.locality_tolerance,
        )
        records = settings.needs_gradient
        token = after if records else None
        with torch.set_grad_enabled(records and torch.is_grad_enabled()):
            if records and token is None:
                token = torch.zeros((), device=self._device, requires_grad=True)
            arrived, token = self._send(plan, local, token)
            computed, error = _Computed({}, [], None, {}), None
            try:
                computed = self._compute(plan, arrived)
            except Exception as failure:  # whatever it is, the others must not wait
                error = failure
            is_over = isinstance(error, STOPS_RECOMPUTING)  # for this rank; others may need more
            if error is not None and self._is_sharded and not is_over:
                raise error  # others may wait within the module, which the note of this rank ends
            sizes = np.array([one.num_bytes for one in computed.parcels.values()], np.int64)
            num_bytes = self._gather("encoding", {}, None if is_over else error, sizes)
            if error is not None:
                raise error
            features = self._return(plan, local, computed, num_bytes, token)
        if not records:
            features.token = after
        return features

    def _length_by_table(self) -> Callable[[Item], Length]:
        if self.table.length is None:
            raise ConfigError(
                f"no lengths are known for a {type(self._inner).__name__}: give length_fn, which "
                "says the tokens of an item"
            )
        return partial(self.table.length, self._inner)

    def _settings(self) -> dict[str, str]:
        """Return the settings that must be the same on all ranks when an encoder is made."""
        inner = self._inner
        names = ("limits", "cluster", "locality_tolerance", "features_for", "timeout_s")
        return {name: str(getattr(self.options, name)) for name in names} | {
            "module": f"{type(inner).__name__} with parameters {[*dict(inner.named_parameters())]}",
            "weights": values_digest(inner),
            "cost": describe_cost(self.cost),
            "device": self._device.type,
            "is sharded": str(self._is_sharded),
            "settings": self._module_settings,
        }

    @property
    def _module_settings(self) -> str:
        return "" if self.table.settings is None else self.table.settings(self._inner)

    def _agree(
        self, items: Sequence[Item], error: Exception | None, call: str, inputs: Any, at_once: int
    ) -> tuple[Offer, CallSettings, LocalItems]:
        """Gather the items of all ranks; or raise the same error on all of them."""
        local, flags, compared, size = LocalItems(), 0, dict[str, str](), self._host.size
        features_for, is_shared = self.options.features_for, self.options.features_for != "owner"
        most_pieces = _PIECES_A_RANK * size if size > 1 else 1
        if self.options.limits is not None:  # an item that is too long for a rank may fit in pieces
            most_pieces = sys.maxsize
        try:
            if error is not None:
                raise error
            records = torch.is_grad_enabled()
            trains = records and any(p.requires_grad for p in self._inner.parameters())
            local = prepare(
                *(items, self.table, self._length, self._device),
                most_pieces=most_pieces,
                travel=not is_shared,
            )
            tensors = [x for piece in local.pieces for x in piece.values() if isinstance(x, Tensor)]
            flags = (records and any(x.requires_grad for x in tensors)) + 2 * trains
            if is_shared and flags:
                raise ConfigError(
                    f"features_for={features_for!r} has no gradients: encode under "
                    "torch.no_grad(), or let each rank give its own items"
                )
            compared = {
                "call": call,
                "settings": self._module_settings,
                "gradients": f"enabled {records}, of parameters {trains}",
                "items": contents_of(leaves_of(inputs)) if is_shared else "",
            }
        except Exception as failure:  # whatever it is, the others must not wait
            error = failure
        values = np.array([flags, at_once, *local.offer.to_words()])
        gathered = self._gather("items", compared, error, values)
        self._capacity = max(self._capacity, *(words.size for words in gathered))
        settings = CallSettings(
            num_ranks=size,
            num_getting={"owner": 0, "all": size, "first": 1}[features_for],
            items_need_gradient=any(words[0] & 1 for words in gathered),
            needs_gradient=any(words[0] for words in gathered),
            at_once=min((int(words[1]) for words in gathered if words[1]), default=None),
            is_aligned=self._is_sharded,
        )
        words = gathered[:1] if is_shared else gathered
        return Offer.from_words([word[2:] for word in words]), settings, local

    def _gather(
        self, what: str, compared: dict[str, str], error: Exception | None, values: Ints
    ) -> list[Ints]:
        names = {"what": what, "step": self._step}
        return agree(self._host, compared, error, **names, values=values, capacity=self._capacity)

    def _send(
        self, plan: ItemPlan, local: LocalItems, token: Tensor | None
    ) -> tuple[dict[int, Item], Tensor | None]:
        """Return the items that this rank computes, by id, and the token of their gradients."""
        rank, first = self._group.rank, plan.first(self._group.rank)
        here = [one for one in plan.needed[rank].tolist() if plan.owner[one] in (rank, -1)]
        items = {one: local.pieces[one - first] for one in here}
        ids, source, dest = plan.brought
        if not ids.size:
            return items, token
        sent = (ids[source == rank] - first).tolist()
        move = ItemMove(source, dest, self._group, self._device, self._step, "items")
        parcels, num_bytes = [local.parcels[one] for one in sent], plan.offer.num_bytes[ids]
        if token is None or not plan.settings.items_need_gradient:
            arrived = move_items(move, parcels, num_bytes)
        else:
            leaving = [local.pieces[one] for one in sent]
            arrived, token = move_items_with_gradients(move, leaving, parcels, num_bytes, token)
        return items | dict(zip(ids[dest == rank].tolist(), arrived, strict=True)), token

    def _compute(self, plan: ItemPlan, items: dict[int, Item]) -> _Computed:
        function = getattr(self.module, self.table.method or "__call__")
        parts, unused, template = dict[int, list[Tensor]](), list[Tensor](), None
        for of in plan.passes[self._group.rank]:
            inputs = [items[one] for one in of.ids.tolist()]
            template = function(**self.table.join(inputs))
            outputs = self.table.parts(template, inputs)
            if of.is_dummy:
                unused += [x for output in outputs for x in output if x.requires_grad]
            else:
                parts |= dict(zip(of.ids.tolist(), outputs, strict=True))
        leaving = plan.leaving(self._group.rank).tolist()
        parcels = [parcel([x.detach() for x in parts[one]], self._device) for one in leaving]
        return _Computed(parts, unused, template, dict(zip(leaving, parcels, strict=True)))

    def _return(
        self,
        plan: ItemPlan,
        local: LocalItems,
        computed: _Computed,
        sizes: Sequence[Ints],
        token: Tensor | None,
    ) -> Features:
        """Send features, of `sizes` from each rank by id, and restore the order of the items."""
        rank, parts = self._group.rank, dict(computed.parts)
        if token is not None:
            token = tied(token, computed.unused)
        gets = plan.received(rank).tolist()
        stayed = [get for get in gets if get in parts]
        ids, source, dest = plan.returned
        if ids.size:
            num_bytes = np.zeros_like(plan.owner)
            for place, own_sizes in enumerate(sizes):
                num_bytes[plan.leaving(place)] = own_sizes
            sent = ids[source == rank].tolist()
            move = ItemMove(source, dest, self._group, self._device, self._step, "features")
            parcels = [computed.parcels[one] for one in sent]
            if token is None:
                arrived = move_items(move, parcels, num_bytes[ids])
            else:
                leaving = [parts[one] for one in sent]
                arrived, token = move_items_with_gradients(
                    move, leaving, parcels, num_bytes[ids], token
                )
            parts |= dict(zip(ids[dest == rank].tolist(), arrived, strict=True))
        if token is not None and (plan.brought[0].size or computed.unused):
            # Not views: who gets them may write into them.
            parts |= {one: [x.clone() for x in attach(parts[one], [token])] for one in stayed}
        leaves = local.whole([parts[get] for get in gets]) if gets else []
        outputs = [rebuilt(computed.template, iter(leaf)) for leaf in leaves]
        return Features(outputs, token, computed.template)


class Installed:
    """A balanced encoder in its place within a model; made by `BalancedEncoder.install`.

    The model calls its encoder once for each kind of items in its batch. Every rank takes part for
    every kind, in the same order, also for those that it does not have.
    """

    def __init__(self, encoder: "BalancedEncoder", model: nn.Module) -> None:
        self._encoder = encoder
        self._parent, self._name = _holder(model, encoder.module)
        self._kinds = encoder.table.sources
        self._left: list[bool] = []  # of the kinds that are left: True if the model calls for it
        self._tokens: list[Tensor | None] = [None]
        self.encodings: list[Encoding | None] = []  # of the last forward pass, by kind
        self._stand_in = _StandIn(encoder.module, self)
        self._hooks = [
            self._parent.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._parent.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    def undo(self) -> None:
        """Take the encoder out: the model calls its own again."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, parent: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        parameters = inspect.signature(parent.forward).parameters
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        self._left = [arguments.get(kind) is not None for kind in self._kinds]
        self._tokens, self.encodings = [None], []
        parent._modules[self._name] = self._stand_in
        self._take_part()

    @shared("the end of a forward pass with a balanced encoder")
    def _end(
        self, parent: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], output: Any
    ) -> Any:
        parent._modules[self._name] = self._encoder.module
        self._encoder.last = next(filter(None, reversed(self.encodings)), None)
        tokens = self._tokens
        self._tokens = [None]
        if output is not None and self._left:
            raise ConfigError(
                f"the model did not call its encoder for all of {self._kinds} that it was given: "
                "name the arguments with items in EncoderTable(sources=..)"
            )
        # The last one comes first in the backward pass, and the others after it.
        return None if output is None else attach(output, tokens[-1:])

    def _take_part(self) -> None:
        """Join calls of other ranks before this rank's next one, or after its last."""
        while self._left and not self._left[0]:
            self._left.pop(0)
            self._keep(self._encoder.encode([], self._tokens[-1]))

    def _keep(self, features: Features) -> None:
        self._tokens.append(features.token)
        self.encodings.append(self._encoder.last)

    @shared("a call of a balanced encoder")
    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the output that the model gets when it calls its encoder."""
        if not self._left:
            raise ConfigError(
                f"the model calls its encoder more often than it was given {self._kinds}: name "
                "the arguments with items in EncoderTable(sources=..)"
            )
        self._left.pop(0)
        features: Features = self._encoder.call_after(self._tokens[-1], args, kwargs)
        self._keep(features)
        self._take_part()
        return features.together


class _StandIn(nn.Module):
    """Stands in for the encoder: is called in its place, and has all else from it."""

    def __init__(self, module: nn.Module, installed: Installed) -> None:
        super().__init__()
        object.__setattr__(self, "_encoder", module)
        object.__setattr__(self, "_installed", installed)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._installed.call(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_encoder"], name)


def _holder(model: nn.Module, module: nn.Module) -> tuple[nn.Module, str]:
    """Find the part of the model that has the module, and the module's name there."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is module:
                return parent, name
    raise ConfigError(
        f"a {type(model).__name__} does not contain this {type(module).__name__}: install the "
        "encoder in the model whose encoder it was made with"
    )
