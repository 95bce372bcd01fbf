"""What a model is, independent of the file format it came in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sapwood_kernels.attention.planned import Variant
from sapwood_kernels.ops.contracts import Gate
from sapwood_worker.model.layers.embedding import PositionConfig
from sapwood_worker.model.layers.latent_attention import LatentConfig
from sapwood_worker.model.layers.mlp import PlainConfig
from sapwood_worker.model.layers.rotary import QueryGrowth, RopeConfig
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseConfig
from sapwood_worker.model.layers.state.state_layer import StateConfig
from sapwood_worker.records.model_info import Labels


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
        architecture: The family's name in the registry: ``gemma3``.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; divides ``num_heads``.
        head_dim: Size of a head.
        rms_norm_eps: Added to the mean square, or to the variance, in every norm.
        norm: What layers and the model norm with.
        norm_bias: Whether LayerNorms have biases.
        norm_weight: Whether LayerNorms have weights.
        max_position: The context length it was made for, in tokens.
        ropes: The rotary embedding of each layer; None: its heads know no position.
        windows: For each layer the number of positions a token sees, itself included, or None for all.
        chunked: Whether windows are chunks: a token sees those from the latest multiple of that number on.
        activation: The activation of the MLP's gate.
        tie_word_embeddings: Whether the output head is the embedding.
        attention_scale: Factor of query-key products.
        attention_softcap: Query-key products become ``softcap * tanh(product / softcap)``; None: they stay.
        attention_sinks: Whether each head has a sink: a product of its own that takes part in the softmax and has no value.
        final_softcap: The same as ``attention_softcap`` for logits.
        attention_gate: Whether attention's output is multiplied by the sigmoid of a gate, head by head beside the queries in
            ``q_proj``.
        qk_norm: Whether queries and keys have norms.
        qk_norm_kind: RMSNorms of each head, without weights where heads are turned (``unit``), or of all heads together
            (``width``), or LayerNorms of each head (``layer``), or RMSNorms of each head after its rotation (``rotated``).
        qkv_bias: Whether the query, key and value projections have biases.
        output_bias: Whether the attention's output projection has a bias.
        clip_qkv: Queries, keys and values lie between this and its negative; None: they are as they are computed.
        mlp_bias: Whether the MLP has biases.
        plain_mlp: The MLP where it has no gate; None: it has one.
        embedding_scale: Factor on the embedding's output.
        positions: The table of positions that is added to it; None: there is none.
        head_bias: Whether the output head has a bias.
        parallel: Whether attention and MLP both take a layer's input, in families that have layers of either kind.
        residual_scale: Factor on what attention and MLP give, in the layers that have one (Granite).
        logit_scale: Factor on logits, before they are capped.
        labels: What its head tells of a sequence, by its last token. None: its head tells the next token.
        sparse: The mixtures of experts in place of its MLPs; None: there are none.
        norm_offset: Added to norm weights stored in Hugging Face files (Gemma stores w of 1 + w).
        draft_layers: Layers that checkpoints hold after the model's own, for drafts; they are not read.
        latent: How attention compresses keys and values; None: it is grouped attention.
        growth: How queries of layers whose heads know no position grow with it; None: they do not.
        single: Whether a layer is one of attention, what keeps a state, and an MLP.
        factors: Four factors, for each layer or for all: Falcon-H1's on attention's input and output, on the MLP's gate and on
            its output; MiniMax's on what attention gets and gives, and on what the MLP does.
        attending: Whether each layer has attention; empty: all have.
        states: What each layer has that keeps a state, in the place of attention or beside it; None: nothing. Empty: no layer has
            any.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    ropes: tuple[RopeConfig | None, ...]
    windows: tuple[int | None, ...]
    activation: Gate
    tie_word_embeddings: bool
    attention_scale: float
    attention_softcap: float | None = None
    attention_sinks: bool = False
    final_softcap: float | None = None
    attention_gate: bool = False
    qk_norm: bool = False
    qk_norm_kind: Literal["head", "unit", "width", "layer", "rotated"] = "head"
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_weight: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    clip_qkv: float | None = None
    mlp_bias: bool = False
    plain_mlp: PlainConfig | None = None
    embedding_scale: float = 1.0
    positions: PositionConfig | None = None
    head_bias: bool = False
    parallel: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    norm_offset: float = 0.0
    labels: Labels | None = None
    sparse: SparseConfig | None = None
    draft_layers: int = 0
    latent: LatentConfig | None = None
    chunked: bool = False
    growth: QueryGrowth | None = None
    single: bool = False
    factors: tuple[tuple[float, float, float, float], ...] = ()
    attending: tuple[bool, ...] = ()
    states: tuple[StateConfig | None, ...] = ()

    def attends(self, index: int) -> bool:
        """Whether a layer has attention."""
        return not self.attending or self.attending[index]

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that keep a state."""
        return tuple(index for index, each in enumerate(self.states) if each is not None)

    def layer_cost(self, index: int) -> int:
        """How many numbers of a layer's matrices a token is multiplied with, those of states aside: a pipeline stage's cost is
        computed from it."""
        width, heads, latent, sparse = self.hidden_size, self.num_heads, self.latent, self.sparse
        if not self.attends(index):
            attention = 0
        elif latent is None:
            attention = 2 * width * self.head_dim * (heads + self.num_kv_heads)
        else:
            inner = latent.q_lora_rank
            queries = width * heads * latent.query_dim if inner is None else inner * (width + heads * latent.query_dim)
            up = latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
            attention = queries + width * latent.cached_dim + up + heads * latent.v_head_dim * width
        if sparse is None or index in sparse.dense_layers:
            inside = self.intermediate_size
        else:
            shared = 0 if sparse.shared is None else sparse.shared.intermediate_size
            inside = sparse.routing.chosen * sparse.intermediate_size + shared
        if self.single and (self.attends(index) or self.states[index] is not None):
            return attention
        return attention + (3 if self.plain_mlp is None else 2) * width * inside

    def expert_exchange(self, ranks: int, itemsize: int) -> float:
        """Bytes that ranks with whole experts give each other for each token that an expert gets, as ``ModelInfo`` has them.

        Args:
            ranks: That have whole experts.
            itemsize: Bytes of a number.
        """
        if self.sparse is None:
            return 0.0
        return 2 * (ranks - 1) * self.hidden_size * itemsize / self.sparse.routing.chosen

    @property
    def rotary_variants(self) -> tuple[str, ...]:
        """Names what in the rotary embeddings depends on ``max_position``: keys that were cached with others are not used."""
        scalings = dict.fromkeys(rope.scaling for rope in self.ropes if rope is not None and rope.scaling is not None)
        return tuple(filter(None, (scaling.variant(self.max_position) for scaling in scalings)))

    @property
    def kinds(self) -> tuple[Variant, ...]:
        """What the attention of each layer is."""
        return tuple(
            Variant(
                self.attention_scale,
                window,
                self.attention_softcap,
                self.attention_sinks,
                self.chunked and window is not None,
            )
            for window in self.windows
        )
