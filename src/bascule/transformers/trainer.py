"""Balanced data loading and packs for Hugging Face's Trainer, with one keyword argument.

Needs ``pip install bascule[transformers]``. Only extension points of the Trainer are overridden;
nothing of it is patched.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from bascule.data.cost_tracker import CostTracker
from bascule.data.loader import BalancedLoader
from bascule.data.packs import Pack
from bascule.errors import ConfigError
from bascule.plan.checks import of_type
from bascule.transformers.balance_config import BalanceConfig
from bascule.transformers.dataset_columns import Columns, unpacked_columns
from bascule.transformers.loader_progress import LoaderProgress
from bascule.transformers.pack_check import check_separates
from bascule.transformers.train_loader import (
    ASIDE,
    Aside,
    TrainLoader,
    inputs_of_pack,
)
from bascule.transformers.train_settings import (
    checked_dataset,
    counts_labels,
    fills_packs,
    local_loader,
    options_of,
    sync_of,
)

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class BalancedTrainerMixin(_Base):
    """Balances the training samples of a Trainer over its processes.

    Gives each optimiser step the same samples as without, in another order, and the same mean loss:

    * Where the Trainer divides by ``num_items_in_batch`` (models of transformers with labels), it
      counts labels over all processes, and the mean is exact wherever the samples are.
    * Elsewhere the loss is multiplied by `loss_scale`, which makes it the mean over all samples of
      the step, weighted by `LoaderOptions.weight_fn`.

    Samples are dealt by a `ResumableSampler` seeded by ``data_seed`` or ``seed``, lose the columns
    that the model does not take (as ``remove_unused_columns`` says), move, and are collated by
    ``data_collator``. A run that resumes from a checkpoint goes on with the next sample without
    reading those before, so ``ignore_data_skip`` is set. With one process and no packs, nothing
    changes, and ``balanced_loader`` is None. The longest wait for others is ``ddp_timeout``.

    Args:
        *args: As the Trainer takes them.
        balance: How to balance.
        **kwargs: As the Trainer takes them.

    Raises:
        ConfigError: When training starts: an argument of the Trainer does not go with balancing.

    Example:
        >>> class MyTrainer(BalancedTrainerMixin, Trainer): ...  # doctest: +SKIP
        >>> trainer = MyTrainer(..., balance=BalanceConfig(cost=cost))  # doctest: +SKIP
    """

    def __init__(self, *args: Any, balance: BalanceConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.balance = of_type("balance", balance, BalanceConfig, "BalanceConfig(cost=..)")
        self.balanced_loader: BalancedLoader | None = None
        self.cost_tracker: CostTracker | None = None
        self._aside: Aside | None = None
        is_default = type(self).packed_inputs is BalancedTrainerMixin.packed_inputs
        self._must_check_packs = self.balance.pack is not None and is_default
        self._scale_was_used = False
        self.add_callback(LoaderProgress())

    @property
    def loss_scale(self) -> float:
        """Factor of the mean loss of the microbatch in training; 1 in evaluation.

        For a `compute_loss` of one's own that does not call this class's.
        """
        self._scale_was_used = True
        return 1.0 if self._aside is None else self._aside.loss_scale

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This process's balanced batches. All processes call it.

        Raises:
            ConfigError: An argument of the Trainer does not go with balancing.
            CommError: The processes were given different settings.
        """
        if self.args.world_size == 1 and self.balance.pack is None:
            return super().get_train_dataloader()
        args, balance = self.args, self.balance
        dataset, options = checked_dataset(self, balance), options_of(self, balance)
        if args.remove_unused_columns:
            self._set_signature_columns_if_needed()
            names = frozenset(self._signature_columns or ())
            if options.unpack is None:
                dataset = Columns(dataset, names)
            else:
                options = replace(options, unpack=unpacked_columns(options.unpack, names))
        loader = local_loader(
            self, dataset, self._train_batch_size, is_grouped_anew=fills_packs(balance)
        )
        balanced = BalancedLoader(
            loader,
            cost=_tokens if balance.cost is None else balance.cost,
            length_fn=balance.length_fn,
            accumulate=args.gradient_accumulation_steps,
            sync=sync_of(self, balance),
            pack=balance.pack,
            options=options,
        )
        args.ignore_data_skip = True  # the loader does it, exactly and without reading
        self.balanced_loader = balanced
        if balance.learns:
            self.cost_tracker = CostTracker(balanced, timeout_s=float(args.ddp_timeout))
        return TrainLoader(  # pyright: ignore[reportReturnType]
            loader,
            balanced,
            self.cost_tracker,
            pack=cast(Pack | None, balance.pack),
            inputs_of=dict if balance.pack is None else self.packed_inputs,
            counts_labels=counts_labels(self),
        )

    def packed_inputs(self, packed: Mapping[str, Any]) -> dict[str, Any]:
        """What the model takes of a pack: here, what causal language models of transformers take.

        These find the samples of a pack in ``position_ids``, and attend within each; so do those
        that see images and videos (`positions_of_pack`). For another model, override it.

        Args:
            packed: Of `make_pack`. Padding alone has ``input_ids`` and ``labels``, and no other
                field of the samples.

        Raises:
            ConfigError: Tokens are masked, or nobody knows the positions of images.
        """
        return inputs_of_pack(packed, cast(Pack, self.balance.pack), self.model)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. Others hear of an error of this process when they ask for a batch.

        One that waits in a collective of the model ends when this process does.
        """
        try:
            return super().train(*args, **kwargs)
        except BaseException as error:
            # The error keeps the Trainer's loop alive, and in it the iteration.
            if self.balanced_loader is not None:
                self.balanced_loader.leave(error)
            raise

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """As the Trainer's.

        Raises:
            ConfigError: A `compute_loss` of one's own left out the scale of the loss, or the model
                mixes the samples of a pack.
        """
        if self._must_check_packs:
            self._must_check_packs = False
            check_separates(model, self.args.device)
        aside, self._scale_was_used = inputs.pop(ASIDE, None), False
        self._aside = aside
        if aside is not None:
            inputs |= aside.labels  # they were counted meanwhile
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
            is_mean = num_items_in_batch is None or self.loss_is_scaled_for_ga is False
            if aside is not None and is_mean and not self._scale_was_used:
                raise ConfigError(
                    f"{type(self).__name__}.compute_loss gives the mean of a microbatch, whose "
                    "samples balancing chose: multiply it by self.loss_scale, or call "
                    "super().compute_loss"
                )
        finally:
            self._aside = None
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """As the Trainer's, times `loss_scale` where the Trainer does not count labels."""
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if num_items_in_batch is None:
            loss = loss * self.loss_scale
        elif self._aside is not None and self._aside.labels:  # padding
            loss = loss * 0.0
        return (loss, outputs) if return_outputs else loss


def _tokens(seq_lens: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """What samples cost before anything is known: their tokens."""
    return np.asarray(seq_lens, dtype=np.float64)
