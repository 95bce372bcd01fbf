"""What ``config.json`` says of a head that classifies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from sapwood_worker.records.model_info import Labels

_BY_PROBLEM: dict[str, Literal["softmax", "sigmoid", "none"]] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_BY_CLASS: dict[str, Literal["sigmoid", "none"]] = {"Sigmoid": "sigmoid", "Identity": "none"}


def read_labels(values: Mapping[str, Any]) -> Labels:
    """The labels, and what makes scores of their logits.

    What sentence-transformers notes for its cross-encoders comes first, then ``problem_type``; else one label is a yes or no by
    itself and several share 1.

    Args:
        values: The settings in the file.

    Raises:
        ValueError: There are none, or an activation is not supported.
    """
    names = values.get("id2label") or {str(index): f"LABEL_{index}" for index in range(values.get("num_labels", 2))}
    try:
        labels = tuple(str(names[index]) for index in sorted(names, key=int))
    except (TypeError, ValueError):
        raise ValueError(f"id2label is no mapping of numbers to names: {names!r}") from None
    if not labels:
        raise ValueError("id2label names no label")
    noted = (values.get("sentence_transformers") or {}).get("activation_fn")
    noted = noted or values.get("sbert_ce_default_activation_function")
    if noted is not None:
        name = str(noted).rpartition(".")[2]
        if name not in _BY_CLASS:
            raise ValueError(f"activation {noted} is not supported ({', '.join(_BY_CLASS)} are)")
        return Labels(labels, _BY_CLASS[name])
    problem = values.get("problem_type")
    if problem is None:
        return Labels(labels, "sigmoid" if len(labels) == 1 else "softmax")
    if problem not in _BY_PROBLEM:
        raise ValueError(f"problem_type {problem!r} is not supported ({', '.join(_BY_PROBLEM)} are)")
    return Labels(labels, _BY_PROBLEM[problem])
