"""The usage object: of several choices together, and with drafted tokens where there were any."""

import msgspec

from sapwood_router.edges.openai.answer import usage_object
from sapwood_router.request.context import Usage


def test_a_prompt_counts_once_and_drafts_are_told_where_there_were_any() -> None:
    told = msgspec.to_builtins(usage_object([Usage(5, 3, 4), Usage(5, 2, 4)], continuations=2))
    counted = {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert told == {**counted, "prompt_tokens_details": {"cached_tokens": 4}}
    told = msgspec.to_builtins(usage_object([Usage(5, 3, 4, 2, 1), Usage(5, 2, 4)], continuations=2))
    details = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1, "reasoning_tokens": 0}
    assert told["completion_tokens_details"] == details
