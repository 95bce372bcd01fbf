"""Parameters of OpenAI's and others' servers that are not served. Some never change an answer, and are ignored; the others are
taken only with values that ask for nothing. docs/clients.md lists them.
"""

from __future__ import annotations

from sapwood_router.edges.http.json_body import Neutral

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "service_tier",
        "store",
        "prediction",
        # vLLM's: how it would compute or send the same answer.
        "guided_decoding_backend",
        "session_id",
        "stream_interval",
        "watermarking",
        # SGLang's.
        "stream_reasoning",
    }
)
"""Never change an answer here; user, prompt_cache_key and session_id may say which worker gives it."""

_NEUTRAL: Neutral = {
    # vLLM
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "routed_experts_prompt_start": (0,),
    "return_token_offsets": (False,),
    # SGLang
    "stop_regex": ([], ""),
    "session_params": ({},),
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "data_parallel_rank": (),
    "log_metrics": (True, False),
    # Others': the model would not see it.
    "system": ("", []),
}

COMPLETION_NEUTRAL: Neutral = {
    **_NEUTRAL,
    "prompt_embeds": ([],),
}
"""Parameters of completions."""

CHAT_NEUTRAL: Neutral = {
    **_NEUTRAL,
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "moderation": (),
    "audio": (),
    "web_search_options": (),
    # vLLM
    "echo": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
    "chat_template": ("",),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_prompt_text": (False,),
    # SGLang
    "separate_reasoning": (True,),
    # TGI
    "tool_prompt": ("",),
}
"""Parameters of chats."""

CHAT_SPARED = frozenset({"web_search_options", "moderation", "audio"})
"""Parameters that may be ignored: tools that OpenAI would run, and the sound of answers for ``modalities``."""

EMBEDDING_NEUTRAL: Neutral = {
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}
"""Parameters of embeddings."""

STREAM_NEUTRAL: Neutral = {"include_obfuscation": (False,)}
"""Parameters inside ``stream_options``."""
STREAM_SPARED = frozenset(STREAM_NEUTRAL)
"""Stream options that may be ignored: those about the lengths of events."""
