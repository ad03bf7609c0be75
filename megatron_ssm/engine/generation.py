"""Generation for a batch of prompts, which are the requests of one `Engine`."""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, overload

import torch

from commfabric.collectives.agreement import together
from megatron_ssm.model.model import Model

from .engine import Engine
from .options import GenerationOptions
from .request import Request
from .sampling import draw_seed, nan_error
from .text import TextStream, check_fits, load_tokenizer
from .text import stop_tokens as checkpoint_stop_tokens


@overload
def generate(model: Model, input_ids: str, *arguments: Any, **options: Any) -> str: ...
@overload
def generate(model: Model, input_ids: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor: ...
def generate(
    model: Model,
    input_ids: torch.Tensor | str,
    attention_mask: torch.Tensor | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop_tokens: int | Iterable[int] = (),
    stop_strings: str | Iterable[str] = (),
    seed: int | None = None,
    pad_token_id: int = 0,
    min_new_tokens: int = 0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    min_p: float | None = None,
) -> torch.Tensor | str:
    """The tokens that follow input_ids (batch, seq): (batch, new), int64 on the CPU, the same on every rank.

    Generation ends when all rows have ended. top_k, top_p and min_p restrict the sampled tokens in this order.
    With a text in place of input_ids, it returns the text that follows, up to a token that ends a text (`stop_tokens`, else
    those of the checkpoint) or a stop string.

    Args:
        model: The model.
        input_ids: The prompts (batch, seq), or one prompt as a text, for which the model's directory needs a tokenizer.json.
        attention_mask: (batch, seq), with zeros only on the left.
        max_new_tokens: The largest number of new tokens of a row.
        temperature: 0 is greedy search, with the lowest id among equal logits. Otherwise tokens are sampled.
        top_k: Sample from the k most likely tokens only.
        top_p: Sample from the most likely tokens only, up to this sum of probabilities.
        repetition_penalty: Divides positive and multiplies negative logits of ids that the row already contains.
        stop_tokens: Ids that end a row.
        stop_strings: Texts that end a row with the token that completes one, in the new text or as the name of a special
            token. They need the checkpoint's tokenizer.json.
        seed: Row i draws from its own generator, which is seeded with seed + i, so that it does not depend on other rows.
            By default the seed is random, and the same on all ranks.
        pad_token_id: The padding after the end of a row.
        min_new_tokens: The number of new tokens before which a row does not end with a stop token.
        frequency_penalty: Subtracted from the logit of an id for each time that it was generated.
        presence_penalty: Subtracted from the logit of an id that was generated at least once.
        min_p: Sample only from tokens that are at least this fraction as likely as the most likely one.

    Raises:
        ValueError: On every rank, before the model runs, if arguments are invalid or differ across ranks.
        FloatingPointError: On every rank, if the model's logits are NaN.
    """
    text = None
    if isinstance(input_ids, str):
        if attention_mask is not None:
            raise ValueError("attention_mask is for token ids: a text has no padding")
        prompt = input_ids
        text = together(
            lambda: _Text(model, prompt, stop_tokens, stop_strings), model.generating_groups, device=model.device
        )
        input_ids, attention_mask, stop_tokens = torch.tensor([text.ids], device=model.device), None, text.stop_tokens
    options: dict[str, Any] = dict(
        top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty, stop_tokens=stop_tokens, stop_strings=stop_strings, seed=seed,
        min_new_tokens=min_new_tokens, pad_token_id=pad_token_id,
    )  # fmt: skip
    columns = list(stream(model, input_ids, attention_mask, max_new_tokens, temperature, **options))
    if text is not None:
        return text.of([int(column[0]) for column in columns])
    return torch.stack(columns, dim=1) if columns else torch.empty(0, 0, dtype=torch.int64)


class _Text:
    """A prompt that is a text, as ids, and the text of the tokens after it. ValueError or OSError without a tokenizer."""

    def __init__(
        self, model: Model, prompt: str, stop_tokens: int | Iterable[int], stop_strings: str | Iterable[str]
    ) -> None:
        if model.directory is None:
            raise ValueError(
                "a prompt that is a text needs the tokenizer.json of the directory that the model is loaded from"
            )
        tokenizer = load_tokenizer(model.directory)
        check_fits(tokenizer, model.config)
        ends = (stop_tokens,) if isinstance(stop_tokens, int) else tuple(stop_tokens)
        self.stop_tokens = ends or checkpoint_stop_tokens(model.directory, model.config, tokenizer)
        self.ids = tokenizer.encode(prompt).ids
        self._stream = TextStream(tokenizer, stop_strings, self.stop_tokens, self.ids)

    def of(self, tokens: list[int]) -> str:
        return "".join(map(self._stream.push, tokens)) + self._stream.finish()


def stream(
    model: Model,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    *,
    pad_token_id: int = 0,
    **options: Any,
) -> Iterator[torch.Tensor]:
    """Like `generate`, with the same options, but yields the (batch,) tokens of each step as soon as they are known.

    All ranks must take the same number of steps from the iterator, because steps communicate. The ranks compare their
    arguments when `stream` is called.
    """
    seed = options.pop("seed", None)

    def prepare() -> tuple[Engine, list[Request], int]:
        prompts = _prompts(model, input_ids, attention_mask)
        batch = len(prompts)
        if seed is not None and not -(2**63) <= seed <= 2**64 - batch:
            raise ValueError(f"seed={seed} and those of the {batch} rows after it must fit in 64 bits")
        fill = operator.index(pad_token_id)
        engine = Engine(model, slots=max(1, batch))  # it allocates its cache, which may fail on one rank alone
        given = GenerationOptions.of(max_new_tokens=max_new_tokens, temperature=temperature, **options)
        seeds = [None if seed is None else seed + row for row in range(batch)]
        requests = [
            engine.make_request(prompt, replace(given, seed=own)) for prompt, own in zip(prompts, seeds, strict=True)
        ]
        return engine, requests, fill

    def same(prepared: tuple[Engine, list[Request], int]) -> dict[str, object]:
        engine, requests, fill = prepared
        return {"pad_token_id": fill} | engine.fingerprint(requests)

    engine, requests, fill = together(prepare, model.generating_groups, same, model.device)
    first_seed = draw_seed(model) if seed is None else seed
    for row, request in enumerate(requests):
        engine.enqueue(request, first_seed + row)
    return _columns(engine, requests, fill)


def _prompts(model: Model, input_ids, attention_mask) -> list[list[int]]:
    """The ids of each row without padding; ValueError for inputs that are wrong."""
    model.check_inputs(input_ids, attention_mask)
    if attention_mask is None:
        return input_ids.tolist()
    lengths = (attention_mask != 0).sum(1).tolist()  # whatever the dtype: a sum in 16 bits would be rounded
    return [ids[len(ids) - length :] for ids, length in zip(input_ids.tolist(), lengths, strict=True)]


def _columns(engine: Engine, requests: list[Request], pad_token_id: int) -> Iterator[torch.Tensor]:
    """Step the engine until all requests are finished; yields the new token of each request, or pad_token_id."""
    while engine.is_busy:
        advanced = set(engine.step())
        for request in advanced:
            if request.finished == "error":
                raise nan_error(engine.model.directory, len(request.tokens))
        yield torch.tensor([r.tokens[-1] if r in advanced else pad_token_id for r in requests])
