"""What the code of a page takes for granted: ranks, and names that it does not define."""

import os
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bascule import TransformerCost
from tests.helpers.encoder_cases import batch_of, text_encoder
from tests.helpers.inference_cases import difference, make_mesh
from tests.helpers.jobs import join_trainer_world
from tests.helpers.pages import ROOT, run_python
from tests.helpers.pipeline_cases import make_pipeline, prompt_of
from tests.helpers.tile_cases import own_tiled, tiny_vae
from tests.helpers.vlm_models import make_model

Names = dict[str, Any]


@dataclass(frozen=True)
class World:
    """The names that a page is given on each of two ranks, and a look at what it left."""

    given: Callable[[str], Names]
    check: Callable[[Names], None]


def run_page(page: str, folder: str) -> None:
    """On one rank: the page from top to bottom, and what must be true at its end."""
    torch.manual_seed(0)
    names = WORLDS[page].given(folder)
    run_python(page, names)
    WORLDS[page].check(names)


def _pipeline() -> Names:
    """The tiny pipeline of the example, and its inputs."""
    example = runpy.run_path(str(ROOT / "examples" / "generate_flux.py"))
    random, device = torch.Generator().manual_seed(3), torch.device("cpu")
    prompt = {
        "prompt_embeds": torch.randn(1, 7, 32, generator=random),
        "pooled_prompt_embeds": torch.randn(1, 32, generator=random),
    }
    pipeline = example["make_pipeline"](device)
    pipeline.set_progress_bar_config(disable=True)
    for blocks in ("transformer_blocks", "single_transformer_blocks"):
        setattr(pipeline.transformer, blocks, getattr(pipeline.transformer, blocks)[:1])
    inputs = example["transformer_inputs"](prompt, device)
    return {"pipeline": pipeline, "prompt": prompt, "inputs": inputs, "torch": torch}


def _short(prompt: Names) -> Names:
    """A prompt of a small image and few steps."""
    options = {"height": 64, "width": 48, "num_inference_steps": 2, "output_type": "latent"}
    return prompt | options | {"generator": torch.Generator().manual_seed(1)}


def _language_model() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Qwen2ForCausalLM(config)


def _texts(num: int) -> list[Names]:
    lens = torch.randint(2, 60, (num,), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": torch.arange(n) % 32, "labels": torch.arange(n) % 32} for n in lens]


# --- docs/data_loader.md


def _loader(folder: str) -> Names:
    from torch.nn.parallel import DistributedDataParallel
    from transformers import TrainingArguments

    join_trainer_world()
    model = _language_model()
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    return {
        "dataset": _texts(64),
        "model": DistributedDataParallel(model),
        "bare_model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "cost": TransformerCost(16),
        "rank": dist.get_rank(),
        "num_ranks": dist.get_world_size(),
        "args": args,
        "path": f"{folder}/loader.pt",
    }


def _check_loader(left: Names) -> None:
    assert type(left["loader"]).__name__ == "BalancedLoader"
    assert type(left["trainer"]).__name__ == "BalancedTrainer"


# --- docs/encoders.md


class _Clips(nn.Module):
    """Frames (F, 4) of clips; a feature of each frame, and of each clip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, frames: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layer(frames)
        means = [own.mean(0) for own in hidden.split(counts.tolist())]
        return {"frames": hidden, "clips": torch.stack(means)}


def _encoders(folder: str) -> Names:
    rank = dist.get_rank()
    vlm = make_model("qwen2_5_vl")
    batch = batch_of("qwen2_5_vl", rank, [(2, 3), (3, 3), (2, 2)] if rank else [], rank == 0)
    counts = torch.tensor([3, 1, 4, 2] if rank else [1])
    vae = tiny_vae("kl").double()
    prompt = {"prompt_embeds": torch.ones(1, 7, 32), "pooled_prompt_embeds": torch.ones(1, 32)}
    return {
        "vlm": vlm,
        "batch": batch | {"labels": batch["input_ids"]},
        "text_encoder": text_encoder("t5"),
        "input_ids": torch.ones(5 * rank, 7, dtype=torch.int64),
        "attention_mask": torch.ones(5 * rank, 7, dtype=torch.int64),
        "vae": vae,
        "photo": torch.randn(rank, 3, 40, 28).double(),
        "pipeline": make_pipeline("flux"),
        "prompt": _short(prompt) | {"output_type": "pt"},
        "photos": [torch.randn(3, 8 * n, 16).double() for n in ((1, 3, 2) if rank else (1,))],
        "clip_encoder": _Clips(),
        "frames": torch.randn(int(counts.sum()), 4),
        "counts": counts,
    }


def _check_encoders(left: Names) -> None:
    gradients = [p.grad.abs().sum() for p in left["vlm"].model.visual.parameters()]
    assert all(one > 0 for one in gradients) and left["loss"].isfinite()
    assert "items moved" in str(left["installed"].encodings[0])
    assert left["embeddings"].shape == (len(left["input_ids"]), 7, 16)
    assert [one.shape[2] * 2 for one in left["latents"]] == [x.shape[1] for x in left["photos"]]
    with torch.no_grad():
        tiles = own_tiled(left["vae"], "decode", left["z"]) if dist.get_rank() else left["again"]
    torch.testing.assert_close(left["again"], tiles)
    left["prompt"]["generator"].manual_seed(1)
    left["pipeline"].vae.enable_tiling()
    assert difference(left["pixels"], left["pipeline"](**left["prompt"]).images) < 1e-5
    expected = left["clip_encoder"](left["frames"], left["counts"])
    for name, found in left["features"].items():
        torch.testing.assert_close(found, expected[name])
    assert left["clips"].last.num_moved


# --- docs/pipelines.md


def _guided(folder: str) -> Names:
    prompt = _short(prompt_of("flux")) | {"output_type": "pt"}
    return {"pipeline": make_pipeline("flux"), "prompt": prompt}


def _check_guided(left: Names) -> None:
    pipeline, prompt = left["pipeline"], left["prompt"]
    prompt["generator"].manual_seed(1)
    assert difference(left["images"], pipeline(**prompt).images) < 1e-5
    assert len(left["mine"]) == (dist.get_rank() == 0)
    assert set(left["times"].seconds) == {"encode", "denoise", "decode"}
    assert str(left["chosen"].choice).startswith("guidance 2 x ring 1 x Ulysses 1")


# --- docs/sequence_parallel.md


def _split(folder: str) -> Names:
    names = _pipeline()
    names["pipeline"].transformer.single_transformer_blocks = nn.ModuleList()  # it is compiled
    return names


def _check_split(left: Names) -> None:
    assert difference(left["output"], left["model"](**left["inputs"]).sample) <= 1e-6
    assert "agrees with one process" in str(left["verdict"])


# --- docs/context_parallel.md


def _nothing(folder: str) -> Names:
    return {}


def _check_attention(left: Names) -> None:
    x, mask, own = left["x"], left["mask"], left["out"]
    text = torch.randn(1, 5, 77, 16, generator=torch.Generator().manual_seed(1))
    attend = nn.functional.scaled_dot_product_attention
    assert difference(own, attend(attend(x, x, x, attn_mask=mask), text, text)) <= 1e-6
    alone = left["llama"](input_ids=left["ids"], use_cache=False).logits
    assert difference(left["logits"], alone) <= 1e-5


# --- docs/sparse_attention.md


def _sparse(folder: str) -> Names:
    own_folder = Path(folder) / f"rank {dist.get_rank()}"
    own_folder.mkdir()
    os.chdir(own_folder)  # the page writes files
    pipeline = _pipeline()
    return pipeline | {"mesh": make_mesh(2, 1), "prompt": _short(pipeline["prompt"])}


def _check_sparse(left: Names) -> None:
    assert len(left["images"]) == 1
    assert Path("seen.npz").is_file() == (dist.get_rank() == 0)


WORLDS = {
    "docs/context_parallel.md": World(_nothing, _check_attention),
    "docs/data_loader.md": World(_loader, _check_loader),
    "docs/encoders.md": World(_encoders, _check_encoders),
    "docs/pipelines.md": World(_guided, _check_guided),
    "docs/sequence_parallel.md": World(_split, _check_split),
    "docs/sparse_attention.md": World(_sparse, _check_sparse),
}
