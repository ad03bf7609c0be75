"""A tokenizer for random models, in a checkpoint's directory and in GGUF files.

It has the 256 bytes, words that no text contains, and an end of text. So a text of N ASCII characters has N tokens, and
whatever a random model generates can be printed.
"""

import json
from pathlib import Path
from typing import Any

import gguf
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|endoftext|>"


def byte_tokens(count: int) -> list[str]:
    """`count` tokens in the order of their ids."""
    bytes_first = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*bytes_first, *(f"w{index}" for index in range(len(bytes_first), count - 1)), END]


def write_tokenizer(directory: Path, count: int) -> None:
    """Save the tokenizer of `count` tokens, and the id of the end of a text, in the directory of a checkpoint."""
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(byte_tokens(count))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": count - 1}))


def copy_with_tokenizer(source: Path, target: Path) -> None:
    """Copy a GGUF file that has no tokenizer, and add this one with as many tokens as its vocabulary has."""
    reader = gguf.GGUFReader(source)
    fields = dict(reader.fields)
    architecture = fields[gguf.Keys.General.ARCHITECTURE].contents()
    tokens = byte_tokens(fields[gguf.Keys.LLM.VOCAB_SIZE.format(arch=architecture)].contents())
    end, kind = len(tokens) - 1, gguf.TokenType
    names = gguf.Keys.Tokenizer
    values: dict[str, Any] = {
        names.MODEL: "gpt2",
        names.PRE: "gpt-2",
        names.LIST: tokens,
        names.TOKEN_TYPE: [int(kind.NORMAL)] * end + [int(kind.CONTROL)],
        names.MERGES: [f"{tokens[254]} {tokens[255]}"],  # the file needs one: of two bytes that no text contains
        names.BOS_ID: end,
        names.EOS_ID: end,
        names.ADD_BOS: False,
    }
    metadata = {name: MetadataDetails(gguf.GGUFValueType.get_type(value), value) for name, value in values.items()}
    metadata |= {name: metadata[name]._replace(type=gguf.GGUFValueType.UINT32) for name in (names.BOS_ID, names.EOS_ID)}
    copy_with_new_metadata(reader, gguf.GGUFWriter(target, architecture), metadata, ())
