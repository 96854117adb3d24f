"""Where the rows of a step's exchanges go, over its group and on its device.

Shapes: T tokens as loaded on this rank.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bascule.comm.agree import Statement, agree
from bascule.comm.exchange import BoundRoute
from bascule.comm.groups import RankGroup
from bascule.comm.staging import table_on
from bascule.errors import ConfigError
from bascule.plan import routes
from bascule.plan.batch import Plan

if TYPE_CHECKING:
    from bascule.parallel import SequenceParallel


def token_route(parallel: "SequenceParallel", plan: Plan, number: int) -> BoundRoute:
    """That of each token, to the rank that computes it."""
    route = plan.route(parallel.rank)
    return BoundRoute(route, parallel.group, parallel.device, number, "route")


def context_route(parallel: "SequenceParallel", plan: Plan, number: int) -> BoundRoute:
    """That of each row of a context, to all ranks that compute on its sequence."""
    contexts, is_own = plan.context_lens, plan.source_ranks == parallel.rank
    num_rows = 0 if contexts is None else int(contexts[is_own].sum())
    route = plan.context_route(parallel.rank)
    args = route, parallel.group, parallel.device, number, "route_contexts"
    return BoundRoute(*args, num_rows=num_rows)


def sample_rows(
    parallel: "SequenceParallel", plan: Plan, number: int
) -> tuple[int, Tensor, RankGroup, int]:
    """Most samples of a rank, rows of a gather padded to them, the ranks, the step number."""
    counts = plan.source_counts
    most = int(counts.max(initial=0))
    rows = routes.ranges(np.arange(counts.size) * most, counts)
    return most, table_on(rows, parallel.device), parallel.group, number


def count_marked(route: BoundRoute, is_marked: Tensor) -> int:
    """How many marked rows a route brings here; one gather of a number a rank, on the host.

    Args:
        route: That of tokens.
        is_marked: bool (T,), on the host.

    Raises:
        RemoteConfigError: On some rank it is something else.
    """
    sent, error = np.zeros(route.group.size, np.int64), None
    try:
        sent = _marked_by_rank(route, is_marked)
    except ConfigError as met:  # the others must not wait
        error = met
    control = route.group.control or route.group
    statement = Statement({}, sent, error)
    said = agree(control, statement, what="count_routed", step=route.step, capacity=sent.size)
    return sum(int(of_rank[route.group.rank]) for of_rank in said)


def _marked_by_rank(route: BoundRoute, is_marked: Tensor) -> routes.Ints:
    """Of the rows that go to each rank, how many are marked."""
    wanted = (route.num_at_source,)
    if is_marked.dtype != torch.bool or is_marked.shape != wanted or not is_marked.is_cpu:
        raise ConfigError(
            f"count_routed: a {is_marked.dtype} tensor of {tuple(is_marked.shape)} on "
            f"{is_marked.device}: give a bool tensor of {wanted} on the host"
        )
    marks, index = is_marked.numpy(), route.route.send_index
    before = routes.cumulative((marks if index is None else marks[index]).astype(np.int64))
    return np.diff(before[routes.cumulative(route.route.send_splits)])
