"""Lengths on which policies are compared, and what a policy's steps cost there."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from transformers.trainer_pt_utils import BatchRebalanceSampler

from bascule.machine.cluster import BagShape, Cluster, Seconds
from bascule.machine.costs import TransformerCost
from bascule.plan.solver.bounds import lower_bound
from bascule.plan.solver.problem import build_problem
from bascule.workload.codes import parse_data_codes, sample_lengths, seq_lens
from baselines.algorithms import Floats, Ints, Step

COST = TransformerCost(3072, gamma=0.426, num_layers=57)
NUM_BATCHES = 164
"""Whole global batches of an epoch; half of one, and three samples, are left over.

Enough for twenty steps of eight microbatches and one of what is left over.
"""
BATCH_SIZE = {"photos": 4, "data codes": 4, "text, images, videos": 8}
DATA = tuple(BATCH_SIZE)
LONG = "LongAlign"
GROUPED = {"longest on 2 ranks": 2, "longest on 8 ranks": 8}
"""Kinds in which groups of ranks share packs: the ranks that the longest sequence needs."""

GROUPED_BATCHES = 4
"""Global batches whose samples make one step of these."""

CODES = "g4b4i256f1s0,g1b4i512f1s0,g1b4i1024f1s0,g2b4i2048f1s0"
"""Shares of resolutions as in KnapFormer's "mixed", for 8 ranks of 4 samples each."""

PATCH, MAX_PHOTO_TOKENS, MAX_CAPTION = 16, 4096, 512
ASPECTS = (1.0, 4 / 3, 3 / 2, 16 / 9, 3 / 4, 2 / 3, 9 / 16)
BUCKET_RATIO = 1.25
"""Longest over shortest length of a bucket."""


def photos(num: int, rng: np.random.Generator) -> Ints:
    """Web photos in patches of 16 pixels, at most 4,096 of them, and captions in bytes."""
    pixels = rng.lognormal(math.log(0.6e6), 1.0, num)
    aspects = rng.choice(ASPECTS, num)
    width = np.maximum(np.sqrt(pixels * aspects), PATCH)
    height = np.maximum(pixels / width, PATCH)
    scale = np.minimum(np.sqrt(MAX_PHOTO_TOKENS * PATCH**2 / (width * height)), 1.0)
    tokens = np.floor(width * scale / PATCH) * np.floor(height * scale / PATCH)
    captions = rng.lognormal(math.log(90), 0.8, num).clip(0, MAX_CAPTION)
    return np.maximum(tokens, 1).astype(np.int64) + captions.astype(np.int64)


def mixture(num: int, rng: np.random.Generator) -> Ints:
    """45 % texts, 40 % images of 256 to 1,024 pixels, 15 % videos of 2 to 24 latent frames."""
    texts = rng.lognormal(math.log(600), 0.9, num).clip(16, 8192).astype(np.int64)
    side = rng.choice([16, 24, 32, 48, 64], num)
    prompt = rng.integers(0, 393, num)
    images = side * side + prompt
    videos = rng.integers(2, 25, num) * rng.choice([16, 24, 30], num) ** 2 + prompt
    kind = rng.random(num)
    return np.where(kind < 0.45, texts, np.where(kind < 0.85, images, videos)).astype(np.int64)


def long_texts(num: int, rng: np.random.Generator) -> Ints:
    """Texts as LongAlign mixes them, by its description: nine of ten short, a tail up to 64k.

    90 % lognormal with a median of 1,500 tokens and a sigma of 1.1; 10 % with a median of 16,000
    and a sigma of 0.7; cut to 32 to 65,536. Fewer than one in ten is longer than 8,192.
    """
    short, long = rng.lognormal(math.log(1500), 1.1, num), rng.lognormal(math.log(16000), 0.7, num)
    return np.where(rng.random(num) < 0.1, long, short).clip(32, 65536).astype(np.int64)


def coded(num_ranks: int, num_steps: int) -> Ints:
    """Steps of data codes one after the other, rank by rank."""
    codes = parse_data_codes(CODES)
    steps = [
        seq_lens(sample_lengths(codes, seed=0, step=step, world_size=num_ranks))
        for step in range(num_steps)
    ]
    return np.array(steps, dtype=np.int64).ravel()


@dataclass(frozen=True, eq=False)
class Case:
    """An epoch of lengths in the order of training, and the ranks.

    Attributes:
        data: Which of `DATA`, or `LONG`.
        num_ranks: Ranks.
        lens: Tokens of each sample; batches of `batch_size` a rank follow each other.
        batch_size: Samples that a rank loads for a step.
        cost: Of a sequence.
    """

    data: str
    num_ranks: int
    lens: Ints
    batch_size: int
    cost: TransformerCost = COST

    @classmethod
    def draw(cls, data: str, num_ranks: int, num_batches: int = NUM_BATCHES) -> "Case":
        """The same lengths in every run."""
        size = BATCH_SIZE.get(data, 8)
        full = num_ranks * size
        num = num_batches * full + full // 2 + 3
        rng = np.random.default_rng([(*DATA, LONG).index(data), num_ranks])
        if data == "data codes":
            lens = coded(num_ranks, num_batches + 1)[:num]
        else:
            lens = {"photos": photos, LONG: long_texts}.get(data, mixture)(num, rng)
        return cls(data, num_ranks, lens, size)

    @property
    def full(self) -> int:
        """Samples of a global batch."""
        return self.num_ranks * self.batch_size

    @cached_property
    def costs(self) -> Floats:
        """Of each sample on one rank."""
        return self.cost(self.lens)

    @cached_property
    def cluster(self) -> Cluster:
        """Nodes of 8 ranks at 55 % of an H100's peak; a step computes forward, twice, backward.

        Plans count forward passes, so wires are a third faster (see `Cluster.passes`).
        """
        peak, near, far = 0.55 * 989e12, 180e9 * 4 / 3, 25e9 * 4 / 3
        return Cluster(self.num_ranks // 8, 8, peak, 80e9, near, far, 10e-6)

    @cached_property
    def bucket_of(self) -> Ints:
        """A bucket for each sample: lengths within a ratio."""
        return (np.log(self.lens) / math.log(BUCKET_RATIO)).astype(np.int64)

    def batch(self, number: int) -> Ints:
        """Indices of a global batch."""
        return np.arange(number * self.full, (number + 1) * self.full)

    def most_tokens(self, degree: int) -> int:
        """Of a rank, so that `degree` ranks hold the longest sequence."""
        return -(-int(self.lens.max()) // degree)

    def home(self, samples: Ints) -> Ints:
        """The rank that loads each sample."""
        return samples % self.full // self.batch_size

    def seconds(self, length: int, size: int) -> float:
        """Of a sequence on each of the ranks that share it."""
        seconds = _bag_seconds(self, np.array([length]), size)
        return float(np.asarray(seconds.compute_s + seconds.heads_s)[0]) / size


class Rebalance(BatchRebalanceSampler):
    """transformers' sampler itself, with the cost of all policies in place of its own."""

    cost: TransformerCost = COST

    def _cost(self, bs: int, max_len: int) -> float:
        return bs * _cost_of(self.cost, max_len)

    def step(self, samples: list[int]) -> Step:
        """Its groups of a global batch: the samples, as long as `lengths` says, in their order."""
        by_rank = self._assign(samples, self.lengths)
        return [[rank[number] for rank in by_rank] for number in range(self.grad_accum)]


@cache
def _cost_of(cost: TransformerCost, length: int) -> float:
    return float(cost(length))


# --- what a step costs --------------------------------------------------------------------------


def makespan(case: Case, step: Step, *, padded: bool) -> float:
    """Ranks wait for each other in every microbatch; whole samples."""
    total = 0.0
    for ranks in step:
        samples, owners = _pairs(ranks)
        loads = np.bincount(owners, case.costs[samples], len(ranks))
        if padded:
            dearest = np.zeros(len(ranks))
            np.maximum.at(dearest, owners, case.costs[samples])
            loads = dearest * np.bincount(owners, minlength=len(ranks))
        total += float(loads.max())
    return total


def shared_makespan(case: Case, step: Step) -> float:
    """The same where several ranks may have the same sample: in seconds, wires included."""
    total = 0.0
    for ranks in step:
        samples, owners = _pairs(ranks)
        sizes = np.bincount(samples)[samples]
        seconds = np.zeros(samples.size)
        launches = np.zeros(len(ranks))
        for size in np.unique(sizes).tolist():
            chosen = sizes == size
            lens = case.lens[samples[chosen]]
            each = _bag_seconds(case, lens, size)
            seconds[chosen] = (each.compute_s + each.heads_s) / size
            np.maximum.at(launches, owners[chosen], each.launch_s)
        total += float((launches + np.bincount(owners, seconds, len(ranks))).max())
    return total


def _bag_seconds(case: Case, lens: Ints, size: int) -> Seconds:
    """Of (n,) sequences on an aligned bag, of all of its ranks together."""
    bag = BagShape.aligned(1, size, case.cluster.ranks_per_node)
    return case.cluster.sequence_seconds(case.cost, bag, lens)


def _pairs(ranks: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Each sample of a microbatch, with its rank; a shared one once a rank."""
    samples = np.concatenate([np.array(part, dtype=np.int64) for part in ranks])
    return samples, np.repeat(np.arange(len(ranks)), [len(part) for part in ranks])


def samples_of(step: Step) -> Ints:
    """The samples of a step; shared ones once a microbatch."""
    return np.concatenate([np.unique(_pairs(ranks)[0]) for ranks in step])


def bound(case: Case, samples: Ints) -> float:
    """No step with these samples, each whole on one rank, takes less."""
    return lower_bound(build_problem(case.costs[np.sort(samples)], np.ones(case.num_ranks)))


def shared_bound(case: Case, samples: Ints) -> float:
    """The same where ranks may share samples: even work without wires, or the longest sample."""
    compute = case.cluster.compute_seconds(case.cost, case.lens[samples])
    sizes = [2**k for k in range(case.num_ranks.bit_length())]
    longest = int(case.lens[samples].max())
    return max(float(compute.sum()) / case.num_ranks, min(case.seconds(longest, s) for s in sizes))


def grouped_bound(case: Case, samples: Ints, most_tokens: int) -> float:
    """The same where a rank holds so many tokens: each sample in its cheapest group that holds it.

    Groups have 2^k ranks, or all; wires count, launches do not.
    """
    lens, least = case.lens[samples], np.full(samples.size, np.inf)
    for size in (1 << k for k in range(case.num_ranks.bit_length())):
        each = _bag_seconds(case, lens, size)
        least = np.where(lens <= size * most_tokens, np.minimum(least, each.total), least)
    return float(least.sum()) / case.num_ranks


def padding(case: Case, step: Step) -> float:
    """Share of the tokens computed that are padding, where batches are padded."""
    batches = [case.lens[samples] for ranks in step for samples in ranks if samples]
    padded = sum(lens.size * int(lens.max()) for lens in batches)
    return 1.0 - sum(int(lens.sum()) for lens in batches) / padded


def moved(case: Case, step: Step) -> float:
    """Share of the tokens that leave the rank that loaded them."""
    total = away = 0.0
    for ranks in step:
        samples, owners = _pairs(ranks)
        part = case.lens[samples] / np.bincount(samples)[samples]
        total += part.sum()
        away += part[case.home(samples) != owners].sum()
    return away / total


# --- what a policy does to an epoch -------------------------------------------------------------


@dataclass(frozen=True)
class Epoch:
    """Shares of the samples of an epoch.

    Attributes:
        dropped: Never trained on.
        repeated: Trained on once more.
        reordered: In another step than in the order of the epoch.
    """

    dropped: float = 0.0
    repeated: float = 0.0
    reordered: float = 0.0


KEEPS_ALL = Epoch()


def epoch_of(case: Case, steps: Iterable[Step]) -> Epoch:
    """What all steps of an epoch do to its samples."""
    given = [samples_with_repeats(step) for step in steps]
    every = np.concatenate(given)
    number = np.repeat(np.arange(len(given)), [part.size for part in given])
    size, distinct = case.lens.size, np.unique(every).size
    return Epoch(
        dropped=1.0 - distinct / size,
        repeated=(every.size - distinct) / size,
        reordered=float(np.mean(every // case.full != number)),
    )


def samples_with_repeats(step: Step) -> Ints:
    """The samples of a step of whole samples, as often as they are in it."""
    return np.concatenate([_pairs(ranks)[0] for ranks in step])


@dataclass(frozen=True)
class Policy:
    """How steps are made.

    Attributes:
        name: For the table.
        kind: Policies of one kind are compared: they have the same freedom.
        step: Makes a global batch, given its number; samples are indices into the epoch.
        epoch: What it does to an epoch.
        is_ours: Whether it is bascule's.
        moves: Whether samples travel from the rank that loaded them; else ranks read what they
            compute.
    """

    name: str
    kind: str
    step: Callable[[int], Step]
    epoch: Epoch = KEEPS_ALL
    is_ours: bool = False
    moves: bool = False


@dataclass
class Row:
    """A policy on a case; medians over global batches, shares of samples or tokens.

    Attributes:
        over_bound: Makespan over what no division of the same samples can beat.
        useful: Work of the samples over what all ranks could have done in that time.
        plan_ms: To decide a step.
        over_free: Over the bound without a limit of tokens, where `over_bound` knows the limit.
        microbatches: Of a step.
    """

    data: str
    ranks: int
    kind: str
    policy: str
    is_ours: bool
    over_bound: float
    over_bound_worst: float
    useful: float
    plan_ms: float
    padding: float
    dropped: float
    repeated: float
    reordered: float
    moved: float
    first: bool = False
    over_free: float | None = None
    microbatches: float = 1.0

    @property
    def group(self) -> tuple[str, int, str]:
        """Rows of one group are compared."""
        return self.data, self.ranks, self.kind


def score(case: Case, policy: Policy, num_steps: int) -> Row:
    """Decide and price some steps."""
    degree = GROUPED.get(policy.kind)
    is_shared, is_padded = policy.kind == "bags" or degree, policy.kind.startswith("padded")
    ratios: list[float] = []
    free: list[float] = []
    counts: list[int] = []
    times: list[float] = []
    pads: list[float] = []
    away: list[float] = []
    work = spent = 0.0
    for number in range(num_steps):
        start = time.perf_counter()
        step = policy.step(number)
        times.append(time.perf_counter() - start)
        if is_shared:
            samples = samples_of(step)
            taken, least = shared_makespan(case, step), shared_bound(case, samples)
            if degree:
                free.append(taken / least)
                least = max(least, grouped_bound(case, samples, case.most_tokens(degree)))
            work += float(case.cluster.compute_seconds(case.cost, case.lens[samples]).sum())
        else:
            samples = samples_with_repeats(step)
            taken, least = makespan(case, step, padded=is_padded), bound(case, samples)
            work += float(case.costs[samples].sum())
        spent += taken * case.num_ranks
        ratios.append(taken / least)
        counts.append(len(step))
        pads.append(padding(case, step) if is_padded else 0.0)
        away.append(moved(case, step) if policy.moves else 0.0)
    return Row(
        data=case.data,
        ranks=case.num_ranks,
        kind=policy.kind,
        policy=policy.name,
        is_ours=policy.is_ours,
        over_bound=statistics.median(ratios),
        over_bound_worst=max(ratios),
        useful=work / spent,
        plan_ms=1e3 * statistics.median(times),
        padding=statistics.mean(pads),
        dropped=policy.epoch.dropped,
        repeated=policy.epoch.repeated,
        reordered=policy.epoch.reordered,
        moved=statistics.mean(away),
        over_free=statistics.median(free) if free else None,
        microbatches=statistics.median(counts),
    )
