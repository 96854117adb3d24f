"""Programs of other trainers, on two ranks of a CPU."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(*arguments: str, folder: Path) -> str:
    """Run a program on two ranks; return what it printed."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    own |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, *arguments],
        env=os.environ | own,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    first = done.stderr.find("Traceback")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[first : first + 5000]
    return done.stdout


def tiny_qwen2(folder: Path, width: int = 16, num_layers: int = 2) -> str:
    """Save a Qwen2 of a few thousand weights, with a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: number for number, token in enumerate([*letters, *special])}
    tokens = Tokenizer(models.BPE(vocab, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokens.decoder = decoders.ByteLevel()  # pyright: ignore
    PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special[1:2],
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocab),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=vocab["<|endoftext|>"],
        eos_token_id=vocab["<|im_end|>"],
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def chats(path: Path, lengths: list[int]) -> str:
    """Write conversations of so many letters."""
    draw, lines = random.Random(0), list[str]()
    for length in lengths:
        words = "".join(draw.choices("abcdefgh ", k=length))
        roles = ("user", words[: len(words) // 2]), ("assistant", words[len(words) // 2 :])
        chat = [{"role": role, "content": text} for role, text in roles]
        lines.append(json.dumps({"messages": chat}))
    path.write_text("\n".join(lines))
    return str(path)
