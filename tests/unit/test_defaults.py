"""Users rely on the values of arguments that they leave out."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from bascule.attention import api, layout, mask, packed
from bascule.data import cost_tracker, loader, packs, samplers

TOKEN_FIELDS = ("input_ids", "labels", "attention_mask", "token_type_ids", "mm_token_type_ids")
NOT_NONE: dict[Callable[..., Any], dict[str, Any]] = {
    api.attention: {"is_causal": False, "options": api.AttentionOptions()},
    packed.attend_packed: {"causal": False, "scores": mask.PLAIN},
    mask.AttentionMask: {"causal": False},
    layout.SequenceLayout: {
        "ring_degree": 1,
        "ulysses_degree": 1,
        "zigzag": False,
        "replicated": (),
        "stripe": 0,
        "turn_step": layout.TURN_STEP,
        "turn_skip": 0,
    },
    packs.collate_padded: {"pad_id": 0, "ignore_index": -100, "multiple_of": 1},
    cost_tracker.CostTracker: {
        "warmup": 10,
        "discard": 2,
        "window": 50,
        "max_drift": 0.1,
        "timeout_s": 600.0,
    },
    loader.BalancedLoader: {"sync": "microbatch", "options": loader.LoaderOptions()},
    loader.LoaderOptions: {
        "ends": "drop_last",
        "min_gain": 0.02,
        "prefetch": 2,
        "tries": True,
        "pin_memory": False,
        "timeout_s": 600.0,
    },
    packs.Pack: {"fixed": False, "pad_id": 0, "ignore_index": -100, "token_fields": TOKEN_FIELDS},
    samplers.ResumableSampler: {"shuffle": True, "seed": 0},
    samplers.BalancedSampler: {"seed": 0, "options": samplers.SamplerOptions()},
    samplers.SamplerOptions: {
        "shuffle": True,
        "sync": "microbatch",
        "even_counts": True,
        "padded": False,
        "tolerance": 0.01,
    },
}


@pytest.mark.parametrize("function", NOT_NONE, ids=lambda function: function.__qualname__)
def test_what_is_not_given_is_as_documented(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    given = {one.name: one.default for one in parameters if one.default is not one.empty}
    assert {name: value for name, value in given.items() if value is not None} == NOT_NONE[function]


def test_a_loader_has_done_nothing_at_first() -> None:
    counts = loader.LoaderMetrics()
    assert not any(dataclasses.asdict(counts).values()) and counts.skipped == {}
