"""Families of transformers in bags, packs and over ranks: as alone, or a refusal of ours.

A daily sample, and all that a general tiny configuration builds with `make stress`. The reference
is the model's own attention, one sequence at a time.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import bascule
from bascule import SequenceParallel
from bascule.attention.api import AttentionMesh, SequenceLayout, gather, split
from bascule.data.packs import Pack, make_pack
from bascule.errors import ConfigError
from bascule.transformers import (
    call_packed,
    context_parallel,
    inputs_of_pack,
    register_attention,
    split_delta_layers,
)
from bascule.transformers.trainer import check_packs
from tests.helpers.cases import COST
from tests.helpers.inference_cases import make_mesh
from tests.helpers.ranks import on_ranks, raised_by, run_ranks

LENS = [23, 14]
WINDOW = 8
SIZES: dict[str, Any] = {  # those that a configuration has are taken
    **dict.fromkeys(("vocab_size", "max_seq_len"), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("word_embed_proj_dim",), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "mamba_d_head"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("rotary_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads"), 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_state", "state_size", "linear_num_value_heads"), 4),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "pad_token_id"), 0),
    "mamba_expand": 2,
    "use_sliding_window": True,  # from the second layer on
    "max_window_layers": 1,
}
MORE_SIZES = {"DeepseekV2Config": {"num_key_value_heads": 4}}
MOST_PARAMETERS = 3e7
DAILY = {  # one of each kind of answer
    "LlamaForCausalLM": "right",
    "JetMoeForCausalLM": "right",
    "StableLmForCausalLM": "right",  # its layers pass no arguments on
    "MistralForCausalLM": "right",  # windows
    "PhimoeForCausalLM": "right",  # windows that its mask alone tells of
    "Llama4ForCausalLM": "right",  # chunks
    "FlintForCausalLM": "right",  # sinks
    "Gemma2ForCausalLM": "right",  # soft caps
    "InklingForCausalLM": "which bascule's attention does not know",
    "BartForCausalLM": "model.decoder.embed_positions differs",
    "RobertaForCausalLM": "roberta.embeddings.position_embeddings differs",
    "JambaForCausalLM": "mixes the sequences of a row: model.layers.0.mamba.x_proj changes",
    "Qwen3NextForCausalLM": "right",  # gated delta layers
    "OPTForCausalLM": "right",
    "BloomForCausalLM": "several sequences in a row: transformer.h.0.self_attention raised Runtime",
}

OVER_RANKS = {  # the same, for one sequence over two ranks
    "LlamaForCausalLM": "right",
    "OPTForCausalLM": "right",
    "PhimoeForCausalLM": "right",
    "Llama4ForCausalLM": "right",
    "GptOssForCausalLM": "right",
    "Gemma2ForCausalLM": "right",
    "BartForCausalLM": "model.decoder.embed_positions differs from one process",
    "RobertaForCausalLM": "roberta.embeddings.position_embeddings differs from one process",
    "OlmoHybridForCausalLM": "right",  # gated delta layers
    "JambaForCausalLM": "model.layers.0.mamba",
    "FalconForCausalLM": "transformer.h.0.self_attention.dense differs from one process",
}


def tiny(kind: Any) -> Any:
    """A configuration of few weights."""
    names = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "attribute_map", ())}
    names |= set(getattr(kind, "__dataclass_fields__", ()))
    sizes = SIZES | MORE_SIZES.get(kind.__name__, {})
    return kind(**{name: value for name, value in sizes.items() if name in names})


def build(model_class: Any, config_class: Any, attention: str) -> Any:
    """A tiny model in its use; None if its configuration is not as general as ours."""
    torch.manual_seed(0)
    try:
        with torch.device("meta"):
            sizes = [p.numel() for p in model_class(tiny(config_class)).parameters()]
        if sum(sizes) > MOST_PARAMETERS:
            return None
        model = model_class._from_config(tiny(config_class), attn_implementation=attention)
        return model.eval()
    except Exception:
        return None


def in_a_bag(model: Any, ids: Tensor) -> Tensor:
    step = SequenceParallel(None, "g1n1", COST).plan(LENS)
    return call_packed(model, step, input_ids=ids).logits


def in_a_pack(model: Any, ids: Tensor) -> Tensor:
    split_delta_layers(model)
    check_packs(model, torch.device("cpu"))
    pack = Pack(tokens=len(ids))
    samples = [{"input_ids": tokens} for tokens in ids.split(LENS)]
    return model(**inputs_of_pack(make_pack(samples, pack), pack, model)).logits


def over_ranks(model: Any, ids: Tensor, documents: Sequence[int] = (sum(LENS),)) -> Tensor:
    """Return the logits of all tokens as one sequence, or as documents."""
    mesh = AttentionMesh.of(make_mesh(dist.get_world_size(), 1))
    layout = SequenceLayout((len(ids),), *mesh.degrees)
    positions = torch.cat([torch.arange(one) for one in documents])
    own, places = (split(x[None], mesh, layout, 1) for x in (ids, positions))
    with context_parallel(model, mesh, layout):
        logits = model(input_ids=own, position_ids=places, use_cache=False).logits
    return gather(logits, mesh, layout, 1)


WAYS: dict[str, tuple[str, Callable[[Any, Tensor], Tensor]]] = {  # attention, and the call
    "bag": ("bascule", in_a_bag),
    "pack": ("sdpa", in_a_pack),
    "eager pack": ("eager", in_a_pack),
    "ranks": ("eager", over_ranks),
    "documents over ranks": ("eager", partial(over_ranks, documents=LENS)),
}


def families(way: str, names: list[str] | None) -> dict[str, str]:
    """Judge the families of these names, or all that can be built and run alone."""
    from transformers.models.auto import configuration_auto, modeling_auto

    register_attention()
    ids = torch.randint(1, 60, (sum(LENS),), generator=torch.Generator().manual_seed(1))
    answers: dict[str, str] = {}
    # What is not asked for is not imported.
    for kind, classes in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = classes if isinstance(classes, str) else classes[0]
        if names is not None and name not in names:
            continue
        config_class = configuration_auto.CONFIG_MAPPING[kind]
        loaded: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        model_class = loaded[0] if isinstance(loaded, tuple) else loaded
        reference = build(model_class, config_class, "eager")
        model = build(model_class, config_class, WAYS[way][0])
        if reference is not None and model is not None:
            model.load_state_dict(reference.state_dict())
            with torch.no_grad(), suppress(NotAloneError):
                answers[name] = judge(reference, model, way, ids)
    return answers


class NotAloneError(Exception):
    """A model fails by itself."""


def judge(reference: Any, model: Any, way: str, ids: Tensor) -> str:
    """Return "right", the refusal, or what is wrong."""
    try:
        texts = [ids] if way == "ranks" else ids.split(LENS)
        alone = [reference(input_ids=x[None], use_cache=False).logits for x in texts]
    except Exception as error:
        raise NotAloneError from error
    wanted = torch.cat(alone, 1)
    try:
        logits = WAYS[way][1](model, ids)
    except ConfigError as error:
        return str(error)
    except Exception as error:
        return f"FOREIGN {type(error).__name__}: {error}"
    error = float((logits - wanted).abs().max() / wanted.abs().max())
    return "right" if error < 1e-4 else f"WRONG by {error:.2g}"


@pytest.mark.slow
@pytest.mark.parametrize(("way", "expected"), [("bag", DAILY), ("ranks", OVER_RANKS)])
def test_families(way: str, expected: dict[str, str]) -> None:
    for answers in run_ranks(families, 2 if way == "ranks" else 1, way, list(expected)):
        assert answers.keys() == expected.keys()
        for name, words in expected.items():
            assert words in answers[name], answers[name]


@on_ranks(2)
def test_positions_and_a_comparison_are_asked_for() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = build(LlamaForCausalLM, LlamaConfig, "sdpa")
    mesh = AttentionMesh.of(make_mesh(1, 2))
    ids = torch.ones(1, 5, dtype=torch.int64)

    rank, places, mask = dist.get_rank(), torch.arange(5)[None], torch.arange(5)[None] > 0

    def call(scope: Any, **given: Any) -> None:
        with scope:
            model(ids, **given)

    undeclared = bascule.context_parallel(mesh)
    ours, bare = partial(context_parallel, model, mesh), {"use_cache": False}
    misplaced = bare | {"position_ids": places + rank}
    padded = bare | {"position_ids": places + 5 * rank, "attention_mask": mask}
    for words, scope, given in (
        ("enter bascule.transformers.context_parallel(model, mesh)", undeclared, {}),
        ("without position_ids would count this rank's tokens from 0", ours(), {}),
        ("position_ids do not count from 0 in one sequence", ours(), misplaced),
        ("with a mask", ours(), padded),
    ):
        assert words in raised_by(call, scope, **given)[1]
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.stress
@pytest.mark.parametrize(
    ("way", "least"),
    [
        *[("bag", 92), ("pack", 77), ("eager pack", 88)],
        *[("ranks", 91), ("documents over ranks", 86)],
    ],
)
def test_no_family_is_wrong_in_silence(way: str, least: int) -> None:
    num_ranks = 2 if "ranks" in way else 1
    answers = run_ranks(families, num_ranks, way, None, timeout_s=1500.0)[0]
    wrong = {name: one for name, one in answers.items() if one.startswith(("WRONG", "FOREIGN"))}
    num_right = sum(one == "right" for one in answers.values())
    print(f"{way}: {len(answers)} families, {num_right} right")
    assert not wrong and len(answers) > 100 and num_right >= least
