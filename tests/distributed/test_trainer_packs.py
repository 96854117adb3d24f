"""The Trainer on packs, and with every end of an epoch: steps are those of one process.

Two processes, of which the first reads long samples and the other short ones: alone, it would have
many packs and the other one.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.data.loader import LoaderOptions
from bascule.data.packs import Pack, make_pack, unpack
from tests.helpers.ranks import on_ranks, raised_by
from tests.helpers.trainer_runs import (
    COST,
    Texts,
    make_model,
    make_trainer,
    num_asked,
    shared_folder,
    train,
)

pytest.importorskip("transformers")
BUDGET, NUM_SAMPLES = 100, 19
Text = tuple[tuple[int, ...], tuple[int, ...]]  # tokens and labels


class Uneven(Texts):
    """The first process reads long samples, the other short ones."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(7)
        lengths = [(2, 9) if place % 2 else (60, 90) for place in range(NUM_SAMPLES)]
        self.samples = [self.make(*bounds) for bounds in lengths]


class ReadyMade(Uneven):
    """The same, in packs of up to two samples."""

    def __init__(self) -> None:
        super().__init__()
        texts = [{k: s[k] for k in ("input_ids", "labels")} for s in self.samples]
        pairs = [texts[i : i + 2] for i in range(0, NUM_SAMPLES, 2)]
        self.samples = [make_pack(pair, Pack(tokens=BUDGET)) for pair in pairs]


def texts_of(dataset: Texts) -> list[Text]:
    return [as_text(s["input_ids"], s["labels"]) for s in dataset.samples]


def as_text(ids: Tensor, labels: Tensor) -> Text:
    """A sample, without the label of its first token, which no one is asked for."""
    return tuple(ids.tolist()), (-100, *labels.tolist()[1:])


def texts_in(inputs: dict[str, Any]) -> list[Text]:
    """The samples of the inputs of a model, without padding: rows, or a pack."""
    ids, labels = inputs["input_ids"], inputs["labels"]
    if "position_ids" not in inputs:
        lens = inputs["attention_mask"].sum(1).tolist()
        return [as_text(x[:n], y[:n]) for x, y, n in zip(ids, labels, lens, strict=True)]
    starts = (inputs["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    bounds = itertools.pairwise([*starts, ids.shape[1]])
    return [as_text(ids[0, a:b], labels[0, a:b]) for a, b in bounds]


def recording(base: Any) -> Any:
    """A Trainer that notes the texts of each microbatch, and of each step."""

    class Recording(base):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            given = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
            is_padding = not inputs["bascule_aside"].loss_scale
            texts = [] if is_padding else texts_in(given)
            self.__dict__.setdefault("seen", []).append((self.state.global_step, texts))
            return super().training_step(model, inputs, *args)

    return Recording


def with_own_loss(base: Any) -> Any:
    """A Trainer whose loss is the mean over the labels of a microbatch."""

    class OwnLoss(base):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            self.loss_is_scaled_for_ga = False
            return model(**inputs).loss * self.loss_scale

    return OwnLoss


def alone(kind: str, steps: Sequence[Sequence[Text]]) -> tuple[list[float], Tensor]:
    """Losses and weights of one process, which takes each sample by itself."""
    model: Any = make_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for texts in steps:
        count = torch.tensor(sum(label != -100 for _, labels in texts for label in labels))
        total = 0.0
        for ids, labels in texts:
            loss = model(
                input_ids=torch.tensor([ids]),
                labels=torch.tensor([labels]),
                num_items_in_batch=count,
            ).loss
            loss.backward()
            total += float(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


def gathered_from(trainer: Any) -> list[list[tuple[int, list[Text]]]]:
    """(step, texts) of each microbatch of each process."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, trainer.seen)
    return gathered


def trained(kind: str, folder: str, *, owns_loss: bool = False, **given: Any) -> dict[str, Any]:
    """A run, the samples of its steps over all processes, and the same of one process."""
    trainer = make_trainer(folder, kind, balanced=True, **given)
    made = with_own_loss(type(trainer)) if owns_loss else type(trainer)
    trainer.__class__ = recording(made)
    losses, epochs, weights = train(trainer)
    gathered = gathered_from(trainer)
    asked = [
        [(step, [t for t in texts if any(y != -100 for y in t[1])]) for step, texts in seen]
        for seen in gathered
    ]
    steps = [
        [text for seen in asked for at, texts in seen for text in texts if at == step]
        for step in range(len(losses))
    ]
    return {
        "run": (losses, weights),
        "alone": alone(kind, steps),
        "epochs": epochs,
        "steps": steps,
        "microbatches": [[len(texts) for _, texts in seen] for seen in asked],
        "tokens": [[sum(len(ids) for ids, _ in texts) for _, texts in seen] for seen in gathered],
        "did": trainer.balanced_loader.metrics(),
        "replaced": [name for name, x in trainer.model.named_modules() if "forward" in vars(x)],
    }


@pytest.mark.some(3)
@pytest.mark.slow
@pytest.mark.parametrize("case", ["finish", "own loss", "ready-made", "no packs"])
@on_ranks(2)
def test_steps_are_those_of_one_process(case: str) -> None:
    packed = {"dataset": Uneven(), "max_steps": 12}
    finish, asked = LoaderOptions(ends="finish"), LoaderOptions(weight_fn=num_asked)
    cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "finish": ("qwen2", {"pack": BUDGET, "options": finish}, packed),
        "own loss": ("llama", {"pack": Pack(BUDGET, fixed=True), "options": asked}, packed),
        "ready-made": (
            "qwen2",
            {"options": LoaderOptions(unpack=unpack)},
            {"dataset": ReadyMade(), "per_device_train_batch_size": 1},
        ),
        # Of 12 samples of the last step there are 7; one process reads 4, the other 3 of them.
        "no packs": ("qwen2", {}, {"dataset": Texts(43)}),
    }
    kind, balance, given = cases[case]
    if case != "ready-made":
        given["gradient_accumulation_steps"] = 2
    given["balance"] = {"cost": COST, **balance}
    with shared_folder() as folder:
        run = trained(kind, folder, owns_loss=case == "own loss", **given)
    check_steps(run)
    steps, epochs = run["steps"], run["epochs"]
    of_first = [
        text for step, epoch in zip(steps, epochs, strict=True) if epoch <= 1.0 for text in step
    ]
    texts = texts_of(Texts(43) if case == "no packs" else Uneven())
    assert Counter(of_first) == Counter(texts) and 1.0 in epochs
    assert epochs == sorted(epochs) and epochs[-1] > 1.5
    first, second = run["microbatches"]
    assert len(first) == len(second)
    assert run["did"]["applied"] > 0 and run["did"]["dropped_samples"] == 0
    if case == "finish":
        assert 0 in first + second
        assert max(map(max, run["tokens"])) <= BUDGET
        assert run["did"]["padded"] == 0


def check_steps(run: dict[str, Any]) -> None:
    (losses, weights), (wanted, wanted_weights) = run["run"], run["alone"]
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert torch.allclose(weights, wanted_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("ends", ["finish", "drop_last"])
@on_ranks(2)
def test_packs_go_on_in_an_epoch_and_where_one_ended(ends: str) -> None:
    """A whole run; then one that goes on in an epoch, where one ended, and one without packs."""
    given: dict[str, Any] = {
        "max_steps": 9,
        "gradient_accumulation_steps": 2,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    balance: dict[str, Any] = {"cost": COST, "pack": BUDGET}
    if ends == "finish":
        given["dataset"] = Uneven()
        balance["options"] = LoaderOptions(ends=ends)
    else:
        given |= {"num_samples": 39, "train_sampling_strategy": "random"}
        given["dataloader_drop_last"] = True

    def run(folder: str, **how: Any) -> Any:
        trainer = make_trainer(folder, "qwen2", balanced=True, **given, balance=balance)
        trainer.__class__ = recording(type(trainer))
        losses, epochs, weights = train(trainer, **how)
        seen = [entry for seen in gathered_from(trainer) for entry in seen]
        texts = [(epochs[step] <= 1.0, step, text) for step, texts in seen for text in texts]
        return {"losses": losses, "epochs": epochs, "weights": weights, "texts": texts}

    with shared_folder() as folder:
        whole = run(f"{folder}/0")
        ended = sum(epoch <= 1.0 for epoch in whole["epochs"])
        again, within = (
            run(f"{folder}/{stop}", resume_from_checkpoint=f"{folder}/0/checkpoint-{stop}")
            for stop in (ended, ended - 2)
        )
        other = make_trainer(f"{folder}/other", "qwen2", balanced=True, **given)
        refused = raised_by(other.train, resume_from_checkpoint=f"{folder}/0/checkpoint-1")[1]
    assert 2 < ended < len(whole["losses"]) == 9
    assert (whole["epochs"][ended - 1] == 1.0) == (ends == "finish")
    assert again["losses"] == whole["losses"] and again["epochs"] == whole["epochs"]
    assert torch.equal(again["weights"], whole["weights"])  # bit for bit
    # In an epoch, the samples that are left are dealt anew: none is lost or repeated.
    before = [text for _, step, text in whole["texts"] if step < ended - 2]
    after = [text for is_first, _, text in within["texts"] if is_first]
    texts = Counter(before + after)
    assert set(texts.values()) == {1} and before and after
    if ends == "finish":
        assert texts == Counter(texts_of(Uneven()))
    epochs = within["epochs"]
    assert len(epochs) == 9 and epochs == sorted(epochs) and epochs[-1] > 1.0
    assert "written with packs of unknown number" in refused


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_next"])  # the other has gated delta layers
@on_ranks(1)
def test_one_process_packs_too_and_must_know_when_to_stop(kind: str) -> None:
    balance = {"cost": COST, "pack": BUDGET}
    given: dict[str, Any] = {"max_steps": 3, "dataset": Uneven(), "balance": balance}
    with shared_folder() as folder:
        run = trained(kind, folder, **given)
        forever = make_trainer(folder, kind, balanced=True, **(given | {"max_steps": -1}))
        assert "max_steps=-1 with BalanceConfig(pack=..)" in raised_by(forever.train)[1]
    check_steps(run)
    assert max(run["microbatches"][0]) > 1 and run["replaced"] == []
