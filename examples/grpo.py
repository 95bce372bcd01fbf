"""Trains a model with GRPO in plain torch; a Sapwood worker makes the rollouts, with the weights of each step.

    sapwood-worker --model /models/tiny &
    python examples/grpo.py --model /models/tiny --steps 20

The reward here is the share of tokens with an even id, which any model can learn. Each step samples a group of answers to each
prompt, takes a step of policy gradient with advantages within the group, and streams the new weights to the worker. The log
probabilities of the worker's tokens are compared with the trainer's own: they tell whether the rollouts were on policy.

GRPO: Shao et al., "DeepSeekMath", 2024. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import torch
from torch import Tensor

from sapwood.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from sapwood.weights import update_messages


@dataclass(frozen=True)
class Rollout:
    """An answer, with the log probability of each of its tokens and what its weights are called."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    version: str


@dataclass(frozen=True)
class Report:
    """A step: the mean reward of its rollouts, and how far their log probabilities were from the trainer's at most."""

    reward: float
    drift: float


def rewarded(tokens: Sequence[int]) -> float:
    """The share of even tokens."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def roll_out(stub: Any, prompts: Sequence[list[int]], group: int, length: int, step: int) -> list[Rollout]:
    """A group of answers to each prompt."""
    calls = []
    for at, prompt in enumerate(prompts):
        sampling = common_pb2.SamplingParams(
            n=group, max_tokens=length, temperature=1.0, seed=1000 * step + at, ignore_eos=True, logprobs=0
        )
        request = worker_pb2.WorkerGenerateRequest(request_id=f"{step}-{at}", token_ids=prompt, sampling=sampling)
        calls.append((prompt, stub.Generate(request)))
    found = []
    for prompt, call in calls:
        tokens: list[list[int]] = [[] for _ in range(group)]
        logprobs: list[list[float]] = [[] for _ in range(group)]
        version = ""
        for response in call:
            version = response.weight_version or version
            tokens[response.index] += response.token_ids
            logprobs[response.index] += [each.logprob for each in response.logprobs]
        found += [Rollout(prompt, *each, version) for each in zip(tokens, logprobs, strict=True)]
    return found


def logprobs_of(model: Any, rollouts: Sequence[Rollout]) -> Tensor:
    """What the trainer's model thinks of the rollouts' tokens: [rollouts, tokens]. All prompts are equally long."""
    rows = torch.tensor([each.prompt + each.tokens for each in rollouts])
    begin = len(rollouts[0].prompt)
    logits: Tensor = model(rows).logits[:, begin - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, rows[:, begin:, None])[..., 0]


def train(
    address: str, model: Any, prompts: Sequence[list[int]], *, steps: int, group: int, length: int, rate: float
) -> list[Report]:
    """Trains ``model``, whose weights the worker at ``address`` has at the start; returns what each step was like."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    reports = []
    with grpc.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        for step in range(steps):
            rollouts = roll_out(stub, prompts, group, length, step)
            assert step == 0 or {each.version for each in rollouts} == {str(step)}, "a rollout had other weights"
            rewards = torch.tensor([rewarded(each.tokens) for each in rollouts]).view(len(prompts), group)
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
            old = torch.tensor([each.logprobs for each in rollouts])
            new = logprobs_of(model, rollouts)
            drift = (new.detach() - old).abs().max().item()
            ratio = (new - old).exp()
            clipped = ratio.clamp(0.8, 1.2)
            gain = advantages.view(-1, 1)
            loss = -torch.minimum(ratio * gain, clipped * gain).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            stub.UpdateWeights(update_messages(model.state_dict(), weight_version=str(step + 1)))
            reports.append(Report(rewards.mean().item(), drift))
    return reports


def main() -> None:
    """Trains a model whose weights a worker has, and prints each step."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="its folder")
    parser.add_argument("--worker", default="127.0.0.1:50061", help="the worker's gRPC address [default: %(default)s]")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    prompts = [[token, 5, 6, 7] for token in range(10, 14)]
    reports = train(arguments.worker, model, prompts, steps=arguments.steps, group=16, length=8, rate=3e-3)
    for step, report in enumerate(reports):
        print(f"step {step}: reward {report.reward:.2f}, largest difference of log probabilities {report.drift:.1e}")


if __name__ == "__main__":
    main()
