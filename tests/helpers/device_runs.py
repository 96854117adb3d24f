"""What the tests of `tests/gpu` do on a device. On the host it does the same, and is tried there.

A world of one has NCCL where the device is one of CUDA, and gloo on the host.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from bascule.attention.kernels.protocol import AttentionKernel
from bascule.attention.kernels.registry import select_kernel
from bascule.comm import stage_cuda
from bascule.comm.quantized import CommDtype, Quantized
from bascule.data.cost_tracker import CostTracker
from bascule.data.loader import BalancedLoader, LoaderOptions
from bascule.diffusers import parallelize
from bascule.errors import ConfigError
from bascule.machine.costs import PolynomialCost
from bascule.models import LocalExchange, PackedBatch
from bascule.parallel import SequenceParallel
from tests.helpers.cases import (
    COST,
    Batch,
    Samples,
    all_batches,
    assert_same,
    averaged,
    config_of,
    make_model,
    named_gradients,
    norm_of,
    own_samples,
    random_batch,
    reference_step,
)
from tests.helpers.inference_cases import Case, difference, make_inputs
from tests.helpers.inference_cases import make_model as make_split_model

CONFIG = config_of(4, 2, head_dim=16)
MODELS = {"flux": Case("flux", 4, 2, 7, (4, 5)), "wan": Case("wan", 4, 2, 7, (4, 5))}


def first_device(kind: str) -> torch.device:
    """The host, or the first device of CUDA, which is the current one from here on."""
    if kind == "cuda":
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    return torch.device(kind)


def on_device(samples: Samples, device: torch.device, *, mask: bool = False) -> Samples:
    """The same there; the mask only if it is asked for."""
    given = dict(vars(samples.inputs))
    for name, x in given.items():
        if x is not None and (mask or name != "is_image"):
            given[name] = x.to(device)
    return Samples(PackedBatch(**given), samples.target.to(device), samples.seq_lens)


def kernel_or_skip(name: str, dtype: torch.dtype, head_dim: int, **form: Any) -> AttentionKernel:
    try:
        return select_kernel(name, "cuda", dtype=dtype, head_dim=head_dim, **form)
    except ConfigError as reason:
        pytest.skip(str(reason))


def side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Another stream than the default one; on the host there is none."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


@contextlib.contextmanager
def nothing_waits_for(device: torch.device) -> Iterator[None]:
    """Within it, what makes the host wait for the device is an error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def packed_errors(
    kind: str, dtype: torch.dtype, kernel: str | None, mask: bool
) -> list[tuple[str, float, float]]:
    """By batch, errors of the packed model's output and of its gradients, planned for this rank.

    Relative to the same weights in float64 on the host, alone. `mask`: whether the mask of a
    batch is on the device, too.
    """
    device = first_device(kind)
    rough, exact = make_model(CONFIG, dtype).to(device), make_model(CONFIG)
    exact.load_state_dict(rough.state_dict())
    sp = SequenceParallel(None, "g1n1", COST, device=device, kernel=kernel)
    found: list[tuple[str, float, float]] = []
    for name, batch in all_batches(1, 4).items():
        alone = Samples.draw(batch[0], CONFIG)
        samples = on_device(own_samples(batch, CONFIG, 0, dtype), device, mask=mask)
        outs: list[Tensor] = []
        for model, given, exchange in (
            (exact, alone, LocalExchange(alone.seq_lens)),
            (rough, samples, sp.plan(samples.seq_lens)),
        ):
            model.zero_grad()
            out = model(given.inputs, exchange)
            given.losses(out).sum().backward()
            outs.append(out.detach().cpu().double())
        wanted = named_gradients(exact)
        off = {of: x.cpu().double() - wanted[of] for of, x in named_gradients(rough).items()}
        error = (outs[1] - outs[0]).norm() / outs[0].norm().clamp(min=1e-300)
        found.append((name, float(error), norm_of(off) / max(norm_of(wanted), 1e-300)))
    return found


def routed_on_streams(kind: str, num_steps: int) -> int:
    """Rows that came back changed, where their memory is used again at once by another stream."""
    device = first_device(kind)
    sp = SequenceParallel(None, "g1n1", COST, device=device)
    lens, num_wrong = [300, 0, 77, 1024], torch.zeros((), dtype=torch.int64, device=device)
    slow = torch.randn(1024, 1024, device=device)
    for number in range(num_steps):
        host = torch.arange(sum(lens) * 64, dtype=torch.float32).view(-1, 64) + number
        with side_stream(device):
            if device.type == "cuda":
                host = host.pin_memory()
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                slow = torch.tanh(slow @ slow)  # so that what follows is late
            x = host.to(device, non_blocking=True)
            step = sp.plan(lens)
            back = step.restore(step.route(x=x)["x"])
            num_wrong = num_wrong + (back != x).sum()
            del x, back
            if device.type == "cuda":
                done = torch.cuda.current_stream().record_event()
                torch.cuda.default_stream().wait_event(done)
                num_wrong.record_stream(torch.cuda.default_stream())
                slow.record_stream(torch.cuda.default_stream())
        noise = [torch.full((sum(lens), 64), -1.0, device=device) for _ in range(4)]
        del noise
    return int(num_wrong)


def quiet_steps(kind: str) -> list[float]:
    """Losses of steps of which all but the first two never make the host wait for the device."""
    device, losses = first_device(kind), list[Tensor]()
    model = make_model(CONFIG, torch.float32).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sp = SequenceParallel(None, "g1n1", COST, device=device)
    batch = random_batch(1, 3)
    samples = on_device(own_samples(batch, CONFIG, 0, torch.float32), device)
    rows = samples.inputs.is_image.nonzero()[:, 0].to(device)

    def train() -> None:
        step = sp.plan(samples.seq_lens)
        predicted = model(samples.inputs, step).index_select(0, rows)
        loss = step.mean((predicted - samples.target).square().mean(dim=-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    train()
    train()
    with nothing_waits_for(device):
        train()
        train()
    return [float(loss) for loss in losses]


def wire_bytes(kind: str, fmt: Literal["int8", "e4m3"]) -> tuple[float, float]:
    """Share of the bytes of a wire that are those of the host, and the largest error of a value.

    The error is in units of its row's peak.
    """
    device, generator = first_device(kind), torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 301, 64, generator=generator) * 3
    x[:, :, 0] = 0.0
    x[:, :, 1, 5] = torch.inf
    wire = Quantized(fmt)
    packed = wire.pack(x.to(device))
    alike = (packed.cpu() == wire.pack(x)).double().mean()
    back = wire.unpack(packed, torch.float32).cpu()
    assert back[:, :, 1].isnan().all() and not back[:, :, 0].any()
    off = (back - x)[:, :, 2:].abs() / x[:, :, 2:].abs().amax(-1, keepdim=True)
    return float(alike), float(off.max())


def make_loader(*, pins: bool) -> BalancedLoader:
    def samples() -> Iterator[dict[str, Tensor]]:
        for number in range(120):
            length = 16 * (1 + number * 7 % 40)
            yield {"input_ids": torch.full((length,), number)}

    options = LoaderOptions(batch_size=4, collate_fn=list, pin_memory=pins, timeout_s=100)
    return BalancedLoader(samples(), cost=PolynomialCost(0.0, 1.0, 0.0), options=options)


def loaded(kind: str) -> list[tuple[int, bool, bool]]:
    """Of each sample its length, whether it was pinned, and whether all of it came to the device.

    What is pinned is let go as soon as its copy was asked for.
    """
    device, found = first_device(kind), list[tuple[int, bool, Tensor]]()
    for batch in make_loader(pins=device.type == "cuda"):
        with side_stream(device):
            for sample in batch.data:
                ids = sample["input_ids"]
                x = ids.to(device, non_blocking=True)
                found.append((len(ids), ids.is_pinned(), (x == x[0]).all()))
    return [(length, is_pinned, bool(is_whole)) for length, is_pinned, is_whole in found]


def learned(kind: str, work: Callable[[int], object]) -> tuple[int, list[float]]:
    """Fits of a CostTracker, and what its cost of longer and longer samples is, if it has one."""
    device = first_device(kind)
    tracker = CostTracker(make_loader(pins=False), warmup=20, discard=2, device=device)
    for batch in tracker:
        work(sum(len(sample["input_ids"]) for sample in batch.data))
    cost = tracker.cost
    return tracker.num_fits, [] if cost is None else cost([100, 1000, 10_000]).tolist()


def split_alone(kind: str, name: str, mode: str | None, dtype: torch.dtype) -> list[float]:
    """Errors of a model that one rank has to itself, against the same without bascule.

    Several calls, of which a graph is recorded in an early one.
    """
    device, errors = first_device(kind), list[float]()
    model = make_split_model(MODELS[name], dtype).to(device)
    drawn = [make_inputs(MODELS[name], dtype, seed) for seed in range(4)]
    given = [
        {key: x.to(device) if isinstance(x, Tensor) else x for key, x in one.items()}
        for one in drawn
    ]
    with torch.no_grad():
        wanted = [model(**one)[0].clone() for one in given]
        with parallelize(model) as handle:
            if mode is not None:
                handle.compile(mode)  # pyright: ignore[reportArgumentType]
            for inputs, exact in zip(given, wanted, strict=True):
                errors.append(difference(model(**inputs)[0].clone(), exact))
    return errors


def train_together(kind: str, topology: str, num_steps: int, check_every: int) -> int:
    """Steps of ranks that share a device, over gloo; how many were compared with one process."""
    device, num_checked = first_device(kind), 0
    stage_cuda()
    sp = SequenceParallel(None, topology, COST, device=device, kernel="plain")
    model, whole = make_model(CONFIG).to(device), make_model(CONFIG)
    for number in range(num_steps):
        batch: Batch = random_batch(sp.group.size, number)
        samples = on_device(own_samples(batch, CONFIG, sp.rank), device)
        model.zero_grad()
        step = sp.plan(samples.seq_lens)
        loss = step.mean(samples.losses(model(samples.inputs, step)))
        loss.backward()
        grads = averaged({name: x.cpu() for name, x in named_gradients(model).items()})
        if number % check_every == 0:
            whole.load_state_dict(model.state_dict())
            assert_same((loss.item(), grads), reference_step(whole, batch), f"step {number}")
            num_checked += 1
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 1e-3 * grads[name].to(device)
    return num_checked


def split_together(
    kind: str, name: str, ulysses: int, ring: int, comm_dtype: CommDtype | None
) -> float:
    """Error of a model that ranks on one device split, against the same on one of them."""
    device = first_device(kind)
    stage_cuda()
    model, inputs = make_split_model(MODELS[name]).to(device), make_inputs(MODELS[name])
    given = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in inputs.items()}
    with torch.no_grad():
        wanted = model(**given)[0].clone()
        degrees: Any = {"ulysses_degree": ulysses, "ring_degree": ring}
        with parallelize(model, comm_dtype=comm_dtype, **degrees):
            return difference(model(**given)[0], wanted)
