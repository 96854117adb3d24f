"""What the Trainer is given, without processes: samples without columns, and batches of padding."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from bascule import ConfigError
from bascule.data.loader import BalancedLoader, LoaderOptions
from bascule.data.packs import Pack, make_pack
from bascule.transformers.balance_config import BalanceConfig
from bascule.transformers.dataset_columns import Columns, unpacked_columns
from bascule.transformers.pack_check import check_separates
from bascule.transformers.train_loader import TrainLoader, inputs_of_pack
from bascule.transformers.train_settings import checked_dataset, options_of
from tests.helpers.vlm_models import MODELS as VLMS
from tests.helpers.vlm_models import make_model, make_sample

BALANCE = BalanceConfig(learns=True)


class Words(Dataset[Any]):
    """Samples with two columns, which remembers the epochs that it was told."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return index if index == 4 else {"input_ids": [index], "name": str(index)}

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class ManyWords(Words):
    """The same, read many at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Words, ManyWords])
def test_a_dataset_without_columns_is_else_the_same(kind: type[Words]) -> None:
    dataset = kind()
    columns = Columns(dataset, frozenset({"input_ids", "labels"}))
    wanted = [{"input_ids": [0]}, {"input_ids": [1]}, {"input_ids": [2]}, {"input_ids": [3]}, 4]
    assert len(columns) == 5 and [columns[index] for index in range(5)] == wanted
    assert columns.__getitems__([3, 0, 4]) == [wanted[3], wanted[0], 4]
    for epoch in (2, 0):
        columns.set_epoch(epoch)
    assert dataset.epochs == [2, 0]
    Columns(cast(Any, [1]), frozenset()).set_epoch(1)  # what wants to know of no epoch


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("is_padding", [False, True])
def test_no_label_of_padding_counts_where_labels_are_counted(
    counts: bool, is_padding: bool
) -> None:
    given: dict[str, Tensor] = {
        name: torch.tensor([[5, 6, -100]]) for name in ("input_ids", "labels", "shift_labels")
    }
    batch = cast(Any, SimpleNamespace(data=dict(given), is_padding=is_padding, loss_scale=0.25))
    loader = TrainLoader(
        DataLoader(cast(Any, [1])),
        cast(BalancedLoader, [batch]),
        None,
        pack=None,
        inputs_of=dict,
        counts_labels=counts,
    )
    (inputs,) = loader
    aside = inputs.pop("bascule_aside")
    assert isinstance(inputs, Mapping) and aside.loss_scale == 0.25
    assert inputs.keys() == given.keys()
    for name, value in inputs.items():
        is_hidden = counts and is_padding and name != "input_ids"
        wanted = torch.full_like(given[name], -100) if is_hidden else given[name]
        assert value.dtype == wanted.dtype and torch.equal(value, wanted)
        assert (name in aside.labels) == is_hidden
        assert torch.equal(aside.labels.get(name, given[name]), given[name])


def _loss(*_: object, **__: object) -> None:
    """A loss function of the user's own."""


def _trainer(*, counts: bool, loss: object, peers: tuple[int, int, int], **args: object) -> Any:
    """What `checked_dataset` asks a Trainer."""
    usual = {
        "train_sampling_strategy": "random",
        "n_gpu": 0,
        "average_tokens_across_devices": True,
    }
    tp, cp, sp = peers
    return SimpleNamespace(
        args=SimpleNamespace(**usual | args),
        train_dataset=Words(),
        model_accepts_loss_kwargs=counts,
        compute_loss_func=loss,
        get_tp_size=lambda: tp,
        get_cp_size=lambda: cp,
        get_sp_size=lambda: sp,
    )


@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("loss", [None, _loss])
@pytest.mark.parametrize("counts", [True, False])
def test_a_loss_over_the_labels_of_one_process_is_refused_whoever_divides_it(
    counts: bool, loss: object, averages: bool
) -> None:
    """The Trainer gives the number of labels to such a model, and to any loss function."""
    trainer = _trainer(
        counts=counts, loss=loss, peers=(1, 1, 1), average_tokens_across_devices=averages
    )
    if averages or not (counts or loss):
        assert checked_dataset(trainer, BALANCE) is trainer.train_dataset
        return
    with pytest.raises(ConfigError, match="average_tokens_across_devices=False"):
        checked_dataset(trainer, BALANCE)


@pytest.mark.parametrize(
    ("peers", "num_gpus"), [((2, 1, 1), 1), ((1, 2, 1), 1), ((1, 1, 2), 1), ((1, 1, 1), 2)]
)
def test_processes_that_are_no_data_parallel_rank_of_one_device_are_refused(
    peers: tuple[int, int, int], num_gpus: int
) -> None:
    trainer = _trainer(counts=False, loss=None, peers=peers, n_gpu=num_gpus)
    with pytest.raises(ConfigError, match="data-parallel rank with one device"):
        checked_dataset(trainer, BALANCE)


def test_what_a_model_takes_of_a_pack() -> None:
    pack = Pack(tokens=9, fixed=True)
    ids = [torch.tensor([3, 4, 5]), torch.tensor([6, 7])]
    extra = {"attention_mask": torch.ones(3), "labels": ids[0], "score": torch.tensor(2.0)}
    samples = [{"input_ids": ids[0], **extra}, {"input_ids": ids[1], "score": torch.tensor(1.0)}]
    inputs = inputs_of_pack(make_pack(samples, pack), pack)
    assert inputs.keys() == {"input_ids", "labels", "score", "position_ids", "use_cache"}
    assert inputs["use_cache"] is False
    assert inputs["input_ids"].tolist() == [[3, 4, 5, 6, 7, 0, 0, 0, 0]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
    assert inputs["labels"].tolist() == [[-100, 4, 5, *[-100] * 6]]
    assert inputs["score"].tolist() == [2.0, 1.0]
    hidden = samples[0] | {"attention_mask": torch.tensor([1, 1, 0])}
    with pytest.raises(ConfigError, match="attention_mask hides tokens"):
        inputs_of_pack(make_pack([hidden], pack), pack)
    seen = samples[0] | {"pixel_values": torch.ones(2, 3)}
    with pytest.raises(ConfigError, match="override packed_inputs"):
        inputs_of_pack(make_pack([seen], pack), pack)


def loader_of_packs(
    packs: Sequence[Mapping[str, Any]], pack: Pack, ends: str, loss_scale: float = 1.0
) -> TrainLoader:
    """What the Trainer iterates over, of packs that are ready."""
    balanced = Batches(
        [SimpleNamespace(data=one, is_padding=False, loss_scale=loss_scale) for one in packs]
    )
    balanced.rules = SimpleNamespace(ends=ends)
    return TrainLoader(
        DataLoader(cast(Any, [1])),
        cast(BalancedLoader, balanced),
        None,
        pack=pack,
        inputs_of=lambda data: inputs_of_pack(data, pack),
        counts_labels=True,
    )


@pytest.mark.parametrize("ends", ["finish", "pad_empty"])
def test_an_empty_pack_is_two_tokens_that_count_nothing(ends: str) -> None:
    pack = Pack(tokens=9, pad_id=5)

    def first(packed: Mapping[str, Any]) -> dict[str, Any]:
        return next(iter(loader_of_packs([packed], pack, ends, 0.0)))

    inputs = first(make_pack([], pack))
    assert inputs["input_ids"].tolist() == [[5, 5]] and inputs["position_ids"].tolist() == [[0, 1]]
    assert inputs["labels"].tolist() == [[-100, -100]]
    assert inputs["bascule_aside"].labels["labels"].tolist() == [[-100, 5]]  # a mean is a number
    unlabelled = make_pack([{"input_ids": torch.tensor([3, 4])}], pack)
    if ends == "finish":
        with pytest.raises(ConfigError, match="packs without labels"):
            first(unlabelled)
    else:
        assert first(unlabelled)["input_ids"].tolist() == [[3, 4]]


def test_packs_without_a_label_to_learn_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    pack, tokens = Pack(tokens=9), torch.tensor([3, 4, 5])
    first_only, learns = torch.tensor([7, -100, -100]), torch.tensor([-100, 4, -100])

    def trained(*labels: Tensor) -> int:
        packs = [make_pack([{"input_ids": tokens, "labels": one}] * 2, pack) for one in labels]
        return len(list(loader_of_packs(packs, pack, "pad_empty")))

    assert trained(learns, learns) == 2 and caplog.messages == []
    assert trained(learns, torch.full((3,), -100), first_only) == 3
    assert len(caplog.messages) == 1 and "a pack of 2 samples has no label" in caplog.text
    caplog.clear()
    assert trained(first_only) == 1 and "do" in caplog.text and "loss of 0" in caplog.text


class Batches(list[Any]):
    """A list with the rules of a loader."""

    rules: Any = None


MODELS = [
    ("Llama", {}, True),
    ("Qwen2", {}, True),
    ("Gemma2", {}, True),
    ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}, False),  # takes positions, masks without
    ("Falcon", {}, False),
    ("Bloom", {}, False),  # takes no positions
    ("Roberta", {"is_decoder": True}, False),  # does not count from 0
    ("Mamba", {"state_size": 4}, False),
]


@pytest.mark.parametrize(("name", "sizes", "separates"), MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_mixes_the_samples_of_a_pack_is_refused(
    name: str, sizes: dict[str, Any], separates: bool, dtype: torch.dtype
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    small = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(small | sizes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    if separates:
        check_separates(model, torch.device("cpu"))
        assert model.training
        return
    with pytest.raises(ConfigError, match="mixes the samples of a pack"):
        check_separates(model, torch.device("cpu"))


@pytest.mark.parametrize("name", VLMS)
def test_models_that_see_images_separate_samples_by_their_own_positions(name: str) -> None:
    pytest.importorskip("transformers")
    model = make_model(name)
    check_separates(model, torch.device("cpu"))
    pack = Pack(tokens=64)
    sample = make_sample(name, 1, [(2, 3)], 5)
    sample.pop("mm_token_type_ids", None)
    if name == "internvl":  # places in the text
        inputs = inputs_of_pack(make_pack([sample], pack), pack, model)
        assert inputs["position_ids"].shape == (1, len(sample["input_ids"]))
        return
    with pytest.raises(ConfigError, match="no mm_token_type_ids"):
        inputs_of_pack(make_pack([sample], pack), pack, model)


def test_packs_say_how_an_epoch_ends_and_when_training_does() -> None:
    finish = LoaderOptions(ends="finish")
    with pytest.raises(ConfigError, match=r"ends='finish'.* without a pack"):
        BalanceConfig(learns=True, options=finish)
    with pytest.raises(ConfigError, match="tokens='many'"):
        BalanceConfig(learns=True, pack=cast(Any, "many"))
    balance = BalanceConfig(learns=True, pack=7, options=finish)
    assert balance.pack == Pack(tokens=7)
    for ends, drops, wanted in (
        ("drop_last", False, "pad_empty"),  # the default of the options
        ("drop_last", True, "drop_last"),
        ("pad_empty", False, "pad_empty"),
        ("finish", False, "finish"),
    ):
        args = SimpleNamespace(
            dataloader_drop_last=drops, dataloader_pin_memory=True, ddp_timeout=5
        )
        trainer = cast(Any, SimpleNamespace(args=args, data_collator=list))
        given = LoaderOptions(ends=cast(Any, ends))
        pack = 7 if ends == "finish" else None
        found = options_of(trainer, BalanceConfig(learns=True, pack=pack, options=given))
        assert found.ends == wanted and found.collate_fn is (None if pack else list)
    args.dataloader_drop_last = True
    with pytest.raises(ConfigError, match=r"ends='finish'.* with dataloader_drop_last=True"):
        options_of(trainer, balance)


def test_ready_made_packs_lose_columns_once_they_are_unpacked() -> None:
    def halves(item: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"input_ids": part, "name": "x"} for part in item["cu_seqlens"]]

    kept = unpacked_columns(halves, frozenset({"input_ids"}))
    assert kept({"cu_seqlens": [1, 2]}) == [{"input_ids": 1}, {"input_ids": 2}]
    assert kept.__qualname__ == halves.__qualname__  # ranks compare it
