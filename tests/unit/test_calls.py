"""How calls are numbered and marked, and who may make them, on one rank."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bascule.attention.call_marks import digest_of, rows_of_call
from bascule.attention.call_spec import (
    CallSpec,
    check_settings,
    check_tensors,
    spec_of,
    with_positive_scale,
)
from bascule.comm.guard import failures, notes
from bascule.comm.guard.calls import Call, Calls
from bascule.comm.guard.notes import Failure
from bascule.comm.wire import Wire
from bascule.errors import CommError, ConfigError


def marks(*calls: Call | str) -> list[int]:
    """Of the calls; text is what is meant besides from there on."""
    made, found = Calls(), list[int]()
    for one in calls:
        if isinstance(one, str):
            made.mean(one)
        else:
            found.append(made.begin(one).mark)
            made.finish()
    return found


def in_thread(function: Callable[[], Any]) -> Any:
    """What a function returns or raises in another thread, which has ended then."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


FIRST = Call("gather", 3, "float32", "")


def test_a_mark_tells_of_all_that_must_be_alike_and_of_all_calls_before() -> None:
    others = [
        replace(FIRST, what="reduce"),
        replace(FIRST, step=4),
        replace(FIRST, form="float64"),
        replace(FIRST, kind="agreement"),
    ]
    assert marks(FIRST, FIRST) == marks(FIRST, FIRST)
    assert len({marks(one)[0] for one in (FIRST, *others)}) == 5
    for other in others:
        (_, one), (_, two) = marks(FIRST, FIRST), marks(other, FIRST)
        assert one != two
    assert marks("a", FIRST) != marks(FIRST) != marks("b", FIRST) != marks("a", FIRST)
    assert marks("a", "b", FIRST) != marks("b", "a", FIRST)
    # Ranks compare by themselves what else an agreement says.
    assert marks(Call("one", 1, "x", "kind")) == marks(Call("two", 2, "y", "kind"))
    assert all(0 <= mark < 2**31 for step in range(64) for mark in marks(Call("call", step)))


def test_calls_are_numbered_and_the_last_ones_remembered() -> None:
    calls = Calls()
    assert calls.number == 0 and calls.thread is None
    for number in range(40):
        begun = calls.begin(Call("call", number))
        assert begun.number == number and begun.call.step == number
        assert calls.number == number + 1
        calls.finish(is_done=number % 2 == 0)
    assert [one.number for one in calls.recent] == list(range(8, 40))
    assert calls.num_done == 20 and calls.thread == threading.get_ident()


def test_the_last_forms_agreed_on_are_known() -> None:
    calls = Calls()
    for form in range(4097):
        assert not calls.has_agreed(form)
        calls.agree(form)
        calls.agree(form)
    assert not calls.has_agreed(0) and calls.has_agreed(1) and calls.has_agreed(4096)


def test_what_ended_makes_no_further_calls() -> None:
    calls = Calls()
    calls.begin(FIRST)
    calls.finish()
    calls.ended = "a failure"
    with pytest.raises(CommError, match="a failure"):
        calls.begin(FIRST)
    assert calls.number == 1


def test_agreements_may_be_made_by_any_thread_and_rows_moved_by_one() -> None:
    calls, agreement = Calls(), replace(FIRST, kind="agreement")

    def make(call: Call) -> int:
        number = calls.begin(call).number
        calls.finish()
        return number

    assert in_thread(lambda: make(agreement)) == 0
    assert make(FIRST) == 1
    assert isinstance(in_thread(lambda: make(FIRST)), ConfigError)
    assert in_thread(lambda: make(agreement)) == 2
    assert isinstance(in_thread(lambda: make(FIRST)), ConfigError)
    # A call that is open lets nobody in, not even with an agreement.
    calls.begin(FIRST)
    assert isinstance(in_thread(lambda: make(agreement)), ConfigError)
    calls.begin(FIRST)  # but its own thread
    calls.finish()
    calls.finish()
    before = calls.number
    calls.hand_over()
    assert in_thread(lambda: make(FIRST)) == before
    assert make(FIRST) == before + 1  # the thread that it was handed to has ended


def test_whose_calls_they_are() -> None:
    calls, own = Calls(), threading.get_ident()
    assert not calls.is_of_another(own)
    calls.begin(FIRST)
    calls.finish()
    assert not calls.is_of_another(own)
    assert in_thread(lambda: calls.is_of_another(threading.get_ident()))

    def refused() -> bool:
        with pytest.raises(ConfigError):
            calls.begin(FIRST)
        return calls.is_of_another(threading.get_ident())

    assert not in_thread(refused)  # it tried, so it would have taken part
    other = Calls()
    in_thread(lambda: (other.begin(FIRST), other.finish()))
    assert not other.is_of_another(own)  # that thread has ended


def test_who_was_refused_and_called_since_is_as_before() -> None:
    calls = Calls()

    def make() -> None:
        calls.begin(FIRST)
        calls.finish()

    make()
    with ThreadPoolExecutor(1) as other:
        thread = other.submit(threading.get_ident).result()
        with pytest.raises(ConfigError):
            other.submit(make).result()
        assert not calls.is_of_another(thread)
        calls.hand_over()
        other.submit(make).result()
        calls.hand_over()
        make()
        assert calls.is_of_another(thread)  # what it tried before, it has done since


def test_a_failure_is_told_as_its_own_or_as_found_out() -> None:
    assert Failure("here", (), "oops").told_of(3) == "rank 3 failed in here: oops"
    assert Failure("here", (0, 1), "rank 1 is gone").told_of(3) == "rank 1 is gone"


@pytest.mark.parametrize("is_input", [False, True])
def test_a_failure_that_ended_a_collective_of_other_code_is_passed_on_as_it_was(
    monkeypatch: pytest.MonkeyPatch, is_input: bool
) -> None:
    failed = Failure("there", (), "oops", is_input)
    others = {1: Failure("elsewhere", (3,), "found out"), 3: failed}  # its own error comes first
    monkeypatch.setattr(notes, "last_failures", lambda: others)
    for error in (RuntimeError("closed"), dist.DistBackendError("closed")):
        found = failures._caused_elsewhere(error, "here")
        assert found is not None
        assert found == Failure("here", (3,), failed.told_of(3), is_input)
        assert found.told_of(1) == failed.told_of(3) and error.__notes__ == [failed.told_of(3)]
    for error in (ValueError("own"), NotImplementedError("own")):  # of no collective
        assert failures._caused_elsewhere(error, "here") is None


# --- what calls of attention say ------------------------------------------------------------------

SPEC = CallSpec("mesh:", 8, 4, True, 3, True, 0.125, "plain", "int8", "rows")
OTHER: dict[str, Any] = {
    "mesh": "other:",
    "num_heads": 12,
    "num_kv_heads": 2,
    "zigzag": False,
    "stripe": 0,
    "causal": False,
    "scale": 0.1 + 0.2,
    "kernel": "",
    "wire": "",
    "rows": "others",
    "is_blocking": True,
}


def test_a_call_is_what_its_text_says() -> None:
    assert set(OTHER) == {field.name for field in fields(CallSpec)}
    texts = {SPEC.text}
    for name, value in OTHER.items():
        changed = replace(SPEC, **{name: value})
        assert spec_of(changed.text) == changed != SPEC
        texts.add(changed.text)
    assert spec_of(SPEC.text) == SPEC and len(texts) == 1 + len(OTHER)
    assert spec_of(CallSpec("").text) == CallSpec("")


def test_the_exchanges_of_a_call_carry_what_it_means() -> None:
    made = {SPEC.call("exchange")}
    for name in ("num_heads", "num_kv_heads", "causal", "scale", "kernel", "rows"):
        made.add(replace(SPEC, **{name: OTHER[name]}).call("exchange"))
    made.add(SPEC.call("another"))
    assert len(made) == 8
    assert SPEC.call("exchange").what == "exchange"


def test_rows_of_a_call_tell_all_that_changes_them() -> None:
    q, mask = torch.zeros(1, 2, 3, 8), torch.zeros(3, 3)
    centre = torch.zeros(1, 2, 1, 8)
    tensors = (q, q.double(), q[..., :4])
    masks = (None, mask, mask[None], mask.bool())
    wires = (
        *(None, Wire("int8"), Wire("e4m3"), Wire("int8", takes_centres=True)),
        *(Wire("int8", centre), Wire("int8", None, centre), Wire("int8", centre, centre)),
    )
    cases = list(itertools.product(tensors, wires, masks, ((), (0,), (1,))))
    assert len({rows_of_call(*case) for case in cases}) == len(cases)
    assert rows_of_call(q + 1, None, mask + 1, ()) == rows_of_call(q, None, mask, ())


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [5, 800])
def test_a_mask_with_other_values_has_another_digest(dtype: torch.dtype, size: int) -> None:
    mask = (torch.randn(size, size) > 0).to(dtype)
    first = digest_of(mask)
    assert digest_of(mask) == first == digest_of(mask.clone())
    assert digest_of(mask[:, : size - 1]) != digest_of(mask[: size - 1])
    assert digest_of(mask.T.contiguous()) != first
    for row in (0, size // 2, size - 1):
        changed = mask.clone()
        changed[row, -1] = not changed[row, -1]
        assert digest_of(changed) != first
    mask[0, 0] = not mask[0, 0]
    assert digest_of(mask) != first
    with torch.inference_mode():  # no versions are counted there
        inside = mask.clone()
        before = digest_of(inside)
        assert before == digest_of(mask)
        inside[0, 0] = not inside[0, 0]
        assert digest_of(inside) != before
    assert digest_of(mask[:0]) != digest_of(mask[:, :0])
    assert digest_of(None) == "none" != digest_of(mask.to("meta")) == str((size, size))


def test_scores_are_the_same_under_a_positive_scale() -> None:
    q = torch.randn(2, 3)
    for scale in (0.5, 0.0, -0.5):
        rows, factor = with_positive_scale(q, scale)
        assert factor > 0 and torch.equal(rows * factor, q * scale)
    rows, factor = with_positive_scale(q, None)
    assert rows is q and factor == 3**-0.5
    assert with_positive_scale(q, 0.5)[0] is q


@pytest.mark.parametrize(
    "given_",
    [
        {"causal": 1},
        {"causal": None},
        {"scale": "1"},
        {"scale": True},
        {"scale": float("inf")},
        {"scale": float("nan")},
        {"kernel": 1},
    ],
)
def test_settings_that_attention_does_not_have_are_refused(given_: dict[str, Any]) -> None:
    right: dict[str, Any] = {"causal": False, "scale": None}
    for scale in (None, 1, -0.5, 0.0):
        check_settings("attention", **{**right, "scale": scale, "kernel": "plain"})
    with pytest.raises(ConfigError):
        check_settings("attention", **{**right, **given_})


ONES = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        [1.0],
        ONES.to_sparse(),
        ONES.double(),
        ONES.long(),
        ONES.bool(),
        ONES.to(torch.cfloat),
        ONES.to(torch.float8_e5m2),
        ONES.to("meta"),
        torch.nested.nested_tensor([ONES[0], ONES[1, :2]], layout=torch.jagged),
    ],
    ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')} {getattr(x, 'device', '')}",
)
def test_tensors_that_attention_does_not_take_are_refused(wrong: Any) -> None:
    for place in range(3):
        given_ = [ONES, ONES, ONES]
        check_tensors("attention", *given_)
        given_[place] = wrong
        with pytest.raises(ConfigError):
            check_tensors("attention", *given_)


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.cfloat, torch.float8_e4m3fn])
def test_one_dtype_is_not_enough(dtype: torch.dtype) -> None:
    x = ONES.to(dtype)
    with pytest.raises(ConfigError):
        check_tensors("attention", x, x, x)
    for good in (torch.float16, torch.bfloat16, torch.float64):
        check_tensors("attention", *[ONES.to(good)] * 3)


@pytest.mark.parametrize("shape", [(2, 0, 4), (2, 3, 0), (1, 0, 2, 4), (1, 2, 2, 0)])
def test_heads_there_must_be(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    with pytest.raises(ConfigError):
        check_tensors("attention", x, x, x)


@pytest.mark.parametrize("shape", [(0, 3, 4), (0, 2, 1, 4), (1, 2, 0, 4)])
def test_tokens_and_batch_may_be_none(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    check_tensors("attention", x, x, x, torch.ones(1))
