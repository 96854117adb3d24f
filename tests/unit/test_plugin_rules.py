"""What the callback for transformers' Trainer takes and refuses, and plug-ins by their names."""

import os
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from bascule.errors import ConfigError
from bascule.machine.costs import TransformerCost
from bascule.plugins.hf_trainer import BalanceCallback, cost_of, rules_of


class Counts(nn.Module):
    def forward(self, input_ids: Any, **kwargs: Any) -> None: ...


class Means(nn.Module):
    def forward(self, input_ids: Any) -> None: ...


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


def arguments(**others: Any) -> Any:
    usual = {"train_batch_size": 3, "gradient_accumulation_steps": 2, "fsdp": [], "world_size": 2}
    usual |= {"deepspeed": None, "average_tokens_across_devices": True}
    return SimpleNamespace(**usual | others)


@pytest.mark.parametrize(
    ("model", "others", "even", "sync"),
    [
        (Counts(), {}, False, "step"),
        (Means(), {"average_tokens_across_devices": False}, True, "step"),
        (Counts(), {"fsdp": ["full_shard"]}, False, "microbatch"),
        (Means(), {"deepspeed": "zero3.json"}, True, "microbatch"),
    ],
)
def test_the_loss_and_the_wrapper_decide(
    model: nn.Module, others: dict[str, Any], even: bool, sync: str
) -> None:
    rules = rules_of(arguments(**others), model, num_ranks=4, padded=True)
    assert (rules.even_counts, rules.sync, rules.shape.full) == (even, sync, 24)


def test_the_cost_is_that_of_the_model() -> None:
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=64, num_hidden_layers=3))
    assert cost_of(model) == TransformerCost(64, num_layers=3)
    with pytest.raises(ConfigError, match="Means has no config"):
        cost_of(Means())


def test_what_cannot_be_balanced_is_refused() -> None:
    with pytest.raises(ConfigError, match="average_tokens_across_devices=False"):
        rules_of(arguments(average_tokens_across_devices=False), Counts(), num_ranks=2, padded=True)
    for data in (Stream(), [1, 2, 3]):  # neither was prepared by accelerate
        loader: Any = DataLoader(data)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ConfigError, match="even_batches"):
            of_run: Any = {"model": Counts(), "train_dataloader": loader}
            BalanceCallback().on_train_begin(arguments(), None, None, **of_run)


def launched(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "bascule.plugins", *arguments]
    own = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True)


def test_a_plug_in_of_another_package_is_started_by_its_name(tmp_path: Path) -> None:
    """An installed package is its folder beside a folder of facts about it."""
    (tmp_path / "theirs.py").write_text(
        "import contextlib\n\n"
        "@contextlib.contextmanager\n"
        "def switched_on():\n"
        "    print('on')\n"
        "    yield\n"
        "    print('off')\n"
    )
    (facts := tmp_path / "theirs-1.0.dist-info").mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[bascule.plugins]\ntheirs = theirs:switched_on\n")
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv)\n")
    done = launched(tmp_path, "theirs", "train.py", "--steps", "3")
    assert done.stdout.splitlines() == ["on", "['train.py', '--steps', '3']", "off"], done.stderr
    for arguments, words in {
        ("their", "train.py"): "there is no script their; the plug-ins are ",
        ("theirs", "eval.py"): "there is no script eval.py",
        ("theirs",): "there is no script .; the plug-ins are ",
    }.items():
        done = launched(tmp_path, *arguments)
        assert done.returncode == 1 and words in done.stderr, done.stderr


def test_the_plug_ins_of_bascule_have_names() -> None:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    plugins = declared["project"]["entry-points"]["bascule.plugins"]
    assert plugins.keys() == {"megatron", "transformers"}
    assert all(callable(pkgutil.resolve_name(place)) for place in plugins.values())
