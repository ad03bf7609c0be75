"""The model class of lm-eval. Oracle: lm-eval's own class `hf`, on tasks made from local files."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from chosen import by_default
from tokenizers import Tokenizer, models, pre_tokenizers

from serving import FAMILIES, checkpoint, save_table

lm_eval = pytest.importorskip("lm_eval")

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [
    dict(
        context="The state", choices=[" of space", " is Überraschung", "s"], answer=1, text="A line.\nAnd another one."
    ),
    dict(context="", choices=["Mamba", "Zamba"], answer=0, text="short"),
    dict(context="2 + 2 = ", choices=["4", "5", "22"], answer=0, text="words, words, words " * 8),
]
TASKS = {
    "local_choice": dict(
        output_type="multiple_choice", doc_to_choice="{{choices}}", doc_to_target="{{answer}}", doc_to_text="{{context}}",
        metric_list=[dict(metric="acc")],
    ),
    "local_text": dict(
        output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
        metric_list=[dict(metric="byte_perplexity")],
    ),
    "local_answer": dict(
        output_type="generate_until", doc_to_text="{{text}}", doc_to_target="{{context}}",
        generation_kwargs=dict(until=["a", "\n"], max_gen_toks=20), metric_list=[dict(metric="bypass")],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with the tasks and their documents."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, task in TASKS.items():
        files = dict(dataset_path="json", dataset_kwargs=dict(data_files=dict(test=str(folder / "documents.jsonl"))))
        (folder / f"{name}.yaml").write_text(json.dumps(dict(task=name, test_split="test", **files, **task)))
    return folder


def answers(tasks, model, **model_args):
    """{task: what the model answered to each document}."""
    from lm_eval.tasks import TaskManager

    os.environ["HF_DATASETS_CACHE"] = str(tasks / "cache")
    results = lm_eval.simple_evaluate(
        model, model_args, list(TASKS), batch_size=2, log_samples=True, task_manager=TaskManager(include_path=str(tasks)),
        device="cpu",
    )  # fmt: skip
    return {
        name: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for name, samples in results["samples"].items()
    }


def assert_same(found, expected):
    """Equal texts and greedy flags, and log-likelihoods to 1e-4."""
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4, rel=0)
    else:
        assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("family", by_default(("mamba2",), FAMILIES))
def test_the_answers_are_those_of_hf(family, tasks):
    """Also in windows of 24 tokens, which are less than the texts have."""
    import megatron_ssm.integrations.lm_eval  # noqa: F401

    directory = str(checkpoint(family))
    for options in ({}, dict(max_length=24)):
        expected = answers(tasks, "hf", pretrained=directory, dtype="float32", **options)
        found = answers(tasks, "megatron-ssm", pretrained=directory, **options)
        assert found.keys() == expected.keys() == TASKS.keys()
        for name in TASKS:
            assert_same(found[name], expected[name])
    assert any(text for document in found["local_answer"] for response in document for text in response)


def evaluated(response):
    """A response as it was before lm-eval wrote its numbers as text."""
    return ast.literal_eval(response) if isinstance(response, str) else [evaluated(each) for each in response]


@pytest.mark.full
def test_the_command_line_on_two_ranks(tasks, tmp_path):
    """`tp=2` starts the other rank, and gives the results of one; so does torchrun, and only one rank writes them."""
    results = []
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, tp, launcher in (("one", 1, []), ("two", 2, []), ("torchrun", 2, torchrun)):
        command = [sys.executable, *launcher, "-m", "megatron_ssm.integrations.lm_eval", "--model", "megatron-ssm"]
        command += ["--model_args", f"pretrained={checkpoint('zamba2')},tp={tp}", "--tasks", ",".join(TASKS)]
        command += ["--include_path", str(tasks), "--output_path", str(tmp_path / name), "--log_samples"]
        environment = os.environ | dict(PYTHONPATH=str(ROOT), HF_DATASETS_CACHE=str(tasks / "cache"))
        subprocess.run(command, check=True, env=environment, cwd=tmp_path, timeout=300)
        assert len(list((tmp_path / name).rglob("results_*.json"))) == 1
        files = sorted((tmp_path / name).rglob("samples_*.jsonl"))
        lines = [(file.name, json.loads(line)["resps"]) for file in files for line in file.read_text().splitlines()]
        results.append([response if "local_answer" in file else evaluated(response) for file, response in lines])
    assert len(results[0]) == len(TASKS) * len(DOCUMENTS)
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_a_generation_ends_at_a_special_token(tmp_path):
    """`hf` finds stop sequences in a text with special tokens, and returns it without them."""
    from lm_eval.models.huggingface import HFLM

    from megatron_ssm.integrations.lm_eval import MegatronSsmLM

    names = ["a", "<unk>", "<eos>", "b", "c", "<turn>"]
    tokenizer = Tokenizer(models.WordLevel({name: token for token, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<eos>", "<turn>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    special = dict(eos_token="<eos>", unk_token="<unk>", pad_token="<eos>")
    config = dict(tokenizer_class="PreTrainedTokenizerFast", **special)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    table = torch.zeros(len(names), len(names))
    for token, following in zip("a b <turn> c".split(), "b <turn> c a".split(), strict=True):
        table[names.index(token), names.index(following)] = 5.0
    save_table(tmp_path, table)
    context = ("a", dict(until=["<turn>"], max_gen_toks=6))
    requests = [lm_eval.api.instance.Instance("generate_until", {}, context, 0)]
    expected = HFLM(pretrained=str(tmp_path), dtype="float32", device="cpu").generate_until(requests)
    assert MegatronSsmLM(str(tmp_path)).generate_until(requests) == expected == ["b"]


def test_the_entry_point_is_the_registered_class():
    """lm-eval, which records the entry point before it imports the module, requires that."""
    name, place = re.search(r'"lm_eval.models": \["(\S+) = (\S+)"\]', (ROOT / "setup.py").read_text()).groups()
    found = EntryPoint(name, place, "lm_eval.models").load()
    assert lm_eval.api.registry.get_model(name) is found and place == f"{found.__module__}:{found.__name__}"


@pytest.mark.parametrize("field, name", (("dtype", "bfloat16"), ("torch_dtype", "float64"), ("none", "float32")))
def test_the_dtype_of_the_configuration(tmp_path, field, name):
    from megatron_ssm.integrations.lm_eval import MegatronSsmLM

    shutil.copytree(checkpoint("mamba2"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key != "dtype"}
    (tmp_path / "config.json").write_text(json.dumps({**kept, field: name}))
    assert str(MegatronSsmLM(str(tmp_path), dtype="auto")._evaluated.model.dtype) == f"torch.{name}"


def test_what_it_refuses(tasks):
    from megatron_ssm.integrations.lm_eval import MegatronSsmLM

    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        MegatronSsmLM("nowhere")
    directory = str(checkpoint("mamba2"))
    for arguments, message in (
        (dict(trust_remote_code=True, prefix_token_id=0), "not implemented: prefix_token_id, trust_remote_code"),
        (dict(dtype="fp32", tp=2), "dtype=fp32 is neither auto nor a floating-point torch dtype"),
        (dict(dtype="int8"), "dtype=int8 is neither auto nor"),
        (dict(tp=0), "tp=0 must be an integer of at least 1"),
        (dict(tp="two"), "tp=two must be an integer of at least 1"),
        (dict(batch_size=-1), "batch_size=-1 must be auto or an integer of at least 1"),
        (dict(batch_size="abc"), "batch_size=abc must be auto or an integer of at least 1"),
        (dict(max_length=0), "max_length=0 must be an integer of at least 1"),
        (dict(max_length="x"), "max_length=x must be an integer of at least 1"),
        (dict(max_gen_toks=0), "max_gen_toks=0 must be an integer of at least 1"),
        (dict(add_bos_token="yes"), "add_bos_token=yes must be True or False"),
        (dict(device=1), "device=1 must be cpu or cuda"),
    ):
        with pytest.raises(ValueError, match=message):
            MegatronSsmLM(directory, **arguments)
    with pytest.raises(FileNotFoundError, match="5 does not exist"):
        MegatronSsmLM(5)
    model = MegatronSsmLM(directory, max_length=30, batch_size="auto")
    for options, message in (
        (dict(num_beams=2, typical_p=0.5), "generation options that are not implemented: num_beams, typical_p"),
        (dict(max_gen_toks="x"), r"generation options \{'max_gen_toks': 'x'\}: "),
        (dict(temperature=None), r"generation options \{'temperature': None\}: "),
        (dict(max_gen_toks=-1), "max_gen_toks=-1 must be an integer of at least 1"),
        (dict(do_sample="no"), "do_sample=no must be True or False"),
        (dict(max_gen_toks=30), "max_gen_toks=30 leaves no room for a context in max_length=30"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate_until([lm_eval.api.instance.Instance("generate_until", {}, ("a", options), 0)])
    with pytest.raises(ValueError, match="a continuation of 31 tokens exceeds max_length=30"):
        model.loglikelihood([lm_eval.api.instance.Instance("loglikelihood", {}, ("a", "b" * 31), 0)])
