"""Generation for a batch of prompts: each is a request, and all run in the same `Engine`."""

import operator
from collections.abc import Iterable, Iterator

import torch

from sparsefusion.collectives.agreement import together

from .engine import Engine
from .language_model import LanguageModel, draw_seed
from .request import Request
from .sampling import Sampling, nan_error


def generate(
    model: LanguageModel,
    input_ids: torch.Tensor,
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
) -> torch.Tensor:
    """The tokens that follow input_ids (batch, seq): (batch, new), int64 on the CPU, the same on every rank.

    attention_mask: (batch, seq), zeros only on the left. A row ends with the first of `stop_tokens` that it produces, or
    with the token that completes one of `stop_strings` (found in the text of the new tokens, or the name of a special token;
    this needs the checkpoint's tokenizer.json). It is then filled with pad_token_id; there are fewer columns when all rows
    have ended. The first min_new_tokens tokens are no stop tokens.

    temperature 0 is greedy search, which takes the lowest id among equal logits. Otherwise a token is sampled: one uniform
    number is drawn from a generator of the row's own, seeded with seed + row (None: fresh seeds, the same on all ranks), so
    that a row does not depend on its neighbours. top_k, then top_p, then min_p restrict the candidates; min_p removes those
    that are less likely than min_p times the most likely one. repetition_penalty divides positive and multiplies negative
    logits of ids that the row already contains. frequency_penalty is subtracted from the logit of an id once for each time
    that it was generated, presence_penalty once if it was generated at all; the prompt does not count.

    ValueError on every rank, before the model runs, for arguments that are wrong or differ between ranks. FloatingPointError
    on every rank if the model's logits are NaN.
    """
    columns = list(
        stream(model, input_ids, attention_mask, max_new_tokens, temperature, top_k, top_p, repetition_penalty,
               stop_tokens, stop_strings, seed, pad_token_id, min_new_tokens, frequency_penalty, presence_penalty, min_p)
    )  # fmt: skip
    return torch.stack(columns, dim=1) if columns else torch.empty(0, 0, dtype=torch.int64)


def stream(
    model: LanguageModel,
    input_ids: torch.Tensor,
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
) -> Iterator[torch.Tensor]:
    """Like `generate`, but yields the (batch,) tokens of each step as soon as they are known.

    All ranks must take equally many steps from the iterator, because each step communicates. The ranks compare their
    arguments when `stream` is called.
    """

    def prepare() -> tuple[Engine, list[Request], int]:
        prompts = _prompts(model, input_ids, attention_mask)
        batch = len(prompts)
        if seed is not None and not -(2**63) <= seed <= 2**64 - batch:
            raise ValueError(f"seed={seed} and those of the {batch} rows after it must fit in 64 bits")
        fill = operator.index(pad_token_id)
        if not -(2**63) <= fill < 2**63:
            raise ValueError(f"pad_token_id={fill} must fit in 64 bits")
        engine = Engine(model, slots=max(1, batch))  # it allocates its cache, which may fail on one rank alone
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty, frequency_penalty, presence_penalty, min_p)
        requests = [
            engine.make_request(
                prompt, max_new_tokens, sampling, stop_tokens, stop_strings, None if seed is None else seed + row,
                min_new_tokens,
            )
            for row, prompt in enumerate(prompts)
        ]  # fmt: skip
        return engine, requests, fill

    def same(prepared: tuple[Engine, list[Request], int]) -> dict[str, object]:
        engine, requests, fill = prepared
        return {"pad_token_id": fill} | engine.fingerprint(requests)

    engine, requests, fill = together(prepare, model.generating_groups, same, model.device)
    first_seed = draw_seed(model) if seed is None else seed
    for row, request in enumerate(requests):
        engine.enqueue(request, first_seed + row)
    return _columns(engine, requests, fill)


def _prompts(model: LanguageModel, input_ids, attention_mask) -> list[list[int]]:
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
