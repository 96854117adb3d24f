"""A trainer for ms-swift, which loads this file by ``--external_plugins``."""

# pyright: reportMissingImports=false

from typing import Any

from accelerate.data_loader import SeedableRandomSampler, SkipBatchSampler
from swift.dataloader import DataLoaderShard
from swift.trainers import Seq2SeqTrainer
from swift.trainers.trainer_factory import TrainerFactory
from torch.utils.data import BatchSampler, SequentialSampler

from bascule.errors import ConfigError
from bascule.plugins.dealt_batches import DealtBatches
from bascule.plugins.gain_log import GainLog
from bascule.plugins.hf_trainer import cost_of, rules_of

_SETTINGS = (
    *("device", "collate_fn", "num_workers", "pin_memory", "persistent_workers"),
    *("prefetch_factor", "multiprocessing_context", "worker_init_fn"),
)


class BalancedSeq2SeqTrainer(Seq2SeqTrainer):
    """ms-swift's trainer of causal models, with even work for all processes in each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._gain_log = GainLog()
        super().__init__(*args, **kwargs)
        self.callback_handler.callbacks.insert(1, self._gain_log)  # before those that report

    def get_train_dataloader(self, skip_batches: int = 0) -> Any:
        """Return ms-swift's loader, with batches dealt evenly over processes."""
        loader: Any = super().get_train_dataloader(skip_batches)
        args, dataset = self.args, self.train_dataset
        if args.world_size == 1:
            return loader
        try:
            lengths = [max(n) if isinstance(n, list) else n for n in dataset["lengths"]]
        except (KeyError, TypeError, AttributeError, NotImplementedError):
            lengths = None
        if lengths is None or not isinstance(loader, DataLoaderShard):
            fix = "leave out --streaming, --packing, --lazy_tokenize and --sequence_parallel_size"
            raise ConfigError(f"bascule needs the lengths that ms-swift counts: {fix}")
        sampler = SequentialSampler(dataset)
        if args.train_dataloader_shuffle:
            sampler = SeedableRandomSampler(dataset, data_seed=args.data_seed or 0)
        plain = BatchSampler(sampler, self._train_batch_size, args.dataloader_drop_last)
        padded = not self.template.padding_free
        rules = rules_of(args, self.model, num_ranks=args.world_size, padded=padded)
        dealt = DealtBatches(plain, lengths, cost_of(self.model), rules, args.process_index)
        self._gain_log.dealt, batches = dealt, dealt
        if skip_batches:
            batches = SkipBatchSampler(dealt, skip_batches=skip_batches)
        return DataLoaderShard(
            dataset, batch_sampler=batches, **{name: getattr(loader, name) for name in _SETTINGS}
        )


TrainerFactory.TRAINER_MAPPING["causal_lm"] = "bascule.plugins.ms_swift.BalancedSeq2SeqTrainer"
