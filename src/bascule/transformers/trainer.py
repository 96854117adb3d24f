"""Balanced loading and packs for Hugging Face's Trainer, with one keyword argument."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import pairwise
from types import NoneType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import seed_worker

from bascule.checks import choice, fields, function, of_type
from bascule.data.cost_tracker import CostTracker
from bascule.data.gain import Gain
from bascule.data.loader import DEFAULT_OPTIONS, BalancedLoader, LoaderOptions
from bascule.data.packs import MADE, VISUAL_FIELDS, Pack, make_pack, unpack
from bascule.data.samplers import ResumableSampler
from bascule.data.steps import Batch
from bascule.errors import ConfigError
from bascule.machine.costs import Cost
from bascule.plan.plan import Sync
from bascule.transformers.delta_rule import delta_layers, split_delta_layers
from bascule.transformers.separation import Reach, check_separates

Inputs = dict[str, Any]

_GRIDS = ("image_grid_thw", "video_grid_thw")


def inputs_of_pack(packed: Mapping[str, Any], pack: Pack, model: nn.Module | None = None) -> Inputs:
    """Return a pack as the inputs of a causal or vision-language model of transformers.

    Token fields become (1, T, ..), and ``position_ids`` separate samples. Packs with images need
    the model, wrapped or not, because it counts their positions. Packs for gated delta layers need
    the model, too; they get the bounds of samples as ``cu_seq_lens_q`` and ``seq_idx``, for which
    transformers needs two packages, or `split_delta_layers(model)`.
    """
    for name in VISUAL_FIELDS:
        if model is None and packed.get(name) is not None:
            fix = "give the model, or override packed_inputs of the Trainer to give position_ids"
            raise ConfigError(f"the positions of a pack with {name} depend on the model: {fix}")
    mask = packed.get("attention_mask")
    if mask is not None and not mask[: int(packed["cu_items"]["attention_mask"][-1])].all():
        what = "attention_mask hides tokens of a sample in a pack, which has no padding inside"
        raise ConfigError(f"{what}: give samples without it")
    inputs = {
        name: value[None] if name in pack.token_fields and isinstance(value, Tensor) else value
        for name, value in packed.items()
        if name not in MADE and name != "attention_mask"
    }
    if model is not None and not (reach := Reach.of(model)).is_endless:
        bounds, num = packed["cu_seqlens"].tolist(), int(packed["num_samples"])
        if len(bounds) > 2:  # several segments; padding is one, and its positions count for ropes
            longest = max(end - start for start, end in pairwise(bounds))
            reach.check(type(getattr(model, "module", model)).__name__, longest, bounds[num])
    positions = packed["positions"][None] if model is None else _positions(packed, model)
    if model is not None and delta_layers(model):
        lens = packed["cu_seqlens"].diff()
        numbers = torch.arange(len(lens), dtype=torch.int32, device=lens.device)
        inputs["cu_seq_lens_q"] = packed["cu_seqlens"]
        inputs["seq_idx"] = numbers.repeat_interleave(lens)[None]
    return inputs | {"position_ids": positions, "use_cache": False}


def check_packs(model: nn.Module, device: torch.device) -> None:
    """Refuse a model that mixes the samples of a pack, because it would not report this itself."""

    def run(sequences: Sequence[Tensor], has_positions: bool) -> Any:
        inputs: Inputs = {"input_ids": torch.cat(list(sequences))[None], "use_cache": False}
        if has_positions:
            pack = Pack(tokens=inputs["input_ids"].numel())
            samples = [{"input_ids": tokens} for tokens in sequences]
            inputs = inputs_of_pack(make_pack(samples, pack), pack, model)
        return model(**{k: x.to(device) if isinstance(x, Tensor) else x for k, x in inputs.items()})

    advice = "leave out pack, or override packed_inputs to give the model the bounds of samples"
    check_separates(model, run, advice)


def _positions(packed: Mapping[str, Any], model: nn.Module) -> Tensor:
    """Return (1, T) positions in samples, or (4, 1, T) if the model adds time, height and width."""
    positions = packed["positions"]
    methods = (getattr(module, "get_rope_index", None) for module in model.modules())
    rope_index = next((method for method in methods if callable(method)), None)
    if rope_index is None:
        return positions[None]
    samples = [_positions_of(sample, rope_index) for sample in unpack(packed)]
    padding = positions[sum(x.shape[2] for x in samples) :].expand(3, 1, -1)
    return torch.cat([positions.expand(1, 1, -1), torch.cat([*samples, padding], dim=2)])


def _positions_of(sample: Mapping[str, Any], rope_index: Any) -> Tensor:
    """Return a sample's positions in time, height and width, (3, 1, tokens)."""
    ids, types = sample["input_ids"], sample.get("mm_token_type_ids")
    if not any(sample.get(name) is not None and len(sample[name]) for name in _GRIDS):
        return torch.arange(len(ids), device=ids.device).expand(3, 1, -1)
    if types is None:
        what = "a sample with images or videos has no mm_token_type_ids, which tell its positions"
        raise ConfigError(f"{what}: keep all that the model's processor returns")
    names = (*_GRIDS, "second_per_grid_ts")
    grids = {name: sample[name] for name in names if sample.get(name) is not None}
    return rope_index(ids[None], mm_token_type_ids=types[None], **grids)[0]


ASIDE = "bascule_aside"  # travels among the inputs from the loader to `training_step`

_log = logging.getLogger(__name__)
_IGNORED = -100  # label that the Trainer does not count

_DECIDED = {  # options that the Trainer's arguments decide, and what to set instead
    "axis": "the Trainer's own mesh decides; use BalancedLoader in a training loop",
    "batch_size": "set per_device_train_batch_size",
    "collate_fn": "give the Trainer a data_collator",
    "pin_memory": "set dataloader_pin_memory",
    "timeout_s": "set ddp_timeout",
}


@dataclass(frozen=True, slots=True)
class BalanceConfig:
    """Settings of balancing, the same on all processes of a Trainer.

    Attributes:
        cost: Predicts a sample's cost from its tokens. None needs `learns`; costs begin as tokens.
        length_fn: Returns the tokens of a sample. Default: the length of its "input_ids".
        sync: As for `plan_step`. Default: "microbatch" with FSDP and DeepSpeed, else "step".
        pack: Tokens of a pack, or its settings. Each microbatch is then one pack, and ``max_steps``
            ends training.
        learns: True fits costs to the steps of the run (`BalancedTrainerMixin.cost_tracker`).
        options: Options of the loader that the Trainer's arguments do not decide. Of `ends`, only
            "pad_empty" and "finish" count.
    """

    cost: Cost | None = None
    length_fn: Callable[[Any], int] | None = None
    sync: Sync | None = None
    pack: Pack | int | None = None
    learns: bool = False
    options: LoaderOptions = DEFAULT_OPTIONS

    def __post_init__(self) -> None:
        fields(
            self,
            cost=function,
            length_fn=function,
            sync=(choice, "microbatch", "step"),
            options=(of_type, LoaderOptions, "LoaderOptions(..)"),
        )
        if self.cost is None and not self.learns:
            fix = "give a cost, as TransformerCost(d_model, num_layers=..), or learns=True"
            raise ConfigError(f"BalanceConfig(cost=None): {fix}")
        if not isinstance(self.pack, Pack | None):
            object.__setattr__(self, "pack", Pack(tokens=self.pack))
        if self.options.ends == "finish" and self.pack is None:
            what = "LoaderOptions(ends='finish') in a BalanceConfig without a pack"
            raise ConfigError(f"{what}; its padding needs packs: give a pack, or ends='pad_empty'")
        for name, advice in _DECIDED.items():
            value = getattr(self.options, name)
            if value != getattr(DEFAULT_OPTIONS, name):
                raise ConfigError(f"LoaderOptions({name}={value!r}) in a BalanceConfig: {advice}")

    @property
    def fills_packs(self) -> bool:
        """True if samples are loaded until a pack is full, so that epochs have no known length."""
        return self.pack is not None and self.options.unpack is None


_Base = Trainer if TYPE_CHECKING else object


class BalancedTrainerMixin(_Base):
    """A Trainer whose training samples are balanced over its processes.

    Each optimiser step has the same samples as without it, in another order, and the same mean
    loss: by ``num_items_in_batch``, or by `loss_scale`. A resumed run begins with the next sample.
    With one process and no packs nothing changes, and ``balanced_loader`` is None.

    Args:
        *args: Arguments of the Trainer.
        balance: Settings; training refuses conflicts with the Trainer's arguments.
        **kwargs: Keyword arguments of the Trainer.
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
        self._undo_split: Callable[[], None] | None = None
        self.add_callback(LoaderProgress())

    @property
    def loss_scale(self) -> float:
        """Factor of a microbatch's mean loss, which a `compute_loss` of your own must apply."""
        self._scale_was_used = True
        return 1.0 if self._aside is None else self._aside.loss_scale

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this process's balanced batches. All processes must call it."""
        args, balance = self.args, self.balance
        if args.world_size == 1 and balance.pack is None:
            return super().get_train_dataloader()
        host, plain = cast(Any, super()), (RandomSampler, SequentialSampler, NoneType)
        draws = host.get_train_dataloader.__func__ is not Trainer.get_train_dataloader
        is_known = args.train_sampling_strategy in ("random", "sequential")
        if draws or (is_known and not isinstance(host._get_train_sampler(), plain)):
            what = f"{type(self).__name__} chooses its training samples in a way of its own"
            fix = "use BalancedLoader in a training loop"
            raise ConfigError(f"{what}, which balancing would replace: {fix}")
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

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log `Gain.metrics`, the measured gain and moved bytes beside each loss of training."""
        loader: object = self.callback_handler.train_dataloader
        if isinstance(loader, TrainLoader) and "loss" in logs:
            did = loader.balanced.metrics()
            metrics = loader.gain.metrics() | {"moved_bytes": did["sent_bytes"]}
            if did["measured_gain"] is not None:
                metrics |= {name: did[name] for name in ("measured_gain", "measured_gain_error")}
            if did["slow_rank"] is not None:
                cause = did["slow_cause"].removeprefix("slow ")
                metrics |= {f"slow_{cause}": did["slow_rank"], "slow_share": did["slow_share"]}
            logs |= {f"bascule_{name}": value for name, value in metrics.items()}
        super().log(logs, *args, **kwargs)

    def packed_inputs(self, packed: Mapping[str, Any]) -> dict[str, Any]:
        """Return a pack as the model's inputs; override it for other models.

        A pack with only padding has ``input_ids`` and ``labels``, and no other field of samples.
        """
        return inputs_of_pack(packed, cast(Pack, self.balance.pack), self.model)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; if this process fails, other processes get the error at their next batch."""
        try:
            return super().train(*args, **kwargs)
        except BaseException as error:
            # Its traceback keeps the Trainer's loop alive, so the loader would not be closed.
            if self.balanced_loader is not None:
                self.balanced_loader.leave(error)
            raise
        finally:
            if self._undo_split is not None:
                self._undo_split()
            self._undo_split = None

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Train on a microbatch; refuse a `compute_loss` that left out `loss_scale`."""
        if self.balance.pack is not None and self._undo_split is None:
            self._undo_split = split_delta_layers(model)
        if self._must_check_packs:
            self._must_check_packs = False
            check_packs(model, self.args.device)
        self._aside, self._scale_was_used = inputs.pop(ASIDE, None), False
        if self._aside is not None:
            inputs |= self._aside.labels  # the Trainer has counted labels already
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
            is_mean = num_items_in_batch is None or self.loss_is_scaled_for_ga is False
            if self._aside is not None and is_mean and not self._scale_was_used:
                what = f"{type(self).__name__}.compute_loss gives the mean of a microbatch"
                fix = "multiply it by self.loss_scale, or call super().compute_loss"
                raise ConfigError(f"{what}, whose samples balancing chose: {fix}")
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
        """Return the Trainer's loss, times `loss_scale` unless the Trainer counts labels."""
        # Only with outputs if asked for: a Trainer may run the model again for them.
        options: Any = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
        result: Any = super().compute_loss(model, inputs, **options)
        if self.balanced_loader is not None:
            self.balanced_loader.computed()  # the backward pass may wait for other processes
        loss, *outputs = result if return_outputs else (result,)
        if num_items_in_batch is None:
            loss = loss * self.loss_scale
        elif self._aside is not None and self._aside.labels:  # padding
            loss = loss * 0.0
        return (loss, *outputs) if return_outputs else loss


def checked_dataset(trainer: Trainer, balance: BalanceConfig) -> Dataset[Any]:
    """Return the Trainer's dataset; refuse arguments that conflict with balancing."""
    args, dataset = trainer.args, trainer.train_dataset
    if dataset is None or isinstance(dataset, IterableDataset) or not len(dataset):  # pyright: ignore[reportArgumentType]
        what = "balancing needs a train_dataset with a length and at least one sample"
        raise ConfigError(f"{what}: for streams, use BalancedLoader in a training loop")
    if args.train_sampling_strategy not in ("random", "sequential"):
        what = f"train_sampling_strategy={args.train_sampling_strategy!r} groups samples by length"
        raise ConfigError(f'{what}, and so does balancing: use "random" or "sequential"')
    shares_layers = trainer.get_tp_size() > 1 and data_axis_of(trainer) is None
    if shares_layers or trainer.get_cp_size() * trainer.get_sp_size() > 1 or args.n_gpu > 1:
        what = "balancing needs processes with one device and one data axis"
        fix = "else use BalancedLoader with LoaderOptions(axis=..), or torchrun, not DataParallel"
        raise ConfigError(f"{what}: {fix}")
    if counts_labels(trainer) and not args.average_tokens_across_devices:
        what = "average_tokens_across_devices=False divides the loss by the labels of one process"
        raise ConfigError(f"{what}, whose samples balancing chose: set it to True")
    if balance.fills_packs and args.max_steps <= 0:
        what = f"max_steps={args.max_steps} with BalanceConfig(pack=..)"
        raise ConfigError(f"{what}: an epoch has no known number of packs; set max_steps")
    return dataset


def data_axis_of(trainer: Trainer) -> tuple[DeviceMesh, str] | None:
    """Return the mesh and data axis of tensor-parallel processes; None without such an axis."""
    mesh = trainer.accelerator.torch_device_mesh
    names = () if mesh is None else mesh.mesh_dim_names or ()
    axes = [name for name in names if name.startswith("dp_")]
    has_axis = trainer.get_tp_size() > 1 and len(axes) == 1
    return (cast(DeviceMesh, mesh), axes[0]) if has_axis else None


def counts_labels(trainer: Trainer) -> bool:
    """Return True if the Trainer divides the loss by the labels of all processes."""
    return trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None


def sync_of(trainer: Trainer, balance: BalanceConfig) -> Sync:
    """Return how often processes wait for each other; refuse to learn costs of microbatches."""
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    is_sharded = is_sharded or data_axis_of(trainer) is not None  # by FSDP2
    sync = balance.sync or ("microbatch" if is_sharded else "step")
    accumulate = trainer.args.gradient_accumulation_steps
    if balance.learns and sync != "step" and accumulate > 1:
        what = f"BalanceConfig(learns=True) with waits in each of {accumulate} microbatches"
        raise ConfigError(f"{what}: only steps can be timed; give a cost, or sync='step'")
    return sync


def options_of(trainer: Trainer, balance: BalanceConfig) -> LoaderOptions:
    """Return the options of the loader, completed by the Trainer's arguments."""
    args, ends = trainer.args, balance.options.ends
    if ends == "drop_last":  # the default
        ends = "drop_last" if args.dataloader_drop_last else "pad_empty"
    elif args.dataloader_drop_last:
        what = f"LoaderOptions(ends={ends!r}) with dataloader_drop_last=True, which drops the end"
        raise ConfigError(f"{what}: leave out one of them")
    return replace(
        balance.options,
        ends=ends,
        collate_fn=None if balance.pack else trainer.data_collator,
        pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
        timeout_s=float(args.ddp_timeout),
    )


def balanced_loader(
    trainer: Trainer, balance: BalanceConfig, columns: frozenset[str] | None
) -> BalancedLoader:
    """Return the loader of this process; its samples have these columns (None: all columns)."""
    args, options = trainer.args, options_of(trainer, balance)
    dataset = checked_dataset(trainer, balance)
    if columns is not None and options.unpack is None:
        dataset = Columns(dataset, columns)
    elif columns is not None and options.unpack is not None:
        options = replace(options, unpack=unpacked_columns(options.unpack, columns))
    mesh, axis = data_axis_of(trainer) or (None, None)
    rank, num_ranks = args.process_index, args.world_size
    if mesh is not None and axis is not None:
        rank, num_ranks = mesh.get_local_rank(axis), mesh[axis].size()
    sampler = ResumableSampler(
        len(dataset),  # pyright: ignore[reportArgumentType]
        rank=rank,
        num_ranks=num_ranks,
        shuffle=args.train_sampling_strategy == "random",
        seed=args.seed if args.data_seed is None else args.data_seed,
    )
    num_workers = args.dataloader_num_workers
    local = DataLoader(
        dataset,
        batch_size=trainer._train_batch_size,
        sampler=sampler,
        # Packs are filled from batches of any size, so the last one is used as well.
        drop_last=args.dataloader_drop_last and not balance.fills_packs,
        num_workers=num_workers,
        worker_init_fn=partial(seed_worker, num_workers=num_workers, rank=args.process_index),
        persistent_workers=args.dataloader_persistent_workers,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        prefetch_factor=args.dataloader_prefetch_factor,
        in_order=args.dataloader_in_order,
    )
    return BalancedLoader(
        local,
        cost=balance.cost or _tokens,
        length_fn=balance.length_fn,
        mesh_or_group=mesh,
        accumulate=args.gradient_accumulation_steps,
        sync=sync_of(trainer, balance),
        pack=balance.pack,
        options=replace(options, axis=axis),
    )


def _tokens(seq_lens: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the tokens, the cost of samples until steps were measured."""
    return np.asarray(seq_lens, dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Aside:
    """Data of a microbatch for `training_step`, not for the model."""

    loss_scale: float  # factor of its mean loss
    labels: Inputs  # of padding: hidden from the count of labels, restored for the mean


@dataclass(eq=False)
class TrainLoader:
    """A loader of balanced batches, which it turns into a Trainer's inputs."""

    dataset: Dataset[Any]
    balanced: BalancedLoader
    tracker: CostTracker | None  # learns costs of samples
    pack: Pack | None
    inputs_of: Callable[[Any], Inputs]
    counts_labels: bool  # the Trainer divides by the labels of all processes
    gain: Gain = field(default_factory=Gain, init=False)
    _step: list[Batch] = field(default_factory=list[Batch], init=False)  # yielded, not counted yet
    # Without a length, the Trainer counts epochs from 0 in every resumed run, and knows no end.
    _first_epoch: int = field(default=0, init=False)
    _may_be_over: bool = field(default=False, init=False)
    _has_warned: bool = field(default=False, init=False)

    def __len__(self) -> int:
        return len(self.balanced)

    @property
    def num_microbatches(self) -> int | None:
        """Microbatches of a whole epoch; None if unknown."""
        try:
            return len(self)
        except TypeError:
            return None

    @property
    def num_epochs(self) -> float:
        """Epochs so far, with the fraction of this epoch's steps (with packs: samples)."""
        progress, num_microbatches = self.balanced.state_dict(), self.num_microbatches
        if num_microbatches is not None:
            num_steps = num_microbatches // self.balanced.rules.accumulate
            return progress["epoch"] + progress["step"] / max(num_steps, 1)
        num_read = sum(map(sum, progress["history"])) + sum(progress["counts"])
        return progress["epoch"] + num_read / len(self.dataset)  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> Iterator[Inputs]:
        may_be_over, self._may_be_over = self._may_be_over, False
        for inputs in self._epoch():
            may_be_over = False
            yield inputs
        if may_be_over:
            self._first_epoch += 1
            yield from self._epoch()

    def count(self) -> None:
        """Add the step to the gain."""
        step, self._step = self._step, []
        verdict, work = step[0].verdict, sum(float(np.mean(batch.plan.loads)) for batch in step)
        work += float(getattr(self.balanced.cost, "overhead", 0.0))
        after = verdict.after if verdict.applied else verdict.before
        self.gain.add(verdict.before, after, work)

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Continue at a checkpoint, by the `state_dict` of its loader."""
        self.balanced.load_state_dict(progress)
        if self.num_microbatches is None:
            self._first_epoch, self._may_be_over = progress["epoch"], True

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration; a resumed one begins at its saved position."""
        self.balanced.close()
        self.balanced.set_epoch(self._first_epoch + epoch)

    def _epoch(self) -> Iterator[Inputs]:
        return map(self._inputs, self.balanced if self.tracker is None else self.tracker)

    def _inputs(self, batch: Batch) -> Inputs:
        data, is_padding = batch.data, batch.is_padding
        self._step.append(batch)
        if self.pack is not None:
            if self.balanced.rules.ends == "finish" and "labels" not in data:
                what = "LoaderOptions(ends='finish') with packs without labels"
                raise ConfigError(f"{what}: give labels, or ends='pad_empty'")
            if not data["positions"].shape[0]:
                # Models need tokens: two, of which a causal model predicts the second.
                tokens, is_padding = torch.full((2,), self.pack.pad_id), True
                padding = [{"input_ids": tokens, "labels": tokens}]
                data = make_pack(padding, replace(self.pack, tokens=2, fixed=False))
            elif not is_padding:
                self._warn_of_no_label(data, self.pack.ignore_index)
        inputs, labels = self.inputs_of(data), Inputs()
        if is_padding and self.counts_labels:
            for name in ("labels", "shift_labels"):
                if isinstance(inputs.get(name), Tensor):
                    labels[name] = inputs[name]
                    inputs[name] = torch.full_like(inputs[name], _IGNORED)
        inputs[ASIDE] = Aside(batch.loss_scale, labels)
        return inputs

    def _warn_of_no_label(self, packed: Mapping[str, Any], ignored: int) -> None:
        """Warn once of a pack without labels: if there are many, the run learns nothing."""
        labels = packed.get("shift_labels")
        if labels is None or self._has_warned or bool((labels != ignored).any()):
            return
        self._has_warned = True
        _log.warning(
            "a pack of %d samples has no label to learn: all are %d, but for first tokens, which "
            "a causal model does not predict; its loss is 0",
            packed["num_samples"],
            ignored,
        )


class LoaderProgress(TrainerCallback, ExportableState):
    """Callback that saves the loader's progress in ``trainer_state.json``, and resumes from it."""

    def __init__(self) -> None:
        self._loader: TrainLoader | None = None

    def state(self) -> dict[str, Any]:
        """Return the loader's progress, as the Trainer saves it."""
        attributes: dict[str, Any] = {}
        if (loader := self._loader) is not None:
            attributes["progress"] = loader.balanced.state_dict()
            attributes["num_microbatches"] = loader.num_microbatches
            if loader.tracker is not None:
                attributes["costs"] = loader.tracker.state_dict()
        return {"args": {}, "attributes": attributes}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Resume at the checkpoint, if there is one; refuse one that does not fit."""
        loader = kwargs["train_dataloader"]
        states: dict[str, Any] = state.stateful_callbacks
        saved = states.setdefault(type(self).__name__, {"args": {}, "attributes": {}})["attributes"]
        if isinstance(loader, TrainLoader):
            self._loader = loader
            _resume(loader, saved, state.global_step)
        elif saved:
            what = "the checkpoint was written by several processes with balancing, and this is one"
            raise ConfigError(f"{what}: keep the number of processes")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the epoch of the loader: the Trainer counts neither resumed epochs nor packs."""
        if self._loader is not None:
            self._loader.count()
            state.epoch = self._loader.num_epochs

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the thread of an unfinished epoch."""
        if self._loader is not None:
            self._loader.balanced.close()


def _resume(loader: TrainLoader, saved: dict[str, Any], num_trained: int) -> None:
    """Resume at the progress saved after so many steps; refuse an epoch of another length."""
    num_microbatches = loader.num_microbatches
    if not saved:
        num_steps = (num_microbatches or 0) // loader.balanced.rules.accumulate
        if num_trained % num_steps if num_steps else num_trained:
            what = f"the checkpoint of step {num_trained} lies within an epoch without balancing"
            raise ConfigError(f"{what}: resume it without, or from the end of an epoch")
        return
    if saved["num_microbatches"] != num_microbatches:
        before, now = (
            "packs of unknown number" if number is None else f"{number} microbatches an epoch"
            for number in (saved["num_microbatches"], num_microbatches)
        )
        fix = "keep processes, batch size, accumulation, dataset and packs"
        raise ConfigError(f"the checkpoint was written with {before}, now there are {now}: {fix}")
    loader.resume(saved["progress"])
    if loader.tracker is not None and "costs" in saved:
        loader.tracker.load_state_dict(saved["costs"])


class Columns(Dataset[Any]):
    """Dataset whose samples have the named columns only."""

    def __init__(self, dataset: Dataset[Any], names: frozenset[str]) -> None:
        self._dataset, self._names = dataset, names

    def __len__(self) -> int:
        return len(self._dataset)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, index: int) -> Any:
        return _select(self._dataset[index], self._names)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        read = getattr(self._dataset, "__getitems__", None)  # as DataLoader does
        samples = [self._dataset[index] for index in indices] if read is None else read(indices)
        return [_select(sample, self._names) for sample in samples]

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the dataset, if it has `set_epoch`."""
        if hasattr(self._dataset, "set_epoch"):
            cast(Any, self._dataset).set_epoch(epoch)


def unpacked_columns(
    unpack: Callable[[Any], list[Any]], names: frozenset[str]
) -> Callable[[Any], list[Any]]:
    """Return an `unpack` whose samples have the named columns only; it may read the others."""

    @wraps(unpack)  # ranks compare its name
    def unpack_columns(item: Any) -> list[Any]:
        return [_select(sample, names) for sample in unpack(item)]

    return unpack_columns


def _select(sample: Any, names: frozenset[str]) -> Any:
    if not isinstance(sample, Mapping):
        return sample
    return {name: value for name, value in sample.items() if name in names}
