"""The memory that a training step needs by a formula, and its comparison with --memory-budget."""

from bisect import bisect_left

from attention2d.layout.token_order import local_length
from megatron_ssm.model.activations import TrainingMemory
from megatron_ssm.spec.stack import Stack

from .options import Options

GB = 10**9


def training_memory(options: Options, config: Stack, expert_ranks: int = 1) -> TrainingMemory:
    """The formula for a run's options. The activations are those of the C kernels in the parameters' dtype."""
    return TrainingMemory(
        config, options.tensor_model_parallel_size, options.sequence_parallel, options.recompute_activations,
        options.itemsize, expert_ranks,
    )  # fmt: skip


def has_residuals(options: Options) -> bool:
    return options.gradient_mode not in ("dense", "fp16")


def needed_memory(options: Options, config: Stack, context_ranks: int) -> int:
    """Bytes on the rank that needs most, with `context_ranks` ranks for each sequence.

    Parameters, gradients, AdamW's two moments, in sparse gradient modes the residual, and activations. Not counted:
    messages, the text, what an attention schedule keeps, and PyTorch itself (about 0.3 GB).
    """
    tokens = local_length("zigzag", options.seq_length, context_ranks)
    return training_memory(options, config).step(options.micro_batch_size, tokens, has_residuals(options))


def check_memory_budget(options: Options, config: Stack) -> None:
    """ValueError if a step needs more than --memory-budget; it names the fewest context ranks that would be enough."""
    if not options.memory_budget:
        return
    used, budget = options.context_parallel_size, options.memory_budget * GB
    needed = needed_memory(options, config, used)
    if needed <= budget:
        return
    # A block has at least one token, and as many as the history of the convolution. More ranks never need more memory.
    most = options.seq_length // (2 * max(1, config.history))
    enough = 1 + bisect_left(
        range(1, most + 1), True, key=lambda ranks: needed_memory(options, config, ranks) <= budget
    )
    hint = "no number of context ranks is enough" if enough > most else f"--context-parallel-size {enough} is enough"
    raise ValueError(
        f"{options.micro_batch_size} x {options.seq_length} tokens on {used} context ranks need {needed / GB:.2f} GB on "
        f"each rank, more than --memory-budget {options.memory_budget:g}; {hint}"
    )
