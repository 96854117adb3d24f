"""What the ranks measured, as frozen values; the same on all of them. Knows no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bascule.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What a rank says of itself.

    Attributes:
        host: Name of its machine.
        device: Name of what it computes on.
        memory_bytes: Memory of the device; of the host, if that is the device. None: not known.
        num_threads: Threads of torch on the host.
        python: Version.
        torch: Version.
        bascule: Version.
        numpy: Version.
        cuda: Version that torch was built for; "none" where it was not.
        nccl: Version; "none" without a GPU.
        backend: What carries the tensors of the default group.
        timeout_s: Longest wait of a collective of the default group; None: not known.
    """

    host: str
    device: str
    memory_bytes: int | None
    num_threads: int
    python: str
    torch: str
    bascule: str
    numpy: str
    cuda: str
    nccl: str
    backend: str
    timeout_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """Seconds of one call or piece of work.

    Attributes:
        name: What was timed.
        on: Where: "cpu" or "cuda".
        size: Bytes that a rank holds; 0 for work.
        amount: FLOPs of a rank, or bytes that it has to send.
        seconds: (rounds, ranks) of one call.
    """

    name: str
    on: str
    size: int
    amount: float
    seconds: Floats

    @property
    def of_slowest(self) -> float:
        """Seconds of the slowest rank of each round, in the median of the rounds."""
        return float(np.median(self.seconds.max(axis=1)))

    @property
    def of_ranks(self) -> Floats:
        """(ranks,) medians over the rounds."""
        return np.median(self.seconds, axis=0)

    @property
    def slowest_rank(self) -> int:
        """The rank with the largest median."""
        return int(self.of_ranks.argmax())

    @property
    def ratios(self) -> Floats:
        """(ranks,) seconds over those of the median rank of the round, medians over the rounds."""
        return np.median(to_median(self.seconds), axis=0)


@dataclass(frozen=True, slots=True, eq=False)
class LinkTiming:
    """Seconds in which two ranks exchange messages, both at once.

    Attributes:
        ends: The ranks.
        on: Where the messages are: "cpu" or "cuda".
        num_bytes: Of one message.
        seconds: (rounds,) of the slower end.
    """

    ends: tuple[int, int]
    on: str
    num_bytes: int
    seconds: Floats

    @property
    def median_s(self) -> float:
        """Over the rounds."""
        return float(np.median(self.seconds))

    @property
    def bytes_per_s(self) -> float:
        """In each direction."""
        return self.num_bytes / self.median_s


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Everything about a cluster that findings follow from.

    Attributes:
        facts: One a rank.
        store: Round trips to the store of the job.
        work: Fixed pieces of work.
        collectives: Calls of all ranks, sizes in ascending order.
        links: Ranks that are neighbours, sizes in ascending order.
    """

    facts: tuple[RankFacts, ...]
    store: Timing
    work: tuple[Timing, ...]
    collectives: tuple[Timing, ...]
    links: tuple[LinkTiming, ...]

    def is_near(self, ends: Sequence[int]) -> bool:
        """Return whether ranks are on one host."""
        return len({self.facts[rank].host for rank in ends}) == 1


def to_median(seconds: Floats) -> Floats:
    """(rounds, n) how many times as long each takes as the median one of its round.

    Of an even number the faster one of the two in the middle counts: otherwise one of two ranks
    would have to be 22 % slower to be 10 % above the median. What slows all down in one round
    cancels.
    """
    middle = (seconds.shape[1] - 1) // 2
    return seconds / np.sort(seconds, axis=1)[:, middle : middle + 1]
