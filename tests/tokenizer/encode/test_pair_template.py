"""The tokens around the texts of a pair are those that the tokenizer's post-processor puts there."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sapwood_tokenizer.encode.pair_template import PairTemplate, read_pair_template

WORDS = ["<s>", "</s>", "[CLS]", "[SEP]", *"abcdef"]
IDS = {word: index for index, word in enumerate(WORDS)}


def make(post_processor: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return tokenizer


LLAMA = processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", [("<s>", 0)])


@pytest.mark.parametrize(
    ("post_processor", "expected"),
    [
        (None, PairTemplate((), (), ())),
        (processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)), PairTemplate((2,), (3,), (3,))),
        (processors.RobertaProcessing(("</s>", 1), ("<s>", 0)), PairTemplate((0,), (1, 1), (1,))),
        (LLAMA, PairTemplate((0,), (0,), ())),
    ],
    ids=["none", "bert", "roberta", "llama"],
)
def test_pairs_are_joined_as_the_library_does(post_processor: Any, expected: PairTemplate) -> None:
    tokenizer = make(post_processor)
    template = read_pair_template(tokenizer)
    assert template == expected
    first, second = ([IDS[word] for word in text.split()] for text in ("c d e", "f a"))
    joined = [*template.before, *first, *template.between, *second, *template.after]
    assert joined == tokenizer.encode("c d e", "f a").ids


def test_a_vocabulary_without_letters_has_none() -> None:
    tokenizer = Tokenizer(models.BPE({"x": 0}, []))
    assert read_pair_template(tokenizer) is None
