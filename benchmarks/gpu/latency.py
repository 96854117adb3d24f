"""What the latency model predicts of lengths and mixes that it was not fitted to.

Forward and backward of a double and a single block of FLUX's width are timed on packs of equal
sequences of as many tokens as the longest, as `bascule.training.measure_cost` does, all packs in
turns. `fit_latency` sees two thirds of the lengths; the others, and the three mixes of Table 1 as
one rank computes them, are predicted: as sums over their sequences. Errors are of medians.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from gpu.measuring import Case, Row, Setting, Target, timed
from gpu.shapes import Pack, config_of, equal_pack, make_model, mixes

from bascule import TransformerCost, fit_latency
from bascule.calibrate.block_calls import BlockCall, calls_of_model

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 24_576, 32_768)
EVERY = 3
"""Every third length is held out, as in `bascule calibrate`."""

WITHIN = Target(0.03, at_least=False)
WEIGHTS = (1.0, 1.0, 0.0)


def cases(setting: Setting) -> Iterator[Case]:
    """One: all packs are timed in turns."""
    yield Case("latency model", partial(predicted, setting))


def predicted(setting: Setting) -> list[Row]:
    """Errors of what was held out, and of what was fitted."""
    lengths = setting.pick(LENGTHS, (16, 24, 32, 64))
    packs = [equal_pack(length, max(1, lengths[-1] // length)) for length in lengths]
    every = [*packs, *mixes(setting), *mixes(setting, heaviest=True)[1:]]
    found = timed(setting, {pack.name: call_of(setting, pack) for pack in every})
    seconds = {name: found.median(name) for name in found.seconds}
    fitted = [pack for place, pack in enumerate(packs) if place % EVERY != 1]
    cost = fit_latency(
        [pack.seq_lens[0] for pack in fitted],
        [seconds[pack.name] / len(pack.samples) for pack in fitted],
        config_of(setting, 1, 1).d_model,
    )
    rows: list[Row] = []
    for pack in every:
        if pack.name not in seconds:
            continue
        is_fitted = pack in fitted
        rows.append(row_of(pack, cost, seconds[pack.name], is_fitted=is_fitted))
    return [*rows, *found.reasons("latency model")]


def row_of(pack: Pack, cost: TransformerCost, seconds: float, *, is_fitted: bool) -> Row:
    """The error of a pack; a target where it was held out."""
    expected = float(cost.seconds(np.array(pack.seq_lens)).sum())
    return Row(
        f"{pack}, {'fitted' if is_fitted else 'held out'}",
        "relative error",
        abs(expected / seconds - 1.0),
        target=None if is_fitted else WITHIN,
        details={
            "predicted_s": expected,
            "measured_s": seconds,
            "gamma": cost.gamma,
            "seconds_per_tflop": cost.seconds_per_unit,
            "fit_error": cost.fit_error,
        },
    )


def call_of(setting: Setting, pack: Pack) -> Callable[[], object]:
    """Forward and backward of a double and a single block."""
    model = make_model(config_of(setting, 1, 1), setting)
    calls = calls_of_model(model, WEIGHTS, pack.seq_lens, setting.dtype)
    return partial(_both, calls)


def _both(calls: list[BlockCall]) -> None:
    for call in calls:
        call.backward()()
