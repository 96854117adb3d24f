"""BalancedEncoder: ranks that have time encode items, and send the features to their owners."""

import inspect
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
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
from bascule.encoders.plan import CallSettings, Encoding, ItemPlan, Moves, plan_items
from bascule.errors import ConfigError
from bascule.machine.cluster import WITHOUT_RECOMPUTING, Cluster
from bascule.machine.costs import Cost, describe_cost
from bascule.plan.limits import Limits
from bascule.plan.offer import Offer

_NAME_SOURCES = "name the arguments that hold items in EncoderTable(sources=..)"
_NUM_TRIALS = 5
_RATIOS = 5  # measured exchanges whose median corrects the predicted price
_AGAIN = 100  # steps after which a corrected price is measured again
_FIRST_CAPACITY = 128  # integers of each rank for which the first gather has room


@dataclass(frozen=True, slots=True)
class EncoderOptions:
    """Options of a BalancedEncoder.

    Attributes:
        table: How a call is split into items. Default: the table for the module's class.
        limits: Hard limits of a rank: tokens, items, and bytes of items.
        locality_tolerance: Share by which the slowest rank may exceed the best plan, so that fewer
            items move.
        cluster: Prices computation and exchanges: items move only if that saves time. Measured
            exchanges correct the price. The cost must be in seconds, or a TransformerCost. Default:
            moving is free.
        device: Device of the tensors. Default: the mesh's, or the group's back end's.
        timeout_s: Longest wait of a collective.
        features_for: "owner": each rank gives its own items and gets their features. "all": every
            rank gives the same items, as in inference, and gets all features. "first": as "all",
            but only the first rank gets them. "all" and "first" have no gradients.
    """

    table: EncoderTable | None = None
    limits: Limits | None = None
    locality_tolerance: float = 0.02
    cluster: Cluster | None = None
    device: torch.device | str | None = None
    timeout_s: float = 600.0
    features_for: Literal["owner", "all", "first"] = "owner"

    @shared("EncoderOptions")  # its note ends the wait of ranks that go on to encode
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
    """The features that this rank computed."""

    features: dict[int, list[Tensor]]  # tensors of each item, by its id
    unused: list[Tensor]  # outputs of dummy calls, with gradients
    template: Any  # an output of the module
    parcels: dict[int, Parcel]  # features that leave this rank, by the item's id


class BalancedEncoder:
    """An encoder that encodes each item on a rank that has time, in place of the item's owner.

    The owner of an item, the rank that gave it, gets its features back, in the order of its items.
    Gradients return in the same way. All ranks construct and call it at the same points. A rank
    without an item encodes the cheapest item once more, without counting it, so that all ranks make
    the collectives of FSDP and DDP. Gradients of parameters are right after averaging over ranks.
    If no parameter and no item of any rank requires a gradient, none is recorded.

    Attributes:
        last: Report of the last step, see `Encoding`; None if no rank had an item. Of an installed
            encoder, the report of the last kind with items; see `Installed.encodings`.

    Args:
        module: Maps items to features; plain, in DistributedDataParallel, or sharded by FSDP2, with
            the same weights on all ranks. Its arguments and outputs hold items along the first dim;
            see `EncoderTable`.
        length_fn: Maps an item's arguments, by name, to its tokens, at least 1; or to (tokens, mean
            query-key pairs per layer). Default: `length` of the table for the module's class.
        cost: Predicts the cost of an item from its tokens, and from its pairs, if given.
        mesh_or_group: A one-axis DeviceMesh, a process group, or None for the default group.

    Raises:
        RemoteConfigError: An argument is wrong on a rank; all ranks raise it.
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
        self._inner = module.module if isinstance(module, DistributedDataParallel) else module
        self.table, self.last = options.table or table_of(self._inner), cast(Encoding | None, None)
        self._step, self._capacity = 0, _FIRST_CAPACITY
        group = resolve(mesh_or_group)
        ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
        self._host = new_group(ranks, "encoder", options.timeout_s, backend="gloo")
        self._group = self._host
        # Ranks of FSDP meet in every forward pass.
        self._is_sharded = any(isinstance(part, FSDPModule) for part in self._inner.modules())
        error, settings = None, dict[str, str]()
        try:
            if options.cluster is not None:
                options.cluster.check_world(self._host.size)
            self._length = length_fn or self._length_by_table()
            self._device = device_for(options.device, mesh_or_group, group)
            settings = self._settings()
        except Exception as failure:  # whatever it is, the others must not wait
            error = failure
        agree(self._host, settings, error, what="construction")
        if backend != "gloo":
            made = new_group(ranks, "features", options.timeout_s, backend=backend)
            self._group = replace(made, control=self._host)
        self._moving_s = 0.0 if options.cluster is None else self._time_moving()
        self._spent_ns, self._predicted_s = 0, 0.0  # by this rank in the last exchange
        self._ratios = deque[float](maxlen=_RATIOS)  # of measured over predicted exchanges

    def __call__(self, items: Sequence[Item]) -> Features:
        """Encode items, each on a rank that has time; return their outputs in the same order.

        An item holds the module's arguments for it alone, by name. Ranks without items attach their
        loss, see `Features.attach`. A small gather; another, and two all-to-alls, if items move.
        """
        return self.encode(items)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for these arguments; each item is encoded where there is time.

        If the loss of one rank depends on the output, the loss of every rank must.
        """
        return self.call_after(None, args, kwargs).together

    def call_after(self, token: Tensor | None, args: Sequence[Any], kwargs: Item) -> Features:
        """Encode a `call`'s items; their backward pass runs before the order token's."""
        items, error = list[Item](), None
        function = getattr(self._inner, self.table.method or "forward")
        try:
            items = self.table.cut(called_with(function, args, kwargs))
        except Exception as failure:  # whatever it is, the others must not wait
            error = failure
        return self.encode(items, token, error)

    def install(self, model: nn.Module) -> "Installed":
        """Use this encoder in every forward pass of a model that has the module, until `undo()`.

        A wrapper replaces the module only while the parent module computes. Ranks without images
        or videos take part, too. Shard the model, or wrap it in DDP, before this call.
        """
        return Installed(self, model)

    def work(self, items: Sequence[Item]) -> float:
        """Return the cost of items in a step; a third of it if no backward pass follows."""
        lengths = map(self._length, items)
        pairs = [length if isinstance(length, tuple) else (length,) for length in lengths]
        share = 1.0 if self._is_trained() else 1.0 / WITHOUT_RECOMPUTING.linear
        return share * sum(float(self.cost(*length)) for length in pairs)

    def _is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self._inner.parameters())

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
        """Encode items; their backward pass runs before the backward pass of the token `after`.

        All ranks raise if a rank has an `error`, or ranks differ in `call` or, with shared items,
        in `inputs` (default: the items). A call of the module has at most `at_once` items.
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
        if offer.lens.size == 1 and settings.num_getting == settings.num_ranks:
            item = local.pieces[0]  # that all ranks have: no exchange is faster than encoding it
            self.last = replace(self.last, num_moved=0)
            output = getattr(self.module, self.table.method or "__call__")(
                **self.table.join([item])
            )
            leaves = self.table.cut_output(output, [item])[0]
            return Features([rebuilt(output, iter(leaves))], after, output)
        records = settings.needs_gradient
        token = after if records else None
        self._predicted_s = self._spent_ns = 0
        if self.last.num_moved and self.options.cluster is not None:
            self._predicted_s = plan.forward_s(self.options.cluster)
        with torch.set_grad_enabled(records and torch.is_grad_enabled()):
            if records and token is None:
                token = torch.zeros((), device=self._device, requires_grad=True)
            began_ns = time.perf_counter_ns()
            arrived, token = self._send(plan, local, token)
            sent_ns = time.perf_counter_ns() - began_ns
            computed, error = _Computed({}, [], None, {}), None
            try:
                computed = self._compute(plan, arrived)
            except Exception as failure:  # whatever it is, the others must not wait
                error = failure
            began_ns = time.perf_counter_ns()
            is_over = isinstance(error, STOPS_RECOMPUTING)  # for this rank; others may need more
            num_bytes = list[Ints]()
            # Where nothing moves, ranks do not meet: this rank's note ends later waits, as it ends
            # waits of others within a sharded module. Ranks meet behind the tiles of an image.
            meet = plan.moves or plan.settings.at_once is not None
            if meet and (error is None or is_over or not self._is_sharded):
                sizes = np.array([sent.num_bytes for sent in computed.parcels.values()], np.int64)
                num_bytes = self._gather("encoding", {}, None if is_over else error, sizes)
            if error is not None:
                raise error
            features = self._return(plan, local, computed, num_bytes, token)
        self._spent_ns = sent_ns + time.perf_counter_ns() - began_ns
        if not records:
            features.token = after
        return features

    def _time_moving(self) -> float:
        """Return what moving takes besides bytes: seconds of the slowest rank, best of a few.

        It is rounded to a power of two, so that runs agree.
        """
        rank, size, item, best_s = self._group.rank, self._group.size, {"x": torch.zeros(1)}, np.inf
        source, dest = np.arange(size), (np.arange(size) + 1) % size
        for _ in range(_NUM_TRIALS):
            self._gather("moving", {}, None, np.zeros(0, np.int64))  # to begin together
            start = time.perf_counter()
            sent = {rank: parcel(item, self._device)}
            num_bytes = np.full(size, sent[rank].num_bytes)
            for what in ("items", "features"):
                self._move(what, (source, source, dest), num_bytes, sent, {}, None)
            self._gather("moving", {}, None, num_bytes)
            best_s = min(best_s, time.perf_counter() - start)
        every = self._gather("moving", {}, None, np.array([1e9 * best_s], np.int64))
        return 1e-9 * float(2.0 ** np.ceil(np.log2(np.max(every))))

    def _length_by_table(self) -> Callable[[Item], Length]:
        if self.table.length is None:
            raise ConfigError(f"no table knows item lengths of {type(self._inner)}: give length_fn")
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
        num_sharing = size
        if self.options.limits is not None:  # an item that is too long for a rank may fit in pieces
            num_sharing = sys.maxsize
        try:
            if error is not None:
                raise error
            records = torch.is_grad_enabled()
            trains = records and self._is_trained()
            local = prepare(
                *(items, self.table, self._length, self._device),
                num_sharing=num_sharing,
                travel=not is_shared,
            )
            tensors = [x for piece in local.pieces for x in piece.values() if isinstance(x, Tensor)]
            flags = (records and any(x.requires_grad for x in tensors)) + 2 * trains
            if is_shared and flags:
                fix = "encode under torch.no_grad(), or let each rank give its own items"
                raise ConfigError(f"features_for={features_for!r} has no gradients: {fix}")
            compared = {
                "call": call,
                "settings": self._module_settings,
                "gradients": f"enabled {records}, of parameters {trains}",
                "items": contents_of(leaves_of(inputs)) if is_shared else "",
            }
        except Exception as failure:  # whatever it is, the others must not wait
            error = failure
        values = np.array([flags, at_once, self._spent_ns, *local.offer.to_words()])
        gathered = self._gather("items", compared, error, values)
        if self._predicted_s:  # the rank that came last to the exchange waited least
            spent_s = 1e-9 * min(int(words[2]) for words in gathered)
            self._ratios.append(spent_s / self._predicted_s)
        elif len(self._ratios) == _RATIOS and self._step % _AGAIN == 0:
            self._ratios.popleft()
        self._capacity = max(self._capacity, *(words.size for words in gathered))
        settings = CallSettings(
            num_ranks=size,
            moving_s=self._moving_s,
            slower=max(1.0, median(self._ratios)) if len(self._ratios) == _RATIOS else 1.0,
            num_getting={"owner": 0, "all": size, "first": 1}[features_for],
            items_need_gradient=any(words[0] & 1 for words in gathered),
            needs_gradient=any(words[0] for words in gathered),
            at_once=min((int(words[1]) for words in gathered if words[1]), default=None),
            is_aligned=self._is_sharded,
        )
        words = gathered[:1] if is_shared else gathered
        return Offer.from_words([word[3:] for word in words]), settings, local

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
        parcels = dict(enumerate(local.parcels, first))
        pieces = dict(enumerate(local.pieces, first))
        here = [item for item in plan.needed[rank].tolist() if plan.owner[item] in (rank, -1)]
        before = token if plan.settings.items_need_gradient else None
        arrived, after = self._move(
            "items", plan.item_moves, plan.offer.num_bytes, parcels, pieces, before
        )
        return {item: pieces[item] for item in here} | arrived, token if after is None else after

    def _move(
        self,
        what: str,
        moves: Moves,
        num_bytes: Ints,
        parcels: Mapping[int, Parcel],
        values: Mapping[int, Any],
        token: Tensor | None,
    ) -> tuple[dict[int, Any], Tensor | None]:
        """Move values over the ranks; return what arrives here, by id, and the token after it.

        Without a token, no gradients travel back. All mappings, and `num_bytes`, are by item id.
        """
        ids, source, dest = moves
        if not ids.size:
            return {}, token
        move = ItemMove(source, dest, self._group, self._device, self._step, what)
        sent = ids[source == self._group.rank].tolist()
        leaving = [parcels[item] for item in sent]
        if token is None:
            arrived = move_items(move, leaving, num_bytes[ids])
        else:
            nests = [values[item] for item in sent]
            arrived, token = move_items_with_gradients(move, nests, leaving, num_bytes[ids], token)
        return dict(zip(ids[dest == self._group.rank].tolist(), arrived, strict=True)), token

    def _compute(self, plan: ItemPlan, items: dict[int, Item]) -> _Computed:
        function = getattr(self.module, self.table.method or "__call__")
        features, unused, template = dict[int, list[Tensor]](), list[Tensor](), None
        for forward_pass in plan.passes[self._group.rank]:
            ids = forward_pass.ids.tolist()
            inputs = [items[item] for item in ids]
            template = function(**self.table.join(inputs))
            outputs = self.table.cut_output(template, inputs)
            if forward_pass.is_dummy:
                unused += [x for output in outputs for x in output if x.requires_grad]
            else:
                features |= zip(ids, outputs, strict=True)
        leaving = plan.leaving(self._group.rank).tolist()
        parcels = [parcel([x.detach() for x in features[item]], self._device) for item in leaving]
        return _Computed(features, unused, template, dict(zip(leaving, parcels, strict=True)))

    def _return(
        self,
        plan: ItemPlan,
        local: LocalItems,
        computed: _Computed,
        sizes: Sequence[Ints],
        token: Tensor | None,
    ) -> Features:
        """Move features, of which `sizes` bytes leave each rank; restore the order of the items."""
        rank, features = self._group.rank, dict(computed.features)
        if token is not None:
            token = tied(token, computed.unused)
        wanted = plan.wanted(rank).tolist()
        stayed = [item for item in wanted if item in features]
        num_bytes = np.zeros_like(plan.owner)
        for sender, sent_bytes in enumerate(sizes):
            num_bytes[plan.leaving(sender)] = sent_bytes
        arrived, token = self._move(
            "features", plan.feature_moves, num_bytes, computed.parcels, features, token
        )
        features |= arrived
        if token is not None and (plan.item_moves[0].size or computed.unused):
            # Clones, as callers may write into features in place.
            for item in stayed:
                features[item] = [x.clone() for x in attach(features[item], [token])]
        leaves = local.join_pieces([features[item] for item in wanted]) if wanted else []
        outputs = [rebuilt(computed.template, iter(leaf)) for leaf in leaves]
        return Features(outputs, token, computed.template)


class Installed:
    """A balanced encoder within a model; made by `BalancedEncoder.install`.

    The model calls its encoder once for each kind of items in its batch, such as images and videos.
    Every rank takes part for every kind, in the same order, also if it has no such item.
    """

    def __init__(self, encoder: "BalancedEncoder", model: nn.Module) -> None:
        self._encoder = encoder
        self._parent, self._name = _holder(model, encoder.module)
        self._kinds = encoder.table.sources
        self._left: list[bool] = []  # for each kind still to come: whether this rank has items
        self._tokens: list[Tensor | None] = [None]
        self.encodings: list[Encoding | None] = []  # of the last forward pass, by kind
        self._stand_in = _StandIn(encoder.module, self)
        self._hooks = [
            self._parent.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._parent.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    def undo(self) -> None:
        """Let the model call its own encoder again."""
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
    def _end(self, parent: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        parent._modules[self._name] = self._encoder.module
        self._encoder.last = next(filter(None, reversed(self.encodings)), None)
        tokens = self._tokens
        self._tokens = [None]
        if output is not None and self._left:
            what = f"the model was given {self._kinds} but did not call its encoder for all of them"
            raise ConfigError(f"{what}: {_NAME_SOURCES}")
        # The last call's backward pass runs first, and leads to those of the calls before.
        return None if output is None else attach(output, tokens[-1:])

    def _take_part(self) -> None:
        """Join other ranks' calls for the next kinds of which this rank has no items."""
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
            what = f"the model calls its encoder more often than for its arguments {self._kinds}"
            raise ConfigError(f"{what}: {_NAME_SOURCES}")
        self._left.pop(0)
        features: Features = self._encoder.call_after(self._tokens[-1], args, kwargs)
        self._keep(features)
        self._take_part()
        return features.together


class _StandIn(nn.Module):
    """Stand-in for the encoder: calls go to the balanced encoder, attributes are the encoder's."""

    def __init__(self, module: nn.Module, installed: Installed) -> None:
        super().__init__()
        object.__setattr__(self, "_encoder", module)
        object.__setattr__(self, "_installed", installed)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._installed.call(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_encoder"], name)


def _holder(model: nn.Module, module: nn.Module) -> tuple[nn.Module, str]:
    """Find the parent of a module within a model, and the module's name there."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is module:
                return parent, name
    what = f"a {type(model).__name__} does not contain this {type(module).__name__}"
    raise ConfigError(f"{what}: install the encoder in the model whose encoder it was made with")
