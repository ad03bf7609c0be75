"""Megatron's indexed datasets as training data: blends and splits of them, read in Megatron's order by megatron-core."""

import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ssm.parallel.groups import join_alone

from .options import Options
from .prepare import INDEX_VERSION, MAGIC, TYPE_CODES

ITEM_SIZES = {code: np.dtype(kind).itemsize for kind, code in TYPE_CODES.items()}


@dataclass(frozen=True)
class Samples:
    """Sequences for an evaluation: inputs and labels (samples, seq_length), and the UTF-8 bytes of the labels."""

    inputs: torch.Tensor
    labels: torch.Tensor
    text_bytes: int


@dataclass(frozen=True)
class Blend:
    """Datasets, as the paths of their files without suffix, and their weights (None: their sizes)."""

    prefixes: list[str]
    weights: list[float] | None

    @classmethod
    def of(cls, words: tuple[str, ...]) -> "Blend":
        """The blend that `PREFIX...` or `WEIGHT PREFIX WEIGHT PREFIX ...` names; ValueError if it is neither."""
        if not _is_number(words[0]):
            return cls(list(words), None)
        try:
            weights = [float(word) for word in words[::2]]
        except ValueError:
            weights = []
        if len(words) % 2 or not weights or min(weights) <= 0:
            raise ValueError(
                f"the data {' '.join(words)} is neither PREFIX ... nor WEIGHT PREFIX ..., with weights above 0"
            )
        return cls(list(words[1::2]), weights)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return not Path(word + ".idx").exists()


def names_indexed(options: Options) -> bool:
    """Return True if the options name indexed datasets, not text."""
    first = options.data[0] if options.data else ""
    is_named = options.mock_data or options.data_path or options.train_data_path
    return bool(is_named or (first and Path(first + ".idx").exists()))


def read_lengths(prefix: str) -> np.ndarray:
    """The number of tokens of each sequence of a dataset; ValueError if it is not one, or is cut off."""
    path = Path(prefix + ".idx")
    try:
        with open(path, "rb") as file:
            header = file.read(len(MAGIC) + 25)
            version, code = int.from_bytes(header[9:17], "little"), header[17] if len(header) > 17 else 0
            if header[:9] != MAGIC or version != INDEX_VERSION:
                raise ValueError(f"{path} is not the index of a Megatron dataset")
            if code not in ITEM_SIZES:
                raise ValueError(f"{path}: its tokens are neither uint16 nor int32")
            sequences, documents = np.frombuffer(header[18:34].ljust(16, b"\0"), np.uint64).tolist()
            lengths = np.fromfile(file, np.int32, sequences)
        found, size = path.stat().st_size, Path(prefix + ".bin").stat().st_size
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None
    if found != 34 + 12 * sequences + 8 * documents:
        raise ValueError(f"{path} is cut off, or longer than it should be: {found} bytes")
    tokens = int(lengths.sum(dtype=np.int64))
    if size != tokens * ITEM_SIZES[code]:
        raise ValueError(f"{prefix}.bin has {size} bytes, but its index names {tokens * ITEM_SIZES[code]}")
    return lengths


def _bounds(split: str) -> tuple[float, float]:
    """Where, of 1, the training documents and the held-out ones end; ValueError if `split` is not up to three shares."""
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ValueError(f"--split {split} is not up to three shares, as 949,50,1")
    return shares[0] / sum(shares), sum(shares[:2]) / sum(shares)


class _Tokenizer:
    """A tokenizer as megatron-core uses it: the id after each document, and an identity. There is no padding."""

    pad = -1

    def __init__(self, end_of_text_id: int, vocab_size: int):
        self.eod, self.vocab_size = end_of_text_id, vocab_size
        self.unique_identifiers = OrderedDict({"eod": end_of_text_id})


class IndexedBatches:
    """The samples of a run in Megatron's order, like `Batches`; resuming needs only the number of the next one.

    Sample i is the i-th of megatron-core's `GPTDataset`, or of its `BlendedDataset`, for `planned` samples. A run that needs
    more begins again with the first. `open` is called on all ranks together before the first batch.
    """

    def __init__(self, options: Options, corpus: Any, samples: int):
        """Check the files that the options name; corpus: a `Corpus`.

        ValueError if one of them is not a dataset, or has no training sample.
        """
        self._options, self._corpus, self.planned = options, corpus, samples
        self.train = Blend([], None)
        if not options.mock_data:
            self.train = Blend.of(options.train_data_path or options.data_path or options.data)
        self.valid = Blend.of(options.valid_data_path) if options.valid_data_path else None
        first, second = _bounds(options.split)
        if self.valid or options.train_data_path:
            first = second = 1.0
        checksum, self.tokens = zlib.crc32(repr((options.split, self.train.weights)).encode()), 0
        self._holds_out = first < second
        for prefix in self.train.prefixes:
            lengths = read_lengths(prefix)
            checksum = zlib.crc32(lengths.tobytes(), checksum)
            ends = [round(share * len(lengths)) for share in (0.0, float(first), float(second))]
            train, held_out = (int(lengths[a:b].sum(dtype=np.int64)) for a, b in zip(ends, ends[1:], strict=False))
            if train <= options.seq_length:
                raise ValueError(f"{prefix} has {train} training tokens: one sequence needs {options.seq_length + 1}")
            self.tokens += train
            self._holds_out = self._holds_out and held_out > options.seq_length
        for prefix in self.valid.prefixes if self.valid else ():
            lengths = read_lengths(prefix)
            if (held_out := int(lengths.sum(dtype=np.int64))) <= options.seq_length:
                raise ValueError(f"{prefix} has {held_out} tokens: one sequence needs {options.seq_length + 1}")
            checksum = zlib.crc32(lengths.tobytes(), checksum)
        self.checksum = checksum

    def open(self) -> Samples | None:
        """Let megatron-core build or read the index of samples; all ranks call it together. Returns the held-out samples."""
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

        join_alone()
        options = self._options
        train = (self.train.prefixes, self.train.weights)
        valid = (self.valid.prefixes, self.valid.weights) if self.valid else None
        is_split = valid is None and not options.train_data_path
        blends: dict[str, Any] = (
            dict(blend=train, split=options.split) if is_split else dict(blend_per_split=[train, valid, None])
        )
        if options.mock_data:
            blends = dict(blend=None, split=options.split)
        # Megatron's caches are named after the paths: a directory of its own for each content.
        cache = Path(options.data_cache_path or Path(options.out) / "data_cache") / f"{self.checksum:08x}"
        config = GPTDatasetConfig(
            random_seed=options.seed, sequence_length=options.seq_length, path_to_cache=str(cache),
            tokenizer=_Tokenizer(self._corpus.end_of_text_id, self._corpus.vocab_size),
            reset_position_ids=False, reset_attention_mask=False,
            eod_mask_loss=False, create_attention_mask=False, **blends,
        )  # fmt: skip
        if is_split:
            parts = [*(config.split_matrix or ())]
            config.split_matrix = [parts[0], parts[1] if self._holds_out else None, None]  # type: ignore[list-item]
        held_out = options.eval_iters * options.global_batch_size
        kind = MockGPTDataset if options.mock_data else GPTDataset
        builder = BlendedMegatronDatasetBuilder(kind, [self.planned, held_out, 0], lambda: True, config)
        self._train, valid_samples, _ = builder.build()
        if valid_samples is None or not held_out:
            return None
        samples = [valid_samples[index] for index in range(min(held_out, len(valid_samples)))]
        inputs, labels = (torch.stack([each[name] for each in samples]) for name in ("tokens", "labels"))
        return Samples(inputs, labels, sum(map(self._corpus.bytes_of, labels.tolist())))

    def samples(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Batches.samples`.

        Raises:
            ValueError: A token is not in the vocabulary.
        """
        samples = [self._train[index % self.planned] for index in range(first, first + count)]
        inputs, labels = (torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels"))
        largest = max(int(inputs.max()), int(labels.max()))
        if largest >= self._corpus.vocab_size:
            raise ValueError(f"the data has token {largest}, and the tokenizer {self._corpus.vocab_size} ids")
        return inputs, labels
