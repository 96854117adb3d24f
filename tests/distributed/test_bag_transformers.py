"""Models of transformers, unchanged, on packed sequences in bags and over ranks: as each alone.

The reference is torch's attention in transformers, one sequence at a time. Norms and
rotations of transformers round to float32, whatever the dtype of the model.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from bascule import SequenceParallel, Sequences, Step
from bascule.attention import AttentionMesh, SequenceLayout, gather, split
from bascule.transformers import call_packed, context_parallel, register_attention
from tests.helpers.cases import COST
from tests.helpers.inference_cases import make_mesh
from tests.helpers.ranks import on_ranks, raised_by

VOCABULARY = 19
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
# What is not plain: windows, chunks, caps, sinks, unlike widths.
NEAR: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"sliding_window": 6, "attn_logit_softcapping": 0.2, "head_dim": 4},
    "GptOss": {"sliding_window": 6, "head_dim": 4, "num_local_experts": 4, **EXPERTS},
    "Llama4": {
        "attention_chunk_size": 6,
        "intermediate_size_mlp": 16,
        "head_dim": 4,
        "num_local_experts": 4,
        **EXPERTS,
    },
    "DeepseekV3": {
        **{"num_key_value_heads": 6, "q_lora_rank": 8, "kv_lora_rank": 8, "v_head_dim": 6},
        **{"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "moe_intermediate_size": 8},
        **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS},
        **{"first_k_dense_replace": 1, "n_shared_experts": 1},
    },
}
OVER_RANKS = {  # attention of transformers that computes in float64, and what norms leave of it
    "OPT": ("sdpa", 1e-10),
    "Llama": ("sdpa", 1e-6),
    "Mistral": ("sdpa", 1e-6),
    "Llama4": ("eager", 1e-6),
    "GptOss": ("eager", 1e-6),
}
# Of each rank: some have nothing, some one long sequence.
BATCHES = [[[5, 17, 1], [2], [], [3, 3]], [[], [31], [], [4]]]


class Vision(nn.Module):
    """Qwen2.5-VL's language model with its three positions a token, and a head."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        rotary = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 100.0}
        config = Qwen2_5_VLTextConfig(**SIZES, rope_parameters=rotary, **settings)
        self.model, self.head = Qwen2_5_VLTextModel(config), nn.Linear(24, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, **settings: Any) -> Tensor:
        if position_ids.dim() == 2:
            position_ids = torch.stack([position_ids, position_ids // 2, position_ids % 3])
        embedded = self.model.embed_tokens(input_ids)
        out = self.model(inputs_embeds=embedded, position_ids=position_ids, **settings)
        return self.head(out.last_hidden_state)


class Language(nn.Module):
    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__()
        self.model: Any = causal(name, **settings)

    def forward(self, input_ids: Tensor, **settings: Any) -> Tensor:
        return self.model(input_ids, **settings).logits


def causal(name: str, **settings: Any) -> Any:
    named = "Llama4Text" if name == "Llama4" else name
    config = getattr(transformers, f"{named}Config")(**(SIZES | NEAR.get(name, {}) | settings))
    return getattr(transformers, f"{name}ForCausalLM")(config)


def make(name: str, attention: str) -> nn.Module:
    torch.manual_seed(0)
    chosen: dict[str, Any] = {"attn_implementation": attention}
    model = (Vision(**chosen) if name == "Vision" else Language(name, **chosen)).double()
    for parameter in model.parameters():  # sinks are not initialized, and experts hardly differ
        nn.init.normal_(parameter, std=0.2)
    return model


def tokens_of(batch: list[list[int]], rank: int) -> tuple[Tensor, Tensor]:
    """Ids, and the next of each; the last of a sequence predicts nothing."""
    ids: list[Tensor] = []
    for place, length in enumerate(batch[rank]):
        random = torch.Generator().manual_seed(10 * rank + place)
        ids.append(torch.randint(0, VOCABULARY, (length,), generator=random))
    empty = torch.zeros(0, dtype=torch.int64)
    labels = [torch.cat([one[1:], torch.tensor([-100])]) for one in ids]
    return torch.cat([empty, *ids]), torch.cat([empty, *labels])


def alone(model: nn.Module, batch: list[list[int]]) -> tuple[float, list[Tensor]]:
    losses: list[Tensor] = []
    for rank, lens in enumerate(batch):
        ids, labels = tokens_of(batch, rank)
        for own, wanted in zip(ids.split(lens), labels.split(lens), strict=True):
            logits = model(own[None], position_ids=torch.arange(len(own))[None])[0]
            losses.append(cross_entropy(logits, wanted, reduction="none")[wanted != -100])
    loss = torch.cat(losses).mean()
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


def step_loss(model: nn.Module, step: Step, ids: Tensor, labels: Tensor) -> Tensor:
    moved = step.route(input_ids=ids, labels=labels)
    labels = moved["labels"]
    logits = call_packed(model, step, input_ids=moved["input_ids"])[0, : labels.shape[0]]
    losses = cross_entropy(logits, labels, reduction="none")
    return step.mean(losses, weights=labels != -100)


def trained(kind: str, spec: str, is_sharded: bool, with_masks: bool = False) -> None:
    register_attention()
    rank, size = dist.get_rank(), dist.get_world_size()
    reference, model = make(kind, "eager" if kind in NEAR else "sdpa"), make(kind, "bascule")
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    parallel = SequenceParallel(None, spec, COST)
    for whole in BATCHES:
        batch = whole[:size]
        ids, labels = tokens_of(batch, rank)
        model.zero_grad()
        lens = Sequences(batch[rank], "causal") if with_masks else batch[rank]
        with parallel.plan(lens) as step:
            loss = step_loss(model, step, ids, labels)
            loss.backward()
        want, grads = alone(reference, batch)
        assert abs(loss.item() - want) < 1e-7
        total = torch.stack([one.norm() for one in grads]).norm()
        for parameter, wanted in zip(model.parameters(), grads, strict=True):
            got = parameter.grad
            assert got is not None
            if isinstance(got, DTensor):
                got = got.full_tensor()
            else:
                dist.all_reduce(got)
                got /= size
            assert (got - wanted).norm() <= 1e-6 * wanted.norm() + 1e-8 * total


WORLDS = {
    2: [
        *[("Llama", "g1n2", False), ("Llama", "g2n1", True), ("Vision", "g2n1", False)],
        *[("Mistral", "g1n2", False), ("GptOss", "g2n1", False), ("Gemma2", "g2n1", False)],
        *[(kind, "g1r2n1", False) for kind in ("Gemma2", "Llama4", "DeepseekV3")],
    ],
    3: [
        *[("Qwen2", "g1n1+g2n1", False), ("Vision", "g3n1", True)],
        *[("GptOss", "g3n1", True), ("DeepseekV3", "g3n1", False)],
    ],
    4: [("Qwen2", "g2r2n1", False), ("Mistral", "g1r4n1", False), ("GptOss", "g1r4n1", False)],
}


@pytest.mark.parametrize("world_size", [2, 4, pytest.param(3, marks=pytest.mark.stress)])
@on_ranks(lambda world_size: world_size)
def test_gradients_are_those_of_each_sequence_alone(world_size: int) -> None:
    for kind, spec, is_sharded in WORLDS[dist.get_world_size()]:
        # Causal sequences of a plan are even in rings.
        trained(kind, spec, is_sharded, with_masks=spec == "g1r4n1")


DOCUMENTS = [3, 7, 1, 12, 2, 9]  # whichever ranks have them


@pytest.mark.parametrize(
    ("world_size", "pairs"),
    [
        (2, [("OPT", 1), ("Llama", 2), ("Mistral", 2), ("GptOss", 1)]),
        (4, [("Llama4", 2)]),
        *(
            pytest.param(size, list(product(OVER_RANKS, rings)), marks=pytest.mark.stress)
            for size, rings in ((2, (1, 2)), (4, (1, 2, 4)))
        ),
    ],
)
@on_ranks(lambda world_size, pairs: world_size)
def test_documents_cut_between_ranks_are_as_alone(
    world_size: int, pairs: list[tuple[str, int]]
) -> None:
    """Kinds of attention, each with a ring of so many ranks."""
    ids, grad = torch.arange(sum(DOCUMENTS))[None] % VOCABULARY, torch.Generator().manual_seed(1)
    places = torch.cat([torch.arange(one) for one in DOCUMENTS])[None]
    for kind, ring in pairs:
        mesh = AttentionMesh.of(make_mesh(ring, world_size // ring))
        attention, error = OVER_RANKS[kind]
        model: Any = make(kind, attention).eval()
        alone = [
            model(own, position_ids=torch.arange(own.shape[1])[None])
            for own in ids.split(DOCUMENTS, 1)
        ]
        wanted = torch.cat(alone, 1)
        if (kind, ring) == ("OPT", 1):  # positions tell documents apart outside of graphs
            model.model.compile(backend="aot_eager")
        layout = SequenceLayout((ids.shape[1],), *mesh.degrees, zigzag=ring == world_size)
        own, own_places = (split(x, mesh, layout, 1) for x in (ids, places))
        with context_parallel(model.model, mesh, layout):
            logits = model(own, position_ids=own_places, use_cache=False)
        logits = gather(logits, mesh, layout, 1)
        torch.testing.assert_close(logits, wanted, rtol=error, atol=error)
        factors = torch.randn(wanted.shape, generator=grad, dtype=torch.float64)
        grads = [
            torch.autograd.grad(x, list(model.parameters()), factors) for x in (logits, wanted)
        ]
        for got, want in zip(*grads, strict=True):
            dist.all_reduce(got)
            torch.testing.assert_close(got / world_size, want, rtol=error, atol=error)


@on_ranks(2)
def test_lengths_of_whole_sequences_count() -> None:
    """Models that change with length, in a bag of two ranks: as alone, or refused."""
    register_attention()
    rank, scale = dist.get_rank(), {"floor_scale": 16, "no_rope_layers": [1, 0]}

    def logits(name: str, num: int, attention: str, **settings: Any) -> Tensor:
        torch.manual_seed(0)
        model = causal(name, attn_implementation=attention, **settings)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        ids = torch.arange(num) * 7 % VOCABULARY
        if attention != "bascule":
            return model(ids[None], use_cache=False).logits[0]
        with SequenceParallel(None, "g2n1", COST).plan([[num], []][rank]) as step:
            (own,) = step.route(ids=ids if rank == 0 else ids[:0]).values()
            return step.restore(call_packed(model, step, input_ids=own).logits[0])

    near = [("Mistral", "sliding_window"), ("Llama4", "attention_chunk_size")]
    cases = [(name, 11, {key: size}) for name, key in near for size in (1, 2, 3)]
    for name, num, settings in [*cases, ("Llama4", 15, scale)]:
        got, want = logits(name, num, "bascule", **settings), logits(name, num, "eager", **settings)
        assert got.shape[0] == 0 or (got - want).norm() < 1e-5 * want.norm(), (name, settings)
    text = raised_by(logits, "Llama4", 24, "bascule", **scale)[1]
    assert "right up to 15 tokens in bags and packs, and has 24 here" in text, text


@on_ranks(2)
def test_losses_of_routers() -> None:
    """The router's loss of a pack: over all its tokens, as Switch Transformer has it."""
    register_attention()
    rank, batch = dist.get_rank(), [[5, 17, 1], []]
    ids = tokens_of(batch, rank)[0]
    settings: dict[str, Any] = {"num_local_experts": 4, **EXPERTS}

    def made(**more: Any) -> Any:
        torch.manual_seed(0)
        return causal("Mixtral", **settings, **more).double()

    model: Any = made(attn_implementation="bascule")
    step = SequenceParallel(None, "g1n2", COST).plan(batch[rank])
    (own,) = step.route(input_ids=ids).values()
    loss = call_packed(model, step, input_ids=own, output_router_logits=True).aux_loss
    lens = step.plan.seq_lens[step.plan.bag_of == rank].tolist()
    alone = [
        made()(one[None], output_router_logits=True).router_logits
        for one in own.split(lens)
        if lens
    ]
    wanted = 0.0
    if alone:
        weights = torch.cat([torch.cat(layer) for layer in zip(*alone, strict=True)]).softmax(-1)
        chosen = nn.functional.one_hot(weights.topk(2).indices, 4).sum(1).double()
        wanted = float(4 * (chosen.mean(0) * weights.mean(0)).sum())
    assert abs(loss.item() - wanted) < 1e-6
    step = SequenceParallel(None, "g2n1", COST).plan(batch[rank])
    (own,) = step.route(input_ids=ids).values()
    told = made(output_router_logits=True, attn_implementation="bascule")
    within = context_parallel(told, AttentionMesh.of(make_mesh(2, 1)))
    for call in (lambda: call_packed(told, step, input_ids=own), within.__enter__):
        text = raised_by(call)[1]
        assert "output_router_logits=True where ranks share sequences" in text, text


@on_ranks(1)
def test_what_a_step_cannot_do_is_refused() -> None:
    """Models whose layers, positions or windows a step would get wrong, and calls without one."""
    register_attention()
    step = SequenceParallel(None, "g1n1", COST).plan([6])
    ids: Any = torch.ones(1, 6, dtype=torch.int64)
    ours: dict[str, Any] = {"attn_implementation": "bascule"}
    right = {"use_cache": False, "bascule_step": step, "attention_mask": torch.zeros(1, 1, 0, 0)}
    window = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}
    factors = {"short_factor": [1.0] * 2, "long_factor": [4.0] * 2}
    long = {"rope_type": "longrope", "rope_theta": 100.0, **factors}
    phi = {"rope_parameters": long, "original_max_position_embeddings": 5, "pad_token_id": 0}
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    padding = right | {"attention_mask": torch.arange(6)[None] > 0}

    def packed(name: str, **settings: Any) -> Callable[[], object]:
        return lambda: call_packed(causal(name, **ours, **settings), step, input_ids=ids[0])

    def qwen(given: dict[str, Any], rows: Tensor = ids, **settings: Any) -> Callable[[], object]:
        return lambda: causal("Qwen2", **ours, **settings).train()(rows, **given)

    calls: dict[str, Callable[[], object]] = {
        "model.layers.0.conv.out_proj changes": packed(
            "Lfm2", layer_types=["conv", "full_attention"]
        ),
        "roberta.embeddings.position_embeddings differs": packed("Roberta", pad_token_id=1),
        "call_packed(model, step, input_ids=ids)": qwen({"use_cache": False}),
        "2 rows": qwen(right, ids.expand(2, -1)),
        "1 rows of 6 queries and 6 keys, with a mask": qwen(padding),
        "dropout=0.1": qwen(right, attention_dropout=0.1),
        "sliding_window=4, which bascule's attention does not know": qwen(right, **window),
        "the longest is above 5 tokens": packed("Phi3", **phi),
        "the longest is above 4 tokens": packed(
            "Llama", rope_parameters=dynamic, max_position_embeddings=4
        ),
    }
    for words, call in calls.items():
        classes, text = raised_by(call)
        assert "ConfigError" in classes and words in text, (words, text)
