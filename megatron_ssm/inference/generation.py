"""Generation of a batch of prompts: one request each, all in the same `Engine`."""

from collections.abc import Iterator

import torch

from .engine import Engine
from .language_model import LanguageModel
from .sampling import Sampling


def generate(model: LanguageModel, input_ids, attention_mask=None, max_new_tokens=64, temperature=0.0, top_k=None,
             top_p=None, repetition_penalty=1.0, stop_tokens=(), stop_strings=(), seed=None, pad_token_id=0,
             min_new_tokens=0) -> torch.Tensor:  # fmt: skip
    """The tokens that follow input_ids (batch, seq): (batch, new), int64, the same on every rank.

    attention_mask: (batch, seq), zeros only on the left. A row ends with the first of `stop_tokens` it produces, or the
    token that completes one of `stop_strings` (found in the text of the new tokens; needs the checkpoint's
    tokenizer.json), and is filled with pad_token_id; there are fewer columns when all rows have ended. None of the first
    min_new_tokens is a stop token.
    Greedy takes the lowest id among equals. Sampling draws one uniform per token from a generator of the row's own,
    seeded seed + row (None: fresh seeds, the same on all ranks), so a row does not depend on its neighbours.
    """
    columns = list(
        stream(model, input_ids, attention_mask, max_new_tokens, temperature, top_k, top_p, repetition_penalty,
               stop_tokens, stop_strings, seed, pad_token_id, min_new_tokens)
    )  # fmt: skip
    return torch.stack(columns, dim=1)


def stream(model: LanguageModel, input_ids, attention_mask=None, max_new_tokens=64, temperature=0.0, top_k=None,
           top_p=None, repetition_penalty=1.0, stop_tokens=(), stop_strings=(), seed=None, pad_token_id=0,
           min_new_tokens=0) -> Iterator[torch.Tensor]:  # fmt: skip
    """As `generate`, but yields each step's (batch,) tokens as soon as they are known. Every rank must draw as many.

    What the ranks were given is compared at once (16 bytes of each): ValueError on all of them if it differs.
    """
    engine, requests = None, []

    def asked():
        nonlocal engine
        model.check(input_ids, attention_mask)
        batch, length = input_ids.shape
        if seed is not None and not -(2**63) <= seed <= 2**64 - batch:
            raise ValueError(f"seed={seed} and those of the {batch} rows after it must fit in 64 bits")
        engine = Engine(model, slots=batch)
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
        for row, ids in enumerate(input_ids.tolist()):
            prompt = ids if attention_mask is None else ids[length - int(attention_mask[row].sum()) :]
            own_seed = None if seed is None else seed + row
            requests.append(
                engine.request(prompt, max_new_tokens, sampling, stop_tokens, stop_strings, own_seed, min_new_tokens)
            )
        return [request.said for request in requests]

    fresh = model.ranks.agree(model.device, asked)
    for row, request in enumerate(requests):
        engine.queue(request, fresh + row)
    return _columns(engine, requests, pad_token_id)


def _columns(engine, requests, pad_token_id):
    while engine.busy:
        advanced = set(engine.step())
        yield torch.tensor([r.tokens[-1] if r in advanced else pad_token_id for r in requests])
