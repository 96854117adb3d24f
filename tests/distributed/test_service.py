"""A service on ranks: each request that was accepted is done once, as by one process."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bascule.generate.options import Prompt
from bascule.generate.tiny import TINY
from bascule.serve.service import Service
from bascule.serve.status import Status, Submission
from tests.helpers.ranks import run_ranks
from tests.helpers.serving import Restless, apart, pipeline_of, with_service

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

RANKS = 4
PIXEL = 1.001 / 255


def submission(seed: int, side: int = 32, steps: int = 4, **facts: Any) -> Submission:
    sides = {"width": side, "height": side, "steps": steps}
    return Submission(prompt=Prompt(prompt=f"boat {seed}", seed=seed, **sides), **facts)


def until(condition: Callable[[], Any], timeout_s: float = 100.0) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


class Diary:
    """What a service reports of its requests."""

    def __init__(self, service: Service) -> None:
        self.service, self.news = service, list[Status]()
        service.on_change = self.news.append

    def until_ended(self, ids: Sequence[str]) -> None:
        def have_ended() -> bool:
            assert not self.service.health()
            return all(self.service.status(one).has_ended for one in ids)

        until(have_ended)


def bursts(service: Service, seed: int, num: int) -> tuple[Counter[str], float]:
    """Requests of three sizes in bursts; some are cancelled. Ends and placements; pixels apart."""
    random, diary, ids = Random(seed), Diary(service), list[str]()
    while len(ids) < num:
        many = [
            submission(len(ids) + k, random.choice((32, 64, 96)), random.choice((3, 6)))
            for k in range(min(random.randrange(1, 9), num - len(ids)))
        ]
        statuses = service.submit(many)
        assert [one.prompt for one in statuses] == [one.prompt for one in many]
        ids += [one.id for one in statuses]
        if random.random() < 0.3:
            assert service.cancel(random.choice(ids)).has_ended
        time.sleep(random.random() * 0.3)
    diary.until_ended(ids)
    counts, pipeline, most = Counter[str](), pipeline_of(TINY), 0.0
    for one in map(service.status, ids):
        counts[one.state] += 1
        if one.state == "done":
            most = max(most, apart(one, service.result(one.id), pipeline))
    places = {one: {x.ranks for x in diary.news if x.id == one and x.ranks} for one in ids}
    counts["moved"] = sum(len({len(x) for x in seen}) > 1 for seen in places.values())
    counts["paused"] = len({one.id for one in diary.news if one.state == "paused"})
    return counts, most


def in_bursts(folder: Path, seed: int, num: int) -> Any:
    make = partial(pipeline_of, TINY)
    return with_service(make, folder, bursts, seed, num, policy=Restless(seed))


@pytest.mark.slow
def test_bursts(tmp_path: Path) -> None:
    counts, most = run_ranks(in_bursts, RANKS, tmp_path, 0, 40)[0]
    assert counts["done"] + counts["cancelled"] == 40, counts
    assert min(counts["cancelled"], counts["moved"], counts["paused"]) > 0, counts
    assert most <= PIXEL
