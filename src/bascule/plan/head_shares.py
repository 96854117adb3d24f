"""Which attention heads each Ulysses rank computes, where all heads cost the same.

Heads of unequal cost, as those of block-sparse attention, are shared by `plan.sparse.heads`.
"""

from dataclasses import dataclass

from bascule.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeadShares:
    """How many heads each Ulysses rank attends with: key-value heads as even as possible.

    The first `num_more` ranks take `base + 1` key-value heads, the others `base`; each takes the
    query heads that belong to its key-value heads.
    """

    base: int
    num_more: int
    size: int

    @classmethod
    def split(cls, num_kv_heads: int, size: int) -> "HeadShares":
        """Share the heads of a layer among some ranks.

        Raises:
            ConfigError: A rank would get none.
        """
        if num_kv_heads < size:
            raise ConfigError(
                f"a bag of {size} ranks cannot share {num_kv_heads} key-value heads: Ulysses gives "
                f"every rank at least one, so use bags of at most {num_kv_heads} ranks"
            )
        return cls(num_kv_heads // size, num_kv_heads % size, size)

    @property
    def num_kv_heads(self) -> int:
        """Of all ranks."""
        return self.base * self.size + self.num_more

    def of(self, rank: int) -> int:
        """Key-value heads of one rank."""
        return self.base + (rank < self.num_more)

    def first(self, rank: int) -> int:
        """The first key-value head of one rank."""
        return self.base * rank + min(rank, self.num_more)
