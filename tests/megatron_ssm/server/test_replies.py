"""The texts of replies and the places of their tokens. Oracles: Python's own slices of the text, the
offsets that the tokenizer reports, and what it decodes.
"""

import json
import math
from os.path import commonprefix

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from megatron_ssm.engine.request_tokenizer import RequestTokenizer
from megatron_ssm.engine.text import load_tokenizer, write_byte_tokenizer
from megatron_ssm.server.chat_template import ChatTemplate
from megatron_ssm.server.offsets import prompt_offsets
from megatron_ssm.server.prepared_request import ServedModel, prepare_request
from megatron_ssm.server.replies import Replies
from megatron_ssm.server.request_models import CompletionRequest
from megatron_ssm.server.sequences import Update

END = 256


def served(directory, tokenizer=None):
    write_byte_tokenizer(directory)
    if tokenizer is not None:
        tokenizer.save(str(directory / "tokenizer.json"))
    return ServedModel("model", load_tokenizer(directory), 257, (END,), 100, ChatTemplate(directory))


def prepared(model, body):
    return prepare_request(CompletionRequest, json.dumps(body), "", model)


def completion(model, body, *parts, logprob=(-1.0, [])):
    """The choice of a whole reply to `body`, of which the tokens come in parts. logprob: of every token but the first."""
    request = prepared(model, body)
    replies, (sequence,) = Replies(request, model), request.sequences
    (ids,) = (ids for _, ids in request.prompts)
    pieces = [
        replies.add_update(
            Update(
                sequence, list(part), "length" if index == len(parts) - 1 else None, logprobs=[logprob] * len(part),
                prompt_logprobs=[] if index else [None, *[logprob] * (len(ids) - 1)],
            )
        )
        for index, part in enumerate(parts)
    ]  # fmt: skip
    for piece in pieces[1:]:
        pieces[0].extend(piece)
    return json.loads(replies.whole(pieces[:1]).to_json())["choices"][0]


@pytest.mark.parametrize(
    "prompt, parts, offsets",
    [
        ("\u00e9 a", [b"b"], [0, 0, 1, 2, 3]),
        ("a<|endoftext|>b", [b"c"], [0, 1, 14, 15]),
        ([97, END, 98], [b"c", b"d"], [0, 1, 14, 15, 16]),
        ("a", ["\u00e9".encode()[:1], "\u00e9b".encode()[1:]], [0, 1, 1, 2]),
        ("a", [[END, 98]], [0, 1, 1]),  # the special token is not in the text
        ("a", [[0xC3, 98, 99]], [0, 1, 2, 3]),  # the first byte is not valid, and becomes one character
    ],
)
def test_text_offsets(tmp_path, prompt, parts, offsets):
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 9, "ignore_eos": True}
    choice = completion(served(tmp_path), body, *parts)
    assert choice["logprobs"]["text_offset"] == offsets
    for place, name in zip(offsets, choice["logprobs"]["tokens"], strict=True):
        is_shown = not name.startswith("bytes:") and (name != "<|endoftext|>" or prompt != "a")
        assert choice["text"].startswith(name, place) or not is_shown


def llama_tokenizer():
    """One like Llama's: U+2581 stands for a space and is put before each text, and <s> before a prompt; bytes are <0xE9>."""
    special, bytes_of = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(128, 256)]
    names = [*special, *bytes_of, *"▁helotnda", "he", "lo", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("h", "e"), ("l", "o")]
    vocabulary = {name: token for token, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.mark.parametrize(
    "prompt", ("hello the", "hello</s>the end", "hello</s> the", "  the", "é</s>thé", " </s> </s>a")
)
def test_text_offsets_of_a_tokenizer_that_puts_spaces_before_texts(tmp_path, prompt):
    """The client's text lacks these spaces and <s>; the text that is made of ids has the spaces, as it begins with <s>."""
    model = served(tmp_path, llama_tokenizer())
    encoding, the = model.tokenizer.encode(prompt), model.tokenizer.token_to_id("▁the")
    begun = [model.tokenizer.decode(encoding.ids[:i], skip_special_tokens=False) for i in range(len(encoding))]
    for given in (prompt, encoding.ids):
        body = {"prompt": given, "echo": True, "logprobs": 1, "max_tokens": 9}
        choice = completion(model, body, [the])
        starts = [start for start, _ in encoding.offsets]
        if given != prompt:
            starts = [len(commonprefix([choice["text"], text])) for text in begun]
        assert choice["logprobs"]["text_offset"] == [*starts, len(choice["text"]) - len(" the")]


def test_text_offsets_of_ids_that_are_not_in_the_text(tmp_path):
    """The tokenizer lacks 200, and its decoder strips the space of the first word."""
    model = served(tmp_path, llama_tokenizer())
    the = model.tokenizer.token_to_id("▁the")
    body = {"prompt": [the, 200, the], "echo": True, "logprobs": 1, "max_tokens": 9}
    choice = completion(model, body, [the])
    assert choice["text"] == "the the the" and choice["logprobs"]["text_offset"] == [0, 3, 3, 7]


def test_the_likeliest_tokens_of_a_completion(tmp_path):
    """The token itself is among them, and of two with the same text the likelier one."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "▁c": 2, " c": 3}, unk_token="a"))
    model, likeliest = served(tmp_path, tokenizer), [(2, -0.5), (3, -1.5)]
    body = {"logprobs": 2, "max_tokens": 9, "echo": True}
    for token, own in ((1, {"b": -4.0}), (2, {}), (3, {})):
        value = dict(likeliest).get(token, -4.0)
        found = completion(model, {**body, "prompt": [0, token]}, [token], logprob=(value, likeliest))["logprobs"]
        assert found["top_logprobs"] == [None, *[{" c": -0.5, **own}] * 2]
        assert all(name in top for name, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True))


@pytest.mark.parametrize("ignore_eos", (True, False))
def test_the_engine_finds_stop_strings_in_the_text_of_the_reply(tmp_path, ignore_eos):
    """The end-of-text token is an ordinary one of the tokenizer, and a stop string goes over it."""
    tokenizer = Tokenizer(models.WordLevel({**{f"w{i} ": i for i in range(END)}, "end ": END}, unk_token="w0 "))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(" ", "merged_with_previous"), decoders.Fuse()
    body = {"prompt": [1], "stop": "w1 end w2", "max_tokens": 9, "ignore_eos": ignore_eos}
    model, tokens = served(tmp_path, tokenizer), [0, 1, END, 2, 3]
    (sequence,) = prepared(model, body).sequences
    options = sequence.options
    engine = RequestTokenizer(tmp_path, 257).text_stream(options.stop_strings, options.stop_tokens)
    text = "".join(map(engine.push, tokens)) + engine.finish()
    assert completion(model, body, tokens)["text"] == text == ("w0 " if ignore_eos else "w0 w1 w2 w3 ")


@pytest.mark.parametrize("stop, text", [("Par", " "), (" Paris", ""), ([], " Paris is")])
def test_the_first_word_keeps_its_space(tmp_path, stop, text):
    """With SentencePiece's tokens, whose decoder strips the space of a text's first word."""
    vocabulary = {"▁It": 0, "▁is": 1, "▁Paris": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    body = {"prompt": "It is", "stop": stop, "echo": True, "logprobs": 0, "max_tokens": 9}
    model = served(tmp_path, tokenizer)
    choice = completion(model, body, [2], [1])
    assert choice["text"] == "It is" + text and choice["logprobs"]["text_offset"] == [0, 2, 5, 11]
    assert completion(model, {**body, "echo": False}, [2, 1])["text"] == text
    engine = RequestTokenizer(tmp_path, 257).text_stream((stop,) if stop else (), (), [0, 1])
    assert engine.push(2) + engine.push(1) + engine.finish() == text and engine.stopped == bool(stop)


@pytest.mark.parametrize("order", ([0, 1, 2, 3], [3, 2, 1, 0]))
def test_cached_tokens_are_those_that_no_reply_needed_to_read(tmp_path, order):
    """Two replies to each of two prompts; each counts once."""
    model = served(tmp_path)
    request = prepared(model, {"prompt": ["abcdef", "ghijkl"], "n": 2, "max_tokens": 9})
    replies, reused = Replies(request, model), [5, 2, 4, 6]
    for index in order:
        replies.add_update(Update(request.sequences[index], [65], None, reused=reused[index]))
    assert replies.usage["prompt_tokens_details"] == {"cached_tokens": 2 + 4}


CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
SO_FAR = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize(
    "options, expected",
    (
        (None, {}),
        ({"include_usage": True}, {"usage": None}),
        (CONTINUOUS, {"usage": SO_FAR}),
        ({"continuous_usage_stats": True}, {}),
    ),
)
def test_the_usage_of_the_events_before_the_last(tmp_path, options, expected):
    model = served(tmp_path)
    request = prepared(model, {"prompt": "a", "stream": True, "stream_options": options})
    replies = Replies(request, model)
    (event,) = replies.events(replies.add_update(Update(request.sequences[0], [65])))
    chunk = json.loads(event.to_json())
    assert {name: value for name, value in chunk.items() if name == "usage"} == expected


@pytest.mark.parametrize("text", (",the", "the,the!", "thez the"))
def test_offsets_of_a_decoder_that_changes_the_text(text):
    """WordPiece's decoder puts spaces between words and takes them from punctuation. Offsets stay within the text."""
    words = {word: i for i, word in enumerate(["[UNK]", "the", "##z", "!", ","])}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    offsets = prompt_offsets(tokenizer, text, tokenizer.encode(text).ids)
    assert offsets == sorted(offsets) and 0 <= offsets[0] and offsets[-1] <= len(text)


@pytest.mark.parametrize("value", (math.nan, -math.inf))
def test_log_probabilities_that_are_not_finite_are_null(tmp_path, value):
    body = {"prompt": "ab", "echo": True, "logprobs": 1}
    choice = completion(served(tmp_path), body, [99, 100], logprob=(value, [(97, value)]))
    assert choice["logprobs"]["token_logprobs"] == [None] * 4
    assert choice["logprobs"]["top_logprobs"][1:] == [{"a": None, name: None} for name in "bcd"]
