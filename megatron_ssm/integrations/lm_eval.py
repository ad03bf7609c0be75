"""The model class `megatron-ssm` of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness).

lm-eval after 0.4.13 finds the class by the entry point in the group `lm_eval.models`. For earlier versions, this module is
also a command that registers the class and takes lm-eval's arguments: `python -m megatron_ssm.integrations.lm_eval`. In
Python, importing this module registers the class.

As in lm-eval's own model class `hf`, transformers tokenizes the texts, and texts are truncated and cut at stop sequences by
the same rules, so results are comparable.
"""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

if __name__ == "__main__" and find_spec("lm_eval") is None:
    raise SystemExit("there is no package lm_eval: pip install 'lm-eval>=0.4.12' transformers")

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text, resolve_max_length
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import AutoConfig, AutoTokenizer

from commfabric.foundation.command_line import run
from commfabric.foundation.launcher import adopt_launcher
from megatron_ssm.checkpoints.hf import dtype_of
from megatron_ssm.engine.text import stop_tokens
from megatron_ssm.layers.families import check_directory

from .evaluation_ranks import EvaluatedModel, batch_size_of, check_integer, check_switch

GENERATION_OPTIONS = ("temperature", "top_k", "top_p", "repetition_penalty", "seed")


@register_model("megatron-ssm")
class MegatronSsmLM(TemplateLM):
    """A checkpoint on `tp` tensor-parallel ranks of this host, or on the ranks of a launcher.

    Args:
        pretrained: A Hugging Face directory with a tokenizer.
        tp: The number of tensor-parallel ranks.
        dtype: The name of a dtype, or "auto".
        device: "cpu" or "cuda". Without a GPU, "cuda" is "cpu".
        reduce, weights: See `megatron_ssm.load`.
        batch_size: The number of sequences per call of the model; "auto" is 8.
        max_batch_size: Ignored.
        max_length: The largest number of tokens of a sequence. The default is that of transformers' configuration, or 2048.
        max_gen_toks: The number of new tokens if a task does not set it.
        add_bos_token: See lm-eval's `hf`.

    Raises:
        ValueError: An argument or generation option is not implemented or out of range.
    """

    def __init__(
        self,
        pretrained: str,
        tp: int = 1,
        dtype: str = "float32",
        device: str | None = None,
        reduce: str = "fp32",
        weights: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        **others: Any,
    ):
        super().__init__()
        if others:
            raise ValueError(f"model arguments that are not implemented: {', '.join(sorted(others))}")
        pretrained = str(pretrained)  # lm-eval converts a directory called 5 to a number
        check_directory(pretrained)
        check_integer("tp", tp)
        check_integer("max_gen_toks", max_gen_toks)
        if max_length is not None:
            check_integer("max_length", max_length)
        check_switch("add_bos_token", add_bos_token)
        self.batch_size = batch_size_of(batch_size)
        options = dict(dtype=str(dtype).removeprefix("torch."), device=_device(device), reduce=reduce, weights=weights)
        dtype_of(options["dtype"])  # for its ValueError, before ranks are started
        self._evaluated = EvaluatedModel(pretrained, tp, **options)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(pretrained)
        self.max_length = max_length or resolve_max_length(AutoConfig.from_pretrained(pretrained), self.tokenizer)
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        configured = stop_tokens(pretrained, self._evaluated.model.config, None)
        self._end_tokens = sorted({self.eot_token_id, *configured} - {None})

    def close(self) -> None:
        """Stop the ranks that this process has started. Otherwise they stop when it exits."""
        self._evaluated.close()

    # Tokens

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """The name under which lm-eval caches tokenized requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, with the tokenizer's special tokens unless the text already begins with one."""
        add = self._add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            add = False
        options: dict[str, Any] = {} if add is None else {"add_special_tokens": add}
        return self.tokenizer.encode(string, **options)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a dialogue, by the checkpoint's chat template."""
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    # Requests of lm-eval

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        """The log-likelihoods of continuations. requests: triples (request, context ids, continuation ids)."""
        sequences = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        counts = [len(continuation) for _, _, continuation in requests]
        if too_long := next((count for count in counts if count > self.max_length), None):
            raise ValueError(f"a continuation of {too_long} tokens exceeds max_length={self.max_length}")
        answers = self._evaluated.run("log_likelihoods", sequences=sequences, counts=counts, batch_size=self.batch_size)
        for (request, _, _), answer in zip(requests, answers, strict=True):
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows of max_length tokens that predict each token once."""
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
                )
            ]
            for request in requests
        ]
        answers = iter(self._loglikelihood_tokens([window for text_windows in windows for window in text_windows]))
        totals = [sum(next(answers)[0] for _ in text_windows) for text_windows in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to its first stop sequence or the end of the text."""
        calls = [self._generation(index, *request.args) for index, request in enumerate(requests)]
        results = self._evaluated.run("continuations", requests=calls, batch_size=self.batch_size)
        texts = []
        for request, call, tokens in zip(requests, calls, results, strict=True):
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            texts.append(postprocess_generated_text(text, call["stop_strings"], None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _generation(self, index: int, context: str, options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `Engine.add` for a context and lm-eval's options. index: the default seed."""
        check_switch("do_sample", options.get("do_sample"))
        try:
            sampling: dict[str, Any] = {**normalize_gen_kwargs(options, self.max_gen_toks)}
        except (TypeError, ValueError) as error:
            raise ValueError(f"generation options {options}: {error}") from None
        until, count, is_sampled = sampling.pop("until"), sampling.pop("max_gen_toks"), sampling.pop("do_sample")
        if unknown := set(sampling) - set(GENERATION_OPTIONS):
            raise ValueError(f"generation options that are not implemented: {', '.join(sorted(unknown))}")
        check_integer("max_gen_toks", count)
        if count >= self.max_length:
            raise ValueError(f"max_gen_toks={count} leaves no room for a context in max_length={self.max_length}")
        sampling["temperature"] = sampling.get("temperature", 1.0) if is_sampled else 0.0
        stops: Iterable[str] = [until] if isinstance(until, str) else until
        return {
            "prompt": self.tok_encode(context)[-(self.max_length - count) :],
            "max_new_tokens": count,
            "stop_tokens": self._end_tokens,
            "stop_strings": [text for text in stops if text],
            "seed": index,
            **sampling,
        }


def _device(name: str | None) -> str:
    """Return "cpu" or "cuda". lm-eval's command line passes "cuda:0" by default, even without a GPU."""
    kind = str(name or "cpu").split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={name} must be cpu or cuda")
    return kind if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Run lm-eval's command line with this model class."""
    if code := run("lm_eval", adopt_launcher):
        raise SystemExit(code)
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
