"""A user's script for the Trainer of transformers. It knows nothing of bascule."""

import json
import sys
from pathlib import Path

import torch
from transformers import (
    DataCollatorWithFlattening,
    HfArgumentParser,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainingArguments,
)

args, pads = (
    HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(  # pyright: ignore
        sys.argv[2:]
    )[0],
    sys.argv[1] == "pads",
)
draw = torch.Generator().manual_seed(3)
samples = []
for number in range(50):
    length = 60 + 7 * number if number % 8 < 3 else 4 + number % 5
    ids = torch.randint(0, 32, (length,), generator=draw)
    samples.append({"input_ids": ids, "labels": ids, "length": length})


def padded(batch):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = [s["input_ids"] for s in batch]
    mask = pad([torch.ones_like(one) for one in ids], batch_first=True)
    labels = pad(ids, batch_first=True, padding_value=-100)
    return {"input_ids": pad(ids, batch_first=True), "labels": labels, "attention_mask": mask}


torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
trainer = Trainer(
    Qwen2ForCausalLM(config),
    args,
    train_dataset=samples,  # pyright: ignore
    data_collator=padded if pads else DataCollatorWithFlattening(),
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
if trainer.is_world_process_zero():
    Path(args.output_dir or ".", "log.json").write_text(json.dumps(trainer.state.log_history))
