"""Hostile uses of the loader: one sentence on all ranks, at once, and the loader goes on after it.

All cases run in one world, one after the other. Loaders wait ten minutes, the world does not.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bascule.data.loader import BalancedLoader
from bascule.data.packs import Pack
from tests.helpers.loader_cases import COST, FAST, PER_RANK, loader_threads, loader_with
from tests.helpers.ranks import run_ranks

BAD_RANK = 1
Case = tuple[Callable[[], object], str]
"""What is done on every rank, and what its error says on every rank; "" where there is none."""


def is_bad() -> bool:
    return dist.get_rank() == BAD_RANK


def lists(num: int = 5) -> list[list[dict[str, Any]]]:
    first = PER_RANK * dist.get_rank()
    return [[{"id": first + k, "input_ids": torch.zeros(3 + k + first % 7)}] for k in range(num)]


def loader_of(samples: Any = None, **settings: Any) -> BalancedLoader:
    given: dict[str, Any] = {"cost": COST, "min_gain": 0.0, "bytes_per_s": FAST}
    samples = lists() if samples is None else samples
    return loader_with(samples, **{**given, "collate_fn": list, **settings})


def ids_of(loader: BalancedLoader) -> list[int]:
    return [sample["id"] for batch in loader for sample in batch.data]


def exhaust(samples: Any = None, **settings: Any) -> Callable[[], object]:
    return lambda: ids_of(loader_of(samples, **settings))


def end(error: type[BaseException]) -> Any:
    raise error("of the user")


def where_bad(value: Callable[[], Any], otherwise: Any) -> Callable[[Any], Any]:
    """A function of samples with something wrong in the third sample of one rank."""
    third = PER_RANK * BAD_RANK + 2

    def function(sample: Any) -> Any:
        return value() if sample["id"] == third else otherwise

    return function


class NoNumber:
    def __int__(self) -> int:
        raise RuntimeError("no number")


def lengths() -> Iterator[Case]:
    wrong: list[Any] = [float("inf"), np.float32("nan"), "5", b"5", [5], np.array([5]), 3 + 0j]
    wrong += [np.True_, torch.tensor(True), torch.ones(2), None, NoNumber(), 2**40 + 1, -1]
    where = f"step 2, epoch 0, loading: rank {BAD_RANK} of group 'loader': microbatch 0, sample 0: "
    for value in wrong:
        fn = where_bad(lambda value=value: value, 3)
        yield exhaust(length_fn=fn), f"{where}length_fn gave "
        yield exhaust(weight_fn=fn), f"{where}weight_fn gave "
    for error in (SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit):
        fn = where_bad(lambda error=error: end(error), 3)
        yield exhaust(length_fn=fn), f"{error.__name__}: of the user"
    right = [np.int64(5), torch.tensor(5), 5.0, np.float16(5), -0.0]
    yield from ((exhaust(length_fn=where_bad(lambda v=v: v, 3)), "") for v in right)
    endless = ({"id": k, "input_ids": torch.zeros(3)} for k in itertools.count())
    fn = where_bad(lambda: float("nan"), 0)
    nan = {"length_fn": lambda sample: float("nan") if is_bad() else 3, "collate_fn": None}
    yield exhaust(endless, pack=Pack(16), **nan), "length_fn gave nan"


def functions() -> Iterator[Case]:
    def stopping(error: type[BaseException]) -> Iterator[Any]:
        yield from lists(2)
        if is_bad():
            raise error("of the user")
        yield from lists(2)

    for error in (SystemExit, KeyboardInterrupt, ValueError):
        yield (lambda error=error: exhaust(stopping(error))()), f"{error.__name__}: of the user"
    collate = {"collate_fn": lambda samples: sys.exit(3) if is_bad() else samples}
    yield exhaust(**collate), f"making batches: rank {BAD_RANK} of group 'loader': "


class Odd:
    """A loader of which one method fails on one rank."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def do(self, name: str) -> None:
        if name == self.wrong and is_bad():
            raise ValueError(f"no {name}")

    def __len__(self) -> int:
        self.do("len")
        return 5

    def __iter__(self) -> Iterator[Any]:
        self.do("iter")
        return iter(lists())

    def state_dict(self) -> dict[str, Any]:
        self.do("save")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.do("load")

    def set_epoch(self, epoch: int) -> None:
        self.do("epoch")


def resume(change: Callable[[dict[str, Any]], Any], samples: Any = None) -> Callable[[], object]:
    """From the state after two steps, changed."""

    def run() -> list[int]:
        loader = loader_of(samples)
        state = loader.state_dict()
        for batch in loader:
            state = loader.state_dict()
            if batch.step == 1:
                break
        loader.load_state_dict(change(state))
        return ids_of(loader)

    return run


def sources() -> Iterator[Case]:
    for name in ("len", "iter", "save", "epoch"):
        yield exhaust(Odd(name)), f"ValueError: no {name}" if name != "len" else "no len"
    yield resume(lambda state: state, Odd("load")), "ValueError: no load"
    yield exhaust(5), "'int' object is not iterable"


def states() -> Iterator[Case]:
    not_one = "this is not a loader state written by state_dict: "
    for wrong in ({}, None, [1]):
        yield resume(lambda _, wrong=wrong: wrong), not_one
    changes: dict[str, list[Any]] = {
        "step": [-1, 1.5, "2", None, True],
        "epoch": [-1, 1.5, "2"],
        "history": [[[]], [[-1, 2]], [[float("nan"), 1]], [[10**30, 1]], 5],
        "counts": [[1.5, 1], 5, ["a", "b"]],
        "saved": [3, {"loader": {}}, {"loader": {}, "offset": -1}],
        "deal": [5],
    }
    for name, values in changes.items():
        for value in values:
            yield resume(lambda state, n=name, v=value: {**state, n: v}), not_one
    more = resume(lambda state: {**state, "counts": (90, 90)})
    yield more, "90 samples were delivered when the state was saved, and there are 5"
    yield resume(lambda state: {**state, "counts": (1, 1, 1)}), "3 loaders stopped in mid-epoch"
    own = resume(lambda state: {**state, "counts": (2, 1)} if is_bad() else state)
    yield own, "disagree on step"


ARGUMENTS: dict[str, list[Any]] = {
    "length_fn": [5],
    "cost": [None, "x"],
    "pack": ["x", 2.5],
    "accumulate": [0, True],
    "sync": [None],
}


def arguments() -> Iterator[Case]:
    for name, values in ARGUMENTS.items():
        for value in values:
            wrong = f"rank {BAD_RANK} of group 'loader': BalancedLoader({name}={value!r})"
            given = {name: value} if is_bad() else {}
            yield (lambda given=given: loader_of(**given)), wrong
    yield (lambda: loader_of(pack=0 if is_bad() else 8, collate_fn=None)), "tokens"
    yield (lambda: loader_of(timeout_s=60.0 + dist.get_rank())), "disagree on timeout_s"


def costs() -> Iterator[Case]:
    wrong: dict[str, Callable[[Any], Any]] = {
        "nan": lambda lens: np.full(len(lens), np.nan),
        "-1": lambda lens: -np.ones(len(lens)),
        "(1,)": lambda lens: np.ones(1),
        "ZeroDivisionError": lambda lens: 1 / 0,
    }
    for word, function in wrong.items():
        for anywhere in (True, False):
            for num_right in (0, 3):
                calls = itertools.count()

                def cost(
                    lens: Any,
                    function: Any = function,
                    anywhere: bool = anywhere,
                    num_right: int = num_right,
                    calls: Iterator[int] = calls,
                ) -> Any:
                    is_wrong = next(calls) >= num_right and (anywhere or is_bad())
                    return function(lens) if is_wrong else np.asarray(lens, dtype=float)

                yield exhaust(cost=cost), word


def set_wrong_cost() -> None:
    for _ in loader_of():
        break
    loader_of().set_cost(5)  # pyright: ignore[reportArgumentType]


def two_at_once() -> None:
    loader = loader_of()
    first, second = iter(loader), iter(loader)
    assert next(first).step == next(second).step == 0
    assert [batch.step for batch in second] == [1, 2, 3, 4]
    assert loader.state_dict()["epoch"] == 1
    next(first)


def closed_within() -> None:
    loader, steps = loader_of(), list[int]()
    try:
        for batch in loader:
            steps.append(batch.step)
            if batch.step == 2:
                loader.close()
    finally:
        assert steps == [0, 1, 2]
        assert loader.state_dict()["step"] == 3


def other_epoch_within() -> None:
    """It begins with the next iteration; the state is that of this one."""
    loader = loader_of()
    for batch in loader:
        assert batch.epoch == 0
        if batch.step == 2:
            loader.set_epoch(7)
            state = loader.state_dict()
            assert (state["epoch"], state["step"], state["counts"]) == (0, 3, (3, 3))
    assert {batch.epoch for batch in loader} == {7}
    assert {batch.epoch for batch in loader} == {8}


def uses() -> Iterator[Case]:
    yield set_wrong_cost, "cost model is 5"
    yield two_at_once, "this iteration was ended by close(), or by another iteration"
    yield closed_within, "this iteration was ended by close(), or by another iteration"
    yield other_epoch_within, ""
    epochs: list[Any] = [-1, "3", float("nan"), None, 1.5, True]
    for epoch in epochs:
        yield (lambda epoch=epoch: loader_of().set_epoch(epoch)), "epoch"
    yield exhaust([[None]] * 3), 'a NoneType without "input_ids"'
    yield exhaust(["abc", "de"]), 'a str without "input_ids"'


KINDS = (lengths, functions, sources, states, arguments, costs, uses)


def told(run: Callable[[], object]) -> str:
    try:
        run()
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = ""
    assert loader_threads() == []
    return said


def all_told() -> list[tuple[str, str, str]]:
    cases = [(kind.__name__, case) for kind in KINDS for case in kind()]
    said = [(name, told(run), words) for name, (run, words) in cases]
    first = PER_RANK * dist.get_rank()
    assert ids_of(loader_of()) == list(range(first, first + 5))  # nothing is broken
    return said


def test_hostile_uses_are_refused_in_one_sentence_on_all_ranks() -> None:
    of_rank = run_ranks(all_told, 2)
    assert len(of_rank[0]) > 100
    for (kind, said, words), (_, other, _) in zip(*of_rank, strict=True):
        assert words in said and bool(words) == bool(said), (kind, said, words)
        # The same sentence; a disagreement also says at which step the rank that says it was.
        differ = "disagree on step" in said
        assert differ or said.split("0x")[0] == other.split("0x")[0], (kind, said, other)
