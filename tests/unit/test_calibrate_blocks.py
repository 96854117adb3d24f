"""Blocks that are timed: which passes run, what the user may name, and what the options refuse."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bascule.calibrate import blocks
from bascule.calibrate.options import CalibrateOptions
from bascule.calibrate.timed import Probe, seconds_of
from bascule.errors import ConfigError
from bascule.models import MMDiTConfig
from tests.helpers import own_blocks
from tests.helpers.pages import python_of

CPU = torch.device("cpu")
HERE = "tests.helpers.own_blocks"


def call_of(name: str, length: int = 8) -> blocks.BlockCall:
    (call,) = blocks.calls_of_user(name, blocks.find(name), length, CPU)
    return call


def test_passes_of_a_block_of_the_user() -> None:
    call = call_of(f"{HERE}:make")
    own_blocks.BLOCK.zero_grad()
    out = call.forward()
    assert isinstance(out, torch.Tensor) and not out.requires_grad and out.shape == (1, 8, 16)
    backward = call.backward()
    assert all(x.grad is None for x in own_blocks.BLOCK.parameters())
    backward()
    assert all(x.grad is not None for x in own_blocks.BLOCK.parameters())
    assert len(call_of(f"{HERE}:several").recompute()) == 2


def test_the_block_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [x for x in python_of("docs/calibrate.md") if "def make" in x.text]
    (tmp_path / "block_of_the_guide.py").write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    call = call_of("block_of_the_guide:make", 16)
    assert call.inputs[0].shape == (1, 16, 64)  # pyright: ignore[reportAttributeAccessIssue]
    call.backward()()


def test_our_blocks_are_one_of_each_kind() -> None:
    sizes: dict[str, Any] = {"in_channels": 4, "text_dim": 4, "vec_dim": 4, "num_heads": 1}
    config = MMDiTConfig(**sizes, d_model=8, num_double=5, num_single=3, axes_dim=(8,))
    model = blocks.block_of_each_kind(config, CPU, torch.float64)
    calls = blocks.calls_of_model(model, (0.25, 0.75, 0.125), [10, 6], torch.float64)
    assert [call.weight for call in calls] == [0.25, 0.75, 0.125]
    double, single, last = (call.forward() for call in calls)
    assert isinstance(double, tuple) and [x.shape for x in double] == [(2, 8), (14, 8)]
    assert isinstance(single, torch.Tensor) and single.shape == (16, 8)
    assert isinstance(last, torch.Tensor) and last.shape == (16, 4)
    assert len(blocks.calls_of_model(model, (0.0, 1.0, 0.0), [16], torch.float64)) == 1
    for call in calls:
        call.backward()()
    pair = model.double_blocks[0], model.single_blocks[0]
    found = [weight.grad for block in pair for weight in block.parameters()]
    assert len(found) > 10 and all(grad is not None for grad in found)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "give package.module:function"),
        (":make", "give package.module:function"),
        ("nowhere.at.all:make", "nowhere.at.all cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:missing", "has no missing"),
        (f"{HERE}:BLOCK.missing", "has no BLOCK.missing"),
        (f"{HERE}:NUMBER", "NUMBER is 5; give a function"),
        (f"{HERE}:raises", "at 8 tokens raised ValueError: no block for 8"),
        (f"{HERE}:one_thing", "must return two things"),
        (f"{HERE}:no_call", "the first thing it returns, 5, cannot be called"),
        (f"{HERE}:wrong_input", "what it returned raised"),
        (f"{HERE}:no_gradient", "no tensor with a gradient"),
    ],
)
def test_modules_that_are_none(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        call_of(name)
    told = str(error.value)
    assert message in told and told.startswith(f"--module {name}".split("'")[0][:9])
    assert "\n" not in told


def test_what_makes_a_run_ready_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("bascule.calibrate.timed.time.perf_counter", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    def prepare() -> Callable[[], None]:
        passes(100.0)
        return partial(passes, 3.0)

    probe = Probe("x", "x", "cpu", 0, 0.0, partial(passes, 7.0), 2, prepare=prepare)
    assert seconds_of(probe, CPU) == 3.0
    assert seconds_of(replace(probe, prepare=None), CPU) == 7.0


# Options


def test_lengths_are_spread_evenly_from_end_to_end() -> None:
    options = CalibrateOptions(lengths="256:16384", points=7)
    assert options.seq_lens("cpu") == [256, 512, 1024, 2048, 4096, 8192, 16384]
    assert options.message_bytes()[0] == 4096 and options.message_bytes()[-1] == 16 * 2**20
    assert CalibrateOptions().seq_lens("cuda")[-1] == 32768


def test_what_ranks_must_share_is_what_changes_their_calls() -> None:
    same = CalibrateOptions(out=Path("a.json"), json=Path("-"), limit=1.0)
    assert same.settings == CalibrateOptions().settings
    for change in (CalibrateOptions(rounds=3), CalibrateOptions(module="a:b")):
        assert change.settings != same.settings


def test_a_module_of_this_folder_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in_this_folder.py").write_text("raise ValueError")
    monkeypatch.chdir(tmp_path)
    blocks.check_name("in_this_folder:make")  # and it is not imported
