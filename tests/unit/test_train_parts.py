"""The parts of training runs that need no ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bascule.errors import ConfigError
from bascule.machine.costs import TransformerCost
from bascule.plan.plan import plan_batch
from bascule.train.model import cost_of, model_config
from bascule.train.options import RunOptions
from bascule.train.streams import SyntheticStream

CODES = "g1b2i32f1s0,g1b1i64f1s0"


def test_the_cost_of_a_model_knows_its_heads() -> None:
    options = RunOptions(data=CODES, gamma=0.5, num_heads=6)
    config = model_config(options, SyntheticStream(CODES, rank=0, world_size=2, seed=0))
    cost = cost_of(options, config, lambda: 0, torch.device("cpu"))
    assert cost == TransformerCost(192, gamma=0.5, num_layers=4, num_heads=6)
    # Of 6 heads on 4 ranks two have two each: by hand, one sequence of 4 blocks of width 192.
    flops = 4 * (24 * 1000 * 192**2 + 0.5 * 4 * 1000**2 * 192 * 4 / 3)
    plan = plan_batch([[1000], [], [], []], "g4n1", cost)
    assert plan.loads.tolist() == pytest.approx([flops / 4 / 1e12] * 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of --photos FOLDER, --manifest TABLE and --data CODES"),
        ({"photos": Path("album"), "vae": "tiny", "data": CODES}, "give one of --photos FOLDER"),
        ({"data": CODES, "vae": "tiny"}, "--vae tiny: only photos have pixels; give --photos"),
        ({"data": CODES, "skip_bad": True}, "--skip-bad: only for --manifest"),
        ({"data": CODES, "bucket": "720p"}, "--bucket 720p: only for --manifest"),
        ({"data": CODES, "model": "wan2.1"}, "--model wan2.1: only for --manifest; --d-model"),
    ],
)
def test_what_is_wrong_is_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as met:
        RunOptions(**options).check_source()
    assert "\n" not in str(met.value)
