"""What the page of `bascule trace` says."""

from bascule.report.charts import draw_bars, draw_lines
from bascule.report.page import Chart, Fact, Report, Rows
from bascule.workload.traces import StepParts, Worth

_PARTS = ("compute", "communication", "waiting", "rest")
_MOST_RANKS = 64


def of_trace(parts: StepParts, worth: Worth | None, unknown: str) -> Report:
    """What ranks of a measured run waited for, and what balancing would be worth.

    Args:
        parts: The steps.
        worth: None if it is not known.
        unknown: Then why.
    """
    num_steps, num_ranks = parts.seconds.shape
    step_s = float(parts.step_seconds.mean())
    waited, imbalance = parts.waited, parts.imbalance
    facts = [Fact("step_s", "a step takes", step_s, f"{step_s * 1e3:.4g} ms")]
    known = f"{parts.missing}, so what ranks wait is not known"
    if waited is not None and imbalance is not None:
        known = f"Ranks wait {waited:.1%} of the time"
        facts += [
            Fact("waiting", "ranks wait", waited, f"{waited:.1%}"),
            Fact("imbalance", "compute, max / mean", imbalance, f"{imbalance:.4f}"),
            Fact("slowest_rank", "slowest rank", parts.slowest_rank, str(parts.slowest_rank)),
        ]
    if worth is None:
        answer = f"{known}. What balancing would be worth: {unknown}."
    else:
        assert worth.cost.fit is not None
        error = worth.cost.fit.loo_error
        facts += [
            Fact("speedup", "predicted speed-up", worth.speedup, f"{worth.speedup:.2f}x"),
            Fact("predicted_s", "balanced", worth.predicted_s, f"{worth.predicted_s * 1e3:.4g} ms"),
            Fact("fit_error", "error of the fit", error, f"{error:.1%}"),
            Fact("model_error", "error of the mean step", worth.model_error, _off(worth)),
            Fact("moved_share", "tokens that move", worth.moved_share, f"{worth.moved_share:.0%}"),
        ]
        answer = (
            f"{known}; balanced on {worth.topology}, steps are predicted to run "
            f"{worth.speedup:.2f}x as fast, by a model that is {_off(worth)} off in the steps as "
            "run."
        )
    return Report(
        title=f"{num_steps} measured steps of {num_ranks} ranks",
        answer=answer,
        facts=tuple(facts),
        parts=(
            _ranks(parts),
            draw_lines(
                "Each step",
                "What the slowest rank needs by itself, and what the mean rank does.",
                ("step", "s"),
                {"slowest rank": parts.own.max(axis=1), "mean": parts.own.mean(axis=1)},
            ),
            _table(parts),
        ),
        notes=(
            "Waiting is what a rank spends in a collective before the last rank begins it.",
            f"Compute: {'kernels of a device' if parts.on_device else 'operators of the host'}.",
            "The prediction prices no moving of tokens.",
            *(() if worth is None or not worth.assumed else (f"{worth.assumed_in_words}.",)),
            *parts.notes,
        ),
    )


def _off(worth: Worth) -> str:
    return f"{worth.model_error:+.1%}"


def _ranks(parts: StepParts) -> Chart:
    return draw_bars(
        "Seconds of a step by rank",
        f"Means of {parts.seconds.shape[0]} steps."
        + ("" if parts.num_missing else f" Rank {parts.slowest_rank} is the slowest."),
        [f"rank {rank}" for rank in parts.ranks[:_MOST_RANKS]],
        {name: getattr(parts, name).mean(axis=0)[:_MOST_RANKS] for name in _known(parts)},
        "s",
    )


def _table(parts: StepParts) -> Rows:
    known = _known(parts)
    means = [getattr(parts, name).mean(axis=0) for name in ("seconds", *known)]
    rows = tuple(
        (str(rank), *(f"{column[place] * 1e3:.4g}" for column in means))
        for place, rank in enumerate(parts.ranks.tolist())
    )
    return Rows("All ranks, ms a step", dict.fromkeys(("rank", "step", *known), "{}"), rows)


def _known(parts: StepParts) -> tuple[str, ...]:
    """Return the parts of steps that the traces tell: waiting needs those of all ranks."""
    return tuple(name for name in _PARTS if name != "waiting" or not parts.num_missing)
