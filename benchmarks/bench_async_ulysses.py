"""Is it worth to send keys, values and queries each right after its projection?

Run: `python benchmarks/bench_async_ulysses.py` (about one minute); writes
results/async_ulysses.json.

Asynchronous Ulysses posts the exchange of each tensor as soon as its projection is done, so that it
travels beside the other projections. bascule posts all three after the last one, and attends to a
rank's own tokens while they travel. Both are written out here for two ranks of one thread, without
the library, so that they differ in nothing else: six layers of projections, attention and a
feed-forward of width 512, 576 tokens a rank, 8 heads, float32. They take turns; the 95 % interval
is that of the mean of the logarithms of the paired ratios.
"""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from _common import write_results
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import gelu

WIDTH, HEADS, TOKENS, LAYERS, ROUNDS = 512, 8, 576, 6, 60
SHAPE = (TOKENS, HEADS // 2, WIDTH // HEADS)
"""Of what two ranks exchange of each tensor: tokens, half of the heads, head width."""
_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def main() -> None:
    """Measure in spawned processes, print the ratio, write the results."""
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (f"file://{folder}/store", f"{folder}/times.pt"), nprocs=2)
        times = torch.load(f"{folder}/times.pt")
    logs = [math.log(a / b) for a, b in zip(times["together"], times["each"], strict=True)]
    middle = statistics.fmean(logs)
    half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    low, mean, high = (math.exp(middle + side * half) for side in (-1, 0, 1))
    print(
        f"each tensor after its projection: {mean:.3f}x ({low:.3f} to {high:.3f}) as fast as all "
        "after the last"
    )
    results = {
        "load_before": load_before,
        "median_s": {name: statistics.median(seconds) for name, seconds in times.items()},
        "speedup": {"mean": mean, "low": low, "high": high},
    }
    print("written:", write_results("async_ulysses", results))


def measure(rank: int, store: str, results: str) -> None:
    """Both ways in turns; rank 0 saves the seconds of each round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    x = torch.randn(2, TOKENS, WIDTH)[rank]
    layer = Layer(rank)
    ways: dict[str, Callable[[Tensor], Tensor]] = {"together": layer.together, "each": layer.each}
    times = {name: list[float]() for name in ways}
    with torch.inference_mode():
        assert torch.allclose(layer.together(x), layer.each(x), atol=1e-5)
        for turn in range(ROUNDS):
            for name in list(ways)[:: 1 if turn % 2 else -1]:
                dist.barrier()
                start, y = time.perf_counter(), x
                for _ in range(LAYERS):
                    y = ways[name](y) + layer.feed_forward(y)
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        torch.save(times, results)
    dist.barrier()
    dist.destroy_process_group()


class Layer:
    """Attention over two ranks whose exchanges overlap, posted in either way."""

    def __init__(self, rank: int) -> None:
        half = HEADS // 2
        self.other = 1 - rank
        self.mine, self.theirs = (slice(r * half, r * half + half) for r in (rank, 1 - rank))
        self.weights = torch.randn(3, WIDTH, WIDTH) * WIDTH**-0.5
        self.up, self.down = torch.randn(WIDTH, 4 * WIDTH) * 0.04, torch.randn(4 * WIDTH, WIDTH)
        self.sent, self.received = torch.empty(4, *SHAPE), torch.empty(4, *SHAPE)

    def together(self, x: Tensor) -> Tensor:
        """Project all, then post all in one exchange."""
        qkv = [self.project(i, x) for i in range(3)]
        return self.attend(qkv, self.post(slice(0, 3)))

    def each(self, x: Tensor) -> Tensor:
        """Post values, keys and queries as they come."""
        qkv, works = list[Tensor](), list[dist.Work]()
        for i in (2, 1, 0):
            qkv.insert(0, self.project(i, x))
            works += self.post(slice(i, i + 1))
        return self.attend(qkv, works)

    def project(self, i: int, x: Tensor) -> Tensor:
        """(T, H, D) one of q, k and v; the part of the other rank is ready to be sent."""
        out = (x @ self.weights[i]).view(TOKENS, HEADS, -1)
        self.sent[i] = out[:, self.theirs]
        return out

    def post(self, which: slice) -> list[dist.Work]:
        """Send some of the four tensors to the other rank, and receive its own."""
        send = dist.P2POp(dist.isend, self.sent[which], self.other)
        return dist.batch_isend_irecv(
            [send, dist.P2POp(dist.irecv, self.received[which], self.other)]
        )

    def attend(self, qkv: Sequence[Tensor], works: Sequence[dist.Work]) -> Tensor:
        """Own tokens first, those of the other rank next, own queries to its keys last."""
        q, k, v = (x[None, :, self.mine].transpose(1, 2) for x in qkv)
        own, own_lse = _attend(q, k, v)
        for work in works:
            work.wait()
        their_q, their_k, their_v = (x[None].transpose(1, 2) for x in self.received[:3])
        keys, values = torch.cat([k, their_k], 2), torch.cat([v, their_v], 2)
        self.sent[3] = _attend(their_q, keys, values)[0][0].transpose(0, 1)
        works = self.post(slice(3, 4))
        rest, rest_lse = _attend(q, their_k, their_v)
        weight = torch.sigmoid(own_lse - rest_lse)[..., None]
        out = own.new_empty(TOKENS, HEADS, WIDTH // HEADS)
        out[:, self.mine] = torch.lerp(rest, own, weight)[0].transpose(0, 1)
        for work in works:
            work.wait()
        out[:, self.theirs] = self.received[3]
        return out.view(TOKENS, WIDTH)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Work between attentions."""
        return gelu(x @ self.up) @ self.down * 1e-4


if __name__ == "__main__":
    main()
