"""The demo's promises and its benchmark. Oracle: the promised numbers, computed independently."""

import importlib.util
import json
import math
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def script(monkeypatch, path):
    """A script as a module that can import the other scripts of its folder."""
    monkeypatch.syspath_prepend(ROOT / Path(path).parent)
    spec = importlib.util.spec_from_file_location(path.replace("/", "_")[: -len(".py")], ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def demo(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return script(monkeypatch, "examples/demo.py")


def test_the_text_is_held_out_and_the_bigram_baseline_is_right(demo, capsys):
    train, held_out, bigram = demo.prepare_text("text")
    grams = [[t[i : i + 60] for path in side for t in [path.read_text()] for i in range(len(t) - 59)]
             for side in (train, held_out)]  # fmt: skip
    known = set(grams[0])
    overlap = sum(gram in known for gram in grams[1]) / len(grams[1])
    assert overlap < 0.10
    out = capsys.readouterr().out
    assert f"{overlap:.1%} of the held-out 60-grams stand in the training text; bigram baseline {bigram:.3f}" in out
    assert bigram == pytest.approx(smoothed_bigram(train, held_out), abs=0.05)


def smoothed_bigram(train, held_out):
    """The loss of a bigram model over bytes with add-one smoothing, in nats per byte."""
    texts = [path.read_bytes() for path in train]
    pairs = Counter(pair for text in texts for pair in zip(text, text[1:], strict=False))
    firsts = Counter(byte for text in texts for byte in text[:-1])
    asked = [pair for path in held_out for text in [path.read_bytes()] for pair in zip(text, text[1:], strict=False)]
    return -sum(math.log((pairs[a, b] + 1) / (firsts[a] + 256)) for a, b in asked) / len(asked)


def test_text_that_is_not_held_out_is_refused(demo, monkeypatch):
    monkeypatch.setattr(demo, "write_corpus", lambda folder: [sorted(ROOT.glob("*.md"))] * 2)
    with pytest.raises(ValueError, match="^the held-out text is not held out: 100.0% of its 60-grams are in"):
        demo.prepare_text("text")


def run_demo(demo, monkeypatch, nats, bigram=2.5, tokens=lambda ranks: [1, 2]):
    """Run the demo with fake commands that report this loss and generate these tokens."""

    def run_quietly(command, **options):
        if "--log" in command:
            log = Path(command[command.index("--log") + 1])
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text('{"step": 1}\n' + json.dumps({"step": 2, "held_out_nats_per_byte": nats}))
        ranks = int(command[command.index("--tp") + 1]) if "--tp" in command else 2
        answer = json.dumps({"text": " is a statement", "tokens": tokens(ranks)})
        return subprocess.CompletedProcess(command, 0, stdout=answer)

    text = Path("train.txt")
    text.write_text("This is a test.")
    monkeypatch.setattr(demo, "prepare_text", lambda folder: ([text], [text], bigram))
    monkeypatch.setattr(demo, "run_quietly", run_quietly)
    monkeypatch.setattr(demo, "compare_with_transformers", lambda model: None)
    demo.main("demo")


@pytest.mark.parametrize("nats, bigram", [(1.26, 2.5), (1.2, 1.99), (math.nan, 2.5)])
def test_a_loss_that_is_too_high_fails_the_demo(demo, monkeypatch, nats, bigram):
    with pytest.raises(ValueError, match="^the held-out loss is not at most 1.25 nats/byte and 0.8 below the bigram"):
        run_demo(demo, monkeypatch, nats, bigram)


def test_different_tokens_fail_the_demo(demo, monkeypatch):
    with pytest.raises(ValueError, match=r"^1 and 2 ranks generated different tokens: \[1\] and \[2\]$"):
        run_demo(demo, monkeypatch, 1.2, tokens=lambda ranks: [ranks])


def test_the_benchmark_reads_what_the_demo_prints(demo, monkeypatch, capsys):
    run_demo(demo, monkeypatch, 1.2345)
    out = capsys.readouterr().out
    assert re.search(r"1 and 2 ranks generated the same 2 tokens", out)
    assert script(monkeypatch, "benchmarks/training/demo.py").results(out) == ["0", "1.234", "2.500"]
