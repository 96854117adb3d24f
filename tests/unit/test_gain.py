"""The gain of a run: predicted, in a Trainer's log; and measured, in simulated jobs."""

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from bascule.plan.trial import Trial, Turn

WORKS = [(4.0, 2.0), (6.0, 3.0), (4.0, 1.0), (9.0, 5.0), (5.0, 4.0)]


def job(gain: float, noise: float, steps: int, seed: int, predicted: float = 1.1) -> Any:
    """Train: a trial, the steps before it stopped moving, and the steps that stayed until then.

    Seconds of a step come three steps later, and drift to twice as much in a hundred steps.
    """
    trial, turns, random, stayed = Trial(), dict[int, Turn](), np.random.default_rng(seed), 0
    for step in range(steps):
        if (turn := turns.pop(step - 3, None)) is not None:
            seconds = math.exp(random.normal(0.0, noise)) * 2 ** (step / 100)
            trial.add(turn, seconds / (1.0 if turn.stays else gain))
        if trial.is_slower:
            return trial, step, stayed
        if (turn := trial.turn(predicted)) is not None:
            turns[step] = turn
            stayed += turn.stays
    return trial, None, stayed


def test_jobs_that_moving_makes_slower_stop_it_and_others_do_not() -> None:
    def share_stopped(gain: float, noises: tuple[float, float], steps: int) -> float:
        noise = np.random.default_rng(1).uniform(*noises, 100)
        return sum(job(gain, noise[k], steps, k)[1] is not None for k in range(100)) / 100

    assert share_stopped(1.05, (0.05, 0.2), 400) <= 0.02
    assert share_stopped(0.9, (0.05, 0.1), 60) > 0.95
    assert share_stopped(0.9, (0.05, 0.2), 100) > 0.85
    assert share_stopped(0.8, (0.05, 0.2), 60) > 0.95


def test_a_trial_measures_the_gain_with_its_error_and_costs_little() -> None:
    found = [job(1.3, 0.1, 1000, seed) for seed in range(60)]
    gains, errors = zip(*(trial.gain for trial, _, _ in found), strict=True)
    assert np.mean(gains) == pytest.approx(1.3, rel=0.02)
    assert np.mean(errors) == pytest.approx(np.std(gains), rel=0.3)
    assert max(stayed for _, _, stayed in found) <= 40
    assert job(1.3, 0.0, 1000, 0, predicted=1.6)[2] == 0  # so large a gain is not tried
    assert job(1.3, 0.0, 300, 0, predicted=1.4)[2] <= 10
    trial, _, _ = job(1.3, 0.1, 500, 0)
    again = Trial()
    again.restore(trial.state())
    assert again.state() == trial.state() and again.gain == trial.gain


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
    before, after = (sum(work) for work in zip(*WORKS, strict=True))
    wanted = {"bascule_imbalance": 1.25, "bascule_predicted_gain": before / after}
    assert state.log_history[-1] == pytest.approx(wanted)
    assert set(logs) == {"loss", *state.log_history[-1]}
