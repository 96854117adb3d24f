"""The batches of a balanced loader as a Trainer takes them, and packs as a model takes them.

Legend of shapes: T tokens of a pack.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bascule.data.collators import VISUAL_FIELDS
from bascule.data.cost_tracker import CostTracker
from bascule.data.loader import BalancedLoader
from bascule.data.packs import MADE, Pack, make_pack
from bascule.data.steps import Batch
from bascule.errors import ConfigError
from bascule.transformers.pack_positions import positions_of_pack

ASIDE = "bascule_aside"
"""Travels among the inputs from the loader to `training_step`."""

_log = logging.getLogger(__name__)

_IGNORED = -100  # the Trainer counts labels that differ from it

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Aside:
    """What `training_step` is told beside the inputs of a microbatch.

    Attributes:
        loss_scale: Factor of its mean loss.
        labels: Of padding, by name: the Trainer counts labels, and must find none there, but a mean
            over no label is no number.
    """

    loss_scale: float
    labels: Inputs


class TrainLoader:
    """The batches of a balanced loader as a Trainer takes them.

    Args:
        loader: What it balances.
        balanced: The loader.
        tracker: Learns what its samples cost, if it is to.
        pack: How each microbatch is packed, if it is.
        inputs_of: What the model takes of a microbatch.
        counts_labels: Whether the Trainer counts labels.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        balanced: BalancedLoader,
        tracker: CostTracker | None,
        *,
        pack: Pack | None,
        inputs_of: Callable[[Any], Inputs],
        counts_labels: bool,
    ) -> None:
        self.dataset = loader.dataset
        self.balanced, self.tracker = balanced, tracker
        # Without a length, the Trainer counts epochs from 0 wherever a run goes on, and does not
        # know that a checkpoint was written where one ended.
        self._first_epoch, self._may_be_over = 0, False
        self._pack, self._inputs_of, self._counts_labels = pack, inputs_of, counts_labels
        self._warned = False

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
        data, is_padding = batch.data, batch.is_padding
        if self._pack is not None:
            self._check_labels(data)
            if not data["positions"].shape[0]:
                data, is_padding = _padding_alone(self._pack), True
            elif not is_padding:
                self._warn_of_no_label(data, self._pack.ignore_index)
        inputs, labels = self._inputs_of(data), Inputs()
        if is_padding and self._counts_labels:
            for name in ("labels", "shift_labels"):
                if isinstance(inputs.get(name), Tensor):
                    labels[name] = inputs[name]
                    inputs[name] = torch.full_like(inputs[name], _IGNORED)
        inputs[ASIDE] = Aside(batch.loss_scale, labels)
        return inputs

    def _check_labels(self, packed: Mapping[str, Any]) -> None:
        if self.balanced.rules.ends == "finish" and "labels" not in packed:
            raise ConfigError(
                "LoaderOptions(ends='finish') with packs without labels: a process without samples "
                "runs padding that has labels, so processes would count unlike things; give "
                "labels, or ends='pad_empty'"
            )

    def _warn_of_no_label(self, packed: Mapping[str, Any], ignored: int) -> None:
        """Say it once: one pack may have none by chance, and a run of them learns nothing."""
        labels = packed.get("shift_labels")
        if labels is None or self._warned or bool((labels != ignored).any()):
            return
        self._warned = True
        _log.warning(
            "a pack of %d samples has no label to learn: all are %d, but for first tokens, which "
            "a causal model does not predict; such packs train at a loss of 0",
            packed["num_samples"],
            ignored,
        )


def inputs_of_pack(packed: Mapping[str, Any], pack: Pack, model: nn.Module | None = None) -> Inputs:
    """What a causal language model of transformers takes of a pack, or one that sees images.

    It finds the samples by their positions, but only without an attention mask and a cache: see
    `make_pack`.

    Args:
        packed: Of `make_pack`.
        pack: How it was made.
        model: What it is for, wrapped or not: needed for packs with images.

    Returns:
        Token fields as (1, T, ..), ``position_ids`` as `positions_of_pack` gives them, and the
        others as they are.

    Raises:
        ConfigError: Tokens are masked, or nobody knows the positions of images.
    """
    for name in VISUAL_FIELDS:
        if model is None and packed.get(name) is not None:
            raise ConfigError(
                f"a pack with {name}: the positions of images depend on the model; give the "
                "model, or override packed_inputs of the Trainer to give them as position_ids"
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
    places = packed["positions"][None] if model is None else positions_of_pack(packed, model)
    return inputs | {"position_ids": places, "use_cache": False}


def _padding_alone(pack: Pack) -> Inputs:
    """A pack in place of an empty one, which models cannot compute.

    Two tokens, since a causal model asks none for the first.
    """
    tokens = torch.full((2,), pack.pad_id)
    return make_pack(
        [{"input_ids": tokens, "labels": tokens}], dataclasses.replace(pack, tokens=2, fixed=False)
    )
