"""A function of the user's as attention kernel: bags, meshes, rings, compiled; in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from bascule import SequenceParallel, Sequences, Span, context_parallel, parallelize
from bascule.attention import (
    AttentionOptions,
    FunctionKernel,
    PackedSequences,
    SequenceLayout,
    attend_packed,
    attention,
    split,
)
from bascule.errors import ConfigError
from tests.helpers.cases import COST
from tests.helpers.inference_toy import TABLE, make_toy, toy_inputs
from tests.helpers.mesh_cases import difference, make_mask, make_mesh, reference, summed, three
from tests.helpers.oracle import dense_attention, packed_attention
from tests.helpers.ranks import raised_by, run_ranks


def out_alone(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Tensor:
    return dense_attention(q, k, v, causal=is_causal, scale=scale)[0]


def out_and_lse(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, attn_mask: Any = None
) -> tuple[Tensor, Tensor]:
    return dense_attention(q, k, v, attn_mask, causal=is_causal, scale=scale)


def without_autograd(*qkv: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = out_and_lse(*(x.detach() for x in qkv), **options)
    return out, lse


def by_hand(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by the softmax over all keys, of which k and v are some."""
    scores = q @ k.mT * scale + (0 if attn_mask is None else attn_mask)
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
    weights = (scores - lse[..., None]).exp()
    inner = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return inner @ k, inner.mT @ q, weights.mT @ grad


KERNELS = {
    "out": FunctionKernel("out", out_alone),
    "torch's": FunctionKernel("torch's", functional.scaled_dot_product_attention, takes_mask=True),
    "lse": FunctionKernel("lse", out_and_lse, gives_lse=True, takes_mask=True),
    "by hand": FunctionKernel(
        "by hand", without_autograd, by_hand, gives_lse=True, takes_mask=True
    ),
    "no gradient": FunctionKernel("no gradient", without_autograd, gives_lse=True),
}
WITH_LSE = ("lse", "by hand")
WHOLE = ("out", "torch's", *WITH_LSE)  # attend to all keys at once
LENS = [[5, 1, 9], [3]]
SHAPES = ("g1n2", "g2n1", "g1r2n1")


def pair_error(
    out: Tensor, leaves: Any, alone: Tensor, wanted: Any, draw: torch.Generator
) -> float:
    """Return the largest error of an output and of gradients of its inputs."""
    grad = torch.randn(alone.shape, generator=draw).double()
    out.backward(grad)
    alone.backward(grad)
    pairs = zip([out, *(x.grad for x in leaves)], [alone, *(x.grad for x in wanted)], strict=True)
    return max(difference(one, other) for one, other in pairs)


def packed_error(spec: str, name: str, masks: Any, causal: bool) -> float:
    """Return the error of this rank's samples in bags, against one process."""
    rank, draw = dist.get_rank(), torch.Generator().manual_seed(1)
    tensors = [torch.randn(sum(map(sum, LENS)), n, 4, generator=draw).double() for n in (4, 2, 2)]
    own = [x.split([sum(one) for one in LENS])[rank] for x in tensors]
    leaves, wanted = [[x.clone().requires_grad_() for x in own] for _ in range(2)]
    parallel = SequenceParallel(None, spec, COST, kernel=KERNELS[name])
    step = parallel.plan(LENS[rank] if masks is None else Sequences(LENS[rank], masks))
    parts = step.route(**dict(zip("qkv", leaves, strict=True)))
    out = step.restore(step.attend(*(parts[x] for x in "qkv"), causal=causal))
    q, k, v = wanted
    alone = packed_attention(q, k, v, LENS[rank], causal=causal or masks is not None)[0]
    return pair_error(out, leaves, alone, wanted, draw)


def bags() -> dict[str, float]:
    kinds = [(None, False), (None, True), ("causal", False)]
    names = {"g1r2n1": WITH_LSE}
    return {
        f"{spec}, {name}, {masks}, {causal}": packed_error(spec, name, masks, causal)
        for spec in SHAPES
        for name in names.get(spec, WHOLE)
        for masks, causal in kinds
    }


def mesh_error(
    ring: int, ulysses: int, name: str, mask: str, wrap: Callable[..., Any], overlap: bool
) -> float:
    """Return the error of attention over a mesh, summed over its ranks, against one process."""
    mesh, layout = make_mesh(ring, ulysses), SequenceLayout((6, 11), ring, ulysses)
    draw = torch.Generator().manual_seed(1)
    wholes = three(torch.randn(2, n, 17, 4, generator=draw).double() for n in (4, 2, 2))
    seen = make_mask(mask, 2, 4, 17, torch.float64)
    leaves = [split(x, mesh, layout, 2).requires_grad_() for x in wholes]
    options = AttentionOptions(layout, KERNELS[name], overlap=overlap)
    settings: dict[str, Any] = {"attn_mask": seen, "is_causal": mask == "causal"}
    attend = wrap(lambda q, k, v: attention(q, k, v, mesh, options=options, **settings))
    out = attend(*leaves)
    wanted = [x.clone().requires_grad_() for x in wholes]
    alone = reference(*three(wanted), seen, mask == "causal")
    grad = torch.randn(alone.shape, generator=draw).double()
    out.backward(split(grad, mesh, layout, 2))
    alone.backward(grad)
    parts = [out, *(x.grad for x in leaves)]
    sums = summed(mesh, layout, *(x.detach() for x in parts if x is not None))
    pairs = zip(sums, [alone, *(x.grad for x in wanted)], strict=True)
    return max(difference(one, other) for one, other in pairs if other is not None)


def plainly(attend: Any) -> Any:
    return attend


compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")
MASKS = ("none", "bool", "empty rows", "by head", "causal")


def meshes() -> dict[str, float]:
    cases = [(1, 2, "out", "none", plainly, False), (1, 2, "out", "none", compiled, False)]
    cases += [(1, 2, "torch's", mask, plainly, False) for mask in MASKS]
    for name in WITH_LSE:
        cases += [(2, 1, name, mask, plainly, False) for mask in MASKS]
        cases += [(1, 2, name, "none", plainly, True), (2, 1, name, "none", compiled, False)]
        cases += [(2, 1, name, "key padding", compiled, False)]
    return {str(case): mesh_error(*case) for case in cases}


def models() -> dict[str, float]:
    inputs, calls = toy_inputs(), list[str]()

    def counted(*qkv: Tensor, **options: Any) -> Any:
        calls.append("attend")
        return out_and_lse(*qkv, **options)

    errors = dict[str, float]()
    with torch.no_grad():
        wanted = make_toy()(**inputs)
        for ring, ulysses in ((2, 1), (1, 2)):
            kernel = FunctionKernel("counted", counted, gives_lse=True, takes_mask=True)
            mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
            with parallelize(model := make_toy(), mesh, table=TABLE, kernel=kernel):
                errors[f"{ring} x {ulysses}"] = difference(model(**inputs), wanted)
    assert calls
    return errors


@pytest.mark.parametrize(("errors", "num_cases"), [(bags, 30), (meshes, 23), (models, 2)])
def test_functions_of_the_user_attend_as_one_process(
    errors: Callable[[], Any], num_cases: int
) -> None:
    for each in run_ranks(errors, 2):
        assert len(each) == num_cases and {k: x for k, x in each.items() if not x < 1e-12} == {}


# --- what is refused ------------------------------------------------------------------------------

SDPA = functional.scaled_dot_product_attention
ROWS = torch.ones(1, 4, 8, 2, dtype=torch.float64)


def on_mesh(name: str, ring: int, ulysses: int, **options: Any) -> None:
    mask = options.pop("attn_mask", None)
    settings = AttentionOptions(kernel=KERNELS[name], **options)
    attention(ROWS, ROWS, ROWS, make_mesh(ring, ulysses), attn_mask=mask, options=settings)


def in_bags(name: str, spec: str, masks: Any = None) -> None:
    step = SequenceParallel(None, spec, COST, kernel=KERNELS[name]).plan(Sequences([4], masks))
    rows = step.route(x=torch.ones(4, 2, 2).double())["x"]
    step.attend(rows, rows, rows)


def in_model(name: str) -> None:
    with context_parallel(make_mesh(2, 1), kernel=KERNELS[name]):
        SDPA(ROWS, ROWS, ROWS)


def other_names() -> None:
    name = f"mine {dist.get_rank()}"
    SequenceParallel(None, "g2n1", COST, kernel=FunctionKernel(name, out_alone))


MIXED = [[Span(2, causal=False), Span(2, causal=True)]]
REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "ring": (partial(on_mesh, "out", 2, 1), "kernel 'out' gives no log-sum-exp"),
    "overlap": (partial(on_mesh, "out", 1, 2, overlap=True), "gives no log-sum-exp"),
    "ring of a bag": (partial(in_bags, "out", "g1r2n1"), "gives no log-sum-exp"),
    "parts of a mask": (partial(in_bags, "out", "g2n1", MIXED), "gives no log-sum-exp"),
    "ring of a model": (partial(in_model, "out"), "set gives_lse=True"),
    "mask": (
        partial(on_mesh, "out", 1, 2, attn_mask=torch.ones(1, 1, 16, 16).bool()),
        "kernel 'out' takes no mask (takes_mask=True says so)",
    ),
    "names": (other_names, "'mine 0'"),
}


def refused() -> dict[str, tuple[list[str], str]]:
    return {what: raised_by(call) for what, (call, _) in REFUSED.items()}


def test_what_a_function_cannot_do_is_refused_on_all_ranks() -> None:
    for errors in run_ranks(refused, 2):
        for what, (classes, text) in errors.items():
            assert {"ConfigError", "CommError"} & set(classes), (what, classes)
            assert REFUSED[what][1] in text, (what, text)


def whole(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    return q.flatten(2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FunctionKernel("", out_alone), "give a name, and functions"),
        (lambda: FunctionKernel("one", "sdpa"), "give a name, and functions"),  # pyright: ignore
        (lambda: AttentionOptions(kernel=SDPA), "or give FunctionKernel(name, function)"),  # pyright: ignore
        (lambda: one_rank(KERNELS["no gradient"]), "set its gradients=.."),
        (lambda: one_rank(FunctionKernel("one", whole)), "return out (1, 4, 3, 2), and with"),
        (lambda: one_rank(FunctionKernel("one", out_and_lse)), "return out (1, 4, 3, 2), and with"),
        (
            lambda: one_rank(FunctionKernel("one", out_alone, gives_lse=True)),
            "gives_lse=True LSE (1, 4, 3)",
        ),
    ],
)
def test_functions_that_do_otherwise_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert words in str(error.value)


def one_rank(kernel: FunctionKernel) -> None:
    seqs = PackedSequences.build([3], torch.device("cpu"))
    rows = torch.ones(3, 4, 2, dtype=torch.float64, requires_grad=True)
    attend_packed(rows, rows, rows, seqs, kernel=kernel).sum().backward()
