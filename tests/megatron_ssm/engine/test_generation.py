"""Generation. Oracles: transformers' greedy search; each row alone; a model that goes round in a circle."""

import math
from functools import partial
from itertools import islice

import pytest
import torch

import serving
from megatron_ssm import generate, load, stream
from megatron_ssm.engine.text import write_byte_tokenizer
from serving import LENGTHS, MASK, attempt, mamba2, on_ranks, save_table, small_checkpoint
from serving import SMALL_VOCAB as VOCAB

__all__ = ["mamba2", "small_checkpoint"]
ids = partial(serving.ids, vocab=VOCAB)
worlds = pytest.mark.parametrize("world", (1, 2, pytest.param(4, marks=pytest.mark.full)))


def test_a_mask_in_sixteen_bits(mamba2):
    """bfloat16 has no 299: the sum of such a mask would be 300, and the prompt would begin with a padding id.

    Only the padding id is not in the prompt, and the repetition penalty makes it the most probable id by far, or by no
    means.
    """
    model, input_ids = load(mamba2[0], dtype=torch.float64), ids(1, 310) % (VOCAB - 1)
    input_ids[:, :11] = VOCAB - 1
    mask = (torch.arange(310) >= 11).long().unsqueeze(0)
    for penalty in (1e9, 1e-9):
        options = dict(max_new_tokens=1, repetition_penalty=penalty)
        alone = generate(model, input_ids[:, 11:], **options)
        for same in (mask, mask.bfloat16(), mask.bool()):
            assert torch.equal(generate(model, input_ids, same, **options), alone)


# Against transformers


def transformers_greedy(model, input_ids, steps):
    """(tokens, gap between the two largest logits), each (batch, steps)."""
    model.generation_config.eos_token_id = None
    out = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=steps, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.stack(out.logits, dim=1).topk(2).values
    return out.sequences[:, input_ids.shape[1] :], best[..., 0] - best[..., 1]


@worlds
def test_greedy_tokens_are_those_of_transformers(ranks, world, small_checkpoint):
    directory, reference = small_checkpoint
    tokens = on_ranks(
        ranks, world, directory, lambda model: generate(model, ids(2, 6), max_new_tokens=24).tolist(), torch.float32
    )
    expected, gap = transformers_greedy(reference, ids(2, 6), 24)
    for row, expected_row, gap_row in zip(tokens, expected, gap, strict=True):
        near_ties = (gap_row < 1e-3).nonzero().flatten().tolist()
        compared = near_ties[0] if near_ties else 24  # from there on, the texts may be different ones
        assert compared > 20
        assert row[:compared] == expected_row[:compared].tolist()


@worlds
def test_a_left_padded_row_is_greedily_continued_as_if_alone(ranks, world, small_checkpoint):
    batch = on_ranks(
        ranks, world, small_checkpoint[0], lambda m: generate(m, ids(4, 9), MASK, max_new_tokens=16).tolist()
    )
    alone = load(small_checkpoint[0])
    for row, prompt, length in zip(batch, ids(4, 9), LENGTHS, strict=True):
        assert row == generate(alone, prompt[None, -length:], max_new_tokens=16)[0].tolist()


# Where a row ends


def ended(rows, ends, pad):
    """What is left of `rows` when each stops after the first n of its tokens for which `ends(row[:n])`."""
    lengths = [next((n for n in range(1, len(row)) if ends(row[:n])), len(row)) for row in rows]
    return [row[:n] + [pad] * (max(lengths) - n) for row, n in zip(rows, lengths, strict=True)]


@worlds
def test_stop_tokens(ranks, world, mamba2):
    """A row ends with its stop token; with all rows ended, so do the columns. The filler need be no token."""

    def run(model):
        rows = generate(model, ids(3, 5), max_new_tokens=16).tolist()
        stops = [rows[0][3], rows[1][6], rows[2][2]]
        few = generate(model, ids(3, 5), max_new_tokens=16, stop_tokens=stops[:1], pad_token_id=-1).tolist()
        all_end = generate(model, ids(3, 5), max_new_tokens=16, stop_tokens=stops, pad_token_id=10**6).tolist()
        return rows, stops, few, all_end

    rows, stops, few, all_end = on_ranks(ranks, world, mamba2[0], run)
    assert few == ended(rows, lambda row: row[-1] == stops[0], -1)
    assert all_end == ended(rows, lambda row: row[-1] in stops, 10**6)
    assert len(few[0]) == 16 and -1 in few[0]
    assert len(all_end[0]) <= 7 and 10**6 in sum(all_end, [])


CIRCLE = "abcdé€f\n"


@pytest.fixture(scope="module")
def circle(tmp_path_factory):
    """A model of bytes that goes round CIRCLE for ever, with its tokenizer."""
    directory = tmp_path_factory.mktemp("circle")
    table = torch.zeros(257, 257)
    data = CIRCLE.encode()
    for byte, following in zip(data, data[1:] + data[:1], strict=True):
        table[byte, following] = 5.0
    save_table(directory, table, hidden_size=288, head_dim=72)
    write_byte_tokenizer(directory)
    return directory


@worlds
@pytest.mark.parametrize(
    "stops,tokens",
    [(("dé€",), b""), (("\n", "é€f"), b""), ("€", b""), (("bcdx", "zz"), b"z"), (("€",), b"d")],
    ids=repr,
)
def test_stop_strings(ranks, world, circle, stops, tokens):
    """Their characters, and those characters' bytes, come in several tokens; what was not generated does not count."""

    def run(model):
        prompts = torch.tensor([list(b"..ab"), list(b".bcd"), list("\né".encode() + b"d")])
        return generate(
            model, prompts, max_new_tokens=20, stop_tokens=tokens, stop_strings=stops, pad_token_id=-1
        ).tolist()

    def ends(row):
        text = bytes(row).decode("utf-8", "ignore")
        return row[-1] in tokens or any(stop in text for stop in ([stops] if isinstance(stops, str) else stops))

    data = CIRCLE.encode() * 4
    rows = [list(data[data.index(byte) + 1 :][:20]) for byte in b"bdd"]
    assert on_ranks(ranks, world, circle, run) == ended(rows, ends, -1)


@worlds
@pytest.mark.parametrize("stops", ("<|endoftext|>", ("zz", "<|endoftext|>")))
def test_a_stop_string_that_is_the_name_of_a_special_token(ranks, world, tmp_path, stops):
    """A row ends with this token, which is not in its text."""
    table = torch.zeros(257, 257)
    for token, following in ((b"a"[0], b"b"[0]), (b"b"[0], 256), (256, b"c"[0])):
        table[token, following] = 5.0
    save_table(tmp_path, table, hidden_size=288, head_dim=72)
    write_byte_tokenizer(tmp_path)

    def run(model):
        return generate(model, torch.tensor([list(b".a")]), max_new_tokens=6, stop_strings=stops).tolist()

    assert on_ranks(ranks, world, tmp_path, run) == [[b"b"[0], 256]]


@worlds
def test_min_new_tokens(ranks, world, mamba2):
    """None of the first is a stop token: they are the next best. What a stop string ends, ends."""

    def run(model):
        rows = generate(model, ids(3, 5), max_new_tokens=8).tolist()
        stops = sorted({row[0] for row in rows})
        options = dict(max_new_tokens=8, stop_tokens=stops, pad_token_id=-1)
        return stops, [generate(model, ids(3, 5), min_new_tokens=n, **options).tolist() for n in (0, 3, 8, 100)]

    stops, (none, three, eight, hundred) = on_ranks(ranks, world, mamba2[0], run)
    assert [len(row) for row in none] == [1] * 3
    assert all(not set(row[:3]) & set(stops) for row in three) and any(-1 in row or row[-1] in stops for row in three)
    assert eight == hundred and not set(sum(eight, [])) & set(stops)
    assert [row[:3] for row in eight] == [row[:3] for row in three]


@worlds
def test_one_stop_token_needs_no_list(ranks, world, mamba2):
    def run(model):
        stop = int(generate(model, ids(1, 5), max_new_tokens=3)[0, -1])
        return [generate(model, ids(1, 5), max_new_tokens=9, stop_tokens=s).tolist() for s in (stop, [stop], {stop})]

    one, listed, gathered = on_ranks(ranks, world, mamba2[0], run)
    assert one == listed == gathered and len(one[0]) <= 3


@worlds
def test_max_new_tokens_and_streaming(ranks, world, mamba2):
    def run(model):
        columns = stream(model, ids(2, 7), max_new_tokens=9)
        three = torch.stack(list(islice(columns, 3)), dim=1)
        return [generate(model, ids(2, 7), max_new_tokens=n).tolist() for n in (1, 9)], three.tolist()

    (one, nine), three = on_ranks(ranks, world, mamba2[0], run)
    assert [len(row) for row in nine] == [9, 9]
    assert one == [row[:1] for row in nine] and three == [row[:3] for row in nine]


# Errors


BAD = {
    "at least one token": dict(input_ids=torch.zeros(1, 0, dtype=torch.long)),
    f"token id {VOCAB} is outside the vocabulary of {VOCAB}": dict(input_ids=torch.tensor([[1, VOCAB]])),
    "token id -1 is outside": dict(input_ids=torch.tensor([[-1, 1]])),
    "not shaped like input_ids": dict(attention_mask=torch.ones(2, 5)),
    "zeros only on the left": dict(attention_mask=torch.tensor([[1, 0, 1], [1, 1, 1]])),
    "row 1 of attention_mask has no token": dict(attention_mask=torch.tensor([[0, 1, 1], [0, 0, 0]])),
    "temperature=-1 must be": dict(temperature=-1),
    "temperature=nan must be": dict(temperature=math.nan),
    "temperature=inf must be": dict(temperature=math.inf),
    "top_k=0 must be": dict(top_k=0),
    "top_p=0 must be": dict(top_p=0),
    "top_p=1.01 must be": dict(top_p=1.01),
    "top_p=nan must be": dict(top_p=math.nan),
    "repetition_penalty=0 must be": dict(repetition_penalty=0),
    "repetition_penalty=inf must be": dict(repetition_penalty=math.inf),
    "frequency_penalty=nan must be": dict(frequency_penalty=math.nan),
    "presence_penalty=inf must be": dict(presence_penalty=math.inf),
    "min_p=1.5 must be": dict(min_p=1.5),
    "max_new_tokens=0 must be": dict(max_new_tokens=0),
    f"seed={2**64} ": dict(seed=2**64),
    f"seed={2**64 - 1} and those of the 2 rows": dict(seed=2**64 - 1),
    f"seed={-(2**63) - 1} ": dict(seed=-(2**63) - 1),
    "stop string is empty": dict(stop_strings=["a", ""]),
}


@worlds
def test_errors_are_value_errors_on_every_rank(ranks, world, circle, mamba2):
    """Raised by the call, before the first column is drawn; and the ranks are still in step afterwards."""
    good = dict(input_ids=ids(2, 3), max_new_tokens=2, temperature=1.0, seed=0)

    def run(model):
        model.directory = circle  # for a tokenizer
        answers = [attempt(stream, model, **good | changes) for changes in BAD.values()]
        return answers, generate(model, ids(2, 3), max_new_tokens=3).tolist()

    answers, tokens = on_ranks(ranks, world, mamba2[0], run)
    answers = zip(BAD, answers, strict=True)
    assert [(e, a) for e, a in answers if a is None or a[0] != "ValueError" or e not in a[1]] == []
    expected, gap = transformers_greedy(mamba2[1], ids(2, 3), 3)
    assert gap.min() > 1e-3 and tokens == expected.tolist()


def test_stop_strings_need_a_tokenizer(mamba2):
    model = load(mamba2[0])
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        generate(model, ids(2, 3), stop_strings=["a"])
    model.directory = None
    with pytest.raises(ValueError, match="tokenizer.json"):
        generate(model, ids(2, 3), stop_strings=["a"])
