"""A chat model's replies to many messages at once, on any number of ranks.

torchrun --nproc-per-node 2 -- examples/replies.py MODEL MESSAGES prints a JSON list with a reply to each line of MESSAGES.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from transformers import AutoTokenizer

import megatron_ssm


def replies(directory: str | Path, messages: list[str]) -> list[str]:
    """The reply to each message, alone in its conversation; greedy. All ranks call it together."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = megatron_ssm.load(directory, group=dist.group.WORLD if dist.is_initialized() else None)
    chats = [[{"role": "user", "content": message}] for message in messages]
    options = dict(add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
    prompts, end = tokenizer.apply_chat_template(chats, **options), tokenizer.eos_token_id
    tokens = megatron_ssm.generate(
        model, prompts.input_ids, prompts.attention_mask, max_new_tokens=32, stop_tokens=end, pad_token_id=end
    )
    model.close()
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    answers = replies(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8").splitlines())
    if dist.get_rank() == 0:
        print(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()
