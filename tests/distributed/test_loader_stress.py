"""Many random schedules, kills and stops. `make stress` runs all of them, CI a world."""

import pytest

from tests.helpers.loader_cases import Schedule, check_schedules
from tests.helpers.loader_checks import PLACES, check_chains, check_deaths

NUM_SCHEDULES = 500
NUM_KILLS = 50
NUM_STOPS = 20
PER_WORLD = 25  # each schedule runs twice; a world has less than two minutes


def check_seeds(seeds: range) -> None:
    for start in range(seeds.start, seeds.stop, PER_WORLD):
        num_ranks = 2 + start // PER_WORLD % 3
        some = range(start, min(start + PER_WORLD, seeds.stop))
        drawn = [(seed, Schedule.draw(seed, num_ranks)) for seed in some]
        records = check_schedules(drawn, num_ranks)
        # The schedules are worth something only if samples do move, and ranks do run out.
        assert sum(record.reason == "balanced" for record in records) > len(records) // 4
        assert any(record.is_padding for record in records)
        assert any(not record.ids for record in records)


def test_a_world_of_schedules() -> None:
    check_seeds(range(1000, 1000 + PER_WORLD))


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(NUM_KILLS // 10))
def test_a_tenth_of_the_kills(seed: int) -> None:
    check_deaths(PLACES[seed % 3], 50 + seed, 2 + seed % 2)


@pytest.mark.stress
@pytest.mark.timeout(1500)
def test_all_schedules() -> None:
    check_seeds(range(2000, 2000 + NUM_SCHEDULES))


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_all_kills() -> None:
    for seed in range(NUM_KILLS):
        check_deaths(PLACES[seed % 3], 200 + seed, 2 + seed % 3)


@pytest.mark.stress
def test_all_stops() -> None:
    assert check_chains(range(300, 312)) >= NUM_STOPS
