"""The policies of `benchmarks/baselines` do what their libraries publish."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
peers = pytest.importorskip("transformers.trainer_pt_utils")
if not hasattr(peers, "BatchRebalanceSampler"):
    pytest.skip("this version of transformers has no batch_rebalance", allow_module_level=True)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def module(name: str) -> Any:
    return import_module(f"baselines.{name}")


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_batch_rebalance_is_that_of_transformers(num_ranks: int) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lens = rng.integers(10, 20_000, num_ranks * int(rng.integers(1, 9)))
        peer = peers.BatchRebalanceSampler(lens.tolist(), lens.size, num_ranks, 1)
        theirs = [part[0] for part in peer._assign(list(range(lens.size)), lens.tolist())]
        costs = lens + 0.001 * lens.astype(float) ** 2
        (ours,) = module("algorithms").batch_rebalance(costs, num_ranks)
        assert ours == theirs


def squares(length: int, size: int) -> float:
    return length * length / size


@pytest.mark.parametrize(
    ("num_ranks", "lens", "steps"),
    [
        # Twenty tokens need two ranks that hold ten each; the others one.
        (4, [10, 20, 10], [[[1], [1], [0], [2]]]),
        (4, [10], [[[0], [0], [0], [0]]]),  # idle ranks join a group
        # Each of two ranks has a ten; a nine more makes one of them wait, and is taken out again.
        (2, [10, 10, 9], [[[0], [1]], [[2], [2]]]),
    ],
)
def test_groups_by_length_by_hand(num_ranks: int, lens: list[int], steps: Any) -> None:
    assert module("algorithms").HybridContext(num_ranks, 10, squares).steps(np.array(lens)) == steps


def test_groups_that_lower_the_longest_load_by_hand() -> None:
    give = module("algorithms").DynamicContext(4, 10, squares).steps
    # Eleven tokens need two ranks, 60.5 each. Ten alone are 100, so they get two ranks as well.
    assert give(np.array([11, 10])) == [[[0], [0], [1], [1]]]
    # Seven are 49 on one rank, which is no longer; four fit beside none of them within ten tokens.
    assert give(np.array([7, 11, 7, 4])) == [[[1, 3], [1, 3], [0], [2]]]
    assert give(np.array([9])) == [[[0]] * 4]  # idle ranks join the smallest group
    # Two packs of ten, and one of two ranks for what is left: its load would be too long.
    assert give(np.array([10] * 5)) == [[[0], [1], [2], [3]], [[4]] * 4]


@pytest.mark.parametrize("data", ["LongAlign", "data codes"])
def test_steps_of_groups_are_at_most_three_percent_over_the_bound(data: str) -> None:
    cases, policies = module("cases"), module("policies")
    case = cases.Case.draw(data, 8, 12)
    made = list(policies.grouped(case, 3))
    assert [policy.is_ours for policy in made] == [False, True] * 2
    for theirs, ours in zip(made[::2], made[1::2], strict=True):
        scores = [cases.score(case, policy, 3) for policy in (theirs, ours)]
        assert 1.0 <= scores[1].over_bound <= min(1.03, scores[0].over_bound)
        assert scores[1].over_free >= scores[1].over_bound
        for policy in (theirs, ours):
            samples = cases.samples_of(policy.step(1)).tolist()
            assert sorted(samples) == list(range(4 * case.full, 8 * case.full))


@pytest.mark.parametrize("kind", ["whole", "equal_counts", "padded", "accumulated", "bags"])
@pytest.mark.parametrize("data", ["photos", "data codes", "text, images, videos"])
def test_policies_keep_every_sample_of_a_step(kind: str, data: str) -> None:
    cases, policies = module("cases"), module("policies")
    case = cases.Case.draw(data, 8, 28)
    size = case.full * (policies.MICROBATCHES if kind == "accumulated" else 1)
    num_ours = 0
    for policy in getattr(policies, kind)(case, 3):
        for number in range(3):
            step = policy.step(number)
            samples = cases.samples_of(step)
            if policy.epoch.reordered:
                buckets = [case.bucket_of[np.concatenate(ranks)].tolist() for ranks in step]
                assert all(len(set(of_step)) == 1 for of_step in buckets)
            else:
                first = number * size
                assert sorted(samples.tolist()) == list(range(first, first + size)), policy.name
        if policy.is_ours:
            assert policy.epoch == cases.KEEPS_ALL
            num_ours += 1
    assert num_ours


def test_shared_samples_cost_what_the_plan_says() -> None:
    cases, policies = module("cases"), module("policies")
    case = cases.Case.draw("text, images, videos", 8, 4)
    plan = policies.plan_batch(policies.by_rank(case, 1), "auto", case.cost, cluster=case.cluster)
    step = policies.planned(case, "auto", case.cluster)(1)
    assert cases.shared_makespan(case, step) == pytest.approx(plan.makespan)
    share = plan.moved_tokens / plan.seq_lens.sum()
    assert cases.moved(case, step) == pytest.approx(share, abs=1e-3)
    assert plan.makespan >= cases.shared_bound(case, cases.samples_of(step))


def test_no_pair_of_a_mask_is_lost() -> None:
    masks = module("masks")
    spans = masks.images_in_text(np.random.default_rng(0))
    first, last = masks.seen(spans)
    for way in (*masks.TORCH.values(), *masks.OURS.values()):
        assert way(spans, 4)[0].sum() == (last - first).sum()


# --- the result ---------------------------------------------------------------------------------

RESULT = json.loads((ROOT / "benchmarks" / "results" / "baselines.json").read_text())
PAGE = (ROOT / "docs" / "measured.md").read_text()
GROUPS: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
for _row in RESULT["rows"]:
    GROUPS.setdefault((_row["data"], _row["ranks"], _row["kind"]), []).append(_row)


def test_ours_is_first_among_who_keeps_the_samples_of_a_step() -> None:
    for group, rows in GROUPS.items():
        ours = min(row["over_bound"] for row in rows if row["is_ours"])
        least = min(row["over_bound"] for row in rows if not row["reordered"])
        assert ours <= 1.001 * least, group
    assert len(GROUPS) == 3 * 4 * 5 + 3 * 2 * 2


def spread(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


@pytest.mark.parametrize(
    ("line", "kind", "policies"),
    [
        (
            "| whole samples, packed ",
            "whole samples",
            ["Karmarkar-Karp", "one bucket a step", "batch_rebalance", "DpBalanced", "nothing"],
        ),
        ("| the same, equal", "equal counts", ["one bucket a step", "Karmarkar-Karp, equal"]),
        ("| padded, one", "padded", ["one bucket a step", "batch_rebalance"]),
        ("| padded, 8", "padded, accumulated", ["one bucket a step", "batch_rebalance"]),
        ("| sequences shared", "bags", ["BalancedCP", "DpBalanced, groups"]),
        ("| packs shared by groups, 1/8 of", "longest on 8 ranks", ["DynamicCP"]),
        ("| the same, 1/2 of", "longest on 2 ranks", ["DynamicCP"]),
    ],
)
def test_the_page_says_what_was_decided(line: str, kind: str, policies: list[str]) -> None:
    groups = [rows for (_, _, of), rows in GROUPS.items() if of == kind]
    rows = PAGE.splitlines()
    (first,) = [number for number, row in enumerate(rows) if row.startswith(line)]
    more = [row for row in rows[first + 1 : first + 2] if row.startswith("| the same | |")]
    text = " ".join([rows[first], *more])
    ours = [min(row["over_bound"] for row in rows if row["is_ours"]) for rows in groups]
    assert f"| {spread(ours)} |" in text
    for name in policies:
        values = [row["over_bound"] for rows in groups for row in rows if row["policy"] == name]
        assert spread(values) in text, name
    lost = sum(not any(row["first"] and row["is_ours"] for row in rows) for rows in groups)
    assert (f"ahead in {lost} of 12 cases" in text) == bool(lost)


def test_the_page_says_both_bounds_of_groups() -> None:
    in_groups = [row for row in RESULT["rows"] if row.get("over_free")]
    assert len(in_groups) == 2 * 3 * 2 * 2
    ours, theirs = (
        spread([row["over_free"] for row in in_groups if row["is_ours"] is own])
        for own in (True, False)
    )
    assert f"limit of tokens | {ours} | DynamicCP {theirs} |" in PAGE
    assert max(row["over_bound"] for row in in_groups if row["is_ours"]) <= 1.03
