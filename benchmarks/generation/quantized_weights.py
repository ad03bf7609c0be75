"""Predictions with bf16, int8 and int4 weights, by trained Mamba-1 and Mamba-2 on held-out text (about 3 min).

Two byte-level models are trained on Python's documentation (mamba2-small.yaml). Then they read whole held-out topics. At
every position the most likely tokens are compared with those of the same model in float32, as in
benchmarks/communication/agreement.py.
"""

import tempfile
from pathlib import Path

import torch

import megatron_ssm
from benchmarks.communication.agreement import compare, logits, train, windows_of, write_corpus
from benchmarks.support.tables import markdown, publish

FORMATS = {
    "bf16": dict(dtype=torch.bfloat16),
    "int8 weights": dict(weights="int8"),
    "int8 weights, bf16": dict(dtype=torch.bfloat16, weights="int8"),
    "int4 weights": dict(weights="int4"),
    "int4 weights, bf16": dict(dtype=torch.bfloat16, weights="int4"),
}


def main() -> None:
    """Train both models, compare, and publish the table."""
    torch.set_num_threads(2)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        text = write_corpus(directory / "text", extra=False)
        windows = windows_of(text[1])
        for model_type, name in (("mamba", "Mamba-1"), ("mamba2", "Mamba-2")):
            trained = train(directory, model_type, text)
            exact = logits(megatron_ssm.load(trained), windows[:, :-1])
            for format, options in FORMATS.items():
                other = logits(megatron_ssm.load(trained, **options), windows[:, :-1])
                found = compare(exact, other, windows[:, 1:].flatten())
                shares = [f"{found[part]:.2%}" for part in ("first", "set", "order")]
                rows.append([name, format, *shares, f"{found['nats']:+.5f}"])
    publish(
        "quantized-weights",
        markdown(["model", "weights", "first", "five as a set", "five in order", "loss, nats"], rows),
    )


if __name__ == "__main__":
    main()
