"""A whole pretraining run: data and tokenizer in, training with checkpoints on the way, a Hugging Face directory out.

What can be wrong with the input is found by every rank before any of them communicates.
"""

import functools
import json
import os
import sys
import zlib
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
from tqdm import tqdm

from megatron_ssm.checkpoints.hf import COMPANIONS, build, load, save
from megatron_ssm.checkpoints.pending_gradients import has_pending, read_pending, write_pending
from megatron_ssm.checkpoints.training import (
    find_checkpoints,
    load_training,
    newest_checkpoint,
    save_training,
    saved_decay_steps,
    set_aside,
)
from megatron_ssm.configs.config import Config
from megatron_ssm.diagnostics.doctor import kernels_line
from megatron_ssm.inference.text import BYTE_END_OF_TEXT_ID, END_OF_TEXT, load_tokenizer, write_byte_tokenizer
from megatron_ssm.models.initialization import initialize as initialize_parameters
from megatron_ssm.parallel.groups import check_world, device_of_rank, initialize, launched_ranks, shut_down
from sparsefusion.foundation.command_line import Printer

from .data import Batches, read_documents, split_documents, tokenize
from .options import Options
from .trainer import Clock, Trainer, evaluate


def pretrain(options: Options) -> None:
    """Train as the options say, on every rank of the launcher's world."""
    check_world(options.tensor_model_parallel_size, launched_ranks())
    options.accumulation(launched_ranks() // options.tensor_model_parallel_size)
    out = _writable(options.out)
    text = Text(options)
    config = Config.read(options.init_from) if options.init_from else text.new_model(options)
    text.check(config)
    config.check_ranks(options.tensor_model_parallel_size)
    batches = Batches(text.train, options.seq_length, options.global_batch_size, options.seed)
    agreement = _agreement(options, config, text)
    found = newest_checkpoint(out / "checkpoints", agreement) if options.resume else None
    if found and found[1] > options.train_iters:
        raise ValueError(f"{found[0]} has done {found[1]} steps, more than --train-iters {options.train_iters}")
    _check_log(options.log)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        groups = initialize(options.tensor_model_parallel_size, device)
        torch.manual_seed(options.seed)
        model = _model(options, config, groups, device_of_rank(device))
        report = Report(options, groups, found[1] if found else 0)
        trainer = Trainer(model, groups, options, report.say)
        report.say(kernels_line(model.device, model.dtype, model.ranks.transport, trains=True))
        report.say(f"pretrain: {options.describe()}")
        report.say(_summary(model, groups, text, out, found))
        if found:
            report.say_decay(saved_decay_steps(found[0]))
            load_training(*found, model, trainer.optimizer)
            if has_pending(found[0]):
                read_pending(found[0], trainer)
        else:
            set_aside(out / "checkpoints")
        done = _train(trainer, batches, text, agreement, out, report, found[1] if found else 0)
        if done == options.train_iters:
            _finish(model, text, out, report)
        model.close()
    finally:
        shut_down()


def _train(trainer, batches, text, agreement, out, report, start) -> int:
    """The steps from `start` on; returns how many have been done in all."""
    options, step = trainer.options, start
    for step in range(start + 1, options.train_iters + 1):
        result = trainer.step(batches, step - 1)
        last, leave = step == options.train_iters, _due(step, options.exit_interval)
        evaluates = text.held_out is not None and (last or _due(step, options.eval_interval))
        report.step(step, result, logged=evaluates)
        if evaluates:
            report.evaluated(step, evaluate(trainer.model, text.held_out, trainer.groups, options))
        report.log()
        if last or leave or _due(step, options.save_interval):
            directory, decay = out / "checkpoints", options.decay_steps
            more = functools.partial(write_pending, trainer=trainer)
            save_training(directory, step, trainer.model, trainer.optimizer, agreement, decay, more)
        if leave and not last:
            report.say(f"leaving after step {step}, as --exit-interval says; --resume continues")
            break
    report.close()
    return step


def _due(step, interval) -> bool:
    return interval > 0 and step % interval == 0


def _finish(model, text, out, report) -> None:
    """Write the Hugging Face directory, with its tokenizer."""
    save(model, out)
    if report.speaks:
        text.write_tokenizer(out)
    report.say(f"saved {out}")


def _model(options, config, groups, device):
    dtype = getattr(torch, options.params_dtype)
    if options.init_from:
        return load(options.init_from, groups.tensor, None, dtype, device, options.reduce, groups.data)
    return initialize_parameters(build(config, groups.tensor, groups.data, dtype, device, options.reduce), options.seed)


def _writable(path) -> Path:
    """The output directory and its checkpoints', made and tried; ValueError if one cannot be written."""
    out = Path(path)
    for folder in (out, out / "checkpoints"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink(missing_ok=True)  # another machine's rank may have the same number
        except OSError as error:
            raise ValueError(f"cannot write to --out {folder}: {error.strerror}") from None
    return out


def _check_log(path) -> None:
    """ValueError if the log cannot be written."""
    if path:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).open("a").close()
        except OSError as error:
            raise ValueError(f"cannot write to --log {path}: {error.strerror}") from None


def _agreement(options, config, text) -> dict:
    """What a resumed run must have in common with the saved one, as JSON gives it back."""
    shape = {name: value for name, value in asdict(config).items() if name not in ("raw", "unknown")}
    run = {name: getattr(options, name) for name in ("global_batch_size", "seq_length", "seed", "params_dtype")}
    tokens = {"training_tokens": len(text.train.ids), "training_text": zlib.crc32(text.train.ids.numpy())}
    return json.loads(json.dumps({**shape, **run, **tokens}))


def _summary(model, groups, text, out, found) -> str:
    size = sum(torch.Size(p.field.shape).numel() for p in model.parameters())
    held_out = f"{text.held_out.text_bytes:,} held out" if text.held_out else "nothing held out: one document"
    if found:
        target = f"resuming {found[0]}"
    elif find_checkpoints(out / "checkpoints"):
        target = f"overwriting {out}; its checkpoints replace those in {out / 'checkpoints.old'}"
    else:
        target = f"{'overwriting' if (out / 'config.json').exists() else 'writing'} {out}"
    return (
        f"{model.config.family}, {size:,} parameters; {model.ranks.size} tensor x {groups.data_ranks} data-parallel "
        f"ranks; {text.train.text_bytes:,} bytes of text, {held_out}; {target}"
    )


class Text:
    """The training and the held-out text as tokens, and the tokenizer they came from (`files`: None for bytes)."""

    def __init__(self, options: Options):
        separator = options.document_separator or None
        documents = read_documents(options.data, separator)
        held_out = read_documents(options.valid_data_path, separator) if options.valid_data_path else []
        if not held_out and len(documents) > 1:
            documents, held_out = split_documents(documents, options.held_out, options.seed)
        source = options.tokenizer_model or options.init_from or "byte"
        if source == "byte":
            self.files, tokenizer = None, _ByteTokenizer()
            self.vocab_size, self.end = BYTE_END_OF_TEXT_ID + 1, BYTE_END_OF_TEXT_ID
        else:
            folder = Path(source).parent if Path(source).name == "tokenizer.json" else Path(source)
            tokenizer = load_tokenizer(folder)
            self.files = {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}
            self.vocab_size = 1 + max(tokenizer.get_vocab().values())
            self.end = _end_of_text(tokenizer, folder)
        self.train = tokenize(documents, tokenizer, self.end)
        self.held_out = tokenize(held_out, tokenizer, self.end) if held_out else None

    def new_model(self, options: Options) -> Config:
        """The configuration of a new model for this tokenizer."""
        return Config.from_dict(options.model_config(self.vocab_size, self.end))

    def check(self, config: Config) -> None:
        """ValueError if the model does not know all of the tokenizer's ids."""
        if self.vocab_size > config.vocab_size:
            sizes = f"{self.vocab_size} ids, vocab_size {config.vocab_size}"
            raise ValueError(f"the tokenizer is larger than the model: {sizes}")

    def write_tokenizer(self, out: Path) -> None:
        """The tokenizer's files beside the model, in place of any other tokenizer's."""
        for name in COMPANIONS:
            (out / name).unlink(missing_ok=True)
        if self.files is None:
            write_byte_tokenizer(out)
            return
        for name, content in self.files.items():
            (out / name).write_bytes(content)


class _ByteTokenizer:
    """A text's UTF-8 bytes as ids: what `text.write_byte_tokenizer` encodes, without a file."""

    def encode(self, text, add_special_tokens=False):
        """Like tokenizers.Tokenizer.encode."""
        self.ids = list(text.encode("utf-8"))
        return self


def _end_of_text(tokenizer, folder: Path) -> int:
    """The id of the tokenizer's end-of-text token: its configuration's eos_token, else one of the usual names."""
    names = [END_OF_TEXT, "</s>"]
    path = folder / "tokenizer_config.json"
    if path.is_file():
        try:
            token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
        except (ValueError, AttributeError):
            raise ValueError(f"{path} is not a tokenizer's configuration") from None
        names.insert(0, token.get("content") if isinstance(token, dict) else token)
    for name in names:
        if isinstance(name, str) and tokenizer.token_to_id(name) is not None:
            return tokenizer.token_to_id(name)
    raise ValueError(f"{folder} names no eos_token in tokenizer_config.json, and has none of {', '.join(names[-2:])}")


class Report:
    """Rank 0's progress: a line per logged step (a bar on a terminal), and the same as JSON lines."""

    def __init__(self, options: Options, groups, start: int):
        self.options, self.speaks, self.line = options, groups.rank == 0, None
        self.clock = Clock(options.train_iters - start, options.global_batch_size * options.seq_length)
        on_terminal = self.speaks and sys.stderr.isatty()
        self.bar = tqdm(total=options.train_iters, initial=start, unit="step", disable=not on_terminal)
        self.file = self._open(start) if self.speaks and options.log else None

    def _open(self, start):
        """The log; a resumed run keeps the lines up to where it starts."""
        path, kept = Path(self.options.log), []
        if start and path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= start]
        file = path.open("w", encoding="utf-8")
        file.writelines(line + "\n" for line in kept)
        return file

    def say(self, line: str) -> None:
        """A line on stdout."""
        with self.bar.external_write_mode():
            Printer(self.speaks).print(line + "\n")

    def say_decay(self, before: int) -> None:
        """Tell when a resumed run's learning rate decays over other steps than it did (0: not known)."""
        if before and before != self.options.decay_steps:
            self.say(f"learning rate now decays over {self.options.decay_steps} steps, was {before}")

    def step(self, step: int, result, logged: bool) -> None:
        """One step is done; every --log-interval, at the first and the last, and if `logged`, it is told."""
        self.clock.tick()
        self.bar.update()
        if not (logged or _due(step, self.options.log_interval) or step in (1, self.options.train_iters)):
            return
        rate, left = self.clock.read()
        self.say(
            f"step {step:>5}/{self.options.train_iters}  loss {result.loss:.4f}  grad norm {result.grad_norm:.3f}  "
            f"lr {result.lr:.2e}  {rate:,.0f} tokens/s  {timedelta(seconds=round(left))} left"
        )
        tokens = step * self.options.global_batch_size * self.options.seq_length
        self.line = dict(step=step, loss=result.loss, lr=result.lr, grad_norm=result.grad_norm, tokens=tokens,
                         tokens_per_s=rate)  # fmt: skip

    def evaluated(self, step: int, nats: float) -> None:
        """The held-out text was evaluated after this step."""
        self.say(f"step {step:>5}/{self.options.train_iters}  held-out {nats:.4f} nats/byte")
        self.line["held_out_nats_per_byte"] = nats
        self.clock.read()

    def log(self) -> None:
        """Write the step's line, if it has one."""
        if self.file and self.line:
            self.file.write(json.dumps(self.line) + "\n")
            self.file.flush()
        self.line = None

    def close(self) -> None:
        """The run is over."""
        self.bar.close()
        if self.file:
            self.file.close()


def _step_of(line) -> float:
    """The step of a line of the log; infinite if that is no such line, as when a run was killed while it wrote."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
