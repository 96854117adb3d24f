"""Whatever decides what ranks exchange marks the exchange: unlike ones could mix their rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bascule.attention.api import AttentionMesh, SequenceLayout, attention, gather
from bascule.attention.call_spec import CallSpec
from bascule.attention.ops import reduce_tokens
from bascule.comm.agree import Statement, agree
from bascule.comm.exchange import BoundRoute, exchange, gather_samples, spread
from bascule.comm.groups import member_of, resolve
from bascule.comm.guard.calls import Call, Calls
from bascule.comm.heads import HeadExchange
from bascule.comm.wire import Wire
from bascule.parallel import SequenceParallel
from bascule.plan.routes import Route
from bascule.plan.traffic import HeadShares
from tests.helpers.cases import COST
from tests.helpers.mesh_cases import as_given, make_mesh
from tests.helpers.ranks import run_ranks

Said = list[Call | str]
CPU = torch.device("cpu")


@contextmanager
def noted() -> Iterator[Said]:
    """What marks the calls made within; not agreements, in which ranks compare by themselves."""
    said: Said = []
    begin, mean = Calls.begin, Calls.mean

    def note_call(self: Calls, call: Call) -> Any:
        said.extend([] if call.kind else [call])
        return begin(self, call)

    def note_meaning(self: Calls, settings: str) -> None:
        said.append(settings)
        mean(self, settings)

    with (
        mock.patch.object(Calls, "begin", note_call),
        mock.patch.object(Calls, "mean", note_meaning),
    ):
        yield said


def first_exchange(make: Callable[[], Any]) -> Said:
    """All that marks the first exchange."""
    with noted() as said:
        make()
    first = next(i for i, one in enumerate(said) if isinstance(one, Call))
    return said[: first + 1]


def whole_call(make: Callable[[], Any]) -> Said:
    """All that marks its exchanges."""
    with noted() as said:
        make()
    return said


def untold(
    base: Callable[..., Any],
    others: dict[str, dict[str, Any]],
    *,
    of: str = "",
    read: Callable[[Callable[[], Any]], Said] = first_exchange,
) -> list[str]:
    """Which of the changes to what is called do not show in what is read of it."""
    wanted = read(base)
    assert wanted == read(base)
    found = {name: read(partial(base, **changes)) for name, changes in others.items()}
    return [of + name for name, said in found.items() if said == wanted]


def routes() -> list[str]:
    """Of rows by a route, of which a row goes to each rank or to both; and back."""
    group = member_of(resolve(None), "all")
    one_each = Route(None, np.ones(2, np.int64), np.ones(2, np.int64), None)
    to_both = Route(np.tile(np.arange(2), 2), np.full(2, 2), np.full(2, 2), recv_index=None)

    def rows(
        dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3,), num: int = 2
    ) -> list[Tensor]:
        first = torch.ones(2, *shape, dtype=dtype, requires_grad=True)
        return [first, *(torch.ones(2, dtype=torch.int64) for _ in range(num - 1))]

    def swap(name: str = "rows", step: int = 1, form: str = "", **changes: Any) -> Tensor:
        return exchange(BoundRoute(one_each, group, CPU, step, name, form), rows(**changes))[0]

    def copy(name: str = "rows", step: int = 1, form: str = "", **changes: Any) -> Tensor:
        given = rows(**{"num": 1, **changes})
        return spread(BoundRoute(to_both, group, CPU, step, name, form), given)

    changes: dict[str, dict[str, Any]] = {
        "dtype": {"dtype": torch.float64},
        "width": {"shape": (4,)},
        "name": {"name": "others"},
        "step": {"step": 2},
        "form": {"form": "others"},
    }
    found = untold(swap, changes, of="exchange: ")
    found += untold(swap, {"shape": {"shape": (1, 3)}, "num": {"num": 3}}, of="exchange: ")
    found += untold(copy, changes, of="spread: ")
    for move in (swap, copy):
        one, other = move(), move()
        back = [first_exchange(out.sum().backward) for out in (other, one)]
        found += ["which call goes back"] if back[0] == back[1] else []
    return found


def samples() -> list[str]:
    group = member_of(resolve(None), "all")

    def gathered(
        dtype: torch.dtype = torch.float32, width: int = 3, most: int = 2, step: int = 1
    ) -> Tensor:
        x = torch.ones(2, width, dtype=dtype, requires_grad=True)
        valid = torch.tensor([0, 1, most, most + 1])
        return gather_samples(x, most, valid, group, step)

    def back(**changes: Any) -> None:
        gathered(**changes).sum().backward()

    def going_back(**changes: Any) -> Said:
        with noted() as said:
            back(**changes)
        return said[-1:]

    changes: dict[str, dict[str, Any]] = {
        "dtype": {"dtype": torch.float64},
        "width": {"width": 4},
        "rows": {"most": 5},
        "step": {"step": 2},
    }
    found = untold(gathered, changes, of="samples: ")
    return found + [
        f"gradients of samples: {name}"
        for name, one in changes.items()
        if going_back(**one) == going_back()
    ]


def heads() -> list[str]:
    """Of Ulysses by itself."""
    group = member_of(resolve(None), "all")

    def to_heads(
        batch: int = 1,
        heads: tuple[int, ...] = (4, 2, 2),
        kv_heads: int = 2,
        width: int = 8,
        dtype: torch.dtype = torch.float32,
        lens: tuple[int, int] = (3, 3),
        call: Call = Call("exchange", 1, "form"),  # noqa: B008
    ) -> None:
        moved = HeadExchange(group, HeadShares.split(kv_heads, 2), lens)
        xs = [torch.ones(batch, lens[dist.get_rank()], n, width, dtype=dtype) for n in heads]
        moved.start_to_heads(xs, call)()

    changes: dict[str, dict[str, Any]] = {
        "batch": {"batch": 2},
        "heads": {"heads": (2, 4, 2)},
        "kv_heads": {"heads": (8, 4, 4), "kv_heads": 4},
        "width": {"width": 4},
        "dtype": {"dtype": torch.int32},
        "lens": {"lens": (3, 4)},
        "what": {"call": Call("other", 1, "form")},
        "step": {"call": Call("exchange", 2, "form")},
        "form": {"call": Call("exchange", 1, "other")},
    }
    return untold(to_heads, changes, of="heads: ")


def laid(given: tuple[Any, ...], degrees: tuple[int, int]) -> SequenceLayout:
    """Segments, and then zigzag, replicated segments and stripe, as far as they are given."""
    default: tuple[Any, ...] = ((8,), False, (), 0)
    segments, zigzag, replicated, stripe = (*given, *default[len(given) :])
    return SequenceLayout(segments, *degrees, zigzag, replicated, stripe)


def on_meshes() -> list[str]:
    found: list[str] = []
    for degrees in ((1, 2), (2, 1)):
        for overlap in (False, True):
            found += on_mesh(make_mesh(*degrees), overlap)
    return found


def on_mesh(mesh: AttentionMesh, overlap: bool) -> list[str]:
    degrees = mesh.degrees

    def call(
        batch: int = 1,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 8,
        dtype: torch.dtype = torch.float32,
        layout: tuple[Any, ...] = ((8,),),
        **settings: Any,
    ) -> Tensor:
        lay = laid(layout, degrees)
        tokens = lay.num_tokens(*mesh.place)
        q, k, v = (
            torch.ones(batch, h, tokens, dim, dtype=dtype) for h in (heads, kv_heads, kv_heads)
        )
        given = as_given({**settings, "layout": lay, "overlap": overlap})
        return attention(q.requires_grad_(), k, v, mesh, **given)

    agreed: list[str] = []

    def note(group: Any, statement: Statement, **given: Any) -> Any:
        agreed.append(str(dict(statement.settings)))
        return agree(group, statement, **given)

    mask = torch.ones(8, 8).tril()
    changes: dict[str, dict[str, Any]] = {
        "batch": {"batch": 2},
        "heads": {"heads": 8},
        "kv_heads": {"kv_heads": 4},
        "dim": {"dim": 4},
        "dtype": {"dtype": torch.float64},
        "tokens": {"layout": ((10,),)},
        "segments": {"layout": ((4, 4),)},
        "zigzag": {"layout": ((8,), True)},
        "replicated": {"layout": ((4, 4), False, (0,))},
        "stripe": {"layout": ((8,), False, (), 2)},
        "causal": {"is_causal": True},
        "scale": {"scale": 0.5},
        "scale below 0": {"scale": -0.5},
        "kernel": {"kernel": "plain"},
        "wire": {"wire": Wire("int8")},
        "mask": {"attn_mask": mask},
        "bool": {"attn_mask": mask.bool()},
    }
    if overlap and degrees[1] > 1:  # refused
        del changes["zigzag"]
    with mock.patch("bascule.comm.agree.agree", note):
        found = untold(call, changes, of=f"{degrees}, {overlap}: ", read=whole_call)
    # Every form is agreed on once, by all that it is; the second time all are known. Ulysses ranks
    # also compare the values of a mask, where they exchange its heads.
    num_forms = 1 + len(changes) + 2 * (degrees[1] > 1)
    if len(set(agreed)) != len(agreed) or len(agreed) != (0 if overlap else num_forms):
        found.append(f"agreements: {len(agreed)} of {num_forms}, {len(set(agreed))} unlike")
    for other in (mask.T.contiguous(), mask[None]):
        masked = partial(call, attn_mask=mask)
        found += untold(masked, {"mask": {"attn_mask": other}}, read=whole_call)
    for other in (Wire("e4m3"), Wire("int8", takes_centres=True)):
        found += untold(partial(call, wire=Wire("int8")), {"wire": {"wire": other}})
    one, two = call(), call()
    back = [first_exchange(out.sum().backward) for out in (two, one)]
    found += ["which call goes back"] if back[0] == back[1] else []

    def whole(
        dtype: torch.dtype = torch.float32, width: int = 2, layout: tuple[Any, ...] = ((8,),)
    ) -> None:
        lay = laid(layout, degrees)
        gather(torch.ones(lay.num_tokens(*mesh.place), width, dtype=dtype), mesh, lay, 0)

    def sums(
        dtype: torch.dtype = torch.float32, width: int = 2, layout: tuple[Any, ...] = ((8,),)
    ) -> None:
        lay = laid(layout, degrees)
        spec = CallSpec(mesh.name, zigzag=lay.zigzag, stripe=lay.stripe).text
        reduce_tokens(torch.ones(8, width, dtype=dtype), list(lay.segments), spec)

    gathered: dict[str, dict[str, Any]] = {
        "dtype": {"dtype": torch.int32},
        "width": {"width": 3},
        "zigzag": {"layout": ((8,), True)},
        "segments": {"layout": ((4, 4),)},
        "stripe": {"layout": ((8,), False, (), 2)},
    }
    found += untold(sums, gathered, of="reduce: ")
    return found + untold(whole, gathered, of="gather: ")


def in_bags() -> list[str]:
    found: list[str] = []
    for topology in ("g2n1", "g1r2n1"):
        parallel = SequenceParallel(None, topology, COST)
        steps = [parallel.plan([5, 4]), parallel.plan([5, 4]), parallel.plan([5, 6])]

        def call(
            heads: int = 4,
            kv_heads: int = 2,
            dim: int = 8,
            dtype: torch.dtype = torch.float32,
            step: int = 0,
            steps: list[Any] = steps,
            **settings: Any,
        ) -> Tensor:
            tokens = steps[step].local.positions.size
            q, k, v = (torch.ones(tokens, h, dim, dtype=dtype) for h in (heads, kv_heads, kv_heads))
            return steps[step].attend(q.requires_grad_(), k, v, **settings)

        changes: dict[str, dict[str, Any]] = {
            "kv_heads": {"kv_heads": 4},
            "dim": {"dim": 4},
            "dtype": {"dtype": torch.float64},
            "step": {"step": 1},
            "tokens": {"step": 2},
            "causal": {"causal": True},
            "scale": {"scale": 0.5},
        }
        if topology == "g2n1":
            changes["heads"] = {"heads": 8}
        found += untold(call, changes, of=f"{topology}: ")
        one, two = call(), call()
        back = [first_exchange(out.sum().backward) for out in (two, one)]
        found += [f"{topology}: which call goes back"] if back[0] == back[1] else []
    return found


@pytest.mark.parametrize("case", [routes, samples, heads, on_meshes, in_bags])
def test_what_decides_an_exchange_marks_it(case: Callable[[], list[str]]) -> None:
    assert run_ranks(case, 2) == [[], []]
