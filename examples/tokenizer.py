"""A byte-pair encoding of your own text, as one needs for a new model.

python examples/tokenizer.py DIRECTORY SIZE FILE ... writes DIRECTORY/tokenizer.json with SIZE tokens.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path


def train_tokenizer(directory: str | Path, size: int, texts: Iterable[str | Path]) -> None:
    """Write a byte-level byte-pair encoding of `size` tokens; the first one, <|endoftext|>, ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train(list(map(str, texts)), trainer)
    Path(directory).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(Path(directory) / "tokenizer.json"))
    config = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    (Path(directory) / "tokenizer_config.json").write_text(text)  # for transformers


if __name__ == "__main__":
    train_tokenizer(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
