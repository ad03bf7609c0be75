"""Train a transformers model on sequences longer than one device holds: their tokens are spread over all ranks.

torchrun --nproc-per-node 4 -- examples/long_context.py --seq-length 4096 [--model DIR] [--text FILE] [--steps 5]
    [--rows 2 --cols 2 --ulysses 1]

Every rank has the whole model and its part of every sequence; nothing but attention and the sums at the end knows of the
others. Without a grid, attention2d.choose takes the schedule that sends the fewest bytes, and says why.
"""

import argparse
from pathlib import Path

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
)

import attention2d


def spread(schedule, length):
    """transformers' attention function, by `schedule`, of sequences of `length` tokens."""

    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, position_ids=None, **features):
        features.pop("use_cache", None)  # what is left is refused if it has a value
        out = attention2d.attention(
            query, key, value, schedule, attention_mask, dropout, module.is_causal, scaling, seq=length, **features
        )
        return out.transpose(1, 2), None

    return attend


def no_mask(*_, attention_mask=None, **__):
    """transformers' mask function: the schedule knows what is seen, and no padding of one's own."""
    if attention_mask is not None:
        raise ValueError("attention_mask is not supported: give sequences without padding")


def small_llama():
    """A model with random weights that reads bytes."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=2**20,
    ))  # fmt: skip


def tokens_of(arguments):
    """(1, seq_length + 1) ids of the text."""
    text = Path(arguments.text).read_text(encoding="utf-8", errors="replace")
    ids = AutoTokenizer.from_pretrained(arguments.model)(text).input_ids if arguments.model else list(text.encode())
    if len(ids) <= arguments.seq_length:
        raise SystemExit(f"{arguments.text} has {len(ids)} tokens, not more than --seq-length {arguments.seq_length}")
    return torch.tensor(ids[: arguments.seq_length + 1]).unsqueeze(0)


def main():
    """Join the ranks, train, print the loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory of transformers (default: a small Llama with random weights)")
    parser.add_argument("--text", default=Path(__file__).parent.parent / "README.md")
    for name, default in dict(seq_length=4096, steps=5, rows=0, cols=0, ulysses=0).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    arguments = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    group, device = dist.group.WORLD, "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = (AutoModelForCausalLM.from_pretrained(arguments.model) if arguments.model else small_llama()).to(device)
    heads, length, config = model.config.num_attention_heads, arguments.seq_length, model.config
    kv_heads, head_dim = getattr(config, "num_key_value_heads", heads), getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // heads
    if arguments.rows or arguments.cols or arguments.ulysses:
        point = (max(1, size) for size in (arguments.rows, arguments.cols, arguments.ulysses))
        schedule = attention2d.Attention2D(group, *point)
    else:
        schedule = attention2d.choose(
            group, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seq=length, itemsize=model.dtype.itemsize
        )
    say = print if dist.get_rank() == 0 else lambda *_: None
    say(schedule.reason if arguments.rows + arguments.cols + arguments.ulysses == 0 else schedule)
    AttentionInterface.register("spread", spread(schedule, length))
    AttentionMaskInterface.register("spread", no_mask)
    model.set_attn_implementation("spread")

    ids = tokens_of(arguments).to(device)
    ours, labels = schedule.shard(ids[:, :-1]), schedule.shard(ids[:, 1:])  # labels are shifted before they are spread
    positions = schedule.positions(length).to(device)
    labels = labels.masked_fill(positions >= length, -100)  # padding, where the length does not divide
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, arguments.steps + 1):
        logits = model(ours, position_ids=positions.unsqueeze(0), use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / length
        optimizer.zero_grad()
        loss.backward()
        for parameter in (parameter for parameter in model.parameters() if parameter.grad is not None):
            dist.all_reduce(parameter.grad)
        optimizer.step()
        dist.all_reduce(loss.detach())
        sent = schedule.counter.sent / 1e6 / step
        say(
            f"step {step}  loss {loss.item():.4f}  {ours.shape[1]} of {length} tokens a rank  {sent:.2f} MB sent by rank 0"
        )
    dist.destroy_process_group()
    AttentionInterface.register("spread", no_mask)  # what still knows the group when Python ends makes gloo abort


if __name__ == "__main__":
    main()
