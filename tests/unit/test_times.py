"""Seconds of requests by degree: predicted, and corrected by what was measured."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bascule.generate.options import Prompt
from bascule.serve.times import RequestSize, Times

LARGE, SMALL, TINY = RequestSize(4096, 1), RequestSize(1024, 2), RequestSize(16, 1)


def times(compiles: bool = False, **factors: int) -> Times:
    config = SimpleNamespace(num_attention_heads=24, attention_head_dim=128, num_layers=57)
    model: Any = torch.nn.Identity()
    model.config = config
    made = SimpleNamespace(transformer=model, **factors)
    return Times(made, [1, 2, 4], most=4, compiles=compiles)


def takes(**defaults: object) -> dict[str, Any]:
    return {name: SimpleNamespace(default=value) for name, value in defaults.items()}


CLIP = {"width": 832, "height": 480, "num_frames": 81, "negative_prompt": None}
SPATIAL = {"vae_scale_factor_spatial": 8, "vae_scale_factor_temporal": 4}


@pytest.mark.parametrize(
    ("factors", "defaults", "settings", "form"),
    [
        ({"vae_scale_factor": 8}, {"height": None}, {"width": 512, "height": 768}, (32 * 48, 1)),
        ({"vae_scale_factor": 32}, {}, {}, (32 * 32, 1)),
        (SPATIAL, CLIP | {"guidance_scale": 5.0}, {}, (52 * 30 * 21, 2)),
    ],
)
def test_forms(factors: Any, defaults: Any, settings: Any, form: tuple[int, int]) -> None:
    assert times(**factors).request_size(Prompt(prompt="a", **settings), takes(**defaults)) == form


def test_what_is_not_measured_scales_as_what_is() -> None:
    one = times()
    large, small = one.step_s(LARGE), one.step_s(SMALL)
    before = dict(large), dict(small)
    assert before[0][1] > before[0][2] > before[0][4] > 0
    for seconds in (9.0, 2.0, 2.0):
        one.measure(LARGE, 1, seconds)  # the median counts
    ratio = 2.0 / before[0][1]
    assert large == pytest.approx({d: s * ratio for d, s in before[0].items()})
    assert small == pytest.approx({d: s * ratio for d, s in before[1].items()})
    one.measure(LARGE, 4, 1.5)
    assert (large[1], large[4]) == pytest.approx((2.0, 1.5))
    one.measure(SMALL, 2, 0.5)
    assert small == pytest.approx({d: s * 0.5 / before[1][2] for d, s in before[1].items()})
    assert large[2] == pytest.approx(before[0][2] * ratio)

    assert one.once_s(LARGE) == min(large.values())
    one.measure(SMALL, 0, 0.25)
    assert one.once_s(LARGE) == one.once_s(SMALL) == 0.25
    one.measure(LARGE, 0, 0.75)
    assert one.once_s(LARGE) == 0.75


def test_a_degree_that_was_not_tried_is_taken_to_pay() -> None:
    one = times()
    tiny = one.step_s(TINY)
    assert tiny[1] < min(tiny[2], tiny[4])  # launches and wires of another machine
    one.measure(TINY, 1, 1.0)
    assert tiny == pytest.approx({1: 1.0, 2: 0.75, 4: 0.75**2})
    one.measure(TINY, 2, 2.0)
    assert tiny == pytest.approx({1: 1.0, 2: 2.0, 4: 1.5})


def test_a_step_that_compiles_is_left_out() -> None:
    one = times(compiles=True)
    large = one.step_s(LARGE)
    before = dict(large)
    one.measure(LARGE, 2, 60.0)
    assert large == before
    one.measure(LARGE, 2, 0.5)
    assert large[2] == 0.5
    for graph in ("other ranks", "another LoRA"):
        one.measure(LARGE, 2, 60.0, graph=graph)
        assert large[2] == 0.5
    one.measure(LARGE, 0, 9.0)  # encoding and decoding are not compiled
    assert one.once_s(LARGE) == 9.0


def test_seconds_of_batches() -> None:
    """Half a step is shared until a batch was measured; smaller sizes share at least as much."""
    one = times()
    large, small = one.batch_s(LARGE), one.batch_s(SMALL)
    for table, step_s in ((large, one.step_s(LARGE)), (small, one.step_s(SMALL))):
        assert {d: curve[0] for d, curve in table.items()} == step_s
        for degree, alone in step_s.items():
            assert table[degree] == pytest.approx([alone, 1.5 * alone, 2 * alone, 2.5 * alone])
    one.measure(LARGE, 1, 2.0)
    one.measure(LARGE, 1, 2.5, batch=2)  # 3/4 of a step are shared
    assert large[1] == pytest.approx([2.0, 2.5, 3.0, 3.5])
    one.measure(LARGE, 1, 4.4, batch=4)
    assert large[1][2:] == pytest.approx([3.0, 4.4])
    alone = one.step_s(LARGE)[4]
    assert large[4] == pytest.approx([alone, 1.25 * alone, 1.5 * alone, alone * (4 - 3 * 0.6)])
    assert small[1][1] == pytest.approx(1.5 * small[1][0])
    one.measure(SMALL, 2, 1.0)
    one.measure(SMALL, 2, 2.1, batch=2)  # it shares nothing, so that larger ones do not either
    other = one.batch_s(RequestSize(2048, 1))
    assert all(curve[1] == pytest.approx(2.1 * curve[0]) for curve in other.values())
    tiny = one.batch_s(TINY)
    assert all(curve[1] == pytest.approx(1.5 * curve[0]) for curve in tiny.values())
    assert large[1][1] == pytest.approx(2.5)  # as measured
    # A degree that ran in a batch first.
    one.measure(TINY, 4, 3.0, batch=3)
    assert tiny[4] == pytest.approx([1.5, 2.25, 3.0, 3.75])


def test_few_forms_are_remembered() -> None:
    one = times()
    one.measure(LARGE, 1, 2.0)
    for num_tokens in range(1, 201):
        one.measure(RequestSize(num_tokens, 1), 0, 1.0)
    assert max(map(len, (one._tables, one._predicted, one._measured, one._curves))) == 64
