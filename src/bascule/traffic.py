"""Count the bytes that a rank sends to others, from lengths and heads alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from bascule.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeadShares:
    """How many key-value heads each Ulysses rank has, as evenly as possible."""

    base: int  # key-value heads that every rank has
    num_more: int  # first ranks, each with one more
    size: int  # ranks

    @classmethod
    def split(cls, num_kv_heads: int, size: int) -> "HeadShares":
        """Split the key-value heads of a layer over ranks; each rank must get one."""
        if num_kv_heads < size:
            wrong = f"a bag of {size} ranks cannot share {num_kv_heads} key-value heads"
            raise ConfigError(f"{wrong}, one per rank: use bags of at most {num_kv_heads} ranks")
        return cls(num_kv_heads // size, num_kv_heads % size, size)

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of all ranks."""
        return self.base * self.size + self.num_more

    def of(self, rank: int) -> int:
        """Return the number of key-value heads of a rank."""
        return self.base + (rank < self.num_more)

    def first(self, rank: int) -> int:
        """Return the first key-value head of a rank."""
        return self.base * rank + min(rank, self.num_more)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank sends to other ranks, by purpose."""

    routed: int = 0  # rows of items, to where they are computed and back
    heads: int = 0  # the exchanges of Ulysses, and of other layers that share heads
    ring: int = 0  # keys and values, passed on

    @property
    def total(self) -> int:
        """Bytes for all purposes."""
        return self.routed + self.heads + self.ring

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.routed + other.routed, self.heads + other.heads, self.ring + other.ring)

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(self.routed * times, self.heads * times, self.ring * times)

    @classmethod
    def of_attention(
        cls,
        shares: HeadShares,
        rank: int,
        tokens: Sequence[int],
        passed_tokens: int,
        *,
        queries: int,
        row_bytes: int,
    ) -> "Traffic":
        """Count the bytes that a rank sends in the forward pass of one attention.

        `tokens` gives the number of tokens of each Ulysses rank. Over all rounds, the rank passes
        keys and values of `passed_tokens` around the ring. A key-value head serves `queries` query
        heads; one head of one token has `row_bytes`.
        """
        local, home = shares.of(rank), tokens[rank]
        into = home * (shares.num_kv_heads - local) * (queries + 2)
        back = (sum(tokens) - home) * local * queries
        around = 2 * passed_tokens * local
        return cls(heads=(into + back) * row_bytes, ring=around * row_bytes)
