"""Seconds of block-sparse attention, measured on meshes and fitted. U Ulysses, R ring, O calls."""

import time
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from bascule.arrays import Bools
from bascule.attention.sparse.attend import rows_of, sparse_attention
from bascule.checks import fields, whole
from bascule.comm.collectives import all_gather, broadcast
from bascule.comm.groups import RankGroup
from bascule.comm.mesh import AttentionMesh, as_attention_mesh, meshes_over
from bascule.errors import ConfigError
from bascule.machine.cluster import AttentionLatency, AttentionLoad
from bascule.machine.fits import fit_attention_latency
from bascule.plan.sparse import BlockLayout, SparsePlan, block_lens, in_order, plan_under

_DENSITIES = (0.0, 1 / 8, 1 / 2)
"""Without work a ring waits for its exchange, which tells how long that takes."""

_PARTS = (4, 1)
"""Sequences of a fourth of the tokens, and of all."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """The attention of a model, in numbers."""

    num_tokens: int  # of the longest sequence
    num_heads: int  # of queries as of keys and values
    head_dim: int
    block: int = 64  # tokens
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1  # sequences that are attended alike

    def __post_init__(self) -> None:
        sizes = "num_tokens", "num_heads", "head_dim", "block", "batch"
        fields(self, **dict.fromkeys(sizes, (whole, 1)))


def measure_attention_latency(
    mesh: AttentionMesh | DeviceMesh,
    shape: CallShape,
    *,
    device: torch.device | str,
    rounds: int = 5,
    kernel: str | None = None,
) -> AttentionLatency:
    """Time attention on every mesh of these ranks, and fit `AttentionLatency` to it.

    The same on every rank. All ranks call; they must have nothing else to do.

    Args:
        mesh: The ranks; 2 at least.
        shape: What is attended.
        device: Where.
        rounds: How often each call is timed; medians count.
        kernel: As for `sparse_attention`.

    Raises:
        ConfigError: There are too few ranks or heads to have both rings and all-to-alls.
        CommError: A rank did not come in time.
    """
    ranks = as_attention_mesh(mesh)
    if ranks.whole is None or shape.num_heads < 2:
        raise ConfigError(
            f"measure_attention_latency: {shape.num_heads} heads on a mesh {ranks.degrees} (ring, "
            "Ulysses): with less than 2 of either there is nothing to choose from"
        )
    loads, seconds = time_sparse_attention(
        ranks, shape, device=torch.device(device), rounds=rounds, kernel=kernel
    )
    fitted = fit_attention_latency(loads, seconds)
    # Ranks of other processors may round otherwise, and must never choose differently.
    values = torch.tensor(list(asdict(fitted).values()), dtype=torch.float64, device=device)
    *coefficients, fit_error = broadcast(ranks.whole, "broadcast (latency)", values).tolist()
    return AttentionLatency(*coefficients, fit_error=fit_error)


def time_sparse_attention(
    mesh: AttentionMesh,
    shape: CallShape,
    *,
    device: torch.device,
    rounds: int = 5,
    kernel: str | None = None,
) -> tuple[list[AttentionLoad], list[float]]:
    """Return loads of calls on all meshes, and seconds: of the slowest rank, medians of rounds."""
    group = mesh.whole
    assert group is not None
    alone = AttentionMesh(None, None, None)
    over = meshes_over(mesh).items()
    meshes = [alone, *(one for (ulysses, _), one in over if ulysses <= shape.num_heads)]
    # A rank alone gets as many tokens as it would have on a mesh: caches and pages cost alike.
    shares = [group.size if one is alone else 1 for one in meshes]
    calls = [
        _call(one, replace(shape, num_tokens=max(shape.num_tokens // part // share, 1)), density)
        for one, share in zip(meshes, shares, strict=True)
        for part in _PARTS
        for density in _DENSITIES
    ]
    generator = torch.Generator(device).manual_seed(0)
    with torch.inference_mode():
        times = [
            [_seconds(call, group, generator, kernel) for call in calls] for _ in range(1 + rounds)
        ]
    of_ranks = torch.tensor(times[1:], dtype=torch.float64, device=device)  # after a warm-up
    slowest = all_gather(group, "all_gather (seconds)", of_ranks).amax(dim=0)
    return [call.load for call in calls], np.median(slowest.cpu().numpy(), axis=0).tolist()


class _Call(NamedTuple):
    """An attention that is timed."""

    mesh: AttentionMesh
    plan: SparsePlan
    masks: Bools  # (heads, N, N)
    q: tuple[int, int, int, int]  # the shape of q here
    load: AttentionLoad
    dtype: torch.dtype


def _call(one: AttentionMesh, shape: CallShape, density: float) -> _Call:
    """Every query block sees the next `density` of all key blocks, so all ranks have as much."""
    ring, ulysses = one.degrees
    lens = block_lens([shape.num_tokens], shape.block)
    home = BlockLayout.striped(lens, ulysses, ring)
    places = np.arange(lens.size)
    mask = (places - places[:, None]) % lens.size < density * lens.size
    masks = np.broadcast_to(mask, (shape.num_heads, *mask.shape))
    plan = plan_under(in_order(shape.num_heads, home, home, ulysses, ring), masks)
    tokens = int(lens[home.home == one.rank].sum())
    load = AttentionLoad.of_plan(plan, shape.batch, shape.head_dim * shape.dtype.itemsize)
    q = shape.batch, shape.num_heads, tokens, shape.head_dim
    return _Call(one, plan, masks, q, load, shape.dtype)


def _seconds(
    call: _Call, group: RankGroup, generator: torch.Generator, kernel: str | None
) -> float:
    """Time one call on this rank, which all ranks begin together."""
    device = generator.device
    parts = (torch.randn(call.q, generator=generator, device=device) for _ in range(3))
    q, k, v = (x.to(call.dtype) for x in parts)
    seen = rows_of(call.masks)
    _wait_for(device)
    all_gather(group, "barrier (timing)", torch.zeros(1, device=device))
    _wait_for(device)
    start = time.perf_counter()
    sparse_attention(q, k, v, call.mesh, call.plan, seen, kernel=kernel)
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
