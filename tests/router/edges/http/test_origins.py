"""Web pages: refused unless their origin is configured, and then told so as browsers ask (CORS)."""

from __future__ import annotations

import asyncio

import pytest

from sapwood_common.errors import ConfigError
from sapwood_common.settings.config import load_config
from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_router.config import RouterConfig

COMPLETIONS = "/v1/completions"
BODY = b'{"model": "fake", "prompt": "abc", "max_tokens": 2}'
MINE, FOREIGN = "https://chat.example:8443", "https://evil.example"


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (None, 200),
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("text/plain", 415),
        ("text/plain;charset=UTF-8", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=application/json", 415),
        ("application/jsonx", 415),
        ("", 415),
    ],
)
async def test_a_body_that_is_said_to_be_anything_but_json_is_refused_by_name(cluster, kind, status) -> None:
    headers = {} if kind is None else {"content-type": kind}
    for path in (COMPLETIONS, "/v1/chat/completions", "/v1/embeddings"):
        answer = await cluster.http.post(path, content=BODY, headers=headers)
        assert (answer.status_code == 415) == (status == 415), answer.text
        if status == 415:
            assert answer.json()["error"]["param"] == "content-type"
    assert len(cluster.calls()) == (1 if status == 200 else 0)


@pytest.mark.parametrize("origin", [FOREIGN, "null", "http://127.0.0.1:8000", "chrome-extension://abc"])
async def test_by_default_no_page_may_ask(cluster, origin) -> None:
    for method, path in (("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/v1/models/fake")):
        answer = await cluster.http.request(method, path, content=BODY, headers={"origin": origin})
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, "origin")
        assert not any(name.startswith("access-control") for name in answer.headers)
    asks = {"origin": origin, "access-control-request-method": "POST"}
    assert (await cluster.http.options(COMPLETIONS, headers=asks)).status_code == 403
    assert not cluster.calls()
    assert (await cluster.http.get("/health", headers={"origin": origin})).status_code == 200


async def test_pages_of_a_configured_origin_may_ask_and_read_answers_and_errors(make_cluster, tmp_path) -> None:
    key = make_key()
    keys = tmp_path / "keys"
    keys.write_text(f"alice {hash_key(key)}\n")
    async with make_cluster(1, cors_origins=("https://other.example", MINE), api_keys=keys) as cluster:
        asks = {
            "origin": MINE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type,x-stainless-lang",
        }
        may = await cluster.http.options(COMPLETIONS, headers=asks)
        assert may.status_code == 204
        assert may.headers["access-control-allow-origin"] == MINE
        assert "POST" in may.headers["access-control-allow-methods"]
        assert may.headers["access-control-allow-headers"] == asks["access-control-request-headers"]
        assert int(may.headers["access-control-max-age"]) > 0
        authorization = {"authorization": f"Bearer {key}"}
        for headers, status in ((authorization, 200), ({}, 401)):
            for stream in (b"true", b"false"):
                content = BODY[:-1] + b', "stream": ' + stream + b"}"
                answer = await cluster.http.post(COMPLETIONS, content=content, headers={"origin": MINE, **headers})
                assert answer.status_code == status
                assert answer.headers["access-control-allow-origin"] == MINE
                assert "x-request-id" in answer.headers["access-control-expose-headers"]
                assert answer.headers["vary"] == "origin"
        answer = await cluster.http.post(COMPLETIONS, content=BODY, headers={"origin": FOREIGN, **authorization})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        answer = await cluster.http.post(COMPLETIONS, content=BODY, headers=authorization)
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (200, False)


async def test_what_is_no_question_of_a_browser_or_for_no_path_is_refused(make_cluster) -> None:
    async with make_cluster(1, cors_origins=("*",)) as cluster:
        asks = {"origin": FOREIGN, "access-control-request-method": "POST"}
        may = await cluster.http.options(COMPLETIONS, headers=asks)
        assert (may.status_code, may.headers["access-control-allow-origin"]) == (204, "*")
        assert "access-control-allow-headers" not in may.headers
        assert (await cluster.http.options("/v1/nothing", headers=asks)).status_code == 404
        answer = await cluster.http.options(COMPLETIONS)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        answer = await cluster.http.options(COMPLETIONS, headers={**asks, "access-control-request-headers": "a:b"})
        assert (answer.status_code, "access-control-allow-headers" in answer.headers) == (204, False)


@pytest.mark.parametrize("given", ["https://a.example/", "a.example", "https://a.example/chat", "https://*.example"])
def test_what_no_browser_sends_as_an_origin_is_refused_at_the_start(given) -> None:
    with pytest.raises(ConfigError, match="cors-origins"):
        load_config(RouterConfig, {"cors_origins": [given]})


EVIL_HOST = {"host": "evil.example:8000"}


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/api/tags", "/load", "/server_info", "/version", "/ui/", "/openapi.json", "/no"]
)
async def test_a_local_router_without_keys_answers_nobody_under_names_of_other_machines(cluster, path) -> None:
    """A page at evil.example whose name points to 127.0.0.1 for a moment reads what it gets, and browsers then say no origin."""
    answer = await cluster.http.get(path, headers=EVIL_HOST)
    assert answer.status_code == 403 and "evil.example" in answer.text
    for host in ("127.0.0.1:8000", "localhost", "LOCALHOST:1", "a.localhost:1", "[::1]:8000", "192.168.1.5"):
        assert (await cluster.http.get(path, headers={"host": host})).status_code != 403


@pytest.mark.parametrize("target", [b"http://evil.example/v1/models", b"http://127.0.0.1@evil.example?/v1/models"])
async def test_the_host_in_a_request_target_counts_and_not_the_header(cluster, target) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
    writer.write(b"GET " + target + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 403 ") and b"evil.example" in answer


async def test_a_page_whose_name_points_here_may_not_send_requests(cluster) -> None:
    for headers in (EVIL_HOST, EVIL_HOST | {"origin": "http://evil.example:8000"}):
        answer = await cluster.http.post(COMPLETIONS, content=BODY, headers=headers)
        assert answer.status_code == 403
    assert not cluster.calls()


async def test_other_host_names_are_served_if_listed_or_if_keys_are_asked_for(make_cluster, tmp_path) -> None:
    async with make_cluster(1, cors_origins=("http://evil.example:8000",)) as cluster:
        assert (await cluster.http.get("/v1/models", headers=EVIL_HOST)).status_code == 200
    keys = tmp_path / "keys"
    keys.write_text(f"alice {hash_key(make_key())}\n")
    async with make_cluster(1, api_keys=keys) as cluster:
        assert (await cluster.http.get("/v1/models", headers=EVIL_HOST)).status_code == 401
