"""Training steps of FLUX-width blocks: shares of the measured rate of matrix products (HFU).

2 double and 4 single blocks of width 3,072 with 24 heads of 128, forward and backward, every block
checkpointed, on packs without padding; a world of one rank, planned, routed and averaged as in any
world. HFU is FLOPs (see `shapes`) over seconds, over the rate that `device` measured.

The mixes of Table 1 are those of one rank, of the median load and of the largest one. Equal lengths
come in packs of 16,384 tokens or one sequence, and short ones also alone. There is a target for
16,384 tokens and more, and one for the low-res mix.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial

from bascule.models import MMDiT
from bascule.parallel import SequenceParallel
from gpu.measuring import Case, Row, Setting, Target, timed
from gpu.shapes import (
    Pack,
    batch_of,
    checkpointed,
    equal_pack,
    make_model,
    mixes,
    parallel_of,
    train,
    trained_config,
)

LENGTHS = (256, 1024, 4096, 16_384, 32_768, 65_536)
FULL_PACK = 16_384
FULL, LOW_RES = Target(0.60), Target(0.45)


def cases(setting: Setting) -> Iterator[Case]:
    """The mixes, the packs of equal lengths, and short sequences alone."""
    make = cache(lambda: (models_of(setting), parallel_of(setting)))
    for pack, target in packs_of(setting):
        yield Case(str(pack), partial(steps_of, setting, pack, target, make))


def packs_of(setting: Setting) -> list[tuple[Pack, Target | None]]:
    """What is trained on, the most important first."""
    lengths, most = setting.pick(LENGTHS, (16,)), setting.pick(FULL_PACK, 64)
    low_res, *others = mixes(setting)
    every = [
        *(() if setting.is_tiny else others),
        *mixes(setting, heaviest=True)[1:],
        *(equal_pack(length, max(1, most // length)) for length in lengths),
        *(equal_pack(length, 1) for length in lengths if length < most),
    ]
    full = [(pack, FULL if pack.num_tokens >= most else None) for pack in every]
    return [(low_res, LOW_RES), *full]


def models_of(setting: Setting) -> dict[str, MMDiT]:
    """The same weights, by how their blocks run."""
    model = make_model(trained_config(setting), setting)
    return {
        "eager": checkpointed(model, lambda block: block),
        "compiled blocks": checkpointed(
            model, lambda block: setting.compile(block, dynamic=True, fullgraph=True)
        ),
    }


def steps_of(
    setting: Setting,
    pack: Pack,
    target: Target | None,
    make: Callable[[], tuple[dict[str, MMDiT], SequenceParallel]],
) -> list[Row]:
    """A row a way; the target is for the faster one."""
    models, parallel = make()
    config = models["eager"].config
    step, batch = parallel.plan(pack.seq_lens), batch_of(pack, config, setting)
    calls = {name: partial(train, model, batch, step) for name, model in models.items()}
    found = timed(setting, calls)
    best, flops = found.fastest(calls), pack.step_flops(config)
    rows: list[Row] = []
    for name, seconds in found.seconds.items():
        shares = [flops / each / setting.best.matmul_flops_per_s for each in seconds]
        rows.append(
            Row.of(
                f"{pack}, {name}",
                "HFU of the measured rate",
                shares,
                target if name == best else None,
                step_s=found.median(name),
                flops=flops,
                loss=float(calls[name]()),
                tokens_per_s=pack.num_tokens / found.median(name),
                seq_lens=pack.seq_lens,
            )
        )
    for model in models.values():
        model.zero_grad(set_to_none=True)
    return [*rows, *found.reasons(str(pack))]
