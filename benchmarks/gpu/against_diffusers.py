"""Training steps of our blocks and of diffusers' FLUX transformer, on the same samples.

2 double and 4 single blocks with the same weights, forward and backward, blocks compiled and
checkpointed in both. Ours computes a pack. Theirs takes samples of one shape: as a batch that is
padded to the longest text and the largest image, or one sample after the other; the faster of the
two counts. Padding is computed by theirs and counts for nothing. Speed-ups are theirs over ours,
by rounds.

Where one sample is alone in a step, the outputs of both are compared.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from measuring import ratio
from torch import Tensor

from bascule.diffusers import weights_from_diffusers
from bascule.models import MMDiT, PackedBatch
from bascule.parallel import SequenceParallel
from bascule.workload.codes import SampleShape
from gpu.diffusers_models import flux_inputs, flux_of, no_diffusers
from gpu.measuring import Case, Row, Setting, Target, timed
from gpu.shapes import (
    Pack,
    batch_of,
    checkpointed,
    equal_pack,
    mixes,
    parallel_of,
    train,
    trained_config,
)

EQUAL, VARIED = Target(1.0), Target(1.3)
LARGEST_ERROR = {torch.bfloat16: 0.05, torch.float32: 1e-4}


class Models(NamedTuple):
    """The same weights twice, and one rank of the library."""

    theirs: Any
    ours: MMDiT
    plain: MMDiT
    parallel: SequenceParallel


def cases(setting: Setting) -> Iterator[Case]:
    """Equal lengths, then lengths that vary."""
    if (reason := no_diffusers()) is not None:
        yield Case("diffusers", lambda: [Row("diffusers' FLUX", reason=reason)])
        return
    make = cache(lambda: models_of(setting))
    yield Case("outputs", lambda: [same_outputs(setting, make())])
    packs = [(equal_pack(setting.pick(4608, 32), 4), EQUAL)]
    packs += [(pack, VARIED) for pack in mixes(setting)]
    packs += [(equal_pack(512, 32), EQUAL)]
    for pack, target in packs[1:2] if setting.is_tiny else packs:
        yield Case(str(pack), partial(steps_of, setting, pack, target, make))


def models_of(setting: Setting) -> Models:
    """Both, compiled by blocks, for lengths of any number, and checkpointed."""
    config = trained_config(setting)
    theirs = flux_of(config, setting)
    with torch.device("meta"):
        plain = MMDiT(config)
    plain.load_state_dict(weights_from_diffusers(theirs.state_dict(), config), assign=True)
    plain.requires_grad_()
    for blocks in (theirs.transformer_blocks, theirs.single_transformer_blocks):
        for block in blocks:
            compiled = setting.compile(block.forward, dynamic=True)
            block.forward = compiled
    theirs.enable_gradient_checkpointing()
    theirs.train()
    ours = checkpointed(plain, lambda block: setting.compile(block, dynamic=True, fullgraph=True))
    return Models(theirs, ours, plain, parallel_of(setting))


def steps_of(setting: Setting, pack: Pack, target: Target, make: Callable[[], Models]) -> list[Row]:
    """Ours over the faster way of theirs."""
    models = make()
    config = models.ours.config
    step, batch = models.parallel.plan(pack.seq_lens), batch_of(pack, config, setting)
    padded = padded_to(pack)
    alone = [flux_inputs(sample, 1, config, setting) for sample in pack.samples]
    whole = flux_inputs(padded, len(pack.samples), config, setting)
    calls = {
        "ours": partial(train, models.ours, batch, step),
        "padded batch": partial(train_theirs, models.theirs, [whole]),
        "one by one": partial(train_theirs, models.theirs, alone),
    }
    found = timed(setting, calls)
    best, rows = found.fastest(("padded batch", "one by one")), found.reasons(str(pack))
    for model in (models.theirs, models.ours):
        model.zero_grad(set_to_none=True)
    if best is None or "ours" not in found.seconds:
        return rows
    spread = ratio(found.seconds[best], found.seconds["ours"])
    details = {
        "step_s": {name: found.median(name) for name in found.seconds},
        "padding": padded.seq_len * len(pack.samples) / pack.num_tokens - 1.0,
        "seq_lens": pack.seq_lens,
    }
    quartiles = spread["lower_quartile"], spread["upper_quartile"]
    what = f"{pack}, ours over diffusers' {best}"
    return [Row(what, "x", spread["median"], quartiles, target, details), *rows]


def padded_to(pack: Pack) -> SampleShape:
    """The shape that every sample of a padded batch has."""
    text = max(sample.text_tokens for sample in pack.samples)
    image = max(sample.image_tokens for sample in pack.samples)
    return SampleShape(text, image, 1, max(sample.grid_width for sample in pack.samples))


def train_theirs(model: Any, batches: list[dict[str, Any]]) -> Tensor:
    """Forward and backward of some batches, whose gradients add up."""
    model.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    for inputs in batches:
        loss = model(**inputs)[0].float().square().mean() / len(batches)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@torch.no_grad()
def same_outputs(setting: Setting, models: Models) -> Row:
    """One sample through both: they compute the same."""
    pack = equal_pack(setting.pick(4608, 32), 1)
    config, sample = models.plain.config, pack.samples[0]
    inputs = flux_inputs(sample, 1, config, setting)
    batch = batch_of(pack, config, setting)
    pos = torch.cat([inputs["txt_ids"], inputs["img_ids"]])
    given = PackedBatch(
        image_tokens=inputs["hidden_states"][0],
        text_tokens=inputs["encoder_hidden_states"][0],
        is_image=batch.is_image,
        pos=pos,
        timestep=inputs["timestep"].float(),
        pooled=inputs["pooled_projections"],
    )
    found = models.plain(given, models.parallel.plan(pack.seq_lens))[batch.is_image].float()
    with torch.compiler.set_stance("force_eager"):
        wanted = models.theirs(**inputs)[0][0].float()
    error = float((found - wanted).norm() / wanted.norm())
    target = Target(LARGEST_ERROR[setting.dtype], at_least=False)
    return Row("outputs of ours against diffusers'", "relative error", error, target=target)
