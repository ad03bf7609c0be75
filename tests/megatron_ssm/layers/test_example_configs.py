"""The configurations in examples/configs. Oracle: transformers' models of them, without memory for their parameters."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_ssm import families
from megatron_ssm.train.options import parse_options

CONFIGS = Path(__file__).resolve().parents[3] / "examples" / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_published_models_have_the_size_of_their_name(path):
    """And as many parameters as transformers' model."""
    config = families.read(path)
    assert not config.unknown
    # transformers' routers have a buffer for what they add to choose
    count = sum(math.prod(field.shape) for field in config.fields() if not field.name.endswith(".correction"))
    fields = json.loads(path.read_text())
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    assert count == sum({id(parameter): parameter.numel() for parameter in theirs.parameters()}.values())
    size = next(part[:-1] for part in path.stem.split("-") if part.endswith("b") and part[0].isdigit())
    assert count / 1e9 == pytest.approx(float(size), rel=0.13)  # the names are round


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_options_are_those_of_a_run(path):
    options = parse_options(["--config", str(path), "--data", "text", "--out", "out"])
    config = families.from_dict(options.new_config(257, 256))
    assert (config.family, config.num_layers) == (options.model_type, options.num_layers)
