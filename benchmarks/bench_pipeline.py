"""A whole pipeline over two ranks against one: guidance, encoding, denoising, decoding.

Run: `python benchmarks/bench_pipeline.py` (about ten minutes); writes results/pipeline.json.
`--quick` is for seeing that it runs: few rounds of a small image, and writes nothing.

Two ranks of one thread over gloo share a Flux pipeline of random weights, unedited: four steps with
true guidance, guidance_degree=2. `one prompt`: the pipeline calls its transformer twice a step, and
the ranks take turns. `four prompts`: every call is a batch of four, and the ranks share it, and
prompts, too (text_encoders="all"). Alone, one rank runs the same pipeline while the other waits.
In between, both ranks run all of it alone at the same time: what twice the speed costs where two
processes share a memory. Twice that is the most that two ranks of this machine can reach. All three
take turns, phase by phase and as a whole; a run of two ranks lasts as long as the slower rank's.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import diffusers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from _common import ratio, summary, write_results
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.multiprocessing.spawn import spawn

from bascule import parallelize

NUM_RANKS, STEPS, WORDS = 2, 4, 64
TARGETS = {"denoise": 1.9, "decode": 1.8}
PHASES = "encode", "denoise", "decode", "whole"
LIBRARY: Any = diffusers
MODELS: Any = transformers


@dataclass(frozen=True)
class Sizes:
    """How large a run is.

    Attributes:
        side: Pixels.
        rounds: Of each phase.
    """

    side: int = 256
    rounds: int = 9


def main() -> None:
    """Measure in spawned processes, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=Sizes.rounds)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    sizes = Sizes(side=128, rounds=2) if given.quick else Sizes(rounds=given.rounds)
    with tempfile.TemporaryDirectory() as folder:
        queue: Any = mp.get_context("spawn").SimpleQueue()
        spawn(measure, args=(os.path.join(folder, "store"), queue, sizes), nprocs=NUM_RANKS)
        results = queue.get()
    print(f"{'':14}" + "".join(f"{phase:>26}" for phase in PHASES))
    for case in results["cases"]:
        cells = [
            f"{one['speed_up']['median']:.2f}x ({one['speed_up']['lower_quartile']:.2f} to "
            f"{one['speed_up']['upper_quartile']:.2f})"
            for one in (case["phases"][phase] for phase in PHASES)
        ]
        print(f"{case['what']:14}" + "".join(f"{cell:>26}" for cell in cells))
    for case in results["cases"]:
        for phase, target in TARGETS.items():
            found = case["phases"][phase]["speed_up"]["median"]
            most = case["phases"][phase]["ceiling"]["median"]
            word = "met   " if found >= target else "MISSED"
            print(
                f"{word}  {case['what']}, {phase}: {found:.2f}x, target at least {target:g}x; two "
                f"independent processes reach {most:.2f}x"
            )
    if not given.quick:
        print("written to", write_results("pipeline", results))


def measure(rank: int, store: str, queue: Any, sizes: Sizes) -> None:
    """One rank: every case in turn; rank 0 reports."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    cases = [
        case_of("one prompt", 1, "own", sizes),
        case_of("four prompts", 4, "all", sizes),
    ]
    if rank == 0:
        command = f"python benchmarks/bench_pipeline.py --rounds {sizes.rounds}"
        queue.put({"command": command, "num_ranks": NUM_RANKS, "targets": TARGETS, "cases": cases})
    dist.barrier()
    dist.destroy_process_group()


def case_of(
    what: str, num_prompts: int, text_encoders: Literal["all", "own"], sizes: Sizes
) -> dict[str, Any]:
    """A row of the table."""
    one, shared = make_pipeline(), make_pipeline()
    words = [" ".join(f"w{(n + i) % 40}" for i in range(WORDS)) for n in range(num_prompts)]
    guided: dict[str, Any] = {"height": sizes.side, "width": sizes.side, "true_cfg_scale": 3.0}
    guided |= {"num_inference_steps": STEPS, "max_sequence_length": WORDS}
    with torch.no_grad():
        embeds, pooled, _ = one.encode_prompt(words, None, max_sequence_length=WORDS)
    known = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    known |= {"negative_" + name: x.flip(1) for name, x in known.items()}
    latents = torch.randn(num_prompts, 16, sizes.side // 4, sizes.side // 4)

    def phases(pipeline: Any) -> dict[str, Callable[[], object]]:
        negative = {"prompt": words, "negative_prompt": words[::-1]}
        return {
            "encode": lambda: pipeline.encode_prompt(words, None, max_sequence_length=WORDS),
            "denoise": lambda: pipeline(**known, **guided, output_type="latent"),
            "decode": lambda: pipeline.vae.decode(latents),
            "whole": lambda: pipeline(**negative, **guided, output_type="pt"),
        }

    with torch.no_grad(), parallelize(shared, guidance_degree=2, text_encoders=text_encoders):
        alone, over_ranks = phases(one), phases(shared)
        times = {phase: alternate(alone[phase], over_ranks[phase], sizes) for phase in PHASES}
    return {
        "what": what,
        "side": sizes.side,
        "phases": {
            phase: {
                "speed_up": ratio(found["alone"], found["over ranks"]),
                "ceiling": ratio([NUM_RANKS * one for one in found["alone"]], found["both alone"]),
                "times": {name: summary(seconds) for name, seconds in found.items()},
            }
            for phase, found in times.items()
        },
    }


def alternate(
    alone: Callable[[], object], over_ranks: Callable[[], object], sizes: Sizes
) -> dict[str, list[float]]:
    """Seconds of the slowest rank in each round; alone, the other rank has nothing to do."""
    times: dict[str, list[float]] = {"alone": [], "both alone": [], "over ranks": []}
    for turn in range(-1, sizes.rounds):
        names = list(times)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            start = time.perf_counter()
            if name == "over ranks":
                over_ranks()
            elif name == "both alone" or dist.get_rank() == 0:
                alone()
            slowest = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn >= 0:
                times[name].append(float(slowest))
    return times


def make_pipeline() -> Any:
    """Random weights, the same on both ranks; words are numbers."""
    torch.manual_seed(0)
    transformer = LIBRARY.FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=256,
        pooled_projection_dim=128,
        axes_dims_rope=(16, 24, 24),
    )
    vae = LIBRARY.AutoencoderKL(
        block_out_channels=(32, 64, 64),
        norm_num_groups=16,
        latent_channels=16,
        shift_factor=0.1,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
    )
    vae.enable_tiling()
    vae.tile_sample_min_size, vae.tile_latent_min_size = 128, 32
    t5 = MODELS.T5EncoderModel(
        MODELS.T5Config(vocab_size=64, d_model=256, d_kv=32, d_ff=1024, num_layers=6, num_heads=8)
    )
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "eos_token_id": 2}
    clip = MODELS.CLIPTextModel(MODELS.CLIPTextConfig(**sizes, num_hidden_layers=2))
    parts = {"transformer": transformer.eval(), "vae": vae.eval(), "text_encoder": clip.eval()}
    parts |= {"text_encoder_2": t5.eval(), "tokenizer": tokenizer(), "tokenizer_2": tokenizer()}
    pipeline = LIBRARY.FluxPipeline(scheduler=LIBRARY.FlowMatchEulerDiscreteScheduler(), **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tokenizer() -> Any:
    """A number for each word."""
    words = ["<pad>", "<unk>", "</s>", *(f"w{number}" for number in range(40))]
    made = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    return MODELS.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=WORDS, **special)


if __name__ == "__main__":
    main()
