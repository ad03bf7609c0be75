"""DeepSpeed's configuration beside the options. Oracles: the contract, transformers' "auto", and what DeepSpeed reads."""

import json
import re
from dataclasses import replace

import pytest

import tiny
from megatron_ssm.train.deepspeed_settings import IGNORED, read_settings
from megatron_ssm.train.options import Options, parse_options

RUN = dict(
    tiny.RUN, params_dtype="float32", micro_batch_size=2, global_batch_size=12, weight_decay=0.1, adam_eps=1e-8
)  # on 3 replicas


def settings(tmp_path, given, ranks=3, **changes):
    """The configuration that DeepSpeed gets from a file with this object, or this text."""
    path = tmp_path / "ds.json"
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    return read_settings(Options(**{**RUN, **changes}, engine="deepspeed", deepspeed_config=str(path)), ranks, 16)


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "offload_optimizer": {"device": "none"},
    },
    "steps_per_print": 100,
}  # fmt: skip
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 3, "warmup_type": "linear",
               "total_num_steps": 20},
}  # fmt: skip
SAME = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "bf16": {"enabled": False},
    "zero_optimization": {"stage": 2},
}


@pytest.mark.parametrize("given", [{}, AUTO, SAME])
@pytest.mark.parametrize("scheduler", [{}, {"scheduler": SCHEDULE}])
def test_values_come_from_the_options_or_agree_with_them(tmp_path, given, scheduler):
    found = settings(tmp_path, given | scheduler, lr_decay_style="linear")
    expected = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
    assert expected.items() <= found.items() and found["bf16"] == {"enabled": False}
    assert "optimizer" not in found and "fp16" not in found and "train_batch_size" not in found


def test_sizes_and_keys_of_deepspeed(tmp_path):
    """Sizes are those that transformers computes from the width; DeepSpeed reads the result."""
    found = settings(tmp_path, AUTO)
    zero = found["zero_optimization"]
    assert found["steps_per_print"] == 100
    assert (zero["stage"], zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (3, 256, 230)
    assert zero["stage3_param_persistence_threshold"] == 160 and "offload_optimizer" not in zero
    assert list(zero)[:4] == list(AUTO["zero_optimization"])[:4]  # the file's order: the ranks compare the text
    config = pytest.importorskip("deepspeed").DeepSpeedConfig(found)
    assert (config.gradient_accumulation_steps, config.zero_optimization_stage, config.gradient_clipping) == (2, 3, 0)


@pytest.mark.parametrize(
    "section, given, kept",
    [("bf16", True, True), ("bf16", "auto", True), ("torch_autocast", True, False), ("torch_autocast", "auto", False)],
)
def test_where_bf16_is(tmp_path, section, given, kept):
    """In DeepSpeed's parameters, or in autocast alone."""
    zero = {"zero_optimization": {"stage": 1}}
    assert settings(tmp_path, zero, bf16=True)["bf16"] == {"enabled": False}
    assert settings(tmp_path, zero | {section: {"enabled": given}}, bf16=True)["bf16"] == {"enabled": kept}
    both = zero | {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    assert settings(tmp_path, both, bf16=True)["bf16"] == {"enabled": False}


HARMLESS = {  # as in files for transformers' Trainer
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_min_lr": "auto", "total_num_steps": "auto"}},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None, "profile": False},
    "fp16": {"enabled": "auto", "auto_cast": False, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2,
             "initial_scale_power": 16, "min_loss_scale": 1},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto"},
}  # fmt: skip


def test_what_changes_nothing_is_accepted(tmp_path):
    """And not passed on. The file may begin with a byte order mark, as some editors write it."""
    found = settings(tmp_path, "\ufeff" + json.dumps(HARMLESS))
    assert found == settings(tmp_path, {"zero_optimization": {"stage": 3}})


def test_values_that_deepspeed_reads(tmp_path):
    """A size may be a float, as JSON reads 5e8."""
    found = settings(tmp_path, '{"communication_data_type": "FP32", "zero_optimization": {"reduce_bucket_size": 5e8}}')
    config = pytest.importorskip("deepspeed").DeepSpeedConfig(found)
    assert config.zero_config.reduce_bucket_size == 5 * 10**8


OF_OTHER_STAGES = {
    "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 0, "stage3_max_live_parameters": 10, "reduce_bucket_size": 500, "overlap_comm": True},
}  # fmt: skip


def test_keys_without_effect_are_accepted(tmp_path):
    """Those of other stages are passed on; the optimizer is torch's whatever its section says."""
    optimizer = {"optimizer": {"params": {"torch_adam": False}}}
    found = settings(tmp_path, OF_OTHER_STAGES | optimizer)
    assert OF_OTHER_STAGES["zero_optimization"].items() <= found["zero_optimization"].items()
    assert not {"optimizer", "zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer"} & found.keys()


NO_VALUE = {"enabled": None}


@pytest.mark.parametrize(
    "given",
    [
        dict.fromkeys(("train_batch_size", "gradient_clipping", "optimizer", "scheduler", "bf16", "steps_per_print")),
        {"optimizer": {"type": None, "params": {"lr": None, "betas": None, "adam_w_mode": None, "momentum": None}}},
        {"scheduler": {"type": None, "params": {"warmup_num_steps": None}}, "zero_optimization": None},
        {"optimizer": {"params": None}, "bf16": NO_VALUE, "fp16": NO_VALUE, "torch_autocast": NO_VALUE},
        {"zero_optimization": {"stage": None, "overlap_comm": None, "offload_param": None,
                               "offload_optimizer": {"device": None}}},
    ],
)  # fmt: skip
def test_null_is_as_if_absent(tmp_path, given):
    """In every section, and for every kind of key."""
    assert settings(tmp_path, given) == settings(tmp_path, {})


def params(**changed):
    return {"optimizer": {"type": "AdamW", "params": changed}}


def schedule(**changed):
    return {"scheduler": {"params": changed}}


@pytest.mark.parametrize(
    "given, changes, line",
    [
        ({"train_batch_size": 8}, {}, "train_batch_size 8 contradicts --global-batch-size 12"),
        ({"train_micro_batch_size_per_gpu": 4}, {}, "train_micro_batch_size_per_gpu 4 contradicts --micro-batch-size 2"),
        ({"gradient_accumulation_steps": 4}, {},
         "gradient_accumulation_steps 4 contradicts --global-batch-size 12 / (--micro-batch-size 2 x 3 data-parallel ranks) "
         "= 2"),
        ({"gradient_clipping": 1.0}, {}, "gradient_clipping 1.0 contradicts --clip-grad 0.5"),
        ({"steps_per_print": 0}, {}, "steps_per_print 0 is not a positive integer"),
        (params(lr=0.1), {}, "optimizer.params.lr 0.1 contradicts --lr 0.01"),
        (params(betas=[0.9, 0.999]), {},
         "optimizer.params.betas [0.9, 0.999] contradicts --adam-beta1 0.9 --adam-beta2 0.95"),
        (params(adam_w_mode=False), {},
         "optimizer.params.adam_w_mode false contradicts the optimizer of this script, AdamW"),
        ({"optimizer": {"type": "Lamb"}}, {}, 'optimizer.type "Lamb" contradicts the optimizer of this script, AdamW'),
        ({"bf16": {"enabled": True}}, {}, "bf16.enabled true contradicts a run without --bf16"),
        ({"bf16": {"enabled": False}}, dict(bf16=True), "bf16.enabled false contradicts --bf16"),
        ({"torch_autocast": {"enabled": True}}, {}, "torch_autocast.enabled true contradicts a run without --bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, dict(bf16=True),
         'torch_autocast.dtype "float16" contradicts --bf16'),
        ({"fp16": {"enabled": True}}, {}, "fp16.enabled true contradicts the options, which have no loss scale"),
        ({"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}, dict(bf16=True),
         "bf16.enabled and torch_autocast.enabled are both true: parameters are in bf16, or stay fp32"),
        ({"bf16": {"enabled": True}}, dict(bf16=True), "bf16.enabled needs zero_optimization.stage 1, 2 or 3; .*"),
        ({"zero_optimization": {"stage": 4}}, {}, "zero_optimization.stage 4 is not 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2}}, dict(gradient_mode="layerwise"),
         "--gradient-mode layerwise needs zero_optimization.stage 0 or 1: stage 2 divides gradients over the ranks"),
        ({"gradient_predivide_factor": 2, "zero_optimization": {"stage": 3}}, {},
         "gradient_predivide_factor 2 does not work with zero_optimization.stage 3"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, 'scheduler.type "WarmupLR" contradicts --lr-decay-style cosine'),
        ({"scheduler": {"type": "WarmupCosineLR"}}, dict(min_lr=1e-3),
         'scheduler.type "WarmupCosineLR" contradicts --min-lr 0.001'),
        (schedule(warmup_type="log"), {}, 'scheduler.params.warmup_type "log" contradicts the warm-up, which is linear'),
        (schedule(total_num_steps=20), dict(lr_decay_iters=15),
         "scheduler.params.total_num_steps 20 contradicts --lr-decay-iters 15"),
        *[(given, {}, f"{key} is not supported by examples/pretrain.py") for key, given in {
            "pipeline": {"pipeline": {}},
            "optimizer": {"optimizer": "AdamW"},
            "optimizer.params.momentum": params(momentum=1),
            "scheduler.params.cos_min_ratio": schedule(cos_min_ratio=0.1),
            "activation_checkpointing": {"activation_checkpointing": {"partition_activations": True}},
            "zero_optimization.offload_optimizer": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.round_robin_gradients": {"zero_optimization": {"round_robin_gradients": True}},
        }.items()],
    ],
)  # fmt: skip
def test_contradictions_and_what_is_not_supported(tmp_path, given, changes, line):
    with pytest.raises(ValueError) as error:
        settings(tmp_path, given, **changes)
    pattern = re.escape(line).replace(r"\.\*", ".*")
    assert re.fullmatch(re.escape(f"{tmp_path / 'ds.json'}: ") + pattern, str(error.value))


@pytest.mark.parametrize("text", ["[1]", '{"a": ', "{}{}"])
def test_files_that_are_no_configuration(tmp_path, text):
    with pytest.raises(ValueError, match=rf"^{tmp_path / 'ds.json'} is not a JSON object: .*$"):
        settings(tmp_path, text)


def test_a_missing_file():
    run = Options(**RUN, engine="deepspeed", deepspeed_config="none.json")
    with pytest.raises(FileNotFoundError, match="none.json"):
        read_settings(run, 3, 16)


def test_a_missing_package(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^--engine deepspeed needs the package deepspeed: pip install deepspeed$"):
        settings(tmp_path, {})


@pytest.mark.parametrize(
    "changes, line",
    [
        (dict(engine="deepspeed"), "--engine deepspeed needs --deepspeed-config"),
        (dict(deepspeed_config="ds.json"), "--engine torch has no use for --deepspeed-config"),
        (dict(engine="deepspeed", deepspeed_config="ds.json", params_dtype="float64"),
         "--engine deepspeed reduces no float64 gradients: --params-dtype float32"),
        (dict(engine="deepspeed", deepspeed_config="ds.json", memory_budget=1.0),
         "--memory-budget has no formula for --engine deepspeed"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_the_engine(changes, line):
    with pytest.raises(ValueError, match=f"^{line}$"):
        replace(Options(), **changes)


def test_an_engine_that_does_not_exist(capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--data", "x", "--out", "y", "--engine", "deepsped"])
    assert "argument --engine: invalid choice: 'deepsped'" in capsys.readouterr().err


def test_each_key_of_deepspeed(tmp_path):
    """Each is passed on, mapped or refused by name. Oracle: DeepSpeed's schema."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    sections = "amp sparse_attention data_efficiency curriculum_learning eigenvalue pipeline checkpoint aio autotuning"
    for key in [
        *sections.split(),
        "compression_training",
        "data_types",
        "hybrid_engine",
        "tensor_parallel",
        "elasticity",
    ]:
        with pytest.raises(ValueError, match=f"{key} is not supported"):
            settings(tmp_path, {key: {"enabled": True}})
    for name, field in DeepSpeedZeroConfig.model_fields.items():
        key = field.alias or name
        given = {"zero_optimization": {"stage": 1, key: 1 if key == "stage" else 7}}
        try:
            assert key in settings(tmp_path, given)["zero_optimization"] or f"zero_optimization.{key}" in IGNORED
        except ValueError as error:
            assert f"zero_optimization.{key}" in str(error)
