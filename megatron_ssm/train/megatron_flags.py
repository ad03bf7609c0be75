"""Flags of Megatron's and DeepSpeed's scripts that are no options here: what replaces each, or why it is not there.

The table in docs/reference/training-flags.md is this file's `table`.
"""

from pathlib import Path
from typing import Any

SAME = {"--save": "out", "--tensorboard-dir": "tensorboard", "--wandb-project": "wandb"}  # another name of an option

# Flags without effect: (how many values each has, what decides it).
ANYWAY = {
    "--use-mcore-models": (0, "all layers are this package's"),
    "--transformer-impl": (1, "all layers are this package's"),
    "--group-query-attention": (0, "--num-query-groups decides it"),
    "--disable-bias-linear": (0, "the family of the model decides it"),
    "--squared-relu": (0, "the family of the model decides the activation; Nemotron-H has this one"),
    "--is-hybrid-model": (0, "--hybrid-override-pattern or --model-type decides it"),
    "--max-position-embeddings": (1, "--seq-length decides it"),
    "--tokenizer-type": (
        1, "--tokenizer-model is 'byte' or a tokenizer.json; other files, such as SentencePiece's, are not read"
    ),
    "--no-create-attention-mask-in-dataloader": (0, "no mask is created"),
    "--num-workers": (1, "no worker processes read data"),
    "--log-throughput": (0, "it is always logged"),
    "--overlap-grad-reduce": (0, "the engine decides it"),
    "--overlap-param-gather": (0, "the engine decides it"),
    "--accumulate-allreduce-grads-in-fp32": (0, "gradients have the dtype of the parameters, fp32"),
    "--distributed-backend": (1, "--device decides it: NCCL for cuda, gloo for cpu"),
    "--exit-signal-handler": (0, "SIGTERM always saves a checkpoint"),
    "--attention-backend": (1, "--context-schedule and --device decide it"),
    "--attention-softmax-in-fp32": (0, "it is always so"),
    "--cross-entropy-loss-fusion": (0, "the loss is computed without the whole vocabulary's logits"),
    "--cross-entropy-fusion-impl": (1, "the loss is computed without the whole vocabulary's logits"),
    "--no-gradient-accumulation-fusion": (0, "PyTorch accumulates gradients"),
    "--no-persist-layer-norm": (0, "norms are this package's"),
    "--manual-gc": (0, "Python decides when to collect garbage"),
    "--deepspeed": (0, "--engine decides it"),
}  # fmt: skip

# Flags whose value decides an option, with the value's type.
DERIVED = {
    "--lr-warmup-samples": (int, "--lr-warmup-iters, times --global-batch-size"),
    "--lr-decay-samples": (int, "--lr-decay-iters, times --global-batch-size"),
    "--lr-warmup-fraction": (float, "--lr-warmup-iters, as a share of --lr-decay-iters"),
    "--recompute-granularity": (str, "full: --recompute-activations; selective is refused"),
    "--hybrid-attention-ratio": (float, "--hybrid-override-pattern, as Megatron distributes the blocks"),
    "--hybrid-mlp-ratio": (float, "--hybrid-override-pattern, as Megatron distributes the blocks"),
    "--load": (str, "the directory of --save: --resume auto; another one is refused"),
}

# Flags with the only value that is there, and the reason.
ONLY = {
    "--pipeline-model-parallel-size": (
        "1", "there are no pipelines: --tensor-model-parallel-size, --context-parallel-size"
    ),
    "--hidden-dropout": ("0", "there is no dropout"),
    "--attention-dropout": ("0", "there is no dropout"),
    "--normalization": ("RMSNorm", "the family of the model decides it"),
    "--position-embedding-type": ("none", "the family of the model decides it"),
    "--optimizer": ("adam", "it is AdamW"),
    "--ckpt-format": ("torch_dist", "checkpoints are torch's distributed ones"),
    "--spec": (
        "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
        "the family of the model decides its layers: --model-type or --model-config",
    ),
}  # fmt: skip

NOT_THERE = {
    "--swiglu": "the family of the model decides the activation",
    "--mamba-num-heads": "it is 2 x --hidden-size / --mamba-head-dim",
    "--vocab-size": "the tokenizer decides it, or --model-config",
    "--vocab-file": "--tokenizer-model names a tokenizer.json",
    "--merge-file": "--tokenizer-model names a tokenizer.json",
    "--wandb-entity": "set WANDB_ENTITY",
    "--wandb-save-dir": "set WANDB_DIR",
    "--fp16": "use --bf16",
    "--loss-scale": "bf16 needs none",
    "--initial-loss-scale": "bf16 needs none",
    "--recompute-method": "--recompute-activations computes every block again",
    "--recompute-num-layers": "--recompute-activations computes every block again",
    "--ckpt-fully-parallel-save": "each rank writes its own part",
    "--no-load-optim": "start from the model alone with --init-from",
    "--no-load-rng": "the seed and the step decide all random numbers",
    "--finetune": "start from a model with --init-from",
    "--cp-comm-type": "use --context-schedule",
    "--calculate-per-token-loss": "the loss is the mean over all tokens of the global batch",
    "--reset-position-ids": "documents of a sequence are not separated",
    "--reset-attention-mask": "documents of a sequence are not separated",
    "--eod-mask-loss": "the end of a document is learned too",
    "--deepspeed_config": "use --engine deepspeed --deepspeed-config",
    "--zero-stage": "say it in --deepspeed-config",
    "--sgd-momentum": "the optimizer is AdamW",
}


def add_arguments(parser: Any, **hidden: Any) -> None:
    """Add ANYWAY, ONLY and DERIVED to an argparse parser; hidden: arguments of each."""
    for name, (values, _) in ANYWAY.items():
        action: dict[str, Any] = dict(nargs=values) if values else dict(action="store_true")
        parser.add_argument(name, **action, **hidden)
    for name, (only, _) in ONLY.items():
        parser.add_argument(name, nargs=len(only.split()), **hidden)
    for name, (kind, _) in DERIVED.items():
        parser.add_argument(name, type=kind, **hidden)


def translated(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The options that parsed values stand for; ValueError for one that has no counterpart.

    Args:
        values: Values of options, of ANYWAY, ONLY and DERIVED, under their names in Python.
        defaults: The options' defaults.
    """
    names = {flag: flag[2:].replace("-", "_") for flag in (*ANYWAY, *ONLY, *DERIVED)}
    given = {flag: values[name] for flag, name in names.items() if name in values}
    options = {name: value for name, value in values.items() if name not in names.values()}
    for flag, (only, reason) in ONLY.items():
        if flag in given and not _is_same(" ".join(given[flag]), only):
            raise ValueError(f"{flag} {' '.join(given[flag])} is not there: {reason}")
    batch = options.get("global_batch_size", defaults["global_batch_size"])
    for flag, value in given.items():
        if flag.endswith("-samples"):
            if value < 0:
                raise ValueError(f"{flag} {value} must be at least 0")
            options[names[flag].replace("samples", "iters")] = value // batch
    if (fraction := given.get("--lr-warmup-fraction")) is not None:
        if not 0 <= fraction < 1:
            raise ValueError(f"--lr-warmup-fraction {fraction} must be at least 0 and below 1")
        samples = options.get("train_samples", 0)
        of = options.get("lr_decay_iters") or samples // batch or options.get("train_iters", defaults["train_iters"])
        options["lr_warmup_iters"] = int(fraction * of)
    ratios = [given.get(f"--hybrid-{kind}-ratio", 0.0) for kind in ("attention", "mlp")]
    if any(ratios) and not options.get("hybrid_override_pattern"):
        if min(ratios) < 0 or sum(ratios) > 1:
            raise ValueError(
                "--hybrid-attention-ratio and --hybrid-mlp-ratio must be at least 0, and together at most 1"
            )
        options["hybrid_override_pattern"] = pattern(options.get("num_layers", defaults["num_layers"]), *ratios)
    if (granularity := given.get("--recompute-granularity")) is not None:
        if granularity != "full":
            raise ValueError(f"--recompute-granularity {granularity} is not there: full, or --recompute-activations")
        options["recompute_activations"] = True
    if (load := given.get("--load")) is not None:
        if is_megatrons(Path(load)):
            raise ValueError(
                f"--load {load} is a torch_dist checkpoint of Megatron: load it into Megatron's model, write that with "
                "megatron_ssm.integrations.megatron_weights.save_hugging_face(model, DIR), and start with --init-from DIR"
            )
        if load != options.get("out"):
            raise ValueError(f"--load {load} is not --out: start from a model with --init-from")
        options.setdefault("resume", "auto")
    return options


def is_megatrons(folder: Path) -> bool:
    """Return True for a checkpoint that Megatron wrote in its format torch_dist, or for the folder of several."""
    folders = [folder, *folder.glob("iter_*")]
    return any((each / "metadata.json").is_file() and (each / ".metadata").is_file() for each in folders)


def _is_same(value: str, only: str) -> bool:
    try:
        return value == only or float(value) == float(only)
    except ValueError:
        return False


def pattern(layers: int, attention_ratio: float, mlp_ratio: float) -> str:
    """The letters of --hybrid-override-pattern for these shares of attention and of MLPs, as Megatron distributes them.

    Attention divides the other blocks into equal sections. MLPs are spread evenly among these, each after its Mamba blocks.
    """
    attention, mlps = round(layers * attention_ratio), round(layers * mlp_ratio)
    others = layers - attention
    kinds = _spread(["M"] * layers, "*", others / (attention + 1))
    return "".join(_spread(kinds, "-", (others - mlps) / mlps) if mlps else kinds)


def _spread(kinds: list[str], letter: str, section: float) -> list[str]:
    """Replace every M that comes after `section` others, rounded, by a letter."""
    left, result = section, []
    for kind in kinds:
        is_next = kind == "M" and left < 0.5
        result.append(letter if is_next else kind)
        if kind == "M":
            left += section if is_next else -1
    return result


def answers() -> dict[str, str]:
    """{flag: what it stands for here, or why it is not there}, in Markdown."""
    rows = [
        *((flag, f"`--{name.replace('_', '-')}`") for flag, name in SAME.items()),
        *((flag, f"no effect: {reason}") for flag, (_, reason) in ANYWAY.items()),
        *(
            (flag, f"`{only}`, which is so anyway; others are refused: {reason}")
            for flag, (only, reason) in ONLY.items()
        ),
        *((flag, meaning) for flag, (_, meaning) in DERIVED.items()),
        *((flag, f"refused: {reason}") for flag, reason in NOT_THERE.items()),
    ]
    return dict(sorted(rows))


def table() -> str:
    """All of them as a Markdown table."""
    return "\n".join(
        ["| flag | here |", "| --- | --- |", *(f"| `{flag}` | {text} |" for flag, text in answers().items())]
    )
