"""Logit processors of an installed package, asked for over gRPC, HTTP and in a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

import sapwood
from sapwood.errors import InvalidArgumentError

SOURCE = """
import torch

def only(parameters, prompted):
    allowed = parameters["tokens"]

    def keep(logits, output):
        if len(output) == parameters.get("fail_after"):
            raise RuntimeError("no more")
        kept = torch.full_like(logits, -torch.inf)
        kept[allowed] = logits[allowed]
        return kept

    return keep
"""
SETTINGS = {"load_format": "dummy", "num_pages": 512, "threads": 1}


@pytest.mark.slow
def test_a_request_names_a_processor_over_http_and_grpc_and_its_faults_are_its_own(plugin: Any, tiny: Path) -> None:
    plugin("sapwood.logit_processors", "only", SOURCE, "only")
    calls = [{"name": "only", "parameters": {"tokens": [70, 71, 72]}}]
    with sapwood.Server(str(tiny), workers=1, **SETTINGS) as server, server.client() as client:
        expected = client.generate("abc", max_tokens=12, seed=1, logit_processors=calls).answer()
        assert set(expected.token_ids) <= {70, 71, 72} and len(expected.token_ids) == 12
        with openai.OpenAI(base_url=server.openai_base_url, api_key="none", max_retries=0) as other:
            asked: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 12, "seed": 1}
            answer = other.completions.create(**asked, extra_body={"logit_processors": calls})
            assert answer.choices[0].text == expected.text
            for wrong, message in (
                ([{"name": "nope"}], "there is no logit processor 'nope' here; installed are: only"),
                ([{"name": "only"}], "logit processor 'only' refuses its parameters: KeyError: 'tokens'"),
                ([{"name": "only", "parameters": {"tokens": [70], "fail_after": 0}}], "failed: RuntimeError: no more"),
                ([{"name": "only", "parameters": 3}], "logit_processors"),
                ([{"parameters": {}}], "logit_processors"),
            ):
                with pytest.raises(openai.BadRequestError, match=message) as caught:
                    other.completions.create(**asked, extra_body={"logit_processors": wrong})
                assert caught.value.param == "logit_processors"
            with pytest.raises(openai.APIError, match="no more"):
                late = [{"name": "only", "parameters": {"tokens": [70], "fail_after": 3}}]
                for _ in other.completions.create(**asked, stream=True, extra_body={"logit_processors": late}):
                    pass
            again = other.completions.create(**asked, extra_body={"logit_processors": calls})
            assert again.choices[0].text == expected.text
        with pytest.raises(InvalidArgumentError, match="no logit processor 'nope'") as refused:
            client.generate("abc", max_tokens=3, logit_processors=[{"name": "nope"}]).answer()
        assert refused.value.field == "sampling.logit_processors"


@pytest.mark.slow
def test_the_engine_takes_processors(plugin: Any, tiny: Path) -> None:
    plugin("sapwood.logit_processors", "only", SOURCE, "only")
    with sapwood.Engine(str(tiny), **SETTINGS) as engine:
        calls = [{"name": "only", "parameters": {"tokens": [70, 71, 72]}}]
        one, other = engine.generate(["abc", "def"], max_tokens=9, seed=2, logit_processors=calls)
        assert {*one.token_ids, *other.token_ids} <= {70, 71, 72}
