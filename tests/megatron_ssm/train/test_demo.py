"""The demo and its benchmark. Oracles: datetime's parser, known answers, phrasings told apart by patterns, exit codes."""

import importlib.util
import json
import re
import shlex
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from megatron_ssm.train.options import parse_options
from megatron_ssm.train.pretraining import pretrain

ROOT = Path(__file__).resolve().parents[3]
KNOWN = {
    "quarter past four in the afternoon": "16:15", "five to twelve at night": "23:55", "half past twelve at night": "00:30",
    "twelve oh five pm": "12:05", "quarter to one in the afternoon": "12:45", "six o'clock in the evening": "18:00",
    "one euro ten": "EUR 1.10", "two pence and one pound": "GBP 1.02", "one dollar and one cent": "USD 1.01",
}  # fmt: skip
PHRASINGS = (  # the first that matches
    r"the [a-z-]+ of .*", r"the \d+\w\w of .*", r"\d+ [A-Z]\w+ \d+", r"[A-Z]\w+ the .*", r"[A-Z]\w+ \d+\w\w, \d+",
    r".* (past|to) .*", r"\d+:\d+ [ap]m", r"\d+:.*", r".* [ap]m", r".* (in the \w+|at night)", r"\d+ \w+ and .*",
    r".*(cents?|penny|pence) and .*", r".* (cents?|penny|pence)", r".*",
)  # fmt: skip


def script(monkeypatch, path):
    """A script as a module that can import the other scripts of its folder."""
    monkeypatch.syspath_prepend(ROOT / Path(path).parent)
    spec = importlib.util.spec_from_file_location(path.replace("/", "_")[: -len(".py")], ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_standard_forms_are_right_and_held_out_combinations_are_not_learned(monkeypatch, tmp_path):
    returned = script(monkeypatch, "examples/phrases.py").write_phrases(tmp_path)
    texts = {name: (tmp_path / name / "phrases.jsonl").read_text().splitlines() for name in ("train", "held_out")}
    learned, held_out = (dict(json.loads(line)["text"].split("\n") for line in lines) for lines in texts.values())
    both = learned | held_out
    assert returned == held_out and len(held_out) >= 500 and len(both) == len(learned) + len(held_out)

    assert sum(phrase in both for phrase in KNOWN) > len(KNOWN) / 2
    assert all(both.get(phrase, form) == form for phrase, form in KNOWN.items())
    for phrase, form in both.items():
        if re.fullmatch(PHRASINGS[2], phrase):
            assert form == datetime.strptime(phrase, "%d %B %Y").strftime("%Y-%m-%d")
        elif re.fullmatch(PHRASINGS[6], phrase):
            assert form == datetime.strptime(phrase, "%I:%M %p").strftime("%H:%M")

    def combinations(pairs):
        kinds = (next(kind for kind, each in enumerate(PHRASINGS) if re.fullmatch(each, phrase)) for phrase in pairs)
        return {(*re.findall(r"\d+", form)[-2:], kind) for kind, form in zip(kinds, pairs.values(), strict=True)}

    known, asked = combinations(learned), combinations(held_out)
    assert {kind for *_, kind in known} == {kind for *_, kind in asked} == set(range(len(PHRASINGS)))
    assert not known & asked


@pytest.fixture
def demo(monkeypatch, tmp_path):
    """The demo with little to learn, 2 steps, one rank in this process, and any share of right replies."""
    monkeypatch.chdir(tmp_path)
    module = script(monkeypatch, "examples/demo.py")

    def in_this_process(path, *arguments, **options):
        if path.endswith("pretrain.py"):
            return pretrain(parse_options([*arguments, *"--tensor-model-parallel-size 1 --train-iters 2".split()]))
        directory, messages = arguments
        return json.dumps(module.replies(directory, Path(messages).read_text().splitlines()))

    monkeypatch.setattr(module, "on_two_ranks", in_this_process)
    monkeypatch.setattr(module, "LEAST", 0)
    write_phrases = module.write_phrases
    for name, value in dict(TRAIN=200, HELD_OUT=20).items():
        monkeypatch.setitem(write_phrases.__globals__, name, value)
    return module


def test_the_demo_ends_in_a_command_that_chats(demo, monkeypatch, capsys):
    demo.main("made")
    out = capsys.readouterr().out
    done = subprocess.run(
        shlex.split(out.splitlines()[-1]), input="half past six\nsix\n", capture_output=True, text=True
    )
    assert done.returncode == 0 and len(done.stdout.splitlines()) >= 2, done.stderr
    assert "0.0% of 20 replies" in out and "GraniteMoeHybridForCausalLM" in out
    seconds, exact = script(monkeypatch, "benchmarks/training/demo.py").results(out)
    assert (float(seconds), exact) == (pytest.approx(0, abs=600), "0.0")


def test_too_few_right_replies_and_different_ones_fail_the_demo(demo, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "replies", lambda model, messages: [str(len(messages) > 9)] * len(messages))
    monkeypatch.setattr(demo, "LEAST", 0.9)
    asked = {str(number): str(number != 0) for number in range(10)}
    demo.check_replies(tmp_path / "model", asked)
    with pytest.raises(ValueError, match=r"^only 80.0% of the replies are exact, and at least 90% should be$"):
        demo.check_replies(tmp_path / "model", asked | {"1": "False"})
    monkeypatch.setattr(demo, "on_two_ranks", lambda *command, **options: json.dumps(["False"] * 10))
    with pytest.raises(ValueError, match="^1 rank and 2 ranks reply differently$"):
        demo.check_replies(tmp_path / "model", asked)
