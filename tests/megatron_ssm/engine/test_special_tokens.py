"""Special tokens in all the files that may name them. Oracle: transformers' AutoTokenizer."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer

from megatron_ssm import families
from megatron_ssm.engine.special_tokens import CLASS_DEFAULTS, special_tokens
from megatron_ssm.engine.text import load_tokenizer, stop_tokens

LETTERS = [chr(code) for code in range(32, 127)]
END = "<end>"
TEXT = "a <s>b<end> c <image>d<|im_end|> e<sep>"
OLD = dict(lstrip=False, normalized=False, rstrip=True, single_word=False)  # flags that special_tokens_map.json has

TOKENS = ["<pad>", "<s>", END, "<sep>", "<image>", "<audio>", "<|im_end|>"]

LAYOUTS = {  # the content of files, beside a tokenizer.json that has TOKENS, unless the files add them
    "strings": {"tokenizer_config.json": dict(eos_token=END, bos_token="<s>", add_bos_token=True)},
    "objects": {
        "tokenizer_config.json": dict(eos_token=dict(OLD, content=END, special=True, __type="AddedToken"), sep_token=None)
    },
    "special_tokens_map.json": {"special_tokens_map.json": dict(eos_token=END, unk_token=None)},
    "special_tokens_map.json, which says something else": {
        "tokenizer_config.json": dict(bos_token="<pad>", eos_token="<s>", image_token="<image>"),
        "special_tokens_map.json": dict(
            bos_token="<s>", eos_token=dict(OLD, content=END), audio_token="<audio>", image_token="<audio>",
            additional_special_tokens=["<|im_end|>"],
        ),
    },
    "named extra tokens": {
        "tokenizer_config.json": dict(
            eos_token=END, audio_token="<audio>", extra_special_tokens=dict(image_token="<image>")
        )
    },
    "extra tokens": {"tokenizer_config.json": dict(eos_token=END, extra_special_tokens=["<|im_end|>"])},
    "added_tokens_decoder, beside which special_tokens_map.json does not count": {
        "tokenizer_config.json": dict(
            eos_token=END,
            added_tokens_decoder={
                "96": dict(OLD, content="<|im_end|>", special=False),
                "95": dict(OLD, content=END, special=False),
            },
        ),
        "special_tokens_map.json": dict(eos_token="<s>", bos_token="<s>"),
    },
    "added_tokens.json": {
        "tokenizer_config.json": dict(additional_special_tokens=["<s>"]),
        "special_tokens_map.json": dict(eos_token=END),
        "added_tokens.json": {"<|im_end|>": 96, END: 95, "<s>": 97},
    },
}  # fmt: skip


def write_tokenizer(directory, tokens=(), special=True, vocabulary=LETTERS):
    """A tokenizer of the printable ASCII characters and some added tokens."""
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(vocabulary)}, [], unk_token="~"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=special) for text in tokens])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text('{"model_type": "zamba2"}')


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, layout):
    """Names, ids, what decoding leaves out, and the id that ends a text."""
    write_tokenizer(tmp_path, () if layout.startswith("added") else TOKENS, special=False)
    for name, content in LAYOUTS[layout].items():
        (tmp_path / name).write_text(json.dumps(content))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert special_tokens(tmp_path) == theirs.special_tokens_map
    assert stop_tokens(tmp_path, families.from_dict(dict(model_type="mamba2")), ours) == (theirs.eos_token_id,)
    ids = ours.encode(TEXT, add_special_tokens=False).ids
    assert ids == theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "files, end",
    [
        ({"config.json": dict(model_type="mamba")}, "<|endoftext|>"),
        ({"config.json": dict(model_type="zamba2")}, None),
        ({"config.json": dict(model_type="zamba2", tokenizer_class="GemmaTokenizer")}, "<eos>"),
        ({"tokenizer_config.json": dict(tokenizer_class="LlamaTokenizerFast", bos_token=None)}, "</s>"),
        ({"tokenizer_config.json": dict(tokenizer_class="LlamaTokenizerFast", eos_token=END)}, END),
        ({"tokenizer_config.json": dict(tokenizer_class="OurOwnTokenizerFast")}, None),
    ],
)
def test_which_class_a_tokenizer_has(tmp_path, files, end):
    """The files name it, else the family has one. Its defaults count where no file says something else, or null."""
    write_tokenizer(tmp_path, ("<|endoftext|>", "<|padding|>", "<eos>", "</s>", END))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert special_tokens(tmp_path) == AutoTokenizer.from_pretrained(tmp_path).special_tokens_map
    tokenizer = load_tokenizer(tmp_path)
    expected = () if end is None else (tokenizer.token_to_id(end),)
    assert stop_tokens(tmp_path, families.from_dict(dict(model_type="mamba2")), tokenizer) == expected


@pytest.mark.parametrize("name", CLASS_DEFAULTS)
def test_defaults_of_tokenizer_classes(tmp_path, name):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class=name + "Fast")))
    assert (
        special_tokens(tmp_path) == AutoTokenizer.from_pretrained(tmp_path).special_tokens_map == CLASS_DEFAULTS[name]
    )


def test_a_class_without_its_defaults(tmp_path):
    """transformers does not take LlamaTokenizer for a tokenizer of bytes."""
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="LlamaTokenizer")))
    assert special_tokens(tmp_path) == AutoTokenizer.from_pretrained(tmp_path).special_tokens_map == {}


def test_special_tokens_of_the_vocabulary(tmp_path):
    """They are found in texts, with the flags that the files give them."""
    write_tokenizer(tmp_path, vocabulary=[*LETTERS, END, "<s>", "<image>"])
    token = dict(content=END, lstrip=True, normalized=False, rstrip=False, single_word=False, __type="AddedToken")
    fields = dict(eos_token=token, bos_token="<s>", extra_special_tokens=["<image>"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    ids = ours.encode(TEXT + " " + TEXT, add_special_tokens=False).ids
    assert ids == theirs(TEXT + " " + TEXT, add_special_tokens=False)["input_ids"]
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_tokens_that_are_only_named_are_not_added(tmp_path):
    """The model may have no embedding for them."""
    write_tokenizer(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(dict(eos_token=END, pad_token="[PAD]")))
    assert special_tokens(tmp_path) == dict(eos_token=END, pad_token="[PAD]")
    assert load_tokenizer(tmp_path).get_vocab_size() == len(LETTERS)


def test_flags_that_are_not_known_print_nothing(tmp_path, capfd):
    write_tokenizer(tmp_path)
    listed = {"95": dict(OLD, content=END, special=True, colour="red")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(added_tokens_decoder=listed)))
    assert load_tokenizer(tmp_path).token_to_id(END) == 95
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "name, content",
    [
        ("special_tokens_map.json", [1]),
        ("added_tokens.json", {"<a>": "first"}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"0": {"text": "<a>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": ["<a>"]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"first": {"content": "<a>"}}}),
    ],
)
def test_wrong_files_are_named(tmp_path, name, content):
    write_tokenizer(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=name) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
