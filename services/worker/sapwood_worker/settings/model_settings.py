"""Which model a worker runs, in what formats, and on which ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic_settings import NoDecode

from sapwood_common.errors import ConfigError
from sapwood_common.network.keyed_ways import read_key
from sapwood_common.settings.config import ServiceConfig
from sapwood_common.settings.retired import retired_parts
from sapwood_worker.settings.compounds import ExpertParallel, PipelineParallel
from sapwood_worker.settings.names import AllReduceName, AttentionSetting, QuantizationName


class ModelSettings(ServiceConfig):
    """The part of a worker's configuration that is about its model."""

    retired: ClassVar = {
        **ServiceConfig.retired,
        **retired_parts("pipeline_parallel", pipeline_lanes="micro_batches"),
        **retired_parts("expert_parallel", redundant_experts="redundant", expert_dispatch="dispatch"),
    }

    model: str = Field(
        "demo",
        description="'demo', 'demo-base', a .gguf file, a Hugging Face model directory, or a model of the hub, fetched if it is "
        "not in the hub's cache (owner/name or owner/name:file.gguf), or a URL that fsspec reads (s3://bucket/folder).",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a model of the hub; none is its main branch."
    )
    served_model_name: str | None = Field(None, description="Name that clients use; none takes the file's own.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto takes CUDA if it is there."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of weights and KV; auto is float32 on CPU and bfloat16 on CUDA."
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy fills the model with random weights of the true shape: for speed tests."
    )
    quantization: QuantizationName = Field(
        "none",
        description="Quantises linear layers and experts as the model is loaded. fp8: weights and activations in float8, with "
        "one scale for each token and each output channel. fp8_block: a scale for each 128 numbers of a token and each "
        "128 x 128 of a weight. "
        "fp8_tensor: one scale for all tokens of a step and one for a weight. int8: weights and activations in 8 bits, with "
        "scales as fp8. int4: weights in 4 bits, with a scale and a zero for each 128 numbers, and an output head that is not "
        "the embedding, too, in 8 bits, with a scale for each token. Embedding and other output heads stay as they are, and so "
        "do weights that the checkpoint stores quantised. Packages can bring more formats.",
    )
    stored_weights: Literal["keep", "widen"] = Field(
        "keep",
        description="What becomes of quantised weights in the checkpoint, such as GGUF's on a CPU, if this device can multiply "
        "with them as they are: keep leaves them as stored; widen converts them to the model's dtype, which takes more memory.",
    )
    sampling_defaults: Literal["model", "none"] = Field(
        "model",
        description="Where settings of sampling come from that a request leaves out: model takes those of the model's "
        "generation_config.json (temperature, top_p and such), as vLLM and SGLang do; none takes the API's own defaults.",
    )
    attention_backend: AttentionSetting = Field(
        "auto",
        description="What computes attention: flashinfer, triton, native (decodes in float32 on a CPU), torch or a package's "
        "own. prefill=triton,decode=flashinfer sets it for prompts and decodes separately. auto takes the fastest that can "
        "serve the model on this device.",
    )
    shared_prefix_attention: Literal["auto", "off"] = Field(
        "auto",
        description="Whether requests whose prompts begin alike read the shared pages of the KV cache once for all of them: auto "
        "does so where it spares the reading of 8192 tokens or more in a step (prompts of latent attention by triton always "
        "share their keys); off never does.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Ranks that each layer is split over, on one machine: a process each, with a GPU each. Has to divide the "
        "model's attention heads and the width of its MLPs.",
    )
    pipeline_parallel: Annotated[PipelineParallel, NoDecode] = Field(
        PipelineParallel(),
        description="Stages that the layers are spread over, each of --tensor-parallel ranks. A step goes through one stage "
        "after the other, a long step in chunks, so that all stages compute. micro_batches: whether stages compute several steps "
        "at once, of other requests each: auto does on CPUs, on GPUs from as many requests on as a trial at the start says; "
        "always; off.",
    )
    nnodes: int = Field(
        1,
        ge=1,
        description="Hosts that the ranks are spread over evenly. Each host runs a worker with the same flags; the first one "
        "answers requests, the others only compute.",
    )
    node_rank: int = Field(0, ge=0, description="Which of --nnodes this host is; 0 is the first.")
    rendezvous: str = Field(
        "",
        description="HOST:PORT at which the first of --nnodes waits for the others: an address of that host that they can reach.",
    )
    rendezvous_key: Path | None = Field(
        None,
        description="File with a secret that all of --nnodes have alike, by which they know each other: openssl rand -hex 32.",
    )
    expert_parallel: Annotated[ExpertParallel, NoDecode] = Field(
        ExpertParallel(),
        description="Whether each rank of --tensor-parallel gets whole experts, equally many, instead of a part of every expert. "
        "redundant: extra slots for experts in a layer, spread evenly over the ranks. Experts that get many tokens are copied "
        "into them and moved, a few at a time, so that all ranks have equally much to compute. 0: experts stay where they are. "
        "dispatch: how rows reach experts with --data-parallel-attention: gather (all rows go to all ranks), direct (each row "
        "goes to the ranks that have its experts, which write their sums back) or direct-float8 (the same, with rows in 8 bits "
        "on the way there). The last two are for ranks of one host. They are tested at the start, and gather is used if they "
        "are not exact.",
    )
    all_reduce: AllReduceName = Field(
        "auto",
        description="What sums the parts of --tensor-parallel ranks: backend (NCCL, or gloo on CPUs), one-shot (each rank gets "
        "all parts over memory that they share and sums them) or two-shot (each rank sums a share and gets the others' sums). "
        "auto times those whose sums are exact on this machine, at the start, and takes the quickest for each size. Ranks on "
        "several hosts use the backend. With --data-parallel-attention this is how rows are exchanged, and there is no "
        "two-shot.",
    )
    data_parallel_attention: bool = Field(
        False,
        description="Whether each rank of --tensor-parallel has requests of its own, computes their attention alone and keeps "
        "their pages. MLPs and experts are still split over all ranks. It is for models whose KV cache cannot be split over "
        "ranks (latent attention, few key heads): with N ranks the cache then holds N times as many tokens. --max-running, "
        "--max-step-tokens and --num-pages count for each rank.",
    )
    threads: int = Field(0, ge=0, description="CPU threads of the model, which its ranks share; 0 takes all cores.")

    @property
    def meeting_place(self) -> tuple[str, int]:
        """Host and port of ``rendezvous``.

        Raises:
            ConfigError: It has none, there is no key, or ranks and nodes do not fit.
        """
        host, _, port = self.rendezvous.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"--rendezvous {self.rendezvous!r}: --nnodes {self.nnodes} needs HOST:PORT")
        if self.ranks % self.nnodes:
            raise ConfigError(f"--nnodes {self.nnodes}: {self.ranks} ranks cannot be spread evenly over so many")
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"--node-rank {self.node_rank} is not below --nnodes {self.nnodes}")
        if self.rendezvous_key is None:
            raise ConfigError(
                f"--rendezvous-key: --nnodes {self.nnodes} needs a file with a secret that all hosts have"
            )
        return host.strip("[]"), int(port)

    @property
    def group_key(self) -> bytes:
        """The key by which the hosts know each other.

        Raises:
            ConfigError: It cannot be read.
        """
        assert self.rendezvous_key is not None, "meeting_place was asked for before"
        return read_key(self.rendezvous_key, "--rendezvous-key")

    @property
    def ranks(self) -> int:
        """Processes that run the model together."""
        return self.tensor_parallel * self.pipeline_parallel.stages
