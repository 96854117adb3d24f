"""Measure a whole diffusers pipeline over two ranks, phase by phase."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import diffusers
import torch
import torch.distributed as dist
import transformers
from measuring import in_turns, met, on_ranks, ratio, summary
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

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


def pipeline(*, rounds: int = 9, quick: bool = False) -> dict[str, Any]:
    """Compare each phase of a pipeline over two ranks with one.

    Ten minutes. Two ranks share an unedited Flux pipeline of random weights: four steps with true
    guidance, guidance_degree=2. "one prompt": two calls of the transformer a step, and the ranks
    take turns. "four prompts": each call is a batch of four that the ranks share, and prompts, too.
    "a tiny image": mesh="auto", where splitting passes costs more than it gains.
    Alone, one rank runs the pipeline while the other waits. "both alone": both ranks run all of it
    at the same time; twice that speed is the most that two ranks of this machine can reach.
    """
    sizes = Sizes(side=128, rounds=2) if quick else Sizes(rounds=rounds)
    cases = on_ranks(_pipelines_on_rank, sizes)
    for case in cases:
        for phase in PHASES:
            speed, most = case["phases"][phase]["speed_up"], case["phases"][phase]["ceiling"]
            target = 0.98 if case["what"] == "a tiny image" else TARGETS.get(phase)
            word = "" if target is None else met(speed["median"] >= target)
            print(
                f"{word:6}  {case['what']}, {phase}: {speed['median']:.2f}x (quartiles "
                f"{speed['lower_quartile']:.2f} to {speed['upper_quartile']:.2f}; target "
                f"{target}); two independent processes reach {most['median']:.2f}x"
            )
    return {"num_ranks": NUM_RANKS, "targets": TARGETS, "cases": cases}


def _pipelines_on_rank(sizes: Sizes) -> list[dict[str, Any]]:
    return [
        _case_of("one prompt", 1, sizes, {"guidance_degree": 2}),
        _case_of("four prompts", 4, sizes, {"guidance_degree": 2, "text_encoders": "all"}),
        _case_of("a tiny image", 1, replace(sizes, side=32), {"mesh": "auto"}),
    ]


def _case_of(what: str, num_prompts: int, sizes: Sizes, settings: Any) -> dict[str, Any]:
    """A row of the table."""
    one, shared = _make_pipeline(), _make_pipeline()
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

    with torch.no_grad(), parallelize(shared, **settings):
        for _ in range(2 * ("mesh" in settings)):  # the passes by which the ranks choose
            phases(shared)["denoise"]()
        alone, over_ranks = phases(one), phases(shared)
        times = {
            phase: _phase_times(alone[phase], over_ranks[phase], sizes.rounds) for phase in PHASES
        }
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


def _phase_times(
    alone: Callable[[], object], over_ranks: Callable[[], object], rounds: int
) -> dict[str, list[float]]:
    def on_first() -> None:
        if dist.get_rank() == 0:
            alone()

    calls = {"alone": on_first, "both alone": alone, "over ranks": over_ranks}
    return in_turns(calls, rounds, warmup=1)


def _make_pipeline() -> Any:
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
    parts |= {"text_encoder_2": t5.eval(), "tokenizer": _tokenizer(), "tokenizer_2": _tokenizer()}
    pipeline = LIBRARY.FluxPipeline(scheduler=LIBRARY.FlowMatchEulerDiscreteScheduler(), **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _tokenizer() -> Any:
    """A number for each word."""
    words = ["<pad>", "<unk>", "</s>", *(f"w{number}" for number in range(40))]
    made = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    return MODELS.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=WORDS, **special)
