"""The page's files and what it asks the router: headers, caching, keys, what clients may see."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from sapwood.v1 import router_pb2
from sapwood_common.tenants.api_keys import hash_key, make_key
from sapwood_router.edges.ui import files

STATIC = Path(files.__file__).with_name("static")
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "where would this go?"}]}
PAGES = ["/ui/", *(f"/ui/{file.name}" for file in sorted(STATIC.iterdir()) if file.name != "index.html")]


@pytest.fixture
def keys(tmp_path):
    """A file with three tenants' keys, and what each sends; carol may ask once a minute."""
    path, made = tmp_path / "keys", {name: make_key() for name in ("alice", "bob", "carol")}
    path.write_text("".join(f"{name} {hash_key(key)}{' 1' * (name == 'carol')}\n" for name, key in made.items()))
    return path, {name: {"authorization": f"Bearer {key}"} for name, key in made.items()}


async def test_every_file_is_served_with_its_type_and_lets_nothing_in_from_elsewhere(cluster) -> None:
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    for page in PAGES:
        answer = await cluster.http.get(page)
        assert answer.status_code == 200, page
        kind = kinds[Path(page).suffix or ".html"]
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "http" not in policy
        for part in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "trusted-types 'none'"):
            assert part in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://(?!www\.w3\.org/)|innerHTML|insertAdjacentHTML|\beval\(", answer.text), page
        head = await cluster.http.head(page)
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", answer.headers["etag"])


def test_files_name_only_files_that_are_there() -> None:
    there = {file.name for file in STATIC.iterdir()}
    named = set(re.findall(r'(?:href|src)="([\w.]+)"', (STATIC / "index.html").read_text()))
    for file in STATIC.glob("*.js"):
        named |= set(re.findall(r'from "\./([\w.]+)"', file.read_text()))
    assert named | {"index.html"} == there


async def test_a_browser_that_has_a_file_is_told_so(cluster) -> None:
    first = await cluster.http.get("/ui/main.js")
    etag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for known, status in (
        (etag, 304),
        (f"W/{etag}", 304),
        (f'"other", {etag}', 304),
        ("*", 304),
        ('"other"', 200),
        ("", 200),
    ):
        answer = await cluster.http.get("/ui/main.js", headers={"if-none-match": known})
        assert (answer.status_code, answer.headers["etag"]) == (status, etag), known
        assert answer.content == (b"" if status == 304 else first.content)
        assert "content-security-policy" in answer.headers


@pytest.mark.parametrize("path", ["/", "/ui"])
async def test_shorter_paths_lead_to_the_page_also_behind_a_proxy_with_a_prefix(cluster, path) -> None:
    answer = await cluster.http.get(path)
    assert (answer.status_code, answer.headers["location"]) == (308, "ui/")
    assert (await cluster.http.get(path, follow_redirects=True)).url.path == "/ui/"
    assert (await cluster.http.get("/nothing")).status_code == 404  # nothing else lies below /
    assert (await cluster.http.post("/", json={})).status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/ui/../config.py",
        "/ui/%2e%2e/files.py",
        "/ui/..%2ffiles.py",
        "/ui/static/main.js",
        "/ui//main.js",
        "/ui/main.js/",
        "/ui/index.html",
        "/ui/%00",
        "/ui/main.js%00.html",
        "/ui/C:%5Cwindows",
    ],
)
async def test_nothing_but_the_pages_files_is_served(cluster, path) -> None:
    answer = await cluster.http.get(cluster.url + path)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/json"
    assert (await cluster.http.post("/ui/main.js", json={})).status_code == 405


async def test_the_page_can_be_left_out(make_cluster) -> None:
    async with make_cluster(1, ui=False) as cluster:
        for path in ("/", "/ui", "/ui/", "/ui/main.js", "/ui/fleet"):
            assert (await cluster.http.get(path)).status_code == 404
        assert (await cluster.http.post("/ui/route", json=CHAT)).status_code == 404
        answer = await cluster.http.post("/v1/chat/completions", json=CHAT, headers={"origin": cluster.url})
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, "origin")  # there is no page of its own


async def test_the_fleet_is_told_as_operators_are_told_it(make_cluster, wait_until) -> None:
    async with make_cluster(2, breaker_open_seconds=600) as cluster:
        await cluster.generate("abcdefghijklmnop")
        alive, dead = cluster.workers
        alive.load.running_requests, alive.load.waiting_requests = 3, 4
        alive.load.used_pages, alive.load.prompt_tokens, alive.load.cached_tokens = 2500, 100, 40
        seen = {worker.address: worker for worker in cluster.router.registry.all()}
        await wait_until(lambda: seen[alive.address].load.cached_tokens == 40)
        await dead.kill()
        await wait_until(lambda: not seen[dead.address].available)
        for _ in range(5):
            seen[alive.address].breaker.fault()
        answer = await cluster.http.get("/ui/fleet")
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
        told = answer.json()
        assert told["models"] == [{"id": "fake", "context_length": 100_000, "workers": 1, "hint": ""}]
        router = told["router"]
        assert (router["policy"], router["running"], router["queued"], router["problem"]) == ("cache_aware", 0, 0, "")
        rows = {row["address"]: row for row in router["workers"]}
        one = rows[alive.address]
        assert (one["state"], one["breaker"], one["model"]) == ("up", "open", "fake")
        assert (one["running"], one["waiting"], one["cache_used"], one["hit_rate"]) == (3, 4, 0.25, 0.4)
        assert (rows[dead.address]["state"], bool(rows[dead.address]["problem"])) == ("down", True)


async def test_a_route_is_explained_as_operators_are_told_it(make_cluster) -> None:
    async with make_cluster(2) as cluster:
        registry = cluster.router.registry
        first, second = (worker.address for worker in cluster.workers)
        registry.set_draining(next(worker for worker in registry.all() if worker.address == second), True)
        told = (await cluster.http.post("/ui/route", json={**CHAT, "max_tokens": 3, "stream": True})).json()
        by_address = {candidate["address"]: candidate for candidate in told["candidates"]}
        assert (told["chosen"], told["policy"], by_address[first]["excluded"]) == (first, "cache_aware", "")
        assert "drain" in by_address[second]["excluded"]
        asked = router_pb2.RouterGenerateRequest(messages=router_pb2.ChatMessages(messages=CHAT["messages"]))
        same = await cluster.stub.ExplainRoute(router_pb2.ExplainRouteRequest(request=asked))
        assert (same.chosen, same.reason, same.prompt_tokens) == (told["chosen"], told["reason"], told["prompt_tokens"])
        assert not cluster.calls()
        for wrong, field in (({**CHAT, "temperature": -1}, "temperature"), ({"model": "fake"}, "messages")):
            answer = await cluster.http.post("/ui/route", json=wrong)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert (await cluster.http.post("/ui/route", json={**CHAT, "model": "none"})).status_code == 404


async def test_with_keys_nothing_is_told_without_one_and_a_clients_key_shows_models_only(make_cluster, keys) -> None:
    path, sent = keys
    async with make_cluster(1, api_keys=path) as cluster:
        assert (await cluster.http.get("/ui/")).status_code == 200
        for wrong in ({}, {"authorization": "Bearer wrong"}):
            answer = await cluster.http.get("/ui/fleet", headers=wrong)
            assert answer.status_code == 401
            assert cluster.workers[0].address not in answer.text
            assert "fake" not in answer.text
        for _ in range(10):  # more often than the key may ask: a look takes nothing from its rate
            answer = await cluster.http.get("/ui/fleet", headers=sent["carol"])
            assert answer.status_code == 200
            assert answer.json() == {
                "models": [{"id": "fake", "context_length": 100_000, "workers": 1, "hint": ""}],
                "router": None,
                "loras": [],
            }
        assert (await cluster.http.post("/ui/route", json=CHAT, headers=sent["alice"])).status_code == 405  # not there
        call = cluster.stub.ListWorkers(
            router_pb2.ListWorkersRequest(), metadata=(("authorization", sent["alice"]["authorization"]),)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # it is the same over gRPC
            await call
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_with_keys_and_a_status_page_each_tenant_sees_workers_and_nothing_of_others(make_cluster, keys) -> None:
    path, sent = keys
    async with make_cluster(1, api_keys=path, status_page="on") as cluster:
        assert (await cluster.http.get("/ui/fleet")).status_code == 401
        assert (await cluster.http.post("/ui/route", json=CHAT)).status_code == 401
        body = {**CHAT, "max_tokens": 5}
        assert (await cluster.http.post("/v1/chat/completions", json=body, headers=sent["alice"])).status_code == 200
        told = {}
        for name, headers in (("alice", sent["alice"]), ("bob", sent["bob"])):
            shown = (await cluster.http.get("/ui/fleet", headers=headers)).text
            assert cluster.workers[0].address in shown
            assert not re.search("alice|bob|where would", shown)
            route = await cluster.http.post("/ui/route", json=CHAT, headers=headers)
            told[name] = route.json()["candidates"][0]["cached_tokens"]
        assert told["alice"] > 0 == told["bob"]  # what alice asked is cached for her alone, and bob is not told of it
        statuses = [(await cluster.http.post("/ui/route", json=CHAT, headers=sent["carol"])).status_code for _ in "12"]
        assert statuses == [200, 429]  # it is tokenized, so it takes from the key's rate


async def test_each_tenant_sees_the_times_of_its_own_requests_and_nobody_the_tree_of_all(make_cluster, keys) -> None:
    path, sent = keys
    async with make_cluster(1, api_keys=path, status_page="on") as cluster:
        for page in ("/ui/traces", "/ui/history", "/ui/cache"):
            assert (await cluster.http.get(page)).status_code == 401
        body = {**CHAT, "max_tokens": 5}
        await cluster.http.post("/v1/chat/completions", json=body, headers={**sent["alice"], "x-request-id": "hers"})
        seen = {}
        for name in ("alice", "bob"):
            seen[name] = (await cluster.http.get("/ui/traces", headers=sent[name])).json()["requests"]
        assert [each["request_id"] for each in seen["alice"]] == ["hers"]
        assert seen["bob"] == []
        (hers,) = seen["alice"]
        assert (hers["tenant"], hers["status"], hers["worker"]) == ("", "OK", cluster.workers[0].address)
        stages = [stage["name"] for stage in hers["stages"]]
        assert stages == ["prepare", "queue", "select", "acquire", "build", "dispatch", "execute"]
        refused = await cluster.http.get("/ui/cache", headers=sent["alice"])
        assert (refused.status_code, "--api-keys" in refused.json()["error"]["message"]) == (501, True)
        history = (await cluster.http.get("/ui/history", headers=sent["bob"])).json()
        assert [event["kind"] for event in history["events"]] == ["up"]


async def test_history_refuses_what_is_no_number_and_names_it(cluster) -> None:
    for wrong in ("x", "-1", "1" * 16, "٣"):
        answer = await cluster.http.get("/ui/history", params={"after": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


async def test_the_tree_names_the_workers_that_hold_a_prefix_and_none_of_its_text(cluster) -> None:
    for end in ("one", "two"):
        await cluster.generate("a long enough beginning, and then " + end)
    answer = await cluster.http.get("/ui/cache")
    shown = answer.json()
    first = shown["tree"][0]
    assert (first["parent"], first["heat"], first["held"][0][0] in {w.address for w in cluster.workers}) == (
        -1,
        2,
        True,
    )
    assert "beginning" not in answer.text


@pytest.mark.parametrize("settings", [{"admin_port": 0}, {"metrics_port": 0}, {"status_page": "off"}])
async def test_what_status_does_not_show_the_page_does_not_show(make_cluster, settings) -> None:
    async with make_cluster(1, **settings) as cluster:
        told = await cluster.http.get("/ui/fleet")
        assert told.json()["router"] is None
        assert cluster.workers[0].address not in told.text
        assert (await cluster.http.post("/ui/route", json=CHAT)).status_code == 405


async def test_the_page_may_ask_where_no_stranger_can_have_that_name(make_cluster, keys) -> None:
    async with make_cluster(1, cors_origins=("http://known.example:8000",)) as cluster:
        at = f"127.0.0.1:{cluster.router.http_port}"
        for host, origin, allowed in (
            (at, f"http://{at}", True),
            ("[::1]:8000", "http://[::1]:8000", True),
            ("localhost:8000", "http://localhost:8000", True),
            ("llm.localhost", "http://llm.localhost", True),
            ("known.example:8000", "http://known.example:8000", True),
            # A name that its owner has point here: the browser takes his page and this one for the same.
            ("evil.example:8000", "http://evil.example:8000", False),
            ("127.0.0.1.evil.example", "http://127.0.0.1.evil.example", False),
            (at, "http://127.0.0.1:1", False),  # another server of this machine
            (at, "http://evil.example", False),
            (at, "null", False),
        ):
            headers = {"host": host, "origin": origin}
            for path in ("/v1/chat/completions", "/ui/route"):
                answer = await cluster.http.post(path, json=CHAT, headers=headers)
                assert (answer.status_code == 200) == allowed, (path, headers)
                assert answer.status_code in (200, 403)
            got = await cluster.http.get("/ui/fleet", headers=headers)
            assert (got.status_code == 200) == allowed, headers
        got = await cluster.http.get(
            "/ui/fleet", headers={"host": "evil.example:8000"}
        )  # as browsers get from their own
        assert (got.status_code, got.json()["error"]["param"]) == (403, "host")
        assert "--cors-origins http://evil.example:8000" in got.json()["error"]["message"]
    path, sent = keys
    async with make_cluster(1, api_keys=path) as cluster:  # a stranger's page has no key
        named = {"host": "llm.example", "origin": "https://llm.example"}
        answer = await cluster.http.post("/v1/chat/completions", json=CHAT, headers={**named, **sent["bob"]})
        assert answer.status_code == 200
        assert (await cluster.http.get("/ui/fleet", headers={**named, **sent["bob"]})).status_code == 200
        assert (await cluster.http.get("/ui/fleet", headers=named)).status_code == 401
