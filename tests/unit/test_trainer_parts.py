"""Parts of the Trainer's balancing, without processes: settings, columns, packs and padding."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.data import ChainDataset, Dataset

from bascule import ConfigError
from bascule.data.gain import Gain
from bascule.data.loader import LoaderOptions
from bascule.data.packs import Pack, make_pack
from bascule.plan.limits import Limits
from bascule.transformers.trainer import (
    BalanceConfig,
    BalancedTrainerMixin,
    Columns,
    TrainLoader,
    check_packs,
    checked_dataset,
    inputs_of_pack,
    options_of,
    unpacked_columns,
)
from tests.helpers.vlm_models import MODELS as VLMS
from tests.helpers.vlm_models import make_model, make_sample

BALANCE = BalanceConfig(learns=True)


class Words(Dataset[Any]):
    """Samples with two columns, and a log of the epochs."""

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
    expected = [*({"input_ids": [number]} for number in range(4)), 4]
    assert len(columns) == 5 and [columns[index] for index in range(5)] == expected
    assert columns.__getitems__([3, 0, 4]) == [expected[3], expected[0], 4]
    columns.set_epoch(2)
    assert dataset.epochs == [2]
    Columns(cast(Any, [1]), frozenset()).set_epoch(1)  # a dataset without epochs


def test_ready_made_packs_lose_columns_once_they_are_unpacked() -> None:
    def halves(item: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"input_ids": part, "name": "x"} for part in item["cu_seqlens"]]

    kept = unpacked_columns(halves, frozenset({"input_ids"}))
    assert kept({"cu_seqlens": [1, 2]}) == [{"input_ids": 1}, {"input_ids": 2}]
    assert kept.__qualname__ == halves.__qualname__  # ranks compare it


LIMITED = LoaderOptions(weight_fn=len, limits=Limits(tokens=9), prefetch=3, min_gain=0.1)
OTHERS: dict[str, Any] = {"axis": "dp", "batch_size": 2, "collate_fn": list, "pin_memory": True}
OTHERS["timeout_s"] = 6
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"cost": 3}, "cost=3"),
    ({}, "learns=True"),
    ({"learns": True, "sync": "never"}, "'never'"),
    ({"learns": True, "pack": "many"}, "tokens='many'"),
    ({"learns": True, "options": {"prefetch": 3}}, "give LoaderOptions"),
    ({"learns": True, "options": LoaderOptions(ends="finish")}, "ends='finish'.* without a pack"),
    *(
        ({"learns": True, "options": LoaderOptions(**{name: value})}, rf"LoaderOptions\({name}=")
        for name, value in OTHERS.items()
    ),
]


@pytest.mark.parametrize(("settings", "words"), CONFIGS)
def test_settings_that_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BalanceConfig(**settings)


def options_with(ends: str, drops: bool, pack: int | None = None) -> LoaderOptions:
    """The loader's options in a Trainer whose collator is `list`."""
    balance = BalanceConfig(learns=True, pack=pack, options=LoaderOptions(ends=cast(Any, ends)))
    args = SimpleNamespace(dataloader_drop_last=drops, dataloader_pin_memory=True, ddp_timeout=5)
    return options_of(cast(Any, SimpleNamespace(args=args, data_collator=list)), balance)


def test_the_trainers_arguments_decide_how_an_epoch_ends() -> None:
    assert BalanceConfig(learns=True, options=LIMITED).options is LIMITED
    assert BalanceConfig(learns=True, pack=7).pack == Pack(tokens=7)
    assert options_with("drop_last", False).ends == "pad_empty"  # the default of the options
    assert options_with("drop_last", True).ends == "drop_last"
    padded, packed = options_with("pad_empty", False), options_with("finish", False, pack=7)
    assert (padded.ends, padded.collate_fn) == ("pad_empty", list)
    assert (packed.ends, packed.collate_fn) == ("finish", None)
    with pytest.raises(ConfigError, match=r"ends='finish'.* with dataloader_drop_last=True"):
        options_with("finish", True, pack=7)


LOSS = {"model_accepts_loss_kwargs": True}, {"compute_loss_func": len}
ONE_SUM = {"average_tokens_across_devices": False}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    # The Trainer gives the number of labels to such a model, and to any loss function.
    *((loss, ONE_SUM, "average_tokens_across_devices=False") for loss in LOSS),
    *((loss, {}, None) for loss in LOSS),
    ({}, ONE_SUM, None),
    *(({f"get_{axis}_size": lambda: 2}, {}, "with one device") for axis in ("tp", "cp", "sp")),
    ({}, {"n_gpu": 2}, "with one device"),
    ({"train_dataset": None}, {}, "BalancedLoader in a training loop"),
    ({"train_dataset": []}, {}, "at least one sample"),
    ({"train_dataset": ChainDataset([])}, {}, "for streams"),
    ({}, {"train_sampling_strategy": "group_by_length"}, "='group_by_length' groups samples"),
]


@pytest.mark.parametrize(("facts", "arguments", "words"), REFUSED)
def test_trainers_that_are_refused(
    facts: dict[str, Any], arguments: dict[str, Any], words: str | None
) -> None:
    usual = {"train_sampling_strategy": "random", "n_gpu": 0, "average_tokens_across_devices": True}
    told = {"args": SimpleNamespace(**usual | arguments), "train_dataset": Words()}
    told |= {"model_accepts_loss_kwargs": False, "compute_loss_func": None}
    told |= {"accelerator": SimpleNamespace(torch_device_mesh=None)}
    told |= {f"get_{axis}_size": lambda: 1 for axis in ("tp", "cp", "sp")}
    trainer: Any = SimpleNamespace(**told | facts)
    if words is None:
        assert checked_dataset(trainer, BALANCE) is trainer.train_dataset
        return
    with pytest.raises(ConfigError, match=words):
        checked_dataset(trainer, BALANCE)


class Batches(list[Any]):
    """A list with the rules of a loader."""

    rules: Any = None


def loader_of(
    microbatches: Sequence[Mapping[str, Any]],
    pack: Pack | None,
    ends: str = "pad_empty",
    *,
    is_padding: bool = False,
    counts: bool = True,
) -> TrainLoader:
    """The Trainer's loader of microbatches, or of packs, that are ready."""
    balanced = Batches(
        SimpleNamespace(data=dict(one), is_padding=is_padding, loss_scale=0.25, microbatch=number)
        for number, one in enumerate(microbatches)
    )
    balanced.rules = SimpleNamespace(ends=ends)

    def inputs_of(data: Any) -> dict[str, Any]:
        return data if pack is None else inputs_of_pack(data, pack)

    return TrainLoader(cast(Any, [1]), cast(Any, balanced), None, pack, inputs_of, counts)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("is_padding", [False, True])
def test_no_label_of_padding_counts_where_labels_are_counted(
    counts: bool, is_padding: bool
) -> None:
    names = ("input_ids", "labels", "shift_labels")
    batch: dict[str, Tensor] = {name: torch.tensor([[5, 6, -100]]) for name in names}
    (inputs,) = loader_of([batch], None, is_padding=is_padding, counts=counts)
    aside = inputs.pop("bascule_aside")
    assert aside.loss_scale == 0.25 and inputs.keys() == batch.keys()
    for name, value in inputs.items():
        is_hidden = counts and is_padding and name != "input_ids"
        expected = torch.full_like(batch[name], -100) if is_hidden else batch[name]
        assert value.dtype == expected.dtype and torch.equal(value, expected)
        assert (name in aside.labels) == is_hidden
        assert torch.equal(aside.labels.get(name, batch[name]), batch[name])


@pytest.mark.parametrize("ends", ["finish", "pad_empty"])
def test_an_empty_pack_is_two_tokens_that_count_nothing(ends: str) -> None:
    pack = Pack(tokens=9, pad_id=5)
    (inputs,) = loader_of([make_pack([], pack)], pack, ends)
    assert inputs["input_ids"].tolist() == [[5, 5]] and inputs["position_ids"].tolist() == [[0, 1]]
    assert inputs["labels"].tolist() == [[-100, -100]]
    assert inputs["bascule_aside"].labels["labels"].tolist() == [[-100, 5]]  # a mean is a number
    unlabelled = loader_of([make_pack([{"input_ids": torch.tensor([3, 4])}], pack)], pack, ends)
    if ends == "finish":
        with pytest.raises(ConfigError, match="packs without labels"):
            list(unlabelled)
    else:
        assert next(iter(unlabelled))["input_ids"].tolist() == [[3, 4]]


def test_packs_without_a_label_to_learn_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    pack, tokens = Pack(tokens=9), torch.tensor([3, 4, 5])
    first_only, learns = torch.tensor([7, -100, -100]), torch.tensor([-100, 4, -100])

    def train(*labels: Tensor) -> int:
        packs = [make_pack([{"input_ids": tokens, "labels": one}] * 2, pack) for one in labels]
        return len(list(loader_of(packs, pack)))

    assert train(learns, learns) == 2 and caplog.messages == []
    assert train(learns, torch.full((3,), -100), first_only) == 3
    assert len(caplog.messages) == 1 and "a pack of 2 samples has no label" in caplog.text


def test_inputs_of_a_pack() -> None:
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


MODELS: list[tuple[str, dict[str, Any], bool]] = [
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
    small = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(small | sizes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    if separates:
        check_packs(model, torch.device("cpu"))
        assert model.training
        return
    with pytest.raises(ConfigError, match="a row"):
        check_packs(model, torch.device("cpu"))


def test_packs_beyond_the_lengths_that_a_model_computes_alike_are_refused() -> None:
    transformers: Any = pytest.importorskip("transformers")
    small = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size_mlp": 48}
    scaled = transformers.Llama4TextConfig(**small, floor_scale=16, no_rope_layers=[1, 0])
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    roped = transformers.LlamaConfig(**small, rope_parameters=dynamic, max_position_embeddings=6)
    with torch.device("meta"):
        models = {"right up to 15": transformers.Llama4ForCausalLM(scaled)}
        models["above 6 tokens"] = transformers.LlamaForCausalLM(roped)
    short, longer = torch.ones(5, dtype=torch.int64), torch.ones(12, dtype=torch.int64)
    for words, model in models.items():
        for samples in ([short, short, short][: 3 - ("6" in words)], [longer]):
            pack = Pack(tokens=15)
            inputs_of_pack(make_pack([{"input_ids": x} for x in samples], pack), pack, model)
        pack = Pack(tokens=20, fixed=True)
        with pytest.raises(ConfigError, match=words):
            made = make_pack([{"input_ids": x} for x in (short, longer)], pack)
            inputs_of_pack(made, pack, model)


@pytest.mark.parametrize("name", VLMS)
def test_models_that_see_images_separate_samples_by_their_own_positions(name: str) -> None:
    pytest.importorskip("transformers")
    model, pack = make_model(name), Pack(tokens=64)
    check_packs(model, torch.device("cpu"))
    sample = make_sample(name, 1, [(2, 3)], 5)
    sample.pop("mm_token_type_ids", None)
    if name == "internvl":  # places in the text
        inputs = inputs_of_pack(make_pack([sample], pack), pack, model)
        assert inputs["position_ids"].shape == (1, len(sample["input_ids"]))
        return
    with pytest.raises(ConfigError, match="no mm_token_type_ids"):
        inputs_of_pack(make_pack([sample], pack), pack, model)


def test_the_log_names_a_slow_rank_by_its_cause() -> None:
    class Host:
        def log(self, logs: dict[str, float]) -> None:
            logs["host"] = 1.0

    class Balanced(BalancedTrainerMixin, Host):  # pyright: ignore
        pass

    did: dict[str, Any] = {"sent_bytes": 8, "slow_share": 0.25}
    for slow, cause, wanted in (
        (None, "none", {}),
        (3, "slow rank", {"bascule_slow_rank": 3, "bascule_slow_share": 0.25}),
        (0, "loader", {"bascule_slow_loader": 0, "bascule_slow_share": 0.25}),
    ):
        metrics = did | {"slow_rank": slow, "slow_cause": cause, "measured_gain": None}
        loader = object.__new__(TrainLoader)
        loader.balanced, loader.gain = (
            cast(Any, SimpleNamespace(metrics=lambda x=metrics: x)),
            Gain(),
        )
        trainer = object.__new__(Balanced)
        trainer.callback_handler = cast(Any, SimpleNamespace(train_dataloader=loader))
        logs = {"loss": 2.0}
        trainer.log(logs)
        assert logs == {"loss": 2.0, "host": 1.0, "bascule_moved_bytes": 8, **wanted}
