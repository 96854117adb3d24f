"""The gain of a run whose steps are timed: against values by hand, and in a Trainer's log."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bascule.data.gain import Gain

WORKS = [(4.0, 2.0), (6.0, 3.0), (4.0, 1.0), (9.0, 5.0), (5.0, 4.0)] * 5
TIMED = WORKS[1:]  # the first step has no beginning


def run(seconds: list[float], works: list[tuple[float, float]], pauses: bool = False) -> Gain:
    gain, now = Gain(), 0.0
    for spent, (before, after) in zip(seconds, works, strict=True):
        now += spent
        gain.add(before, after, 0.8 * after, now)
        if pauses:
            gain.pause()
    return gain


def on_a_line(rate: float, constant: float) -> list[float]:
    return [rate * after + constant for _, after in WORKS]


@pytest.mark.parametrize(("rate", "constant"), [(2.0, 0.0), (2.0, 1.0), (0.0, 1.0), (-1.0, 9.0)])
def test_a_line_says_what_steps_would_have_taken(rate: float, constant: float) -> None:
    """The last slows down as work shrinks, as where balancing costs more than it saves."""
    before, after = (sum(work) for work in zip(*TIMED, strict=True))
    steps = len(TIMED)
    gain = (rate * before + steps * constant) / (rate * after + steps * constant)
    found = run(on_a_line(rate, constant), WORKS).metrics()
    assert found.pop("fitted_gain_error") == pytest.approx(0.0, abs=1e-6)
    wanted = {"imbalance": 1.25, "predicted_gain": 28.0 / 15.0, "fitted_gain": gain}
    assert found == pytest.approx(wanted)
    assert (gain < 1.0) == (rate < 0.0)


def test_the_error_is_the_spread_of_fits_to_noise() -> None:
    generator = np.random.default_rng(0)
    line = np.array(on_a_line(2.0, 1.0))
    found = [
        run((line + generator.normal(0.0, 0.5, line.size)).tolist(), WORKS).metrics()
        for _ in range(400)
    ]
    spread = np.std([one["fitted_gain"] for one in found])
    assert np.mean([one["fitted_gain_error"] for one in found]) == pytest.approx(spread, rel=0.1)


def test_few_or_equal_steps_have_no_fit() -> None:
    seconds = on_a_line(2.0, 1.0)
    assert Gain().metrics() == {}
    assert "fitted_gain" not in run(seconds, WORKS, pauses=True).metrics()
    assert "fitted_gain" not in run(seconds, [(4.0, 2.0)] * len(WORKS)).metrics()
    for num_steps in (20, 21):  # of which the first is not timed
        logged = run(seconds[:num_steps], WORKS[:num_steps]).metrics()
        assert ("fitted_gain" in logged) == (num_steps == 21)


def test_a_trainer_logs_it() -> None:
    pytest.importorskip("transformers")
    from bascule.plugins.gain_log import GainLog

    log, logs = GainLog(), {"loss": 1.0}
    steps = [(before, after, 0.8 * after) for before, after in WORKS]
    log.dealt = cast(Any, SimpleNamespace(steps=steps, num_steps=len(WORKS)))
    state = SimpleNamespace(global_step=0, log_history=[{}])
    for step in range(1, len(WORKS) + 1):
        state.global_step = step
        log.on_step_end(None, state, None)
    log.on_log(None, state, None, logs=logs)
    names = {"imbalance", "predicted_gain", "fitted_gain", "fitted_gain_error"}
    assert set(state.log_history[-1]) == {f"bascule_{name}" for name in names}
    assert set(logs) == {"loss", *state.log_history[-1]}
