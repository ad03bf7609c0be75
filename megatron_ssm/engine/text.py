"""Text of token ids: reads and writes tokenizer files, and decodes text while tokens are generated.

This module does not import torch, and imports `tokenizers` only where it is used, so that the command line starts fast.
"""

import codecs
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ssm.spec.reader import token_ids
from megatron_ssm.spec.stack import Stack

from .generation_config import read_generation_config
from .special_tokens import add_tokens, read_tokenizer_config, special_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
BYTE_END_OF_TEXT_ID = 256
REPLACEMENT = "\ufffd"
MOST_COMPOSED = 4  # the most characters that NFC composes into one


# Tokenizer files


def load_tokenizer(directory: str | Path) -> "Tokenizer":
    """The `tokenizers.Tokenizer` in directory/tokenizer.json, with the tokens that other files there add to it.

    Truncation and padding are off. FileNotFoundError if tokenizer.json does not exist, ValueError if it or another file is
    invalid; both name the file.
    """
    from tokenizers import Tokenizer

    path = Path(directory) / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"no tokenizer: {path} does not exist")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more specific
        raise ValueError(f"{path} is not a tokenizer that the tokenizers package can read: {error}") from error
    add_tokens(tokenizer, directory)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_fits(tokenizer: "Tokenizer", config: Stack) -> None:
    """ValueError if the tokenizer has ids that the model lacks."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= config.vocab_size:
        raise ValueError(f"the tokenizer is larger than the model: id {largest}, vocab_size {config.vocab_size}")


def stop_tokens(directory: str | Path, config: Stack, tokenizer: "Tokenizer | None") -> tuple[int, ...]:
    """The ids that end a text: eos_token_id of generation_config.json, else of config.json, and the tokenizer's eos_token.

    tokenizer: The tokenizer, or None to use the configurations only. ValueError names an invalid file.
    """
    configured = read_generation_config(directory).get("eos_token_id")
    try:
        ids = token_ids(configured) or config.eos_token_ids
    except ValueError as error:
        raise ValueError(f"{Path(directory) / 'generation_config.json'}: {error}") from None
    name = special_tokens(directory).get("eos_token")
    end = None if name is None or tokenizer is None else tokenizer.token_to_id(name)
    return ids if end is None or end in ids else (*ids, end)


def read_text(path: str | Path) -> str:
    """The text of a file. ValueError, which names the file, if it is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8") from None


def read_chat_template(directory: str | Path) -> tuple[Path, str] | tuple[None, None]:
    """The chat template and the file that has it; (None, None) if there is none.

    It is chat_template.jinja, or the field chat_template of tokenizer_config.json. ValueError names a wrong file.
    """
    path = Path(directory) / "chat_template.jinja"
    if path.is_file():
        return path, read_text(path)
    path = Path(directory) / "tokenizer_config.json"
    text = _default_template(read_tokenizer_config(directory).get("chat_template"), path)
    return (None, None) if text is None else (path, text)


def _default_template(template: Any, path: Path) -> str | None:
    """The template itself, or the one named "default" in a list or an object of named templates; None if there is none."""
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    named = template if isinstance(template, list) else [{"name": "default", "template": template}]
    if template is None:
        return None
    if not all(isinstance(each, dict) and _are_texts(each.get("name"), each.get("template")) for each in named):
        raise ValueError(f"{path}: chat_template must be a text, or a list of objects with the texts name and template")
    return {each["name"]: each["template"] for each in named}.get("default")


def _are_texts(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def most_characters(tokenizer: "Tokenizer", tokens: int) -> int | None:
    """The number of characters beyond which any text has more than `tokens` tokens, or None if there is no limit.

    Byte-level tokenizers that do not change the text, or only compose its characters (NFC), have such a limit.
    """
    normalizer = None if tokenizer.normalizer is None else json.loads(tokenizer.normalizer.__getstate__())["type"]
    if _byte_reader(tokenizer) is not _byte_level_bytes or normalizer not in (None, "NFC"):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # they contain any number of spaces
        return None
    vocabulary = tokenizer.get_vocab()
    if not _BYTE_OF_CHARACTER.keys() <= vocabulary.keys():  # bytes without a token are dropped
        return None
    return tokens * max(map(len, vocabulary)) * (1 if normalizer is None else MOST_COMPOSED)


def write_byte_tokenizer(directory: str | Path) -> None:
    """Write a byte-level tokenizer: ids 0..255 are the byte values, 256 is <|endoftext|> (special).

    The files are tokenizer.json, tokenizer_config.json and generation_config.json; transformers' AutoTokenizer loads
    them. A text becomes its UTF-8 bytes, except that the literal <|endoftext|> in a text becomes id 256, as with any
    special token (`tokenizer.encode_special_tokens = True` encodes it as text). The directory is made if necessary. Each
    file is complete when it appears under its name.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    special_ids = {name: BYTE_END_OF_TEXT_ID for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    texts = {
        "tokenizer.json": _byte_tokenizer().to_str(),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2) + "\n",
        "generation_config.json": json.dumps(special_ids, indent=2) + "\n",
    }
    write_whole_files(directory, {name: text.encode() for name, text in texts.items()})


def write_whole_files(directory: Path, contents: dict[str, bytes]) -> None:
    """Write files into a directory, {name: content}. All are complete when they appear under their names."""
    # The hidden folder is writable by this user only, even if the directory is writable by others.
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=directory) as hidden:
        for name, content in contents.items():
            (Path(hidden) / name).write_bytes(content)
        for name in contents:
            os.replace(Path(hidden) / name, directory / name)


def _byte_tokenizer() -> "Tokenizer":
    """A BPE model with the 256 bytes as its vocabulary and no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(dict(_BYTE_OF_CHARACTER), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level vocabularies (GPT-2's): one character per byte, which is itself for printable bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return dict(sorted(table.items(), key=lambda item: item[1]))


_BYTE_OF_CHARACTER = _byte_of_character()
_BYTE_CHARACTERS, _TO_LATIN_1 = frozenset(_BYTE_OF_CHARACTER), str.maketrans(_BYTE_OF_CHARACTER)


# Streaming


def find_stop(text: str, stop_strings: Iterable[str]) -> int | None:
    """The index at which to cut `text`: the start of the stop string that is completed first, or None.

    If several end at the same character, the longest counts, so that the cut does not depend on how the text was split.
    """
    matches = [(text.find(stop) + len(stop), text.find(stop)) for stop in stop_strings if stop in text]
    return min(matches)[1] if matches else None


class TextStream:
    """Incremental detokenizer: ids go in one by one, text comes out as soon as it is certain.

    It holds back the bytes of an incomplete UTF-8 character (at most three) and any suffix of the text that may begin a
    stop string. The text that it returns, including that of `finish`, is the tokenizer's text of all ids without special
    tokens, up to the first completed stop string. It differs only for invalid text: an unknown id becomes U+FFFD, and valid
    characters next to invalid bytes are kept (the ByteFallback decoder replaces the whole run of bytes).

    A stop string that is the name of a special token, such as "<|im_end|>", ends the text before this token.

    The cost of a push does not depend on the length of the text. Tokens of bytes (ByteLevel; the <0xE2> tokens of
    ByteFallback) are decoded by an incremental UTF-8 decoder. Any other token is decoded together with its predecessor,
    whose text is removed; where decoding depends on a neighbour (the leading space of Metaspace, the ## of WordPiece), it is
    the predecessor.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        stop_strings: str | Iterable[str] = (),
        special_ids: Iterable[int] = (),
        prompt: Sequence[int] = (),
        printed: Iterable[str] = (),
    ):
        """Start a stream. ValueError if a stop string is empty.

        Args:
            stop_strings: Strings that end the text.
            special_ids: Ids without text, in addition to the tokenizer's special tokens; they may exceed its vocabulary.
            prompt: The ids before the text, because the text of the first id may depend on the last of them.
            printed: Names of special tokens that are printed like others.
        """
        self.stopped = False
        self._stop_strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        if "" in self._stop_strings:
            raise ValueError("a stop string is empty: it would end every text before its first character")
        added = tokenizer.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        names = set(printed)
        self._printed = {token_id: name for token_id, name in special.items() if name in names}
        self._special_ids = {*special_ids, *special} - self._printed.keys()
        self._stop_ids = {token_id for token_id, name in special.items() if name in self._stop_strings}
        self._tokenizer = tokenizer
        self._bytes_of = _byte_reader(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        shown = (i for i in reversed(prompt) if i not in self._special_ids and tokenizer.id_to_token(i) is not None)
        self._previous = list(islice(shown, 1))  # the last id that the tokenizer knows
        self._held = ""

    def push(self, token_id: int) -> str:
        """Add one id; returns the text, often empty, that has become certain."""
        if token_id in self._stop_ids:
            text, self.stopped = self.finish(), True
            return text
        if self.stopped or token_id in self._special_ids:
            return ""
        return self._release(self._detokenize(token_id))

    def finish(self) -> str:
        """Return the text held back after the last id, with incomplete UTF-8 as U+FFFD; "" after a stop string."""
        if self.stopped:
            return ""
        text = self._release(self._flush_bytes()) + self._held
        self._held = ""
        return text

    def _detokenize(self, token_id: int) -> str:
        """The text that this id adds, up to the last complete character."""
        if token_id in self._printed:
            return self._flush_bytes() + self._printed[token_id]
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return self._flush_bytes() + REPLACEMENT
        token_bytes = self._bytes_of(token)
        if token_bytes is not None:
            text = self._utf8.decode(token_bytes)
        else:
            before = self._tokenizer.decode(self._previous)
            text = self._flush_bytes() + self._tokenizer.decode([*self._previous, token_id])[len(before) :]
        self._previous = [token_id]
        return text

    def _flush_bytes(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _release(self, text: str) -> str:
        """Append `text` to the text held back; returns the part that cannot belong to a stop string."""
        text = self._held + text
        cut = find_stop(text, self._stop_strings)
        self.stopped = cut is not None
        if not self.stopped:
            cut = len(text) - _begun_stop_length(text, self._stop_strings)
        self._held = "" if self.stopped else text[cut:]
        return text[:cut]


def _begun_stop_length(text: str, stop_strings: Sequence[str]) -> int:
    """The length of the longest suffix of `text` that begins a stop string without completing it."""
    longest = max(map(len, stop_strings), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        for stop in stop_strings:
            if stop.startswith(end) and len(stop) > length:
                return length
    return 0


def token_bytes(tokenizer: "Tokenizer") -> Callable[[int], bytes]:
    """A function that maps an id to the bytes of its token, and an unknown id to U+FFFD."""
    bytes_of = _byte_reader(tokenizer)

    def of(token_id: int) -> bytes:
        token = tokenizer.id_to_token(token_id) or REPLACEMENT
        data = bytes_of(token)
        return token.replace("\u2581", " ").encode() if data is None else data  # U+2581 is SentencePiece's space

    return of


def _byte_reader(tokenizer: "Tokenizer") -> Callable[[str], bytes | None]:
    """A function that maps a token to its bytes, or to None if the token represents text."""
    decoder = b"" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()  # JSON
    if b'"ByteLevel"' in decoder:
        return _byte_level_bytes
    if b'"ByteFallback"' in decoder:
        return _byte_fallback_bytes
    return lambda token: None


def _byte_level_bytes(token: str) -> bytes:
    """The bytes of a token of byte characters; an added token with any other character represents its own text."""
    return token.translate(_TO_LATIN_1).encode("latin-1") if _BYTE_CHARACTERS.issuperset(token) else token.encode()


def _byte_fallback_bytes(token: str) -> bytes | None:
    match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    return bytes.fromhex(match[1]) if match else None
