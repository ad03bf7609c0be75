"""The configuration of DeepSpeed's engine: the file of --deepspeed-config, completed from the options.

A value that is "auto" comes from the options, as in transformers; any other must agree with them. Keys that would do
something else than in `examples/pretrain.py` are refused by name, and so are unknown ones. DeepSpeed itself checks the
values of the keys that it gets. null counts as absent. Loads no torch.
"""

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

from commfabric.foundation.json_files import read_json

from .options import Options, flag

AUTO = "auto"
SCHEDULERS = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}  # by --lr-decay-style
# Sections whose keys are looked at one by one.
SECTIONS = {"optimizer", "optimizer.params", "scheduler", "scheduler.params", "bf16", "fp16", "torch_autocast",
            "zero_optimization"}  # fmt: skip
PASSED = {  # keys that DeepSpeed gets as they are in the file
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc", "prescale_gradients",
    "gradient_predivide_factor", "communication_data_type", "flops_profiler", "comms_logger", "timers", "tensorboard",
    "wandb", "csv_monitor", "comet",
}  # fmt: skip
ZERO_PASSED = {  # the same of zero_optimization
    "stage", "contiguous_gradients", "reduce_scatter", "allgather_partitions", "overlap_comm", "ignore_unused_parameters",
    "log_trace_cache_warnings", "reduce_bucket_size", "allgather_bucket_size", "sub_group_size",
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
}  # fmt: skip
IGNORED = {  # the optimizer is always torch's AdamW, and the script itself gathers the weights
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "optimizer.params.torch_adam",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
}  # fmt: skip


def read_settings(options: Options, data_ranks: int, hidden_size: int) -> dict[str, Any]:
    """The configuration that `deepspeed.initialize` gets.

    It has no train_batch_size, because DeepSpeed would count context ranks as replicas, and no clipping, because DeepSpeed
    would count gradients several times of which several tensor-parallel ranks have a copy: the trainer clips.

    Keys that no option decides are passed on: reports of DeepSpeed's own (steps_per_print, flops_profiler, tensorboard and
    others), communication_data_type, prescale_gradients, gradient_predivide_factor (except with stage 3, where gradients
    would be wrong), and of zero_optimization the sizes, contiguous_gradients, reduce_scatter, allgather_partitions and
    overlap_comm. The optimizer is always torch's AdamW, so torch_adam, zero_allow_untested_optimizer and
    zero_force_ds_cpu_optimizer are ignored, as is stage3_gather_16bit_weights_on_model_save.

    Args:
        options: Those of the run.
        data_ranks: The number of replicas.
        hidden_size: The width of the model, from which "auto" sizes of ZeRO 3 follow, as in transformers.

    Raises:
        OSError: The file cannot be read.
        ValueError: DeepSpeed is not installed; the file is not a JSON object; a value contradicts the options; a key is not
            supported.
    """
    path = options.deepspeed_config
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError("--engine deepspeed needs the package deepspeed: pip install deepspeed")
    given = _without_nulls(read_json(path))
    try:
        return _completed(given, options, data_ranks, hidden_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _completed(given: dict[str, Any], options: Options, data_ranks: int, hidden_size: int) -> dict[str, Any]:
    stated = dict(_flattened(given))
    ours = _of_options(options, data_ranks) | _of_bf16(options, stated)
    for key, value in stated.items():
        if key in ours:
            expected, why = ours[key]
            if value not in (AUTO, expected):
                raise ValueError(f"{key} {json.dumps(value)} contradicts {why}")
        elif not _is_known(key, value):
            raise ValueError(f"{key} is not supported by examples/pretrain.py")
    steps = stated.get("steps_per_print", AUTO)
    if steps != AUTO and not (isinstance(steps, int) and steps > 0):  # DeepSpeed would fail after the first step
        raise ValueError(f"steps_per_print {json.dumps(steps)} is not a positive integer")
    is_bf16 = _keeps_bf16_parameters(stated, options)
    zero = _zero(stated, hidden_size)
    _check_stage(zero["stage"], is_bf16, options, stated.get("gradient_predivide_factor", 1))
    return {key: value for key, value in stated.items() if key in PASSED} | {
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "gradient_accumulation_steps": options.accumulation(data_ranks),
        "gradient_clipping": 0.0,
        "bf16": {"enabled": is_bf16},
        "zero_optimization": zero,
    }


def _without_nulls(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    return {key: _without_nulls(value) for key, value in given.items() if value is not None}


def _flattened(given: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of the file, and of SECTIONS instead (section.key, value)."""
    for key, value in given.items():
        if prefix + key in SECTIONS and isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _of_options(options: Options, data_ranks: int) -> dict[str, tuple[Any, str]]:
    """{key: (the value that the options say, how they say it)}."""

    def of(name: str) -> tuple[Any, str]:
        value = getattr(options, name)
        return value, f"{flag(name)} {value}"

    steps, style = options.accumulation(data_ranks), options.lr_decay_style
    batches = f"(--micro-batch-size {options.micro_batch_size} x {data_ranks} data-parallel ranks) = {steps}"
    betas = [options.adam_beta1, options.adam_beta2]
    decays_to_0 = style == "constant" or not options.min_lr
    return {
        "train_batch_size": of("global_batch_size"),
        "train_micro_batch_size_per_gpu": of("micro_batch_size"),
        "gradient_accumulation_steps": (steps, f"--global-batch-size {options.global_batch_size} / {batches}"),
        "gradient_clipping": of("clip_grad"),
        "optimizer.type": ("AdamW", "the optimizer of this script, AdamW"),
        "optimizer.params.adam_w_mode": (True, "the optimizer of this script, AdamW"),
        "optimizer.params.lr": of("lr"),
        "optimizer.params.eps": of("adam_eps"),
        "optimizer.params.weight_decay": of("weight_decay"),
        "optimizer.params.betas": (betas, f"--adam-beta1 {betas[0]} --adam-beta2 {betas[1]}"),
        "scheduler.type": (SCHEDULERS[style], f"--lr-decay-style {style}") if decays_to_0 else (None, of("min_lr")[1]),
        "scheduler.params.warmup_min_lr": (0, "the warm-up, which is from 0"),
        "scheduler.params.warmup_max_lr": of("lr"),
        "scheduler.params.warmup_num_steps": of("lr_warmup_iters"),
        "scheduler.params.warmup_type": ("linear", "the warm-up, which is linear"),
        "scheduler.params.total_num_steps": of("lr_decay_iters" if options.lr_decay_iters else "train_iters"),
        "fp16.enabled": (False, "the options, which have no loss scale"),
    }


def _of_bf16(options: Options, stated: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """`_of_options` for --bf16, which either of two sections states; the other may be false."""
    how = options.bf16, "--bf16" if options.bf16 else "a run without --bf16"
    found: dict[str, tuple[Any, str]] = {"torch_autocast.dtype": ("bfloat16", "--bf16")}
    for section, other in (("bf16", "torch_autocast"), ("torch_autocast", "bf16")):
        if stated.get(f"{section}.enabled") is not False or not stated.get(f"{other}.enabled"):
            found[f"{section}.enabled"] = how
    return found


def _is_known(key: str, value: Any) -> bool:
    """Return True for a key that DeepSpeed gets, and for one that asks for nothing, as in files for transformers."""
    section, _, name = key.rpartition(".")
    if section == "zero_optimization":
        if name in ("offload_optimizer", "offload_param"):
            return (value.get("device", "none") if isinstance(value, dict) else value) == "none"
        if name == "round_robin_gradients":  # true: checkpoints would not find the moments (DeepSpeed 0.19.8)
            return value is False
        return name in ZERO_PASSED or key in IGNORED
    if section in ("bf16", "torch_autocast"):
        return name == "enabled"
    if key == "activation_checkpointing" and isinstance(value, dict):
        return not any(value.values())
    return key in PASSED | IGNORED or section == "fp16" or (section == "scheduler.params" and value == AUTO)


def _keeps_bf16_parameters(stated: dict[str, Any], options: Options) -> bool:
    """Return True if DeepSpeed rounds parameters to bf16; otherwise --bf16 is autocast, and parameters stay fp32."""
    bf16, autocast = stated.get("bf16.enabled"), stated.get("torch_autocast.enabled")
    if bf16 is True and autocast is True:
        raise ValueError("bf16.enabled and torch_autocast.enabled are both true: parameters are in bf16, or stay fp32")
    return options.bf16 and bf16 in (True, AUTO) and autocast is not True


def _zero(stated: dict[str, Any], hidden_size: int) -> dict[str, Any]:
    """The section zero_optimization, with the sizes that transformers puts in place of "auto"."""
    sizes = {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    section = {key.removeprefix("zero_optimization."): value for key, value in stated.items()}
    given = {name: value for name, value in section.items() if name in ZERO_PASSED}  # in one order on all ranks
    given |= {name: size for name, size in sizes.items() if given.get(name) == AUTO}
    # Otherwise ZeRO 3 replaces torch's linear by one that cannot have empty outputs, such as a part of a small vocabulary.
    return {"stage": 0, **given, "memory_efficient_linear": False}


def _check_stage(stage: Any, is_bf16: bool, options: Options, predivide_factor: Any) -> None:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage {json.dumps(stage)} is not 0, 1, 2 or 3")
    if is_bf16 and stage == 0:
        raise ValueError(
            "bf16.enabled needs zero_optimization.stage 1, 2 or 3; without it, --bf16 computes in bf16, and parameters "
            "stay fp32"
        )
    if options.gradient_mode != "dense" and stage > 1:
        raise ValueError(
            f"--gradient-mode {options.gradient_mode} needs zero_optimization.stage 0 or 1: stage {stage} divides gradients "
            "over the ranks"
        )
    if stage == 3 and predivide_factor != 1:  # DeepSpeed 0.19.8 then averages wrongly without reduce_scatter
        raise ValueError(f"gradient_predivide_factor {predivide_factor} does not work with zero_optimization.stage 3")
