"""Scores a tree of continuations: the token sequences of all its paths become one tree of tokens, which one worker computes.

Algorithm. Each path's text is encoded together with the prompt, because the tokenizer may join them at their border. The prompt
of the worker's request is what all sequences begin with, and the rest of them is a trie. So tokens that several paths share are
computed once, whatever the shape in which the client gave them. O(tokens of prompt and continuations), and where these are texts
O(tokens of all paths).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from sapwood_common.contract.limits import MOST_SCORED, MOST_SCORED_TOKENS
from sapwood_common.contract.sampling import SamplingParams
from sapwood_common.errors import InvalidArgumentError, SapwoodError, UnimplementedError
from sapwood_net.pacing.steps import Steps, in_turns
from sapwood_router.flow.client import Client
from sapwood_router.flow.generation import Generation, Pipeline
from sapwood_router.request.caller import Caller
from sapwood_router.request.context import (
    ChatPrompt,
    Delta,
    FieldNames,
    Prompt,
    RequestContext,
    ScoreNode,
    TextPrompt,
    TokenPrompt,
    Turn,
    unique_id,
)
from sapwood_router.request.field_names import to_client_field
from sapwood_router.request.output import OutputOptions
from sapwood_router.request.tokens import TokenIds
from sapwood_router.request.validation import MOST_TOGETHER, check_token_ids, extent

MOST_PATHS = 1024
DEEPEST = 32
FIELD = "continuations"
_TOKENS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Branch:
    """A continuation as a client gives it.

    Attributes:
        text: Its text, not empty; or
        token_ids: its tokens, at least one.
        next: What continues it.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    next: tuple[Branch, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """What a client wants scored.

    Attributes:
        request_id, model, lora, caller, deadline, fields: As in :class:`RequestContext`.
        prompt: What the continuations continue.
        continuations: At least one.
        unconditional: Whether they are scored without the prompt, too.
    """

    request_id: str
    prompt: Prompt
    continuations: Sequence[Branch]
    fields: FieldNames
    deadline: float
    caller: Caller
    model: str | None = None
    lora: str = ""
    unconditional: bool = False


@dataclass(frozen=True, slots=True)
class Path:
    """The score of a continuation, with all those that it continues.

    Attributes:
        text: The text of the path; empty if it came as tokens.
        token_ids: Its tokens: from the first on that the prompt alone does not have there, at least the last one.
        logprobs: The log probability of each.
        unconditional: The same without the prompt; 0 for the first. Empty: not asked for.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    unconditional: list[float]


@dataclass(frozen=True, slots=True)
class Scores:
    """The answer.

    Attributes:
        paths: One for each continuation: one before those that continue it.
        prompt_tokens, cached_tokens: Of the prompt, as all workers' requests had it.
        computed_tokens: Tokens that were computed, of prompt and continuations.
        model: The model.
        contexts: The workers' requests.
    """

    paths: list[Path]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    model: str
    contexts: Sequence[RequestContext]


async def score(pipeline: Pipeline, request: ScoreRequest) -> Scores:
    """Scores continuations. One that is cancelled ends its requests.

    Raises:
        InvalidArgumentError: A continuation is empty, there are too many, or the prompt is wrong.
        SapwoodError: As a generation.
    """
    texts, tokens = _flat(request.continuations)
    alone = _context(request, request.prompt)
    await pipeline.prepare(alone)
    before: list[int] = []
    heads = [*alone.token_ids]
    if texts:
        sequences = await _encoded(pipeline, request, alone, texts)
    else:  # all continue the whole prompt: its last token stands for it, since each path would hold it again
        before, heads = heads[:-1], heads[-1:]
        sequences = [[*heads, *each] for each in tokens]
    stint = pipeline.heavy.stint(request.caller.tenant)
    planned = await in_turns(_plan(heads, sequences, unconditional=request.unconditional), stint)
    asked = [_context(request, TokenPrompt([*before, *planned.begun.prompt]), planned.begun.nodes, alone)]
    asked += [_context(request, TokenPrompt(tree.prompt), tree.nodes) for tree in planned.bare.values()]
    found = await _run(pipeline, asked)
    return Scores(
        await in_turns(_paths(sequences, texts, planned, found, unconditional=request.unconditional), stint),
        sum(len(context.token_ids) for context in asked),
        sum(context.cached_tokens for context in asked),
        sum(len(context.token_ids) - context.cached_tokens for context in asked)
        + sum(tree.computed for tree in (planned.begun, *planned.bare.values())),
        asked[0].public_model,
        asked,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """What workers are asked.

    Attributes:
        starts: Where each sequence's continuation starts.
        begun: All sequences.
        bare: By their first token those that are asked for without the prompt, too.
        members: Which sequences these are, in the order in which the tree has them.
    """

    starts: list[int]
    begun: _Tree
    bare: dict[int, _Tree]
    members: dict[int, list[int]]


def _plan(heads: Sequence[int], sequences: Sequence[Sequence[int]], *, unconditional: bool) -> Steps[_Plan]:
    starts: list[int] = []
    for each in sequences:
        starts.append(min(_common(heads, each), len(each) - 1))
        yield
    begun = yield from _tree(sequences, starts)
    members: dict[int, list[int]] = {}
    if unconditional:
        for index, (each, start) in enumerate(zip(sequences, starts, strict=True)):
            if len(each) - start > 1:
                members.setdefault(each[start], []).append(index)
    bare: dict[int, _Tree] = {}
    for first, group in members.items():
        bare[first] = yield from _tree([sequences[index][starts[index] :] for index in group], [1] * len(group))
    return _Plan(starts, begun, bare, members)


def _paths(
    sequences: Sequence[Sequence[int]],
    texts: Sequence[str],
    planned: _Plan,
    found: Sequence[Sequence[float]],
    *,
    unconditional: bool,
) -> Steps[list[Path]]:
    without: dict[int, list[float]] = {}
    for (first, tree), logprobs in zip(planned.bare.items(), found[1:], strict=True):
        for place, index in enumerate(planned.members[first]):
            without[index] = [0.0, *tree.of(place, logprobs)]
            yield
    paths: list[Path] = []
    for index, each in enumerate(sequences):
        paths.append(
            Path(
                texts[index] if texts else "",
                [*each[planned.starts[index] :]],
                planned.begun.of(index, found[0]),
                without.get(index, [0.0]) if unconditional else [],
            )
        )
        yield
    return paths


class _Tree:
    """Token sequences as a prompt and a tree.

    Args:
        prompt: What all begin with, as far as no log probability is wanted.
        nodes: The tree, without nodes that have one child only.
        computed: How many of its tokens a worker computes.
        numbers: Of each sequence, from the first token on whose log probability is wanted: its tokens' places among all tokens
            of all nodes.
    """

    def __init__(
        self, prompt: list[int], nodes: list[ScoreNode], computed: int, numbers: Sequence[Sequence[int]]
    ) -> None:
        self.prompt = prompt
        self.nodes = nodes
        self.computed = computed
        self._numbers = numbers

    def of(self, index: int, logprobs: Sequence[float]) -> list[float]:
        """The log probabilities of a sequence, from its start on.

        Args:
            index: The sequence's.
            logprobs: Of all tokens of all nodes.
        """
        return [logprobs[number] for number in self._numbers[index]]


def _tree(sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Steps[_Tree]:
    """Makes a tree. Its tokens are counted while it grows: of what is too much no more is made than may be.

    Args:
        sequences: Each with at least one token after the prompt.
        starts: From which token of each on log probabilities are wanted.

    Raises:
        InvalidArgumentError: It has too many tokens.
    """
    first = sequences[0]
    length = min(starts)
    for each in sequences[1:]:
        length = min(length, _common(first, each))
    length = max(1, length)
    if sum(len(each) - length for each in sequences) > MOST_PATHS * MOST_SCORED_TOKENS // 64:
        raise InvalidArgumentError("the continuations have too many tokens", field=FIELD)
    children: list[dict[int, int]] = [{}]
    above, tokens = [0], [0]
    trails: list[array[int]] = []
    for each, start in zip(sequences, starts, strict=True):
        at, trail = 0, array("I")
        for place, token in enumerate(each[length:], length):
            below = children[at].get(token)
            if below is None:
                if len(children) > MOST_SCORED_TOKENS:
                    raise InvalidArgumentError(
                        f"the continuations have more than {MOST_SCORED_TOKENS} tokens", field=FIELD
                    )
                below = children[at][token] = len(children)
                children.append({})
                above.append(at)
                tokens.append(token)
            at = below
            if place >= start:
                trail.append(at)
            if place % _TOKENS_AT_ONCE == 0:
                yield
        trails.append(trail)
        yield
    nodes: list[tuple[int, list[int]]] = []
    node_of, place_of = [-1] * len(children), [0] * len(children)
    for at in range(1, len(children)):
        parent = above[at]
        if parent and len(children[parent]) == 1:
            node_of[at], place_of[at] = node_of[parent], place_of[parent] + 1
        else:
            node_of[at] = len(nodes)
            nodes.append((node_of[parent], []))
        nodes[node_of[at]][1].append(tokens[at])
        if at % _TOKENS_AT_ONCE == 0:
            yield
    if len(nodes) > MOST_SCORED:
        raise InvalidArgumentError(f"the tree of the continuations has more than {MOST_SCORED} nodes", field=FIELD)
    firsts = [0]
    for _, ids in nodes:
        firsts.append(firsts[-1] + len(ids))
    numbers: list[array[int]] = []
    for trail in trails:
        numbers.append(array("I", (firsts[node_of[at]] + place_of[at] for at in trail)))
        yield
    computed = sum(map(bool, children[1:]))
    return _Tree([*first[:length]], [ScoreNode(parent, tuple(ids)) for parent, ids in nodes], computed, numbers)


class _Ends(Client):
    """Waits for the end of requests that bring no output."""

    def writable(self) -> bool:
        return True

    async def drained(self) -> None:
        """There is nothing to send."""

    def write(self, delta: Delta) -> bool:
        return True


async def _run(pipeline: Pipeline, contexts: Sequence[RequestContext]) -> list[list[float]]:
    """The log probabilities of each request's nodes."""
    runs: list[Generation] = await pipeline.open_all(contexts)
    try:
        await _Ends().carry(runs)
    finally:
        pipeline.close_all(runs)
    found = [[each.logprob for each in context.prompt_logprobs] for context in contexts]
    for context, logprobs in zip(contexts, found, strict=True):
        if len(logprobs) != sum(len(node.token_ids) for node in context.continuations):
            raise UnimplementedError(f"the worker of {context.public_model} scores no continuations")
    return found


def _context(
    request: ScoreRequest, prompt: Prompt, nodes: Sequence[ScoreNode] = (), alone: RequestContext | None = None
) -> RequestContext:
    return RequestContext(
        request_id=request.request_id,
        worker_request_id=unique_id(request.request_id),
        prompt=prompt,
        sampling=SamplingParams(max_tokens=1),
        output=OutputOptions(),
        fields=request.fields,
        deadline=request.deadline,
        model=request.model,
        lora=request.lora,
        caller=request.caller,
        whole=True,
        detokenize=not nodes,
        continuations=nodes,
        pictures=() if alone is None else alone.pictures,
    )


def _flat(branches: Sequence[Branch]) -> tuple[list[str], list[tuple[int, ...]]]:
    """The paths of a tree, each before those that continue it: their texts, or their tokens.

    Raises:
        InvalidArgumentError: A continuation is empty; there are none, too many or too deep ones; some are text and some tokens.
    """
    texts: list[str] = []
    tokens: list[tuple[int, ...]] = []
    none: tuple[int, ...] = ()
    stack = [(branch, "", none, f"{FIELD}[{index}]", 1) for index, branch in enumerate(branches)][::-1]
    total = 0
    while stack:
        branch, text, ids, name, depth = stack.pop()
        if bool(branch.text) == bool(branch.token_ids):
            raise InvalidArgumentError("a continuation is a text or tokens, and not empty", field=name)
        if depth > DEEPEST:
            raise InvalidArgumentError(f"at most {DEEPEST} levels", field=name)
        if branch.text:
            texts.append(text + branch.text)
        else:
            check_token_ids(branch.token_ids, name)
            tokens.append((*ids, *branch.token_ids))
        total += len(texts[-1]) if branch.text else len(tokens[-1])
        if len(texts) + len(tokens) > MOST_PATHS or total > MOST_TOGETHER:
            raise InvalidArgumentError(f"at most {MOST_PATHS} continuations of {MOST_TOGETHER} characters", field=FIELD)
        if texts and tokens:
            raise InvalidArgumentError("continuations are either all texts or all tokens", field=name)
        path = (texts[-1], ()) if branch.text else ("", tokens[-1])
        stack += [(child, *path, f"{name}.next[{index}]", depth + 1) for index, child in enumerate(branch.next)][::-1]
    if not (texts or tokens):
        raise InvalidArgumentError("there is no continuation", field=FIELD)
    return texts, tokens


async def _encoded(
    pipeline: Pipeline, request: ScoreRequest, alone: RequestContext, texts: Sequence[str]
) -> list[list[int]]:
    """The tokens of the prompt with each text after it."""
    prompt = request.prompt
    if isinstance(prompt, TokenPrompt):
        raise InvalidArgumentError("the prompt is tokens: so must be its continuations", field=f"{FIELD}[0]")
    if len(texts) * extent(prompt) > MOST_TOGETHER:
        raise InvalidArgumentError(
            f"the prompt with each of {len(texts)} continuations has more than {MOST_TOGETHER} characters", field=FIELD
        )
    tokenizer = pipeline.tokenizers.of(alone.model).client
    if isinstance(prompt, TextPrompt) and not prompt.pictures:
        wholes = [prompt.text + text for text in texts]
        caller = request.caller
        try:
            found = await tokenizer.encode_texts(
                wholes, request.request_id, request.deadline, caller.cache_salt, add_special=prompt.add_special
            )
        except SapwoodError as error:
            raise to_client_field(error, request.fields) from error
        return await in_turns(_lists(found), pipeline.heavy.stint(caller.tenant))
    contexts = [_context(request, _longer(prompt, text)) for text in texts]
    for context in contexts:  # one after another: each may hold pictures
        await pipeline.prepare(context)
    return [[*context.token_ids] for context in contexts]


def _lists(sequences: Sequence[TokenIds]) -> Steps[list[list[int]]]:
    made: list[list[int]] = []
    for each in sequences:
        made.append([*each])
        yield
    return made


def _longer(prompt: TextPrompt | ChatPrompt, text: str) -> Prompt:
    if isinstance(prompt, TextPrompt):
        return replace(prompt, text=prompt.text + text)
    *turns, last = prompt.turns
    if prompt.continue_final_message:
        last = replace(last, content=(last.content or "") + text, parts=(), items=())
    else:
        turns, last = [*turns, last], Turn("assistant", text)
    return replace(prompt, turns=(*turns, last), add_generation_prompt=False, continue_final_message=True)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal tokens they begin."""
    same, beyond = 0, min(len(one), len(other)) + 1
    while beyond - same > 1:  # slices are compared at the speed of C
        middle = (same + beyond) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            beyond = middle
    return same
