"""The command for lm-eval where lm-eval is not installed."""

import importlib.util
import runpy

import pytest


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        SystemExit, match=r"^there is no package lm_eval: pip install 'lm-eval>=0\.4\.12' transformers$"
    ):
        runpy.run_path("megatron_ssm/integrations/lm_eval.py", run_name="__main__")
