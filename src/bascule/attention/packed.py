"""Attention inside a bag, on packed sequences: ranks that share heads, and a ring of such groups.

A bag of P = G * R ranks has each of its sequences in P contiguous chunks. Ulysses brings a piece of
each sequence, G chunks, to every rank of a group, with some of the heads; then the groups pass keys
and values around the ring, and each query meets its whole sequence.

Shapes: C tokens on this rank, S tokens of its Ulysses group, H heads, K key-value heads, D head
width, n sequences of the bag; R ring ranks, G Ulysses ranks.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from bascule.attention.call_spec import CallSpec
from bascule.attention.kernels.packed_kernels import KERNELS, PackedSequences, select_kernel
from bascule.attention.kernels.protocol import BlockKernel, Seen
from bascule.attention.kernels.registry import KERNELS as BLOCK_KERNELS
from bascule.attention.kernels.registry import select_block_kernel
from bascule.attention.ring import RingPlan, Tile, ring_attention
from bascule.attention.ulysses import TokenOrder, to_heads, to_tokens
from bascule.comm.groups import RankGroup
from bascule.comm.guard.derivatives import refuse_derivatives
from bascule.comm.heads import HeadShares
from bascule.comm.meshes import RING_AXIS, ULYSSES_AXIS, AttentionMesh
from bascule.comm.staging import table_on
from bascule.errors import ConfigError
from bascule.plan import routes
from bascule.plan.batch import Plan
from bascule.plan.topology.spec import Topology

_BLOCK_NAMES = {"reference": "plain", "varlen": "aten_flash"}
"""Kernels that have another name where they compute blocks."""


@dataclass(frozen=True)
class PackedRing:
    """The pieces of each sequence of a bag on its ring ranks.

    A piece is a contiguous run of tokens, and the pieces of a sequence follow each other in ring
    order: under a causal mask later ring ranks have more work.

    Attributes:
        piece_lens: (R, n) tokens of each sequence on each ring rank.
        group: The ring.
        step: Step number in errors.
    """

    piece_lens: routes.Ints
    group: RankGroup
    step: int

    @cached_property
    def kv_lens(self) -> list[int]:
        """(R,) tokens of each ring rank."""
        return self.piece_lens.sum(axis=1).tolist()

    @cached_property
    def tiles(self) -> list[list[Tile]]:
        """By ring rank, the pieces here against its pieces of the same sequences."""
        slices = [_slices(lens) for lens in self.piece_lens]
        here = slices[self.group.rank]
        return [
            [
                Tile(rows, keys)
                for rows, keys in zip(here, there, strict=True)
                if rows.start < rows.stop and keys.start < keys.stop
            ]
            for there in slices
        ]

    @cached_property
    def causal_tiles(self) -> list[list[Tile]]:
        """The same where a token sees none that comes later in its sequence."""
        own = self.group.rank
        diagonal = [Tile(tile.q, tile.k, Seen(causal=True)) for tile in self.tiles[own]]
        return [*self.tiles[:own], diagonal, *([] for _ in self.tiles[own + 1 :])]

    @property
    def num_sent(self) -> int:
        """Keys that this rank passes on in a forward: all but those that end with it."""
        return sum(self.kv_lens) - self.kv_lens[(self.group.rank + 1) % self.group.size]


@dataclass(frozen=True)
class Bag:
    """What a rank needs to know of its bag.

    Attributes:
        mesh: The ranks that it shares heads with, and those around its ring.
        chunk_lens: (G, n) tokens of each sequence on each rank that it shares heads with.
        ring: The pieces of the other groups; None if there is one group.
        device: Where the tensors are.
        step: Step number in errors.
    """

    mesh: AttentionMesh
    chunk_lens: routes.Ints
    ring: PackedRing | None
    device: torch.device
    step: int

    @classmethod
    def of(cls, plan: Plan, group: RankGroup, device: torch.device, step: int) -> "Bag":
        """The bag of this rank in a plan for the ranks of a group, of which its groups are parts.

        Args:
            plan: The plan.
            group: All ranks of the plan.
            device: Of the tensors.
            step: The step number in errors.
        """
        rank = group.rank
        topology, lens = plan.topology, plan.bag_lens(rank)
        bag = topology.bag_of_rank[rank]
        ring_degree = int(topology.ring_degrees[bag])
        degree, num_seqs = lens.shape[0] // ring_degree, lens.shape[1]
        place = (rank - int(topology.first_ranks[bag])) // degree
        by_group = lens.reshape(ring_degree, degree, num_seqs)
        first = int(topology.first_ranks[bag]) + place * degree
        sharing = group.part(range(first, first + degree), ULYSSES_AXIS) if degree > 1 else None
        around = group.part(topology.ring(rank), RING_AXIS) if ring_degree > 1 else None
        ring = None if around is None else PackedRing(by_group.sum(axis=1), around, step)
        mesh = AttentionMesh(around, sharing, None)
        return cls(mesh, by_group[place], ring, device, step)

    @property
    def degree(self) -> int:
        """G."""
        return self.chunk_lens.shape[0]

    @cached_property
    def seqs(self) -> PackedSequences:
        """The sequences, as far as its group has them, as the kernel sees them."""
        return PackedSequences.build(self.chunk_lens.sum(axis=0).tolist(), self.device)

    @cached_property
    def tokens(self) -> list[int]:
        """(G,) tokens of each rank."""
        return self.chunk_lens.sum(axis=1).tolist()

    @cached_property
    def order(self) -> TokenOrder:
        """From rank order, in which tokens arrive, into sequence order, and back."""
        if (self.chunk_lens.sum(axis=0) > 0).sum() <= 1:
            return TokenOrder(self.tokens)
        whole, back = _rows_of(self.chunk_lens.T), _rows_of(self.chunk_lens)
        return TokenOrder(self.tokens, table_on(whole, self.device), table_on(back, self.device))

    def own_kv_heads(self, num_kv_heads: int) -> int:
        """Key-value heads that this rank attends with."""
        return HeadShares.split(num_kv_heads, self.degree).of(self.mesh.place[1])


def _rows_of(wanted_lens: routes.Ints) -> routes.Ints:
    """Row of each token, chunks in the order wanted, where they lie in the transposed order."""
    lying_lens = wanted_lens.T
    first = routes.cumulative(lying_lens.ravel())[:-1].reshape(lying_lens.shape)
    return routes.ranges(first.T.ravel(), wanted_lens.ravel())


def attend(
    bag: Bag,
    kernel: str | None,
    q_CHD: Tensor,
    k_CKD: Tensor,
    v_CKD: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Exact attention within every sequence of the bag; (C, H, D) as q.

    Two all-to-alls forward and two backward where ranks share heads; R - 1 exchanges with the
    neighbours forward and 2 R - 1 backward where there is a ring. The number of torch operations
    does not depend on sequences, chunks or heads (CPU kernels aside).

    Args:
        bag: The ranks and their tokens.
        kernel: Name of the attention kernel; None takes the fastest.
        q_CHD: Queries.
        k_CKD: Keys.
        v_CKD: Values.
        causal: Whether a token sees none that comes later in its sequence.
        scale: Factor of the scores. Default: D^-0.5.

    Raises:
        ConfigError: The shapes do not fit the bag or each other, or there is no such kernel.
    """
    refuse_derivatives("attend", q_CHD, k_CKD, v_CKD)
    if bag.ring is None:
        within = select_kernel(kernel, q_CHD.device.type, q_CHD.dtype)
    else:
        within = partial(_around, bag.ring, _block_kernel(kernel, q_CHD))
    check_shapes(bag, q_CHD, k_CKD, v_CKD)
    if bag.degree == 1:
        return within(q_CHD, k_CKD, v_CKD, bag.seqs, causal=causal, scale=scale)[0]
    spec = CallSpec(
        mesh=bag.mesh.name,
        num_heads=q_CHD.shape[1],
        num_kv_heads=k_CKD.shape[1],
        causal=causal,
        scale=q_CHD.shape[2] ** -0.5 if scale is None else scale,
        kernel=kernel or "",
        step=bag.step,
    )
    q, k, v = to_heads(q_CHD[None], k_CKD[None], v_CKD[None], bag.order, spec)
    out = within(q[0], k[0], v[0], bag.seqs, causal=causal, scale=scale)[0]
    return to_tokens(out[None], bag.order, spec)[0]


def check(
    topology: Topology, bag: Bag, kernel: str | None, q: Tensor, k: Tensor, v: Tensor
) -> None:
    """Refuse what `attend` cannot do here or in another bag: its ranks would wait for the others.

    Raises:
        ConfigError: There is no such kernel, or none for a ring although there is one; the shapes
            do not fit the bag or each other; or the heads are too few for a bag.
    """
    select_kernel(kernel, q.device.type, q.dtype)
    if topology.rings:
        _block_kernel(kernel, q)
    check_shapes(bag, q, k, v)
    degree, num_kv_heads = int(topology.ulysses_groups.bag_sizes.max()), k.shape[1]
    if num_kv_heads < degree:
        raise ConfigError(
            f"{degree} ranks of a bag cannot share {num_kv_heads} key-value heads: Ulysses gives "
            f"every rank at least one, so use bags of at most {num_kv_heads} ranks, or rings: use "
            f"{topology.for_heads(num_kv_heads)}"
        )


def check_shapes(bag: Bag, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what `attend` cannot do.

    Raises:
        ConfigError: The shapes do not fit the plan or each other.
    """
    tokens = bag.tokens[bag.mesh.place[1]]
    for x in (q, k, v):
        if x.device.type != bag.device.type:
            raise ConfigError(f"attend: q, k or v is on {x.device}: give tensors on {bag.device}")
    if q.dim() != 3 or k.shape != v.shape or k.dim() != 3 or q.shape[2] != k.shape[2]:
        raise ConfigError(
            f"attend: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: give (tokens, "
            "heads, head_dim) each, k and v alike"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ConfigError(
            f"attend: q is {q.dtype}, k {k.dtype} and v {v.dtype}: give all three in one "
            "floating-point dtype"
        )
    if q.shape[0] != tokens or k.shape[0] != tokens:
        raise ConfigError(
            f"attend: q has {q.shape[0]} tokens and k {k.shape[0]}, but the plan gives "
            f"this rank {tokens}"
        )
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise ConfigError(
            f"{q.shape[1]} query heads for {k.shape[1]} key-value heads: must be a multiple"
        )


def sent_bytes(bag: Bag, q_CHD: Tensor, k_CKD: Tensor) -> int:
    """Bytes that this rank sends to others in the forward of one `attend`."""
    num_tokens, num_kv_heads, head_dim = k_CKD.shape
    queries, own = q_CHD.shape[1] // num_kv_heads, bag.own_kv_heads(num_kv_heads)
    into = num_tokens * (num_kv_heads - own) * (queries + 2)
    back = (sum(bag.tokens) - num_tokens) * own * queries
    around = 0 if bag.ring is None else 2 * bag.ring.num_sent * own
    return (into + back + around) * head_dim * q_CHD.element_size()


def _around(
    ring: PackedRing,
    block: BlockKernel,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    seqs: PackedSequences,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """A `Kernel` that attends to the pieces on the other ring ranks, too; `seqs` are those here."""
    plan = RingPlan(
        group=ring.group,
        kv_lens=ring.kv_lens,
        tiles=ring.causal_tiles if causal else ring.tiles,
        kernel=block,
        scale=q_THD.shape[2] ** -0.5 if scale is None else scale,
        step=ring.step,
        form=f"causal={causal}",
    )
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
    out, lse = ring_attention(q, k, v, plan)
    return out[0].transpose(0, 1), lse[0].T


def check_kernel(name: object) -> None:
    """Refuse what is the name of no kernel, for whole sequences or for rings.

    Raises:
        ConfigError: Lists them.
    """
    names = [*dict.fromkeys([*KERNELS, *BLOCK_KERNELS])]
    if name is not None and name not in names:
        raise ConfigError(f"kernel {name!r}: choose one of {', '.join(names)}")


def _block_kernel(name: str | None, q: Tensor) -> BlockKernel:
    """The kernel for blocks that computes as the one of this name for whole sequences.

    Raises:
        ConfigError: There is none, or none for such queries.
    """
    block = name if name is None else _BLOCK_NAMES.get(name, name)
    return select_block_kernel(block, q.device.type, dtype=q.dtype, head_dim=q.shape[-1])


def _slices(lens: routes.Ints) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(routes.cumulative(lens).tolist())]
