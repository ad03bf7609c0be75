"""Generation. Oracles: transformers' generate and logits processors; a sampler of one row at a time, in float64."""

import math
from collections import Counter
from itertools import accumulate, islice

import pytest
import torch
import torch.distributed as dist
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf import hf_model, save_hf
from megatron_ssm import generate, load, stream
from megatron_ssm.text import write_byte_tokenizer

VOCAB = 61
SEED, STEPS = 11, 8
worlds = pytest.mark.parametrize("world", (1, 2, 4))


def ids(*shape):
    """Token ids drawn once and for all."""
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(3))


LENGTHS = torch.tensor([9, 4, 1, 6])
MASK = (torch.arange(9) >= 9 - LENGTHS[:, None]).long()  # zeros on the left; the ids there are any


@pytest.fixture(scope="module", params=["mamba", "mamba2"])
def checkpoint(request, tmp_path_factory):
    """(directory, the transformers model saved there)."""
    directory = tmp_path_factory.mktemp(request.param)
    return directory, save_hf(directory, request.param, vocab_size=VOCAB, num_hidden_layers=2)


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory):
    """As `checkpoint`, where the family makes no difference."""
    directory = tmp_path_factory.mktemp("mamba2")
    return directory, save_hf(directory, "mamba2", vocab_size=VOCAB, num_hidden_layers=2)


def on_ranks(ranks, world, directory, function, dtype=torch.float32):
    """function(model), with the model split over `world` ranks: the same on each of them."""
    first, *others = ranks(lambda rank: function(load(directory, dist.group.WORLD, dtype=dtype)), world)
    assert all(other == first for other in others)
    return first


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
def test_greedy_tokens_are_those_of_transformers(ranks, world, checkpoint):
    directory, reference = checkpoint
    tokens = on_ranks(ranks, world, directory, lambda model: generate(model, ids(2, 6), max_new_tokens=24).tolist())
    expected, gap = transformers_greedy(reference, ids(2, 6), 24)
    for row, expected_row, gap_row in zip(tokens, expected, gap, strict=True):
        near_ties = (gap_row < 1e-3).nonzero().flatten().tolist()
        compared = near_ties[0] if near_ties else 24  # from there on, the texts may be different ones
        assert compared > 20
        assert row[:compared] == expected_row[:compared].tolist()


# Against the naive sampler


def naive(model, prompt, steps, seed, temperature=0.0, top_k=None, top_p=None, repetition_penalty=1.0):
    """The tokens, each from the whole text so far read anew, and how far each choice was from another one.

    That is the distance of the uniform to the edges of its token, or of the token's probability to its neighbours'.
    """
    processors = [RepetitionPenaltyLogitsProcessor(repetition_penalty)]
    processors += [TemperatureLogitsWarper(temperature)] if temperature else []
    processors += [TopKLogitsWarper(top_k)] if top_k else []
    processors += [TopPLogitsWarper(top_p)] if top_p else []
    generator, text, tokens, margins = torch.Generator().manual_seed(seed), prompt[None], [], []
    for _ in range(steps):
        scores = model(text)[:, -1].double()
        for processor in processors:
            scores = processor(text, scores)
        p = scores[0].softmax(0).tolist()
        order = sorted((token for token in range(VOCAB) if p[token]), key=lambda token: (-p[token], token))
        drawn = torch.rand((), generator=generator, dtype=torch.float64).item() if temperature else 0.0
        edges = list(accumulate(p[token] for token in order))
        place = next(i for i, edge in enumerate(edges) if edge > drawn * edges[-1])
        token, neighbours = order[place], order[max(0, place - 1) : place] + order[place + 1 : place + 2]
        margins.append(min([abs(edge - drawn) for edge in edges] + [abs(p[n] / p[token] - 1) for n in neighbours]))
        tokens.append(token)
        text = torch.cat([text, torch.tensor([[token]])], dim=1)
    return tokens, margins


OPTIONS = {
    "greedy, penalty": dict(repetition_penalty=1.7),
    "temperature": dict(temperature=1.3),
    "top_k": dict(temperature=1.0, top_k=5),
    "top_k, more than a rank has": dict(temperature=2.0, top_k=40),
    "top_k, more than there are": dict(temperature=0.9, top_k=1000),
    "top_p": dict(temperature=1.5, top_p=0.8),
    "top_p, the first token": dict(temperature=1.0, top_p=1e-9),
    "top_p, all": dict(temperature=1.0, top_p=1.0),
    "everything": dict(temperature=1.1, top_k=30, top_p=0.9, repetition_penalty=1.4),
}


@pytest.fixture(scope="module")
def drawn(checkpoint):
    """{option: [(tokens, margins) of each row alone]}."""
    model = load(checkpoint[0], dtype=torch.float64)
    with torch.no_grad():
        return {
            name: [naive(model, ids(4, 9)[row, -n:], STEPS, SEED + row, **options) for row, n in enumerate(LENGTHS)]
            for name, options in OPTIONS.items()
        }


def sampled(model, names=OPTIONS):
    return {name: generate(model, ids(4, 9), MASK, STEPS, seed=SEED, **OPTIONS[name]).tolist() for name in names}


@worlds
def test_every_way_to_sample_is_that_of_the_naive_sampler(ranks, world, checkpoint, drawn):
    """A left-padded batch on several ranks in float64: each row exactly as if it were alone."""
    assert on_ranks(ranks, world, checkpoint[0], sampled, torch.float64) == {
        name: [tokens for tokens, _ in rows] for name, rows in drawn.items()
    }


@worlds
def test_in_single_precision_tokens_differ_only_at_a_boundary(ranks, world, checkpoint, drawn):
    names = ("temperature", "everything")
    tokens = on_ranks(ranks, world, checkpoint[0], lambda model: sampled(model, names))
    for name in names:
        for row, (expected, margins) in zip(tokens[name], drawn[name], strict=True):
            certain = next((i for i, margin in enumerate(margins) if margin < 1e-6), STEPS)
            assert certain > STEPS - 2
            assert row[:certain] == expected[:certain], name


@worlds
def test_a_left_padded_row_is_greedily_continued_as_if_alone(ranks, world, checkpoint):
    batch = on_ranks(ranks, world, checkpoint[0], lambda m: generate(m, ids(4, 9), MASK, max_new_tokens=16).tolist())
    alone = load(checkpoint[0])
    for row, prompt, length in zip(batch, ids(4, 9), LENGTHS, strict=True):
        assert row == generate(alone, prompt[None, -length:], max_new_tokens=16)[0].tolist()


# Seeds


@worlds
def test_seeds(ranks, world, mamba2):
    """Equal ones give equal tokens, different ones others; None is another one each time, the same on all ranks."""

    def sample(model):
        return [generate(model, ids(4, 7), max_new_tokens=4, temperature=2.0, seed=seed).tolist() for seed in seeds]

    seeds = (5, 5, 6, -5, 2**64 - 4, None, None)
    first, again, *others = on_ranks(ranks, world, mamba2[0], sample)
    assert again == first
    assert len({str(tokens) for tokens in (first, *others)}) == len(seeds) - 1


# Models whose logits are known: after token t, those of token u are table[t, u] times a constant


def save_table(directory, table, **changes):
    """One layer that adds nothing, one-hot embeddings and an untied head: the logits have one nonzero product each."""
    vocab = len(table)
    model = hf_model("mamba2", num_hidden_layers=1, vocab_size=vocab, tie_word_embeddings=False, **changes)
    with torch.no_grad():
        model.backbone.embeddings.weight.copy_(torch.eye(*model.backbone.embeddings.weight.shape))
        model.backbone.layers[0].mixer.out_proj.weight.zero_()
        model.backbone.norm_f.weight.fill_(model.config.hidden_size**-0.5)
        model.lm_head.weight[:, :vocab] = table.T
    model.save_pretrained(directory)
    return model


TIED = [{0, 1, 2, 3, 4}, {1, 3}, {3, 4}, {4}, {2, 4}]  # after t, these have logit -1 and the others -2
TIES = torch.tensor([[-1.0 if u in tied else -2.0 for u in range(5)] for tied in TIED])


@pytest.fixture(scope="module")
def ties(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ties")
    save_table(directory, TIES)
    return directory


@worlds
def test_the_lowest_id_wins_a_tie(ranks, world, ties):
    """Five ids over four ranks are 2, 2, 1 and none: those that lack ids must not win with what fills their slices."""

    def greedy(model):
        prompts = torch.arange(5)[:, None]
        first = generate(model, prompts, max_new_tokens=1)
        penalized = generate(model, prompts, max_new_tokens=1, repetition_penalty=3.0)
        return first.flatten().tolist(), penalized.flatten().tolist()

    first, penalized = on_ranks(ranks, world, ties, greedy)
    assert first == [min(tied) for tied in TIED]
    assert penalized == [min(tied - {t} or {0}) for t, tied in enumerate(TIED)]  # t itself then has -3 or -6


@worlds
@pytest.mark.parametrize("top_k", (1, 2, 3, 10))
def test_top_k_keeps_the_lowest_ids_of_a_tie(ranks, world, ties, top_k):
    def sample(model):
        prompts = torch.arange(5).repeat(100)[:, None]
        return generate(model, prompts, max_new_tokens=1, temperature=1.0, top_k=top_k, seed=0).view(100, 5).T.tolist()

    for t, tokens in enumerate(on_ranks(ranks, world, ties, sample)):
        assert set(tokens) == set(sorted(range(5), key=lambda u: (-TIES[t, u], u))[:top_k])


@pytest.mark.parametrize("options", [dict(), dict(top_k=6), dict(top_p=0.7), dict(top_k=12, top_p=0.8)], ids=str)
def test_frequencies_are_the_distribution(tmp_path, options):
    """4,000 rows draw one token each from a known distribution of 20: chi-square, with these seeds."""
    reference = save_table(tmp_path, torch.randn(20, 20, generator=torch.Generator().manual_seed(1)))
    prompt, rows = torch.tensor([[3]]), 4000
    scores = reference(prompt).logits[:, -1].detach().double() / 1.5
    scores = TopKLogitsWarper(options["top_k"])(prompt, scores) if "top_k" in options else scores
    scores = TopPLogitsWarper(options["top_p"])(prompt, scores) if "top_p" in options else scores
    expected = (scores[0].softmax(0) * rows).tolist()
    tokens = generate(load(tmp_path), prompt.expand(rows, 1), max_new_tokens=1, temperature=1.5, seed=100, **options)
    counts = Counter(tokens.flatten().tolist())
    survivors = {token for token in range(20) if expected[token]}
    assert set(counts) == survivors and min(expected[token] for token in survivors) > 5
    freedom = len(survivors) - 1
    assert sum((counts[t] - expected[t]) ** 2 / expected[t] for t in survivors) < freedom + 3 * math.sqrt(2 * freedom)


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
def test_max_new_tokens_and_streaming(ranks, world, mamba2):
    def run(model):
        columns = stream(model, ids(2, 7), max_new_tokens=9)
        three = torch.stack(list(islice(columns, 3)), dim=1)
        return [generate(model, ids(2, 7), max_new_tokens=n).tolist() for n in (1, 9)], three.tolist()

    (one, nine), three = on_ranks(ranks, world, mamba2[0], run)
    assert [len(row) for row in nine] == [9, 9]
    assert one == [row[:1] for row in nine] and three == [row[:3] for row in nine]


# What is sent


@worlds
@pytest.mark.parametrize(
    "options,numbers",
    [
        (dict(), 2),
        (dict(temperature=1.0, top_k=3, seed=0), 6),
        (dict(temperature=1.0, top_k=3, top_p=0.5, repetition_penalty=2.0, seed=0), 6),
        (dict(temperature=1.0, top_k=1000, seed=0), None),
        (dict(temperature=1.0, seed=0), None),
    ],
)
def test_what_a_token_gathers(ranks, world, mamba2, options, numbers):
    """A sequence: 2 numbers greedily, 2k with top-k, else (None) the slice; counted at the door of torch."""

    def run(model):
        sent = {"all_reduce": [], "all_gather": []}

        def counted(kind, index):
            inner = getattr(dist, kind)

            def call(*args, **kwargs):
                sent[kind].append(args[index].numel() * args[index].element_size())
                return inner(*args, **kwargs)

            setattr(dist, kind, call)  # this process is a rank, and ends with the test

        counted("all_reduce", 0)
        counted("all_gather", 1)
        generate(model, ids(3, 5), max_new_tokens=4, **options)
        return sent, dict(model.counter.calls), model.counter.nbytes

    sent, calls, nbytes = on_ranks(ranks, world, mamba2[0], run)
    numbers = numbers or math.ceil(VOCAB / world)
    assert sent["all_gather"] == ([] if world == 1 else [4 * 3 * numbers] * 4)
    assert {kind: len(sizes) for kind, sizes in sent.items() if sizes} == calls
    assert sum(sum(sizes) for sizes in sent.values()) == nbytes


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
    "max_new_tokens=0 must be": dict(max_new_tokens=0),
    f"seed={2**64} ": dict(seed=2**64),
    f"seed={2**64 - 1} and those of the 2 rows": dict(seed=2**64 - 1),
    f"seed={-(2**63) - 1} ": dict(seed=-(2**63) - 1),
    "stop string is empty": dict(stop_strings=["a", ""]),
}


@worlds
def test_errors_are_value_errors_on_every_rank(ranks, world, circle, mamba2):
    """And the ranks are still in step afterwards."""

    def attempt(model, **changes):
        try:
            generate(model, **{"input_ids": ids(2, 3), "max_new_tokens": 2, "temperature": 1.0, "seed": 0, **changes})
        except ValueError as error:
            return str(error)

    def run(model):
        model.directory = circle  # for a tokenizer
        messages = {expected: attempt(model, **changes) for expected, changes in BAD.items()}
        return messages, generate(model, ids(2, 3), max_new_tokens=3).tolist()

    messages, tokens = on_ranks(ranks, world, mamba2[0], run)
    assert [expected for expected, message in messages.items() if expected not in (message or "")] == []
    expected, gap = transformers_greedy(mamba2[1], ids(2, 3), 3)
    assert gap.min() > 1e-3 and tokens == expected.tolist()


def test_stop_strings_need_a_tokenizer(mamba2):
    model = load(mamba2[0])
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        generate(model, ids(2, 3), stop_strings=["a"])
    model.directory = None
    with pytest.raises(ValueError, match="tokenizer.json"):
        generate(model, ids(2, 3), stop_strings=["a"])
