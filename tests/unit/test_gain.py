"""The gain of a run whose steps are timed: against values by hand."""

import pytest

from bascule.data.gain import Gain


def run(
    rate: float, constant: float, works: list[tuple[float, float]], pauses: bool = False
) -> Gain:
    gain, now = Gain(), 0.0
    for before, after in works:
        now += rate * after + constant
        gain.add(before, after, 0.8 * after, now)
        if pauses:
            gain.pause()
    return gain


WORKS = [(4.0, 2.0), (6.0, 3.0), (4.0, 1.0), (9.0, 5.0), (5.0, 4.0)]


@pytest.mark.parametrize(
    ("rate", "constant", "measured"),
    [
        (2.0, 0.0, 24.0 / 13.0),  # of the steps after the first, which is not timed
        (2.0, 1.0, (2.0 * 24.0 + 4.0) / (2.0 * 13.0 + 4.0)),
        (0.0, 1.0, 1.0),  # time that does not follow the work
    ],
)
def test_seconds_scale_the_gain(rate: float, constant: float, measured: float) -> None:
    assert run(rate, constant, WORKS).metrics() == pytest.approx(
        {"imbalance": 1.25, "predicted_gain": 28.0 / 15.0, "measured_gain": measured}
    )


def test_without_times_there_is_no_measured_gain() -> None:
    assert Gain().metrics() == {}
    assert "measured_gain" not in run(1.0, 0.0, WORKS, pauses=True).metrics()
    assert "measured_gain" not in run(1.0, 0.0, [(4.0, 2.0)] * 5).metrics()
