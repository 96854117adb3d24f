"""Hard limits per rank."""

from dataclasses import dataclass, fields

from bascule.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rank can hold in one microbatch; None means unlimited.

    A bag of G ranks holds G times the tokens and bytes, since its ranks share a sequence evenly,
    but the same number of items: each of its ranks has a part of all of them.

    Args:
        tokens: Most tokens on a rank.
        items: Most sequences (or samples) on a rank.
        num_bytes: Most bytes on a rank; only for planners that are given the bytes of each item.

    Raises:
        ConfigError: A limit is not a positive integer.
    """

    tokens: int | None = None
    items: int | None = None
    num_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"Limits({field.name}={value!r}): a limit is a positive integer, or None"
                )
