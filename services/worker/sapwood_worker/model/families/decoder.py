"""The frame all decoder-only models share: embedding, layers, norm, head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sapwood_kernels.ops.device import DeviceOps
from sapwood_worker.model.attention.backend import AttentionLayer, AttentionPlan
from sapwood_worker.model.config import ModelConfig
from sapwood_worker.model.distributed.data_parallel import DataParallelRows
from sapwood_worker.model.distributed.pipeline import StageLink
from sapwood_worker.model.layers.attention import Attention
from sapwood_worker.model.layers.aux_hidden_states import AuxiliaryHiddenStates
from sapwood_worker.model.layers.embedding import PositionEmbedding, VocabParallelEmbedding, VocabParallelHead
from sapwood_worker.model.layers.latent_attention import LatentAttention
from sapwood_worker.model.layers.layer import Layer, LayerContext
from sapwood_worker.model.layers.linear import Linear
from sapwood_worker.model.layers.mlp import GatedMLP, PlainMLP
from sapwood_worker.model.layers.norm import (
    AnyNorm,
    AnyQKNorm,
    HeadLayerNorm,
    LayerNorm,
    QKNorm,
    RMSNorm,
    RotatedNorm,
    UnitNorm,
    WidthNorm,
)
from sapwood_worker.model.layers.rotary import Angles, NoRotation, RotaryEmbedding
from sapwood_worker.model.layers.sparse.sparse_mlp import SparseMLP
from sapwood_worker.model.layers.state.state_layer import StateLayer
from sapwood_worker.records.expert_load import ExpertMove


def mixer(config: ModelConfig, index: int, context: LayerContext) -> Attention | LatentAttention | StateLayer:
    """What mixes a layer's tokens: attention, or what keeps a state in its place.

    Args:
        config: The model's configuration.
        index: The layer's index.
        context: Where and how the layer is built.
    """
    if config.attends(index):
        return self_attention(config, index, context.attending.inside("self_attn"))
    state = config.states[index]
    assert state is not None
    return state.build(config.hidden_size, index, context.attending.inside(state.name))


def self_attention(config: ModelConfig, index: int, context: LayerContext) -> Attention | LatentAttention:
    """A layer's attention: grouped or latent.

    Args:
        config: The model's configuration.
        index: The layer's index.
        context: Where and how the attention is built.
    """
    width, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    window, softcap = config.windows[index], config.attention_softcap
    chunked = config.chunked and window is not None
    constants = AttentionLayer(index, config.attention_scale, window=window, softcap=softcap, chunked=chunked)
    if config.latent is not None:
        return LatentAttention(
            hidden_size=width, num_heads=heads, latent=config.latent, constants=constants, context=context
        )
    return Attention(
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=dim,
        constants=constants,
        qk_norm=_qk_norm(config, index, context) if config.qk_norm else None,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        sinks=config.attention_sinks,
        gated=config.attention_gate,
        clip=config.clip_qkv,
        rope=config.ropes[index],
        context=context,
    )


def _qk_norm(config: ModelConfig, index: int, context: LayerContext) -> AnyQKNorm | None:
    if config.qk_norm_kind == "unit":
        return None if config.ropes[index] is None else UnitNorm(config.head_dim, config.rms_norm_eps, context)
    sizes, eps = (config.num_heads, config.num_kv_heads, config.head_dim), config.rms_norm_eps
    if config.qk_norm_kind == "head":
        return QKNorm(config.head_dim, eps, context)
    if config.qk_norm_kind == "rotated":
        return RotatedNorm(config.head_dim, eps, context)
    return (WidthNorm if config.qk_norm_kind == "width" else HeadLayerNorm)(*sizes, eps, context)


def _norm(config: ModelConfig, context: LayerContext) -> AnyNorm:
    """A norm of the model's width."""
    width, eps = config.hidden_size, config.rms_norm_eps
    if config.norm == "rms":
        return RMSNorm(width, eps, context)
    return LayerNorm(width, eps, context, bias=config.norm_bias, weight=config.norm_weight)


def feed_forward(config: ModelConfig, index: int, context: LayerContext) -> GatedMLP | PlainMLP | SparseMLP | JoinedMLP:
    """A layer's MLP, or the mixture of experts in its place.

    Args:
        config: The model's configuration.
        index: The layer's index.
        context: Where and how the layer is built.
    """
    rows = context.parallel.rows
    if (
        context.parallel.expert_exchange is not None
        and config.sparse is not None
        and index not in config.sparse.dense_layers
    ):
        return _feed_forward(config, index, context.dispatched)
    mlp = _feed_forward(config, index, context.joined)
    return mlp if rows is None else JoinedMLP(mlp, rows, context.ops)


def _feed_forward(config: ModelConfig, index: int, context: LayerContext) -> GatedMLP | PlainMLP | SparseMLP:
    width, sparse, activation = config.hidden_size, config.sparse, config.activation
    if sparse is not None and index not in sparse.dense_layers:
        return SparseMLP(width, sparse, activation=activation, context=context.inside(sparse.block))
    inside = context.inside("mlp" if sparse is None else sparse.block)
    if config.plain_mlp is not None:
        return PlainMLP(width, config.intermediate_size, config.plain_mlp, bias=config.mlp_bias, context=inside)
    return GatedMLP(width, config.intermediate_size, activation=activation, bias=config.mlp_bias, context=inside)


class DecoderLayer(Layer, ABC):
    """One layer: attention and MLP, with norms where the model family has them.

    Args:
        config: The model's configuration.
        index: The layer's index.
        context: Where and how it is built.

    Attributes:
        first_norm: The norm that reads its input first; None: another operation does.
    """

    first_norm: AnyNorm | None

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__()
        self.first_norm = None
        self.attention = mixer(config, index, context)
        self.mlp = feed_forward(config, index, context)
        # Before experts that are cut attention is cut as they are, before others as products are.
        if isinstance(self.mlp, SparseMLP) and self.mlp.kind is not None and self.attention.ranks is not None:
            self.attention.ranks.kind = self.mlp.kind
        self.norms = nn.ModuleDict({name: _norm(config, context.inside(name)) for name in self.norm_names()})

    @staticmethod
    @abstractmethod
    def norm_names() -> tuple[str, ...]:
        """Names of the layer's norms in a Hugging Face checkpoint."""

    @abstractmethod
    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]; may overwrite ``hidden``."""

    def precedes(self, other: DecoderLayer) -> None:
        """Tells it which layer its output goes to."""
        if other.first_norm is not None and not isinstance(self.mlp, JoinedMLP) and self.mlp.ranks is not None:
            self.mlp.ranks.norm_follows(other.first_norm)

    def norm(self, name: str) -> AnyNorm:
        """The norm of a name."""
        found = self.norms[name]
        assert isinstance(found, RMSNorm | LayerNorm)
        return found


class SeenTokens(NamedTuple):
    """A step's tokens that stand for parts of pictures.

    Attributes:
        rows: int64 [N]: their places among the step's tokens.
        values: [levels, N, hidden_size]: their embeddings, and what is added to the outputs of the first layers.
    """

    rows: Tensor
    values: Tensor


class DecoderModel(Layer):
    """A decoder-only language model, or a stage's part of one.

    Each stage of a pipeline has some of the layers, and every stage has the head. The last layer's output goes to all stages,
    so that all ranks have the same logits.

    Args:
        config: The model's configuration.
        layer_class: The family's layer.
        context: Where and how it is built. Weights are not set: fill :meth:`weights`, then call :meth:`prepare`.
        built: Is given each layer's index and the layer before the next one is built: it may fill and prepare it.

    Attributes:
        config: The argument.
        link: The ways to the other stages.
        own: The layers that this rank's stage has.
        exchange: Takes rows to the ranks of their experts; None: they go to all ranks, or there is one.
        aux_hidden_states: Keep hidden states for a head that drafts; None: there is none.
        mixtures: Those of its layers that have experts; none may have, as for a stage of a pipeline.
        sparse: Whether a layer of the model has experts, of whatever stage.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_class: type[DecoderLayer],
        context: LayerContext,
        built: Callable[[int, DecoderLayer], None] = lambda index, layer: None,
    ) -> None:
        super().__init__()
        self.config, self.exchange = config, context.parallel.expert_exchange
        vocab, width = config.vocab_size, config.hidden_size
        inside, vocabulary = context.inside("model"), context.attending
        self.link = StageLink(context.parallel.pp, width, context.dtype, context.ops)
        self._overlapping = context.parallel.tp
        self._experts_over = context.parallel.tp.size if context.parallel.rows is None else 1
        self.own = context.parallel.own_layers([config.layer_cost(i) for i in range(config.num_layers)])
        tied = config.tie_word_embeddings and config.labels is None
        self.embedding: VocabParallelEmbedding | None = None
        if self.link.first or tied:
            named = vocabulary.inside("model").inside("embed_tokens")
            self.embedding = VocabParallelEmbedding(vocab, width, config.embedding_scale, named)
        self.positions: PositionEmbedding | None = None
        if self.link.first and config.positions is not None:
            self.positions = PositionEmbedding(config.positions, width, inside.inside("embed_positions"))
        layers: list[DecoderLayer] = []
        for index in self.own:
            layers.append(layer_class(config, index, inside.inside(f"layers.{index}")))
            built(index, layers[-1])
        for layer, following in pairwise(layers):
            layer.precedes(following)
        self.layers = nn.ModuleList(layers)
        # Looked for once: a walk over all modules takes the host milliseconds, and experts may move before each step.
        self.mixtures = tuple(each for each in self.layers.modules() if isinstance(each, SparseMLP))
        sparse = config.sparse
        self.sparse = sparse is not None and any(i not in sparse.dense_layers for i in range(config.num_layers))
        self.norm = _norm(config, inside.inside("norm"))
        # A stage may have none of the layers that are rounded, but each has the head, and all are to give the same logits.
        context.linear.rounds_layers = any(context.parallel.pp.exchange(context.linear.rounds_layers, bool))
        if config.labels is None:
            table = self.embedding.table if tied and self.embedding is not None else None
            inside, scale, softcap = vocabulary.inside("lm_head"), config.logit_scale, config.final_softcap
            self.head = VocabParallelHead(
                vocab, width, tied=table, softcap=softcap, scale=scale, context=inside, bias=config.head_bias
            )
        else:
            count, score = len(config.labels.names), vocabulary.inside("score")
            self.head = VocabParallelHead(count, width, tied=None, softcap=None, context=score, labels=True)
        ropes = list(dict.fromkeys(config.ropes))
        dim, longest = config.head_dim, config.max_position
        self.rotary = nn.ModuleList(
            NoRotation(dim, context, config.growth) if rope is None else RotaryEmbedding(dim, rope, longest, context)
            for rope in ropes
        )
        # The index of each layer's rotary embedding.
        self._kinds = [ropes.index(rope) for rope in config.ropes]
        self.aux_hidden_states: AuxiliaryHiddenStates | None = None
        # A layer whose tokens all stay in the cache: its slots tell where each token is.
        self._lasting = AttentionLayer(
            min(self.own, key=lambda index: -(config.windows[index] or config.max_position)), 1.0
        )

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """How names of weights begin that other stages have."""
        others = tuple(f"model.layers.{i}." for i in range(self.config.num_layers) if i not in self.own)
        if not self.link.first:
            others = ("model.embed_positions.", *others)
        return others if self.embedding is not None else ("model.embed_tokens.", *others)

    def layer_size(self) -> int:
        """How many weights of this rank's layer matrices a token is multiplied with, in any format, without embedding and head.
        Experts count in equal shares if all ranks have all tokens."""
        shapes = (each.shape for each in self.layers.modules() if isinstance(each, Linear))
        met = sum(shape.rows * shape.columns.size for shape in shapes)
        if (sparse := self.config.sparse) is not None:
            expert = 3 * self.config.hidden_size * sparse.intermediate_size // self._experts_over
            met += sum(sparse.routing.chosen + each.joined for each in self.mixtures) * expert
        return met

    def expert_tokens(self) -> Tensor:
        """int64 [mixtures, E]: how many tokens each expert has got so far; there is a mixture."""
        return torch.stack([each.router.counts for each in self.mixtures])

    def move_experts(self, moves: Sequence[ExpertMove]) -> None:
        """Moves experts between ranks; all ranks make the same call."""
        for layer in dict.fromkeys(move.layer for move in moves):
            self.mixtures[layer].experts.move([move for move in moves if move.layer == layer])

    def forget_expert_tokens(self) -> None:
        """Begins again to count the tokens of experts."""
        for each in self.mixtures:
            each.router.counts.zero_()
        if self.exchange is not None:
            self.exchange.forget()

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size], without positions; only the first stage has the table."""
        assert self.embedding is not None
        hidden: Tensor = self.embedding(token_ids)
        return hidden

    def run_layer(self, index: int, hidden: Tensor, plan: AttentionPlan) -> Tensor:
        """Runs one layer over one text from its first token on, for callers that inspect states between layers.

        Args:
            index: The layer's.
            hidden: [T, hidden_size]: what the layer before returned, or the embedding; may be overwritten.
            plan: The text's attention.
        """
        positions = torch.arange(len(hidden), device=hidden.device)
        result: Tensor = self.layers[index](hidden, self.rotary[self._kinds[index]](positions), plan)
        self._settle()
        return result

    def forward(
        self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, seen: SeenTokens | None = None
    ) -> Tensor:
        """Runs the layers over a flat ragged batch; writes keys and values to the cache.

        Stages hand what their layers give on to the next.

        Args:
            token_ids: int64 [T].
            positions: int64 [T], or [3, T] on three axes.
            plan: The step's attention.
            seen: The tokens that stand for pictures; None: there are none. Only a model of one stage takes any.

        Returns:
            [T, hidden_size], before the final norm: that of this stage's layers, good for :meth:`logits` and :meth:`normed`.
        """
        if seen is None:
            hidden = self.compute(self.begin(token_ids, positions), positions, plan)
        else:
            assert self.link.alone, "pictures in a pipeline"
            hidden = self.begin(token_ids, positions).index_copy_(0, seen.rows, seen.values[0])
            hidden = self.compute(hidden, positions, plan, seen)
        if not self.link.last:
            self.link.send(hidden)
        return hidden

    def begin(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """int64 [T] each -> [T, hidden_size]: what this stage's layers get, which the stage before has sent if there is one."""
        if not self.link.first:
            return self.link.receive(len(token_ids))
        hidden = self.embed(token_ids)
        return hidden if self.positions is None else hidden + self.positions(positions)

    def compute(self, hidden: Tensor, positions: Tensor, plan: AttentionPlan, seen: SeenTokens | None = None) -> Tensor:
        """The output of this stage's layers for the tensor from :meth:`begin`, which they may overwrite; needs no other stage."""
        hidden = self.through(hidden, self.angles(positions), plan, seen)
        if (aux_hidden_states := self.aux_hidden_states) is not None:
            aux_hidden_states.see(self.config.num_layers, hidden)
            aux_hidden_states.keep(plan.destination(self._lasting).slots)
        return hidden

    def angles(self, positions: Tensor) -> list[Angles]:
        """int64 [T] -> each kind of rotation's, as :meth:`through` takes them."""
        return [rotary(positions) for rotary in self.rotary]

    def through(
        self, hidden: Tensor, angles: Sequence[Angles], plan: AttentionPlan, seen: SeenTokens | None = None
    ) -> Tensor:
        """Runs this stage's layers: [T, hidden_size], which they may overwrite -> the same shape."""
        aux_hidden_states = self.aux_hidden_states
        for layer, index in zip(self.layers, self.own, strict=True):
            if aux_hidden_states is not None:
                self._settle()
                aux_hidden_states.see(index, hidden)
            hidden = layer(hidden, angles[self._kinds[index]], plan)
            if seen is not None and 1 + index < len(seen.values):
                self._settle()
                hidden.index_add_(0, seen.rows, seen.values[1 + index])
        return hidden

    def _settle(self) -> None:
        """Completes a layer's output, for callers that read it before the next layer."""
        if self._overlapping.overlap is not None:
            self._overlapping.overlap.settle()

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] as :meth:`forward` returns -> [R, vocab_size or labels], float32 or the model's dtype.

        May overwrite ``hidden``; called by all ranks.
        """
        return self.head_of(self._last(hidden))

    def head_of(self, last: Tensor) -> Tensor:
        """:meth:`logits` of what the last layer gives, [R, hidden_size]; called by all ranks of a stage."""
        result: Tensor = self.head(last, self.norm)
        return result

    def normed(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] as :meth:`forward` returns -> the same after the final norm; called as :meth:`logits` is."""
        result: Tensor = self.norm(self._last(hidden))
        return result

    def _last(self, hidden: Tensor) -> Tensor:
        """The last stage's part of the decoder."""
        return hidden if self.link.alone else self.link.spread(hidden)


class JoinedMLP(Layer):
    """All ranks' rows go to all ranks; each computes its part of the MLP for all of them, and gets the sum for its own.

    Args:
        mlp: The MLP; each rank keeps its own part of the sum.
        rows: What each rank has.
        ops: The device's operations.
    """

    def __init__(self, mlp: GatedMLP | PlainMLP | SparseMLP, rows: DataParallelRows, ops: DeviceOps) -> None:
        super().__init__()
        self.mlp = mlp
        self._rows, self._ops = rows, ops

    def forward(self, hidden: Tensor, norm: AnyNorm | None, residual: Tensor | None = None) -> Tensor:
        """[T, hidden_size], normed first by ``norm`` -> [T, hidden_size], added to ``residual`` in place if there is one."""
        every = self._rows.gather(hidden)
        self._ops.add_digest(every, self._rows.seen)
        result = self._rows.scatter_sum(self.mlp(every, norm), len(hidden))
        if residual is None:
            return result
        residual += result
        return residual


# Orders of norms, attention and MLP in a layer, other than Llama's.


class SingleDecoderLayer(DecoderLayer):
    """One norm, and then one of attention, what keeps a state, and an MLP."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        Layer.__init__(self)
        self.norms = nn.ModuleDict({"norm": _norm(config, context.inside("norm"))})
        self.first_norm = self.before = self.norm("norm")
        inside = context.inside("mixer")
        self.mixer: Attention | LatentAttention | StateLayer | None = None
        self.alone: PlainMLP | None = None
        if config.attends(index):
            self.mixer = self_attention(config, index, inside.attending)
        elif (state := config.states[index]) is not None:
            self.mixer = state.build(config.hidden_size, index, inside.attending)
        else:
            assert config.plain_mlp is not None
            width, inner = config.hidden_size, config.intermediate_size
            self.alone = PlainMLP(width, inner, config.plain_mlp, bias=config.mlp_bias, context=inside.joined)

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return ("norm",)

    def precedes(self, other: DecoderLayer) -> None:
        """Nothing is computed in the sum of an output that the next layer reads."""

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        result: Tensor
        if self.mixer is not None:
            result = self.mixer(hidden, self.before, angles, plan, hidden)
        else:
            assert self.alone is not None
            result = self.alone(hidden, self.before, hidden)
        return result


class SandwichDecoderLayer(DecoderLayer):
    """Norms before and after attention and MLP, in the order of :meth:`norm_names`, which are Gemma's."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = map(self.norm, self.norm_names())

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        hidden += self.after_attention(self.attention(hidden, self.before_attention, angles, plan))
        hidden += self.after_mlp(self.mlp(hidden, self.before_mlp))
        return hidden


class PostNormDecoderLayer(DecoderLayer):
    """Norms after attention and MLP only."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        self.after_attention, self.after_mlp = map(self.norm, self.norm_names())

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return ("post_attention_layernorm", "post_feedforward_layernorm")

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        hidden += self.after_attention(self.attention(hidden, None, angles, plan))
        hidden += self.after_mlp(self.mlp(hidden, None))
        return hidden


class ParallelDecoderLayer(DecoderLayer):
    """Attention and MLP both take what one norm gives."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        self.first_norm = self.before = self.norm("input_layernorm")

    @staticmethod
    def norm_names() -> tuple[str, ...]:
        return ("input_layernorm",)

    def forward(self, hidden: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        normed = self.before(hidden)
        self.attention(normed, None, angles, plan, hidden)
        self.mlp(normed, None, hidden)
        return hidden
