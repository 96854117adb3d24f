"""What was encoded, and how a rank's loss leads its backward pass to the encoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bascule.arrays import Ints
from bascule.comm.clocks import Clock
from bascule.comm.exchange import has_gradient
from bascule.comm.items import Parcel, attached, joined, mapped
from bascule.errors import ConfigError


class Features(list[Any]):
    """What was encoded, in the order of the items that were given.

    Attributes:
        token: () What the backward pass of every rank must reach, or None without gradients.
        template: An output of the module on this rank, or None if no rank had an item.
    """

    def __init__(self, outputs: Sequence[Any], token: Tensor | None, template: Any) -> None:
        super().__init__(outputs)
        self.token, self.template = token, template

    @property
    def together(self) -> Any:
        """What the module gives for all items in one call; without rows where there are none.

        Raises:
            ConfigError: No rank has an item.
        """
        if self.template is None:
            raise ConfigError("no rank has an item to encode: give one on one rank at least")
        if not self:
            return self.attach(mapped(self.template, lambda leaf: leaf[:0]))
        return joined(self)

    def attach(self, output: Any) -> Any:
        """The same output; in its backward pass this rank takes part in that of the encoder.

        For what the backward pass begins with, as the loss, on every rank: one without items has
        no other way from its loss to the encoder, where the others wait for it.
        """
        return attach(output, [self.token])


def attach(output: Any, tokens: Sequence[Tensor | None]) -> Any:
    """The same output, in whose backward pass this rank takes part in those of the tokens."""

    def with_tokens(leaf: Tensor) -> Tensor:
        for token in tokens:
            if token is not None and token.requires_grad and has_gradient(leaf):
                leaf = attached(leaf, token)
        return leaf

    return mapped(output, with_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What a rank computed.

    Attributes:
        parts: Tensors of each item, by id.
        unused: What it computed besides, for the others' sake.
        template: An output.
        parcels: Of the items whose owner is another rank.
        rows: Of each rank, the rows of all of its features, and those of its parcels.
        clocks: Of its calls.
    """

    parts: dict[int, list[Tensor]]
    unused: list[Tensor]
    template: Any
    parcels: list[Parcel]
    rows: Sequence[Ints]
    clocks: list[Clock]
