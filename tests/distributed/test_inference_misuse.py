"""What `parallelize` and its handle refuse: a wrong number, or a wait, becomes an error everywhere.

Each wrong use ends in an error of a few sentences on every rank.
"""

from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from bascule.comm.groups import set_timeout
from bascule.diffusers import parallelize
from tests.helpers.inference_cases import difference
from tests.helpers.inference_toy import TABLE, make_toy, toy_inputs
from tests.helpers.misuse import ENDING, REFUSED, Wrong, mesh, split
from tests.helpers.ranks import on_ranks, raised_by, run_ranks


def error_of(wrong: Wrong) -> str:
    """The text of an error; some are torch's own."""
    try:
        wrong[0]()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    raise AssertionError("nothing was raised")


@on_ranks(2)
def test_what_is_refused_leaves_ranks_in_step() -> None:
    """Refuse one after the other: the ranks still meet in the same call after each."""
    errors = dict[str, str]()
    for name, wrong in REFUSED.items():
        errors[name] = error_of(wrong)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size(), name
    model = make_toy()
    with split(model) as handle:
        assert handle.verify(**toy_inputs()).ok
    for name, (_, words) in REFUSED.items():
        assert words in errors[name] and len(errors[name]) < 700, (name, errors[name])


@pytest.mark.some(14)
@pytest.mark.parametrize("name", ENDING)
@on_ranks(2)
def test_what_ends_a_mesh_is_raised_on_all_ranks(name: str) -> None:
    error = error_of(ENDING[name])
    assert ENDING[name][1] in error, error


def outside() -> tuple[list[str], str] | float:
    """The last of three ranks is in no mesh."""
    pair, model, inputs = mesh([0, 1], "ulysses"), make_toy(), toy_inputs()
    if dist.get_rank() == 2:
        return raised_by(parallelize, model, mesh=pair, table=TABLE)
    expected = model(**inputs)
    with parallelize(model, mesh=pair, table=TABLE):
        return difference(model(**inputs), expected)


def test_a_rank_outside_of_the_mesh() -> None:
    *errors, (classes, text) = run_ranks(outside, 3)
    assert max(errors) < 1e-12
    assert "ConfigError" in classes and "rank 2 is not in the mesh of ranks [0, 1]" in text


def does_not_come() -> str:
    model = make_toy()
    with split(model) as handle:
        assert handle.mesh.whole is not None
        set_timeout(handle.mesh.whole, 2.0)
        if dist.get_rank() == 0:
            return raised_by(model, **toy_inputs())[1]
    with suppress(RuntimeError):
        dist.barrier()
    return ""


def test_a_rank_that_does_not_come_is_named() -> None:
    assert "no report from ranks [1]" in run_ranks(does_not_come, 2)[0]
