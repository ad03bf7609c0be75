"""The options of a training run: a dataclass that defines the command line and the YAML file. Loads no torch."""

import argparse
import contextlib
import difflib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from commfabric import FORMATS
from commfabric.foundation.command_line import LIMIT, Parser, check_number, did_you_mean, shortened
from commfabric.foundation.launcher import this_rank
from sparsefusion import MODES, SPARSIFIERS

from .megatron_flags import ANYWAY, NOT_THERE, SAME, add_arguments, answers, translated

# Schedules of attention2d. auto: the one that sends the fewest bytes. search: by commir, and what scans exchange as well.
CONTEXT_SCHEDULES = ("auto", "search", "ring", "all-gather", "ulysses", "usp", "2d", "3d")

ENGINES = ("torch", "fsdp", "deepspeed", "megatron")

TEXTS = ("data", "data_path", "train_data_path", "mock_data")  # options that name the text to train on


def _option(default: Any, help: str, **more: Any) -> Any:
    """A field of `Options` with its help text.

    more: choices, required, flag_alone (the value of a flag without one), metavar (PATH) of a list.
    """
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class Options:
    """The options of `examples/pretrain.py`, under Megatron's names where Megatron has the option.

    Raises:
        ValueError: A value is out of range or contradicts another one.
    """

    data: tuple[str, ...] = _option(
        (),
        "text files or folders; a document is a file, or the `text` of a line of JSON lines (.jsonl); or "
        "indexed datasets, as --data-path",
    )
    data_path: tuple[str, ...] = _option(
        (), "Megatron's indexed datasets: PREFIX of PREFIX.bin and .idx, or WEIGHT PREFIX WEIGHT PREFIX ...",
        metavar="WORD",
    )  # fmt: skip
    train_data_path: tuple[str, ...] = _option((), "as --data-path, all of it for training", metavar="WORD")
    mock_data: bool = _option(
        False, "train on Megatron's mock data: ids that count upwards, in documents of random length"
    )
    split: str = _option("949,50,1", "shares of --data-path for training, evaluation and tests, which are not read")
    data_cache_path: str = _option("", "directory for the index of samples of indexed datasets (default: in --out)")
    eval_iters: int = _option(10, "global batches of an evaluation with indexed datasets")
    out: str = _option(
        "", "directory for checkpoints, and at the end for the model in Hugging Face format", required=True
    )
    log: str = _option("", "file for JSON lines, one per logged step")
    tensorboard: str = _option("", "directory for TensorBoard's files with the same numbers")
    wandb: str = _option("", "project at Weights & Biases for the same numbers", flag_alone="megatron-ssm")
    wandb_exp_name: str = _option("", "name of the run at Weights & Biases")
    peak_tflops: float = _option(0.0, "TFLOP/s of a rank's device, for the utilization (0: of a known GPU with --bf16)")
    profile: str = _option("", "directory for a trace of a few steps by torch's profiler, on rank 0")
    profile_step_start: int = _option(10, "first step of the trace")
    profile_step_end: int = _option(12, "last step of the trace")
    dry_run: str = _option(
        "", "check the inputs and print layout, memory, messages and time, for the ranks of the launcher or for so many; "
        "train nothing", flag_alone="launched",
    )  # fmt: skip
    dry_run_fabric: str = _option("", "file of `sparsefusion measure`, by which --dry-run predicts the time")
    dry_run_device: str = _option("h100", "what computes there: a100, h100, h200, or a file as for `advise`")
    resume: str = _option(
        "",
        "continue from the newest checkpoint in --out; auto: or begin, if there is none; a folder: from DeepSpeed's "
        "checkpoint in it",
        flag_alone="newest",
    )
    valid_data_path: tuple[str, ...] = _option(
        (),
        "held-out text files or folders, or indexed datasets, as the training data (default: a share of the documents)",
    )
    held_out: float = _option(0.05, "share of the bytes of text to hold out without --valid-data-path")
    document_separator: str = _option("", "a line that separates documents within a file")
    tokenizer_model: str = _option("", "'byte', a tokenizer.json, or its folder (default: --init-from, else 'byte')")
    init_from: str = _option("", "Hugging Face directory of the model to start from, instead of a new one")

    model_config: str = _option("", "config.json of a new model, in place of the following options")
    model_type: str = _option("mamba2", "family of a new model, as in the model_type of a config.json")
    num_layers: int = _option(2, "number of blocks")
    hidden_size: int = _option(128, "width of the residual stream; mixers are twice as wide")
    mamba_state_dim: int = _option(64, "size of the state of each channel")
    mamba_head_dim: int = _option(32, "channels per head (Mamba-2, shared-block families)")
    mamba_num_groups: int = _option(1, "number of groups of heads that share B and C (Mamba-2)")
    hybrid_override_pattern: str = _option(
        "",
        "a letter for each block of a new hybrid: M Mamba-2, * attention, - MLP, E experts",
    )
    hybrid_interval: int = _option(1, "every N-th block uses the shared attention block")
    shared_blocks: int = _option(1, "number of shared attention blocks, which these use in turn")
    adapter_rank: int = _option(8, "rank of the adapters that each of these adds to its shared block")
    num_attention_heads: int = _option(4, "attention heads; those of a shared block are 2 x --hidden-size wide")
    num_query_groups: int = _option(0, "key/value heads (0: as many as attention heads)")
    ffn_hidden_size: int = _option(0, "width of an MLP (0: 4 x --hidden-size)")
    num_experts: int = _option(8, "experts of a layer with them (E in --hybrid-override-pattern)")
    moe_router_topk: int = _option(2, "experts of each token")
    moe_ffn_hidden_size: int = _option(0, "width of an expert (0: that of an MLP)")
    moe_shared_expert_intermediate_size: int = _option(0, "width of the expert of all tokens (0: that of an expert)")
    moe_latent_size: int = _option(0, "width of what experts read and write (0: --hidden-size)")
    moe_router_num_groups: int = _option(1, "groups of experts")
    moe_router_group_topk: int = _option(1, "groups from which a token's experts are")
    moe_router_topk_scaling_factor: float = _option(1.0, "what multiplies the weights of a token's experts")
    untie_embeddings_and_output_weights: bool = _option(False, "give the language-model head weights of its own")
    make_vocab_size_divisible_by: int = _option(
        0, "pad the vocabulary of a new model to a multiple of this x --tensor-model-parallel-size (0: no padding)"
    )
    init_method_std: float = _option(
        0.0, "standard deviation of the initial matrices of a new model; outputs of blocks: divided by the root of the "
        "number of blocks (0: the family's own initialization)",
    )  # fmt: skip

    tensor_model_parallel_size: int = _option(1, "ranks that split one replica of the model")
    context_parallel_size: int = _option(1, "ranks that share each sequence")
    expert_model_parallel_size: int = _option(1, "data x context ranks that divide the experts among them")
    context_schedule: str = _option(
        "auto",
        "how these compute attention; search: by commir's best plan, which is verified, and it also decides "
        "whether state-space layers pass states or exchange channels",
        choices=CONTEXT_SCHEDULES,
    )
    sequence_parallel: bool = _option(False, "between layers, give each tensor-parallel rank a share of the tokens")
    recompute_activations: bool = _option(
        False, "compute each block's activations again in backward, as Megatron's --recompute-granularity full"
    )
    engine: str = _option("torch", "what averages gradients", choices=ENGINES)
    use_distributed_optimizer: bool = _option(False, "divide the optimizer's state over the replicas (megatron, CUDA)")
    deepspeed_config: str = _option("", 'DeepSpeed\'s JSON file; values that are "auto" come from these options')
    memory_budget: float = _option(0.0, "GB that a step may need on a rank, by a formula (0: not checked)")
    micro_batch_size: int = _option(8, "sequences of one forward pass of a replica")
    global_batch_size: int = _option(16, "sequences per step over all replicas")
    rampup_batch_size: tuple[str, ...] = _option(
        (), "START INCREMENT SAMPLES: the global batch grows from START by INCREMENT, and is whole after SAMPLES samples",
        metavar="N",
    )  # fmt: skip
    seq_length: int = _option(256, "tokens per sequence")
    train_iters: int = _option(1000, "number of steps")
    train_samples: int = _option(
        0, "samples of the whole run, in place of --train-iters; then --global-batch-size may change when it resumes"
    )
    lr: float = _option(3e-3, "learning rate after the warm-up")
    min_lr: float = _option(0.0, "learning rate after its decay")
    lr_warmup_iters: int = _option(0, "steps of linear warm-up")
    lr_decay_iters: int = _option(0, "step at which the learning rate has decayed (0: --train-iters)")
    lr_decay_style: str = _option(
        "cosine", "decay of the learning rate after the warm-up", choices=("cosine", "linear", "constant")
    )
    weight_decay: float = _option(0.1, "weight decay of matrices; A_log, D, norms and biases have none")
    weight_decay_incr_style: str = _option(
        "constant", "how it grows from --start-weight-decay to --end-weight-decay over --train-iters",
        choices=("constant", "linear", "cosine"),
    )  # fmt: skip
    start_weight_decay: float = _option(0.0, "weight decay of the first step, unless it is constant")
    end_weight_decay: float = _option(0.0, "weight decay at the end, unless it is constant")
    adam_beta1: float = _option(0.9, "AdamW's beta1")
    adam_beta2: float = _option(0.95, "AdamW's beta2")
    adam_eps: float = _option(1e-8, "AdamW's epsilon")
    clip_grad: float = _option(1.0, "limit of the gradient norm over all ranks (0: no clipping)")
    bf16: bool = _option(False, "compute matrix products in bf16 (autocast); parameters stay fp32")
    params_dtype: str = _option("float32", "dtype of parameters", choices=("float32", "float64"))
    reduce: str = _option("fp32", "wire format of the block outputs' all-reduce in forward", choices=FORMATS)
    gradient_mode: str = _option("dense", "how replicas average gradients: dense, in fp16, or sparsely", choices=MODES)
    gradient_density: float = _option(0.01, "share of a gradient's elements sent per step in sparse modes")
    gradient_sparsifier: str = _option("dgc", "how these elements are selected", choices=SPARSIFIERS)
    gradient_density_warmup: int = _option(0, "steps in which the density falls from 0.25 to --gradient-density")
    moe_router_load_balancing_type: str = _option(
        "aux_loss", "load-balancing loss of routers: of a micro-batch, of a sequence, or of all layers together",
        choices=("aux_loss", "seq_aux_loss", "pooled_aux_loss"),
    )  # fmt: skip
    moe_aux_loss_coeff: float = _option(0.0, "what multiplies it (0: none)")
    moe_z_loss_coeff: float = _option(0.0, "what multiplies the z loss of routers (0: none)")
    moe_router_enable_expert_bias: bool = _option(
        False, "after each step, adjust the bias with which experts are chosen"
    )
    moe_router_bias_update_rate: float = _option(1e-3, "by how much")
    moe_per_layer_logging: bool = _option(False, "log how many tokens chose each expert of each layer")
    seed: int = _option(1234, "random seed of initialization and data order")

    lora_rank: int = _option(0, "train LoRA adapters of this rank, and not the model of --init-from (0: the model)")
    lora_alpha: float = _option(16.0, "the adapters' products are multiplied by this / --lora-rank")
    lora_targets: tuple[str, ...] = _option(
        ("in_proj",), "Hugging Face's names of the linear layers with adapters", metavar="NAME"
    )

    keep: int = _option(2, "number of checkpoints to keep, the newest")
    save_deepspeed: bool = _option(False, "at the end, also write DeepSpeed's own checkpoint, to --out/deepspeed")
    async_save: bool = _option(False, "write checkpoints while training goes on, from a copy of the state in memory")
    save_interval: int = _option(500, "steps between checkpoints; the last step writes one too (0: only that one)")
    exit_interval: int = _option(0, "save a checkpoint and exit after a step that is a multiple of this (0: never)")
    exit_duration_in_mins: float = _option(0.0, "save a checkpoint and exit after so many minutes (0: never)")
    max_skipped_steps: int = _option(5, "steps in a row that may be skipped because a loss or gradient is not finite")
    lost_rank_timeout: float = _option(15.0, "seconds without a sign of life of a rank until the others end (0: off)")
    distributed_timeout_minutes: int = _option(5, "minutes after which a collective that waits for a rank fails")
    log_interval: int = _option(10, "steps between logged steps")
    eval_interval: int = _option(0, "steps between evaluations; the last step evaluates too (0: only that one)")
    device: str = _option("", "cpu or cuda (default: cuda where there is one)", choices=("", "cpu", "cuda"))

    def __post_init__(self) -> None:
        for name, least in _MINIMUM.items():
            value = getattr(self, name)
            check_number(flag(name), value, least, LIMIT if isinstance(value, int) else math.inf)
        if problem := next(self._problems(), ""):
            raise ValueError(problem)

    def _problems(self) -> Iterator[str]:
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                yield f"{flag(name)} {getattr(self, name)} must be at least 0 and below 1"
        if self.model_config and self.init_from:
            yield "--model-config is for a new model, and --init-from for one that exists"
        is_count = self.dry_run.isdecimal() and int(self.dry_run) > 0
        if self.dry_run not in ("", "launched") and not is_count:
            yield f"--dry-run {self.dry_run} is not a number of ranks"
        if self.lora_rank and not self.init_from:
            yield f"--lora-rank {self.lora_rank} needs a model to adapt: --init-from"
        pattern, layers = self.hybrid_override_pattern, self.num_layers
        if pattern and (self.model_config or self.init_from):
            yield "--hybrid-override-pattern is for a new model that is made from options"
        if pattern and layers not in (2, len(pattern)):  # 2: the default
            yield f"--hybrid-override-pattern {pattern} has {len(pattern)} blocks, not --num-layers {layers}"
        if self.min_lr > self.lr:
            yield f"--min-lr {self.min_lr} is above --lr {self.lr}"
        start, end, style = self.start_weight_decay, self.end_weight_decay, self.weight_decay_incr_style
        if (style == "constant" and (start or end)) or (style != "constant" and not start <= end > 0):
            yield (
                f"--weight-decay-incr-style {style} with --start-weight-decay {start} --end-weight-decay {end}: linear and "
                "cosine need an end above 0 and not below the start, constant needs neither"
            )
        if self.mock_data and (self.data or self.data_path or self.train_data_path or self.valid_data_path):
            yield "--mock-data takes the place of --data and other text"
        if len(texts := [flag(name) for name in TEXTS if getattr(self, name)]) > 1:
            yield f"{' and '.join(texts)} each name the text to train on: give one of them"
        yield from self._problems_of_ramp()
        warmup, decayed = self.lr_warmup_iters, self.lr_decay_iters
        if self.lr_decay_style != "constant" and 0 < decayed <= warmup:
            yield f"--lr-warmup-iters {warmup} is not below --lr-decay-iters {decayed}"
        if self.bf16 and self.params_dtype != "float32":
            yield f"--bf16 does not compute with {self.params_dtype} parameters: --params-dtype float32"
        if not 0 < self.lora_alpha < math.inf:
            yield f"--lora-alpha {self.lora_alpha} must be positive and finite"
        if self.sequence_parallel and self.reduce != "fp32":
            yield f"--sequence-parallel sums in fp32, not in --reduce {self.reduce}"
        if self.profile_step_end < self.profile_step_start:
            yield f"--profile-step-end {self.profile_step_end} is before --profile-step-start {self.profile_step_start}"
        if self.profile and self.profile_step_start > self.train_iters:
            yield f"--profile-step-start {self.profile_step_start} is after --train-iters {self.train_iters}"
        if not 0 < self.gradient_density <= 1:
            yield f"--gradient-density {self.gradient_density} must be above 0 and at most 1"
        yield from self._problems_of_engine()
        if not -(2**63) <= self.seed < 2**63:
            yield f"--seed {shortened(self.seed)} is not a 64-bit integer"

    def _problems_of_ramp(self) -> Iterator[str]:
        if not (words := self.rampup_batch_size):
            return
        named, full = f"--rampup-batch-size {' '.join(words)}", self.global_batch_size
        if len(words) != 3 or not all(word.isdecimal() for word in words):
            yield f"{named} is not START INCREMENT SAMPLES, three whole numbers"
            return
        start, increment, samples = map(int, words)
        if not (0 < start <= full and increment and samples and (full - start) % increment == 0):
            yield f"{named}: --global-batch-size {full} must be START plus a multiple of INCREMENT, and no number may be 0"
        if not self.train_samples:
            yield f"{named} needs --train-samples, as steps have different sizes"
        if self.engine == "deepspeed":
            yield f"{named} is not implemented for --engine deepspeed"

    def _problems_of_engine(self) -> Iterator[str]:
        if (self.engine == "deepspeed") != bool(self.deepspeed_config):
            rule = "needs" if self.engine == "deepspeed" else "has no use for"
            yield f"--engine {self.engine} {rule} --deepspeed-config"
        if self.save_deepspeed and self.engine != "deepspeed":
            yield f"--save-deepspeed needs --engine deepspeed, not {self.engine}"
        if self.use_distributed_optimizer and self.engine in ("deepspeed", "fsdp"):
            yield f"--use-distributed-optimizer needs --engine megatron, not {self.engine}"
        if self.use_distributed_optimizer and self.params_dtype != "float32":
            yield f"--use-distributed-optimizer has no {self.params_dtype} parameters: --params-dtype float32"
        if self.engine == "deepspeed" and self.params_dtype != "float32":
            yield f"--engine deepspeed reduces no {self.params_dtype} gradients: --params-dtype float32"
        if self.memory_budget and self.divides_state:
            divided = "--use-distributed-optimizer" if self.use_distributed_optimizer else f"--engine {self.engine}"
            yield f"--memory-budget has no formula for {divided}"
        if self.moe_router_enable_expert_bias and self.engine in ("deepspeed", "fsdp"):
            yield f"--moe-router-enable-expert-bias is not implemented for --engine {self.engine}"
        if self.engine == "fsdp":
            if self.gradient_mode != "dense":
                yield f"--gradient-mode {self.gradient_mode}: SparseFusion does not work with --engine fsdp"
            if self.lora_rank:
                yield f"--lora-rank {self.lora_rank} is not implemented for --engine fsdp"
        if self.expert_model_parallel_size > 1:
            yield from self._problems_of_experts()

    def _problems_of_experts(self) -> Iterator[str]:
        others = {
            "--engine fsdp": self.engine == "fsdp",
            "--engine deepspeed, which knows only its own experts": self.engine == "deepspeed",
            "--use-distributed-optimizer": self.use_distributed_optimizer,
            f"--gradient-mode {self.gradient_mode}: SparseFusion": self.gradient_mode != "dense",
            "--memory-budget": bool(self.memory_budget),
        }
        if wrong := next((name for name, is_given in others.items() if is_given), ""):
            size = self.expert_model_parallel_size
            yield f"--expert-model-parallel-size {size} is not implemented for {wrong}"

    @property
    def itemsize(self) -> int:
        """The bytes of a parameter."""
        return 8 if self.params_dtype == "float64" else 4

    @property
    def divides_state(self) -> bool:
        """Return True if the engine divides the optimizer's state, or more, over the replicas."""
        return self.engine in ("deepspeed", "fsdp") or self.use_distributed_optimizer

    @property
    def full_steps(self) -> int:
        """The number of steps, if all have the full global batch."""
        return self.train_samples // self.global_batch_size if self.train_samples else self.train_iters

    @property
    def decay_steps(self) -> int:
        """The step at which the learning rate has decayed, if all have the full global batch (0: it does not decay)."""
        return 0 if self.lr_decay_style == "constant" else self.lr_decay_iters or self.full_steps

    def accumulation(self, data_ranks: int) -> int:
        """The number of micro-batches of a replica in each step; ValueError if the global batch does not divide."""
        at_once = self.micro_batch_size * data_ranks
        batches = {"--global-batch-size": self.global_batch_size}
        if self.rampup_batch_size:
            start, increment, _ = map(int, self.rampup_batch_size)
            batches |= {"START of --rampup-batch-size": start, "INCREMENT of --rampup-batch-size": increment}
        for name, batch in batches.items():
            if batch % at_once:
                raise ValueError(
                    f"{name} {batch} is not a multiple of --micro-batch-size {self.micro_batch_size} x {data_ranks} "
                    f"data-parallel ranks ({batch} % {at_once} = {batch % at_once})"
                )
        return self.global_batch_size // at_once

    def new_config(self, vocab_size: int, eos: int) -> dict:
        """The config.json of a new model; eos: the id of its beginning, end and padding token.

        ValueError for a family that is not known, or that cannot be made from options.
        """
        from megatron_ssm.layers.families import FAMILIES, family_of  # imports torch

        family = family_of({"model_type": self.model_type})
        if self.hybrid_override_pattern and not family.made_from_pattern:
            family = next(each for each in FAMILIES.values() if each.made_from_pattern)
            if self.model_type != Options.model_type:  # the default
                raise ValueError(
                    f"--hybrid-override-pattern makes a {family.name} model, not --model-type {self.model_type}"
                )
        multiple = max(1, self.make_vocab_size_divisible_by * self.tensor_model_parallel_size)
        return {
            "model_type": family.name,
            "vocab_size": -(-vocab_size // multiple) * multiple,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "tie_word_embeddings": not self.untie_embeddings_and_output_weights,
            **{f"{name}_token_id": eos for name in ("bos", "eos", "pad")},
            **family.sizes_from_options(self),
        }

    def describe(self) -> str:
        """Every option but --data that differs from its default, on one line."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{name}={json.dumps(value)}" for name, value in changed.items() if name != "data")


_MINIMUM = {
    **dict.fromkeys(("micro_batch_size", "global_batch_size", "seq_length", "train_iters", "log_interval",
                     "tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "num_layers",
                     "hidden_size", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "hybrid_interval",
                     "shared_blocks", "adapter_rank", "num_attention_heads", "keep", "num_experts", "moe_router_topk",
                     "moe_router_num_groups", "moe_router_group_topk", "profile_step_start", "profile_step_end",
                     "distributed_timeout_minutes"), 1),
    **dict.fromkeys(("lr", "min_lr", "lr_warmup_iters", "lr_decay_iters", "weight_decay", "clip_grad", "adam_eps",
                     "save_interval", "exit_interval", "eval_interval", "num_query_groups", "ffn_hidden_size",
                     "gradient_density_warmup", "memory_budget", "max_skipped_steps", "lost_rank_timeout",
                     "peak_tflops", "lora_rank", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
                     "moe_latent_size", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate",
                     "eval_iters", "make_vocab_size_divisible_by", "init_method_std", "start_weight_decay",
                     "end_weight_decay", "exit_duration_in_mins", "train_samples"), 0),
}  # fmt: skip


# {the first option of a group in --help: the title of the group}
GROUPS = {
    "data": "text", "out": "outputs and checkpoints to begin from", "valid_data_path": "held-out text and tokenizer",
    "model_config": "a new model", "tensor_model_parallel_size": "ranks, memory and engines",
    "micro_batch_size": "batches and length", "lr": "optimizer", "bf16": "number formats and messages",
    "moe_router_load_balancing_type": "routers of experts", "seed": "random numbers", "lora_rank": "LoRA adapters",
    "keep": "checkpoints, faults, intervals",
}  # fmt: skip


def table() -> str:
    """All options as a Markdown table for each group."""
    lines: list[str] = []
    for option in fields(Options):
        if option.name in GROUPS:
            lines += [
                "",
                f"### {GROUPS[option.name][0].upper()}{GROUPS[option.name][1:]}",
                "",
                "| option | default | meaning |",
                "| --- | --- | --- |",
            ]
        default = f"`{shown}`" if (shown := _shown(option.default)) else ""
        lines.append(f"| `{flag(option.name)}` | {default} | {option.metadata['help']} |")
    return "\n".join(lines[1:])


def _shown(default: Any) -> str:
    """A default as text, "" for one that means off."""
    if default in ("", (), False):
        return ""
    if isinstance(default, tuple):
        return " ".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Parser(Parser):
    """Its error for an unknown flag is the answer of `megatron_flags`, or suggests a flag with a similar first word."""

    def _refuse(self, unknown: Sequence[str]) -> None:
        if not unknown:
            return
        name = unknown[0].split("=")[0]
        if name in NOT_THERE:
            self.error(f"{name} is not there: {NOT_THERE[name]}")
        first_words = {flag: flag.split("-")[2] for flag in self.flags()}
        close = difflib.get_close_matches(name.removeprefix("--").split("-")[0], {*first_words.values()}, cutoff=0.8)
        similar = [flag for flag, word in first_words.items() if word in close]
        self.error(f"unknown argument {unknown[0]}{did_you_mean(name, similar)}")


def parse_options(argv: Sequence[str] | None = None, prog: str = "pretrain.py") -> Options:
    """Options from the command line, which override those of --config F.yaml, which override the defaults.

    Prints one line and exits with 2 if an option is wrong.

    Args:
        argv: The words of the command line (None: sys.argv[1:]).
        prog: The name of the program in errors.
    """
    usage = f"{prog} [--config F.yaml] --data PATH ... --out DIR [OPTIONS]"
    script = "python examples/pretrain.py"
    examples = (f"{script} --data corpus.txt --out OUT --train-iters 500", f"{script} --config run.yaml --dry-run 8")
    parser = _Parser(examples, prog=prog, usage=usage, description="Pretrain a state-space language model on text.")
    parser.add_argument("--config", metavar="F.yaml", help="options in YAML, under the same names")
    group: Any = parser
    for option in fields(Options):
        if option.name in GROUPS:
            group = parser.add_argument_group(GROUPS[option.name])
        default = f" (default: {shown})" if (shown := _shown(option.default)) else ""
        arguments: dict[str, Any] = dict(default=argparse.SUPPRESS, help=option.metadata["help"] + default)
        if isinstance(option.default, bool):
            arguments |= dict(action=argparse.BooleanOptionalAction)
        elif isinstance(option.default, tuple):
            arguments |= dict(nargs="+", metavar=option.metadata.get("metavar", "PATH"))
        else:
            arguments |= dict(type=type(option.default), choices=option.metadata.get("choices"))
            if isinstance(option.default, int | float):
                arguments["metavar"] = "N"
        if alone := option.metadata.get("flag_alone"):
            arguments |= dict(nargs="?", const=alone)
            no: dict[str, Any] = dict(default=argparse.SUPPRESS, help=argparse.SUPPRESS, dest=option.name)
            group.add_argument(flag(f"no_{option.name}"), action="store_const", const="", **no)
        others = [other for other, name in SAME.items() if name == option.name]
        group.add_argument(flag(option.name), *others, **arguments)
    add_arguments(parser, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # the deepspeed launcher's
    parsed = vars(parser.parse_args(argv))
    config = parsed.pop("config")
    parsed.pop("local_rank", None)
    try:
        values = _read_yaml(config) if config else {}
        if any(parsed.get(name) for name in TEXTS):  # in place of the file's
            values = {name: value for name, value in values.items() if name not in TEXTS}
        values |= parsed
        values = translated(values, {option.name: option.default for option in fields(Options)})
        for option in fields(Options):
            if option.metadata.get("required") and not values.get(option.name):
                raise ValueError(f"{flag(option.name)} is required")
        if not any(values.get(name) for name in TEXTS):
            raise ValueError("--data is required")
        if unused := [name for name in ANYWAY if name[2:].replace("-", "_") in parsed]:
            if this_rank() == 0:
                print(f"ignored: {', '.join(unused)} (no effect here)", flush=True)
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return Options(**values)
    except ValueError as error:
        parser.error(str(error))  # exits
        raise


def _read_yaml(path: str) -> dict[str, Any]:
    """The options in a YAML file, converted to their types; ValueError if it cannot be read, or if one of them is wrong."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read --config {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or an impossible date
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no options")
    known = {option.name: option for option in fields(Options)}
    checked = {}
    for key, value in values.items():
        name = str(key).replace("-", "_").lstrip("_")
        if (here := answers().get(flag(name))) is not None:
            raise ValueError(f"{path}: {key} is a flag of Megatron or DeepSpeed; here: {here.replace('`', '')}")
        if name not in known:
            raise ValueError(f"{path}: unknown option {key}{did_you_mean(name, known)}")
        checked[name] = _of_type(value, known[name], f"{path}: {key}")
    return checked


def _of_type(value: Any, option: Field, where: str) -> Any:
    """A YAML value as the option's type. (YAML reads 3e-3 as text.)"""
    kind = type(option.default)
    if isinstance(value, bool) and (alone := option.metadata.get("flag_alone")):
        return alone if value else ""
    if kind is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(
            _converted(str(item) if isinstance(item, float) else item, str, where) for item in items
        )  # weights
    value = _converted(value, kind, where)
    choices = option.metadata.get("choices")
    if choices and value not in choices:
        raise ValueError(f"{where}: {value!r} is not one of {', '.join(filter(None, choices))}")
    return value


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _converted(value: object, kind: type, where: str) -> Any:
    """A YAML value as bool, int, float or str; ValueError if the conversion would change it."""
    if isinstance(value, bool) == (kind is bool) and isinstance(value, bool | int | float | str):
        with contextlib.suppress(ValueError, OverflowError):
            converted = kind(value)
            if converted == value or not isinstance(value, float):
                return converted
    shown = shortened(value) if isinstance(value, int) else repr(value)
    raise ValueError(f"{where}: {shown} is not {_KINDS[kind]}")
