"""What requests may say of when their tokens are to come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sapwood_common.errors import InvalidArgumentError
from sapwood_common.tenants.tenant import TargetRange, Tenant, TenantSettings
from sapwood_router.request.caller import NOBODY, caller_of
from sapwood_router.request.objective import Objective, objective_of, worst
from sapwood_testing.clock import Clock

RULE = TenantSettings("alice", first_token=TargetRange(200, 2000))


def test_headers_name_milliseconds() -> None:
    assert objective_of({}.get, None) is None
    assert objective_of({"x-slo-ttft-ms": "250"}.get, None) == Objective(0.25)
    assert objective_of({"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "7.5"}.get, None) == Objective(0.25, 0.0075)
    assert caller_of({"x-slo-tpot-ms": "20"}.get, None).objective == Objective(0.0, 0.02)
    assert caller_of({}.get, None) is NOBODY


@pytest.mark.parametrize("key", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e3", "soon", "3600001", "0.0001", "1 2", "1_0", "٣"])
def test_a_target_that_makes_no_sense_is_refused_by_its_name(key: str, value: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        caller_of({key: value}.get, None)
    assert caught.value.field == key


def test_a_tenants_rule_holds_where_nothing_is_named_and_bounds_what_is() -> None:
    account = Tenant(RULE, Clock())
    assert caller_of({}.get, account).objective == Objective(2.0)
    assert caller_of({"x-slo-ttft-ms": "200"}.get, account).objective == Objective(0.2)
    assert caller_of({"x-slo-tpot-ms": "5"}.get, account).objective == Objective(2.0, 0.005)  # no rule: any
    for value in ("199", "2001"):
        with pytest.raises(InvalidArgumentError, match="from 200 to 2000 with this API key") as caught:
            caller_of({"x-slo-ttft-ms": value}.get, account)
        assert caught.value.field == "x-slo-ttft-ms"


def test_what_lowers_its_own_priority_has_no_target_unless_it_names_one() -> None:
    """Such as the lines of a batch, which have the lowest."""
    account = Tenant(RULE, Clock())
    assert caller_of({"x-priority": "-100"}.get, account).objective is None
    assert caller_of({"x-priority": "-100", "x-slo-ttft-ms": "500"}.get, account).objective == Objective(0.5)
    low = Tenant(replace(RULE, priority=-7), Clock())
    assert caller_of({}.get, low).objective == caller_of({"x-priority": "-7"}.get, low).objective == Objective(2.0)
    assert caller_of({"x-priority": "-8"}.get, low).objective is None


def test_of_several_answers_the_worst_is_told() -> None:
    assert worst([]) == worst(["", ""]) == ""
    assert worst(["met", "missed", "met"]) == "missed"
    assert worst(["held", "preempted", ""]) == "preempted"
