"""The configuration of a DeepSpeed engine: --deepspeed-config, compared with the options and completed from them.

A value that is "auto" comes from the options, as in transformers; any other must agree with them. Keys that would have
another effect than in `examples/pretrain.py`, and unknown ones, are refused by name. Keys of other stages of ZeRO than the
file's are passed on, without effect, so that a file changes its stage in one place. null is as if absent. Loads no torch.
"""

import importlib.util
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sparsefusion.foundation.command_line import shortened

from .options import Options, flag

AUTO = "auto"


class Rule(NamedTuple):
    """What a value must be, whether it is that, and as what DeepSpeed gets it."""

    what: str
    is_valid: Callable[[Any], bool]
    passed: Callable[[Any], Any] = lambda value: value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(least: int) -> Rule:
    """A number such as 5e8, which JSON reads as a float and DeepSpeed gets as an int."""
    what = f"a whole number from {least} to 1e15"
    return Rule(what, lambda x: _is_number(x) and least <= x <= 1e15 and x % 1 == 0, int)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


SWITCH = Rule("true or false", lambda value: isinstance(value, bool))
OBJECT = Rule("an object", lambda value: isinstance(value, dict))
FACTOR = Rule("a number from 1e-6 to 1e6", lambda value: _is_number(value) and 1e-6 <= value <= 1e6)
DATA_TYPE = Rule("fp32, fp16 or bf16", lambda value: str(value).lower() in ("fp32", "fp16", "bf16"))
PASSED = {  # keys that DeepSpeed reads as they are
    "steps_per_print": _count(1), "gradient_predivide_factor": FACTOR, "communication_data_type": DATA_TYPE,
    **dict.fromkeys(("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc",
                     "prescale_gradients"), SWITCH),
    **dict.fromkeys(("flops_profiler", "comms_logger", "timers", "tensorboard", "wandb", "csv_monitor", "comet"), OBJECT),
}  # fmt: skip
SECTIONS = {  # what such objects hold that DeepSpeed does not check itself, or refuses without the section's name
    "flops_profiler": {
        "enabled": SWITCH, "detailed": SWITCH,
        "profile_step": _count(0), "top_modules": _count(1), "module_depth": _count(-1),
        "recompute_fwd_factor": Rule("a number from 0 to 1e6", lambda value: _is_number(value) and 0 <= value <= 1e6),
        "output_file": Rule("the name of a file", lambda value: isinstance(value, str)),
    },
    "comms_logger": {
        **dict.fromkeys(("enabled", "verbose", "prof_all", "debug"), SWITCH), "prof_ops": Rule("a list of texts", _are_texts)
    },
    "timers": {"throughput": OBJECT},
    "timers.throughput": {"enabled": SWITCH, "synchronized": SWITCH},
}  # fmt: skip
MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}  # the packages that sections need
ENABLED = ("true", "1", "1.0", "on", "t", "y", "yes")  # what DeepSpeed's pydantic reads as true, in lower case
SCHEDULERS = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}  # by --lr-decay-style
# Without effect, as `torch_adam` of the optimizer is: the optimizer is always torch's AdamW.
UNUSED = {"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"}
COMPARED = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "optimizer",
    "scheduler", "bf16", "fp16", "torch_autocast", "zero_optimization",
}  # fmt: skip
ZERO_PASSED = {
    "stage": Rule("0, 1, 2 or 3", lambda value: _is_number(value) and value in range(4)),
    **dict.fromkeys(("contiguous_gradients", "reduce_scatter", "allgather_partitions", "overlap_comm",
                     "ignore_unused_parameters", "log_trace_cache_warnings"), SWITCH),
    # With it, `_hp_mapping` of a parameter is not where its optimizer state is (DeepSpeed 0.19.8, ZeRO 1 and 2).
    "round_robin_gradients": Rule("false, the only value that is supported", lambda value: value is False),
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size", "sub_group_size"), _count(1)),
    **dict.fromkeys(("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
                     "stage3_max_reuse_distance"), _count(0)),
}  # fmt: skip
# Whether DeepSpeed's own save_16bit_model gathers weights; this script gathers them itself.
GATHERS = ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
FP16 = {"enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
        "consecutive_hysteresis", "min_loss_scale"}  # fmt: skip


def read_settings(options: Options, data_ranks: int, hidden_size: int) -> dict[str, Any]:
    """The configuration that `deepspeed.initialize` gets, for `data_ranks` replicas of a model of this width.

    It has no train_batch_size, because DeepSpeed would count context ranks as replicas, and no clipping, because DeepSpeed
    would count gradients several times of which several tensor-parallel ranks have a copy: the trainer clips.
    ValueError: DeepSpeed, or the package of a monitor, is not installed; the file is missing, or not a JSON object; a value
    contradicts the options; a key is not supported, or given twice.
    """
    path = options.deepspeed_config
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError("--engine deepspeed needs the package deepspeed: pip install deepspeed")
    given = _read_json(path)
    try:
        return _checked(given, options, data_ranks, hidden_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def within_depth(settings: dict[str, Any], modules: Iterable[str]) -> dict[str, Any]:
    """The settings with a `module_depth` of the profiler that is at most the number of levels of these named modules.

    DeepSpeed prints as many levels as it says, and ends with a KeyError if there are fewer.
    """
    profiler = settings.get("flops_profiler", {})
    levels = 1 + max(name.count(".") + 1 if name else 0 for name in modules)
    depth = min(profiler.get("module_depth", -1), levels)
    return settings | {"flops_profiler": profiler | {"module_depth": depth}}


def _read_json(path: str) -> dict[str, Any]:
    repeated: list[str] = []

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """An object without its nulls; `repeated` gets the keys that it has several times."""
        repeated.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return {key: value for key, value in pairs if value is not None}

    try:
        given = json.loads(Path(path).read_text(encoding="utf-8-sig"), object_pairs_hook=read_object)
    except OSError as error:
        raise ValueError(f"cannot read --deepspeed-config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--deepspeed-config {path} is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict):
        raise ValueError(f"--deepspeed-config {path} is not a JSON object")
    if repeated:
        raise ValueError(f"{path}: an object has the key {shortened(repeated[0])} several times")
    return given


def _checked(given: dict[str, Any], options: Options, data_ranks: int, hidden_size: int) -> dict[str, Any]:
    given = {key: value for key, value in given.items() if not _changes_nothing(key, value)}
    _refuse_unknown(given, PASSED.keys() | UNUSED | COMPARED, "")
    settings = _passed({key: value for key, value in given.items() if key in PASSED}, PASSED, "")
    _check_monitors(settings)
    for key, value, expected, why in _shared_values(given, options, data_ranks):
        if value != AUTO and not _equal(value, expected):
            raise ValueError(f"{key} {shortened(json.dumps(value))} contradicts {why}")
    zero = _zero(_section(given, "zero_optimization"), hidden_size)
    is_bf16 = _keeps_bf16_parameters(given, options)
    _check_stage(zero["stage"], is_bf16, options)
    _check_averaging(zero, settings)
    return settings | {
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "gradient_accumulation_steps": options.accumulation(data_ranks),
        "gradient_clipping": 0.0,
        "bf16": {"enabled": is_bf16},
        "zero_optimization": zero,
    }


def _shared_values(given: dict[str, Any], options: Options, data_ranks: int) -> Iterator[tuple[str, Any, Any, str]]:
    """(key, value in the file, the value that the options say, how they say it) of what stands in both."""
    steps = options.accumulation(data_ranks)
    batches = (
        f"--global-batch-size {options.global_batch_size} / (--micro-batch-size {options.micro_batch_size} x {data_ranks} "
        f"data-parallel ranks) = {steps}"
    )

    def of_option(key: str, value: Any, name: str) -> tuple[str, Any, Any, str]:
        """The entry of a value that the option `name` says."""
        expected = getattr(options, name)
        return key, value, expected, f"{flag(name)} {expected}"

    yield of_option("train_batch_size", given.get("train_batch_size", AUTO), "global_batch_size")
    micro = "train_micro_batch_size_per_gpu"
    yield of_option(micro, given.get(micro, AUTO), "micro_batch_size")
    yield "gradient_accumulation_steps", given.get("gradient_accumulation_steps", AUTO), steps, batches
    yield of_option("gradient_clipping", given.get("gradient_clipping", AUTO), "clip_grad")
    optimizer = _section(given, "optimizer")
    _refuse_unknown(optimizer, {"type", "params"}, "optimizer.")
    yield "optimizer.type", optimizer.get("type", AUTO), "AdamW", "the optimizer of this script, AdamW"
    params = _section(optimizer, "params", "optimizer.")
    _refuse_unknown(params, {"lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode"}, "optimizer.params.")
    for key, name in {"lr": "lr", "eps": "adam_eps", "weight_decay": "weight_decay"}.items():
        yield of_option(f"optimizer.params.{key}", params.get(key, AUTO), name)
    betas = [options.adam_beta1, options.adam_beta2]
    why = f"--adam-beta1 {betas[0]} --adam-beta2 {betas[1]}"
    yield "optimizer.params.betas", params.get("betas", AUTO), betas, why
    yield "optimizer.params.adam_w_mode", params.get("adam_w_mode", True), True, "the optimizer of this script, AdamW"
    yield from _schedule(_section(given, "scheduler"), options)
    yield from _precisions(given, options)


def _schedule(given: dict[str, Any], options: Options) -> Iterator[tuple[str, Any, Any, str]]:
    """As `_shared_values`, of the section scheduler."""
    _refuse_unknown(given, {"type", "params"}, "scheduler.")
    style = options.lr_decay_style
    yield "scheduler.type", given.get("type", AUTO), SCHEDULERS[style], f"--lr-decay-style {style}"
    if style != "constant" and options.min_lr:
        yield "scheduler.type", given.get("type", AUTO), AUTO, f"--min-lr {options.min_lr}, below which it decays"
    name = "lr_decay_iters" if options.lr_decay_iters else "train_iters"
    steps = getattr(options, name)
    known = {
        "warmup_min_lr": (0, "the warm-up, which is from 0"),
        "warmup_max_lr": (options.lr, f"--lr {options.lr}"),
        "warmup_num_steps": (options.lr_warmup_iters, f"--lr-warmup-iters {options.lr_warmup_iters}"),
        "warmup_type": ("linear", "the warm-up, which is linear"),
        "total_num_steps": (steps, f"{flag(name)} {steps}"),
    }
    params = _section(given, "params", "scheduler.")
    _refuse_unknown({key: value for key, value in params.items() if value != AUTO}, known, "scheduler.params.")
    for key, (expected, why) in known.items():
        yield f"scheduler.params.{key}", params.get(key, AUTO), expected, why


def _precisions(given: dict[str, Any], options: Options) -> Iterator[tuple[str, Any, Any, str]]:
    """As `_shared_values`, of the sections about 16-bit numbers."""
    why = "--bf16" if options.bf16 else "the options, which have no --bf16"
    for name, other, keys in (
        ("bf16", "torch_autocast", {"enabled"}),
        ("torch_autocast", "bf16", {"enabled", "dtype"}),
    ):
        section = _section(given, name)
        _refuse_unknown(section, keys, f"{name}.")
        if section.get("enabled") is not False or not _section(given, other).get("enabled"):
            yield f"{name}.enabled", section.get("enabled", AUTO), options.bf16, why
    dtype = str(_section(given, "torch_autocast").get("dtype", AUTO)).removeprefix("torch.")
    yield "torch_autocast.dtype", dtype, "bfloat16", "--bf16"
    _refuse_unknown(_section(given, "fp16"), FP16, "fp16.")
    yield "fp16.enabled", _section(given, "fp16").get("enabled", AUTO), False, "the options, which have no loss scale"


def _keeps_bf16_parameters(given: dict[str, Any], options: Options) -> bool:
    """Whether DeepSpeed rounds parameters to bf16; otherwise --bf16 is autocast, and parameters stay fp32.

    ValueError if the file asks for both.
    """
    bf16, autocast = (_section(given, name).get("enabled", False) for name in ("bf16", "torch_autocast"))
    if bf16 is True and autocast is True:
        raise ValueError("bf16.enabled and torch_autocast.enabled are both true: parameters are in bf16, or stay fp32")
    return options.bf16 and bf16 in (True, AUTO) and autocast is not True


def _zero(given: dict[str, Any], hidden_size: int) -> dict[str, Any]:
    """The section zero_optimization, with the sizes that transformers puts in place of "auto"."""
    given = {key: value for key, value in given.items() if key not in GATHERS and not _is_no_offload(key, value)}
    _refuse_unknown(given, ZERO_PASSED.keys(), "zero_optimization.")
    sizes = {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    known = {key: sizes[key] if key in sizes and value == AUTO else value for key, value in given.items()}
    # Otherwise ZeRO 3 replaces torch's linear by one that cannot have empty outputs, such as a part of a small vocabulary.
    return {"stage": 0, **_passed(known, ZERO_PASSED, "zero_optimization."), "memory_efficient_linear": False}


def _passed(given: dict[str, Any], rules: dict[str, Rule], where: str) -> dict[str, Any]:
    """The values of a section as DeepSpeed gets them; ValueError for one that breaks its rule."""
    passed = {}
    for key, value in given.items():
        name, rule = where + key, rules[key]
        if value == AUTO:
            raise ValueError(f'{name} is "auto", but no option says what it is')
        if not rule.is_valid(value):
            raise ValueError(f"{name} {shortened(json.dumps(value))} is not {rule.what}")
        passed[key] = rule.passed(value)
        if name in SECTIONS:
            _refuse_unknown(value, SECTIONS[name], f"{name}.")
            passed[key] = _passed(value, SECTIONS[name], f"{name}.")
    return passed


def _check_monitors(settings: dict[str, Any]) -> None:
    """ValueError if a monitor is enabled whose package is not installed."""
    for section, package in MONITORS.items():
        enabled = str(settings.get(section, {}).get("enabled")).lower()
        if enabled in ENABLED and importlib.util.find_spec(package) is None:
            raise ValueError(f"{section}.enabled needs the package {package}: pip install {package}")


def _changes_nothing(key: str, value: Any) -> bool:
    """Whether this is an entry, as in files for transformers' Trainer, that asks for nothing."""
    return key == "activation_checkpointing" and isinstance(value, dict) and not any(value.values())


def _is_no_offload(key: str, value: Any) -> bool:
    """Whether this is an entry of zero_optimization that says that nothing is offloaded."""
    device = value.get("device", "none") if isinstance(value, dict) else value
    return key in ("offload_optimizer", "offload_param") and device == "none"


def _check_stage(stage: int, is_bf16: bool, options: Options) -> None:
    """ValueError if an option does not work with a stage of ZeRO."""
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


def _check_averaging(zero: dict[str, Any], settings: dict[str, Any]) -> None:
    """ValueError for values with which DeepSpeed 0.19.8 ends in an AssertionError, or averages gradients wrongly.

    The latter is ZeRO 3 with gradient_predivide_factor and without reduce_scatter: it does not multiply by the factor again
    if that is the number of replicas.
    """
    stage, scatters = zero["stage"], zero.get("reduce_scatter", True)
    cure = ": set zero_optimization.reduce_scatter to false (it is true by default)" if stage > 1 and scatters else ""
    if settings.get("prescale_gradients") and cure:
        raise ValueError(f"prescale_gradients true does not work with zero_optimization.stage {stage}{cure}")
    if (factor := settings.get("gradient_predivide_factor", 1)) != 1 and (cure or stage == 3):
        raise ValueError(
            f"gradient_predivide_factor {factor} does not work with zero_optimization.stage {stage}{cure * (stage == 2)}"
        )
    if stage in (1, 2) and (size := zero.get("allgather_bucket_size", 0)) % 2:
        raise ValueError(f"zero_optimization.allgather_bucket_size {size} must be even with stage {stage}")


def _section(given: dict[str, Any], name: str, where: str = "") -> dict[str, Any]:
    """A section of the file; empty if it is missing."""
    section = given.get(name, {})
    if not isinstance(section, dict):
        raise ValueError(f"{where}{name} {shortened(json.dumps(section))} is not an object")
    return section


def _refuse_unknown(given: dict[str, Any], known: Collection[str], where: str) -> None:
    """ValueError if a section has a key that is not supported."""
    for key in given:
        if key not in known:
            raise ValueError(f"{where}{shortened(key)} is not supported by examples/pretrain.py")


def _equal(value: Any, expected: Any) -> bool:
    """Whether a JSON value is this one: numbers to rounding, and true is not 1."""
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(expected, bool | str):
        return type(value) is type(expected) and value == expected
    return _is_number(value) and abs(value) <= sys.float_info.max and math.isclose(value, expected, rel_tol=1e-9)
