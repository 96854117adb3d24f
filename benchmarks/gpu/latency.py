"""What the latency models predict of lengths and mixes that they were not fitted to.

Forward and backward of a double and a single block of FLUX's width are timed on packs of equal
sequences of as many tokens as the longest, as `bascule.train.model.cost_of` does, and all packs
in turns. `fit_latency` sees two thirds of the lengths; the others, and the mixes of Table 1 as one
rank computes them, are predicted, as sums over their sequences. `fit_iterations`, which also has a
constant for each sequence and step, sees two sequences alone besides. Errors are of medians; the
target is for `fit_latency`, which plans are made from.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from bascule import TransformerCost
from bascule.calibrate.blocks import BlockCall, calls_of_model
from bascule.costs import fit_iterations, fit_latency
from bascule.models import MMDiT
from gpu.measuring import Case, Row, Setting, Target, Timed, timed
from gpu.shapes import Pack, config_of, equal_pack, make_model, mixes

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 24_576, 32_768)
ALONE = (1024, 8192)
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
    alone = [equal_pack(length, 1) for length in setting.pick(ALONE, (16, 32))]
    mixed = [*mixes(setting), *mixes(setting, heaviest=True)[1:]]
    model = make_model(config_of(setting, 1, 1), setting)
    calls = {str(one): call_of(setting, model, one) for one in (*packs, *alone, *mixed)}
    found = timed(setting, calls)
    fitted = [pack for place, pack in enumerate(packs) if place % EVERY != 1]
    held_out = [pack for pack in (*packs, *mixed) if pack not in fitted]
    rows = [*_by_latency(model, found, fitted, held_out)]
    rows += _by_iterations(found, [*fitted, *alone], held_out)
    return [*rows, *found.reasons("latency model")]


def call_of(setting: Setting, model: MMDiT, pack: Pack) -> Callable[[], object]:
    """Forward and backward of a double and a single block; gradients do not add up."""
    return partial(_both, model, calls_of_model(model, WEIGHTS, pack.seq_lens, setting.dtype))


def _both(model: MMDiT, calls: Sequence[BlockCall]) -> None:
    model.zero_grad(set_to_none=True)
    for call in calls:
        call.backward()()


def _by_latency(
    model: MMDiT, found: Timed, fitted: Sequence[Pack], held_out: Sequence[Pack]
) -> Iterator[Row]:
    """KnapFormer's model: linear layers and attention, without constants."""
    seconds = [found.median(str(pack)) / len(pack.samples) for pack in fitted]
    cost = fit_latency([pack.seq_lens[0] for pack in fitted], seconds, model.config.d_model)
    for pack in (*fitted, *held_out):
        expected = float(cost.seconds(np.array(pack.seq_lens)).sum())
        target = None if pack in fitted else WITHIN
        yield _row("fit_latency", pack, found, expected, target, cost)


def _by_iterations(found: Timed, fitted: Sequence[Pack], held_out: Sequence[Pack]) -> Iterator[Row]:
    """LoongForge's model, with constants."""
    seconds = [found.median(str(pack)) for pack in fitted]
    cost = fit_iterations([[pack.seq_lens] for pack in fitted], seconds, max_loo_error=float("inf"))
    for pack in held_out:
        expected = float(cost(np.array(pack.seq_lens)).sum()) + cost.overhead
        yield _row("fit_iterations", pack, found, expected, None, None)


def _row(
    model: str,
    pack: Pack,
    found: Timed,
    expected: float,
    target: Target | None,
    cost: TransformerCost | None,
) -> Row:
    """The relative error of a pack."""
    seconds = found.median(str(pack))
    details: dict[str, float | None] = {"predicted_s": expected, "measured_s": seconds}
    if cost is not None:
        details |= {"gamma": cost.gamma, "seconds_per_tflop": cost.seconds_per_unit}
        details |= {"fit_error": cost.fit_error}
    is_held_out = target is not None or cost is None
    what = f"{pack}, {'held out from' if is_held_out else 'seen by'} {model}"
    return Row(what, "relative error", abs(expected / seconds - 1.0), None, target, details)
