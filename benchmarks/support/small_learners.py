"""Four small models and their data, for benchmarks of what a model learns: all are trained in seconds on one core.

`resnet` names letters and digits that are drawn in fonts of matplotlib, turned, scaled, shifted and noisy. `lstm`,
`transformer` and `mamba2` predict the next byte of the demo's text. Nothing is downloaded.
"""

import string
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.support.cells import ROOT
from megatron_ssm import families
from megatron_ssm.checkpoints.hf import build
from megatron_ssm.model.initialization import initialize
from megatron_ssm.train.options import Options

SIZE, SYMBOLS = 16, string.digits + string.ascii_letters
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif", "DejaVuSerif-Italic", "STIXGeneral", "cmr10",
         "cmss10", "cmtt10")  # fmt: skip
BYTES = 128  # the text is ASCII; other bytes count as the last one
HELD_OUT = 20_000  # the number of the generator that draws held-out images

Batch = tuple[Tensor, Tensor]  # the inputs and what they should give


class Block(nn.Module):
    """Two convolutions beside a shortcut, as in a ResNet."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])
        self.shortcut = nn.Conv2d(before, channels, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, before, height, width) -> (batch, channels, height / stride, width / stride)."""
        y = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(y)) + self.shortcut(x))


def resnet() -> nn.Module:
    """A ResNet of 9 convolutions with 16, 32 and 64 channels, which normalizes by the statistics of each batch."""
    stem = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(SYMBOLS)))


class Lstm(nn.Module):
    """Two layers of an LSTM, 128 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(BYTES, 64), nn.Linear(128, BYTES)
        self.layers = nn.LSTM(64, 128, 2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (batch, seq) -> logits (batch, seq, BYTES)."""
        return self.head(self.layers(self.embedding(ids))[0])


def rotated(x: Tensor) -> Tensor:
    """x (..., seq, width), turned by rotary position embeddings."""
    width, positions = x.shape[-1], torch.arange(x.shape[-2])
    angles = positions[:, None] * 100.0 ** -(torch.arange(0, width, 2) / width)  # (seq, width / 2)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class Attention(nn.Module):
    """A block of a transformer: causal attention, and a network of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, seq, width) -> the same shape."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))  # (batch, seq, 3, heads, width / heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotated(q), rotated(k)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Two blocks of a GPT, 96 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, 96)
        self.blocks = nn.Sequential(Attention(96, 4), Attention(96, 4))
        self.norm, self.head = nn.LayerNorm(96), nn.Linear(96, BYTES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (batch, seq) -> logits (batch, seq, BYTES)."""
        return self.head(self.norm(self.blocks(self.embedding(ids))))


def mamba2() -> nn.Module:
    """Two blocks of this project's Mamba-2, 96 wide."""
    options = Options(num_layers=2, hidden_size=96, mamba_head_dim=32, mamba_state_dim=32, seq_length=64)
    return initialize(build(families.from_dict(options.new_config(BYTES, 0))), int(torch.randint(1 << 30, ())))


class Loss(nn.Module):
    """The mean cross entropy of a model, in nats, as a module for DDP."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """A batch -> its loss, a scalar."""
        return functional.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())


@cache
def symbols() -> Tensor:
    """(fonts, symbols, 1, 2 SIZE, 2 SIZE): all symbols in all fonts, white on black."""
    directory, drawn = Path(matplotlib.get_data_path()) / "fonts" / "ttf", []
    for name in FONTS:
        font = ImageFont.truetype(str(directory / f"{name}.ttf"), 24)
        for symbol in SYMBOLS:
            image = Image.new("L", (2 * SIZE, 2 * SIZE))
            ImageDraw.Draw(image).text((SIZE, SIZE), symbol, 255, font, anchor="mm")
            drawn.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) / 255)
    return torch.stack(drawn).view(len(FONTS), len(SYMBOLS), 1, 2 * SIZE, 2 * SIZE)


def images(count: int, generator: torch.Generator, held_out: bool) -> Batch:
    """Symbols (count, 1, SIZE, SIZE), each turned, scaled, shifted and noisy, and their numbers (count,)."""

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) * 2 - 1

    labels = torch.randint(len(SYMBOLS), (count,), generator=generator)
    chosen = symbols()[torch.randint(len(FONTS), (count,), generator=generator), labels]
    angles, scales = 0.3 * draw(count), 1 + 0.2 * draw(count)
    cos, sin = scales * angles.cos(), scales * angles.sin()
    affine = torch.stack([cos, -sin, 0.2 * draw(count), sin, cos, 0.2 * draw(count)], 1).view(count, 2, 3)
    grid = functional.affine_grid(affine, [count, 1, SIZE, SIZE], align_corners=False)
    moved = functional.grid_sample(chosen, grid, align_corners=False)
    return moved + 0.3 * torch.randn(moved.shape, generator=generator), labels


@cache
def texts() -> list[Tensor]:
    """The bytes of the demo's text, each (n,) int64: for training, and held out."""
    sys.path.insert(0, str(ROOT / "examples"))
    from corpus import write_corpus

    with tempfile.TemporaryDirectory() as directory:
        parts = [b"".join(path.read_bytes() for path in paths) for paths in write_corpus(directory)]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8).clamp(max=BYTES - 1).long() for part in parts]


def passages(length: int) -> Callable[[int, torch.Generator, bool], Batch]:
    """A function that draws passages of the text, (count, length), and their next bytes."""

    def draw(count: int, generator: torch.Generator, held_out: bool) -> Batch:
        text = texts()[held_out]
        starts = torch.randint(len(text) - length, (count, 1), generator=generator)
        drawn = text[starts + torch.arange(length + 1)]
        return drawn[:, :-1], drawn[:, 1:]

    return draw


@dataclass(frozen=True)
class Task:
    """A model and how it is trained.

    Attributes:
        build: Makes the model, initialized by torch's generator.
        draw: draw(count, generator, held_out) -> a batch.
        batch: Examples of a rank in a step.
        optimizer: Makes the optimizer from the parameters.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator, bool], Batch]
    batch: int
    optimizer: Callable[..., torch.optim.Optimizer]

    def learner(self, seed: int) -> Loss:
        """A newly initialized model, which gives its loss."""
        torch.manual_seed(seed)
        return Loss(self.build())

    def held_out(self, count: int) -> Batch:
        """Held-out examples, always the same."""
        return self.draw(count, torch.Generator().manual_seed(HELD_OUT), True)


def sgd(rate: float) -> Callable[..., torch.optim.Optimizer]:
    """SGD with a momentum of 0.9."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def adam(rate: float) -> Callable[..., torch.optim.Optimizer]:
    """Adam."""
    return lambda parameters: torch.optim.Adam(parameters, lr=rate)


TASKS = {
    "resnet": Task(resnet, images, 12, sgd(0.1)),
    "lstm": Task(Lstm, passages(32), 8, sgd(2.0)),
    "transformer": Task(Transformer, passages(32), 4, adam(3e-3)),
    "mamba2": Task(mamba2, passages(32), 4, adam(3e-3)),
}
