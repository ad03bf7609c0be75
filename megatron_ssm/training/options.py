"""The options of a training run: one dataclass, from which the command line and the YAML file are read. No torch."""

import argparse
import contextlib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path

from megatron_ssm.configs.hf_fields import FAMILIES
from sparsefusion import FORMATS, MODES, SPARSIFIERS
from sparsefusion.foundation.command_line import Parser, did_you_mean


def _option(default, help, **more):
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class Options:
    """What `examples/pretrain.py` takes; names are Megatron's where Megatron has the option."""

    data: tuple[str, ...] = _option((), "text files or folders; a document is a file", required=True)
    out: str = _option("", "receives the Hugging Face directory, and checkpoints on the way", required=True)
    log: str = _option("", "JSON lines, one per logged step")
    resume: bool = _option(False, "continue from the newest checkpoint in --out")
    valid_data_path: tuple[str, ...] = _option((), "held-out text (default: a share of the documents)")
    held_out: float = _option(0.05, "share of the documents' bytes that is held out without --valid-data-path")
    document_separator: str = _option("", "a line that separates documents within a file")
    tokenizer_model: str = _option("", "'byte', a tokenizer.json, or its folder (default: --init-from, else 'byte')")
    init_from: str = _option("", "a Hugging Face directory to start from, instead of a new model")

    model_type: str = _option("mamba2", "family of a new model", choices=FAMILIES)
    num_layers: int = _option(2, "blocks")
    hidden_size: int = _option(128, "width of the residual stream; the blocks are twice as wide inside")
    mamba_state_dim: int = _option(64, "state per channel")
    mamba_head_dim: int = _option(32, "channels per head (mamba2, zamba, zamba2)")
    mamba_num_groups: int = _option(1, "groups of heads that share B and C (mamba2, zamba2)")
    hybrid_interval: int = _option(1, "every so many blocks use the shared attention block (zamba, zamba2)")
    shared_blocks: int = _option(1, "attention blocks that these take in turn (zamba2)")
    adapter_rank: int = _option(8, "of what each use adds to its shared block (zamba2)")
    num_attention_heads: int = _option(4, "of the shared block, which is 2 x --hidden-size wide")
    num_query_groups: int = _option(0, "key/value heads of the shared block (0: as many as attention heads)")
    ffn_hidden_size: int = _option(0, "of the shared block's MLP (0: 4 x --hidden-size)")
    untie_embeddings_and_output_weights: bool = _option(False, "a language-model head of its own")

    tensor_model_parallel_size: int = _option(1, "ranks that share one replica")
    context_parallel_size: int = _option(1, "ranks that share one sequence (1: not implemented beyond)")
    micro_batch_size: int = _option(8, "sequences a replica works on at once")
    global_batch_size: int = _option(16, "sequences per step, over all replicas")
    seq_length: int = _option(256, "tokens per sequence")
    train_iters: int = _option(1000, "steps")
    lr: float = _option(3e-3, "largest learning rate")
    min_lr: float = _option(0.0, "learning rate at the end")
    lr_warmup_iters: int = _option(0, "steps of linear warm-up")
    lr_decay_iters: int = _option(0, "steps over which lr decays (0: --train-iters)")
    lr_decay_style: str = _option("cosine", "after the warm-up", choices=("cosine", "linear", "constant"))
    weight_decay: float = _option(0.1, "of matrices; never of A_log, D, dt biases, norms")
    adam_beta1: float = _option(0.9, "AdamW")
    adam_beta2: float = _option(0.95, "AdamW")
    adam_eps: float = _option(1e-8, "AdamW")
    clip_grad: float = _option(1.0, "largest gradient norm over all ranks (0: no clipping)")
    bf16: bool = _option(False, "bf16 autocast of the matrix products; parameters stay fp32")
    params_dtype: str = _option("float32", "of parameters", choices=("float32", "float64"))
    reduce: str = _option("fp32", "format of the block outputs' all-reduce in forward", choices=FORMATS)
    gradient_mode: str = _option("dense", "how replicas' gradients are averaged: whole, or sparsely", choices=MODES)
    gradient_density: float = _option(0.01, "share of a gradient's numbers that is sent at once, in sparse modes")
    gradient_sparsifier: str = _option("dgc", "how these are selected", choices=SPARSIFIERS)
    gradient_density_warmup: int = _option(0, "steps in which the density falls from a quarter to its own")
    seed: int = _option(1234, "of initialization and data order")

    save_interval: int = _option(500, "steps between checkpoints; there is one at the end as well (0: only that)")
    exit_interval: int = _option(0, "leave, with a checkpoint, after a step that this divides (0: never)")
    log_interval: int = _option(10, "steps between lines")
    eval_interval: int = _option(0, "steps between evaluations (0: only the last)")
    device: str = _option("", "cpu or cuda (default: cuda where there is one)", choices=("", "cpu", "cuda"))

    def __post_init__(self):
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:  # nan is not
                raise ValueError(f"{flag(name)} {getattr(self, name)} must be at least {least}")
        uses, least = self.num_layers // self.hybrid_interval, {"zamba": 2, "zamba2": 1}.get(self.model_type, 0)
        if uses < least:  # transformers can make nothing else
            raise ValueError(
                f"--model-type {self.model_type} needs the shared block in at least {least} blocks; --num-layers "
                f"{self.num_layers} with --hybrid-interval {self.hybrid_interval} has it in {uses}"
            )
        if not 0 < self.gradient_density <= 1:
            raise ValueError(f"--gradient-density {self.gradient_density} must be above 0 and at most 1")
        if self.context_parallel_size != 1:
            raise ValueError(f"--context-parallel-size {self.context_parallel_size} is not implemented (only 1)")

    @property
    def decay_steps(self) -> int:
        """The step at which the learning rate has decayed (0: it does not decay)."""
        return 0 if self.lr_decay_style == "constant" else self.lr_decay_iters or self.train_iters

    def accumulation(self, data_ranks: int) -> int:
        """Micro-batches a replica adds up per step; ValueError if the batch does not divide."""
        once = self.micro_batch_size * data_ranks
        if self.global_batch_size % once:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size} is no multiple of --micro-batch-size "
                f"{self.micro_batch_size} x {data_ranks} data-parallel ranks "
                f"({self.global_batch_size} % {once} = {self.global_batch_size % once})"
            )
        return self.global_batch_size // once

    def model_config(self, vocab_size: int, eos: int) -> dict:
        """The config.json of a new model."""
        names = dict(mamba="Mamba", falcon_mamba="FalconMamba", mamba2="Mamba2", zamba="Zamba", zamba2="Zamba2")
        heads = 2 * self.hidden_size // self.mamba_head_dim
        of_family = dict(state_size=self.mamba_state_dim)
        if self.model_type == "mamba2":
            of_family |= dict(head_dim=self.mamba_head_dim, num_heads=heads, n_groups=self.mamba_num_groups)
        elif self.model_type.startswith("zamba"):
            of_family = dict(self._hybrid_config(), mamba_d_state=self.mamba_state_dim, n_mamba_heads=heads)
        return {
            "architectures": [f"{names[self.model_type]}ForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "tie_word_embeddings": not self.untie_embeddings_and_output_weights,
            **{f"{name}_token_id": eos for name in ("bos", "eos", "pad")},
            **of_family,
        }

    def _hybrid_config(self) -> dict:
        """What zamba and zamba2 have beside their Mamba blocks."""
        every = self.hybrid_interval
        kinds = ["linear_attention" if layer % every else "hybrid" for layer in range(1, self.num_layers + 1)]
        config = dict(
            layers_block_type=kinds,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_query_groups or self.num_attention_heads,
            intermediate_size=self.ffn_hidden_size or 4 * self.hidden_size,
        )
        if self.model_type == "zamba":
            return config
        more = dict(mamba_ngroups=self.mamba_num_groups, num_mem_blocks=self.shared_blocks)
        return config | more | dict(adapter_rank=self.adapter_rank, use_mem_rope=True)

    def describe(self) -> str:
        """Every option that is not its default, on one line."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{name}={json.dumps(value)}" for name, value in changed.items() if name != "data")


_LEAST = {
    **dict.fromkeys(("micro_batch_size", "global_batch_size", "seq_length", "train_iters", "log_interval",
                     "tensor_model_parallel_size", "num_layers", "hidden_size", "mamba_state_dim", "mamba_head_dim",
                     "mamba_num_groups", "hybrid_interval", "shared_blocks", "adapter_rank",
                     "num_attention_heads"), 1),
    **dict.fromkeys(("lr", "min_lr", "lr_warmup_iters", "lr_decay_iters", "weight_decay", "clip_grad", "adam_eps",
                     "save_interval", "exit_interval", "eval_interval", "num_query_groups", "ffn_hidden_size",
                     "gradient_density_warmup"), 0),
}  # fmt: skip


def flag(name: str) -> str:
    """The command-line flag of an option."""
    return "--" + name.replace("_", "-")


def parse_options(argv=None, prog="pretrain.py") -> Options:
    """Options from the command line, over those of --config F.yaml, over the defaults; wrong ones leave with 2."""
    parser = Parser(prog=prog, description="Pretrain a state-space language model on text.")
    parser.add_argument("--config", metavar="F.yaml", help="options in YAML, under the same names")
    for option in fields(Options):
        more = dict(default=argparse.SUPPRESS, help=option.metadata["help"])
        if isinstance(option.default, bool):
            more |= dict(action=argparse.BooleanOptionalAction)
        elif isinstance(option.default, tuple):
            more |= dict(nargs="+", metavar="PATH")
        else:
            more |= dict(type=type(option.default), choices=option.metadata.get("choices"))
        parser.add_argument(flag(option.name), **more)
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # the deepspeed launcher's
    given = vars(parser.parse_args(argv))
    config = given.pop("config")
    given.pop("local_rank", None)
    try:
        values = {**_read_yaml(config), **given} if config else given
        for option in fields(Options):
            if option.metadata.get("required") and not values.get(option.name):
                raise ValueError(f"{flag(option.name)} is required")
        return Options(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _read_yaml(path) -> dict:
    """The options of a YAML file, each known and of its type."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no options")
    known = {option.name: option for option in fields(Options)}
    checked = {}
    for key, value in values.items():
        name = str(key).replace("-", "_").lstrip("_")
        if name not in known:
            raise ValueError(f"{path}: unknown option {key}{did_you_mean(name, known)}")
        checked[name] = _of_type(value, known[name], f"{path}: {key}")
    return checked


def _of_type(value, option, where):
    """A YAML value as the option's type; YAML reads 3e-3 as text."""
    kind = type(option.default)
    if kind is tuple:
        return tuple(_converted(item, str, where) for item in (value if isinstance(value, list) else [value]))
    value = _converted(value, kind, where)
    choices = option.metadata.get("choices")
    if choices and value not in choices:
        raise ValueError(f"{where}: {value!r} is not one of {', '.join(choices)}")
    return value


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _converted(value, kind, where):
    """A YAML value as bool, int, float or str; ValueError unless it says just that."""
    if isinstance(value, bool) == (kind is bool) and isinstance(value, bool | int | float | str):
        with contextlib.suppress(ValueError, OverflowError):
            converted = kind(value)
            if converted == value or not isinstance(value, float):
                return converted
    raise ValueError(f"{where}: {value!r} is not {_KINDS[kind]}")
