from pathlib import Path

import pytest

from sapwood_common.errors import ConfigError, ResourceExhaustedError, UnauthenticatedError
from sapwood_common.tenants.api_keys import ApiKeys, hash_key, make_key
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


@pytest.mark.parametrize(
    "rest", ["fast", "1 2", "tokens=x", "weight=0", "weight=nan", "priority=101", "priority=x", "salt=x"]
)
def test_a_wrong_limit_is_refused_by_number(tmp_path: Path, rest: str) -> None:
    (tmp_path / "keys").write_text(f"# fine\na {'0' * 64} {rest}\n")
    with pytest.raises(ConfigError, match="line 2"):
        ApiKeys(tmp_path / "keys")


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
    assert keys.check(f"Bearer {second}") is tenant


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
