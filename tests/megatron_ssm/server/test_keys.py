"""Who may use the server: API keys, and the hosts that requests may name. Oracles: RFC 6750's header; the documentation."""

import httpx
import pytest

from megatron_ssm.server.errors import ApiError
from megatron_ssm.server.hosts import Hosts
from megatron_ssm.server.keys import Keys, key_in
from servers import LIMIT_S, server, with_template

# Keys


def test_each_key_is_a_user(tmp_path):
    (tmp_path / "keys").write_text("# ours\nsk-one\n\n  sk-two  \n")
    keys = Keys.read(tmp_path / "keys")
    for sent in ({"authorization": "Bearer sk-one"}, {"authorization": "bearer sk-one"}, {"x-api-key": "sk-one"},
                 {"api-key": "sk-one"}, {"authorization": "Basic proxy", "x-api-key": "sk-one"}):  # fmt: skip
        assert keys.owner(sent) == "1" and key_in(sent) == "sk-one"
    assert keys.owner({"authorization": "Bearer sk-two"}) == "2"
    wrong = "sk-one, Basic sk-one, Bearer, Bearer sk-on, Bearer sk-one2, Bearer # ours, Bearer é".split(", ")
    headers = [{"authorization": header} for header in ("", *wrong)]
    for sent in ({}, *headers, {"x-api-key": ""}, {"api-key": "sk-on"}, {"x-api-key": "Bearer sk-one"}):
        with pytest.raises(ApiError) as refused:
            keys.owner(sent)
        assert refused.value.status == 401 and refused.value.headers["WWW-Authenticate"] == "Bearer"


def test_without_keys_everybody_is_the_same_user():
    assert Keys().owner({}) == Keys().owner({"authorization": "Bearer anything"}) == ""


def test_wrong_files(tmp_path):
    (tmp_path / "empty").write_text("# none\n")
    with pytest.raises(ValueError, match="empty has no API keys"):
        Keys.read(tmp_path / "empty")
    (tmp_path / "spaces").write_text("sk-one\nsecret two\n")
    with pytest.raises(ValueError, match="API key 2 must have printable ASCII") as refused:
        Keys.read(tmp_path / "spaces")
    assert "secret" not in str(refused.value)
    (tmp_path / "utf-16").write_text("sk-one\n", encoding="utf-16")
    with pytest.raises(ValueError, match="utf-16 is not a text in UTF-8"):
        Keys.read(tmp_path / "utf-16")
    with pytest.raises(FileNotFoundError):
        Keys.read(tmp_path / "missing")


# Hosts

OWN = ("localhost", "localhost:8000", "LOCALHOST:1", "localhost.", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8000")
OTHERS = (
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.0.1", "[::2]:8000",
    "", ":8000", "localhost:x", "a:b:c", "[::1", "::1]", "127.0.0.1@evil.example", "0.0.0.0",
)  # fmt: skip


def is_allowed(hosts, header):
    try:
        return hosts.check(header) is None
    except ApiError as error:
        assert error.status == 403 and repr(header) in str(error)
        return False


@pytest.mark.parametrize("bound", ("127.0.0.1", "::1", "127.0.1.1"))
def test_a_server_that_is_bound_to_loopback(bound):
    hosts = Hosts(bound)
    assert [host for host in (*OWN, None) if not is_allowed(hosts, host)] == []
    assert [host for host in OTHERS if is_allowed(hosts, host)] == []


@pytest.mark.parametrize("bound", ("127.0.0.1", "0.0.0.0"))
def test_further_hosts(bound):
    hosts = Hosts(bound, ["Model.example", "[fe80::1]", "10.0.0.1"])
    allowed = ("model.example", "MODEL.example.:443", "[fe80::1]:8000", "10.0.0.1", *OWN)
    assert [host for host in allowed if not is_allowed(hosts, host)] == []
    assert [host for host in OTHERS if is_allowed(hosts, host)] == []


@pytest.mark.parametrize("bound", ("0.0.0.0", "::", "10.0.0.1"))
def test_a_server_that_other_machines_can_reach_answers_to_any_host(bound):
    assert all(is_allowed(Hosts(bound), host) for host in (*OWN, *OTHERS, None))


def is_allowed_from(hosts, origin):
    try:
        return hosts.check("localhost", origin) is None
    except ApiError as error:
        assert error.status == 403 and f"Origin names {origin!r}" in str(error)
        return False


def test_pages_from_elsewhere():
    """A browser names the page's scheme, host and port, or null."""
    foreign = ("null", "", "http://", "file://", *OWN, *(f"https://{host}" for host in OTHERS))
    for hosts, others in ((Hosts("127.0.0.1"), []), (Hosts("0.0.0.0", ["model.example"]), ["https://model.example"])):
        allowed = (None, *(f"http://{host}" for host in OWN), *others)
        assert [origin for origin in allowed if not is_allowed_from(hosts, origin)] == []
        assert [origin for origin in foreign if is_allowed_from(hosts, origin)] == []
    assert all(is_allowed_from(Hosts("0.0.0.0"), origin) for origin in foreign)


def test_pages_of_this_machine_may_read_replies_of_a_server_that_only_this_machine_reaches():
    """With any port; not pages whose host is only named like it."""
    pages = (
        "http://localhost:3000",
        "https://localhost:3000",
        "http://127.0.0.1",
        "http://[::1]:5173",
        "HTTP://LocalHost:1",
    )
    others = ("null", "", None, "localhost", "http://", "file://localhost", *(f"http://{host}" for host in OTHERS))
    local, public = Hosts("127.0.0.1"), Hosts("0.0.0.0", ["model.example"])
    assert [page for page in pages if not local.shares_with(page)] == []
    assert [page for page in others if local.shares_with(page)] == []
    assert [page for page in (*pages, *others) if public.shares_with(page)] == []


@pytest.mark.parametrize("host", ("model.example:80", "http://model.example", "", "a b", "::1", "*"))
def test_hosts_that_cannot_be_allowed(host):
    with pytest.raises(ValueError, match="--allowed-host .* must be a host name or an address, without a port"):
        Hosts("127.0.0.1", [host])


def test_requests(tmp_path):
    """Every path but those of probes is refused, the chat page too; the tools that people use work."""
    with server(with_template("mamba2"), tmp_path / "log", "--allowed-host", "model.example") as running:
        with httpx.Client(base_url=running.url, timeout=LIMIT_S) as client:
            for path in ("/", "/openapi.json", "/metrics", "/v1/models", "/nowhere"):
                reply = client.get(path, headers={"Host": "evil.example:8000"})
                assert reply.status_code == 403 and "names 'evil.example:8000'" in reply.json()["error"]["message"]
            for path in ("/health", "/ready", "/ping"):
                for name in ("Host", "Origin"):
                    assert client.get(path, headers={name: "10.0.0.7:8000"}).status_code == 200
            refused = client.post("/v1/completions", json={"prompt": "a"}, headers={"Host": "evil.example"})
            assert refused.status_code == 403
            for origin, status in (("https://evil.example", 403), ("null", 403), ("http://localhost:3000", 200)):
                reply = client.post("/v1/completions", json={"prompt": "a"}, headers={"Origin": origin})
                assert reply.status_code == status
            assert client.get("/", headers={"Host": "model.example"}).status_code == 200
            assert client.get("/").status_code == 200
        assert running.metric("requests_total", 'status="403"') == 8


PAGE = "https://chat.example:8443"


def test_origins_that_share_replies(tmp_path):
    """A page of an allowed origin may read replies and errors, also after a preflight, which needs no key."""
    (tmp_path / "keys").write_text("sk-a")
    flags = ["--allowed-origin", PAGE, "--allowed-origin", "null", "--api-key-file", tmp_path / "keys"]
    with server(with_template("mamba2"), tmp_path / "log", *flags) as running:
        with httpx.Client(base_url=running.url, timeout=LIMIT_S) as client:
            asked = {
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,x-stainless-os",
            }
            for origin in (PAGE, "null"):
                reply = client.options("/v1/chat/completions", headers={"Origin": origin, **asked})
                assert reply.status_code == 204 and reply.headers["access-control-allow-origin"] == origin
                assert reply.headers["access-control-allow-headers"] == asked["Access-Control-Request-Headers"]
                assert "POST" in reply.headers["access-control-allow-methods"]
            for headers, status in (({}, 401), ({"Authorization": "Bearer sk-a"}, 200)):
                reply = client.get("/v1/models", headers={"Origin": PAGE, **headers})
                assert reply.status_code == status and reply.headers["access-control-allow-origin"] == PAGE
            for origin in ("https://chat.example", "http://chat.example:8443", "https://evil.example"):
                for reply in (client.options("/v1/models", headers={"Origin": origin, **asked}),
                              client.get("/v1/models", headers={"Origin": origin})):  # fmt: skip
                    assert reply.status_code == 403 and "access-control-allow-origin" not in reply.headers
            reply = client.get("/v1/models", headers={"Origin": PAGE, "Host": "evil.example"})
            assert reply.status_code == 403
            for name in ("X-Api-Key", "api-key"):
                assert client.get("/v1/models", headers={name: "sk-a"}).status_code == 200
            reply = client.get("/v1/models", headers={"Origin": "http://localhost:3000", "X-Api-Key": "sk-a"})
            assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
            assert reply.headers["access-control-expose-headers"] == "Retry-After, X-Request-Id"


@pytest.mark.parametrize("origin", ("chat.example", "https://chat.example/", "*", "https://", ""))
def test_origins_that_cannot_be_allowed(origin):
    with pytest.raises(ValueError, match="--allowed-origin .* must be an origin, such as https://chat.example"):
        Hosts("127.0.0.1", [], [origin])
