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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
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
PATCH, MERGE, SHRINK = 14, 2, 3  # pixels of a patch, patches of a token along a side


class PhotoTexts(Dataset[dict[str, Tensor]]):
    """Samples of up to three photos and what they are called, drawn with a seed."""

    def __init__(self, folder: Path, num_samples: int) -> None:
        processor = Qwen2VLImageProcessorPil(
            patch_size=PATCH, merge_size=MERGE, min_pixels=28**2, max_pixels=300 * 28**2
        )
        self.photos = [
            self._read(path, processor)
            for path in sorted(folder.iterdir())
            if path.suffix in (".jpg", ".png")
        ]
        self.clips = [self._pan(*photo) for photo in self.photos]
        random = np.random.default_rng(0)
        counts = random.choice(PHOTO_COUNTS, num_samples)
        self.is_clip = (counts == 1) & (random.random(num_samples) < 0.5)
        self.chosen = [random.integers(len(self.photos), size=max(n, 1)) for n in counts]
        self.has_photos = counts > 0

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        is_clip = bool(self.is_clip[index])
        photos = [(self.clips if is_clip else self.photos)[i] for i in self.chosen[index]]
        names = " and ".join(name for name, _, _ in photos)
        text = f"This is {names}." if self.has_photos[index] else f"No photo shows the {names}."
        answer = [*text.encode(), END]
        prompt: list[int] = []
        for _, _, grid in photos if self.has_photos[index] else []:
            num_tokens = int(grid.prod()) // MERGE**2
            prompt += [VISION_START, *[VIDEO if is_clip else IMAGE] * num_tokens, VISION_END]
        input_ids = torch.tensor(prompt + answer)
        sample = {
            "input_ids": input_ids,
            "labels": torch.tensor([-100] * len(prompt) + answer),
            "mm_token_type_ids": (input_ids == IMAGE).long() + 2 * (input_ids == VIDEO),
        }
        if prompt:
            pixels, grids = ("_videos", "video") if is_clip else ("", "image")
            sample[f"pixel_values{pixels}"] = torch.cat([pixels for _, pixels, _ in photos])
            sample[f"{grids}_grid_thw"] = torch.cat([grid for _, _, grid in photos])
        return sample

    @staticmethod
    def _pan(name: str, pixels: Tensor, grid: Tensor) -> tuple[str, Tensor, Tensor]:
        """The left half of a photo, moved to the right from frame to frame."""
        rows, columns = grid[0, 1:].tolist()
        width = max(columns // 2 // MERGE, 1) * MERGE
        merged = pixels.view(rows // MERGE, columns // MERGE, MERGE**2, -1)
        starts = np.linspace(0, (columns - width) // MERGE, CLIP_FRAMES).round().astype(int)
        frames = [merged[:, i : i + width // MERGE].flatten(0, 2) for i in starts]
        return name, torch.cat(frames), torch.tensor([[CLIP_FRAMES, rows, width]])

    @staticmethod
    def _read(path: Path, processor: Any) -> tuple[str, Tensor, Tensor]:
        """Name, patches (n, values) and grid (1, 3) of a photo."""
        with Image.open(path) as image:
            small = image.convert("RGB").reduce(SHRINK)
        made = processor(images=[small], return_tensors="pt")
        return path.stem.replace("_", " "), made["pixel_values"], made["image_grid_thw"]


def num_asked(sample: dict[str, Tensor]) -> int:
    """Tokens over which the loss is the mean; models of transformers shift the labels."""
    return int((sample["labels"][1:] != -100).sum())


def make_model() -> Any:
    text = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": None,
        "eos_token_id": END,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 3, 3],
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "window_size": 4 * MERGE * PATCH,
        "fullatt_block_indexes": [1],
        "out_hidden_size": WIDTH,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
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
    dataset = PhotoTexts(folder, NUM_STEPS * BATCH_SIZE * num_ranks)
    loader = BalancedLoader(
        DataLoader(
            dataset,
            batch_size=BATCH_SIZE,
            sampler=ResumableSampler(len(dataset), rank=rank, num_ranks=num_ranks),
            collate_fn=collate_padded,
        ),
        cost=TransformerCost(WIDTH, num_layers=NUM_LAYERS),
        options=LoaderOptions(
            weight_fn=num_asked,
            min_gain=0.02 if balance else 0.999,
            pin_memory=device.type == "cuda",
        ),
    )
    exposed_s = 0.0
    for batch in loader:
        inputs = {name: x.to(device, non_blocking=True) for name, x in batch.data.items()}
        loss = model(**inputs).loss * batch.loss_scale  # the global mean, wherever samples are
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / num_ranks
        dist.all_reduce(mean)
        average = batch.plan.loads.mean()
        after, before = batch.plan.makespan / average, batch.verdict.before / average
        waited_s, exposed_s = exposed_s, loader.metrics()["exposed_s"]
        if rank == 0:
            encoded = [] if installed is None else installed.encodings
            for kind, one in zip(("photos", "clips"), encoded, strict=False):
                if one is not None:
                    print(f"  {kind}: {one}")
            print(
                f"step {batch.step + 1}: loss {mean.item():.6f}, imbalance (max/mean cost) "
                f"{after:.3f} instead of {before:.3f}, waited for the exchange "
                f"{1e3 * (exposed_s - waited_s):.1f} ms"
            )
    if rank == 0:
        did = loader.metrics()
        print(
            f"samples moved in {did['applied']} of {did['steps']} steps, sent "
            f"{did['sent_bytes'] / 1e6:.1f} MB; the exchange took {1e3 * did['exchange_s']:.1f} "
            f"ms, of which {1e3 * did['hidden_s']:.1f} ms behind the compute"
        )


def photos_of_skimage() -> Path:
    import skimage

    return Path(skimage.__file__).parent / "data"


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
        train(device, args.photos or photos_of_skimage(), balance=not args.no_balance)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
