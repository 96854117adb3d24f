"""Layouts: which tokens of a sequence each rank of a mesh has; lengths alone decide this.

Every segment (text, image) is split into R pieces for the ring, as even as possible, and each piece
is split over U Ulysses ranks. If lengths are symbolic, so are all numbers. Compilers need gathers
of tokens to be torch operators, which find the mesh by its name.

Shapes: S tokens of the whole sequence, T tokens that a rank answers for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, product
from operator import index
from typing import Any

import torch
from torch import Tensor

from bascule.checks import each, fields, of_type, whole
from bascule.comm.collectives import all_gather, reduce_scatter
from bascule.comm.groups import RankGroup
from bascule.comm.mesh import AttentionMesh, Place, mesh_named
from bascule.comm.transforms import constant_result
from bascule.errors import ConfigError
from bascule.plan.sparse.layout import TURN_STEP, BlockLayout, block_lens

Run = tuple[int, int]  # (start, stop)
_MARK = 16  # bytes before gathered rows; the mark takes 8 of them
_MANY = 8  # runs; graphs take more by an index, since parts compile one by one


@dataclass(frozen=True)
class SequenceLayout:
    """The tokens of every rank of R x U ranks.

    With `zigzag` a segment is split into 2 R pieces; ring rank r has the r-th piece from each end.
    Then a causal mask gives all ring ranks the same work. The table shows eight tokens on two ring
    ranks: a row shows a query's rank and keys, the last row the pairs that each rank computes::

        contiguous      zigzag          stripe=1
        0 #.......      0 #.......      0 #.......
        0 ##......      0 ##......      1 ##......
        0 ###.....      1 ###.....      0 ###.....
        0 ####....      1 ####....      1 ####....
        1 #####...      1 #####...      1 #####...
        1 ######..      1 ######..      0 ######..
        1 #######.      0 #######.      0 #######.
        1 ########      0 ########      1 ########
        10 and 26       18 and 18       17 and 19

    Every rank has all of a replicated segment, and its output. Each of its tokens counts once as a
    key, and ranks share its work. The sum of its gradients over the ranks is the gradient.

    ConfigError: A stripe is combined with zigzag or replicated segments, or a number is negative.
    """

    segments: tuple[int, ...]  # tokens of each part of the sequence
    ring_degree: int = 1  # R
    ulysses_degree: int = 1  # U
    zigzag: bool = False  # whether early and late pieces are paired
    replicated: tuple[int, ...] = ()  # indices of the segments of which every rank has all tokens
    # tokens of a block, dealt to the ranks in turns, as block-sparse attention wants; 0 cuts runs
    stripe: int = 0
    turn_step: int = TURN_STEP  # of `plan.sparse.turns`; 0: as in yunchang's striped ring
    turn_skip: int = 0  # stripes before the first turn of segments that have more stripes

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():  # there, lengths are no plain numbers
            of_type("SequenceLayout(segments", self.segments, tuple, "a tuple")
            segment, degree = (each, whole, 0, len(self.segments) - 1), (whole, 1)
            degrees = {"ring_degree": degree, "ulysses_degree": degree}
            fields(self, segments=(each, whole), replicated=segment, stripe=whole, **degrees)
            if self.stripe:
                fields(self, turn_step=(whole, 0, 2**31), turn_skip=whole)
            if len(set(self.replicated)) < len(self.replicated):
                raise ConfigError(f"replicated={self.replicated}: name each segment once")
        if self.stripe and (self.zigzag or self.replicated):
            raise ConfigError(f"{self}: give a stripe, zigzag or replicated segments alone")

    @property
    def seq_len(self) -> int:
        """S."""
        return sum(self.segments)

    @property
    def ring_lens(self) -> list[int]:
        """Tokens of each ring rank, (R,)."""
        return [self.ring_len(ring) for ring in range(self.ring_degree)]

    def ring_len(self, ring: int) -> int:
        """Count the tokens of all Ulysses ranks of a ring rank, replicated ones counted once."""
        return num_tokens(self.pieces(ring))

    def pieces(self, ring: int) -> list[Run]:
        """Return the runs in the sequence of the tokens that a ring rank works on."""
        if self.stripe:
            return self.lying(ring)
        num = 2 * self.ring_degree if self.zigzag else self.ring_degree
        mine = (ring, num - 1 - ring) if self.zigzag else (ring,)
        return [_part(bound, num, p) for bound in self.bounds() for p in mine]

    def own(self, ring: int, ulysses: int) -> list[list[Run]]:
        """Return the runs that one rank answers for, by segment; no two ranks share a token."""
        if self.stripe:
            lengths = tuple([index(length) for length in self.segments])  # graphs have numbers
            how = self.ring_degree, self.ulysses_degree, self.turn_step, self.turn_skip
            sizes = lengths, self.stripe, how
            return [list(runs) for runs in _striped_of(sizes, (ring, ulysses))]
        per_segment = 2 if self.zigzag else 1
        runs = [_part(piece, self.ulysses_degree, ulysses) for piece in self.pieces(ring)]
        return [runs[i : i + per_segment] for i in range(0, len(runs), per_segment)]

    def own_runs(self, ring: int, ulysses: int) -> list[Run]:
        """Return the runs that one rank answers for, segment after segment."""
        return list(chain.from_iterable(self.own(ring, ulysses)))

    def shares(self, ring: int, ulysses: int) -> list[Run]:
        """Return the runs of a rank's tokens in the sequence, in the rank's order."""
        runs, bounds = self.own(ring, ulysses), self.bounds()
        for segment in self.replicated:
            runs[segment] = [bounds[segment]]
        return list(chain.from_iterable(runs))

    def num_tokens(self, ring: int, ulysses: int) -> int:
        """Count the tokens T of a rank, with all replicated ones."""
        return num_tokens(self.shares(ring, ulysses))

    def exchanged(self, ring: int) -> tuple[list[int], list[slice] | None, list[slice] | None]:
        """Return (U,) tokens that each Ulysses rank brings, their order, and the inverse."""
        by_rank = [self.own_runs(ring, rank) for rank in range(self.ulysses_degree)]
        lens = [num_tokens(runs) for runs in by_rank]
        if not self.zigzag or not self.segments:
            return lens, None, None
        by_piece = list(zip(*by_rank, strict=True))
        return lens, _transposed(by_rank), _transposed(by_piece)

    def lying(self, ring: int) -> list[Run]:
        """Return the runs in the sequence that a ring rank works on, in the rank's order."""
        if self.zigzag:
            return self.pieces(ring)
        return [run for u in range(self.ulysses_degree) for run in self.own_runs(ring, u)]

    def bounds(self) -> list[Run]:
        """Return the run of each segment in the sequence."""
        ends = list(accumulate(self.segments))
        return list(zip([0, *ends], ends, strict=False))


@constant_result
def _striped_of(sizes: tuple[Any, ...], place: tuple[int, int]) -> tuple[tuple[Run, ...], ...]:
    """Return the runs of a rank as tuples, which are constants in compiled graphs."""
    return tuple(map(tuple, _striped_runs(*sizes)[place]))


@lru_cache(maxsize=256)
def _striped_runs(
    segments: tuple[int, ...], block: int, how: tuple[int, int, int, int]
) -> dict[tuple[int, int], list[list[Run]]]:
    """Return the runs of the blocks by (ring rank, Ulysses rank) and segment.

    Blocks of a segment are dealt by `plan.sparse.BlockLayout.striped`. The last block of a segment
    may be short.
    """
    places = list(product(range(how[0]), range(how[1])))
    runs_of = {place: [list[Run]() for _ in segments] for place in places}
    first = 0
    for segment, length in enumerate(segments):
        homes: list[int] = BlockLayout.striped(block_lens([length], block), *how).home.tolist()
        for start, home in zip(range(first, first + length, block), homes, strict=True):
            runs, stop = runs_of[divmod(home, how[1])][segment], min(start + block, first + length)
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, stop))
        first += length
    return runs_of


def _part(run: Run, num: int, number: int) -> Run:
    """Return part `number` of `num` parts of a run, which differ by one token at most."""
    start, stop = run
    first, end = ((num - 1 + (stop - start) * part) // num for part in (number, number + 1))
    return start + first, start + end


def positions_on(layout: SequenceLayout, ring: int, device: torch.device) -> Tensor:
    """Return the positions of a ring rank's tokens; recorded graphs get a new tensor."""
    runs = layout.lying(ring) or [(0, 0)]
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in runs])


def take_runs(x: Tensor, runs: list[Run], dim: int) -> Tensor:
    """Take runs of tokens, one run after another. Differentiable."""
    if torch.compiler.is_compiling() and len(runs) > _MANY:
        starts, lens = [start for start, _ in runs], [stop - start for start, stop in runs]
        total, before = num_tokens(runs), [0, *accumulate(lens)][:-1]
        shifts = torch.tensor([start - at for start, at in zip(starts, before, strict=True)])
        each = shifts.repeat_interleave(torch.tensor(lens), output_size=total)
        return x.index_select(dim, (torch.arange(total) + each).to(x.device))
    parts = [x.narrow(dim, start, stop - start) for start, stop in runs or [(0, 0)]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def own_tokens(x: Tensor, layout: SequenceLayout, place: tuple[int, int], dim: int) -> Tensor:
    """Take the tokens that a rank answers for; in replicated segments, its share."""
    if not layout.replicated:
        return x
    chosen: list[Run] = []
    at = 0
    pairs = zip(layout.own(*place), layout.bounds(), strict=True)
    for segment, (runs, (first, end)) in enumerate(pairs):
        is_whole = segment in layout.replicated
        length = end - first if is_whole else num_tokens(runs)
        if is_whole:
            chosen += [(at + start - first, at + stop - first) for start, stop in runs]
        else:
            chosen.append((at, at + length))
        at += length
    return take_runs(x, chosen, dim)


def _transposed(runs: Sequence[Sequence[Run]]) -> list[slice]:
    """Return where the runs of some rows lie, one row after the other, by columns."""
    ends = list(accumulate(stop - start for row in runs for start, stop in row))
    slices, width = list(map(slice, [0, *ends], ends)), len(runs[0])
    return list(chain.from_iterable(slices[column::width] for column in range(width)))


def num_tokens(runs: list[Run]) -> int:
    """Count the tokens of some runs."""
    return sum(stop - start for start, stop in runs)


def layout_text(ranks: Place, layout: SequenceLayout) -> str:
    """Write a layout on a mesh as text, without its segments."""
    numbers = f"{int(layout.stripe)} {int(layout.turn_step)} {int(layout.turn_skip)}"
    return f"{ranks.name}\n{layout.zigzag}\n{numbers}"


def layout_on(text: str, segments: Sequence[int]) -> tuple[AttentionMesh, SequenceLayout]:
    """Return the mesh and the layout of a text, without replicated segments."""
    name, zigzag, numbers = text.split("\n")
    mesh, (stripe, step, skip) = mesh_named(name), map(int, numbers.split())
    kind: Any = {"stripe": stripe, "turn_step": step, "turn_skip": skip}
    return mesh, SequenceLayout(tuple(segments), *mesh.degrees, zigzag == "True", **kind)


def replicated(x: Tensor, ranks: Place, layout: SequenceLayout) -> Tensor:
    """Complete replicated segments, from (B, H, T, D) to (B, H, all tokens of a rank, D)."""
    if ranks.degrees == (1, 1):
        return x
    parts = list(x.split([num_tokens(runs) for runs in layout.own(*ranks.place)], 2))
    chosen = sorted(layout.replicated)
    segments = [layout.segments[segment] for segment in chosen]
    rows = torch.cat([parts[segment] for segment in chosen], 2).movedim(2, 0)
    whole = gather_tokens(rows, segments, layout_text(ranks, layout)).movedim(0, 2)
    for segment, part in zip(chosen, whole.split(segments, 2), strict=True):
        parts[segment] = part
    return torch.cat(parts, 2)


def gather_rows(
    x: Tensor, group: RankGroup, layout: SequenceLayout, mark: int | None = None
) -> tuple[Tensor, bool]:
    """Gather rows as `gather_tokens` does, without autograd; return also whether marks are equal.

    On a device, a comparison would make the host wait: there unequal marks make the rows nan.
    """
    runs, padded = _gathered_runs(layout)
    shape = padded, *x.shape[1:]
    num_bytes = math.prod(shape) * x.element_size()
    sent = x.new_zeros(_MARK + -(-num_bytes // _MARK) * _MARK, dtype=torch.uint8)
    sent[:8].view(torch.int64).fill_(mark or 0)
    sent[_MARK : _MARK + num_bytes].view(x.dtype).view(shape)[: x.shape[0]] = x
    gathered = all_gather(group, "all_gather (tokens)", sent)
    rows = gathered[:, _MARK : _MARK + num_bytes].view(x.dtype).unflatten(1, shape)
    parts = [rows[row // padded].narrow(0, row % padded, length) for row, _, length in runs]
    whole = torch.cat(parts or [rows[0, :0]])
    if mark is None:
        return whole, True
    marks = gathered[:, :8].view(torch.int64)
    if marks.is_cpu or not whole.is_floating_point():
        return whole, len(set(marks[:, 0].tolist())) == 1
    return whole.masked_fill_((marks != marks[0]).any(), math.nan), True


@torch.library.custom_op("bascule::gather_tokens", mutates_args=())
def gather_tokens(x: Tensor, segments: Sequence[int], text: str) -> Tensor:
    """Gather (T, ..) tokens of a rank to (S, ..) tokens of all, in the order of the sequence."""
    mesh, layout = layout_on(text, segments)
    assert mesh.whole is not None
    return gather_rows(x, mesh.whole, layout)[0]


@gather_tokens.register_fake
def _(x: Tensor, segments: Sequence[int], text: str) -> Tensor:
    return x.new_empty(sum(segments), *x.shape[1:])


@torch.library.custom_op("bascule::reduce_tokens", mutates_args=())
def reduce_tokens(x: Tensor, segments: Sequence[int], text: str) -> Tensor:
    """Sum this rank's tokens over all ranks, (S, ..) to (T, ..): the adjoint of `gather_tokens`."""
    mesh, layout = layout_on(text, segments)
    group = mesh.whole
    assert group is not None
    runs, padded = _gathered_runs(layout)
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.new_zeros(group.size * padded, *x.shape[1:], dtype=wide)
    for row, start, length in runs:
        rows[row : row + length] = x[start : start + length]
    parts = rows.unflatten(0, (group.size, padded))
    total = reduce_scatter(group, "reduce_scatter (tokens)", parts)
    return total[: num_tokens(layout.own_runs(*mesh.place))].to(x.dtype).clone()


@reduce_tokens.register_fake
def _(x: Tensor, segments: Sequence[int], text: str) -> Tensor:
    mesh, layout = layout_on(text, segments)
    return x.new_empty(num_tokens(layout.own_runs(*mesh.place)), *x.shape[1:])


@lru_cache(maxsize=256)
def _gathered_runs(layout: SequenceLayout) -> tuple[list[tuple[int, int, int]], int]:
    """Return (row, start in the sequence, tokens) of each run, and the padded rows of a rank."""
    places = product(range(layout.ring_degree), range(layout.ulysses_degree))
    owned = [layout.own_runs(*place) for place in places]
    padded = max(1, *map(num_tokens, owned))
    runs_in_order: list[tuple[int, int, int]] = []
    for number, runs in enumerate(owned):
        row = number * padded
        for start, stop in runs:
            runs_in_order.append((row, start, stop - start))
            row += stop - start
    return sorted(runs_in_order, key=lambda run: run[1]), padded


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.settings = inputs[1:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return reduce_tokens(grad, *ctx.settings), None, None


gather_tokens.register_autograd(_gradients, setup_context=_keep)
