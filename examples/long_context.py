"""Train a transformers model on sequences that are too long for one device: their tokens are sharded over all ranks.

torchrun --nproc-per-node 4 -- examples/long_context.py --seq-length 4096 [--model DIR] [--text FILE] [--steps 5]
    [--rows 2 --cols 2 --ulysses 1]

Every rank holds the whole model and its tokens of every sequence. Ranks communicate only in attention and when they sum the
gradients. Without a grid, attention2d.choose chooses the schedule that sends the fewest bytes, and its reason is printed.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import attention2d
from commfabric.collectives.agreement import on_first


def attention_function(schedule: attention2d.Attention2D, length: int) -> Callable:
    """transformers' attention function for sequences of `length` tokens, computed by `schedule`."""

    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, position_ids=None, **features):
        features.pop("use_cache", None)  # any other feature that has a value is refused
        out = attention2d.attention(
            query, key, value, schedule, attention_mask, dropout, module.is_causal, scaling, seq=length, **features
        )
        return out.transpose(1, 2), None

    return attend


def no_mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> None:
    """transformers' mask function: the schedule computes the causal mask itself and supports no padding."""
    if attention_mask is not None:
        raise ValueError("attention_mask is not supported: give sequences without padding")


def small_llama() -> LlamaForCausalLM:
    """A model over bytes with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=2**20,
    ))  # fmt: skip


def read_tokens(arguments: argparse.Namespace) -> torch.Tensor:
    """(1, seq_length + 1): the token ids of the text; ValueError if it is shorter."""
    text = Path(arguments.text).read_text(encoding="utf-8", errors="replace")
    ids = AutoTokenizer.from_pretrained(arguments.model)(text).input_ids if arguments.model else list(text.encode())
    if len(ids) <= arguments.seq_length:
        raise ValueError(f"{arguments.text} has {len(ids)} tokens, not more than --seq-length {arguments.seq_length}")
    return torch.tensor(ids[: arguments.seq_length + 1]).unsqueeze(0)


def parse_arguments() -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory of transformers (default: a small Llama with random weights)")
    parser.add_argument("--text", default=Path(__file__).parent.parent / "README.md")
    for name, default in dict(seq_length=4096, steps=5, rows=0, cols=0, ulysses=0).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser.parse_args()


def choose_schedule(
    arguments: argparse.Namespace, model: PreTrainedModel, group: dist.ProcessGroup
) -> attention2d.Attention2D:
    """The schedule of the given grid; without one, the cheapest schedule for this model."""
    grid = (arguments.rows, arguments.cols, arguments.ulysses)
    if any(grid):
        schedule = attention2d.Attention2D(group, *(max(1, size) for size in grid))
        schedule.reason = str(schedule)
        return schedule
    heads = model.config.num_attention_heads
    return attention2d.choose(
        group,
        heads=heads,
        kv_heads=getattr(model.config, "num_key_value_heads", heads),
        head_dim=getattr(model.config, "head_dim", None) or model.config.hidden_size // heads,
        seq=arguments.seq_length,
        itemsize=model.dtype.itemsize,
    )


def train(model: PreTrainedModel, schedule: attention2d.Attention2D, ids: torch.Tensor, steps: int) -> None:
    """Train on one sequence, ids (1, length + 1), and print the loss of each step on rank 0."""
    length = ids.shape[1] - 1
    tokens, labels = (
        schedule.shard(ids[:, :-1]),
        schedule.shard(ids[:, 1:]),
    )  # labels are shifted before they are sharded
    positions = schedule.positions(length).to(ids.device)
    labels = labels.masked_fill(positions >= length, -100)  # padding, if the length does not divide over the ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        logits = model(tokens, position_ids=positions.unsqueeze(0), use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / length
        optimizer.zero_grad()
        loss.backward()
        for parameter in (parameter for parameter in model.parameters() if parameter.grad is not None):
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        sent = schedule.counter.sent / 1e6 / step
        if dist.get_rank() == 0:
            print(
                f"step {step}  loss {total.item():.4f}  {tokens.shape[1]} of {length} tokens a rank  "
                f"{sent:.2f} MB sent by rank 0"
            )


def main() -> None:
    """Join the ranks, build the model, and train."""
    arguments = parse_arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    group, device = dist.group.WORLD, "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    ids = on_first(lambda: read_tokens(arguments), group)  # its error is raised on every rank
    model = (AutoModelForCausalLM.from_pretrained(arguments.model) if arguments.model else small_llama()).to(device)
    schedule = choose_schedule(arguments, model, group)
    if dist.get_rank() == 0:
        print(schedule.reason)
    AttentionInterface.register("attention2d", attention_function(schedule, arguments.seq_length))
    AttentionMaskInterface.register("attention2d", no_mask)
    model.set_attn_implementation("attention2d")
    train(model, schedule, ids.to(device), arguments.steps)
    dist.barrier()
    dist.destroy_process_group()
    # gloo aborts the process if Python still holds a reference to the group when it exits: drop the schedule.
    AttentionInterface.register("attention2d", no_mask)


if __name__ == "__main__":
    main()
