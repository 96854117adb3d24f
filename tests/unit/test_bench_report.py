"""What `bascule bench` warns of, without ranks."""

import pytest

from bascule.cli.bench import warnings


@pytest.mark.parametrize(
    ("gamma", "fit_error", "num_steps", "said"),
    [
        (0.4, 0.1, 0, []),
        (0.0, 0.1, 0, ["gamma is 0"]),
        (0.0, None, 0, []),  # the user gave it
        (0.4, 0.1, 2, ["in 2 of 5 steps"]),
        (0.0, 0.1, 5, ["gamma is 0", "in 5 of 5 steps"]),
    ],
)
def test_warnings(gamma: float, fit_error: float | None, num_steps: int, said: list[str]) -> None:
    setting = {"gamma": gamma, "fit_error": fit_error, "topology": "g1n2"}
    lines = warnings({"setting": setting, "steps": 5, "single_binds_steps": num_steps})
    assert len(lines) == len(said)
    assert all(part in line and "\n" not in line for part, line in zip(said, lines, strict=True))


@pytest.mark.parametrize("is_loader", [False, True])
def test_the_advice_is_one_that_can_be_followed(is_loader: bool) -> None:
    setting = {"gamma": 0.4, "fit_error": None, "topology": "g1n2"}
    summary = {"setting": setting, "steps": 5, "single_binds_steps": 1}
    (line,) = warnings(summary | ({"loader": {}} if is_loader else {}))
    assert ("not --loader" in line) is is_loader
    assert "--topology" in line
