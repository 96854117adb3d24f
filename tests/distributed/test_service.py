"""A service on ranks: each request that was accepted is done once, as by one process."""

import io
import itertools
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image

from bascule.errors import ConfigError
from bascule.generate.options import Prompt
from bascule.generate.tiny import TINY
from bascule.serve.service import Service
from bascule.serve.status import ENDED, Busy, Closing, Late, Status, Unknown
from tests.helpers.pipeline_cases import make_pipeline
from tests.helpers.ranks import run_ranks
from tests.helpers.serving import Even, Restless, apart, pipeline_of, with_service
from tests.helpers.split_models import TEXT_DIM

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

RANKS = 4
PIXEL = 1.001 / 255


def boat(seed: int, side: int = 32, steps: int = 4) -> Prompt:
    return Prompt(prompt=f"boat {seed}", seed=seed, width=side, height=side, steps=steps)


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

    def apart(self, ids: Iterable[str]) -> float:
        """The largest difference of an output from that of one process."""
        pipeline, service = pipeline_of(TINY), self.service
        return max(apart(service.status(one), service.result(one), pipeline) for one in ids)

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
            boat(len(ids) + k, random.choice((32, 64, 96)), random.choice((2, 4)))
            for k in range(min(random.randrange(1, 9), num - len(ids)))
        ]
        statuses = service.submit(many)
        assert [one.prompt for one in statuses] == many
        ids += [one.id for one in statuses]
        if random.random() < 0.3:
            service.cancel(random.choice(ids))
        time.sleep(random.random() * 0.2)
    diary.until_ended(ids)
    scheduler = service._scheduler
    until(lambda: not scheduler.tasks)  # those that were cancelled have left their ranks
    assert not (service._unwritten or service._jobs._writes or scheduler._planned)
    assert not service._traces
    assert not (scheduler._users or scheduler.state.waiting)
    assert sum(one.degree for one in scheduler.state.free) == RANKS
    until(lambda: not scheduler.orders._post._items)  # the post drops the last ones in its thread
    counts = Counter(service.status(one).state for one in ids)
    places = {one: {x.ranks for x in diary.news if x.id == one and x.ranks} for one in ids}
    counts["moved"] = sum(len({len(x) for x in seen}) > 1 for seen in places.values())
    counts["paused"] = len({one.id for one in diary.news if one.state == "paused"})
    return counts, diary.apart(one for one in ids if service.status(one).state == "done")


def in_bursts(folder: Path, seed: int, num: int) -> Any:
    make = partial(pipeline_of, TINY)
    return with_service(make, folder, bursts, seed, num, policy=Restless(seed))


def check_bursts(folder: Path, seed: int, num: int) -> None:
    counts, most = run_ranks(in_bursts, RANKS, folder, seed, num)[0]
    assert counts["done"] + counts["cancelled"] == num, counts
    assert min(counts["cancelled"], counts["moved"], counts["paused"]) > 0, counts
    assert most <= PIXEL


@pytest.mark.slow
def test_bursts(tmp_path: Path) -> None:
    check_bursts(tmp_path, 0, 24)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(1, 4))
def test_long_bursts(tmp_path: Path, seed: int) -> None:
    check_bursts(tmp_path, seed, 150)


def shared(service: Service) -> tuple[list[int], float]:
    """Numbers of ranks that had a large request, while small ones came and went."""
    diary, count = Diary(service), mock.patch.object(service._metrics, "count").start()
    large = service.submit([boat(0, 96, 28)])[0]
    until(lambda: service.status(large.id).step > 1)
    small = service.submit([boat(k, 32, 3) for k in (1, 2)], deadline_s=2.0)
    ids = [large.id, *(one.id for one in small)]
    diary.until_ended(ids)
    seen = [len(one.ranks) for one in diary.news if one.id == large.id and one.ranks]
    traces = {status.id: trace for status, trace in (one.args for one in count.call_args_list)}
    spans = traces[large.id].spans
    assert [spans[0].name, spans[1].name] == ["queue", "encode"]
    assert [spans[-2].name, spans[-1].name] == ["decode", "write"]
    assert sum(span.steps for span in spans) == 28
    assert all(a.end_s == b.begin_s >= a.begin_s for a, b in itertools.pairwise(spans))
    assert without_repeats(len(span.ranks) for span in spans if span.ranks) == without_repeats(seen)
    return without_repeats(seen), diary.apart(ids)


def without_repeats(degrees: Iterable[int]) -> list[int]:
    return [degree for degree, _ in itertools.groupby(degrees)]


def sharing(folder: Path) -> Any:
    return with_service(partial(pipeline_of, TINY), folder, shared, kind=Even)


def test_a_large_request_gives_ranks_to_small_ones_and_gets_them_back(tmp_path: Path) -> None:
    degrees, most = run_ranks(sharing, RANKS, tmp_path)[0]
    assert (degrees[0], degrees[-1]) == (4, 1)  # at last one rank decodes
    assert 4 in degrees[degrees.index(2) :]
    assert most <= PIXEL


def choosy_pipeline() -> Any:
    """A pipeline that fails for some prompts, and whose scheduler keeps what cannot travel."""
    pipeline = pipeline_of(TINY)
    encode, pipeline.scheduler.odd = pipeline.encode_prompt, object()

    def encoded(*args: Any, **kwargs: Any) -> Any:
        if "wrong" in kwargs["prompt"]:
            raise MemoryError("no memory is left")
        encoded, *others = encode(*args, **kwargs)
        return encoded * (torch.nan if "overflow" in kwargs["prompt"] else 1), *others

    pipeline.encode_prompt = encoded
    return pipeline


def refused(kind: type[Exception], call: Callable[..., Any], *args: Any) -> Any:
    with pytest.raises(kind) as raised:
        call(*args)
    return raised.value


def odds(service: Service) -> float:
    """What is refused, fails or cannot be written, between requests that are done."""
    diary, most = Diary(service), service._options.most_waiting
    wrong = Prompt(prompt="wrong", width=32, height=32, steps=2)
    ids = [one.id for one in service.submit([boat(0), wrong, boat(1, 64)])]
    diary.until_ended(ids)
    failed = service.status(ids[1])
    assert failed.state == "failed" and "MemoryError: no memory is left" in failed.reason
    assert "is failed" in str(refused(Unknown, service.result, ids[1]))
    assert service.cancel(ids[1]) == failed  # it stays as it is
    settings: dict[str, Any] = {"width": 64, "height": 64, "steps": 50}
    black = [one.id for one in service.submit([Prompt(prompt="overflow", **settings)] * 3)]
    diary.until_ended(black)
    for status in map(service.status, black):  # at once, not after all steps
        assert (status.state, status.step) == ("failed", 1)
        assert status.reason.startswith("the latents of step 1 are NaN or infinite")
    ids += black
    for unknown in (service.status, service.cancel, service.result):
        refused(Unknown, unknown, "none")
    assert {service.status(ids[0]), service.status(ids[2])} <= set(service.statuses())

    for one, pictures, text in (
        (boat(2, 40), [], "makes it 32: give 32"),
        (Prompt(prompt="a", frames=5), [], "takes no num_frames"),
        (boat(2), [b"png"], "image: a FluxPipeline takes none: leave it out"),
    ):
        assert text in str(refused(ConfigError, service.submit, [boat(3), one], pictures))
    assert "at most 5 may wait" in str(refused(ConfigError, service.submit, [wrong] * (most + 1)))

    many = service.submit([boat(4, 96, 1000)] * most)
    until(lambda: any(service.status(one.id).step for one in many))
    in_time = partial(service.submit, must_meet_deadline=True)
    assert "would be done in" in refused(Late, in_time, [boat(6)], [], 1e-3).message
    busy = refused(Busy, service.submit, [boat(7)] * most)
    assert int(busy.headers["Retry-After"]) >= 1
    assert not [one for one in service.statuses() if one.prompt.seed in (2, 3, 6, 7)]
    ids += [one.id for one in in_time([boat(8)], deadline_s=1e4)]
    assert {service.cancel(one.id).state for one in many} == {"cancelled"}

    spool: Any = service._spool
    end, spool.end = spool.end, full  # for a while
    until(lambda: "disk is full" in service.health())
    assert "disk is full" in str(refused(Closing, service.submit, [boat(9)]))
    spool.end = end
    until(lambda: not service.health())
    ids += [one.id for one in many] + [service.submit([boat(10)])[0].id]
    diary.until_ended(ids)
    reported = Counter(one.id for one in diary.news if one.state in ENDED)
    assert reported == dict.fromkeys(ids, 1)
    service.stop()
    until(service.health)
    assert "is ending" in str(refused(Closing, service.submit, [boat(11)]))
    states = Counter(service.status(one).state for one in ids)
    assert states == {"done": 4, "failed": 1 + len(black), "cancelled": most}
    return diary.apart(one for one in ids if service.status(one).state == "done")


def full(_: Status) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def klein() -> Any:
    """A pipeline that takes several pictures; its prompts are encoded by their lengths."""
    pipeline = make_pipeline("klein")

    def encoded(prompt: str, **_: Any) -> Any:
        texts = torch.randn(1, 7, TEXT_DIM, generator=torch.Generator().manual_seed(len(prompt)))
        return texts, pipeline._prepare_text_ids(texts)

    pipeline.encode_prompt = encoded
    return pipeline


def edits(service: Service) -> float:
    """Requests with no picture, one, or two in either order: their pixels are of one process."""
    diary, pipeline = Diary(service), klein()
    prompt = Prompt(prompt="boat", width=64, height=64, steps=2, seed=5)
    pictures = [Image.effect_noise(size, 90).convert("RGB") for size in ((64, 64), (80, 64))]
    sent = [png_of(picture) for picture in pictures]
    choices: list[list[int]] = [[], [0], [0, 1], [1, 0]]
    made = [service.submit([prompt], [sent[k] for k in choice])[0].id for choice in choices]
    diary.until_ended(made)
    most, pixels = 0.0, set[bytes]()
    for name, choice in zip(made, choices, strict=True):
        assert service.status(name).state == "done", service.status(name).reason
        image: Any = [pictures[k] for k in choice] or None
        path = service.result(name)
        most = max(most, apart(service.status(name), path, pipeline, image=image))
        pixels.add(Image.open(path).tobytes())
    assert len(pixels) == len(choices)
    return most


def png_of(picture: Image.Image) -> bytes:
    picture.save(made := io.BytesIO(), "PNG")
    return made.getvalue()


def at_odds(folder: Path) -> Any:
    odd = with_service(choosy_pipeline, folder / "a", odds, policy=Restless(0), most_waiting=5)
    return odd, with_service(klein, folder / "b", edits, policy=Restless(1))


def test_what_is_refused_or_fails_harms_no_other(tmp_path: Path) -> None:
    """And edits take several pictures."""
    assert max(run_ranks(at_odds, 2, tmp_path)[0]) <= PIXEL
