"""The special tokens of a checkpoint, from several files, as in transformers' AutoTokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commfabric.foundation.json_files import read_json

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# {tokenizer class of transformers, without "Fast": its default special tokens}. Other classes, such as
# PreTrainedTokenizerFast, have none.
_END_OF_TEXT = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_QWEN = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
CLASS_DEFAULTS: dict[str, dict[str, str]] = {
    "CohereTokenizer": dict(
        bos_token="<BOS_TOKEN>", eos_token="<|END_OF_TURN_TOKEN|>", unk_token="<UNK>", sep_token="<SEP>",
        pad_token="<PAD>", cls_token="<CLS>", mask_token="<MASK_TOKEN>",
    ),
    "BertTokenizer": dict(
        unk_token="[UNK]", sep_token="[SEP]", pad_token="[PAD]", cls_token="[CLS]", mask_token="[MASK]"
    ),
    "CodeGenTokenizer": _END_OF_TEXT,
    "CodeLlamaTokenizer": dict(
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", prefix_token="▁<PRE>", middle_token="▁<MID>",
        suffix_token="▁<SUF>", eot_token="▁<EOT>", fill_token="<FILL_ME>",
    ),
    "GPT2Tokenizer": _END_OF_TEXT,
    "GPTNeoXTokenizer": _END_OF_TEXT | dict(pad_token="<|padding|>"),
    "GemmaTokenizer": dict(
        bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>", mask_token="<mask>"
    ),
    "LlamaTokenizer": dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>"),
    "Qwen2Tokenizer": _QWEN,
    "Qwen3_5Tokenizer": _QWEN,
}  # fmt: skip


def read_tokenizer_config(directory: str | Path) -> dict[str, Any]:
    return _read(Path(directory) / "tokenizer_config.json")


def special_tokens(directory: str | Path) -> dict[str, str]:
    """{name, such as eos_token: token}, of a directory with the files of a tokenizer. ValueError names a wrong file.

    They are in tokenizer_config.json, including its extra_special_tokens; if it has no added_tokens_decoder, also in
    special_tokens_map.json. Some tokenizer classes have default special tokens.
    """
    named = _named(Path(directory), _fields(Path(directory)))
    return {name: text for name, token in named.items() if (text := _text(token)) is not None}


def add_tokens(tokenizer: "Tokenizer", directory: str | Path) -> None:
    """Add the tokens of the other files in its directory to the tokenizer of tokenizer.json, as transformers does.

    The tokens in added_tokens_decoder of tokenizer_config.json, else in added_tokens.json, get the next free ids, in their
    order. Special tokens without an id are not added, because the model may have no embedding for them. ValueError names an
    invalid file.
    """
    directory = Path(directory)
    fields, own = _fields(directory), tokenizer.get_added_tokens_decoder()
    named = {_text(token): token for token in _named(directory, fields).values()}
    extra = fields.get("extra_special_tokens") or fields.get("additional_special_tokens")
    special = {_text(token): token for token in (extra if isinstance(extra, list) else ())} | named
    path, listed = directory / "tokenizer_config.json", fields.get("added_tokens_decoder")
    try:
        if listed is not None:
            tokens = {int(number): _added(**listed[number]) for number in listed}
        else:
            path = directory / "added_tokens.json"
            tokens = {int(i): _added(text, special=text in special) for text, i in _read(path).items()} | own
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"{path} does not list added tokens with their ids") from None
    for token in tokens.values():
        token.special = token.special or token.content in named
    known = {token.content for token in (*own.values(), *tokens.values())}
    others = [
        _added(**{**(token if isinstance(token, dict) else {}), "content": text, "special": True})
        for text, token in special.items()
        if text and text not in known and tokenizer.token_to_id(text) is not None
    ]
    tokenizer.add_tokens([tokens[number] for number in sorted(tokens)] + others)


def _added(content: str, special: bool = False, **flags: Any) -> "AddedToken":
    """An added token, without flags that the package does not know, because it would print them."""
    from tokenizers import AddedToken

    known = {name: bool(flags[name]) for name in ("lstrip", "rstrip", "normalized", "single_word") if name in flags}
    return AddedToken(content, special=special, **{"normalized": not special, **known})


def _fields(directory: Path) -> dict[str, Any]:
    """The fields of tokenizer_config.json and, without added_tokens_decoder, of the older special_tokens_map.json."""
    config = read_tokenizer_config(directory)
    if "added_tokens_decoder" in config:
        return config
    older = _read(directory / "special_tokens_map.json")
    return older | config | {name: older[name] for name in NAMES if name in older}


def _named(directory: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """{name: token} of the special tokens; a token is a text, an object with its text, or None for null."""
    extra = fields.get("extra_special_tokens") or fields.get("model_specific_special_tokens")
    tokens = {name: value for name, value in fields.items() if name.endswith("_token")}
    return _class_defaults(directory, fields) | tokens | (extra if isinstance(extra, dict) else {})


def _text(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _class_defaults(directory: Path, fields: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that the class of the tokenizer has by default."""
    from megatron_ssm.layers.families import FAMILIES  # which import torch

    model = _read(directory / "config.json")
    family = FAMILIES.get(str(model.get("model_type")))
    of_family = family and family.tokenizer_class
    name = str(fields.get("tokenizer_class") or model.get("tokenizer_class") or of_family).removesuffix("Fast")
    path = directory / "tokenizer.json"
    if name == "LlamaTokenizer" and path.is_file() and b'"ByteLevel"' in path.read_bytes():
        return {}  # transformers uses a class without defaults for it
    return CLASS_DEFAULTS.get(name, {})


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
