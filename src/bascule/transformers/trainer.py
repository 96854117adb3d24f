"""Balanced loading and packs for Hugging Face's Trainer, with one keyword argument."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from bascule.data.cost_tracker import CostTracker
from bascule.data.loader import BalancedLoader
from bascule.data.packs import Pack
from bascule.errors import ConfigError
from bascule.plan.checks import of_type
from bascule.transformers.packs import check_separates, inputs_of_pack
from bascule.transformers.settings import BalanceConfig, balanced_loader, counts_labels
from bascule.transformers.train_loader import ASIDE, Aside, LoaderProgress, TrainLoader

_Base = Trainer if TYPE_CHECKING else object


class BalancedTrainerMixin(_Base):
    """A Trainer whose training samples are balanced over its processes.

    Each optimiser step has the same samples as without, in another order, and the same mean loss:
    by ``num_items_in_batch``, or by `loss_scale`. A resumed run begins with the next sample.
    With one process and no packs nothing changes, and ``balanced_loader`` is None.

    Args:
        *args: Those of the Trainer.
        balance: Settings; training refuses those that do not go with the Trainer's arguments.
        **kwargs: Those of the Trainer.
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
        """Factor of the mean loss of a microbatch, for a `compute_loss` that replaces this one."""
        self._scale_was_used = True
        return 1.0 if self._aside is None else self._aside.loss_scale

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this process's balanced batches. All processes call it."""
        args, balance = self.args, self.balance
        if args.world_size == 1 and balance.pack is None:
            return super().get_train_dataloader()
        names = None
        if args.remove_unused_columns:
            self._set_signature_columns_if_needed()
            names = frozenset(self._signature_columns or ())
        self.balanced_loader = balanced = balanced_loader(self, balance, names)
        args.ignore_data_skip = True  # the loader resumes exactly, and without reading
        if balance.learns:
            self.cost_tracker = CostTracker(balanced, timeout_s=float(args.ddp_timeout))
        assert self.train_dataset is not None
        return TrainLoader(  # pyright: ignore[reportReturnType]
            self.train_dataset,
            balanced,
            self.cost_tracker,
            pack=cast(Pack | None, balance.pack),
            inputs_of=dict if balance.pack is None else self.packed_inputs,
            counts_labels=counts_labels(self),
        )

    def packed_inputs(self, packed: Mapping[str, Any]) -> dict[str, Any]:
        """Return a pack as the model takes it; override it for other models.

        Padding alone has ``input_ids`` and ``labels``, and no other field of the samples.
        """
        return inputs_of_pack(packed, cast(Pack, self.balance.pack), self.model)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; an error of this process reaches the others when they ask for a batch."""
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
        """Train on a microbatch; refuse a `compute_loss` that left out `loss_scale`."""
        if self._must_check_packs:
            self._must_check_packs = False
            check_separates(model, self.args.device)
        self._aside, self._scale_was_used = inputs.pop(ASIDE, None), False
        if self._aside is not None:
            inputs |= self._aside.labels  # the Trainer has counted labels by now
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
            is_mean = num_items_in_batch is None or self.loss_is_scaled_for_ga is False
            if self._aside is not None and is_mean and not self._scale_was_used:
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
        """Return the Trainer's loss, times `loss_scale` where it does not count labels."""
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if num_items_in_batch is None:
            loss = loss * self.loss_scale
        elif self._aside is not None and self._aside.labels:  # padding
            loss = loss * 0.0
        return (loss, outputs) if return_outputs else loss
