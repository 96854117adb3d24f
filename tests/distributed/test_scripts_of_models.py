"""Scripts of the models that people train now, as they are and as the guide changes them."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.inference_cases import CASES, Case, Inputs, in_float64, make_inputs, make_model
from tests.helpers.pages import blocks_of
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.nightly

pytest.importorskip("diffusers")

F64 = torch.float64
GRIDS = [[(3, 5), (1, 3)], [(2, 3), (5, 3)]]  # of each rank's batches
BATCH_SIZE = 2
FIRST = {case.model: case for case in reversed(CASES)}
PLAIN = ("flux2", "z_image", "hunyuan1.5", "ltx2", "minimax")
CHANGED = {"flux2": 12, "z_image": 12, "hunyuan1.5": 12, "ltx2": 16, "minimax": 16}


PAGE = "docs/training_step.md"  # it has Flux
VIDEO, AUDIO = "(1 - times) * latents + times * noise", "(1 - times) * audio + times * audio_noise"
TIMES = "timestep=times.flatten() * 1000"
SCRIPTS = {  # what the loader gives, and arguments of the model
    "flux2": (
        "latents, noise, times, prompt, img_ids, txt_ids",
        f"hidden_states={VIDEO}|timestep=times.flatten()|encoder_hidden_states=prompt"
        "|img_ids=img_ids|txt_ids=txt_ids",
    ),
    "z_image": (
        "latents, noise, times, prompts",
        f"x=list({VIDEO})|t=times.flatten()|cap_feats=prompts",
    ),
    "hunyuan1.5": ("latents, noise, times, prompts", f"hidden_states={VIDEO}|{TIMES}|**prompts"),
    "ltx2": (
        "latents, noise, audio, audio_noise, times, prompts, sizes",
        f"hidden_states={VIDEO}|audio_hidden_states={AUDIO}|{TIMES}|audio_{TIMES}"
        "|**prompts|**sizes",
    ),
    "minimax": (
        "latents, noise, audio, audio_noise, times, prompt, layout",
        f"hidden_states={VIDEO}|audio_hidden_states={AUDIO}|encoder_hidden_states=prompt|**layout",
    ),
}
OUTPUT = {"z_image": "torch.stack(pred)"}
SOUND = {  # lines of Flux, and what a script with a sound has in their place
    '+loss_fn = lambda pred, batch: (pred - batch["target"]).square()': [
        "+loss_fn = lambda pred, batch: sum(",
        "+    (one - batch[name]).square().mean((1, 2)) "
        'for one, name in zip(pred, ("target", "sound"))',
        "+)",
    ],
    "-    )[0]": ["-    )"],
    "-    loss = (pred - (noise - latents)).square().mean()": [
        "-    loss = (pred[0] - (noise - latents)).square().mean()",
        "-    loss = loss + (pred[1] - (audio_noise - audio)).square().mean()",
    ],
    "+        target=noise - latents,": [
        "+        target=noise - latents,",
        "+        sound=audio_noise - audio,",
    ],
}


def changes(name: str) -> list[str]:
    """The lines of a script, each with what becomes of it: " ", "+" or "-"."""
    (flux,) = (block.text for block in blocks_of(PAGE) if "samples_of(" in block.text)
    loaded, arguments = SCRIPTS[name]
    called = "".join(f"         {argument},\n" for argument in arguments.split("|"))
    text = re.sub(r"length_fn=.*", 'length_fn=lambda one: one["target"].numel() // 8)', flux)
    text = re.sub(r"for .* in loader:", f"for {loaded} in loader:", text)
    text = re.sub(r"(samples_of\(\n).*?(?= +return_dict)", rf"\1{called}", text, flags=re.DOTALL)
    text = text.replace("(pred - ", f"({OUTPUT.get(name, 'pred')} - ")
    if "audio" not in loaded:
        return text.splitlines()
    return [line for plain in text.splitlines() for line in SOUND.get(plain, [plain])]


def script(name: str, kinds: str) -> str:
    return "\n".join(line[1:] for line in changes(name) if line[:1] in kinds)


@pytest.mark.parametrize("name", PLAIN)
def test_the_changes_are_of_as_many_lines_as_the_page_says(name: str) -> None:
    kinds = [line[:1] for line in changes(name)]
    assert kinds.count("+") + kinds.count("-") == CHANGED[name]


def batch_of(case: Case, grid: tuple[int, int], seed: int) -> Inputs:
    """What a script's loader gives, by the names that it has there."""
    inputs = make_inputs(replace(case, batch=BATCH_SIZE, grid=grid), F64, seed)
    draw = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=draw, dtype=F64)

    latents = torch.stack(inputs["x"]) if case.model == "z_image" else inputs["hidden_states"]
    times = torch.rand(BATCH_SIZE, *[1] * (latents.dim() - 1), generator=draw, dtype=F64)
    batch: Inputs = {"latents": latents, "noise": normal(latents), "times": times}
    if case.model == "z_image":
        return batch | {"prompts": inputs["cap_feats"]}
    batch["prompt"] = inputs["encoder_hidden_states"]
    if case.model == "flux2":
        return batch | {name: inputs[name] for name in ("img_ids", "txt_ids")}
    if "audio_hidden_states" in inputs:
        batch["audio"] = inputs["audio_hidden_states"]
        batch["audio_noise"] = normal(batch["audio"])
    if case.model == "minimax":
        named = ("hidden_states", "audio_hidden_states", "encoder_hidden_states")
        layout = {name: x for name, x in inputs.items() if name not in named}
        return batch | {"times": layout["timestep"][0], "layout": layout}
    is_prompt = [name for name in inputs if "encoder" in name or name == "image_embeds"]
    sizes = ("num_frames", "height", "width", "audio_num_frames")
    batch["sizes"] = {name: inputs[name] for name in sizes if name in inputs}
    return batch | {"prompts": {name: inputs[name] for name in is_prompt}}


class Gradients:
    """An optimizer that keeps the gradients of each step, and changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.kept = model, list[Tensor]()

    def step(self) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        self.kept.append(torch.cat([grad.flatten() for grad in grads]))

    def zero_grad(self) -> None:
        self.model.zero_grad()


def gradients_of(name: str, kinds: str) -> list[Tensor]:
    """Of each step of a script."""
    torch.manual_seed(0)
    transformer: Any = make_model(FIRST[name], F64)
    optimizer, rank, text = Gradients(transformer), dist.get_rank(), script(name, kinds)
    (header,) = (line for line in text.splitlines() if line.startswith("for "))
    wanted = header.removeprefix("for ").removesuffix(" in loader:").split(", ")
    batches = [batch_of(FIRST[name], grid, 10 * rank + i) for i, grid in enumerate(GRIDS[rank])]
    names: dict[str, Any] = {
        # Some parameters are used by nobody: those of images, or of the last text.
        "DistributedDataParallel": lambda one: DistributedDataParallel(
            one, find_unused_parameters=True
        ),
        "torch": torch,
        "transformer": transformer,
        "loader": [[batch[one] for one in wanted] for batch in batches],
        "optimizer": optimizer,
    }
    exec(compile(text, name, "exec"), names)
    return optimizer.kept


def compared(scripts: Sequence[str]) -> dict[str, list[float]]:
    """Of each step, the error of the changed script's gradient over the other's norm."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    with in_float64(F64):
        for name in scripts:
            pairs = zip(gradients_of(name, " +"), gradients_of(name, " -"), strict=True)
            found[name] = [float((ours - one).norm() / one.norm()) for ours, one in pairs]
    return found


@pytest.mark.slow
def test_both_scripts_have_the_same_gradients() -> None:
    for found in run_ranks(compared, 2, PLAIN):
        for name, errors in found.items():
            assert len(errors) == 2 and max(errors) < 1e-10, (name, errors)
