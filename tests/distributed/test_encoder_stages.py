"""Steps from pixels and captions: losses and gradients are the same wherever it is encoded."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bascule.machine.costs import TransformerCost
from bascule.models import LocalExchange, MMDiT
from bascule.parallel import SequenceParallel
from bascule.train.encoders import EncoderStages, FrozenEncoders, load_encoders
from bascule.train.flow import FlowBatch
from bascule.train.model import build_model, model_config
from bascule.train.options import RunOptions
from bascule.train.photos import PhotoStream
from bascule.train.stopwatch import Stopwatch
from bascule.train.streams import RawBatch, SampleBatch, pack_batch, sample_normals
from tests.helpers.albums import make_album
from tests.helpers.cases import Gradients, assert_same, sharded_gradients
from tests.helpers.ranks import by_one_rank, run_ranks

CPU, SEED = torch.device("cpu"), 3


def options_of(album: Path, **settings: Any) -> RunOptions:
    small: dict[str, Any] = {"d_model": 32, "num_heads": 2, "num_single": 1, "dtype": "float64"}
    return RunOptions(**(small | {"photos": album, "seed": SEED} | settings))


def by_hand(encoders: FrozenEncoders, raw: RawBatch) -> SampleBatch:
    """What the real classes give, one sample after the other; texts padded to one length."""
    images = [_image(encoders, *both) for both in zip(raw.ids, raw.pixels, strict=True)]
    texts = list(raw.texts)
    if encoders.text is not None and any(map(len, texts)):
        most = max(map(len, texts))
        ids = torch.stack([torch.nn.functional.pad(x, (0, most - len(x))) for x in texts])
        lens = torch.tensor([len(x) for x in texts])
        mask = (torch.arange(most) < lens[:, None]).long()
        hidden = encoders.text.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        texts = [hidden[k, : len(x)] for k, x in enumerate(texts)]
    return pack_batch(
        raw.shapes,
        image=torch.cat(images),
        text=torch.cat(texts),
        pooled=torch.stack([x.sum(0) / max(len(x), 1) for x in texts]),
        ids=raw.ids,
    )


def _image(encoders: FrozenEncoders, sample_id: int, pixels: Tensor) -> Tensor:
    values = (pixels.float() if encoders.vae is None else pixels.double()) / 127.5 - 1.0
    side = 16
    if encoders.vae is not None:
        vae, side = encoders.vae.vae, 2
        is_video = encoders.vae.is_video
        found = vae.encode(values[None] if is_video else values.transpose(0, 1)).latent_dist
        mean, std = (
            part[0] if is_video else part.transpose(0, 1) for part in (found.mean, found.std)
        )
        normals = sample_normals([sample_id], [mean.numel()], 1, seed=SEED, stream="latent")
        values = mean + std * normals.view(mean.shape)
        if not is_video:
            values = (values - vae.config.shift_factor) * vae.config.scaling_factor
    c, f, h, w = values.shape
    cut = values.reshape(c, f, h // side, side, w // side, side)
    return torch.einsum("cfhpwq->fhwcpq", cut).reshape(-1, c * side**2)


def reference(
    options: RunOptions, encoders: FrozenEncoders, data: PhotoStream, numbers: list[int]
) -> tuple[float, Gradients]:
    """Loss and gradients of one process that computes everything."""
    with torch.no_grad():
        batch = by_hand(encoders, data.raw(numbers))
    flow = FlowBatch.build(batch, seed=SEED, device=CPU, dtype=torch.float64)
    model = MMDiT(model_config(options, data))
    model.init_weights(SEED)
    model.double()
    loss = flow.per_token_loss(model(flow.inputs, LocalExchange(flow.seq_lens))).mean()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads


def check_steps(
    album: Path, settings: dict[str, Any], per_rank: list[list[int]], moves: bool
) -> dict[str, int]:
    """Both arms against the reference; how many items the stages moved."""
    options, rank, size = options_of(album, **settings), dist.get_rank(), dist.get_world_size()
    encoders = load_encoders(options)
    data = PhotoStream(album, 1, seed=SEED, options=encoders.photo_options(options))
    numbers = [n for own in per_rank for n in own]
    want = by_one_rank(reference, options, encoders, data, numbers)
    mesh = init_device_mesh("cpu", (size,))
    alone = init_device_mesh("cpu", (size, 1), mesh_dim_names=("ranks", "alone"))["alone"]
    config, parallel = (
        model_config(options, data),
        SequenceParallel(mesh, f"g1n{size}", TransformerCost(32)),
    )
    total = sum(shape.image_tokens for own in per_rank for shape in data.raw(own).shapes)
    said: dict[str, int] = {}
    for where, exchange in ((alone, LocalExchange), (mesh, parallel.plan)):
        stages = EncoderStages(encoders, where, data, options, CPU, Stopwatch(CPU))
        model = build_model(config, mesh, seed=SEED, checkpoint=False, dtype=torch.float64)

        (batch,) = stages.encode([data.raw(per_rank[rank])])
        assert not batch.image.requires_grad and not batch.text.requires_grad
        flow = FlowBatch.build(batch, seed=SEED, device=CPU, dtype=torch.float64)
        losses = flow.per_token_loss(model(flow.inputs, exchange(flow.seq_lens)))
        part = losses.sum() * (size / total)  # FSDP2 takes the mean of gradients over ranks
        part.backward()
        dist.all_reduce(loss := part.detach() / size)
        assert_same((loss.item(), sharded_gradients(model)), want, f"{settings} {per_rank}")
        last = {name: one for name, one in stages.last.items() if one is not None}
        said = {name: one.num_moved for name, one in last.items()}
    assert all(said.values()) or not moves, said
    assert all(
        p.grad is None for one in (encoders.vae, encoders.text) if one for p in one.parameters()
    )
    return said


BOTH, CLIPS = {"vae": "tiny", "text_encoder": "tiny"}, {"vae": "tiny-wan", "text_encoder": "tiny"}
SPLITS = {
    2: [list(range(7)), []],  # a rank without a photo
    3: [[], list(range(9)), [9]],
    4: [[0], list(range(1, 11)), [], []],
}
FEW = {2: [[0], []], 3: [[0], [1], []], 4: [[], [], [0], []]}
CASES: dict[str, tuple[dict[str, Any], dict[int, list[list[int]]], bool]] = {
    "clips and photos": (CLIPS, SPLITS, True),
    "a clip is its frames, one by one": (BOTH, SPLITS, True),
    "a step of texts alone": ({"text_encoder": "tiny"}, SPLITS, True),
    "photos alone": ({"vae": "tiny", "clip_frames": 0}, SPLITS, True),
    "nothing is worth a move": (BOTH, FEW, False),
}


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos and clips, most with captions."""
    folder = make_album(tmp_path_factory.mktemp("albums") / "album")
    for k in range(1, 7):
        (folder / f"{k}.txt").write_text("words and more " * k)
    return folder


@pytest.mark.some(2)
@pytest.mark.parametrize("size", [3, 2, pytest.param(4, marks=pytest.mark.stress)])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_process(case: str, size: int, album: Path) -> None:
    pytest.importorskip("diffusers")
    settings, per_rank, moves = CASES[case]
    said = run_ranks(check_steps, size, album, settings, per_rank[size], moves)
    assert all(one == said[0] for one in said)
