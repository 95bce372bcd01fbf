import asyncio
import os
from pathlib import Path

import pytest

from sapwood_common.errors import ConfigError, ResourceExhaustedError, UnauthenticatedError
from sapwood_common.tenants.api_keys import ApiKeys, Key, hash_key, make_key, until_revoked
from sapwood_common.tenants.tenant import TargetRange
from sapwood_testing.clock import Clock


def test_a_key_names_its_owner(tmp_path: Path) -> None:
    key = make_key()
    (tmp_path / "keys").write_text(f"# comment\n\nalice {hash_key(key)}  # hers\nbob {'0' * 64} 5\n")
    keys = ApiKeys(tmp_path / "keys")
    assert keys.check(f"Bearer {key}").name == "alice"
    assert keys.check(f"bearer  {key} ").name == "alice"
    for wrong in ("", "Bearer", f"Basic {key}", f"Bearer {key}x", f"Bearer {hash_key(key)}", "Bearer " + "0" * 64):
        with pytest.raises(UnauthenticatedError):
            keys.check(wrong)


def test_a_rate_refills_and_survives_a_new_file(tmp_path: Path) -> None:
    key, path, clock = make_key(), tmp_path / "keys", Clock(100.0)
    path.write_text(f"alice {hash_key(key)} 60\n")
    keys = ApiKeys(path, clock)
    for _ in range(10):
        keys.check(f"Bearer {key}")
    with pytest.raises(ResourceExhaustedError) as refused:
        keys.check(f"Bearer {key}")
    assert refused.value.retry_after == pytest.approx(1.0)
    path.write_text(f"bob {'1' * 64}\nalice {hash_key(key)} 60\n")
    clock.now += 1.5
    keys.check(f"Bearer {key}")
    with pytest.raises(ResourceExhaustedError):
        keys.check(f"Bearer {key}")


def test_a_broken_new_file_leaves_the_keys_as_they_were(tmp_path: Path) -> None:
    key, path, clock = make_key(), tmp_path / "keys", Clock(100.0)
    path.write_text(f"alice {hash_key(key)}\n")
    keys = ApiKeys(path, clock)
    path.write_text("what is this\n")
    clock.now += 5
    assert keys.check(f"Bearer {key}").name == "alice"
    path.write_text(f"carol {hash_key(key)}\n")
    clock.now += 5
    assert keys.check(f"Bearer {key}").name == "carol"


_WRONG_TARGETS = ["", "x", "0", "-5", "5-", "5-4", "1e3", "nan", "3600001", "0.0001", "1-2-3"]


@pytest.mark.parametrize(
    "rest",
    ["fast", "1 2", "tokens=x", "weight=0", "weight=nan", "priority=101", "priority=x", "salt=x"]
    + [f"{kind}={value}" for kind in ("ttft-ms", "tpot-ms") for value in _WRONG_TARGETS],
)
def test_a_wrong_limit_is_refused_by_number(tmp_path: Path, rest: str) -> None:
    (tmp_path / "keys").write_text(f"# fine\na {'0' * 64} {rest}\n")
    with pytest.raises(ConfigError, match="line 2"):
        ApiKeys(tmp_path / "keys")


def test_a_line_sets_targets_for_tokens(tmp_path: Path) -> None:
    key, path = make_key(), tmp_path / "keys"
    path.write_text(f"a {hash_key(key)} ttft-ms=200-2000 tpot-ms=7.5\n")
    settings = ApiKeys(path, Clock(100.0)).check(f"Bearer {key}").settings
    assert (settings.first_token, settings.each_token) == (TargetRange(200, 2000), TargetRange(7.5, 7.5))


@pytest.mark.parametrize("line", ["alice", "alice sk-sapwood-secret"])
def test_a_wrong_line_is_refused_by_number_and_never_shown(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys").write_text(f"# fine\n{line}\n")
    with pytest.raises(ConfigError, match="line 2") as refused:
        ApiKeys(tmp_path / "keys")
    assert "secret" not in str(refused.value)


def test_the_keys_of_a_tenant_share_what_its_first_line_says(tmp_path: Path) -> None:
    first, second, path, clock = make_key(), make_key(), tmp_path / "keys", Clock(100.0)
    path.write_text(f"a {hash_key(first)} 6 tokens=600 weight=2.5 priority=-7\nb {'1' * 64}\na {hash_key(second)}\n")
    keys = ApiKeys(path, clock)
    tenant = keys.check(f"Bearer {first}")
    assert (tenant.settings.weight, tenant.settings.tokens_per_minute, tenant.settings.priority) == (2.5, 600, -7)
    with pytest.raises(ResourceExhaustedError):
        keys.check(f"Bearer {second}")
    clock.now += 10.5
    assert keys.check(f"Bearer {second}").settings is tenant.settings


def test_tokens_are_paid_afterwards_and_debts_are_waited_for(tmp_path: Path) -> None:
    key, path, clock = make_key(), tmp_path / "keys", Clock(100.0)
    path.write_text(f"a {hash_key(key)} tokens=600\n")
    tenant = ApiKeys(path, clock).check(f"Bearer {key}")
    tenant.take_prompt(90)
    tenant.take_output(60)
    with pytest.raises(ResourceExhaustedError) as refused:
        tenant.take_prompt(1)
    assert refused.value.retry_after == pytest.approx(5.1)
    clock.now += 5.2
    tenant.take_prompt(1)


def test_each_tenant_has_a_salt_that_survives_other_lines_and_limits(tmp_path: Path) -> None:
    keys = [make_key(), make_key()]
    path, clock = tmp_path / "keys", Clock(100.0)
    path.write_text(f"a {hash_key(keys[0])}\nb {hash_key(keys[1])}\n")
    store = ApiKeys(path, clock)
    salts = [store.check(f"Bearer {key}").settings.cache_salt for key in keys]
    assert len({*salts, ""}) == 3
    path.write_text(f"c {'2' * 64}\nb {hash_key(keys[1])} tokens=6000\na {hash_key(keys[0])} 60\n")
    clock.now += 5
    assert [store.check(f"Bearer {key}").settings.cache_salt for key in keys] == salts


def test_an_empty_file_changes_nothing_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key, path, clock = make_key(), tmp_path / "keys", Clock(100.0)
    path.write_text(f"alice {hash_key(key)}\n")
    keys = ApiKeys(path, clock)
    for content in ("", "# only a comment\n\n"):
        path.write_text(content)
        for _ in range(5):
            clock.now += 5
            assert keys.check(f"Bearer {key}").name == "alice"
    assert len([line for line in caplog.messages if "holds no key" in line]) == 1
    path.write_text(f"carol {hash_key(key)}\n")
    clock.now += 5
    assert keys.check(f"Bearer {key}").name == "carol"


def test_a_deleted_file_revokes_all_keys_until_there_is_one_again(tmp_path: Path) -> None:
    key, path, clock = make_key(), tmp_path / "keys", Clock(100.0)
    path.write_text(f"alice {hash_key(key)}\n")
    keys = ApiKeys(path, clock)
    path.unlink()
    clock.now += 1
    with pytest.raises(UnauthenticatedError):
        keys.check(f"Bearer {key}")
    path.write_text(f"alice {hash_key(key)}\n")
    clock.now += 1
    assert keys.check(f"Bearer {key}").name == "alice"
    with pytest.raises(ConfigError, match="no such file"):
        ApiKeys(tmp_path / "none")


def test_of_a_tenants_keys_only_what_runs_with_the_revoked_one_ends(tmp_path: Path) -> None:
    one, other, path, clock = make_key(), make_key(), tmp_path / "keys", Clock(100.0)
    path.write_text(f"alice {hash_key(one)}\nalice {hash_key(other)}\n")
    keys = ApiKeys(path, clock)
    ended: list[str] = []
    for name, key in (("one", one), ("other", other)):
        found = keys.find(f"Bearer {key}")
        assert isinstance(found, Key)
        found.watch(lambda name=name: ended.append(name))  # type: ignore[misc]
    first = keys.find(f"Bearer {one}")
    assert isinstance(first, Key)
    first.watch(ended.clear)
    first.unwatch(ended.clear)
    path.write_text(f"alice {hash_key(other)} 600\n")
    keys.refresh()
    keys.refresh()
    assert ended == ["one"]
    path.unlink()
    keys.refresh()
    assert ended == ["one", "other"]


async def test_what_runs_until_a_key_is_revoked_ends_with_that_reason(tmp_path: Path) -> None:
    key, path = make_key(), tmp_path / "keys"
    path.write_text(f"alice {hash_key(key)}\n")
    keys = ApiKeys(path)

    async def run() -> None:
        with until_revoked(keys.check(f"Bearer {key}")):
            await asyncio.Event().wait()

    running = asyncio.create_task(run())
    cancelled = asyncio.create_task(run())
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert cancelled.cancelled()
    path.unlink()
    keys.refresh()
    with pytest.raises(UnauthenticatedError, match="revoked"):
        await running
    with until_revoked(None):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "digits", "loop"])
def test_a_key_file_that_becomes_something_else_leaves_the_keys(tmp_path: Path, kind: str) -> None:
    key, path, clock = make_key(), tmp_path / "keys", Clock(100.0)
    path.write_text(f"alice {hash_key(key)}\n")
    keys = ApiKeys(path, clock)
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case _:
            path.write_text(f"alice {hash_key(key)} tokens={'9' * 5000}\n")
    clock.now += 1.5
    assert keys.check(f"Bearer {key}").name == "alice"


def test_a_key_that_is_revoked_before_its_request_has_its_turn_lets_nothing_run(tmp_path: Path) -> None:
    key, path = make_key(), tmp_path / "keys"
    path.write_text(f"alice {hash_key(key)}\n")
    keys = ApiKeys(path)
    tenant = keys.check(f"Bearer {key}")
    path.unlink()
    keys.refresh()
    with pytest.raises(UnauthenticatedError, match="revoked"), until_revoked(tenant):
        pytest.fail("it ran")
