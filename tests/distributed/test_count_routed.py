"""How many marked rows a rank gets, told on the host: the same as the rows that come."""

import pytest
import torch

from bascule.parallel import SequenceParallel
from tests.helpers.cases import COST, all_batches, config_of, own_samples
from tests.helpers.ranks import raised_by, run_ranks

CONFIG = config_of(4, 4)
TOPOLOGIES = {2: ["g1n2", "g2n1", "g1r2n1"], 4: ["g1n4", "g2n2", "g2r2n1", "g1n2+g2n1"]}


def counted(topology: str, num_ranks: int) -> int:
    """On how many batches; eager, and within what torch compiles."""
    sp = SequenceParallel(None, topology, COST)
    batches = all_batches(num_ranks, 6)
    for name, batch in batches.items():
        samples = own_samples(batch, CONFIG, sp.rank)
        mask, step = ~samples.inputs.is_image, sp.plan(samples.seq_lens)
        wanted = int(step.route(mask=mask)["mask"].sum())
        assert step.count_routed(mask) == wanted, name
        recorded = torch.compile(
            lambda x, step=step: x.new_ones(step.count_routed(x)).sum(), backend="aot_eager"
        )
        if name == "random 0":
            assert int(recorded(mask)) == wanted
    return len(batches)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("num_ranks", "topology"), [(num, one) for num, some in TOPOLOGIES.items() for one in some]
)
def test_it_is_what_a_route_brings(num_ranks: int, topology: str) -> None:
    assert min(run_ranks(counted, num_ranks, topology, num_ranks)) > 10


def wrong() -> list[tuple[list[str], str]]:
    """The first rank gives what is wrong; both go on."""
    sp = SequenceParallel(None, "g2n1", COST)
    step, found = sp.plan([4]), list[tuple[list[str], str]]()
    right = torch.ones(4, dtype=torch.bool)
    for mask in (right[1:], right.long(), right.to("meta")):
        found.append(raised_by(step.count_routed, right if sp.rank else mask))
    assert step.count_routed(right) == 4
    return found


def test_a_wrong_mask_is_an_error_on_every_rank() -> None:
    for found in run_ranks(wrong, 2):
        assert len(found) == 3
        for classes, text in found:
            assert "RemoteConfigError" in classes
            assert "rank 0" in text and "give a bool tensor of (4,) on the host" in text
