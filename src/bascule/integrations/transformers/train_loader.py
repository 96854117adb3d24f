"""The batches of a balanced loader as a Trainer takes them, and packs as a model takes them.

Legend of shapes: T tokens of a pack.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bascule.data.collators import VISUAL_FIELDS
from bascule.data.cost_tracker import CostTracker
from bascule.data.loader import BalancedLoader
from bascule.data.loader_batch import Batch
from bascule.data.packs import MADE, Pack, make_pack
from bascule.errors import ConfigError

SCALE = "bascule_loss_scale"
"""Travels among the inputs from the loader to `training_step`."""

_IGNORED = -100  # the Trainer counts labels that differ from it

Inputs = dict[str, Any]


class TrainLoader:
    """The batches of a balanced loader as a Trainer takes them.

    Args:
        loader: What it balances.
        balanced: The loader.
        tracker: Learns what its samples cost, if it is to.
        inputs_of: What the model takes of a microbatch.
        ignore_padding: Whether labels of padding are to be left out because they are counted.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        balanced: BalancedLoader,
        tracker: CostTracker | None,
        *,
        inputs_of: Callable[[Any], Inputs],
        ignore_padding: bool,
    ) -> None:
        self.dataset = loader.dataset
        self.balanced, self.tracker = balanced, tracker
        # Without a length, the Trainer counts epochs from 0 wherever a run goes on, and does not
        # know that a checkpoint was written where one ended.
        self._first_epoch, self._may_be_over = 0, False
        self._inputs_of, self._ignore_padding = inputs_of, ignore_padding

    def __len__(self) -> int:
        """Microbatches of a whole epoch; the same on all processes.

        Raises:
            TypeError: They are packs, of which nobody knows how many there will be.
        """
        return len(self.balanced)

    @property
    def num_microbatches(self) -> int | None:
        """Of a whole epoch; None if nobody knows."""
        try:
            return len(self)
        except TypeError:
            return None

    @property
    def num_epochs(self) -> float:
        """Epochs that were trained, with the share of this one.

        The share of its steps or, where nobody knows their number, of its samples.
        """
        progress, num_microbatches = self.balanced.state_dict(), self.num_microbatches
        if num_microbatches is not None:
            num_steps = num_microbatches // self.balanced.rules.accumulate
            return progress["epoch"] + progress["step"] / max(num_steps, 1)
        num_read = sum(map(sum, progress["history"])) + sum(progress["counts"])
        return progress["epoch"] + num_read / len(self.dataset)  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[Inputs]:
        may_be_over, self._may_be_over = self._may_be_over, False
        is_empty = True
        for inputs in self._epoch():
            is_empty = False
            yield inputs
        if is_empty and may_be_over:
            self._first_epoch += 1
            yield from self._epoch()

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was written.

        Args:
            progress: The loader's `state_dict` there.
        """
        self.balanced.load_state_dict(progress)
        if self.num_microbatches is None:
            self._first_epoch, self._may_be_over = progress["epoch"], True

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration; keeps what was resumed in it."""
        self.balanced.close()
        self.balanced.set_epoch(self._first_epoch + epoch)

    def _epoch(self) -> Iterator[Inputs]:
        for batch in self.balanced if self.tracker is None else self.tracker:
            yield self._inputs(batch)

    def _inputs(self, batch: Batch) -> Inputs:
        inputs = self._inputs_of(batch.data)
        if batch.is_padding and self._ignore_padding:
            for name in ("labels", "shift_labels"):
                if isinstance(inputs.get(name), Tensor):
                    inputs[name] = torch.full_like(inputs[name], _IGNORED)
        inputs[SCALE] = batch.loss_scale
        return inputs


def inputs_of_pack(packed: Mapping[str, Any], pack: Pack) -> Inputs:
    """What a causal language model of transformers takes of a pack.

    It finds the samples by their positions, but only without an attention mask and a cache: see
    `make_pack`.

    Args:
        packed: Of `make_pack`.
        pack: How it was made.

    Returns:
        Token fields as (1, T, ..), ``position_ids`` (1, T), and the others as they are.

    Raises:
        ConfigError: Tokens are masked, or their positions are not those of a text.
    """
    for name in VISUAL_FIELDS:
        if packed.get(name) is not None:
            raise ConfigError(
                f"a pack with {name}: the positions of images depend on the model; override "
                "packed_inputs of the Trainer to give them as position_ids"
            )
    mask = packed.get("attention_mask")
    if mask is not None:
        num_tokens = int(packed["cu_items"]["attention_mask"][-1])
        if not mask[:num_tokens].all():
            raise ConfigError(
                "attention_mask hides tokens of a sample in a pack: a pack has no padding inside; "
                "give samples without it"
            )
    inputs = {
        name: value[None] if name in pack.token_fields and isinstance(value, Tensor) else value
        for name, value in packed.items()
        if name not in MADE and name != "attention_mask"
    }
    return inputs | {"position_ids": packed["positions"][None], "use_cache": False}


def runnable(packed: Mapping[str, Any], pack: Pack, *, may_be_empty: bool) -> Mapping[str, Any]:
    """The pack; one token of padding in place of none, which models cannot compute.

    Args:
        packed: Of `make_pack`.
        pack: How it was made.
        may_be_empty: Whether processes may have no sample, as at the end of an epoch.

    Raises:
        ConfigError: It has no labels, as padding has: processes would count unlike things.
    """
    if may_be_empty and "labels" not in packed:
        raise ConfigError(
            "LoaderOptions(ends='finish') with samples without labels: a process without samples "
            "runs one token of padding, which has ignored labels; give labels, or ends='pad_empty'"
        )
    if packed["positions"].shape[0]:
        return packed
    return make_pack([], replace(pack, tokens=1, fixed=True))
