"""ms-swift trains alike with the plug-in, which its arguments name."""

import json
from pathlib import Path

import pytest

from tests.plugins.hosts import ROOT, chats, tiny_qwen2, torchrun

pytest.importorskip("swift", reason="ms-swift is not installed; see `make plugins`")

ARGUMENTS = (
    "--template qwen2_5 --model_type qwen2 --tuner_type full --torch_dtype float32 "
    "--attn_impl sdpa --per_device_train_batch_size 3 --num_train_epochs 2 --learning_rate 0.1 "
    "--optim sgd --lr_scheduler_type constant --warmup_ratio 0 --max_grad_norm 0 "
    "--logging_steps 1 --save_strategy no --eval_strategy no --split_dataset_ratio 0 "
    "--gradient_accumulation_steps 2 --dataloader_num_workers 0 --dataset_num_proc 1 "
    "--report_to none --use_hf true --gradient_checkpointing false --add_version false "
    "--train_dataloader_shuffle false --dataset_shuffle false"
).split()
LENGTHS = [400 if number % 8 < 3 else 20 + number % 7 for number in range(48)]
PLUGIN = ROOT / "src/bascule/plugins/ms_swift.py"


def log_of(folder: Path, *more: str) -> list[dict[str, float]]:
    (folder / "model").mkdir(parents=True)
    names = (
        "--model",
        tiny_qwen2(folder / "model"),
        "--dataset",
        chats(folder / "chats.jsonl", LENGTHS),
    )
    torchrun("-m", "swift.cli.sft", *names, *ARGUMENTS, "--output_dir", "out", *more, folder=folder)
    (log,) = (folder / "out").rglob("logging.jsonl")
    return [e for e in map(json.loads, log.read_text().splitlines()) if "loss" in e]


def test_arguments_alone_balance(tmp_path: Path) -> None:
    plain = log_of(tmp_path / "plain")
    ours = log_of(tmp_path / "ours", "--external_plugins", str(PLUGIN))
    assert len(ours) == len(plain) == 8
    # ms-swift deals sample by sample, bascule batch by batch: in order, steps have the same.
    assert [e["loss"] for e in ours] == pytest.approx([e["loss"] for e in plain], rel=1e-4)
    assert ours[-1]["bascule_predicted_gain"] > 1.2
    assert 1.0 <= ours[-1]["bascule_imbalance"] < 1.5
