"""BalancedModel: an unmodified model of diffusers, trained on samples of any shape in balance."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from bascule.arrays import Ints, ranges
from bascule.comm.agree import agree
from bascule.comm.failures import shared
from bascule.comm.items import ItemMove, Parcel, move_items, parcel
from bascule.comm.mesh import AttentionMesh, meshes_over
from bascule.diffusers.arguments import parameters_of, required_of
from bascule.diffusers.degrees import Replica
from bascule.diffusers.parallelize import ParallelHandle
from bascule.diffusers.request import Request, agree_on
from bascule.diffusers.samples import (
    Sample,
    batch_of,
    check_keywords,
    check_sample,
    form_of,
    samples_in,
)
from bascule.diffusers.split_model import SplitModel
from bascule.diffusers.split_table import SplitTable
from bascule.diffusers.tables import table_of
from bascule.errors import ConfigError
from bascule.parallel import SequenceParallel
from bascule.plan.batching import ForwardPass, forward_passes
from bascule.plan.checks import whole
from bascule.plan.plan import Plan
from bascule.step import Step

Loss = Callable[[Tensor, dict[str, Any]], Tensor]
"""Takes the model's output and the batch; gives (batch, ..), whose mean is the loss of a sample."""

_FIRST_CAPACITY = 256  # integers a rank that the first gather has room for
_NUM_NUMBERS = 3  # of a sample: form, bytes, weight


class BalancedModel:
    """A model of diffusers whose training samples change ranks, or are shared by a bag of ranks.

    The model is not edited: hooks that `parallelize` knows split the forward passes of bags of
    several ranks, and do nothing in those of one rank, and in all other calls of the model. All
    ranks make it at the same point, with the same model.

    Attributes:
        handle: `handle.undo()` takes the hooks away; `handle.checkpoint` is for
            `enable_gradient_checkpointing`; `handle.average_gradients()` for a model that neither
            DDP nor FSDP wraps.

    Args:
        model: The transformer; plain, in DistributedDataParallel, or sharded by FSDP2.
        parallel: The ranks, the bags and the costs.
        length_fn: Tokens of a sample, as the model attends to them; at least one.
        weight_fn: What a sample counts in the mean of the losses, a whole number. Default: 1.
        max_tokens: Most tokens of a forward pass on a rank; a longer sample goes alone. Default:
            all samples of a shape that a rank has go together.
        table: How the model is split: a table, or a plan of diffusers. Default: as for
            `parallelize`.

    Raises:
        ConfigError: No table fits the model, or something is wrong with an argument here.
        CommError: Ranks gave different things, or (RemoteConfigError) another rank a wrong one.
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
        self._parallel = parallel
        self._length_fn, self._weight_fn = length_fn, weight_fn or _one
        self._max_tokens = max_tokens
        self._capacity = _FIRST_CAPACITY
        self._meshes: dict[tuple[int, int, int], AttentionMesh] = {}
        self._step: Step | None = None
        self._wrapper = model if isinstance(model, DistributedDataParallel) else None
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        group = parallel.group

        def ask() -> Request:
            _check(parallel, max_tokens)
            return Request(models=[inner], tables=[table_of(inner, table)])

        self._table = agree_on(group.control, ask).tables[0]
        everyone = group if group.size > 1 else None
        mesh = AttentionMesh(None, everyone, everyone)
        self.handle = ParallelHandle(Replica(everyone, None, mesh))
        self._part = SplitModel(inner, self._table, self.handle.mesh)
        self._part.is_alone = True
        self.handle.parts.append(self._part)

    @property
    def step(self) -> Step:
        """The step that was planned last; see its `metrics()`.

        Raises:
            ConfigError: There was none.
        """
        if self._step is None:
            raise ConfigError("no step was planned yet: call microbatches(..) first")
        return self._step

    def samples_of(self, **batch: Any) -> list[Sample]:
        """The samples of a batch of one shape, for `microbatches`; views, nothing is copied.

        Args:
            batch: What the model is called with, and what the loss needs besides: tensors
                (batch, ..), lists of as many, other values as they are.

        Raises:
            RemoteConfigError: Keywords have unlike numbers of samples (on all ranks).
        """
        try:
            return samples_in(batch, self._table.unbatched)
        except Exception as error:  # the others wait for these samples
            self._parallel.fail(error)
            raise

    @shared("samples of a training step")
    def microbatches(
        self, samples: Sequence[Sample], loss_fn: Loss
    ) -> list[Callable[[nn.Module], Tensor]]:
        """The forward passes of this rank in an optimizer step, as `train_step` takes them.

        Samples go to the ranks that compute them; those of one shape go into one forward pass.
        Gradients are those of the weighted mean of the losses of all samples of all ranks, where
        they are averaged over the ranks (or summed, with `gradients="sum"`). The mean over the
        ranks of what `train_step` returns is that mean of the losses. Two small gathers and one
        all-to-all.

        Args:
            samples: Those that this rank loaded for the step; may be empty. Each is what the model
                takes for a batch of one, by keyword, with what the loss needs; noise and times
                among it, so that they travel with it. Tensors are on the host or on the device.
            loss_fn: The loss of each sample, (batch,), or of each of its elements, (batch, ..),
                from the model's output and the batch. All ranks of a bag compute it, alike: it must
                not draw random numbers.

        Raises:
            RemoteConfigError: A sample of a rank is wrong (on all ranks).
            CommError: Ranks have samples of unlike keywords, or one is gone.
            PlanError: The limits cannot be met (on all ranks).
            ConfigError: No rank has a sample (on all ranks).
        """
        parallel, measured = self._parallel, self._measured(samples)
        step = self._step = parallel.plan([one.length for one in measured])
        forms, num_bytes, weights = self._agree(step, samples, measured)
        plan = step.plan
        bags = forward_passes(
            *(plan.bag_of, plan.seq_lens, forms, plan.topology.bag_sizes),
            max_tokens=self._max_tokens,
            is_aligned=self._is_sharded,
        )
        arrived = self._exchange(step, bags, num_bytes, [one.parcel for one in measured])
        bag = int(step.plan.topology.bag_of_rank[parallel.rank])
        size = int(step.plan.topology.bag_sizes[bag])
        divisor = parallel.group.size if parallel.gradients == "mean" else 1
        # All ranks of a bag have the loss of its samples, and each counts a part of it.
        scales = weights * (divisor / (size * max(1, int(weights.sum()))))
        mesh, losses = self._mesh_of(step.plan, bag), list[Callable[[nn.Module], Tensor]]()
        for of in bags[bag]:
            own = [arrived[one] for one in of.ids.tolist()]
            counted = scales[of.ids] * (not of.is_dummy)
            losses.append(partial(self._loss, own, counted, mesh, loss_fn))
        return losses

    def _measured(self, samples: Sequence[Sample]) -> list["_Measured"]:
        """What the others must know of this rank's samples; or the same error on all ranks."""
        try:
            if not self._part.is_split:
                raise ConfigError("undo() was called: make another BalancedModel")
            measured = [self._measure(place, one) for place, one in enumerate(samples)]
            check_keywords(samples)
        except Exception as error:  # whatever it is, the others must not wait
            self._parallel.fail(error)
            raise
        return measured

    def _measure(self, place: int, sample: Sample) -> "_Measured":
        """What the others must know of a sample.

        Raises:
            ConfigError: Something is wrong with it; names its place.
        """
        unbatched, device = self._table.unbatched, self._parallel.device
        try:
            check_sample(sample, required_of(self._part.model), unbatched)
            length = whole("length_fn", self._length_fn(sample), 1)
            weight = whole("weight_fn", self._weight_fn(sample))
            form = form_of(sample, unbatched, device)
            return _Measured(length, form, weight, parcel(sample, device))
        except Exception as error:
            text = str(error) if isinstance(error, ConfigError) else repr(error)
            raise ConfigError(f"sample {place}: {text}") from error

    def _agree(
        self, step: Step, samples: Sequence[Sample], measured: Sequence["_Measured"]
    ) -> tuple[Ints, Ints, Ints]:
        """(num_seqs,) form, bytes and weight of the samples of all ranks; one gather."""
        group = self._parallel.group.control
        assert group is not None
        keywords = sorted(samples[0]) if samples else ["no samples"]
        digest = hashlib.blake2b(repr(keywords).encode(), digest_size=8).digest()
        numbers = [n for one in measured for n in (one.form, one.parcel.num_bytes, one.weight)]
        own = np.array([int.from_bytes(digest, "little", signed=True), *numbers], np.int64)
        settings = {"max_tokens": str(self._max_tokens), "is sharded": str(self._is_sharded)}
        what, number = "samples", step.number
        capacity = self._capacity
        said = agree(group, settings, what=what, step=number, values=own, capacity=capacity)
        self._capacity = max(self._capacity, *(part.size for part in said))
        loaded = [part for part in said if part.size > 1]
        if not loaded:
            raise ConfigError(f"step {number}: no rank has a sample: give one on one rank at least")
        if len({int(part[0]) for part in loaded}) > 1:
            agree(group, {"keywords of samples": ", ".join(keywords)}, what=what, step=number)
        forms, num_bytes, weights = np.concatenate(
            [part[1:].reshape(-1, _NUM_NUMBERS) for part in loaded]
        ).T
        return forms, num_bytes, weights

    def _exchange(
        self,
        step: Step,
        bags: Sequence[Sequence[ForwardPass]],
        num_bytes: Ints,
        parcels: Sequence[Parcel],
    ) -> dict[int, Sample]:
        """The samples of this rank's bag, by global id; one all-to-all."""
        parallel, plan = self._parallel, step.plan
        needed = [np.unique(np.concatenate([of.ids for of in passes])) for passes in bags]
        bag_of = np.repeat(np.arange(len(needed)), [ids.size for ids in needed])
        sizes = plan.topology.bag_sizes[bag_of]
        ids = np.repeat(np.concatenate(needed), sizes)
        dest = ranges(plan.topology.first_ranks[bag_of], sizes)
        source = plan.source_ranks[ids]
        first = int(np.count_nonzero(plan.source_ranks < parallel.rank))
        sent = [parcels[one - first] for one in ids[source == parallel.rank].tolist()]
        move = ItemMove(source, dest, parallel.group, parallel.device, step.number, "samples")
        arrived = move_items(move, sent, num_bytes[ids])
        return dict(zip(ids[dest == parallel.rank].tolist(), arrived, strict=True))

    def _mesh_of(self, plan: Plan, bag: int) -> AttentionMesh | None:
        """The ranks of a bag; None for one."""
        config = getattr(self._part.model, "config", None)
        num_heads = getattr(config, "num_attention_heads", None)
        topology = plan.topology if num_heads is None else plan.topology.for_heads(num_heads)
        first, size = int(topology.first_ranks[bag]), int(topology.bag_sizes[bag])
        ring = int(topology.ring_degrees[bag])
        if size == 1:
            return None
        if (first, size, ring) not in self._meshes:
            ranks = self._parallel.group.part(range(first, first + size), "attention")
            degrees = size // ring, ring
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
        """This rank's part of the loss, from one forward pass."""
        if self._wrapper is not None and model is not self._wrapper:
            raise ConfigError(
                f"train_step was given a {type(model).__name__}, whose gradients nobody averages: "
                "give it the DistributedDataParallel that the BalancedModel was made with"
            )
        batch = batch_of(samples, self._table.unbatched)
        names = parameters_of(self._part.model)
        with self._part.over(mesh):
            output = model(**{name: x for name, x in batch.items() if name in names})
        losses = loss_fn(output[0], batch)
        if losses.shape[:1] != (len(samples),):
            raise ConfigError(
                f"loss_fn gave the shape {tuple(losses.shape)} for {len(samples)} samples: give "
                f"the loss of each sample or element, ({len(samples)}, ..), before any mean"
            )
        wide = losses.to(torch.promote_types(losses.dtype, torch.float32))
        wide = wide.reshape(len(samples), -1).mean(1)
        return (wide * torch.from_numpy(scales).to(wide)).sum()

    @property
    def _is_sharded(self) -> bool:
        """Return whether ranks meet in every forward pass, as those of FSDP do."""
        return any(isinstance(module, FSDPModule) for module in self._part.model.modules())


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    """A sample as its rank brings it to a step."""

    length: int
    form: int
    weight: int
    parcel: Parcel


def _one(sample: Sample) -> int:
    del sample
    return 1


def _check(parallel: SequenceParallel, max_tokens: int | None) -> None:
    if max_tokens is not None:
        whole("max_tokens", max_tokens, 1)
    if parallel.data_group is not parallel.group:
        raise ConfigError(
            "BalancedModel with a data_group of more ranks, which may have unlike numbers of "
            "forward passes: give SequenceParallel all ranks whose gradients are averaged"
        )
