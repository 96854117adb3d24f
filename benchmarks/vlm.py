"""Measure training of a vision-language model whose two parts are uneven in different ways."""

import runpy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from encoders import PATCH, length_of, photos
from measuring import on_ranks, ratio, say
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from bascule.comm.groups import member_of, resolve
from bascule.comm.items import measure_exchange
from bascule.data import BalancedLoader, LoaderOptions, Pack
from bascule.data.packs import make_pack
from bascule.encoders import BalancedEncoder, EncoderOptions
from bascule.encoders.items import table_of
from bascule.machine.cluster import WITHOUT_RECOMPUTING, Cluster
from bascule.machine.costs import PolynomialCost
from bascule.machine.fits import fit_item_latency
from bascule.transformers import inputs_of_pack

NUM_RANKS, TARGET, AHEAD, ALIKE = 2, 0.95, 2, 1e-3
PACK = Pack(tokens=2**20)  # it bounds nothing
TOGETHER, REPEATS = 4, 4  # equal items of a timed call, so that its launches hardly count; calls
PASSES = WITHOUT_RECOMPUTING.linear
STAY = "samples stay"
Fields = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """The size of the benchmark."""

    samples: int = 4  # of a rank in a step
    steps: int = 5  # of a way in a turn
    turns: int = 8
    patches: int = 400  # most of a photo
    width: int = 256  # of the language model


def vlm(*, quick: bool = False) -> dict[str, Any]:
    """Measure what one cost and two costs gain in training a vision-language model.

    Six minutes. Two ranks over gloo train a Qwen2.5-VL on packs of texts with a photo, and of
    photos with a caption. In turns: samples stay; the loader moves them by the cost of the language
    model, or of both parts; the loader by that of the language model and the encoder by that of the
    tower. Under DDP ranks wait once a step, under FSDP2 in each layer. Costs are fitted to items
    that both ranks time at once. Target: 95 % of the speed-up that plans predict, with exchanges.
    """
    cases = on_ranks(_on_rank, Scale(3, 2, 2, 64, 64) if quick else Scale())
    for name, case in cases.items():
        for way, one in case.items():
            low, high = (one["speed_up"][f"{which}_quartile"] for which in ("lower", "upper"))
            share = one["speed_up"]["median"] / one["predicted"]
            say(
                f"{name}, {way}: {1e3 * one['step_s']:.0f} ms a step, "
                f"{one['speed_up']['median']:.2f}x as fast ({low:.2f} to {high:.2f}), {share:.0%} "
                f"of {one['predicted']:.2f}x predicted; max/mean {one['language']:.2f} of the "
                f"language model, {one['tower']:.2f} of the tower",
                None if way == STAY else share >= TARGET,
            )
    return {"ranks": NUM_RANKS, "target": TARGET, "cases": cases}


# --- ways of training ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Seconds of a forward and backward pass, of both parts."""

    visual: nn.Module
    language: PolynomialCost
    tower: PolynomialCost

    def of_photos(self, fields: Fields) -> float:
        """Return the seconds of the photos of a sample, or of a pack, in the tower."""
        lengths = [length_of(self.visual, item) for item in items_of(self.visual, fields)]
        return float(self.tower(*np.transpose(lengths)).sum())

    def microseconds(self, sample: Fields) -> int:
        """Return those of a sample in both parts: one number for the loader to balance."""
        return round(1e6 * (float(self.language(len(sample["labels"]))) + self.of_photos(sample)))


@dataclass(frozen=True)
class Way:
    """A loader of packs, the scales of its losses where it gives none, and an encoder."""

    loader: Any
    scales: Sequence[float] | None = None
    encoder: BalancedEncoder | None = None

    def packs(self, model: nn.Module, number: int) -> Iterator[tuple[Fields, float, Any]]:
        """Give the first packs, each with its loss's scale and the encoder in the model, if any."""
        installed = self.encoder.install(model) if self.encoder else None
        if self.scales is not None:
            yield from islice(zip(self.loader, self.scales, repeat(None)), number)
        else:
            for batch in islice(self.loader, number):
                yield batch.data, batch.loss_scale, installed
            self.loader.close()
        if installed:
            installed.undo()


def ways_of(model: nn.Module, samples: list[Fields], costs: Costs, size: int) -> dict[str, Way]:
    """Make the loaders and the encoder; `size` samples of a rank are a step."""
    given: Any = samples
    local = DataLoader(given, size, collate_fn=partial(make_pack, pack=PACK))
    weight_fn = EXAMPLE["num_asked"]
    options = LoaderOptions(weight_fn=weight_fn, prefetch=AHEAD)
    by_language = BalancedLoader(local, cost=costs.language, options=options)
    micro, length_fn = PolynomialCost(0.0, 1e-6, 0.0), costs.microseconds
    by_both = BalancedLoader(local, cost=micro, length_fn=length_fn, options=options)
    wires = measure_exchange(member_of(resolve(None), "benchmark"))
    speed = 1.0 / wires.byte_s
    cluster = Cluster(1, NUM_RANKS, 1e12, 1e12, speed, speed, wires.launch_s)
    tower = costs.tower
    each = (tower.quadratic / PASSES, tower.linear / PASSES, tower.constant / PASSES)
    encoder = BalancedEncoder(
        tower_of(model), cost=PolynomialCost(*each), options=EncoderOptions(cluster=cluster)
    )
    weights = torch.tensor([weight_fn(one) for one in samples]).view(-1, size).sum(1).double()
    dist.all_reduce(total := weights.clone())
    return {
        STAY: Way(local, (NUM_RANKS * weights / total).tolist()),
        "one cost, of the language model": Way(by_language),
        "one cost, of both": Way(by_both),
        "two costs": Way(by_language, encoder=encoder),
    }


def step(model: nn.Module, data: Fields, scale: float) -> Tensor:
    """Compute gradients; return the loss as it counts in the mean."""
    loss = model(**inputs_of_pack(data, PACK, model)).loss * scale
    loss.backward()
    return loss.detach()


# --- measuring ----------------------------------------------------------------------------------


def _on_rank(scale: Scale) -> dict[str, Any]:
    samples, found = make_samples(scale), dict[str, Any]()
    costs = fitted(make_model(scale.width), samples)
    for name, wrap in {"DDP": DistributedDataParallel, "FSDP2": sharded}.items():
        model = wrap(make_model(scale.width))
        ways = ways_of(model, samples, costs, scale.samples)
        small = min(samples, key=costs.microseconds)
        found[name] = measure(model, ways, costs, small, scale)
    return found


def measure(
    model: nn.Module, ways: dict[str, Way], costs: Costs, small: Fields, scale: Scale
) -> dict[str, Any]:
    """Return all ways in turns; the time of a small sample tells what any step takes."""
    names = list(ways)
    plans = {name: planned(model, way, costs, scale.steps) for name, way in ways.items()}
    differ = {name: difference(plans[STAY][2], plan[2]) for name, plan in plans.items()}
    if max(differ.values()) > ALIKE:
        raise RuntimeError(f"losses or gradients differ from those where samples stay: {differ}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    tiny = Way([make_pack([small], PACK)] * (1 + REPEATS), [1.0] * (1 + REPEATS))
    rest = torch.tensor(timed(model, optimizer, tiny, REPEATS) - 1e-6 * costs.microseconds(small))
    dist.all_reduce(rest)  # for gradients and the update
    expected = dict[str, float]()
    for name, (loads, exchange_s, _) in plans.items():
        meets = ways[name].encoder or not isinstance(model, DistributedDataParallel)
        both = loads.max(1).sum(1) if meets else loads.sum(2).max(1)
        expected[name] = max(0.0, float(rest)) / NUM_RANKS + float(both.mean()) + exchange_s
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(scale.turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timed(model, optimizer, ways[name], scale.steps))
    found = dict[str, Any]()
    for name, (loads, exchange_s, _) in plans.items():
        uneven = loads.max(1).sum(0) / loads.mean(1).sum(0)
        found[name] = {
            "step_s": statistics.median(times[name]),
            "predicted_step_s": expected[name],
            "speed_up": ratio(times[STAY], times[name]),
            "predicted": expected[STAY] / expected[name],
            "exchange_s": exchange_s,
            "difference": differ[name],
        } | dict(zip(("tower", "language"), uneven.tolist(), strict=True))
    return found


def timed(model: nn.Module, optimizer: torch.optim.Optimizer, way: Way, num_steps: int) -> float:
    """Return the seconds of a step, the first one left out."""
    start = 0.0
    for number, (data, scale, _) in enumerate(way.packs(model, 1 + num_steps)):
        step(model, data, scale)
        optimizer.step()
        optimizer.zero_grad()
        if number in (0, num_steps):
            dist.barrier()
            start = time.perf_counter() - start
    return start / num_steps


def planned(
    model: nn.Module, way: Way, costs: Costs, steps: int
) -> tuple[np.ndarray, float, list[Tensor]]:
    """Compute steps without an update.

    Return seconds (steps, ranks, 2) of tower and language model, and of a step's exchange; and the
    sums over the steps of the loss and of all gradients.
    """
    own, exchange_s, loss = list[tuple[float, float]](), 0.0, torch.zeros(())
    for number, (data, scale, installed) in enumerate(way.packs(model, 1 + steps)):
        loss += step(model, data, scale)
        tower_s = costs.of_photos(data)
        if installed:
            report = installed.encodings[0]  # of photos; there are no clips
            tower_s = PASSES * report.loads[dist.get_rank()]
            exchange_s += (report.exchange_s or 0.0) * bool(number and report.num_moved)
        own.append((tower_s, float(costs.language(np.diff(data["cu_seqlens"])).sum())))
    every: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(every, own[1:])
    dist.all_reduce(loss)
    grads: list[Any] = [x.grad for x in model.parameters() if x.grad is not None]
    kept = [(x.to_local() if isinstance(x, DTensor) else x).clone() for x in grads]
    model.zero_grad()
    return np.stack(every, axis=1), exchange_s / steps, [loss, *kept]


def difference(want: list[Tensor], got: list[Tensor]) -> float:
    """Return how far a loss or the gradients after it are apart, relatively; the larger."""
    squares = torch.zeros(2)
    for a, b in zip(want[1:], got[1:], strict=True):
        squares += torch.stack([(a - b).square().sum(), a.square().sum()])
    dist.all_reduce(squares)
    return max(float(squares[0] / squares[1]) ** 0.5, abs(float(got[0] / want[0]) - 1.0))


def fitted(model: nn.Module, samples: list[Fields]) -> Costs:
    """Fit costs to single texts and photos, the same on both ranks at once."""
    visual = tower_of(model)

    def encode(item: Fields) -> Tensor:
        return visual(**table_of(visual).join([item] * TOGETHER)).pooler_output.square().mean()

    def read(length: int) -> Tensor:
        texts = [EXAMPLE["make_sample"]([], "a" * length)] * TOGETHER
        return model(**inputs_of_pack(make_pack(texts, PACK), PACK, model)).loss

    items = {length_of(visual, item): item for one in samples for item in items_of(visual, one)}
    shared = [items, max(len(sample["labels"]) for sample in samples)]
    dist.broadcast_object_list(shared, src=0)
    items, longest = shared
    lengths = [sorted(items)[i] for i in np.linspace(0, len(items) - 1, 8).astype(int)]
    photo_s = seconds_of([partial(encode, items[length]) for length in lengths])
    tokens, pairs = np.transpose(lengths)
    texts = np.geomspace(32, longest, 8).astype(int)
    text_s = seconds_of([partial(read, int(length)) for length in texts])
    tower = fit_item_latency(tokens, photo_s, num_pairs=pairs)
    return Costs(visual, fit_item_latency(texts, text_s), tower)


def seconds_of(calls: Sequence[Callable[[], Tensor]]) -> np.ndarray:
    """Return an item's seconds in each call and its backward pass, the mean over ranks."""
    found = torch.empty(len(calls), REPEATS, dtype=torch.float64)
    for place in np.ndindex(*found.shape):
        dist.barrier()
        start = time.thread_time()
        calls[place[0]]().backward()
        found[place] = time.thread_time() - start
    dist.all_reduce(each := found[:, 1:].median(dim=1).values / TOGETHER)
    return each.numpy() / NUM_RANKS


# --- model and samples --------------------------------------------------------------------------

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "train_vlm.py"))


def attend_each(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, position_ids: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Attend within each sample of a pack, as kernels of variable lengths do on a GPU."""
    bounds = [*(position_ids[0] == 0).nonzero().flatten().tolist(), q.shape[2]]
    attend = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    each = [(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b]) for a, b in pairwise(bounds)]
    return torch.cat([attend(*one) for one in each], dim=2).transpose(1, 2), None


def make_model(width: int) -> nn.Module:
    """Return the model of the example, the same on every rank."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("each", attend_each)
    AttentionMaskInterface.register("each", lambda *_, **__: None)
    model = EXAMPLE["make_model"](width)
    model.set_attn_implementation({"text_config": "each"})
    return model


def sharded(model: Any) -> nn.Module:
    """Return the model, its tower and each layer of text sharded over all ranks."""
    for part in (model.model.visual, *model.model.language_model.layers, model):
        fully_shard(part)
    return model


def tower_of(model: Any) -> nn.Module:
    """Return the vision tower of a model, wrapped or not."""
    return getattr(model, "module", model).model.visual


def items_of(visual: nn.Module, fields: Fields) -> list[Any]:
    """Return the photos of a sample, or of a pack, as the tower takes them."""
    names = {"hidden_states": "pixel_values", "grid_thw": "image_grid_thw"}
    return table_of(visual).cut({key: fields[name] for key, name in names.items()})


def make_samples(scale: Scale) -> list[Fields]:
    """Draw this rank's samples: a long text after a photo, or a caption after several."""
    import transformers

    tf: Any = transformers
    processor = tf.Qwen2VLImageProcessorPil(patch_size=PATCH, max_pixels=scale.patches * PATCH**2)
    sizes = [photo.reduce(shrink) for photo in photos() for shrink in (1, 2, 3, 5)]
    made = [processor(images=[photo], return_tensors="pt") for photo in sizes]
    album = [("", one["pixel_values"], one["image_grid_thw"]) for one in made]
    random, samples = np.random.default_rng([13, dist.get_rank()]), list[Fields]()
    for _ in range((1 + scale.steps + AHEAD) * scale.samples):
        num_photos, num_words = 1, int(np.clip(random.lognormal(6.0, 0.7), 64, 1500))
        if random.random() < 0.5:
            num_photos, num_words = int(random.integers(2, 8)), int(random.integers(8, 48))
        chosen = [album[i] for i in random.integers(len(album), size=num_photos)]
        text = bytes(random.integers(32, 127, num_words, dtype=np.uint8)).decode()
        samples.append(EXAMPLE["make_sample"](chosen, text))
    return samples
