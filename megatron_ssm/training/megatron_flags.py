"""Flags of Megatron's and DeepSpeed's scripts that are no options here: what replaces each, or why it is not there.

The table in docs/reference/training-flags.md is this file's `table`.
"""

from typing import Any

SAME = {"--save": "out", "--tensorboard-dir": "tensorboard", "--wandb-project": "wandb"}  # another name of an option

# Flags that ask for what happens anyway, with how many values each has.
ANYWAY = {
    "--use-mcore-models": 0, "--group-query-attention": 0, "--disable-bias-linear": 0, "--is-hybrid-model": 0,
    "--log-throughput": 0, "--overlap-grad-reduce": 0, "--accumulate-allreduce-grads-in-fp32": 0,
    "--exit-signal-handler": 0, "--deepspeed": 0, "--manual-gc": 0, "--tokenizer-type": 1, "--num-workers": 1,
    "--transformer-impl": 1, "--distributed-backend": 1, "--max-position-embeddings": 1,
}  # fmt: skip

# Flags whose value decides an option, with the value's type.
DERIVED = {
    "--train-samples": (int, "--train-iters, times --global-batch-size"),
    "--lr-warmup-samples": (int, "--lr-warmup-iters, times --global-batch-size"),
    "--lr-decay-samples": (int, "--lr-decay-iters, times --global-batch-size"),
    "--lr-warmup-fraction": (float, "--lr-warmup-iters, as a share of --lr-decay-iters"),
    "--recompute-granularity": (str, "full: --recompute-activations"),
    "--load": (str, "equal to --out: --resume auto"),
}

NOT_THERE = {
    "--pipeline-model-parallel-size": "there are no pipelines: --tensor-model-parallel-size, --context-parallel-size",
    "--hybrid-attention-ratio": "name each block with --hybrid-override-pattern",
    "--hybrid-mlp-ratio": "name each block with --hybrid-override-pattern",
    "--init-method-std": "the family of the model decides the initialization",
    "--hidden-dropout": "there is no dropout",
    "--attention-dropout": "there is no dropout",
    "--normalization": "the family of the model decides it: RMSNorm",
    "--position-embedding-type": "the family of the model decides it",
    "--swiglu": "the family of the model decides the activation",
    "--spec": "the family of the model decides its layers: --model-type or --model-config",
    "--mamba-num-heads": "it is 2 x --hidden-size / --mamba-head-dim",
    "--vocab-size": "the tokenizer decides it, or --model-config",
    "--make-vocab-size-divisible-by": "the tokenizer decides --vocab-size, or --model-config",
    "--wandb-entity": "set WANDB_ENTITY",
    "--wandb-exp-name": "set WANDB_NAME",
    "--wandb-save-dir": "set WANDB_DIR",
    "--fp16": "use --bf16; with --engine deepspeed, say it in --deepspeed-config",
    "--loss-scale": "bf16 needs none; with --engine deepspeed, say it in --deepspeed-config",
    "--initial-loss-scale": "bf16 needs none; with --engine deepspeed, say it in --deepspeed-config",
    "--overlap-param-gather": "parameters are not gathered while others are computed",
    "--distributed-timeout-minutes": "--lost-rank-timeout says after how many seconds a lost rank ends the others",
    "--recompute-method": "--recompute-activations computes every block again",
    "--recompute-num-layers": "--recompute-activations computes every block again",
    "--ckpt-format": "checkpoints are torch's distributed ones; `megatron-ssm convert` reads others",
    "--ckpt-fully-parallel-save": "each rank writes its own part",
    "--no-load-optim": "start from the model alone with --init-from",
    "--no-load-rng": "the seed and the step decide all random numbers",
    "--finetune": "start from a model with --init-from",
    "--exit-duration-in-mins": "use --exit-interval, or SIGTERM, on which a checkpoint is written",
    "--mock-data": "prepare some text with `megatron-ssm prepare`",
    "--rampup-batch-size": "the global batch is constant",
    "--weight-decay-incr-style": "the weight decay is constant",
    "--cp-comm-type": "use --context-schedule",
    "--calculate-per-token-loss": "the loss is the mean over all tokens of the global batch",
    "--reset-position-ids": "documents of a sequence are not separated",
    "--reset-attention-mask": "documents of a sequence are not separated",
    "--eod-mask-loss": "the end of a document is learned too",
    "--deepspeed_config": "use --deepspeed-config",
    "--zero-stage": "say it in --deepspeed-config",
    "--optimizer": "it is AdamW",
    "--sgd-momentum": "the optimizer is AdamW",
}


def add_arguments(parser: Any, **hidden: Any) -> None:
    """Add ANYWAY and DERIVED to an argparse parser; hidden: arguments of each."""
    for name, values in ANYWAY.items():
        action: dict[str, Any] = dict(nargs=values) if values else dict(action="store_true")
        parser.add_argument(name, **action, **hidden)
    for name, (kind, _) in DERIVED.items():
        parser.add_argument(name, type=kind, **hidden)


def translated(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The options that parsed values stand for; ValueError for one that has no counterpart.

    Args:
        values: Values of options, of ANYWAY and of DERIVED, under their names in Python.
        defaults: The options' defaults.
    """
    names = {flag: flag[2:].replace("-", "_") for flag in (*ANYWAY, *DERIVED)}
    given = {flag: values[name] for flag, name in names.items() if name in values}
    options = {name: value for name, value in values.items() if name not in names.values()}
    batch = options.get("global_batch_size", defaults["global_batch_size"])
    for flag, value in given.items():
        if flag.endswith("-samples"):
            if value < 1 or value % batch:
                raise ValueError(f"{flag} {value} is not a positive multiple of the global batch, {batch}")
            options[names[flag].replace("samples", "iters")] = value // batch
    if (fraction := given.get("--lr-warmup-fraction")) is not None:
        if not 0 <= fraction < 1:
            raise ValueError(f"--lr-warmup-fraction {fraction} must be at least 0 and below 1")
        of = options.get("lr_decay_iters") or options.get("train_iters", defaults["train_iters"])
        options["lr_warmup_iters"] = int(fraction * of)
    if (granularity := given.get("--recompute-granularity")) is not None:
        if granularity != "full":
            raise ValueError(f"--recompute-granularity {granularity} is not there: full, or --recompute-activations")
        options["recompute_activations"] = True
    if (load := given.get("--load")) is not None:
        if load != options.get("out"):
            raise ValueError(f"--load {load} is not --out: start from a model with --init-from")
        options.setdefault("resume", "auto")
    return options


def table() -> str:
    """All of them as a Markdown table."""
    rows = [
        *((flag, f"`--{name.replace('_', '-')}`") for flag, name in SAME.items()),
        *((flag, "no effect: it is so anyway, or another option decides it") for flag in ANYWAY),
        *((flag, meaning) for flag, (_, meaning) in DERIVED.items()),
        *((flag, f"refused: {reason}") for flag, reason in NOT_THERE.items()),
    ]
    return "\n".join(["| flag | here |", "| --- | --- |", *(f"| `{flag}` | {text} |" for flag, text in sorted(rows))])
