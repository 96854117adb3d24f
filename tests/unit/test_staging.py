"""Memory that exchanges use again."""

import threading

import torch

from bascule.comm.groups import Staging


def test_memory_is_used_again_and_grows() -> None:
    staging = Staging()
    first = staging.take("sent", 8, torch.empty(0, dtype=torch.float32))
    assert first.shape == (8,) and first.dtype == torch.float32
    again = staging.take("sent", 4, torch.empty(0, dtype=torch.float64))
    assert again.shape == (4,) and again.data_ptr() == first.data_ptr()
    # As many elements of a wider dtype need more room.
    wider = staging.take("sent", 8, torch.empty(0, dtype=torch.float64))
    wider.fill_(1.0)
    assert wider.shape == (8,) and bool((wider == 1.0).all())
    other = staging.take("received", 8, wider)
    assert other.data_ptr() != wider.data_ptr()


def test_memory_taken_in_inference_mode_can_be_written_outside() -> None:
    staging = Staging()
    with torch.inference_mode():
        staging.take("sent", 8, torch.empty(0, dtype=torch.uint8)).fill_(0)
    kept = staging.take("sent", 8, torch.empty(0, dtype=torch.uint8))
    assert not kept.is_inference()
    assert bool((kept.copy_(torch.ones(8)) == 1).all())


def test_each_thread_has_memory_of_its_own() -> None:
    staging, like = Staging(), torch.empty(0)
    found = [staging.take("sent", 8, like).data_ptr()]
    thread = threading.Thread(target=lambda: found.append(staging.take("sent", 8, like).data_ptr()))
    thread.start()
    thread.join()
    assert found[0] != found[1]
