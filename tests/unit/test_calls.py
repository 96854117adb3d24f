"""Calls of a group on one rank: numbered, ended, refused to a second thread."""

import threading

import pytest
import torch.distributed as dist

from bascule.comm.guard import failures, notes
from bascule.comm.guard.calls import Calls
from bascule.comm.guard.notes import Failure
from bascule.errors import CommError, ConfigError


def test_calls_are_numbered_and_those_of_parts_have_tags_of_their_own() -> None:
    calls, part = Calls(), Calls(" ring (0, 2)")
    for number in range(3):
        begun, other = calls.begin("call"), part.begin("call")
        assert begun.number == other.number == number
        assert begun.tag != other.tag and 0 <= min(begun.tag, other.tag)
        assert max(begun.tag, other.tag) < 2**31
        calls.finish(is_done=number != 1)
    assert calls.number == 3 and calls.num_done == 2 and calls.thread == threading.get_ident()


def test_the_last_forms_agreed_on_are_known() -> None:
    calls = Calls()
    for form in range(4097):
        assert not calls.has_agreed(form)
        calls.agree(form)
        calls.agree(form)
    assert not calls.has_agreed(0) and calls.has_agreed(1) and calls.has_agreed(4096)


def test_what_ended_makes_no_further_calls() -> None:
    calls = Calls()
    calls.begin("call")
    calls.finish()
    calls.ended = "a failure"
    with pytest.raises(CommError, match="a failure"):
        calls.begin("call")
    assert calls.number == 1


def test_a_second_thread_is_refused_while_a_call_is_open() -> None:
    calls, errors = Calls(), list[str]()

    def begin() -> None:
        try:
            calls.begin("second")
            calls.finish()
        except ConfigError as error:
            errors.append(str(error))

    def in_thread() -> None:
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()

    calls.begin("first")
    in_thread()
    assert len(errors) == 1 and "second: another thread is in a call" in errors[0]
    calls.finish()
    in_thread()  # they may take turns
    assert len(errors) == 1 and calls.begin("third").number == 2


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
