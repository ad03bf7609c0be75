"""How long selecting takes, by sparsifier and number of elements, and how many small gradients models have (about 2 min).

The claims (SSFusion, figure 4 and table II): below some size the time of a selection is nearly constant; most gradients of a
model are small, and together they have few of its elements. Selections are from gradient + residual at density 0.01, on one
core; the sparsifiers take turns. Models are built without weights.
"""

from collections.abc import Callable
from functools import partial

import torch
import transformers

from benchmarks.support.tables import interleaved, markdown, publish
from sparsefusion.gradients.error_feedback import ErrorFeedback
from sparsefusion.planning.plan import Unit
from sparsefusion.selection.fused import residual_like, take_ref

DENSITY, REPETITIONS = 0.01, 10
SIZES = {"1 K": 1 << 10, "10 K": 10 << 10, "100 K": 100 << 10, "1 M": 1 << 20, "4 M": 1 << 22}
SPARSIFIERS = ("topk", "gaussiank", "redsync", "sidco", "randomk")
SMALL = 102_400  # elements of the largest small gradient, as in the paper

MODELS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "ResNet-152": lambda: transformers.ResNetConfig(depths=[3, 8, 36, 3], num_labels=1000),
    "ViT-large": lambda: transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000
    ),
    "BERT-large": lambda: transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "GPT2-large": lambda: transformers.GPT2Config(n_embd=1280, n_layer=36, n_head=20),
    "Mamba-2 130m": lambda: transformers.Mamba2Config(
        hidden_size=768, num_hidden_layers=24, num_heads=24, n_groups=1, vocab_size=50288, tie_word_embeddings=True
    ),
    "Mamba-2 2.7b": lambda: transformers.Mamba2Config(
        hidden_size=2560, num_hidden_layers=64, num_heads=80, n_groups=1, vocab_size=50288, tie_word_embeddings=True
    ),
}


def selections(numel: int) -> dict[str, Callable[[], object]]:
    """{name: a selection from this many elements}."""
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0)).pow_(3)
    unit, gradients, residual = (
        Unit(("g",), numel, max(1, int(DENSITY * numel))),
        {"g": gradient},
        residual_like(gradient),
    )
    in_torch = partial(take_ref, "dgc", [gradient], [residual], unit.k)
    by_name = {name: ErrorFeedback(name) for name in ("dgc", *SPARSIFIERS)}
    ours = {name: partial(feedback.select, unit, gradients, 1.0) for name, feedback in by_name.items()}
    return {"dgc, in C": ours.pop("dgc"), "dgc, in torch": in_torch, **ours}


def small_gradients(config: transformers.PretrainedConfig) -> list[str]:
    """The numbers of a row: parameters, gradients, and the shares of small ones."""
    kinds = (
        transformers.AutoModelForImageClassification,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForCausalLM,
    )
    kind = next(kind for kind in kinds if type(config) in kind._model_mapping)
    with torch.device("meta"):
        sizes = [p.numel() for p in kind.from_config(config).parameters()]
    small = [size for size in sizes if size <= SMALL]
    return [
        f"{sum(sizes) / 1e6:.0f} M", str(len(sizes)), f"{len(small) / len(sizes):.1%}", f"{sum(small) / sum(sizes):.2%}"
    ]  # fmt: skip


def main() -> None:
    """Measure and publish both tables."""
    torch.set_num_threads(1)
    found = {size: interleaved(selections(numel), REPETITIONS, in_a_row=2) for size, numel in SIZES.items()}
    names = list(next(iter(found.values())))
    rows = [[size, *(f"{1e3 * seconds[name]:.3g} ms" for name in names)] for size, seconds in found.items()]
    publish("sparse-selection", markdown(["elements", *names], rows))
    header = ["model", "parameters", "gradients", "small ones, of all gradients", "their elements, of all elements"]
    publish(
        "small-gradients", markdown(header, [[name, *small_gradients(config())] for name, config in MODELS.items()])
    )


if __name__ == "__main__":
    main()
