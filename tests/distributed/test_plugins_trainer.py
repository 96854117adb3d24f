"""A user's script for the Trainer trains alike with balancing switched on by its arguments."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs import in_a_job, script

pytestmark = pytest.mark.nightly

pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[1] / "plugins/hf_script.py"
ARGUMENTS = (
    "--per_device_train_batch_size=3 --num_train_epochs=2 --learning_rate=0.1 --optim=sgd "
    "--lr_scheduler_type=constant --max_grad_norm=0 --logging_steps=1 --save_strategy=no "
    "--disable_tqdm=True --use_cpu=True"
).split()


def with_launcher(*arguments: str) -> None:
    from bascule.plugins.__main__ import main

    sys.argv = ["-m", *arguments]
    main()


def log_of(folder: Path, program: Any, collator: str, *arguments: str) -> list[dict[str, float]]:
    done = in_a_job(program, str(SCRIPT), collator, f"--output_dir={folder}", *arguments)
    assert done.returncode == 0, done.stderr
    return [e for e in json.loads((folder / "log.json").read_text()) if "loss" in e]


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(("collator", "accumulate"), [("pads", 1), ("flattens", 2)])
def test_arguments_alone_balance(collator: str, accumulate: int, tmp_path: Path) -> None:
    more = [*ARGUMENTS, f"--gradient_accumulation_steps={accumulate}"]
    plain = log_of(tmp_path / "plain", script, collator, *more)
    ours = log_of(tmp_path / "ours", with_launcher, collator, *more, "--report_to=bascule")
    assert [e["loss"] for e in ours] == pytest.approx([e["loss"] for e in plain], rel=1e-5)
    assert len(ours) == (18 if accumulate == 1 else 10)
    assert not any("bascule_imbalance" in entry for entry in plain)
    assert ours[-1]["bascule_predicted_gain"] > 1.2
    assert 1.0 <= ours[-1]["bascule_imbalance"] < 1.5


@pytest.mark.slow
def test_a_run_goes_on_within_an_epoch(tmp_path: Path) -> None:
    more = [*ARGUMENTS[:-4], "--save_steps=4", *ARGUMENTS[-2:], "--logging_steps=1"]
    more += ["--gradient_accumulation_steps=2", "--report_to=bascule"]
    whole = log_of(tmp_path / "whole", with_launcher, "pads", *more)
    checkpoint = f"--resume_from_checkpoint={tmp_path / 'whole/checkpoint-8'}"
    again = log_of(tmp_path / "again", with_launcher, "pads", *more, checkpoint)
    assert len(whole) == len(again) == 10
    assert [e["loss"] for e in again] == [e["loss"] for e in whole]
    assert again[-1]["bascule_predicted_gain"] > 1.0
