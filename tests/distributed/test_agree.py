"""Ranks compare what they mean."""

import torch.distributed as dist

from bascule.comm.agree import agree
from bascule.comm.groups import member_of, resolve
from tests.helpers.ranks import raised_by, run_ranks


def with_long_settings() -> str:
    """They differ in the middle, far behind what one gather carries."""
    text = f"{'x' * 3000}alpha={dist.get_rank()}, beta{'y' * 2000 * dist.get_rank()}"
    group = member_of(resolve(None), "all")
    return raised_by(agree, group, {"cost": text}, what="plan")[1]


def test_long_settings_that_differ_are_shown_where_they_do() -> None:
    for text in run_ranks(with_long_settings, 2):
        assert "disagree on cost" in text and len(text) < 700, text
        assert "ranks [0]: .. xxx" in text and "alpha=0, beta;" in text, text
        assert "ranks [1]: .. xxx" in text and "alpha=1, betayyy" in text, text
