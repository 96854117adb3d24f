"""Bytes that a rank sends to others, counted from lengths and heads alone.

What a step reports, what an explanation predicts and what a simulation prices are all counted here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bascule.plan.head_shares import HeadShares


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank sends to other ranks, by what they are for.

    Attributes:
        routed: Rows of items, to where they are computed and back.
        heads: The exchanges of Ulysses.
        ring: Keys and values, passed on.
    """

    routed: int = 0
    heads: int = 0
    ring: int = 0

    @property
    def total(self) -> int:
        """All of them."""
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
        """What a rank sends in the forward of one attention.

        Ulysses: the heads of its tokens that are not its own, of q, k and v, and back the tokens
        that are not its own, of its heads. Ring: the keys and values that it passes on.

        Args:
            shares: Key-value heads of each Ulysses rank.
            rank: This one.
            tokens: Of each Ulysses rank.
            passed_tokens: Tokens whose keys and values it sends around the ring, over all rounds.
            queries: Query heads for each key-value head.
            row_bytes: Of one head of a token, in all rows of the batch.
        """
        own, home = shares.of(rank), tokens[rank]
        into = home * (shares.num_kv_heads - own) * (queries + 2)
        back = (sum(tokens) - home) * own * queries
        around = 2 * passed_tokens * own
        return cls(heads=(into + back) * row_bytes, ring=around * row_bytes)
