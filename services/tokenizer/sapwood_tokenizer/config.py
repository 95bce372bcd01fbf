"""What the tokenizer service can be told."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from sapwood_common.config import ServiceConfig


class TokenizerConfig(ServiceConfig):
    """Flags, variables and defaults of ``python -m sapwood_tokenizer``."""

    model_config = SettingsConfigDict(
        env_prefix="SAPWOOD_TOKENIZER_", extra="forbid", frozen=True, protected_namespaces=()
    )

    model: str = Field("demo", description="'demo', a .gguf file or a Hugging Face model directory.")
    served_model_name: str | None = Field(
        None, description="Name clients use for the model; the file's or folder's own name unless given."
    )
    port: int = Field(50052, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    chat_template: Path | None = Field(
        None, description="File with a Jinja chat template to use in place of the model's own."
    )
    tool_parser: str = Field(
        "auto", description="Parser of tool calls that fits the model; 'auto' asks its chat template, 'none' is none."
    )
    reasoning_parser: str = Field(
        "auto", description="Parser of reasoning that fits the model; 'auto' asks its chat template, 'none' is none."
    )
    max_text_bytes: int = Field(
        8 * 1024 * 1024, ge=1, description="Longest text that is encoded, in bytes of UTF-8; longer ones are refused."
    )
    max_open_streams: int = Field(
        16384, ge=1, description="Most detokenize streams open at a time, of all callers; more are refused."
    )
    template_timeout: float = Field(
        10.0, gt=0, description="Most seconds that the chat template may take to render a conversation."
    )
