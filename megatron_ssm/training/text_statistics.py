"""Statistics of texts to compare a model with: a bigram baseline, and how much of a text occurs in the training text."""

from collections.abc import Collection, Iterable

import torch


def bigram_nats_per_byte(train_texts: Iterable[str], held_out_texts: Collection[str]) -> float:
    """The loss of a bigram model over bytes on the held-out texts, in nats per byte: a baseline for trained models.

    As for a trained model, each text is followed by an end of text that is predicted too, so there are 257 symbols. With
    add-one smoothing: p(b | a) = (count(a, b) + 1) / (count(a) + 257). On the demo's text the best constant instead of 1
    would be 0.02 nats better.
    """
    counts = _bigram_counts(train_texts) + 1
    log_p = (counts / counts.sum(1, keepdim=True)).log()
    held_out = _bigram_counts(held_out_texts)
    return -(held_out * log_p).sum().item() / sum(len(text.encode()) for text in held_out_texts)


def _bigram_counts(texts: Iterable[str]) -> torch.Tensor:
    """float64 (257, 257): how often symbol b follows symbol a; symbol 256 precedes the first text and follows each text."""
    end = torch.tensor([256], dtype=torch.int64)
    parts = [end]
    for text in texts:
        parts += [torch.tensor(list(text.encode()), dtype=torch.int64), end]
    symbols = torch.cat(parts)
    return torch.bincount(symbols[:-1] * 257 + symbols[1:], minlength=257 * 257).double().view(257, 257)


def ngrams(texts: Iterable[str], n: int) -> set[str]:
    """The character n-grams of the texts; none spans two texts."""
    return {text[i : i + n] for text in texts for i in range(len(text) - n + 1)}


def ngram_overlap(held_out: Collection[str], train: Iterable[str], n: int = 60) -> float:
    """The share, from 0 to 1, of the held-out texts' character n-grams that occur in a training text.

    An n-gram counts as often as it occurs in the held-out texts. 0 if they have none.
    """
    wanted = ngrams(held_out, n)
    shared: set[str] = set()
    for text in train:
        shared.update(gram for gram in (text[i : i + n] for i in range(len(text) - n + 1)) if gram in wanted)
    positions = [text[i : i + n] in shared for text in held_out for i in range(len(text) - n + 1)]
    return sum(positions) / len(positions) if positions else 0.0


def longest_shared(sample: str, train: Collection[str]) -> str:
    """The longest substring of `sample` that occurs in a training text; the first of several."""
    longest = ""
    for start in range(len(sample)):
        while start + len(longest) < len(sample):
            longer = sample[start : start + len(longest) + 1]
            if not any(longer in text for text in train):
                break
            longest = longer
    return longest
