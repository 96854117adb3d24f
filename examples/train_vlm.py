"""Train a tiny Qwen2.5-VL on photos and clips of different sizes with text, and on text alone.

    torchrun --standalone --nproc-per-node 2 examples/train_vlm.py [--no-balance] [--photos FOLDER]

On GPUs, or on CPU cores over gloo where there are none. The model is the real class of transformers
with random weights, the photos are those inside the wheel of scikit-image, clips pan across them,
the text says what they are called. Samples move between the ranks behind the compute, by what they
cost the language model; photos and frames move to be encoded, by what they cost the vision tower.
The loss stays the same: compare with --no-balance.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import skimage
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from bascule import BalancedEncoder, TransformerCost
from bascule.data import BalancedLoader, LoaderOptions, ResumableSampler, collate_padded

NUM_STEPS, BATCH_SIZE = 20, 5
WIDTH, NUM_LAYERS = 64, 2
VISION_START, IMAGE, VIDEO, VISION_END, END, VOCAB = 256, 257, 258, 259, 260, 261  # after bytes
PHOTO_COUNTS = [0, 0, 0, 0, 1, 1, 2, 3]  # of a sample; drawn from these
CLIP_FRAMES = 6  # in what takes the place of one photo in two
PATCH, MERGE, SHRINK = 14, 2, 4  # pixels of a patch, patches of a token along a side


Photo = tuple[str, Tensor, Tensor]  # name, patches (n, values), grid (1, 3)


def read_photo(path: Path, processor: Any) -> Photo:
    with Image.open(path) as image:
        small = image.convert("RGB").reduce(SHRINK)
    made = processor(images=[small], return_tensors="pt")
    return path.stem.replace("_", " "), made["pixel_values"], made["image_grid_thw"]


def pan_across(name: str, pixels: Tensor, grid: Tensor) -> Photo:
    """Make a clip: the left half of a photo, moved to the right from frame to frame."""
    rows, columns = grid[0, 1:].tolist()
    width = max(columns // 2 // MERGE, 1) * MERGE
    merged = pixels.view(rows // MERGE, columns // MERGE, MERGE**2, -1)
    starts = np.linspace(0, (columns - width) // MERGE, CLIP_FRAMES).round().astype(int)
    frames = [merged[:, i : i + width // MERGE].flatten(0, 2) for i in starts]
    return name, torch.cat(frames), torch.tensor([[CLIP_FRAMES, rows, width]])


def make_sample(photos: list[Photo], text: str, *, is_clip: bool = False) -> dict[str, Tensor]:
    """Photos or clips, if any, and a text after them."""
    answer, prompt, token = [*text.encode(), END], list[int](), VIDEO if is_clip else IMAGE
    for _, _, grid in photos:
        prompt += [VISION_START, *[token] * (int(grid.prod()) // MERGE**2), VISION_END]
    input_ids = torch.tensor(prompt + answer)
    sample = {
        "input_ids": input_ids,
        "labels": torch.tensor([-100] * len(prompt) + answer),
        "mm_token_type_ids": (input_ids == IMAGE).long() + 2 * (input_ids == VIDEO),
    }
    if photos:
        suffix, kind = ("_videos", "video") if is_clip else ("", "image")
        sample[f"pixel_values{suffix}"] = torch.cat([patches for _, patches, _ in photos])
        sample[f"{kind}_grid_thw"] = torch.cat([grid for _, _, grid in photos])
    return sample


def make_samples(folder: Path, num_samples: int) -> list[dict[str, Tensor]]:
    """Draw up to three photos for each sample, or one clip, or text alone."""
    random = np.random.default_rng(0)
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, min_pixels=28**2, max_pixels=300 * 28**2
    )
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in (".jpg", ".png")]
    photos = [read_photo(path, processor) for path in paths]
    samples: list[dict[str, Tensor]] = []
    for count in random.choice(PHOTO_COUNTS, num_samples):
        chosen = [photos[i] for i in random.integers(len(photos), size=max(count, 1))]
        names = " and ".join(name for name, _, _ in chosen)
        if count == 0:
            samples.append(make_sample([], f"No photo shows the {names}."))
        elif count == 1 and random.random() < 0.5:
            samples.append(make_sample([pan_across(*chosen[0])], f"This is {names}.", is_clip=True))
        else:
            samples.append(make_sample(chosen, f"This is {names}."))
    return samples


def num_asked(sample: dict[str, Tensor]) -> int:
    """Tokens over which the loss is the mean; models of transformers shift the labels."""
    return int((sample["labels"][1:] != -100).sum())


def make_model(width: int = WIDTH) -> Any:
    heads, tokens = {"num_attention_heads": 4, "num_key_value_heads": 2}, {"eos_token_id": END}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    rope |= {"mrope_section": [width // 32, 3 * width // 64, 3 * width // 64]}
    sizes = {"vocab_size": VOCAB, "hidden_size": width, "intermediate_size": 2 * width}
    text = sizes | heads | tokens | {"num_hidden_layers": NUM_LAYERS, "rope_parameters": rope}
    vision = {"depth": 2, "hidden_size": width // 2, "intermediate_size": width, "num_heads": 2}
    vision |= {"patch_size": PATCH, "spatial_merge_size": MERGE, "out_hidden_size": width}
    vision |= {"window_size": 4 * MERGE * PATCH, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config=text | {"bos_token_id": None},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    torch.manual_seed(0)  # the same weights on every rank
    return Qwen2_5_VLForConditionalGeneration(config)


def train(device: torch.device, folder: Path, *, balance: bool) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    # Without balancing, a microbatch of text alone leaves the vision tower without gradients.
    model = DistributedDataParallel(make_model().to(device), find_unused_parameters=True)
    tower = BalancedEncoder(model.module.model.visual, cost=TransformerCost(32, num_layers=2))
    installed = tower.install(model) if balance else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    samples = make_samples(folder, NUM_STEPS * BATCH_SIZE * num_ranks)
    loader = BalancedLoader(
        DataLoader(
            samples,  # pyright: ignore[reportArgumentType]
            batch_size=BATCH_SIZE,
            sampler=ResumableSampler(len(samples), rank=rank, num_ranks=num_ranks),
            collate_fn=collate_padded,
        ),
        cost=TransformerCost(WIDTH, num_layers=NUM_LAYERS),
        options=LoaderOptions(
            weight_fn=num_asked,
            min_gain=0.02 if balance else 0.999,
            pin_memory=device.type == "cuda",
        ),
    )
    exposed_s, ends = 0.0, [time.perf_counter()]
    for batch in loader:
        inputs = {name: x.to(device, non_blocking=True) for name, x in batch.data.items()}
        loss = model(**inputs).loss * batch.loss_scale  # the global mean, wherever samples are
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / num_ranks
        dist.all_reduce(mean)
        mean_loss = mean.item()  # waits for the device
        ends.append(time.perf_counter())
        average = batch.plan.loads.mean()
        after, before = batch.plan.makespan / average, batch.verdict.before / average
        waited_s, exposed_s = exposed_s, loader.metrics()["exposed_s"]
        if rank == 0:
            encoded = [] if installed is None else installed.encodings
            for kind, one in zip(("photos", "clips"), encoded, strict=False):
                if one is not None:
                    print(f"  {kind}: {one}")
            print(
                f"step {batch.step + 1}: loss {mean_loss:.6f}, imbalance (max/mean cost) "
                f"{after:.3f} instead of {before:.3f}, waited for the exchange "
                f"{1e3 * (exposed_s - waited_s):.1f} ms"
            )
    if rank == 0:
        did = loader.metrics()
        print(
            f"samples moved in {did['applied']} of {did['steps']} steps, sent "
            f"{did['sent_bytes'] / 1e6:.1f} MB; of the exchange {1e3 * did['hidden_s']:.1f} of "
            f"{1e3 * did['exchange_s']:.1f} ms hid behind the compute; a step took "
            f"{1e3 * float(np.median(np.diff(ends))):.0f} ms in the median"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--no-balance", action="store_true", help="leave samples where they are")
    parser.add_argument("--photos", type=Path, help="a folder; default: those of scikit-image")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        train(
            device,
            args.photos or Path(skimage.__file__).parent / "data",
            balance=not args.no_balance,
        )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
