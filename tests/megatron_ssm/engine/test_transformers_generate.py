"""`model.generate`. Oracle: transformers' generate with the same arguments, both in float64."""

import json
import random
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from chosen import by_default
from transformers import AutoModelForCausalLM, GenerationConfig

from hf import edit_config, save_hf
from megatron_ssm import generate, load
from serving import FAMILIES, attempt, families, ids, on_ranks
from serving import checkpoint as byte_checkpoint

WORDS = 7  # so few that beams meet, end and repeat themselves; 4 ranks hold 2, 2, 2 and 1
LENGTH = 8  # of the prompts
pytestmark = pytest.mark.filterwarnings("ignore:.*(min_new_tokens|min_length|do_sample|generation_config)")
_directory = tempfile.TemporaryDirectory(prefix="checkpoints-")


@cache
def checkpoint(family):
    """The directory of a model of seven words whose eos is 2."""
    directory = Path(_directory.name) / family
    save_hf(directory, family, vocab_size=WORDS, **FAMILIES[family])
    return directory


@cache
def reference(directory):
    """transformers' model in `directory`."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()


def words(batch, seed=3):
    return ids(batch, LENGTH, seed=seed) % WORDS


def transformers(directory, input_ids, attention_mask=None, **arguments):
    """What transformers' generate gives, as a list."""
    return reference(directory).generate(input_ids, attention_mask=attention_mask, **arguments).tolist()


# Random arguments. The seeds of the short run are those where a beam search with a fault gives other tokens: one that
# keeps too few continuations, counts padding as met, stops late, ends beams from beyond the best, ...

TELLING = (3, 20, 81, 98, 106, 116, 25, 27)


def random_arguments(draw):
    options = draw.choice((dict(max_new_tokens=draw.randint(1, 12)), dict(max_length=LENGTH + draw.randint(1, 12))))
    if draw.random() < 0.75:
        beams = draw.randint(2, 5)
        options |= dict(num_beams=beams, num_return_sequences=draw.randint(1, beams))
        options |= dict(
            length_penalty=draw.choice((-1.0, 0.0, 1.0, 2.0)), early_stopping=draw.choice((True, False, "never"))
        )
    if draw.random() < 0.4:
        options["repetition_penalty"] = draw.choice((0.5, 1.3))
    if draw.random() < 0.4:
        options |= draw.choice((dict(min_new_tokens=draw.randint(1, 6)), dict(min_length=LENGTH + draw.randint(-2, 5))))
    if draw.random() < 0.8:
        options["eos_token_id"] = draw.choice(
            (draw.randrange(WORDS), draw.sample(range(WORDS), draw.choice((1, 2, 4, 5))))
        )
    if draw.random() < 0.7:
        options["pad_token_id"] = draw.choice((0, 1, WORDS - 1))
    return options


@cache
def random_case(family, seed):
    """(prompts, mask, arguments, what transformers gives)."""
    draw = random.Random(seed)
    options, batch = random_arguments(draw), draw.randint(1, 4)
    lengths = torch.tensor([draw.choice((LENGTH, draw.randint(1, LENGTH))) for _ in range(batch)])
    mask = (torch.arange(LENGTH) >= LENGTH - lengths.unsqueeze(1)).long()
    prompts = words(batch, seed).where(mask.bool(), options.get("pad_token_id", 5))
    return prompts, mask, options, transformers(checkpoint(family), prompts, mask, do_sample=False, **options)


def check_cases(ranks, world, family, seeds, **options_of_ranks):
    cases = [random_case(family, seed) for seed in seeds]

    def run(model):
        return [model.generate(ids, attention_mask=mask, **options).tolist() for ids, mask, options, _ in cases]

    results = on_ranks(ranks, world, checkpoint(family), run, **options_of_ranks)
    for (_, _, options, expected), found in zip(cases, results, strict=True):
        assert found == expected, options


@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
@pytest.mark.parametrize("family", by_default(("mamba", "zamba2"), FAMILIES))
def test_random_arguments(ranks, world, family):
    check_cases(ranks, world, family, TELLING)


@pytest.mark.full
@pytest.mark.parametrize("world", (1, 2, 4))
@families
def test_many_random_arguments(ranks, world, family):
    check_cases(ranks, world, family, range(100), timeout=300)


@pytest.mark.full
@pytest.mark.parametrize("world", (1, 2, 4))
@pytest.mark.parametrize("num_beams", (1, 4))
@families
def test_a_larger_vocabulary(ranks, world, family, num_beams):
    options = dict(max_new_tokens=24, num_beams=num_beams, num_return_sequences=num_beams, eos_token_id=None)
    expected = transformers(byte_checkpoint(family), ids(2, 9), torch.ones(2, 9), **options)
    found = on_ranks(ranks, world, byte_checkpoint(family), lambda model: model.generate(ids(2, 9), **options).tolist())
    assert found == expected


# Defaults


DEFAULTS = [
    dict(),
    dict(num_beams=3),
    dict(eos_token_id=None),
    dict(temperature=0.3, top_k=1, do_sample=False),
    dict(min_new_tokens=25),
    dict(min_new_tokens=0, min_length=20, eos_token_id=[0, 1, 2, 3]),
    dict(min_length=20, eos_token_id=[0, 1, 2, 3]),
    dict(use_cache=True, return_dict_in_generate=False, num_beam_groups=1, streamer=None),
]


@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
def test_defaults(ranks, world):
    """20 new tokens, the checkpoint's eos: those of config.json where no generation_config.json says otherwise."""
    directory, prompts = checkpoint("zamba2"), words(3)
    expected = [transformers(directory, prompts, torch.ones_like(prompts), **options) for options in DEFAULTS]
    found = on_ranks(
        ranks, world, directory, lambda model: [model.generate(prompts, **options).tolist() for options in DEFAULTS]
    )
    assert found == expected
    assert len(expected[2][0]) == LENGTH + 20 and any(2 in row[LENGTH:-1] for row in expected[0])


@pytest.mark.parametrize(
    "written",
    [
        dict(eos_token_id=[3, 4], pad_token_id=6, max_new_tokens=9),
        dict(num_beams=3, length_penalty=0.0, max_length=15, eos_token_id=1),
        dict(temperature=0.4, top_p=0.9, bos_token_id=1, use_cache=False, transformers_version="4.0.0"),
    ],
    ids=str,
)
def test_the_checkpoints_generation_config(tmp_path, written):
    """And what overrules it: a GenerationConfig, a dictionary, arguments."""
    directory = shutil.copytree(checkpoint("mamba2"), tmp_path / "copy")
    (directory / "generation_config.json").write_text(json.dumps(written))
    model, prompts = load(directory, dtype=torch.float64), words(3)
    mask = torch.ones_like(prompts)
    assert model.generate(prompts, attention_mask=mask).tolist() == transformers(directory, prompts, mask)
    given = dict(max_new_tokens=4, eos_token_id=0, num_beams=2)
    expected = transformers(directory, prompts, mask, generation_config=GenerationConfig(**given))
    for config in (GenerationConfig(**given), given):
        assert model.generate(prompts, attention_mask=mask, generation_config=config).tolist() == expected
    overruled = model.generate(prompts, GenerationConfig(**given), attention_mask=mask, max_new_tokens=6, num_beams=1)
    overruling = dict(given, max_new_tokens=6, num_beams=1)
    assert overruled.tolist() == transformers(directory, prompts, mask, **overruling)


def test_a_checkpoint_without_a_generation_config(tmp_path):
    directory = shutil.copytree(checkpoint("mamba2"), tmp_path / "copy")
    (directory / "generation_config.json").unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | dict(eos_token_id=3, pad_token_id=4)))
    prompts = words(3)
    found = load(directory, dtype=torch.float64).generate(prompts, attention_mask=torch.ones_like(prompts))
    assert found.tolist() == transformers(directory, prompts, torch.ones_like(prompts))
    (directory / "generation_config.json").write_text("[1")
    with pytest.raises(ValueError, match="generation_config.json is not a JSON object"):
        load(directory).generate(prompts)


IN_CONFIG = [  # in config.json, where old checkpoints have them
    dict(num_beams=3, max_length=LENGTH + 7),
    dict(repetition_penalty=1.8, eos_token_id=None),
    dict(max_length=LENGTH + 3, eos_token_id=None, pad_token_id=0),
    dict(num_beams=4, num_return_sequences=2, length_penalty=-1.0, early_stopping=True, eos_token_id=[1, 5]),
    dict(min_length=LENGTH + 9, eos_token_id=[0, 1, 2, 3], no_repeat_ngram_size=0, top_k=3),
]


@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
def test_generation_fields_of_a_config_json(ranks, world, tmp_path):
    """Are honoured where there is no generation_config.json, and overruled by one."""
    directories, prompts = [tmp_path / str(i) for i in range(len(IN_CONFIG))], words(3)
    mask = torch.ones_like(prompts)
    for directory, fields in zip(directories, IN_CONFIG, strict=True):
        shutil.copytree(checkpoint("mamba2"), directory)
        (directory / "generation_config.json").unlink()
        edit_config(directory, **fields)
    expected = [transformers(directory, prompts, mask) for directory in directories]
    assert len({str(tokens) for tokens in expected}) == len(IN_CONFIG)
    overruled = shutil.copytree(directories[0], tmp_path / "overruled")
    shutil.copy(checkpoint("mamba2") / "generation_config.json", overruled)

    def run(rank):
        group, found = dist.group.WORLD, []
        for directory in (*directories, overruled):
            model = load(directory, group, dtype=torch.float64)
            found.append(model.generate(prompts, attention_mask=mask).tolist())
        return found

    for found in ranks(run, world):
        assert found == [*expected, transformers(overruled, prompts, mask)]


def test_what_a_config_json_asks_for_and_is_not_implemented(tmp_path):
    directory = shutil.copytree(checkpoint("mamba2"), tmp_path / "copy")
    (directory / "generation_config.json").unlink()
    edit_config(directory, no_repeat_ngram_size=2)
    with pytest.raises(ValueError, match="no_repeat_ngram_size=2 is not implemented"):
        load(directory).generate(words(1))


# Padding


@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize("family", by_default(("mamba", "zamba2"), FAMILIES))
def test_without_a_mask_padding_on_the_left_is_found(ranks, world, family):
    """Where the pad id is no eos; else it is a token like others."""
    directory, prompts = checkpoint(family), words(3, seed=14).clamp(min=1)
    prompts[1, :5], prompts[2, :1] = 0, 0
    common = dict(pad_token_id=0, max_new_tokens=6)
    cases = [dict(common, eos_token_id=eos, num_beams=beams) for eos in (None, 3, [3, 0]) for beams in (1, 3)]
    found = on_ranks(
        ranks, world, directory, lambda model: [model.generate(prompts, **options).tolist() for options in cases]
    )
    assert found == [transformers(directory, prompts, **options) for options in cases]
    assert found[0] != found[4] and found[1] != found[5]


@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize("family", by_default(("mamba", "zamba2"), FAMILIES))
def test_a_pad_id_that_is_no_padding(ranks, world, family):
    """Within a row, or at its right: with a mask that says so it is a token like others; without one it is an error."""
    directory, prompts = checkpoint(family), words(3, seed=14).clamp(min=1)
    inside, right = prompts.clone(), prompts.clone()
    inside[1, 4], right[2, -2:] = 0, 0
    common = dict(pad_token_id=0, max_new_tokens=6, eos_token_id=3)
    cases = [dict(common, num_beams=beams) for beams in (1, 3)]

    def run(model):
        found, refused = [], []
        for options in cases:
            for rows in (inside, right):
                refused.append(attempt(model.generate, rows, **options))
                found.append(model.generate(rows, attention_mask=torch.ones_like(rows), **options).tolist())
        return found, refused

    found, refused = on_ranks(ranks, world, directory, run)
    assert found == [
        transformers(directory, rows, torch.ones_like(rows), **options) for options in cases for rows in (inside, right)
    ]
    message = "pad_token_id=0 follows other tokens of a prompt: pass an attention_mask"
    assert refused == [("ValueError", message)] * 4


# Sampling


SAMPLING = [
    dict(),
    dict(temperature=2.0, top_k=0, min_p=0.2),
    dict(temperature=1.5, top_k=4, top_p=0.9, repetition_penalty=1.3, num_return_sequences=2),
]


@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
def test_samples_are_those_of_megatron_ssm_generate(ranks, world):
    """With transformers' default of top_k=50; equal seeds give equal tokens, and no row depends on another."""
    directory, prompts = byte_checkpoint("zamba"), ids(3, 6)
    alone = load(directory, dtype=torch.float64)

    def run(model):
        results = []
        for options in SAMPLING:
            common = dict(do_sample=True, max_new_tokens=8, eos_token_id=None, **options)
            seeded = [model.generate(prompts, seed=seed, **common).tolist() for seed in (1, 1, 2)]
            one = model.generate(prompts[:1], seed=1, **common).tolist()
            results.append((seeded, one, [model.generate(prompts, **common).tolist() for _ in range(2)]))
        return results

    for options, (seeded, one, unseeded) in zip(SAMPLING, on_ranks(ranks, world, directory, run), strict=True):
        assert seeded[0] == seeded[1] != seeded[2] and unseeded[0] != unseeded[1]
        rows = options.get("num_return_sequences", 1)
        assert one == seeded[0][:rows] and len(seeded[0]) == 3 * rows
        ours = {"temperature": 1.0, "top_k": 50, **options}
        ours = {name: value or None for name, value in ours.items() if name != "num_return_sequences"}
        repeated = prompts.repeat_interleave(rows, 0)
        expected = generate(alone, repeated, max_new_tokens=8, seed=1, **ours)
        assert seeded[0] == torch.cat([repeated, expected], dim=1).tolist()


def test_top_k_of_one_is_greedy():
    model, prompts = load(checkpoint("mamba"), dtype=torch.float64), words(3)
    assert model.generate(prompts, do_sample=True, top_k=1).equal(model.generate(prompts))


@pytest.mark.parametrize("world", (1, 2))
def test_stop_strings(ranks, world):
    """Each row ends with the token that completes one, as with transformers and the same tokenizer."""
    directory = byte_checkpoint("mamba2")

    def run(model):
        whole = model.generate(ids(3, 6), max_new_tokens=16, eos_token_id=None)
        stop = "\ufffd"  # for a byte that is no character
        return whole.tolist(), model.generate(
            ids(3, 6), max_new_tokens=16, eos_token_id=None, pad_token_id=0, stop_strings=[stop]
        ).tolist()

    whole, stopped = on_ranks(ranks, world, directory, run)
    assert whole != stopped
    for row, expected in zip(stopped, whole, strict=True):
        end = next((i for i in range(6, 22) if "\ufffd" in bytes(expected[6:i]).decode(errors="replace")), 22)
        assert row[: end - 1] == expected[: end - 1][: len(row)] and not any(row[end + 3 :])


def test_inputs_is_another_name_of_input_ids():
    directory, prompts = checkpoint("mamba2"), words(3)
    model, options = load(directory, dtype=torch.float64), dict(attention_mask=torch.ones_like(prompts), num_beams=2)
    expected = reference(directory).generate(inputs=prompts, **options).tolist()
    assert model.generate(inputs=prompts, **options).tolist() == expected
    assert model.generate(prompts, **options).tolist() == expected
    with pytest.raises(ValueError, match="generate has no argument inputs"):
        model.generate(prompts, inputs=prompts)


def test_empty_lists_of_what_is_not_implemented_are_nothing():
    directory, prompts = checkpoint("zamba"), words(2)
    model = load(directory, dtype=torch.float64)
    options = dict(attention_mask=torch.ones_like(prompts), logits_processor=[], stopping_criteria=[])
    for beams in (1, 3):
        expected = reference(directory).generate(prompts, num_beams=beams, **options).tolist()
        assert model.generate(prompts, num_beams=beams, **options).tolist() == expected


# Errors


REFUSED = {
    "generate has no argument max_new_token (did you mean max_new_tokens?)": dict(max_new_token=3),
    "generate has no argument colour": dict(colour="blue"),
    "num_beam_groups=2 is not implemented": dict(num_beam_groups=2),
    "no_repeat_ngram_size=2 is not implemented": dict(no_repeat_ngram_size=2),
    "bad_words_ids=[[1]] is not implemented": dict(bad_words_ids=[[1]]),
    "top_h=0.1 is not implemented": dict(generation_config=dict(top_h=0.1)),
    "penalty_alpha=0.6 is not implemented": dict(generation_config=GenerationConfig(penalty_alpha=0.6)),
    "return_dict_in_generate=True is not implemented": dict(return_dict_in_generate=True),
    "past_key_values=": dict(past_key_values=object()),
    "do_sample=True with num_beams > 1 is not implemented": dict(num_beams=2, do_sample=True),
    "stop_strings with num_beams > 1 are not implemented": dict(num_beams=2, stop_strings=["a"]),
    "num_beams=0 must be at least 1": dict(num_beams=0),
    "num_return_sequences=0 must be at least 1": dict(num_return_sequences=0),
    "num_return_sequences=4 needs do_sample=True or at least as many beams, not 3": dict(
        num_return_sequences=4, num_beams=3
    ),
    "num_return_sequences=2 needs do_sample=True": dict(num_return_sequences=2),
    "early_stopping='maybe' must be True, False or 'never'": dict(num_beams=2, early_stopping="maybe"),
    "max_length=8 leaves no room after a prompt of 8 tokens": dict(max_length=8),
    "max_length=3 leaves no room": dict(max_length=3, num_beams=2),
    "max_new_tokens=0 must be": dict(max_new_tokens=0),
    "max_new_tokens=0 must be ": dict(max_new_tokens=0, num_beams=2),
    "max_new_tokens=-1 must be": dict(max_new_tokens=-1, num_beams=2),
    "repetition_penalty=0.0 must be": dict(repetition_penalty=0.0),
    "repetition_penalty=0.0 must be ": dict(repetition_penalty=0.0, num_beams=2),
    "temperature=-1.0 must be": dict(do_sample=True, temperature=-1.0),
    "top_p=1.5 must be": dict(do_sample=True, top_p=1.5),
    "zeros only on the left": dict(attention_mask=torch.tensor([[1] * 7 + [0]] * 3)),
    "zeros only on the left of": dict(attention_mask=torch.tensor([[1] * 7 + [0]] * 3), num_beams=2),
    "token id 7 is outside the vocabulary of 7": dict(input_ids=torch.full((1, 8), 7), num_beams=2),
    "must be (batch, seq) with at least one token, not (8,)": dict(input_ids=words(1)[0]),
    "must be (batch, seq) with at least one token, not (2, 0)": dict(input_ids=words(2)[:, :0]),
    "logits_processor=[1] is not implemented": dict(logits_processor=[1]),
    "has no token": dict(input_ids=torch.zeros(2, 8, dtype=torch.long), pad_token_id=0),
}


@pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.full), 2))
def test_what_is_refused(ranks, world):
    """By one ValueError on every rank, which are still in step afterwards."""

    def run(model):
        answers = [attempt(model.generate, **{"input_ids": words(3), **options}) for options in REFUSED.values()]
        return answers, model.generate(words(2), num_beams=2).tolist()

    answers, after = on_ranks(ranks, world, checkpoint("zamba2"), run)
    wrong = [
        (expected, answer)
        for expected, answer in zip(REFUSED, answers, strict=True)
        if answer is None or answer[0] != "ValueError" or expected.strip() not in answer[1] or "\n" in answer[1]
    ]
    assert wrong == []
    assert after == transformers(checkpoint("zamba2"), words(2), torch.ones(2, LENGTH), num_beams=2)


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.full)))
def test_beams_that_do_not_fit_into_the_memory_of_one_rank(ranks, world):
    """All ranks raise the error, instead of waiting for that one, and go on."""
    directory = checkpoint("zamba2")

    def run(rank):
        model = load(directory, dist.group.WORLD, dtype=torch.float64)

        def no_memory(*_):
            raise MemoryError("no memory")

        if rank == world - 1:
            model.new_cache = no_memory
        error = attempt(model.generate, words(2), num_beams=2, max_new_tokens=4)
        vars(model).pop("new_cache", None)
        return error, model.generate(words(2), num_beams=2, max_new_tokens=4).tolist()

    expected = transformers(directory, words(2), num_beams=2, max_new_tokens=4)
    for error, tokens in ranks(run, world, timeout=30):
        assert error == ("MemoryError", f"no memory (rank {world - 1})")
        assert tokens == expected
