"""Two stages of a pipeline, each balanced over two ranks: several plans alive, as one process."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bascule.models import MMDiT
from bascule.parallel import SequenceParallel, Step
from tests.helpers.cases import (
    COST,
    Batch,
    Gradients,
    Samples,
    assert_same,
    config_of,
    edge_batches,
    make_model,
    own_samples,
    random_batch,
    reference_step,
)
from tests.helpers.ranks import on_ranks

CONFIG = config_of(4, 4)


def entering(model: MMDiT, samples: Samples, step: Step) -> Tensor:
    """The first stage: tokens are embedded and routed, then the blocks of two streams."""
    batch = samples.inputs
    x = model.embed(batch.image_tokens, batch.text_tokens, batch.is_image)
    moved = step.route(x=x, is_image=batch.is_image, pos=batch.pos)
    layout = model.layout(moved["is_image"], moved["pos"], step.token_slot)
    text, image = layout.interleaving.split(moved["x"])
    for block in model.double_blocks:
        text, image = block(text, image, vectors(model, samples, step), layout, step.attend)
    return layout.interleaving.pack(text, image)


def leaving(model: MMDiT, samples: Samples, step: Step, x: Tensor) -> Tensor:
    """The second stage: the other blocks; tokens return to where they were loaded, for the loss."""
    batch = samples.inputs
    moved = step.route(is_image=batch.is_image, pos=batch.pos)
    layout = model.layout(moved["is_image"], moved["pos"], step.token_slot)
    vec = vectors(model, samples, step)
    for block in model.single_blocks:
        x = block(x, vec, layout, step.attend)
    predicted = step.restore(model.final(x, vec, layout.slot))
    return step.mean(samples.losses(predicted))


def vectors(model: MMDiT, samples: Samples, step: Step) -> Tensor:
    """Both stages have the modulation's layers; their gradients are added up."""
    batch = samples.inputs
    vec = step.gather_samples(model.condition(batch.timestep, batch.pooled, batch.guidance))
    return vec.index_select(0, step.local_seq_ids)


def gathered(model: MMDiT) -> Gradients:
    """Averaged over the ranks that balance, added up over stages."""
    found: Gradients = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / 2
        dist.all_reduce(grad)
        found[name] = grad
    return found


@on_ranks(4)
def test_stages_of_a_pipeline_have_the_gradients_of_one_process() -> None:
    """Forward of two microbatches, then their backwards, first in, first out."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "balance"))
    stage, peer = mesh.get_local_rank("stage"), (dist.get_rank() + 2) % 4
    parallel = SequenceParallel(mesh["balance"], "g2n1", COST)
    model, whole = make_model(CONFIG), make_model(CONFIG)
    batches: list[Batch] = [random_batch(2, 3), edge_batches(2)["one rank has everything"]]
    alive: list[tuple[Tensor, Tensor]] = []
    losses: list[Tensor] = []
    for batch in batches:
        samples = own_samples(batch, CONFIG, parallel.rank)
        step = parallel.plan(samples.seq_lens)
        if stage == 0:
            out = entering(model, samples, step)
            dist.send(out.detach(), peer)
            alive.append((out, out))
            continue
        x = torch.empty(step.local.positions.size, CONFIG.d_model, dtype=torch.float64)
        dist.recv(x, peer)
        x.requires_grad_()
        losses.append(leaving(model, samples, step, x))
        alive.append((x, losses[-1]))
    for x, out in alive:
        if stage == 0:
            grad = torch.empty_like(x)
            dist.recv(grad, peer)
            out.backward(grad)
        else:
            out.backward()
            assert x.grad is not None
            dist.send(x.grad, peer)
    want = [reference_step(whole, batch) for batch in batches]
    got = gathered(model)
    total = {name: grad + want[1][1][name] for name, grad in want[0][1].items()}
    loss = sum(loss.item() for loss in losses) if stage else want[0][0] + want[1][0]
    assert_same((loss, got), (want[0][0] + want[1][0], total), f"stage {stage}")
