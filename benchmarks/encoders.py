"""Measure encoders and VAEs over ranks: items in balance, and tiles."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import torch.distributed as dist
from measuring import in_turns, met, on_ranks, peak_bytes, ratio, summary
from PIL import Image
from torch import Tensor, nn

from bascule.comm.groups import member_of, resolve
from bascule.comm.items import leaves_of, measure_exchange
from bascule.encoders import BalancedEncoder, EncoderOptions, TiledVAE
from bascule.encoders.items import Item, form_of, table_of
from bascule.machine.cluster import WITHOUT_RECOMPUTING, Cluster
from bascule.machine.costs import PolynomialCost, TransformerCost
from bascule.machine.fits import fit_item_latency, fit_latency

WARMUP, SMALL_CALLS = 3, 20
NUM_RANKS, TARGET, SHARE_OF_EVEN = 2, 0.95, 1.02
PATCH, CLIP_FRAMES = 14, 4
TOWER = {"depth": 3, "hidden_size": 192, "intermediate_size": 512, "out_hidden_size": 192}
T5 = {"vocab_size": 512, "d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 6, "num_heads": 4}
VAE_CHANNELS = (16, 32, 32)
HOST = torch.device("cpu")
ItemCost = TransformerCost | PolynomialCost
TILES_TARGET, MEMORY_TARGET = 1.8, 0.6
SIDE = 224  # three tiles of 128, 128 and 32 pixels each way


# --- encoders -----------------------------------------------------------------------------------


def encoders(*, quick: bool = False) -> dict[str, Any]:
    """Measure a stage of encoders without and with balance, beside what its plan predicts.

    Ten minutes. Two ranks over gloo. A vision tower of Qwen2.5-VL encodes the photos of
    scikit-image, and clips that pan across them; T5 texts of unlike lengths; AutoencoderKL the
    photos. The tower also in a step with backward and update. "even" batches are the same on both
    ranks. Without balance each rank encodes its items in as few calls. Costs are fitted to single
    items that both ranks time at once; where one waits, the other is faster by what is timed, too.
    Predicted: the slowest rank's seconds as given, over its seconds as planned, the exchanges, and
    what a call with nothing to move takes. Targets: 95 % of it, and no stage or step slower.
    """
    results = on_ranks(_encoders_on_rank, *((3, 3) if quick else (6, 15)))
    for name, result in results.items():
        low, middle, high = result["measured"]
        if "even" in name:
            is_met, aim = middle >= 1 / SHARE_OF_EVEN, f"at least {1 / SHARE_OF_EVEN:.2f}"
        else:
            aim = f"{TARGET:.0%} of {result['predicted']:.2f} predicted"
            is_met = middle >= max(1.0, TARGET * result["predicted"])
        print(
            f"{met(is_met)}  {name}: {middle:.2f}x as fast ({low:.2f} to {high:.2f}; target "
            f"{aim}), {1e3 * result['without_s']:.0f} ms without, {result['moved_mb']:.2f} MB in "
            f"{1e3 * result['exchange_s']:.1f} ms a batch"
        )
    return {"ranks": NUM_RANKS, "cases": results}


@dataclass(frozen=True)
class Case:
    """A stage.

    Attributes:
        module: The encoder.
        batches: Of each, the items of this rank.
        is_trained: Whether a step also has a backward pass and an update.
    """

    module: nn.Module
    batches: Sequence[list[Item]]
    is_trained: bool = False


def _encoders_on_rank(num_batches: int, rounds: int) -> dict[str, Any]:
    rank = dist.get_rank()
    photos, tower = photo_items(), make_tower()
    drawn = draws(rank, num_batches, len(photos))
    skewed = [[photos[i] for i in of_batch] for of_batch in drawn]
    even = [[photos[i] for i in of_batch] for of_batch in draws(0, num_batches, len(photos))]
    texts = [[text_item(rank, i) for i in of_batch] for of_batch in drawn]
    pixels = pixel_items()
    images = [[pixels[i % len(pixels)] for i in of_batch] for of_batch in drawn]
    cases = {
        "tower": Case(tower.requires_grad_(False), skewed),
        "tower, even": Case(tower, even),
        "t5": Case(make_t5(), texts),
        "vae": Case(make_vae(), images),
        "step of a tower": Case(make_tower(), skewed, is_trained=True),
        "step of a tower, even": Case(make_tower(), even, is_trained=True),
    }
    return {name: measure(case, rounds) for name, case in cases.items()}


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """A case without and with, in turns."""
    cost, unit_s, error, alone = fitted(case)
    wires = measure_exchange(member_of(resolve(None), "benchmark"))
    speed = 1.0 / wires.byte_s
    cluster = Cluster(1, NUM_RANKS, 1e12, 1e12, speed, speed, wires.launch_s)
    options = EncoderOptions(cluster=cluster)
    encoder = BalancedEncoder(case.module, cost=cost, options=options)
    ways: dict[str, Callable[[list[Item]], float]] = {
        "without": lambda items: stage(case, lambda: encode(case.module, items)),
        "with": lambda items: stage(case, lambda: encoder(items)),
    }
    for turn in range(WARMUP):
        ways["with"](case.batches[turn % len(case.batches)])
    call_s = extra_seconds(case, ways)
    factor = WITHOUT_RECOMPUTING.linear if case.is_trained else 1.0
    before, after, exchange, moved = 0.0, 0.0, call_s * len(case.batches), 0
    uneven = 0.0
    for items in case.batches:
        ways["with"](items)
        last = encoder.last
        assert last is not None
        given, planned = (factor * np.array(x) for x in (last.loads_as_given, last.loads))
        before += given.min() + alone * np.ptp(given)
        after += planned.min() + alone * np.ptp(planned)
        uneven += given.max()
        if last.num_moved:
            exchange += last.exchange_s or 0.0
            moved += last.exchange_bytes
    mean = mean_load(case, cost, factor * unit_s)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        spent = dict.fromkeys(ways, 0.0)
        for place, items in enumerate(case.batches):
            for name in sorted(ways, reverse=(turn + place) % 2 == 0):
                spent[name] += ways[name](items)
        for name, seconds in spent.items():
            times[name].append(seconds / len(case.batches))
    ratios = [a / b for a, b in zip(times["without"], times["with"], strict=True)]
    return {
        "measured": statistics.quantiles(ratios, n=4),
        "predicted": float(before / (after + exchange)),
        "imbalance_without": float(uneven / len(case.batches) / mean),
        "without_s": statistics.median(times["without"]),
        "with_s": statistics.median(times["with"]),
        "exchange_s": exchange / len(case.batches),
        "moved_mb": moved / 1e6 / len(case.batches),
        "call_s": call_s,
        "alone": alone,
        "fit_error": error,
        "last": str(encoder.last),
    }


def extra_seconds(case: Case, ways: dict[str, Callable[[list[Item]], float]]) -> float:
    """What the encoder adds to a call of one small item of each rank: nothing moves."""
    small: list[Any] = [
        min((x for own in case.batches for x in own), key=partial(length_of, case.module))
    ]
    dist.broadcast_object_list(small)
    best = {name: min(way(small) for _ in range(SMALL_CALLS)) for name, way in ways.items()}
    extra = torch.tensor(best["with"] - best["without"])
    dist.all_reduce(extra)
    return max(0.0, float(extra)) / NUM_RANKS


def mean_load(case: Case, cost: ItemCost, factor: float) -> float:
    """Seconds of a batch on the mean of the ranks."""
    lengths = [length_of(case.module, item) for items in case.batches for item in items]
    own = torch.tensor(sum(float(cost(*length)) for length in lengths))
    dist.all_reduce(own)
    return factor * float(own) / NUM_RANKS / len(case.batches)


def stage(case: Case, run: Callable[[], Any]) -> float:
    """Seconds from a barrier to a barrier."""
    dist.barrier()
    start = time.perf_counter()
    features = run()
    if case.is_trained:
        loss = torch.stack([leaf.square().mean() for leaf in leaves_of(list(features))]).sum()
        getattr(features, "attach", lambda x: x)(loss).backward()
        for parameter in case.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.data.sub_(parameter.grad, alpha=1e-6)
                parameter.grad = None
    dist.barrier()
    return time.perf_counter() - start


def encode(module: nn.Module, items: list[Item]) -> list[Any]:
    """What a rank does alone: items that fit into one call go into one."""
    table = table_of(module)
    function = module if table.method is None else getattr(module, table.method)
    by_form: dict[int, list[Item]] = {}
    for item in items:
        by_form.setdefault(form_of(item, HOST), []).append(item)
    return [function(**table.join(alike)) for alike in by_form.values()]


def length_of(module: nn.Module, item: Item) -> tuple[int, float]:
    """Tokens, and pairs that attention computes."""
    length = table_of(module).length
    assert length is not None
    found = length(module, item)
    return found if isinstance(found, tuple) else (found, float(found) ** 2)


def fitted(case: Case) -> tuple[ItemCost, float, float, float]:
    """From single items, the same on both ranks at once: a cost, seconds of its unit, the error.

    Last the share of an item's seconds that it takes while the other rank waits.
    """
    items = sorted({length_of(case.module, x): x for own in case.batches for x in own}.items())
    chosen = [items[i] for i in np.linspace(0, len(items) - 1, 8).round().astype(int)]
    given: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(given, [item for _, item in chosen])
    lengths, seconds, alone = list[tuple[int, float]](), list[float](), list[float]()
    for item in [item for own in given for item in own]:
        times = list[float]()
        for turn in range(4 + NUM_RANKS):  # all at once, then each alone
            dist.barrier()
            start = time.thread_time()
            if turn < 4 or turn - 4 == dist.get_rank():
                with torch.no_grad():
                    encode(case.module, [item])
                times.append(time.thread_time() - start)
        alone.append(times.pop() / statistics.median(times[1:]))
        lengths.append(length_of(case.module, item))
        seconds.append(statistics.median(times[1:]))
    spent = torch.tensor([*seconds, statistics.median(alone)], dtype=torch.float64)
    dist.all_reduce(spent)
    tokens, pairs = zip(*lengths, strict=True)
    *each, share = spent.numpy() / NUM_RANKS
    if len({form_of(item, HOST) for own in given for item in own}) > 1:  # a call each
        cost, unit_s = fit_item_latency(tokens, each, num_pairs=pairs), 1.0
    else:
        cost = fit_latency(tokens, each, TOWER["hidden_size"], num_pairs=pairs)
        unit_s = cost.seconds_per_unit or 1.0
    residuals = unit_s * cost(tokens, pairs) / each - 1.0
    return cost, unit_s, float(np.sqrt(np.mean(residuals**2))), min(1.0, float(share))


# --- modules and items --------------------------------------------------------------------------


def draws(rank: int, num_batches: int, num_items: int) -> list[list[int]]:
    """Which items a rank has in each batch: from one to seven, unlike on the ranks."""
    random = np.random.default_rng([11, rank])
    counts = random.integers(1, 8, num_batches)
    return [random.integers(num_items, size=int(n)).tolist() for n in counts]


def make_tower() -> nn.Module:
    """Of Qwen2.5-VL, with windows in two layers of three."""
    import transformers
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

    tf: Any = transformers
    vision = {**TOWER, "num_heads": 4, "patch_size": PATCH, "spatial_merge_size": 2}
    vision |= {"window_size": 8 * PATCH, "fullatt_block_indexes": [2]}
    torch.manual_seed(0)
    config = tf.Qwen2_5_VLConfig(vision_config=vision).vision_config
    return qwen.Qwen2_5_VisionTransformerPretrainedModel(config)


def make_t5() -> nn.Module:
    """Frozen, as a text encoder of a diffusion transformer is."""
    import transformers

    tf: Any = transformers
    torch.manual_seed(0)
    return tf.T5EncoderModel(tf.T5Config(**T5, dropout_rate=0.0)).requires_grad_(False)


def make_vae() -> nn.Module:
    """Frozen."""
    import diffusers

    torch.manual_seed(0)
    down = ("DownEncoderBlock2D",) * len(VAE_CHANNELS)
    up = ("UpDecoderBlock2D",) * len(VAE_CHANNELS)
    sizes: dict[str, Any] = {"block_out_channels": VAE_CHANNELS, "norm_num_groups": 8}
    made: Any = diffusers
    vae = made.AutoencoderKL(**sizes, down_block_types=down, up_block_types=up)
    return vae.requires_grad_(False)


def photos() -> list[Image.Image]:
    """Those inside the wheel of scikit-image."""
    import skimage

    paths = sorted((Path(skimage.__file__).parent / "data").iterdir())
    found = list[Image.Image]()
    for path in paths:
        if path.suffix in (".jpg", ".png"):
            with Image.open(path) as image:
                found.append(image.convert("RGB"))
    return found


def photo_items() -> list[Item]:
    """Patches of the photos, and of clips: every sixth photo, panned across."""
    import transformers

    tf: Any = transformers
    processor = tf.Qwen2VLImageProcessorPil(patch_size=PATCH, max_pixels=800 * PATCH**2)

    def patches(image: Image.Image) -> tuple[Tensor, Tensor]:
        made = processor(images=[image], return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]

    items = list[Item]()
    for place, photo in enumerate(photos()):
        values, grid = patches(photo)
        items.append({"hidden_states": values, "grid_thw": grid})
        if place % 6 == 0:
            width, height = photo.size[0] * 3 // 4, photo.size[1]
            steps = [i * (photo.size[0] - width) // CLIP_FRAMES for i in range(CLIP_FRAMES)]
            frames = [patches(photo.crop((x, 0, x + width, height))) for x in steps]
            grid = frames[0][1].clone()
            grid[0, 0] = CLIP_FRAMES
            items.append({"hidden_states": torch.cat([x for x, _ in frames]), "grid_thw": grid})
    return items


def pixel_items() -> list[Item]:
    """The photos at half their size and at most 384 pixels a side, in whole multiples of 8."""
    items = list[Item]()
    for photo in photos():
        small = photo.resize([min(max(8, side // 16 * 8), 384) for side in photo.size])
        pixels = torch.from_numpy(np.array(small, dtype=np.float32)).permute(2, 0, 1)
        items.append({"x": pixels[None] / 127.5 - 1.0})
    return items


def text_item(rank: int, number: int) -> Item:
    """Tokens of one text: log-normal numbers."""
    random = np.random.default_rng([5, rank, number])
    length = int(np.clip(random.lognormal(5.0, 0.9), 16, 1024))
    return {"input_ids": torch.from_numpy(random.integers(3, 500, (1, length)))}


# --- tiles --------------------------------------------------------------------------------------


def tiles(*, rounds: int = 15, quick: bool = False) -> dict[str, Any]:
    """Measure tiles of a VAE over two ranks against the model's own tiles on one.

    Four minutes. Both ranks have the image or its latents, and both get the result. Alone, one rank
    computes the model's own tiled result while the other waits. `bound` is two ranks over the
    imbalance of the tiles' pixels. Peaks are bytes that torch's allocator counted.
    """
    cases = on_ranks(_tiles_on_rank, 2 if quick else rounds)
    for case in cases:
        spread, peaks = case["speed_up"], case["peak_bytes"]
        share, of_tiled = (max(peaks["over ranks"]) / peaks[way] for way in ("whole", "tiled"))
        is_met = spread["median"] >= TILES_TARGET
        if case["what"].startswith("decode"):  # tiles are as large as pixels
            is_met &= share <= MEMORY_TARGET
        print(
            f"{met(is_met)}  {case['what']}: {spread['median']:.2f}x of one rank (quartiles "
            f"{spread['lower_quartile']:.2f} to {spread['upper_quartile']:.2f}; bound "
            f"{case['bound']:.2f}x, target {TILES_TARGET:g}x), peak {share:.2f}x of whole (target "
            f"of decoding {MEMORY_TARGET:g}x), {of_tiled:.2f}x of the model's own tiles"
        )
    return {"num_ranks": NUM_RANKS, "target": TILES_TARGET, "cases": cases}


def _tiles_on_rank(rounds: int) -> list[dict[str, Any]]:
    cases = list[dict[str, Any]]()
    with torch.no_grad():
        for name, vae, pixels in _vaes():
            tiled = TiledVAE(vae, options=EncoderOptions(features_for="all"))
            latents = vae.encode(pixels).latent_dist.mode()
            for way, x in (("decode", latents), ("encode", pixels)):
                cases.append(_tile_case(f"{way}, {name}", vae, tiled, way, x, rounds))
    return cases


def _vaes() -> list[tuple[str, Any, Tensor]]:
    """Random weights, the same on both ranks; an image, and a video of five frames."""
    torch.manual_seed(0)
    library: Any = diffusers
    image = library.AutoencoderKL(
        block_out_channels=(64, 128, 128),
        norm_num_groups=16,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
    )
    image.tile_sample_min_size, image.tile_latent_min_size = 128, 32
    options: dict[str, Any] = {"base_dim": 16, "z_dim": 4, "dim_mult": [1, 2, 2]}
    options |= {"temperal_downsample": [False, True], "num_res_blocks": 1}
    options |= {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    video = library.AutoencoderKLWan(**options, scale_factor_spatial=4)
    video.enable_tiling(128, 128, 96, 96)
    video.disable_tiling()
    pixels = torch.randn(1, 3, 5, SIDE, SIDE)
    return [
        ("AutoencoderKL, image", image.eval(), pixels[:, :, 0].contiguous()),
        ("AutoencoderKLWan, 5 frames", video.eval(), pixels),
    ]


def _tile_case(
    what: str, vae: Any, tiled: TiledVAE, way: str, x: Tensor, rounds: int
) -> dict[str, Any]:
    """A row of the results."""

    def tiled_alone() -> None:
        vae.enable_tiling()
        getattr(vae, way)(x)
        vae.disable_tiling()

    def alone() -> None:
        if dist.get_rank() == 0:
            tiled_alone()

    def over_ranks() -> None:
        getattr(tiled, way)(x)

    times = in_turns({"alone": alone, "over ranks": over_ranks}, rounds, warmup=1)
    assert tiled.last is not None
    own = torch.tensor(
        [peak_bytes(lambda: getattr(vae, way)(x)), peak_bytes(tiled_alone), peak_bytes(over_ranks)]
    )
    peaks = torch.empty(NUM_RANKS, 3, dtype=torch.int64)
    dist.all_gather(list(peaks), own)
    whole, of_tiled = peaks[0, :2].tolist()
    return {
        "what": what,
        "shape": list(x.shape),
        "speed_up": ratio(times["alone"], times["over ranks"]),
        "bound": NUM_RANKS / tiled.last.balanced,
        "plan": str(tiled.last),
        "peak_bytes": {"whole": whole, "tiled": of_tiled, "over ranks": peaks[:, 2].tolist()},
        "times": {name: summary(seconds) for name, seconds in times.items()},
    }
