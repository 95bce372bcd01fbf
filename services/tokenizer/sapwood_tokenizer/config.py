"""The configuration of the tokenizer service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic_settings import NoDecode, SettingsConfigDict

from sapwood_common.models.needs import OF_HUB
from sapwood_common.settings.compound import Compound, Switch
from sapwood_common.settings.config import ServiceConfig
from sapwood_common.settings.retired import retired_parts

LibraryName = Literal["auto", "fastokens", "tokenizers"]


class LongestText(Compound):
    """``--max-text-bytes``."""

    bytes: int = Field(default=8 * 1024 * 1024, ge=1)
    tokens: int | None = Field(default=None, ge=1)


class Grammars(Compound):
    """``--grammar-timeout``."""

    seconds: float = Field(default=10.0, gt=0)
    max_bytes: int = Field(default=1 << 20, ge=1)
    processes: int = Field(default=2, ge=1)
    cache_mb: float = Field(default=64.0, ge=0)


class Encoder(Compound):
    """``--encoder``."""

    library: LibraryName = "auto"
    threads: int | None = Field(default=None, ge=1)


class Caches(Compound):
    """``--cache-mb``."""

    exact: float = Field(default=32.0, ge=0)
    prefix: float = Field(default=64.0, ge=0)


class Pictures(Switch):
    """``--pictures``."""

    on: bool = True
    hosts: str = ""
    most: int = Field(default=16, ge=1)
    max_bytes: int = Field(default=20 << 20, ge=1)
    max_pixels: int = Field(default=50_000_000, ge=1)
    seconds: float = Field(default=10.0, gt=0)
    processes: int = Field(default=2, ge=1)
    memory_mb: int = Field(default=1024, ge=64)
    max_mb: float = Field(default=48.0, gt=0)
    held_mb: float = Field(default=1024.0, gt=0)
    cache_mb: float = Field(default=256.0, ge=0)
    frames: int = Field(default=64, ge=1, le=768)
    video_seconds: float = Field(default=600.0, gt=0)


class TokenizerConfig(ServiceConfig):
    """Flags, variables and defaults of ``python -m sapwood_tokenizer``."""

    needs = (*ServiceConfig.needs, OF_HUB)
    retired: ClassVar = {
        **ServiceConfig.retired,
        **retired_parts("max_text_bytes", max_text_tokens="tokens"),
        **retired_parts(
            "grammar_timeout", grammar_max_bytes="max_bytes", grammar_processes="processes", grammar_cache_mb="cache_mb"
        ),
        **retired_parts("encoder", encode_threads="threads"),
        **retired_parts("cache_mb", exact_cache_mb="exact", prefix_cache_mb="prefix"),
    }

    model_config = SettingsConfigDict(
        env_prefix="SAPWOOD_TOKENIZER_", extra="forbid", frozen=True, protected_namespaces=()
    )

    model: str = Field(
        "demo",
        description="'demo', 'demo-base', a .gguf file, a Hugging Face directory, a vocabulary file (tokenizer.json, "
        "SentencePiece .model, tiktoken, tekken.json), or, without its weights, a model of the hub (owner/name or "
        "owner/name:file.gguf) or at a URL that fsspec reads (s3://bucket/folder).",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a model of the hub; none is its main branch."
    )
    served_model_name: str | None = Field(
        None, description="Name clients use for the model; the file's or folder's own name unless given."
    )
    port: int = Field(50052, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of /metrics; 0 takes a free one; none is 9152, or a free one with --port 0.",
    )
    processes: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes that serve on the port, each with caches of its own; the kernel spreads connections over them. "
        "The n-th has its /metrics n ports further on.",
    )
    chat_template: Path | None = Field(
        None, description="File with a Jinja chat template to use in place of the model's own."
    )
    tool_parser: str = Field(
        "auto", description="Parser of tool calls that fits the model; 'auto' asks its chat template, 'none' is none."
    )
    reasoning_parser: str = Field(
        "auto", description="Parser of reasoning that fits the model; 'auto' asks its chat template, 'none' is none."
    )
    max_text_bytes: Annotated[LongestText, NoDecode] = Field(
        LongestText(),
        description="Longest text that is encoded, in bytes of UTF-8; longer ones are refused. tokens: most tokens a text may "
        "have; none: no limit.",
    )
    grammar_timeout: Annotated[Grammars, NoDecode] = Field(
        Grammars(),
        description="Most seconds that compiling a grammar may take, the wait for its turn included. max_bytes: longest grammar, "
        "in bytes of UTF-8; the router sends 2 MiB at most. processes: most grammars compiled at a time, each in its own "
        "process. cache_mb: memory for compiled grammars, in MiB.",
    )
    max_open_streams: int = Field(
        16384, ge=1, description="Most detokenize streams open at a time, of all callers; more are refused."
    )
    template_timeout: float = Field(
        10.0, gt=0, description="Most seconds that the chat template may take to render a conversation."
    )
    encoder: Annotated[Encoder, NoDecode] = Field(
        Encoder(),
        description="Library that encodes texts. 'auto' takes fastokens once it has shown that its ids are those of the "
        "tokenizers library, 'tokenizers' never does, 'fastokens' loads it at the start and fails if it cannot be used. threads: "
        "threads that encode short texts; half as many encode long ones. None: as many as cores, at most 8.",
    )
    cache_mb: Annotated[Caches, NoDecode] = Field(
        Caches(),
        description="EXACT[,prefix=PREFIX]: memory in MiB for token ids of whole texts (exact), and of text between special "
        "tokens (prefix); 0 is off.",
    )
    pictures: Annotated[Pictures, NoDecode] = Field(
        Pictures(),
        description="ON[,PART=VALUE...]: take pictures, for models that do. hosts: hosts that pictures may be fetched from over "
        "https, with ; between; none: pictures come in the request. most: pictures in a request. max_bytes: largest file. "
        "max_pixels: most pixels of a picture, before it is resized. seconds: that fetching or decoding may take. processes, "
        "memory_mb: in which pictures are decoded, and memory of each in MiB. max_mb: most pixels of a request. "
        "held_mb: most of all that are being prepared, fair between tenants. "
        "cache_mb: memory for prepared pictures, in MiB. frames: most frames of a video that a model is shown. video_seconds: "
        "length of the longest video.",
    )
