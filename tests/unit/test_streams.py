"""Streams of samples: the same everywhere, and noise that follows its sample."""

import dataclasses

import torch

from bascule.train.streams import (
    SampleBatch,
    SampleStream,
    SyntheticStream,
    flow_noise,
    flow_timesteps,
    image_positions,
    pack_batch,
    sample_normals,
)
from bascule.workload.codes import SampleShape, parse_data_codes, sample_lengths, seq_lens

MIX = "g1b3i64f1s0,g1b2i32f7s1,g1b0i256f1s0"


def stream(rank: int, *, seed: int = 0, world_size: int = 3) -> SyntheticStream:
    return SyntheticStream(MIX, rank=rank, world_size=world_size, seed=seed)


def make_batch(shapes: list[SampleShape], ids: list[int]) -> SampleBatch:
    image = torch.zeros(sum(shape.image_tokens for shape in shapes), 4)
    text = torch.zeros(sum(shape.text_tokens for shape in shapes), 3)
    pooled = torch.zeros(len(shapes), 2)
    return pack_batch(shapes, image=image, text=text, pooled=pooled, ids=ids)


def assert_same(first: SampleBatch, second: SampleBatch) -> None:
    for field in dataclasses.fields(SampleBatch):
        a, b = getattr(first, field.name), getattr(second, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name


def test_packed_order_and_positions() -> None:
    shapes = [SampleShape(2, 5, 1, 3), SampleShape(0, 4, 2, 2), SampleShape(1, 0)]
    batch = make_batch(shapes, [7, 8, 2**40])
    T, F = True, False
    assert batch.is_image.tolist() == [F, F, T, T, T, T, T, T, T, T, T, F]
    assert batch.seq_lens == [7, 4, 1]
    assert batch.image_lens == [5, 4, 0]
    assert batch.sample_ids.tolist() == [7, 8, 2**40]
    assert batch.pos[batch.is_image].T.tolist() == [  # frame, row, column
        [0, 0, 0, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 1, 1, 0, 0, 0, 0],
        [0, 1, 2, 0, 1, 0, 1, 0, 1],
    ]
    assert not batch.pos[~batch.is_image].any()
    assert image_positions([]).shape == image_positions([SampleShape(3, 0)]).shape == (0, 3)


def test_a_batch_has_the_drawn_lengths_and_types() -> None:
    expected = seq_lens(sample_lengths(parse_data_codes(MIX), seed=4, step=9))
    for rank in range(3):
        source: SampleStream = stream(rank, seed=4)
        batch = source.batch(9)
        assert batch.seq_lens == expected[rank]
        num_tokens, num_samples = sum(batch.seq_lens), len(batch.seq_lens)
        num_image = sum(batch.image_lens)
        assert int(batch.is_image.sum()) == num_image
        shapes = {
            "image": (num_image, source.in_channels),
            "text": (num_tokens - num_image, source.text_dim),
            "is_image": (num_tokens,),
            "pos": (num_tokens, 3),
            "pooled": (num_samples, source.vec_dim),
            "sample_ids": (num_samples,),
        }
        kinds = {"is_image": torch.bool, "sample_ids": torch.int64}
        for name, shape in shapes.items():
            tensor = getattr(batch, name)
            assert tensor.shape == shape, name
            assert tensor.dtype == kinds.get(name, torch.float32), name
            assert not tensor.is_floating_point() or bool(tensor.isfinite().all())
        assert flow_noise(batch, seed=0).shape == batch.image.shape
        assert flow_timesteps(batch, seed=0).shape == (num_samples,)


def test_a_batch_is_a_function_of_seed_step_and_rank() -> None:
    first = stream(0).batch(3)
    assert_same(stream(0).batch(3), first)
    source = stream(0)
    source.batch(8)
    assert_same(source.batch(3), first)
    for other in (stream(0).batch(4), stream(0, seed=1).batch(3), stream(3, world_size=6).batch(3)):
        rows = min(len(first.image), len(other.image))
        assert not torch.equal(other.image[:rows], first.image[:rows])


def test_sample_ids_are_unique_over_ranks_and_steps() -> None:
    ids = [
        sample_id
        for step in (0, 1, 2**31 - 1)
        for rank in range(6)
        for sample_id in stream(rank, world_size=6).batch(step).sample_ids.tolist()
    ]
    assert len(set(ids)) == len(ids) == 3 * 2 * 5
    assert min(ids) >= 0


def test_noise_and_timesteps_travel_with_their_sample() -> None:
    shapes = [SampleShape(1, 4), SampleShape(0, 9, 1, 3), SampleShape(2, 0), SampleShape(0, 2)]
    ids = [5, 2**60 + 1, 7, 0]
    batch = make_batch(shapes, ids)
    noise = flow_noise(batch, seed=3).split(batch.image_lens)
    times = flow_timesteps(batch, seed=3)
    order = [3, 1, 0, 2]
    moved = make_batch([shapes[i] for i in order], [ids[i] for i in order])
    assert torch.equal(flow_noise(moved, seed=3), torch.cat([noise[i] for i in order]))
    assert torch.equal(flow_timesteps(moved, seed=3), times[order])
    for i, shape in enumerate(shapes):
        alone = make_batch([shape], [ids[i]])
        assert torch.equal(flow_noise(alone, seed=3), noise[i])
        assert torch.equal(flow_timesteps(alone, seed=3), times[i : i + 1])
    assert not torch.equal(flow_timesteps(batch, seed=4), times)


def test_noise_is_standard_normal_and_differs_between_samples() -> None:
    rows = sample_normals([1, 2], [5000, 5000], 8, seed=0, stream="noise")
    assert rows.dtype == torch.float32
    assert abs(rows.mean().item()) < 0.02
    assert abs(rows.std().item() - 1) < 0.02
    first, second = rows.split(5000)
    correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
    assert abs(correlation.item()) < 0.02


def test_timesteps_fill_the_unit_interval() -> None:
    ids = list(range(2000))
    times = flow_timesteps(make_batch([SampleShape(0, 0)] * 2000, ids), seed=0)
    assert 0 < times.min().item() < 0.1
    assert 0.9 < times.max().item() < 1
    assert abs(times.mean().item() - 0.5) < 0.02


def test_the_images_can_be_learned_from_position_and_prompt() -> None:
    source = SyntheticStream("g1b64i64f1s0")
    train, test = source.batch(0), source.batch(1)
    basis = torch.linalg.svd(train.pooled.double()).Vh[:8].T

    def features(batch: SampleBatch) -> torch.Tensor:
        lens = torch.tensor(batch.image_lens)
        prompt = (batch.pooled.double() @ basis).repeat_interleave(lens, dim=0)
        place = batch.pos[batch.is_image].long()
        one_hot = torch.nn.functional.one_hot(place[:, 1] * 5 + place[:, 2], 40).double()
        return (one_hot[:, :, None] * prompt[:, None, :]).flatten(1)

    weights = torch.linalg.lstsq(features(train), train.image.double(), driver="gelsd").solution
    error = features(test) @ weights - test.image
    assert error.square().mean().item() < 0.1 * test.image.square().mean().item()
