"""The options of `bascule doctor`. Imports no torch, so that its help is instant."""

from dataclasses import dataclass
from pathlib import Path

from bascule.calibrate.options import check_ranks
from bascule.plan.checks import number, whole

_MOST_ROUNDS = 10_000
_MOST_MIB = 1024
_LONGEST_S = 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Check the ranks before a run: versions, devices, links, and who computes slowly.

    Starts local ranks; in a job, start it with torchrun. Exit status 0: nothing was found; 1:
    something was, or a rank failed; 2: a wrong option.

    Attributes:
        ranks: Local ranks to launch; as many as GPUs, else physical cores but two at least, if
            not given.
        profile: File of a hardware profile, or h100-datasheet, whose rates the ranks and the links
            must reach; they are compared with each other alone if not given.
        rounds: Measured rounds, one after the other; medians over them are told, and what is slow
            in three quarters of them is found.
        mib: Largest message, in MiB.
        tolerance: By how much a rank may be slower than the median rank, or than the profile; 0.1
            is 10 %.
        link_tolerance: By how much the bandwidth of a link may be below that of the median link,
            or below the profile's; 0.5 is half of it.
        timeout_s: Longest wait of a collective, in seconds.
        json: Where to write the report, as JSON; - for standard output, the tables then go to
            standard error.
    """

    ranks: int | None = None
    profile: str | None = None
    rounds: int = 7
    mib: int = 16
    tolerance: float = 0.1
    link_tolerance: float = 0.5
    timeout_s: float = 120.0
    json: Path | None = None

    def check(self, world_size: int | None = None) -> None:
        """Refuse values that are out of range, or do not fit the ranks.

        Args:
            world_size: Ranks of the job; None before there is one.

        Raises:
            ConfigError: Names the option, its value and its range.
        """
        check_ranks(self.ranks, world_size)
        whole("--rounds", self.rounds, 1, _MOST_ROUNDS)
        whole("--mib", self.mib, 1, _MOST_MIB)
        number("--tolerance", self.tolerance, 0.0, 100.0)
        number("--link-tolerance", self.link_tolerance, 0.0, 0.99)
        number("--timeout-s", self.timeout_s, 1.0, _LONGEST_S)

    @property
    def settings(self) -> dict[str, str]:
        """What must be the same on all ranks, so that they make the same calls."""
        names = ("rounds", "mib", "tolerance", "link_tolerance", "profile")
        return {f"--{name.replace('_', '-')}": str(getattr(self, name)) for name in names}
