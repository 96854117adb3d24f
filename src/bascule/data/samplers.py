"""Samplers for plain DataLoaders, which deal indices to ranks; nothing moves between ranks."""

import hashlib
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import Sampler

from bascule.arrays import Ints
from bascule.checks import MAX_LENGTH, amounts, choice, fields, ints, number, of_type, shown, whole
from bascule.errors import ConfigError, PlanError
from bascule.machine.costs import Cost, evaluate
from bascule.plan.epoch import Deal, DealRules, StepShape, deal_step, epoch_order
from bascule.plan.limits import Limits, in_tokens
from bascule.plan.plan import Sync

History = Sequence[Sequence[int]]
"""Number of samples delivered by each rank that loads, for each earlier run of an epoch."""


class ResumableSampler(Sampler[int]):
    """Sampler of a dataset, or of the samples that earlier runs left, for any number of ranks.

    The order of an epoch depends on seed and epoch alone; rank r of N takes every N-th index from
    the r-th on. Nothing is padded or dropped: `BalancedLoader` handles the end.
    """

    def __init__(
        self, num_samples: int, *, rank: int, num_ranks: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._num_samples = whole("ResumableSampler(num_samples", num_samples, 0)
        self._num_ranks = whole("ResumableSampler(num_ranks", num_ranks, 1)
        self._rank = whole("ResumableSampler(rank", rank, 0, self._num_ranks - 1)
        self._shuffle, self._seed = bool(shuffle), whole("ResumableSampler(seed", seed, 0)
        self._epoch = 0
        self._history: History = ()

    @property
    def deal(self) -> tuple[int, int, int, int, int]:
        """Rank, num_ranks, num_samples, shuffle and seed, which decide the deal."""
        return self._rank, self._num_ranks, self._num_samples, self._shuffle, self._seed

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order is dealt next."""
        self._epoch = whole("epoch", epoch)

    def resume(self, history: History) -> None:
        """Deal only the samples that these earlier runs of the epoch did not deliver."""
        delivered = sum(map(sum, history))
        if delivered > self._num_samples:
            raise too_many(delivered, self._num_samples)
        self._history = history

    def __len__(self) -> int:
        return len(range(self._rank, self._remaining().size, self._num_ranks))

    def __iter__(self) -> Iterator[int]:
        return iter(self._remaining()[self._rank :: self._num_ranks].tolist())

    def _remaining(self) -> Ints:
        """Return the indices of the epoch that no earlier run delivered, in order."""
        order = epoch_order(
            self._num_samples, shuffle=self._shuffle, seed=self._seed, epoch=self._epoch
        )
        for delivered in self._history:
            place = np.arange(order.size)
            counts = np.asarray(delivered, dtype=np.int64)
            order = order[place // counts.size >= counts[place % counts.size]]
        return order


def too_many(num_delivered: int, num_samples: int) -> ConfigError:
    """Return the error for a state with more samples than there are."""
    return ConfigError(
        f"{num_delivered} samples were delivered when the state was saved, but there are "
        f"{num_samples}: resume with the samples that the state was saved with"
    )


def accumulation_of_accelerate() -> int:
    """Return how many batches accelerate accumulates gradients over; 1 without accelerate."""
    module = sys.modules.get("accelerate.state")
    state = None if module is None else module.GradientState()
    return state.num_steps if state is not None and state.sync_with_dataloader else 1


_STATE = ("version", "epoch", "delivered", "num_samples", "lengths", "shuffle", "seed")
_VERSION = 2


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """Options of a BalancedSampler, where the defaults do not fit.

    Attributes:
        shuffle: True for a random order of an epoch.
        sync: When ranks wait for each other: in every "microbatch" (FSDP that reshards), or once a
            "step" (DDP under `no_sync`).
        limits: Hard limits of a batch. A step that cannot keep them is a PlanError on all ranks.
        even_counts: All batches of a full step have exactly `batch_size` samples. False: at least
            one, `batch_size` on average; work is more even, but every step needs `loss_scale`.
        padded: Batches are padded to their longest sample. Samples of similar lengths then share a
            batch; `even_counts=False` saves most.
        weights: Weight of each sample in the global mean, for `loss_scale`, such as its number of
            labels. None: 1.
        shards: The shard (file) of each sample. Samples of shard s stay on rank s % num_ranks where
            that costs the step nothing.
        tolerance: The search for a better deal of a step stops at this gap to the lower bound.
    """

    shuffle: bool = True
    sync: Sync = "microbatch"
    limits: Limits | None = None
    even_counts: bool = True
    padded: bool = False
    weights: npt.ArrayLike | None = None
    shards: npt.ArrayLike | None = None
    tolerance: float = 0.01

    def __post_init__(self) -> None:
        truth = (of_type, bool, "True or False")
        fields(
            self,
            shuffle=truth,
            sync=(choice, *get_args(Sync)),
            limits=(of_type, Limits, "Limits(tokens=..), or None"),
            even_counts=truth,
            padded=truth,
            tolerance=(number, 0.0, 1.0),
        )


DEFAULT_SAMPLING = SamplerOptions()


@dataclass(slots=True)
class _Run:
    """One pass over the rest of an epoch."""

    start: int  # samples of the epoch before this pass
    scales: "array[float]" = field(default_factory=lambda: array("d"))  # of each yielded batch


class BalancedSampler(Sampler[list[int]]):
    """Batch sampler whose batches give all ranks the same work in every step.

    Use it as `DataLoader(dataset, batch_sampler=sampler)`. An epoch is shuffled by seed and epoch,
    and cut into steps of batch_size * num_ranks * accumulate samples, which are dealt to ranks and
    microbatches by predicted cost. All ranks compute the same deal of a step; nothing is
    communicated.

    Every epoch has each sample once. All ranks have the same number of batches, a multiple of
    `accumulate`; none is empty. The last samples make a shorter step; if they are too few, they and
    the step before are split into two equal steps. If batches differ in size (short steps,
    `even_counts=False`), multiply the loss by `loss_scale`.

    Args:
        lengths: Tokens of each sample: integers from 0.
        cost: Predicts costs of samples from their tokens; called once, for all lengths.
        batch_size: Samples of a batch of a rank and microbatch; an average without `even_counts`.
        num_ranks: Data-parallel ranks. Default: all of an initialised torch.distributed, else 1.
        rank: This rank; give both num_ranks and rank, or neither.
        seed: Seed of the order.
        accumulate: Microbatches of an optimiser step. Default: an Accelerator's, else 1.

    Raises:
        ConfigError: There are fewer samples than batches in a step.

    Example:
        >>> from bascule import TransformerCost
        >>> lengths = [900, 100, 500, 400, 600, 200, 800, 300]
        >>> both = {"batch_size": 2, "num_ranks": 2, "seed": 3}
        >>> ranks = [BalancedSampler(lengths, TransformerCost(64), rank=r, **both) for r in (0, 1)]
        >>> sorted(index for sampler in ranks for batch in sampler for index in batch)
        [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        cost: Cost,
        *,
        batch_size: int,
        num_ranks: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        accumulate: int | None = None,
        options: SamplerOptions = DEFAULT_SAMPLING,
    ) -> None:
        of_type("BalancedSampler(options", options, SamplerOptions, "SamplerOptions(..)")
        num_ranks, rank = _place(num_ranks, rank)
        accumulate = accumulation_of_accelerate() if accumulate is None else accumulate
        self._shape = StepShape(batch_size, num_ranks, accumulate)
        self.batch_size, self.accumulate = self._shape.batch_size, self._shape.accumulate
        self._rank = whole("BalancedSampler(rank", rank, 0, self._shape.num_ranks - 1)
        self._seed = whole("BalancedSampler(seed", seed)
        self._lengths = ints("lengths", lengths, most=MAX_LENGTH)
        num = self._lengths.size
        if num < self._shape.num_cells:
            raise ConfigError(
                f"{num} lengths for {num_ranks} ranks with accumulate={accumulate}: give at least "
                f"{self._shape.num_cells}, one per batch of a step"
            )
        self._costs = amounts("costs of the samples", evaluate(cost, self._lengths))
        limits = in_tokens(options.limits, cost, None)
        _check_limits(limits, self._lengths, self._shape, options)
        self._options = options
        self._rules = DealRules(
            shape=self._shape,
            sync=options.sync,
            limits=limits,
            even_counts=options.even_counts,
            padded=options.padded,
            tolerance=options.tolerance,
        )
        self._weights, self._home = None, None
        if options.weights is not None:
            self._weights = amounts("SamplerOptions(weights)", options.weights)
            if self._weights.size != num:
                raise ConfigError(f"{self._weights.size} weights for {num} lengths: give {num}")
        if options.shards is not None:
            self._home = ints("SamplerOptions(shards)", options.shards, num) % num_ranks
        self._epoch, self._start = 0, 0
        self._run: _Run | None = None

    @property
    def sampler(self) -> "BalancedSampler":
        """Itself: trainers look for `set_epoch` at the sampler of a batch sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch; the epoch of a loaded state continues where the state ended."""
        epoch = whole("epoch", epoch)
        if epoch != self._epoch:
            self._epoch, self._start, self._run = epoch, 0, None

    def __len__(self) -> int:
        """Return the number of batches in the next iteration, the same on every rank."""
        left = self._lengths.size - self._start
        return self._shape.num_steps(left) * self._shape.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches of the rest of the epoch, anew after a `break`."""
        self._run = _Run(self._start)
        return self._batches(self._run)

    def deal(self, step: int) -> Deal:
        """Return the samples of all ranks in a step of the next iteration, in O(epoch)."""
        left = self._lengths.size - self._start
        step = whole("step", step, 0, self._shape.num_steps(left) - 1)
        first = self._start + self._shape.samples_in(left, step)
        size = self._shape.next_size(self._lengths.size - first)
        return self._deal(self._order()[first : first + size], step)

    def loss_scale(self, number: int) -> float:
        """Return the factor of the mean loss of a batch, by its number since the iteration began.

        It is weight of the batch * num_ranks * accumulate / weight of the step. If losses are also
        divided by `accumulate`, and gradients averaged over ranks, a step has the gradient of the
        mean loss of all its samples.
        """
        scales = array("d") if self._run is None else self._run.scales
        place = whole("number of the batch", number)
        if place >= len(scales):
            raise ConfigError(
                f"loss_scale({place}): {len(scales)} batches were handed out in this iteration; "
                "count them from 0, as enumerate(loader) does"
            )
        return scales[place]

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Return the progress of training, as counts; the same on all ranks.

        `num_batches` counts the batches that training finished in this iteration. Default: all
        that were yielded, which is right without workers. An unfinished step is dealt again.
        """
        delivered = self._start
        handed = 0 if self._run is None else len(self._run.scales)
        if num_batches is not None:
            handed = whole("num_batches", num_batches, 0, handed)
        if self._run is not None:
            left = self._lengths.size - self._run.start
            steps = handed // self._shape.accumulate
            delivered = self._run.start + self._shape.samples_in(left, steps)
        return {**self._identity(), "epoch": self._epoch, "delivered": delivered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after a state's last step; ranks, batch size and accumulation may differ."""
        of_type("the state of a BalancedSampler", state, Mapping, "what state_dict() gave")
        if sorted(map(str, state)) != sorted(_STATE):
            raise ConfigError(
                f"the state of a BalancedSampler has the entries {_STATE}, not "
                f"{shown(list(state))}: give what state_dict() gave"
            )
        for name, value in self._identity().items():
            if state[name] != value:
                raise ConfigError(
                    f"the state has {name}={shown(state[name])}, this sampler has {value}: samples "
                    "would be lost or repeated; use the dataset and settings of the state"
                )
        epoch = whole("epoch of the state", state["epoch"])
        delivered, num = whole("delivered of the state", state["delivered"]), self._lengths.size
        if delivered > num:
            raise too_many(delivered, num)
        if 0 < num - delivered < self._shape.num_cells:
            raise ConfigError(
                f"{num - delivered} samples of epoch {epoch} are left, too few for a step of "
                f"{self._shape.num_cells} batches: finish the epoch with fewer ranks, or skip the "
                f"rest: call set_epoch({epoch + 1}) instead of loading this state"
            )
        self._epoch, self._start, self._run = epoch, delivered, None

    def _identity(self) -> dict[str, Any]:
        """Return the values that decide the order of an epoch, lengths as a digest."""
        digest = hashlib.blake2b(self._lengths.tobytes(), digest_size=8).hexdigest()
        return {
            "version": _VERSION,
            "num_samples": self._lengths.size,
            "lengths": digest,
            "shuffle": self._options.shuffle,
            "seed": self._seed,
        }

    def _order(self) -> Ints:
        shuffle, seed = self._options.shuffle, self._seed
        return epoch_order(self._lengths.size, shuffle=shuffle, seed=seed, epoch=self._epoch)

    def _batches(self, run: _Run) -> Iterator[list[int]]:
        order, shape = self._order(), self._shape
        first = run.start
        for step, size in enumerate(shape.sizes(order.size - first)):
            deal = self._deal(order[first : first + size], step)
            total = self._weight(deal.samples)
            for microbatch in range(shape.accumulate):
                batch = deal.batch(self._rank, microbatch)
                share = self._weight(batch) * shape.num_cells / total if total else 0.0
                run.scales.append(share)
                yield batch.tolist()
            first += size
        if self._run is run:
            self._start = 0  # the next iteration is a whole epoch

    def _weight(self, samples: Ints) -> float:
        return float(samples.size if self._weights is None else self._weights[samples].sum())

    def _deal(self, samples: Ints, step: int) -> Deal:
        home = None if self._home is None else self._home[samples]
        try:
            deal = deal_step(self._costs[samples], self._lengths[samples], self._rules, home)
        except PlanError as error:
            raise PlanError(f"epoch {self._epoch}, step {step} from resume: {error}") from None
        samples.flags.writeable = False
        return replace(deal, samples=samples)


def _place(num_ranks: int | None, rank: int | None) -> tuple[int, int]:
    """Return the number of ranks, and this rank."""
    if (num_ranks is None) != (rank is None):
        raise ConfigError(
            f"BalancedSampler(num_ranks={shown(num_ranks)}, rank={shown(rank)}): give both, or "
            "neither to take them from torch.distributed"
        )
    if num_ranks is not None and rank is not None:
        return num_ranks, rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def _check_limits(
    limits: Limits | None, lengths: Ints, shape: StepShape, options: SamplerOptions
) -> None:
    """Refuse limits that a sample, or an even number of samples, would exceed in mid-epoch."""
    if limits is None:
        return
    longest, tokens, items = int(lengths.argmax()), limits.common("tokens"), limits.common("items")
    if tokens is not None and lengths[longest] > tokens:
        raise ConfigError(
            f"sample {longest} has {lengths[longest]} tokens, above the limit of {tokens}: "
            "leave it out, shorten it, or raise the limit"
        )
    most = shape.most_in_a_cell(lengths.size)
    if items is not None and items < most:
        raise ConfigError(
            f"Limits(items={items}): batches of batch_size={shape.batch_size} have up to {most} "
            "samples: raise the limit, or make batch_size smaller"
        )
