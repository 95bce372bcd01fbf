"""The families, one row each. A chat template is of the first family whose signs it has, so the most telling come first."""

from __future__ import annotations

from sapwood_text.reasoning_parser.base import ReasoningFamily

FAMILIES: tuple[ReasoningFamily, ...] = (
    # Kimi-VL and the models before K2.
    ReasoningFamily("kimi", "◁think▷", "◁/think▷", signs=("◁think▷",)),
    # Cohere's Command R7B and A.
    ReasoningFamily(
        "cohere",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        answer_tags=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        signs=("<|START_THINKING|>",),
    ),
    # Magistral.
    ReasoningFamily("mistral", "[THINK]", "[/THINK]", signs=("[THINK]",)),
    # Gemma 4, whose template opens and closes an empty block where no thinking is wanted.
    ReasoningFamily(
        "gemma4",
        "<|channel>thought",
        "<channel|>",
        tokens=("<|channel>",),
        signs=("<|channel>thought",),
    ),
    # K2 Thinking, which may call tools without closing its reasoning first.
    ReasoningFamily(
        "kimi_k2",
        "<think>",
        "</think>",
        implied_by=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        signs=("<think>", "<|tool_calls_section_begin|>"),
    ),
    # GLM 4.5 to 4.7: the model writes the tags.
    ReasoningFamily("glm45", "<think>", "</think>", signs=("<think>", "<arg_key>")),
    # MiniMax M2, which always thinks: the template opens the tag.
    ReasoningFamily("minimax_m2", "<think>", "</think>", signs=("<think>", "]~b]ai")),
    # DeepSeek V3.1 and later: the template opens or closes them as the request wants.
    ReasoningFamily("deepseek_v3", "<think>", "</think>", signs=("<think>", "</think>", "<｜Assistant｜>", "thinking")),
    # DeepSeek R1 and its distillations: the template has usually written the opening tag.
    ReasoningFamily("deepseek_r1", "<think>", "</think>", starts_open=True, signs=("</think>", "<｜Assistant｜>")),
    # Qwen3, QwQ and all others with these tags, such as EXAONE 4 and OLMo 3: the model writes them, or the template opens them.
    ReasoningFamily("qwen3", "<think>", "</think>", signs=("<think>",)),
)
