"""BalancedModel: train an unmodified model of diffusers on samples of any shape, in balance."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from bascule.arrays import Ints, ranges
from bascule.batching import ForwardPass, forward_passes
from bascule.checks import whole
from bascule.comm.agree import agree, agree_on
from bascule.comm.failures import shared
from bascule.comm.items import ItemMove, Parcel, mapped, move_items, parcel
from bascule.comm.mesh import AttentionMesh, meshes_over
from bascule.diffusers.arguments import holds_tensors, parameters_of, required_of
from bascule.diffusers.degrees import Replica
from bascule.diffusers.parallelize import ParallelHandle
from bascule.diffusers.request import Request
from bascule.diffusers.split_model import SplitModel, Way
from bascule.diffusers.split_table import SplitTable
from bascule.diffusers.tables import table_of, unwrapped
from bascule.diffusers.verify import check_table
from bascule.encoders.items import batch_key
from bascule.errors import ConfigError
from bascule.machine.costs import TransformerCost
from bascule.parallel import SequenceParallel
from bascule.plan.plan import Plan
from bascule.step import Step

Sample = dict[str, Any]


def check_sample(sample: Sample, required: Collection[str], table: SplitTable) -> None:
    """Refuse a sample that lacks an argument of the model, or that is no batch of one."""
    missing = [name for name in required if name not in sample]
    if missing:
        raise ConfigError(f"has no {missing[0]!r}, which the model's forward needs: add it")
    for name in (key for key in sample if key not in table.unbatched):
        value, dim = sample[name], table.batch_dims.get(name, 0)
        _refuse_array(name, value)
        if isinstance(value, Tensor):
            if value.shape[dim : dim + 1] != (1,):
                raise ConfigError(
                    f"{name!r} has the shape {tuple(value.shape)}: give the model's shape for a "
                    f"batch of one, ({'.., ' * dim}1, ..)"
                )
        elif holds_tensors(value) and not (isinstance(value, list) and name in table.listed):
            raise ConfigError(
                f"{name!r} is a {type(value).__name__} of tensors whose batch dim is unknown: "
                "give tensors (1, ..), or name it in `unbatched` or `listed` of a split table"
            )
        elif isinstance(value, list) and len(value) != 1:
            raise ConfigError(
                f"{name!r} is a list of {len(value)}: give a list of one entry, for a batch of one"
            )


def form_of(sample: Sample, table: SplitTable, device: torch.device) -> int:
    """Return a number that is equal for samples that fit into one batch."""
    shapes = {
        name: mapped(x, lambda leaf: (str(leaf.dtype), *leaf.shape))
        for name, x in sorted(sample.items())
        if (isinstance(x, Tensor) or name in table.listed)
        and name not in (*table.unbatched, *table.alike)
    }
    # Other values must be equal: as many positions may belong to another aspect ratio.
    return batch_key(shapes, sample.keys() - shapes.keys(), sample, device)


def batch_of(samples: Sequence[Sample], table: SplitTable) -> Sample:
    """Return one batch of samples that have the same `form_of`."""
    batch = dict(samples[0])
    for name in (key for key in batch if key not in table.unbatched):
        values = [sample[name] for sample in samples]
        if isinstance(values[0], Tensor):
            batch[name] = torch.cat(values, table.batch_dims.get(name, 0))
        elif isinstance(values[0], list):
            batch[name] = [entry for value in values for entry in value]
    return batch


def samples_in(batch: Sample, table: SplitTable) -> list[Sample]:
    """Split a batch into its samples, the inverse of `batch_of`; tensors are views."""
    sizes: dict[str, int] = {}
    for name in (key for key in batch if key not in table.unbatched):
        value, dim = batch[name], table.batch_dims.get(name, 0)
        _refuse_array(name, value)
        if isinstance(value, Tensor) and value.dim() <= dim:
            raise ConfigError(
                f"{name!r} of a batch is a tensor without a batch: give (batch, ..), or a number"
            )
        if isinstance(value, Tensor | list):
            sizes[name] = len(value) if isinstance(value, list) else value.shape[dim]
    if len(set(sizes.values())) != 1:
        wrong = f"arguments of a batch have {dict(sorted(sizes.items()))} samples"
        raise ConfigError(f"{wrong}: give (batch, ..), or name them in a table's `unbatched`")
    (num_samples,) = set(sizes.values())

    def part(name: str, value: Any, place: int) -> Any:
        if isinstance(value, Tensor) and name in sizes:
            return value.narrow(table.batch_dims.get(name, 0), place, 1)
        return value[place : place + 1] if name in sizes else value

    return [{name: part(name, x, i) for name, x in batch.items()} for i in range(num_samples)]


def _refuse_array(name: str, value: Any) -> None:
    """Refuse an array of numpy, which would be passed on whole like a plain value."""
    if isinstance(value, np.ndarray):
        raise ConfigError(
            f"{name!r} is a numpy array of shape {value.shape}: give torch.from_numpy(..) of it"
        )


Loss = Callable[[Any, dict[str, Any]], Tensor]  # from output and batch to losses (batch, ..)

_FIRST_CAPACITY = 256  # integers of each rank for which the first gather has room
_HEADS = "num_attention_heads", "n_heads", "num_heads"  # names in configurations


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    length: int
    form: int
    weight: int
    parcel: Parcel


class BalancedModel:
    """Trains a diffusers model on samples of any shape, with balanced work on all ranks.

    Another rank computes a sample, or a bag of ranks that split it as `parallelize` does. Other
    calls of the model work as before. All ranks create it at the same point, for the same model.

    Attributes:
        handle: Has `undo()`, `checkpoint`, and, without DDP or FSDP, `average_gradients()`.

    Args:
        model: The transformer; plain, in DistributedDataParallel, or sharded by FSDP2.
        parallel: Sets ranks, bags and costs. If its TransformerCost has no number of heads, it gets
            the model's.
        length_fn: Returns the number of tokens of a sample that the model attends to, at least 1.
        weight_fn: Returns a sample's weight in the mean loss, a whole number. Default: 1.
        max_tokens: Most tokens in a forward pass of a rank; a longer sample gets its own pass.
            Default: all samples of a rank with the same shape share one pass.
        table: A split table, or a plan of diffusers. Default: see `parallelize`.

    Raises:
        ConfigError: No table fits the model, or an argument is wrong, on any rank.
        CommError: Arguments differ between ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        parallel: SequenceParallel,
        *,
        length_fn: Callable[[Sample], int],
        weight_fn: Callable[[Sample], int] | None = None,
        max_tokens: int | None = None,
        table: SplitTable | Mapping[str, Any] | None = None,
    ) -> None:
        self._parallel, self._max_tokens = parallel, max_tokens
        self._length_fn, self._weight_fn = length_fn, weight_fn or (lambda _: 1)
        self._capacity = _FIRST_CAPACITY
        self._meshes: dict[tuple[int, int, int], AttentionMesh] = {}
        self._step: Step | None = None
        self._wrapper = model if isinstance(model, DistributedDataParallel) else None
        group = parallel.group

        def request() -> Request:
            if max_tokens is not None:
                whole("max_tokens", max_tokens, 1)
            if parallel.data_group is not group:
                raise ConfigError("BalancedModel: give SequenceParallel all ranks of data_group")
            inner = unwrapped(model)
            return Request(models=[inner], tables=[table_of(inner, table)])

        made = agree_on(group, request, Request.settings, what="BalancedModel")
        (inner,), (self._table,) = made.models, made.tables
        everyone = group if group.size > 1 else None
        mesh = AttentionMesh(None, everyone, everyone)
        self.handle = ParallelHandle(Replica(everyone, None, mesh), everyone)
        self._split = SplitModel(inner, self._table, None, check=check_table)
        config = getattr(inner, "config", None)
        self._num_heads = next((n for name in _HEADS if (n := getattr(config, name, None))), None)
        if isinstance(parallel.cost, TransformerCost) and parallel.cost.num_heads is None:
            parallel.cost = replace(parallel.cost, num_heads=self._num_heads)
        self.handle.parts.append(self._split)

    @property
    def step(self) -> Step:
        """The last planned step; see its `metrics()`."""
        if self._step is None:
            raise ConfigError("no step is planned yet: call microbatches(..) first")
        return self._step

    def samples_of(self, **batch: Any) -> list[Sample]:
        """Split a batch of one shape into its samples, as views.

        A batch holds the arguments of the model and of the loss. Tensors (batch, ..) and lists with
        an entry for each sample are split; every sample gets all other values unchanged.
        """
        with self._failing_together():
            return samples_in(batch, self._table)

    @shared("samples of a training step")
    def microbatches(
        self, samples: Sequence[Sample], loss_fn: Loss
    ) -> list[Callable[[nn.Module], Tensor]]:
        """Return this rank's forward passes of an optimizer step, for `train_step`.

        Samples move to the ranks that compute them; samples of one shape share a forward pass.
        The mean of gradients over ranks (with `gradients="sum"`, their sum) is the gradient of the
        weighted mean of all samples' losses. The results of `train_step` average to that mean.
        Costs two small gathers and one all-to-all. If no rank has a sample, the list is empty.

        Args:
            samples: Samples that this rank loaded, or none. Each holds the model's arguments for a
                batch of one, and the loss's arguments, such as noise and timesteps.
            loss_fn: Computes from output and batch the loss of each sample, (batch,), or element,
                (batch, ..). Several outputs, such as video and audio, are a tuple. All ranks of a
                bag call it, so it must not draw random numbers.

        Raises:
            ConfigError: A sample is wrong; raised on all ranks.
            PlanError: No plan meets the limits; raised on all ranks.
        """
        parallel = self._parallel
        with self._failing_together():
            if not self._split.is_split:
                raise ConfigError("undo() was called: make another BalancedModel")
            measured = [self._measure(place, sample) for place, sample in enumerate(samples)]
        step = self._step = parallel.plan([sample.length for sample in measured])
        plan, topology = step.plan, step.plan.topology
        forms, num_bytes, weights = self._gather(step, measured)
        if not forms.size:
            return []
        bags = forward_passes(
            *(plan.bag_of, plan.seq_lens, forms, topology.bag_sizes),
            max_tokens=self._max_tokens,
            is_aligned=self._is_sharded,
        )
        arrived = self._exchange(step, bags, num_bytes, [sample.parcel for sample in measured])
        bag = int(topology.bag_of_rank[parallel.rank])
        divisor = parallel.group.size if parallel.gradients == "mean" else 1
        # All ranks of a bag compute the loss of its samples, and each adds an equal part of it.
        total = int(topology.bag_sizes[bag]) * max(1, int(weights.sum()))
        scales, mesh = weights * (divisor / total), self._mesh_of(plan, bag)
        return [
            partial(
                self._loss,
                [arrived[sample] for sample in forward_pass.ids.tolist()],
                scales[forward_pass.ids] * (not forward_pass.is_dummy),
                mesh,
                loss_fn,
            )
            for forward_pass in bags[bag]
        ]

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Raise an error of this rank on all ranks, instead of the next plan's gather."""
        try:
            yield
        except Exception as error:
            self._parallel.fail(error)
            raise

    def _measure(self, place: int, sample: Sample) -> _Measured:
        device = self._parallel.device
        try:
            check_sample(sample, required_of(self._split.model), self._table)
            length = whole("length_fn", self._length_fn(sample), 1)
            weight = whole("weight_fn", self._weight_fn(sample))
            form = form_of(sample, self._table, device)
            return _Measured(length, form, weight, parcel(sample, device))
        except Exception as error:
            is_ours = isinstance(error, ConfigError)
            text = str(error) if is_ours else repr(error)
            raise ConfigError(f"sample {place}: {text}") from None if is_ours else error

    def _gather(self, step: Step, measured: Sequence[_Measured]) -> tuple[Ints, Ints, Ints]:
        """Return (num_seqs,) form, bytes and weight of all ranks' samples; one gather."""
        group = self._parallel.group.control
        assert group is not None
        numbers = [(sample.form, sample.parcel.num_bytes, sample.weight) for sample in measured]
        settings = {"max_tokens": str(self._max_tokens), "is sharded": str(self._is_sharded)}
        values, names = np.array(numbers, np.int64), {"what": "samples", "step": step.number}
        parts = agree(group, settings, values=values.ravel(), capacity=self._capacity, **names)
        self._capacity = max(self._capacity, *(part.size for part in parts))
        forms, num_bytes, weights = np.concatenate(parts).reshape(-1, 3).T
        return forms, num_bytes, weights

    def _exchange(
        self,
        step: Step,
        bags: Sequence[Sequence[ForwardPass]],
        num_bytes: Ints,
        parcels: Sequence[Parcel],
    ) -> dict[int, Sample]:
        """Return the samples of this rank's bag, by global id; one all-to-all."""
        parallel, plan = self._parallel, step.plan
        needed = [np.unique(np.concatenate([part.ids for part in passes])) for passes in bags]
        bag_of = np.repeat(np.arange(len(needed)), [ids.size for ids in needed])
        sizes = plan.topology.bag_sizes[bag_of]
        ids = np.repeat(np.concatenate(needed), sizes)
        dest = ranges(plan.topology.first_ranks[bag_of], sizes)
        source = plan.source_ranks[ids]
        first = int(np.count_nonzero(plan.source_ranks < parallel.rank))
        sent = [parcels[sample - first] for sample in ids[source == parallel.rank].tolist()]
        move = ItemMove(source, dest, parallel.group, parallel.device, step.number, "samples")
        arrived = move_items(move, sent, num_bytes[ids])
        return dict(zip(ids[dest == parallel.rank].tolist(), arrived, strict=True))

    def _mesh_of(self, plan: Plan, bag: int) -> AttentionMesh | None:
        topology = plan.topology.for_heads(self._num_heads)
        first, size = int(topology.first_ranks[bag]), int(topology.bag_sizes[bag])
        ring = int(topology.ring_degrees[bag])
        if size == 1:
            return None
        if (first, size, ring) not in self._meshes:
            ranks = self._parallel.group.part(range(first, first + size), "attention")
            degrees = ring, size // ring
            meshes = meshes_over(AttentionMesh(None, ranks, ranks), [degrees])
            self._meshes[first, size, ring] = meshes[degrees]
        return self._meshes[first, size, ring]

    def _loss(
        self,
        samples: Sequence[Sample],
        scales: np.ndarray,
        mesh: AttentionMesh | None,
        loss_fn: Loss,
        model: nn.Module,
    ) -> Tensor:
        if self._wrapper is not None and model is not self._wrapper:
            wrong = f"train_step with a {type(model).__name__}"
            raise ConfigError(f"{wrong}: give it the BalancedModel's DistributedDataParallel")
        batch = batch_of(samples, self._table)
        names = parameters_of(self._split.model)
        with self._split.taking(None if mesh is None else Way(mesh, compares=False)):
            output = model(**{name: x for name, x in batch.items() if name in names})
        output = output.to_tuple() if hasattr(output, "to_tuple") else output
        is_one = isinstance(output, tuple) and len(output) == 1
        losses = loss_fn(output[0] if is_one else output, batch)
        if losses.shape[:1] != (len(samples),):
            wrong = f"loss_fn gave the shape {tuple(losses.shape)} for {len(samples)} samples"
            raise ConfigError(f"{wrong}: return losses ({len(samples)}, ..), without a mean")
        wide = losses.to(torch.promote_types(losses.dtype, torch.float32))
        wide = wide.reshape(len(samples), -1).mean(1)
        return (wide * torch.from_numpy(scales).to(wide)).sum()

    @property
    def _is_sharded(self) -> bool:
        return any(isinstance(module, FSDPModule) for module in self._split.model.modules())
