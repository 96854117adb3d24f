"""What commands that measure ranks ask of --ranks. Imports no torch."""

from bascule.errors import ConfigError
from bascule.plan.checks import MAX_RANKS, whole

_MOST_LOCAL_RANKS = 256


def check_ranks(ranks: int | None, world_size: int | None) -> None:
    """Refuse ranks that cannot be started, or are not those of the job.

    Args:
        ranks: Of --ranks.
        world_size: Ranks of the job; None before there is one.

    Raises:
        ConfigError: Names the option, its value and its range.
    """
    if ranks is not None:
        whole("--ranks", ranks, 1, _MOST_LOCAL_RANKS)
        if world_size not in (None, ranks):
            raise ConfigError(
                f"--ranks {ranks}: the launcher of this job started {world_size} ranks; leave "
                "--ranks out, it is for ranks that bascule starts"
            )
    if world_size is not None:
        whole("WORLD_SIZE", world_size, 1, MAX_RANKS)
