"""Loaders, samplers, packs: options out of range, contradictions, and states of something else."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from bascule import BalancedSampler, Limits, LoaderOptions, Pack
from bascule.costs import PolynomialCost
from bascule.data import ResumableSampler, SamplerOptions
from bascule.data.loader import (
    Progress,
    _set_up,  # pyright: ignore[reportPrivateUsage]
    _Sources,  # pyright: ignore[reportPrivateUsage]
)
from bascule.data.packs import collate_padded, make_pack, unpack
from bascule.data.source import whole_number, words_of
from bascule.data.steps import Rules

COST = PolynomialCost(0.0, 1.0, 0.0)


def option(**wrong: Any) -> Callable[[], object]:
    return partial(LoaderOptions, **wrong)


def loader(**change: Any) -> Callable[[], object]:
    """The arguments of a BalancedLoader with some of them changed."""
    options = {name: change.pop(name) for name in list(change) if hasattr(LoaderOptions(), name)}
    given: dict[str, Any] = {"loader": [], "cost": COST, "length_fn": len, "accumulate": 1}
    given |= {"sync": "microbatch", "pack": None, **change}
    return lambda: _set_up(**given, options=LoaderOptions(**options))


def deals(*rows: list[int]) -> Callable[[], object]:
    """Of ranks that load: a rank's share, the shares, and (num_samples, shuffle, seed)."""
    rules = Rules(1, "microbatch", "finish", 0.0)
    return lambda: _Sources.of(np.array([[0, 9, *row] for row in rows]), rules)


def sampler(lengths: Any = (1, 2, 3, 4), cost: Any = COST, **change: Any) -> Callable[[], object]:
    names = SamplerOptions.__dataclass_fields__.keys() & change.keys()
    options = {name: change.pop(name) for name in names}
    given = {"batch_size": 1, "num_ranks": 2, "rank": 0, **change}
    return lambda: BalancedSampler(lengths, cost, **{"options": SamplerOptions(**options), **given})


def share(rank: int, num_ranks: int, num_samples: int = 9) -> Callable[[], object]:
    return partial(ResumableSampler, num_samples, rank=rank, num_ranks=num_ranks)


STATE = Progress(2, 5, ((1, 2), (3, 4)), (6, 7), ((0, words_of(None)), (4, words_of("x"))))


def state(**change: Any) -> Callable[[], object]:
    return lambda: Progress.from_state(STATE.to_state((9, 1, 5)) | change, (9, 1, 5))


def number(value: Any) -> Callable[[], object]:
    return lambda: whole_number(value, "length_fn")


IDS = torch.tensor([1, 2, 3])
FIRST = {"input_ids": IDS[:2], "image": torch.zeros(1, 2), "weight": IDS[0]}
ONE, BYTES = {"input_ids": IDS[:1]}, IDS[:2].to(torch.uint8)
PACKED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"input_ids": torch.zeros(9, dtype=torch.int64)}, ("11 tokens together", "pack of 10")),
    ({"input_ids": IDS[:2], "labels": IDS[:1]}, ("labels of sample 1 has 1 rows",)),
    ({"text": "b"}, ("sample 1 has none of the token fields",)),
    ({"input_ids": [1, 2]}, ("input_ids of sample 1 is a list",)),
    ({"input_ids": IDS[None]}, ("input_ids of sample 1 has the shape (1, 3)",)),
    ({"labels": IDS}, ("sample 1 lacks input_ids",)),
    ({"input_ids": IDS.int()}, ("int64", "in sample 0 and torch.int32")),
    (ONE | {"image": torch.zeros(1, 3)}, ("image is", "(1, 2)", "(1, 3)")),
    (ONE | {"image": torch.zeros(1, 2).bfloat16()}, ("one dtype",)),
    (ONE, ("sample 1 lacks the number weight",)),
    (ONE | {"cu_items": {}}, ("cu_items is a field that make_pack adds",)),
]
UNPACKED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"cu_seqlens": None}, ("no cu_seqlens",)),
    *(({"cu_seqlens": wrong}, ("begin with 0",)) for wrong in ([1, 3], [], "ab", [0, None])),
    ({"cu_seqlens": [0.0, 3.0]}, ("whole numbers",)),
    ({"cu_seqlens": [0, 3, 2]}, ("must not decrease",)),
    ({"cu_seqlens": [0, 2]}, ("input_ids has 3 rows, but cu_seqlens or cu_items ends at 2",)),
    ({"image": torch.zeros(5)}, ("image has 5 rows", "cu_items")),
    ({"cu_items": {"image": [0, 5]}, "image": torch.zeros(5)}, ("is for 1 samples",)),
    ({"cu_items": {"image": [0, 2, 4]}, "image": torch.zeros(5)}, ("image has 5 rows",)),
    ({"max_seqlen": 2}, ("max_seqlen is one int for the whole pack",)),
    ({"cu_seqlens": [0, 1, 2, 3], "weight": torch.zeros(3)}, ("as many samples as tokens",)),
]
PADDED: list[tuple[Any, dict[str, Any], tuple[str, ...]]] = [
    (ONE, {"multiple_of": 0}, ("multiple_of is 0", "at least 1")),
    (ONE, {"pad_id": -1}, ("pad_id is -1", "at least 0")),
    (ONE | {"second_per_grid_ts": [1.0]}, {}, ("second_per_grid_ts must be a te",)),
    ({"labels": IDS}, {}, ("sample 1 lacks input_ids",)),
    ([1, 2], {}, ("sample 1 is a list; give dicts of fields",)),
]
NO_STATE = ("this is not a loader state written by state_dict",)
CASES = [
    ("no axis", option(axis=3), ("axis=3", "the name of an axis")),
    ("prefetch", option(prefetch=0), ("LoaderOptions(prefetch=0)", "at least 1")),
    ("no batch", option(batch_size=0), ("batch_size=0", "at least 1")),
    ("min_gain below 0", option(min_gain=-1e-9), ("min_gain=-1e-09", "at least 0")),
    ("bytes_per_s", option(bytes_per_s=0), ("bytes_per_s=0", "at least 1")),
    ("timeout_s for ever", option(timeout_s=math.inf), ("timeout_s=inf", "finite")),
    ("ends", option(ends="drop"), ("ends='drop'", '"drop_last"')),
    ("limits", option(limits=5), ("limits=5", "Limits(tokens=..)")),
    ("accumulate", loader(accumulate=0), ("accumulate=0", "at least 1")),
    ("sync", loader(sync="none"), ("sync='none'", '"microbatch" or "step"')),
    ("pack of text", loader(pack="5"), ("pack='5'", "Pack(..)")),
    ("cost of no costs", loader(cost=lambda lens: lens[:0]), ("(0,) costs for (3,) lengths",)),
    ("batches of packs", loader(batch_size=2, pack=5), ("leave batch_size out",)),
    ("batches of ready packs", loader(batch_size=2, unpack=list), ("leave batch_size out",)),
    ("collated packs", loader(collate_fn=list, pack=Pack(8)), ("leave out collate_fn or pack",)),
    ("shares in another order", deals([1, 2, 9, 1, 5], [0, 2, 9, 1, 5]), ("rank=0", "rank 0")),
    ("a share twice", deals([0, 2, 9, 1, 5], [0, 2, 9, 1, 5]), ("rank=1 and num_ranks=2",)),
    ("too many shares", deals([0, 3, 9, 1, 5], [1, 3, 9, 1, 5]), ("num_ranks=3",)),
    ("other samples", deals([0, 2, 9, 1, 5], [1, 2, 8, 1, 5]), ("(9, 1, 5) and (8, 1, 5)",)),
    ("one sampler", deals([0, 2, 9, 1, 5], [0] * 5), ("(9, 1, 5) and (0, 0, 0)",)),
    ("no tokens of a pack", partial(Pack, 0), ("Pack(tokens=0)", "at least 1")),
    ("a pack beyond int32", partial(Pack, 2**31), ("at most 2,147,483,647",)),
    ("no fields", partial(Pack, 4, token_fields=()), ("one or more different names",)),
    ("a field twice", partial(Pack, 4, token_fields=("a", "a")), ("different names",)),
    ("a made field", partial(Pack, 4, token_fields=("positions",)), ("make_pack adds",)),
    ("version of a state", state(version=2), ("version 2",)),
    ("state of other samples", state(deal=(9, 1, 4)), ("(9, 1, 4)", "(9, 1, 5)")),
    ("state without a deal", state(deal=None), NO_STATE),
    ("epoch of a state", state(epoch=-1), ("epoch gave -1",)),
    ("empty history", state(history=((),)), NO_STATE),
    ("saved without an offset", state(saved=["x", "y"]), NO_STATE),
    ("a share beyond the last", share(2, 2), ("rank=2", "at most 1")),
    ("no shares", share(0, 0), ("num_ranks=0", "at least 1")),
    ("epoch below 0", lambda: share(0, 1)().set_epoch(-1), ("epoch is -1",)),  # pyright: ignore
    ("cost of nan", sampler(cost=lambda n: n * math.nan), ("costs of the samples[0] is nan",)),
    ("cost below 0", sampler(cost=lambda n: n * -1.0), ("costs of the samples[0] is -1",)),
    ("one cost", sampler(cost=lambda n: 1.0), ("costs for",)),
    ("a length below 0", sampler([1, -2, 3, 4]), ("lengths has -2",)),
    ("lengths of floats", sampler([1.0, 2.0]), ("lengths of dtype float64",)),
    ("a giant length", sampler([1, 2**41]), ("lengths has 2199023255552",)),
    ("lengths of two dims", sampler([[1, 2], [3, 4]]), ("lengths of shape (2, 2)",)),
    ("lengths of text", sampler("1234"), ("lengths of shape",)),
    ("too few lengths", sampler([5]), ("1 lengths for 2 ranks with accumulate=1", "at least 2")),
    ("no ranks", sampler(num_ranks=0), ("num_ranks=0",)),
    ("no such rank", sampler(rank=2), ("rank=2", "at most 1")),
    ("ranks alone", sampler(rank=None), ("give both, or neither",)),
    ("seed below 0", sampler(seed=-1), ("BalancedSampler(seed=-1)",)),
    ("tolerance", sampler(tolerance=-1), ("tolerance=-1", "at least 0")),
    ("too few weights", sampler(weights=[1, 2]), ("2 weights for 4 lengths",)),
    ("weight of nan", sampler(weights=[1, 2, 3, math.nan]), ("weights)[3] is nan",)),
    ("shard below 0", sampler(shards=[0, 1, 2, -1]), ("has -1",)),
    ("above", sampler(limits=Limits(3)), ("sample 3 has 4 tokens, above the limit of 3",)),
    (
        "few items",
        sampler(limits=Limits(items=1), batch_size=2),
        ("Limits(items=1): batches of batch_size=2 have up to 2",),
    ),
    ("bytes", sampler(limits=Limits(num_bytes=5)), ("bytes",)),
    ("limit a rank", sampler(limits=Limits(tokens=(5, 9))), ("the same limit: give one number",)),
    ("no state", lambda: Progress.from_state({}, ()), NO_STATE),
    *(
        (f"packed {n}", partial(make_pack, [FIRST, other], Pack(10)), words)
        for n, (other, words) in enumerate([*PACKED, (cast(Any, 5), ("give dicts of fields",))])
    ),
    *(
        (f"unpacked {n}", partial(unpack, {"input_ids": IDS, "cu_seqlens": [0, 1, 3]} | x), words)
        for n, (x, words) in enumerate(UNPACKED)
    ),
    *(
        (f"padded {n}", partial(collate_padded, [{"input_ids": IDS}, other], **options), words)
        for n, (other, options, words) in enumerate(PADDED)
    ),
    ("no pack", partial(unpack, cast(Any, "abc")), ("give dicts of fields",)),
    (
        "labels of bytes",
        partial(make_pack, [{"input_ids": IDS[:2], "labels": BYTES}], Pack(4)),
        ("labels is torch.uint8, which cannot hold -100",),
    ),
    *(
        (f"length {value!r}", number(value), (f"length_fn gave {value!r}", "0 to 2^40"))
        for value in (-1, 1.5, math.nan, math.inf, None, True, np.True_, "5", 2**40 + 1)
    ),
]
