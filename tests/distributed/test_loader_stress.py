"""Many random schedules, kills and stops. `make stress` runs all of them, CI a tenth."""

import pytest

from tests.helpers.loader_cases import Schedule, check_exactly_once, check_mean, run_many
from tests.helpers.loader_checks import PLACES, check_chains, check_deaths
from tests.helpers.ranks import run_ranks

NUM_SCHEDULES = 500
NUM_KILLS = 50
NUM_STOPS = 20
PER_WORLD = 25  # each schedule runs twice; a world has less than two minutes


def check_schedules(seeds: range) -> None:
    """Exactly once, and the same in the same order with other delays."""
    for start in range(seeds.start, seeds.stop, PER_WORLD):
        num_ranks = 2 + start // PER_WORLD % 3
        some = range(start, min(start + PER_WORLD, seeds.stop))
        schedules = [(seed, Schedule.draw(seed, num_ranks)) for seed in some]
        of_rank = run_ranks(run_many, num_ranks, schedules)
        for k, (_, schedule) in enumerate(schedules):
            records = [runs[k] for runs in of_rank]
            check_exactly_once(schedule, records)
            check_mean(schedule, records)


def test_a_tenth_of_the_schedules() -> None:
    check_schedules(range(1000, 1000 + NUM_SCHEDULES // 10))


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(NUM_KILLS // 10))
def test_a_tenth_of_the_kills(seed: int) -> None:
    check_deaths(PLACES[seed % 3], 50 + seed, 2 + seed % 2)


@pytest.mark.stress
@pytest.mark.timeout(1500)
def test_all_schedules() -> None:
    check_schedules(range(2000, 2000 + NUM_SCHEDULES))


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_all_kills() -> None:
    for seed in range(NUM_KILLS):
        check_deaths(PLACES[seed % 3], 200 + seed, 2 + seed % 3)


@pytest.mark.stress
def test_all_stops() -> None:
    assert check_chains(range(300, 312)) >= NUM_STOPS
