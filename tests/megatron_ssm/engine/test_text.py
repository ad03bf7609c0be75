"""Tokenizer files, streamed text. Oracles: transformers' AutoTokenizer, one-shot decoding, Python's UTF-8 decoder."""

import json
import re
import subprocess
import sys
from os.path import commonprefix
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from megatron_ssm.engine.text import (
    TextStream,
    find_stop,
    load_tokenizer,
    most_characters,
    stop_tokens,
    write_byte_tokenizer,
)

settings.register_profile("patient", deadline=None)  # a loaded machine is no error
settings.load_profile("patient")
LINES = [
    "the state space model reads the text",
    "a model of the world, the world of a model",
    "naïve café — 語",
    "    x = 1",
]
UNICODE = st.text(st.characters(codec="utf-8"), max_size=40)
# Few characters, of one to four bytes, so that stop strings occur, begin without ending, and overlap.
SMALL = st.text("ab é€😀", max_size=30)
STOPS = st.lists(st.text("ab é€😀", min_size=1, max_size=4), max_size=3)
END = 256
# Between them they complete every incomplete character, and one (A) completes none.
CONTINUATIONS = [b"A", *(first + rest for first in (b"\x80", b"\x90", b"\xa0") for rest in (b"", b"\x80", b"\x80\x80"))]


@pytest.fixture(scope="module")
def byte_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bytes") / "a new directory"
    write_byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def byte_tokenizer(byte_directory):
    return load_tokenizer(byte_directory)


@pytest.fixture(scope="module")
def byte_level_bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    tokenizer.add_tokens(["   ", "語"])  # added tokens stand for themselves, as the runs of spaces of GPT-NeoX do
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


@pytest.fixture(scope="module")
def metaspace():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(LINES, trainers.UnigramTrainer(vocab_size=60, special_tokens=["<s>"]))
    return tokenizer


@pytest.fixture(scope="module")
def byte_fallback():
    """Llama's form: metaspace BPE, bytes as <0xE2> tokens, one leading space stripped."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(LINES[:2], trainers.BpeTrainer(vocab_size=60))
    model = json.loads(trained.to_str())["model"]
    vocabulary = dict(model["vocab"])
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def word_piece():
    tokens = ["[UNK]", "state", "space", "##s", "##less", ".", ",", "'", "s", "n't", "do"]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def streamed(tokenizer, ids, **options):
    stream = TextStream(tokenizer, **options)
    return "".join(stream.push(token_id) for token_id in ids) + stream.finish()


# Files


@given(UNICODE.filter(lambda text: "<|endoftext|>" not in text))
def test_byte_tokenizer_is_utf8(byte_tokenizer, text):
    ids = byte_tokenizer.encode(text).ids
    assert bytes(ids) == text.encode()
    assert byte_tokenizer.decode(ids) == text


@pytest.mark.parametrize("model_type", [None, "mamba", "mamba2", "zamba2"])
def test_transformers_loads_the_byte_tokenizer(tmp_path, model_type):
    write_byte_tokenizer(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 257
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == END
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000)]))
    for text in ("", " naïve  café\r\n\t— 語 😀 don 't .", "\u2028\x85\x00\ufeff\ufffd", everything):
        ids = tokenizer(text)["input_ids"]
        assert bytes(ids) == text.encode()
        assert tokenizer.decode(ids) == text
    assert tokenizer("a<|endoftext|>b")["input_ids"] == [97, END, 98]
    assert tokenizer.decode([97, END], skip_special_tokens=True) == "a"


def test_generation_config(byte_directory):
    written = json.loads((byte_directory / "generation_config.json").read_text())
    assert written == {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END}


@pytest.mark.parametrize(
    "eos_token, generation, expected",
    [
        ("<|endoftext|>", {"eos_token_id": [7, 8]}, (7, 8, END)),
        ({"content": "<|endoftext|>", "special": True}, {}, (5, END)),
        ("<|endoftext|>", {"eos_token_id": END}, (END,)),
        ("<|none|>", {}, (5,)),
        (None, {"eos_token_id": 7}, (7,)),
    ],
)
def test_the_ids_that_end_a_text(tmp_path, eos_token, generation, expected):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    config, tokenizer = SimpleNamespace(eos_token_ids=(5,)), load_tokenizer(tmp_path)
    assert stop_tokens(tmp_path, config, tokenizer) == expected
    for name in ("tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).unlink()
    assert stop_tokens(tmp_path, config, tokenizer) == (5,)


def test_files_are_replaced_and_nothing_else_is_left(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    write_byte_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path).get_vocab_size() == 257
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_texts_are_neither_truncated_nor_padded(tmp_path, byte_directory):
    """Whatever tokenizer.json says of it, as in transformers."""
    text, told = "four", Tokenizer.from_file(str(byte_directory / "tokenizer.json"))
    told.enable_truncation(2)
    told.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(text).ids == list(text.encode())
    told.no_truncation()
    told.enable_padding(length=9)
    told.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(text).ids == list(text.encode())


@given(text=UNICODE | st.text("a\u0323\u0302\u1ea5=<end>", max_size=60))
@pytest.mark.parametrize("normalizer", (None, normalizers.NFC()))
def test_the_most_characters_of_so_many_tokens(byte_level_bpe, normalizer, text):
    tokenizer = Tokenizer.from_str(byte_level_bpe.to_str())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    assert len(text) <= most_characters(tokenizer, len(tokenizer.encode(text).ids))


def test_tokens_that_may_stand_for_any_number_of_characters(byte_level_bpe, metaspace, byte_fallback, word_piece):
    greedy, changed, poor = (Tokenizer.from_str(byte_level_bpe.to_str()) for _ in range(3))
    greedy.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    changed.normalizer = normalizers.Strip()
    poor.model = models.BPE({"a": 0}, [])
    for tokenizer in (greedy, changed, poor, metaspace, byte_fallback, word_piece):
        assert most_characters(tokenizer, 5) is None


def test_missing_tokenizer_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"model": {"type": "Nope"}}'])
def test_unreadable_tokenizer_names_the_file(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(error.value) and "\n" not in str(error.value)


def test_importing_text_imports_neither_torch_nor_tokenizers():
    check = "import sys, megatron_ssm.engine.text; sys.exit(bool({'torch', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


# Streams


@given(st.binary(max_size=40))
def test_any_bytes(byte_tokenizer, data):
    text = streamed(byte_tokenizer, data)
    assert text == data.decode("utf-8", "replace")
    assert text == byte_tokenizer.decode(list(data))


# Python's decoder also holds back the first two bytes of a surrogate (ED A0..BF), which is no character, for one byte.
@given(st.binary(max_size=6).filter(lambda data: not re.search(b"\xed[\xa0-\xbf]", data)) | UNICODE.map(str.encode))
def test_exactly_the_certain_text_comes_out(byte_tokenizer, data):
    stream, text = TextStream(byte_tokenizer), ""
    for end, byte in enumerate(data, start=1):
        text += stream.push(byte)
        assert text == commonprefix([(data[:end] + rest).decode("utf-8", "replace") for rest in CONTINUATIONS])


@given(st.data())
def test_byte_level_bpe_equals_one_shot_decode(byte_level_bpe, data):
    size = byte_level_bpe.get_vocab_size()
    encoded = UNICODE.map(lambda text: byte_level_bpe.encode(text).ids)
    ids = data.draw(encoded | st.lists(st.integers(0, size - 1), max_size=20))
    assert streamed(byte_level_bpe, ids) == byte_level_bpe.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["metaspace", "word_piece"])
@given(data=st.data())
def test_decoders_that_look_at_the_neighbour(request, name, data):
    tokenizer = request.getfixturevalue(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=20))
    stream, text = TextStream(tokenizer), ""
    for end, token_id in enumerate(ids, start=1):
        text += stream.push(token_id)
        assert text == tokenizer.decode(ids[:end], skip_special_tokens=True)  # nothing held back
    assert stream.finish() == ""


@given(texts=st.lists(st.sampled_from(LINES) | UNICODE | SMALL, max_size=3))
def test_byte_fallback_equals_one_shot_decode(byte_fallback, texts):
    ids = [token_id for text in texts for token_id in byte_fallback.encode(text).ids]
    assert streamed(byte_fallback, ids) == byte_fallback.decode(ids)


@pytest.mark.parametrize("name", ["metaspace", "word_piece", "byte_level_bpe"])
@given(data=st.data())
def test_the_text_after_a_prompt(request, name, data):
    """What the prompt and the new tokens decode to, without what the prompt alone does: as in transformers' pipelines."""
    tokenizer = request.getfixturevalue(name)
    known = st.integers(0, tokenizer.get_vocab_size() - 1).filter(lambda i: "\ufffd" not in tokenizer.decode([i]))
    prompt, new = data.draw(st.lists(known, max_size=9)), data.draw(st.lists(known, max_size=9))
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    assert streamed(tokenizer, new, prompt=prompt) == tokenizer.decode(prompt + new)[len(before) :]


@given(st.lists(st.sampled_from(LINES), min_size=2, max_size=2), st.data())
def test_the_text_after_a_prompt_with_byte_fallback(byte_fallback, texts, data):
    ids = [token_id for text in texts for token_id in byte_fallback.encode(text).ids]
    splits = [n for n in range(len(ids) + 1) if "\ufffd" not in byte_fallback.decode(ids[:n])]
    split = data.draw(st.sampled_from(splits))
    before, whole = byte_fallback.decode(ids[:split]), byte_fallback.decode(ids)
    assert streamed(byte_fallback, ids[split:], prompt=ids[:split]) == whole[len(before) :]


def test_byte_fallback_between_text(byte_fallback):
    ids = byte_fallback.encode("the €").ids
    word, euro = ids[:-3], ids[-3:]
    assert (byte_fallback.decode(word), byte_fallback.decode(euro)) == ("the ", "€")
    assert streamed(byte_fallback, word + euro[:2] + word) == "the � the "
    stream = TextStream(byte_fallback)
    assert [stream.push(token_id) for token_id in euro] == ["", "", "€"]


def test_cost_of_a_push_does_not_grow(metaspace):
    class Counting:
        longest = 0

        def __getattr__(self, name):
            return getattr(metaspace, name)

        def decode(self, ids):
            self.longest = max(self.longest, len(ids))
            return metaspace.decode(ids)

    counting = Counting()
    stream = TextStream(counting, stop_strings=["the end"])
    for token_id in metaspace.encode(" ".join(LINES) * 20).ids:
        stream.push(token_id)
        assert counting.longest <= 2 and len(stream._held) < len("the end")


def test_unknown_ids_print_at_once(byte_tokenizer, metaspace):
    stream = TextStream(byte_tokenizer)
    assert [stream.push(i) for i in (65, 5000, 5001, 0xE2, 5000, 0x82, 66)] == ["A", "�", "�", "", "��", "�", "B"]
    words = metaspace.encode("the world").ids
    assert streamed(metaspace, [*words, 5000, *words]) == "the world� the world"


def test_special_tokens_are_not_printed(byte_tokenizer):
    assert streamed(byte_tokenizer, [65, END, 66, 5000, 67], special_ids=[5000]) == "ABC"
    assert streamed(byte_tokenizer, [0xE2, END, 0x82, 0xAC]) == "€" == byte_tokenizer.decode([0xE2, END, 0x82, 0xAC])


# Stop strings


def first_completed(text, stops):
    """By definition: the first end at which a stop string is complete, and where the longest of these begins."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end - max(map(len, complete))
    return None


@given(SMALL, STOPS)
def test_find_stop(text, stops):
    assert find_stop(text, stops) == first_completed(text, stops)


@given(SMALL, STOPS)
def test_stop_strings(byte_tokenizer, text, stops):
    data, stream, out = text.encode(), TextStream(byte_tokenizer, stops), ""
    for end, byte in enumerate(data, start=1):
        out += stream.push(byte)
        so_far = data[:end].decode("utf-8", "ignore")
        cut = first_completed(so_far, stops)
        assert stream.stopped == (cut is not None)
        if cut is None:
            suffixes = (so_far[start:] for start in range(len(so_far) + 1))
            held = next(s for s in suffixes if s == "" or any(stop.startswith(s) for stop in stops))
            cut = len(so_far) - len(held)
        assert out == so_far[:cut]
    cut = first_completed(text, stops)
    assert out + stream.finish() == text[:cut]


@given(st.lists(st.sampled_from(LINES), max_size=3).map(" ".join), STOPS | st.just(["world,", "the text", "odel of"]))
def test_stop_strings_across_tokens(byte_level_bpe, text, stops):
    ids = byte_level_bpe.encode(text).ids
    assert streamed(byte_level_bpe, ids, stop_strings=stops) == text[: find_stop(text, stops)]


def test_nothing_follows_a_stop_string(byte_tokenizer):
    stream = TextStream(byte_tokenizer, "stop")
    assert [stream.push(byte) for byte in b"a stop"] == ["a", " ", "", "", "", ""]
    assert stream.stopped and stream.push(65) == "" and stream.finish() == ""


def test_stop_string_completed_by_the_end(byte_tokenizer):
    stream = TextStream(byte_tokenizer, ["a�"])
    assert [stream.push(byte) for byte in b"xa\xe2"] == ["x", "", ""]
    assert stream.finish() == "" and stream.stopped


def test_stop_string_that_is_the_name_of_a_special_token(byte_tokenizer):
    """It ends the text although special tokens are not printed; what was held back comes out."""
    name = "<|endoftext|>"
    stream = TextStream(byte_tokenizer, ["abc", name])
    assert [stream.push(token_id) for token_id in (*b"xab", END)] == ["x", "", "", "ab"]
    assert stream.stopped and stream.push(65) == stream.push(END) == stream.finish() == ""
    assert streamed(byte_tokenizer, [65, 0xE2, END, 66], stop_strings=name) == "A\ufffd"
    assert streamed(byte_tokenizer, [65, END, 66], stop_strings=[name + "B"]) == "AB"


def test_empty_stop_string_is_refused(byte_tokenizer):
    with pytest.raises(ValueError, match="stop string is empty"):
        TextStream(byte_tokenizer, ["a", ""])
