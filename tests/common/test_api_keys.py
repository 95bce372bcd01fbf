from pathlib import Path

import pytest

from sapwood_common.api_keys import ApiKeys, hash_key, make_key
from sapwood_common.errors import ConfigError, ResourceExhaustedError, UnauthenticatedError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_key_names_its_owner(tmp_path: Path) -> None:
    key = make_key()
    (tmp_path / "keys").write_text(f"# comment\n\nalice {hash_key(key)}  # hers\nbob {'0' * 64} 5\n")
    keys = ApiKeys(tmp_path / "keys")
    assert keys.check(f"Bearer {key}") == "alice"
    assert keys.check(f"bearer  {key} ") == "alice"
    for wrong in ("", "Bearer", f"Basic {key}", f"Bearer {key}x", f"Bearer {hash_key(key)}", "Bearer " + "0" * 64):
        with pytest.raises(UnauthenticatedError):
            keys.check(wrong)


def test_a_rate_refills_and_survives_a_new_file(tmp_path: Path) -> None:
    key, path, clock = make_key(), tmp_path / "keys", Clock()
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
    key, path, clock = make_key(), tmp_path / "keys", Clock()
    path.write_text(f"alice {hash_key(key)}\n")
    keys = ApiKeys(path, clock)
    path.write_text("what is this\n")
    clock.now += 5
    assert keys.check(f"Bearer {key}") == "alice"
    path.write_text(f"carol {hash_key(key)}\n")
    clock.now += 5
    assert keys.check(f"Bearer {key}") == "carol"


@pytest.mark.parametrize("line", ["alice", "alice sk-sapwood-secret", f"alice {'0' * 64} fast", f"a {'0' * 64} 1 2"])
def test_a_wrong_line_is_refused_by_number_and_never_shown(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys").write_text(f"# fine\n{line}\n")
    with pytest.raises(ConfigError, match="line 2") as refused:
        ApiKeys(tmp_path / "keys")
    assert "secret" not in str(refused.value)
