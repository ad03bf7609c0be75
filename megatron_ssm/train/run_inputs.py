"""The inputs of a training run: text, configurations, the checkpoint to resume from; and their checks.

Every rank reads all of them. Before training, the ranks compare what they have read: if an input is wrong or unreadable on
one rank, or differs between ranks, every rank raises the same error.
"""

import contextlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commfabric.collectives.agreement import together
from commfabric.foundation.command_line import LIMIT
from commfabric.foundation.launcher import launched_ranks
from megatron_ssm.checkpoints.folders import DamagedCheckpoint, find_checkpoints, read_training
from megatron_ssm.kernels.fused_adam import adamw_on_cuda
from megatron_ssm.layers import families
from megatron_ssm.model.lora import find_modules
from megatron_ssm.parallel.blocks import check_sequence_length
from megatron_ssm.spec.stack import Stack

from .batches import Batches, BatchSizes, Tokens
from .corpus import Corpus
from .deepspeed_settings import read_settings
from .indexed import IndexedBatches
from .memory_budget import check_memory_budget
from .options import Options, flag
from .progress import check_places, make_folder
from .saving import OWN, checkpoint_to_resume, resumes_deepspeed
from .tracking import check_trackers

# Options that may differ between ranks: paths, which may be local to a machine. The contents read from them are compared
# instead.
LOCAL_OPTIONS = {
    "data", "valid_data_path", "tokenizer_model", "init_from", "model_config", "deepspeed_config", "out", "log", "device",
    "profile", "tensorboard", "data_path", "train_data_path", "data_cache_path",
}  # fmt: skip
# Options of the shape of a new model, and of sparse gradients.
SHAPE_OPTIONS = (
    "model_type", "num_layers", "hidden_size", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "hybrid_interval",
    "shared_blocks", "adapter_rank", "num_attention_heads", "num_query_groups", "ffn_hidden_size",
    "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor",
    "untie_embeddings_and_output_weights", "make_vocab_size_divisible_by",
)  # fmt: skip
EXPERT_OPTIONS = tuple(name for name in SHAPE_OPTIONS if name.startswith("moe_") or name == "num_experts")
SPARSE_OPTIONS = ("gradient_density", "gradient_sparsifier", "gradient_density_warmup")


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run, which it reads before training begins.

    Attributes:
        options: The options of the run; `resume` is "auto" if torchrun has restarted it (see `saving.only_run`).
        out: The directory of --out.
        requirements: JSON values that a run which resumes from this one's checkpoints must have in common with it.
        checkpoint: The checkpoint from which this run resumes, and its step; None for a new run.
        deepspeed: The configuration of DeepSpeed's engine; None for another engine.
    """

    options: Options
    out: Path
    corpus: Corpus
    config: Stack
    batches: Batches | IndexedBatches
    batch_sizes: BatchSizes
    requirements: dict[str, Any]
    checkpoint: tuple[Path, int] | None
    deepspeed: dict[str, Any] | None

    @classmethod
    def read(cls, options: Options, ranks: int | None = None) -> "RunInputs":
        """Read them on this rank. ValueError or OSError if one of them is wrong, or if the outputs cannot be written.

        ranks: the number of those of the run; None: of the launcher.
        """
        out = Path(options.out)
        for folder in (out, out / "checkpoints"):
            make_folder("out", folder)
        corpus = Corpus(options)
        config = families.read(options.init_from) if options.init_from else corpus.new_model_config(options)
        corpus.check_vocabulary(config)
        config.check_ranks(options.tensor_model_parallel_size, options.expert_model_parallel_size)
        if options.lora_rank:
            find_modules(config, options.lora_targets)  # ValueError if there are none
        check_routers(options, config)
        check_memory_budget(options, config)
        check_sequence_length(options.seq_length, options.context_parallel_size, config.history)
        batches = corpus.batches(options, _samples_of_run(options, out / "checkpoints"))
        requirements = _resume_requirements(options, config, batches)
        most = LIMIT if options.train_samples else options.train_iters
        checkpoint = checkpoint_to_resume(options.resume, out / "checkpoints", requirements, most)
        batch_sizes = _batch_sizes(options, checkpoint)
        if options.train_samples:
            options = replace(options, train_iters=batch_sizes.last_step(options.train_samples))
        deepspeed = None
        if options.engine == "deepspeed":
            data_ranks = (ranks or launched_ranks()) // (
                options.tensor_model_parallel_size * options.context_parallel_size
            )
            deepspeed = read_settings(options, data_ranks, config.hidden_size)
        check_places(options)
        check_trackers(options)
        return cls(options, out, corpus, config, batches, batch_sizes, requirements, checkpoint, deepspeed)

    def unread_samples(self) -> Iterator[str]:
        """A line about the last samples of --train-samples, if they are fewer than a global batch."""
        read, size = self.batch_sizes.of_step(self.options.train_iters)
        if (left := self.options.train_samples - read) > 0:
            yield f"--train-samples {self.options.train_samples}: the last {left} are left out (global batch {size})"

    @property
    def first_step(self) -> int:
        return self.checkpoint[1] if self.checkpoint else 0

    def fingerprint(self) -> dict[str, Any]:
        """The values that must be equal on all ranks; those most likely to differ come first."""
        options, held_out = self.options, self.corpus.held_out
        held_out_text = (len(held_out.ids), _checksum(held_out.ids)) if isinstance(held_out, Tokens) else None
        training_text = self.requirements["training_tokens"], self.requirements["training_text"]
        return {
            "training tokens, checksum": training_text,
            "held-out tokens, checksum": held_out_text,
            "resumed step": self.first_step,
            **{f.name: getattr(options, f.name) for f in fields(options) if f.name not in LOCAL_OPTIONS},
            "outputs": [bool(getattr(options, name)) for name in ("log", "tensorboard", "profile")],
            "requirements": self.requirements,
            "DeepSpeed's configuration": self.deepspeed,
        }


def read_on_all_ranks(options: Options, device: torch.device) -> RunInputs:
    """Call `RunInputs.read` on all ranks together.

    If it fails on one rank, every rank raises that error; if the inputs differ, every rank raises ValueError. With
    --engine deepspeed, every rank also raises an error of `import_deepspeed` on one rank.
    """

    def read() -> RunInputs:
        inputs = RunInputs.read(options)
        if options.engine == "deepspeed":
            from .deepspeed_trainer import import_deepspeed  # here, because DeepSpeed is an optional dependency

            import_deepspeed(device)
        return inputs

    def same(inputs: RunInputs) -> dict[str, Any]:
        return {"optimizer": _optimizer(options, device), **inputs.fingerprint()}

    inputs = together(read, [dist.group.WORLD], same, device)
    if isinstance(inputs.batches, IndexedBatches):
        inputs.corpus.held_out = inputs.batches.open()
    return inputs


def _optimizer(options: Options, device: torch.device) -> str:
    """The package whose AdamW updates the parameters, with its version; ranks must use the same, because each rounds in its
    own way.
    """
    uses_torch_adamw = device.type != "cuda" or options.divides_state
    return "torch" if uses_torch_adamw else adamw_on_cuda(getattr(torch, options.params_dtype))[0]


def ignored_options(options: Options, replicas: int) -> list[str]:
    """Lines about options that differ from their defaults and that other options make meaningless.

    replicas: the ranks that average gradients, those of data and of context parallelism.
    """
    model = next((flag(name) for name in ("init_from", "model_config") if getattr(options, name)), "")
    grows = options.weight_decay_incr_style != "constant"
    is_dense = options.gradient_mode in ("dense", "fp16")
    reasons = {
        f"{model} says the shape of the model": SHAPE_OPTIONS if model else (),
        "no block has experts": EXPERT_OPTIONS if not model and "E" not in options.hybrid_override_pattern else (),
        "--lr-decay-style is constant": ("min_lr", "lr_decay_iters") if options.lr_decay_style == "constant" else (),
        "--init-from says the weights": ("init_method_std",) if options.init_from else (),
        "--weight-decay-incr-style is not constant": ("weight_decay",) if grows else (),
        "--engine torch divides nothing on CPUs": ("use_distributed_optimizer",) * (options.engine == "torch"),
        "there is no --wandb": ("wandb_exp_name",) if not options.wandb else (),
        "there is no --lora-rank": ("lora_alpha", "lora_targets") if not options.lora_rank else (),
        "no other rank has gradients to average": ("gradient_mode", *SPARSE_OPTIONS) if replicas == 1 else (),
        f"--gradient-mode is {options.gradient_mode}": SPARSE_OPTIONS if is_dense and replicas > 1 else (),
    }
    defaults = {option.name: option.default for option in fields(Options)}
    ignored = {reason: [n for n in names if getattr(options, n) != defaults[n]] for reason, names in reasons.items()}
    return [f"ignored: {', '.join(map(flag, names))} ({reason})" for reason, names in ignored.items() if names]


def _resume_requirements(options: Options, config: Stack, batches: Batches | IndexedBatches) -> dict[str, Any]:
    """The JSON values that a resumed run must have in common with the run that wrote its checkpoint."""
    run = {name: getattr(options, name) for name in ("seq_length", "seed", "params_dtype")}
    batch = "any, as --train-samples counts samples" if options.train_samples else options.global_batch_size
    run["global_batch_size"] = batch
    if options.lora_rank:
        run |= {name: getattr(options, name) for name in ("lora_rank", "lora_alpha", "lora_targets")}
    if isinstance(batches, IndexedBatches):
        text = {"training_tokens": batches.tokens, "training_text": batches.checksum, "train_samples": batches.planned}
    else:
        text = {"training_tokens": len(batches.ids), "training_text": _checksum(batches.ids)}
    return json.loads(json.dumps({**_model_values(config), **run, **text}))


def _model_values(config: Stack) -> dict[str, Any]:
    """The sizes and constants that determine a model's results. Equal operators are listed once, under the path of the
    first.
    """
    named = "family vocab_size hidden_size num_layers norm_eps tie_embeddings residual_in_fp32".split()
    found = {name: getattr(config, name) for name in named + ["embedding_scale", "logits_scale"]}
    first: dict[Any, str] = {}
    for path, spec in config.operators:
        first.setdefault(spec, path)
    for spec, path in first.items():
        values = asdict(spec)
        found |= {f"{path}.{each.name}": values[each.name] for each in fields(spec) if each.compare}
    return found


def _samples_of_run(options: Options, directory: Path) -> int:
    """The number of samples for which Megatron's GPTDataset builds its shuffled order. A resumed run uses the number that
    its first start recorded in its checkpoints.
    """
    for path in find_checkpoints(directory)[::-1] if options.resume in OWN[1:] else ():
        with contextlib.suppress(DamagedCheckpoint):
            if samples := read_training(path).requirements.get("train_samples"):
                return samples
    return options.train_samples or options.train_iters * options.global_batch_size


def _batch_sizes(options: Options, checkpoint: tuple[Path, int] | None) -> BatchSizes:
    """The samples of each step from a checkpoint on, or from the beginning.

    ValueError if the run has read more samples than --train-samples.
    """
    path, step = checkpoint or (None, 0)
    samples = None
    if path is not None and not resumes_deepspeed(options):
        with contextlib.suppress(DamagedCheckpoint):  # `resume` reports it
            samples = read_training(path).samples
    sizes = BatchSizes.of(options, step, samples)
    if options.train_samples and sizes.samples > options.train_samples:
        raise ValueError(f"{path} has read {sizes.samples} samples, more than --train-samples {options.train_samples}")
    if sizes.last_step(options.train_samples) < 1 and options.train_samples:
        raise ValueError(f"--train-samples {options.train_samples} is below one global batch, {sizes.size(0)}")
    return sizes


def _checksum(ids: torch.Tensor) -> int:
    array: Any = ids.numpy()
    return zlib.crc32(array)


def check_routers(options: Options, config: Stack) -> None:
    """ValueError for options of routers that have no effect on this model."""
    if not any(spec.experts for _, spec in config.operators):
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias"):
            if getattr(options, name):
                raise ValueError(f"{flag(name)}: this {config.family} model has no experts")
    elif options.moe_router_enable_expert_bias and not any(f.name.endswith(".correction") for f in config.fields()):
        raise ValueError(f"--moe-router-enable-expert-bias: the routers of {config.family} models have no such bias")
