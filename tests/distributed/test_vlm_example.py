"""The example of a vision-language model, and the guide to the loader, as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bascule import TransformerCost
from tests.helpers.ranks import run_ranks
from tests.helpers.trainer_world import join_world

pytest.importorskip("transformers")
pytest.importorskip("skimage")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_vlm.py"
GUIDE = ROOT / "docs" / "data_loader.md"


def run_example(*flags: str) -> tuple[list[tuple[float, float, float]], str]:
    """Loss, imbalance with and imbalance as loaded of each step on two ranks; and the summary."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(EXAMPLE), *flags],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    line = re.compile(
        r"step \d+: loss ([\d.]+), imbalance .* ([\d.]+) instead of ([\d.]+), waited .* ms"
    )
    steps = [(float(a), float(b), float(c)) for a, b, c in line.findall(done.stdout)]
    return steps, done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_example_trains_alike_without_balancing() -> None:
    balanced, said = run_example()
    plain, said_plain = run_example("--no-balance")
    losses = [loss for loss, _, _ in balanced]
    assert len(losses) == len(plain) == 20
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), losses
    for (ours, after, before), (theirs, same, loaded) in zip(balanced, plain, strict=True):
        assert abs(ours - theirs) < 1e-4 * theirs
        assert before == same == loaded
        assert after <= before
    mean = sum(after for _, after, _ in balanced) / 20
    assert mean - 1 < 0.6 * (sum(before for _, _, before in balanced) / 20 - 1)
    assert "samples moved in 0 of 20 steps" in said_plain
    assert not said.startswith("samples moved in 0 ")


def blocks_of_the_guide() -> list[str]:
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)


def run_guide(blocks: list[str], folder: str) -> dict[str, Any]:
    """Run the blocks in their order, with what they take for granted; what they left."""
    from torch.nn.parallel import DistributedDataParallel
    from transformers import Qwen2Config, Qwen2ForCausalLM, TrainingArguments

    join_world()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model: Any = Qwen2ForCausalLM(config)
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    lens = torch.randint(2, 60, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    names: dict[str, Any] = {
        "dataset": [
            {"input_ids": torch.arange(n) % 32, "labels": torch.arange(n) % 32} for n in lens
        ],
        "model": DistributedDataParallel(model),
        "bare_model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "cost": TransformerCost(16),
        "rank": dist.get_rank(),
        "num_ranks": dist.get_world_size(),
        "args": args,
        "path": f"{folder}/loader.pt",
    }
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    return {name: type(value).__name__ for name, value in names.items()}


def test_the_blocks_of_the_guide_run(tmp_path: Path) -> None:
    blocks = blocks_of_the_guide()
    assert len(blocks) >= 6
    for left in run_ranks(run_guide, 2, blocks, str(tmp_path)):
        assert left["loader"] == "BalancedLoader"
        assert left["trainer"] == "BalancedTrainer"
