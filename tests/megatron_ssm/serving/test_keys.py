"""API keys. Oracle: RFC 6750's header."""

import pytest

from megatron_ssm.api.errors import ApiError
from megatron_ssm.serving.keys import Keys


def test_each_key_is_a_user(tmp_path):
    (tmp_path / "keys").write_text("# ours\nsk-one\n\n  sk-two  \n")
    keys = Keys.read(tmp_path / "keys")
    assert keys.owner("Bearer sk-one") == keys.owner("bearer sk-one") != keys.owner("Bearer sk-two")
    assert "sk" not in keys.owner("Bearer sk-one")
    wrong = "sk-one, Basic sk-one, Bearer, Bearer sk-on, Bearer sk-one2, Bearer # ours, Bearer é".split(", ")
    for header in (None, "", *wrong):
        with pytest.raises(ApiError) as refused:
            keys.owner(header)
        assert refused.value.status == 401 and refused.value.headers["WWW-Authenticate"] == "Bearer"


def test_without_keys_everybody_is_the_same_user():
    assert Keys().owner(None) == Keys().owner("Bearer anything") == ""


def test_wrong_files(tmp_path):
    (tmp_path / "empty").write_text("# none\n")
    with pytest.raises(ValueError, match="empty has no API keys"):
        Keys.read(tmp_path / "empty")
    (tmp_path / "spaces").write_text("sk-one\nsecret two\n")
    with pytest.raises(ValueError, match="API key 2 must have printable ASCII") as refused:
        Keys.read(tmp_path / "spaces")
    assert "secret" not in str(refused.value)
    with pytest.raises(FileNotFoundError):
        Keys.read(tmp_path / "missing")
