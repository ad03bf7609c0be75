"""The text of a training run as tokens, and the tokenizer that made them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_ssm.checkpoints.hf_directory import COMPANION_FILES
from megatron_ssm.engine.text import BYTE_END_OF_TEXT_ID, load_tokenizer, write_byte_tokenizer, write_whole_files
from megatron_ssm.layers import families
from megatron_ssm.model.initialization import MEGATRON
from megatron_ssm.spec.stack import Stack

from .batches import Batches, Tokens, tokenize
from .documents import read_documents, split_documents
from .indexed import IndexedBatches, Samples, names_indexed
from .options import Options
from .prepare import end_of_text_id_of


class Corpus:
    """The training text and the held-out text as tokens, and the tokenizer that made them.

    train, held_out: `batches.Tokens`; held_out is None if there is only one document. With indexed datasets, train is None,
    and held_out `indexed.Samples` that `IndexedBatches.open` returns. vocab_size: of the tokenizer.
    end_of_text_id: follows every document. tokenizer_files: {name: content}, None for the byte tokenizer.

    Every rank reads all of it. ValueError or FileNotFoundError if a file cannot be read or is not what it should be.
    """

    def __init__(self, options: Options):
        source = options.tokenizer_model or options.init_from or "byte"
        self.tokenizer_files: dict[str, bytes] | None = None
        tokenizer: Any = _ByteTokenizer()
        self.vocab_size, self.end_of_text_id = BYTE_END_OF_TEXT_ID + 1, BYTE_END_OF_TEXT_ID
        if source != "byte":
            folder = Path(source).parent if Path(source).name == "tokenizer.json" else Path(source)
            tokenizer = load_tokenizer(folder)
            self.tokenizer_files = {
                name: (folder / name).read_bytes() for name in COMPANION_FILES if (folder / name).is_file()
            }
            self.vocab_size = 1 + max(tokenizer.get_vocab().values(), default=-1)
            self.end_of_text_id = end_of_text_id_of(tokenizer, folder)
        self._tokenizer = tokenizer
        self.train: Tokens | None = None
        self.held_out: Tokens | Samples | None = None
        if not names_indexed(options):
            documents, held_out = _documents(options)
            self.train = tokenize(documents, tokenizer, self.end_of_text_id)
            self.held_out = tokenize(held_out, tokenizer, self.end_of_text_id) if held_out else None

    def batches(self, options: Options, samples: int) -> Batches | IndexedBatches:
        """The batch of each step; samples: of the whole run, which decide Megatron's order."""
        if self.train is None:
            return IndexedBatches(options, self, samples)
        return Batches(self.train, options.seq_length, options.global_batch_size, options.seed)

    def bytes_of(self, ids: list[int]) -> int:
        """The UTF-8 bytes of tokens, without those that end a text."""
        ids = [each for each in ids if each != self.end_of_text_id]
        return len(ids) if self.tokenizer_files is None else len(self._tokenizer.decode(ids).encode())

    def new_model_config(self, options: Options) -> Stack:
        """The configuration of a new model: that of --model-config, or one of the options' sizes for this tokenizer."""
        if options.model_config:
            config = families.read(options.model_config)
        else:
            config = families.from_dict(options.new_config(self.vocab_size, self.end_of_text_id))
        if not (std := options.init_method_std):
            return config
        return replace(config, draws={**config.draws, **MEGATRON}, draws_std=std)

    def check_vocabulary(self, config: Stack) -> None:
        """ValueError if the tokenizer has more ids than the model."""
        if self.vocab_size > config.vocab_size:
            sizes = f"{self.vocab_size} ids, vocab_size {config.vocab_size}"
            raise ValueError(f"the tokenizer is larger than the model: {sizes}")

    def write_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer's files into a model's directory; files of any other tokenizer are removed."""
        for name in COMPANION_FILES:
            (directory / name).unlink(missing_ok=True)
        if self.tokenizer_files is None:
            write_byte_tokenizer(directory)
            return
        write_whole_files(directory, self.tokenizer_files)


def _documents(options: Options) -> tuple[list[str], list[str]]:
    separator = options.document_separator or None
    documents = read_documents(options.data, separator)
    held_out = read_documents(options.valid_data_path, separator) if options.valid_data_path else []
    if not held_out and len(documents) > 1:
        return split_documents(documents, options.held_out, options.seed)
    return documents, held_out


class _ByteTokenizer:
    """Encodes texts as their UTF-8 bytes: the tokenizer of `write_byte_tokenizer` without its file."""

    def encode_batch(self, texts: list[str], add_special_tokens: bool = False) -> list[SimpleNamespace]:
        """Like tokenizers.Tokenizer.encode_batch: the `ids` of each result are the tokens."""
        return [SimpleNamespace(ids=np.frombuffer(text.encode("utf-8"), np.uint8)) for text in texts]
