"""The Trainer of transformers and accelerate train alike with and without balancing.

Two processes. Samples come in an order that gives both runs the same samples in each step; their
numbers of tokens differ by up to a hundred times, and so do those of the two processes.
"""

import copy
import json
import tempfile
import threading
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from bascule.data import cost_tracker
from bascule.data.loader import BalancedLoader, LoaderOptions
from bascule.data.packs import collate_padded
from bascule.data.samplers import ResumableSampler
from bascule.errors import ConfigError
from tests.helpers.jobs import join_trainer_world
from tests.helpers.ranks import on_ranks, raised_by, run_ranks, run_to_the_end
from tests.helpers.trainer_runs import (
    BATCH_SIZE,
    COST,
    Texts,
    make_model,
    make_trainer,
    num_asked,
    shared_folder,
    train,
)

pytest.importorskip("transformers")


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["qwen2", "scorer"])
@on_ranks(2)
def test_trains_like_the_trainer(kind: str, accumulate: int) -> None:
    given = {"gradient_accumulation_steps": accumulate}
    with shared_folder() as folder:
        losses, epochs, weights = train(make_trainer(folder, kind, balanced=False, **given))
        trainer = make_trainer(folder, kind, balanced=True, **given)
        ours, our_epochs, our_weights = train(trainer)
    assert len(losses) == 16 // accumulate
    assert ours == pytest.approx(losses, rel=1e-5)
    assert our_epochs == pytest.approx(epochs)
    assert torch.allclose(our_weights, weights, rtol=1e-5, atol=1e-6)
    did = trainer.balanced_loader.metrics()
    assert did["applied"] > 0.7 * did["steps"]
    assert did["predicted_after"] < 0.8 * did["predicted_before"]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    gain = did["predicted_before"] / did["predicted_after"]
    assert logged["bascule_predicted_gain"] == pytest.approx(gain)
    assert logged["bascule_moved_bytes"] == did["sent_bytes"]
    assert 1.0 <= logged["bascule_imbalance"] < 1.5


@pytest.mark.some(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stops", "given", "per_epoch"),
    [
        ("qwen2", [1, 3], {}, 4),
        ("qwen2", [4], {}, 4),
        ("qwen2", [5], {"dataloader_drop_last": True}, 3),
        ("scorer", [2], {"eval_strategy": "steps", "eval_steps": 3}, 4),
        ("scorer", [7], {"max_steps": 9, "restore_callback_states_from_checkpoint": True}, 4),
    ],
)
@on_ranks(2)
def test_a_resumed_run_equals_the_whole(
    kind: str, stops: list[int], given: dict[str, Any], per_epoch: int
) -> None:
    """A whole run, and one that is stopped after these steps and goes on from checkpoints."""
    given = {
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "random",
        "num_samples": 43,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 1,
    } | given
    with shared_folder() as folder:
        whole = again = train(make_trainer(f"{folder}/0", kind, balanced=True, **given))
        for number, stop in enumerate(stops):
            trainer = make_trainer(f"{folder}/{number + 1}", kind, balanced=True, **given)
            again = train(trainer, resume_from_checkpoint=f"{folder}/{number}/checkpoint-{stop}")
        checkpoint = Path(folder, f"{len(stops) - 1}/checkpoint-{stops[-1]}")
        state = json.loads((checkpoint / "trainer_state.json").read_text())
    (losses, epochs, weights), (ours, our_epochs, our_weights) = whole, again
    assert len(losses) == given.get("max_steps", 2 * per_epoch)
    assert ours == losses  # bit for bit; the log of the first run comes with the checkpoint
    assert our_epochs == pytest.approx(epochs)
    assert torch.equal(our_weights, weights)
    progress = state["stateful_callbacks"]["LoaderProgress"]["attributes"]["progress"]
    last = stops[-1] - 1
    assert (progress["epoch"], progress["step"]) == (last // per_epoch, last % per_epoch + 1)
    assert len(progress["history"]) == len(stops) - 1


def known_seconds(unit: Any) -> float:
    """What a step takes on this rank, in place of a clock that sees other work of the machine."""
    lens = unit.seq_lens[dist.get_rank()]
    return float(1e-3 + (1e-6 * lens**2 + 1e-4 * lens).sum())


@mock.patch.object(cost_tracker._Unit, "seconds", known_seconds)  # pyright: ignore[reportPrivateUsage]
def learned() -> dict[str, Any]:
    """Costs learned in a run, in steps of two microbatches; and again from its checkpoint."""
    given = {
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 6,
        "save_strategy": "steps",
        "save_steps": 23,
        "balance": {"learns": True},
    }
    with shared_folder() as folder:
        plain = train(make_trainer(folder, "qwen2", balanced=False, **given))
        trainer = make_trainer(folder, "qwen2", balanced=True, **given)
        losses = train(trainer)[0]
        again = make_trainer(folder, "qwen2", balanced=True, **given)
        train(again, resume_from_checkpoint=f"{folder}/checkpoint-23")
    return {
        "losses": (losses, plain[0]),
        "sync": trainer.balanced_loader.rules.sync,
        "costs": (trainer.cost_tracker.state_dict(), again.cost_tracker.state_dict()),
        "fits": trainer.cost_tracker.num_fits,
    }


@pytest.mark.slow
def test_costs_are_learned_on_the_job_and_saved() -> None:
    first, second = run_ranks(learned, 2)
    assert first["costs"] == second["costs"]
    for run in (first, second):
        losses, plain = run["losses"]
        assert len(losses) == 24 and losses == pytest.approx(plain, rel=1e-5)
        assert run["sync"] == "step" and run["fits"] == 1
        assert run["costs"][0] == run["costs"][1]
        quadratic, linear, *_ = run["costs"][0]["cost"]
        assert quadratic == pytest.approx(1e-6, rel=1e-3) and linear == pytest.approx(1e-4, rel=0.1)


def other_losses() -> tuple[list[str], list[list[float]]]:
    """Refusals of a loss without the scale, and of samples that a host chooses; losses of hosts."""
    from transformers import Trainer

    class Own(Trainer):
        scales = False

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            mean = model(**inputs)["loss"]
            return mean * cast(Any, self).loss_scale if self.scales else mean

    class Asked(Trainer):
        """As GRPOTrainer of TRL; others make outputs by another pass of the model."""

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            assert not (args[2] if len(args) > 2 else kwargs.get("return_outputs"))
            return super().compute_loss(*args, **kwargs)

    class Repeats(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return [0, 0, 1, 1]

    class Loads(Trainer):
        def get_train_dataloader(self) -> Any:
            return [{}]

    hosts = (None, None, None, Asked, Repeats, Loads)
    with shared_folder() as folder:
        # The loss of one's own stands before the mixin, as in `class T(BalancedTrainerMixin, ..)`.
        runs = [
            make_trainer(folder, "scorer", balanced=True, num_train_epochs=1, base=host)
            for host in hosts
        ]
        for run, scales in zip(runs, (False, True), strict=False):
            run.__class__ = type("Own", (Own, type(run)), {"scales": scales})
        refused = [raised_by(run.train)[1] for run in (runs[0], *runs[4:])]
        return refused, [train(run)[0] for run in runs[1:4]]


def test_hosts_with_a_way_of_their_own() -> None:
    for (loss, sampler, loads), (ours, expected, asked) in run_ranks(other_losses, 2):
        assert "Own.compute_loss" in loss and "self.loss_scale" in loss
        for text in (sampler, loads):
            assert "chooses its training samples in a way of its own, which balancing" in text
        assert ours == expected == asked


def fails_alone() -> None:
    join_trainer_world()
    from transformers import Trainer

    class Failing(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() == 1 and self.state.global_step == 1:
                raise ZeroDivisionError("in the training step")
            return super().training_step(*args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        make_trainer(folder, "qwen2", balanced=True, base=Failing).train()


def test_other_processes_learn_why_one_fails() -> None:
    """They wait for it in the gradients; the Trainer's loop, with its iterator, stays alive."""
    other, one = run_to_the_end(fails_alone, 2)
    reason = "ZeroDivisionError: in the training step"
    assert one.error is not None and one.error.rstrip().endswith(reason), one.error
    assert other.error is not None and "Timed out" not in other.error, other.error
    assert f"rank 1 of group 'loader' left the iteration with {reason}" in other.error, other.error


def trains_more_epochs_than_others() -> None:
    join_trainer_world()
    with tempfile.TemporaryDirectory() as folder:
        epochs = 1 + dist.get_rank()
        options = {"num_train_epochs": epochs, "ddp_timeout": 4}
        make_trainer(folder, "qwen2", balanced=True, num_samples=12, **options).train()
        if dist.get_rank() == 0:
            threading.Event().wait(30.0)  # it lives on, and does nothing


def test_others_are_waited_for_as_long_as_the_trainer_says() -> None:
    _, waiting = run_to_the_end(trains_more_epochs_than_others, 2, timeout_s=50.0)
    assert waiting.error is not None and "beginning an iteration" in waiting.error, waiting.error


@on_ranks(1)
def test_one_process_trains_as_before(tmp_path: Path) -> None:
    dist.destroy_process_group()
    trainer = make_trainer(str(tmp_path), "qwen2", balanced=True, max_steps=2)
    trainer.train()
    assert trainer.balanced_loader is None
    with pytest.raises(ConfigError, match="balance"):
        type(trainer)(model=trainer.model, args=trainer.args, balance=COST)
    assert not trainer.args.ignore_data_skip


@on_ranks(1)
def test_the_scale_of_a_loss_ends_with_its_training_step(tmp_path: Path) -> None:
    from bascule.transformers.trainer import ASIDE, Aside

    dist.destroy_process_group()
    trainer = make_trainer(str(tmp_path), "scorer", balanced=True, max_steps=1)
    trainer.train()
    inputs = next(iter(trainer.get_train_dataloader()))
    plain = trainer.training_step(trainer.model, dict(inputs))
    scaled = trainer.training_step(trainer.model, {**inputs, ASIDE: Aside(0.5, {})})
    assert float(scaled) == pytest.approx(0.5 * float(plain))
    assert trainer.loss_scale == 1.0


@pytest.mark.some(1)
@pytest.mark.parametrize("accumulate", [1, 2])
@on_ranks(2)
def test_trains_with_accelerate(accumulate: int) -> None:
    """The recipe of docs/data_loader.md; stops in the middle, and goes on from a checkpoint."""
    from accelerate import Accelerator

    join_trainer_world()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    plain = make_model("qwen2")
    alone = copy.deepcopy(plain)
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    texts = [{k: s[k] for k in ("input_ids", "labels")} for s in Texts(48).samples]
    sampler = ResumableSampler(len(texts), rank=dist.get_rank(), num_ranks=2)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    loader = BalancedLoader(
        DataLoader(texts, batch_size=BATCH_SIZE, sampler=sampler, collate_fn=collate_padded),  # pyright: ignore[reportArgumentType]
        cost=COST,
        accumulate=accumulate,
        options=LoaderOptions(weight_fn=num_asked),
    )
    accelerator.register_for_checkpointing(loader)
    losses: list[float] = []

    def run(folder: str, stop: int | None) -> None:
        total = 0.0
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch.data).loss * batch.loss_scale
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / accumulate
            if batch.microbatch == accumulate - 1:
                losses.append(float(accelerator.reduce(torch.tensor(total), "mean")))  # pyright: ignore[reportArgumentType]
                total = 0.0
                if len(losses) == stop:
                    accelerator.save_state(folder)
                    break

    with shared_folder() as folder:
        run(folder, 4 // accumulate)
        for parameter in model.parameters():
            parameter.data.zero_()
        accelerator.load_state(folder)
        run(folder, None)
    order = np.arange(48)
    np.random.default_rng([0, 0]).shuffle(order)
    expected: list[float] = []
    for chosen in np.split(order, 8 // accumulate):
        loss = alone(**collate_padded([texts[i] for i in chosen])).loss
        loss.backward()
        alone_optimizer.step()
        alone_optimizer.zero_grad()
        expected.append(loss.item())
    pairs = zip(accelerator.unwrap_model(model).parameters(), alone.parameters(), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-5
    assert len(losses) == 8 // accumulate and losses == pytest.approx(expected, rel=1e-5)
    assert loader.metrics()["applied"] > 0
