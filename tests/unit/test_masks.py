"""Masks of sequences: pairs, tiles, plans; against the matrix of what each token sees."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bascule import Sequences, Span, TransformerCost, plan_batch
from bascule.attention.tiles import Pieces
from bascule.comm.groups import RankGroup
from bascule.costs import PolynomialCost
from bascule.machine.cluster import Cluster
from bascule.machine.costs import describe_cost
from bascule.plan.masks import Masks
from bascule.plan.offer import Offer, offer_of
from bascule.plan.plan import plan_step
from tests.helpers.oracle import seen_by
from tests.helpers.simulation import assert_delivery

CPU = torch.device("cpu")
COST = TransformerCost(64)

span = st.builds(Span, st.sampled_from([1, 2, 3, 7]), st.booleans(), st.booleans())
spans = st.lists(span, max_size=5)


def masks_of(sequences: Sequence[Sequence[Span]]) -> Masks:
    lens = [sum(span.num_tokens for span in mask) for mask in sequences]
    masks = offer_of([Sequences(lens, sequences)], 1).masks[0]
    assert masks is not None or not lens
    return masks or Masks.alike(np.array(lens, np.int64), causal=False)


@settings(deadline=None, max_examples=100)
@given(st.lists(spans, max_size=4))
def test_pairs_are_those_of_the_matrix(sequences: list[list[Span]]) -> None:
    pairs = masks_of(sequences).num_pairs()
    assert pairs.tolist() == [int(seen_by(mask).sum()) for mask in sequences]


def matrix_of(tiles: list[list[Any]], lens: Sequence[int], rank: int) -> npt.NDArray[np.int64]:
    """How often each row of a rank is paired with each row of all ranks, by its tiles."""
    blocks: list[npt.NDArray[np.int64]] = []
    for size, of_other in zip(lens, tiles, strict=True):
        block = np.zeros((lens[rank], size), np.int64)
        for tile in of_other:
            q, k = np.arange(lens[rank]), np.arange(size)
            q, k = (
                x[rows] if isinstance(rows, slice) else x[rows.numpy()]
                for x, rows in ((q, tile.q), (k, tile.k))
            )
            assert len(set(q.tolist())) == q.size, "a query twice in a tile"
            packed, first_q, first_k = tile.mask.packed, 0, 0
            for num_q, num_k in zip(packed.seq_lens, packed.kv_lens, strict=True):
                seen = np.ones((num_q, num_k), np.int64)
                part = np.tril(seen) if tile.mask.causal else seen
                at = np.ix_(q[first_q : first_q + num_q], k[first_k : first_k + num_k])
                np.add.at(block, at, part)
                first_q, first_k = first_q + num_q, first_k + num_k
            assert (first_q, first_k) == (q.size, k.size)
        blocks.append(block)
    return np.concatenate(blocks, axis=1)


@settings(deadline=None, max_examples=75)
@given(st.lists(spans, max_size=4), st.integers(1, 4), st.booleans(), st.randoms())
def test_tiles_pair_each_query_once_with_what_it_sees(
    sequences: list[list[Span]], ring: int, is_zigzag: bool, random: Any
) -> None:
    masks, num_runs = masks_of(sequences), 2 if is_zigzag and ring > 1 else 1
    lens = [sum(span.num_tokens for span in mask) for mask in sequences]
    cuts = [sorted(random.choices(range(n + 1), k=ring * num_runs - 1)) for n in lens]
    bounds = [[0, *cut, n] for cut, n in zip(cuts, lens, strict=True)]
    numbered = list(enumerate(bounds))
    owned = [[(r, 2 * ring - 1 - r)[:num_runs] for _ in sequences] for r in range(ring)]
    positions = [  # (sequence, position) of each row, early runs first
        [
            (seq, position)
            for run in range(num_runs)
            for seq, bound in numbered
            for position in range(bound[owned[r][seq][run]], bound[owned[r][seq][run] + 1])
        ]
        for r in range(ring)
    ]
    runs = [
        [np.diff(bound)[owned[r][seq][run]] for run in range(num_runs) for seq, bound in numbered]
        for r in range(ring)
    ]
    every = [place for of_rank in positions for place in of_rank]
    seen = [seen_by(mask) for mask in sequences]
    for rank in range(ring):
        ranks = tuple(range(ring))
        group = RankGroup(lambda: None, rank, ranks, ranks, "ring") if ring > 1 else None
        pieces = Pieces(np.array(runs, np.int64).reshape(ring, -1), num_runs, group, CPU)
        assert pieces.seq_lens.tolist() == lens
        found = matrix_of(pieces.tiles(masks), pieces.kv_lens, rank)
        wanted = [
            [seq == other and bool(seen[seq][i, j]) for other, j in every]
            for seq, i in positions[rank]
        ]
        np.testing.assert_array_equal(found, np.array(wanted, np.int64).reshape(found.shape))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from([0, 1, 5, 8, 40]), max_size=4), min_size=4, max_size=4),
    st.sampled_from(["g1r4n1", "g2r2n1", "g1r2n1+g1n2", "g2r2n1", "g1n4"]),
)
def test_causal_plans_deliver_each_token(lens: list[list[int]], topology: str) -> None:
    plan = plan_batch([Sequences(of_rank, "causal") for of_rank in lens], topology, COST)
    assert_delivery(plan)
    for rank in range(4):
        local = plan.local(rank)
        bag = plan.topology.bag_of_rank[rank]
        place = rank - plan.topology.first_ranks[bag]
        assert plan.bag_lens(rank)[place].tolist() == local.chunk_lens.tolist()
        assert plan.tokens[rank] == local.positions.size


@pytest.mark.parametrize("causal", [True, False])
def test_rings_are_even_in_documents_of_unlike_lengths(causal: bool) -> None:
    lens = [3000, 64, 900, 17, 2048, 500, 1]
    spans = [Span(length, causal, new_document=True) for length in lens]
    loaded = [Sequences([sum(lens), 77], [spans, "full"], [5, 0]), [], [], []]
    plan = plan_batch(loaded, "g1r4n1", COST)
    assert_delivery(plan)
    begins = np.cumsum([0, *lens[:-1]])
    pairs = np.zeros(4)
    for rank in range(4):
        local = plan.local(rank)
        at = local.positions[local.seq_ids[local.slots] == 0]
        document = np.searchsorted(begins, at, side="right") - 1
        ends = at + 1 if causal else begins[document] + np.array(lens)[document]
        pairs[rank] = (ends - begins[document]).sum()
    assert pairs.max() <= 1.01 * pairs.min()
    assert plan.masks is not None
    assert pairs.sum() == plan.masks.num_pairs()[0]


def test_a_cost_counts_the_pairs_that_are_computed() -> None:
    mixed = [Span(20), Span(64, causal=False), Span(5, new_document=True)]
    pairs = 20 * 21 / 2 + 64 * 84 + 5 * 6 / 2
    loaded = [Sequences([89, 30], [mixed, "full"], [7, 0]), Sequences([16], "full")]
    for cost in (COST, PolynomialCost(1e-9, 1e-7, 1e-5)):
        plan = plan_batch(loaded, "g1n2", cost)
        wanted = cost([89, 30, 16], [pairs + 89 * 7, 900, 256])
        assert plan.loads.sum() == pytest.approx(wanted.sum(), rel=1e-12)
        unbalanced = [wanted[:2].sum(), wanted[2]]
        assert plan.unbalanced_loads(cost).tolist() == pytest.approx(unbalanced)
    assert COST(89) == pytest.approx(COST(89, 89 * 89), rel=1e-12)
    cluster = Cluster(1, 2, 1e12, 1e12, 1e11, 1e10, 1e-6)
    whole = plan_batch([[89, 30], [16]], "g2n1", COST, cluster=cluster)
    assert plan_batch(loaded, "auto", COST, cluster=cluster).makespan < whole.makespan
    steps = plan_step([loaded, loaded], "g1n2", COST, sync="step")
    assert all(step.masks is not None and step.context_lens is not None for step in steps)


def test_json_has_masks_and_contexts() -> None:
    mixed = [Span(20), Span(64, causal=False), Span(5, new_document=True)]
    rest = Sequences([16], "full")
    loaded = [Sequences([89, 0, 30], [mixed, "causal", "full"], context_lens=[7, 3, 0]), rest]
    plan = plan_batch(loaded, "g1r2n1", COST)
    data = json.loads(plan.to_json())
    assert plan.masks is not None
    assert data["masks"] == [[list(span) for span in mask] for mask in plan.masks.to_lists()]
    assert data["context_lens"] == [7, 3, 0, 0]
    others = [
        plan_batch([[89, 0, 30], [16]], "g1r2n1", COST),
        plan_batch([Sequences([89, 0, 30], "causal"), rest], "g1r2n1", COST),
        plan_batch([Sequences([89, 0, 30], context_lens=[7, 3, 0]), [16]], "g1r2n1", COST),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 4
    full = plan_batch([Sequences([89, 0, 30], ["full"] * 3, [0, 0, 0]), rest], "g1r2n1", COST)
    assert full.bag_of.tolist() == others[0].bag_of.tolist()
    assert full != others[0]  # an attention that is asked to be causal is refused there


def test_a_batch_survives_as_numbers() -> None:
    loaded = Sequences([89, 0, 30], [[Span(89)], [], [Span(3), Span(27, False, True)]], [7, 3, 0])
    for one in (loaded, Sequences([4, 5]), Sequences([]), Sequences([4], context_lens=[2])):
        offer = offer_of([one], 1)
        again = Offer.from_words([offer.to_words()])
        assert again.to_words().tolist() == offer.to_words().tolist()
        assert (again.masks[0] is None) == (offer.masks[0] is None) == (one.masks is None)


def test_all_sequences_have_masks_or_none() -> None:
    empty = plan_batch([Sequences([3], "causal"), [], Sequences([])], "g1n3", COST)
    assert empty.masks is not None
    assert plan_batch([Sequences([3]), [4]], "g1n2", COST).masks is None


def test_cost_models_that_differ_in_pairs_alone_are_told_apart() -> None:
    class Squares:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __call__(self, seq_lens: Any, pairs: Any = None) -> npt.NDArray[np.float64]:
            lens = np.asarray(seq_lens, np.float64)
            return lens**2 if pairs is None else np.asarray(pairs) * self.factor

    assert describe_cost(Squares(1.0)) == describe_cost(Squares(1.0))
    assert describe_cost(Squares(1.0)) != describe_cost(Squares(2.0))
