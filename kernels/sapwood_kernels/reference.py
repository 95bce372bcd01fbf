"""Plain-torch references of every kernel the layers use: the definition that faster versions are tested against.

Shapes: T tokens, H query heads, K key/value heads, D head size, S cache slots (pages times page size). "Slot" is a token's
place in the paged cache: ``page * page_size + offset``. Each function works on any device and floating dtype; statistics are
taken in float32. They aim at being obvious, not at speed (``cpu.py`` holds tuned versions).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32, returned in x's dtype.

    Args:
        x: [..., N].
        weight: Broadcasts against x. A Gemma norm passes one plus its stored weight.
        eps: Added to the mean square.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, partners: Tensor | None = None) -> Tensor:
    """Rotates each head by its token's angles.

    Args:
        x: [T, heads, D].
        cos: [T, D], each angle's cosine twice: for both elements of a pair.
        sin: [T, D], the sines, negated for the first of a pair.
        partners: int64 [D]: the element that each is paired with (``RotaryPairs.partners``); None: i with i + D/2.

    Source: Su et al., "RoFormer", 2021; without ``partners`` in the half-split layout of GPT-NeoX.
    """
    if partners is not None:
        return x * cos[:, None] + x.index_select(-1, partners) * sin[:, None]
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + swapped * sin[:, None]


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``, where the last dimension holds gate then up: [T, 2N] -> [T, N]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` with the tanh approximation of gelu: [T, 2N] -> [T, N]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def quantise(x: Tensor, scale: float | Tensor) -> Tensor:
    """``x / scale`` rounded to float8_e4m3fn, clamped to its range."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scale).clamp(-most, most).to(torch.float8_e4m3fn)


def dequantise(x: Tensor, scale: float | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undoes :func:`quantise`, except for its rounding."""
    return (x.float() * scale).to(dtype)


def quantise_rows(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Each row, or each ``group`` numbers of it, by a scale that brings its largest number to the largest of float8_e4m3fn.

    Args:
        x: [T, K].
        group: Divides K; None: K.

    Returns:
        float8_e4m3fn [T, K] and the scales, float32 [T, K / group].
    """
    parts = x.float().view(len(x), -1, group or x.shape[1])
    scales = _scales(parts.abs().amax(-1))
    return quantise(parts, scales[..., None]).view(x.shape), scales


def quantise_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8 with one scale for all: [T, K] -> [T, K] and float32 [1, 1]."""
    scale = _scales(x.float().abs().amax().view(1, 1))
    return quantise(x, scale), scale


def quantise_blocks(x: Tensor, size: int = 128) -> tuple[Tensor, Tensor]:
    """float8 with a scale for each square block: [N, K] -> [N, K] and float32 [N / size, K / size]."""
    parts = x.float().view(x.shape[0] // size, size, x.shape[1] // size, size)
    scales = _scales(parts.abs().amax((1, 3)))
    return quantise(parts, scales[:, None, :, None]).view(x.shape), scales


def dequantise_blocks(x: Tensor, scales: Tensor) -> Tensor:
    """float8 [N, K] and a scale for each block of it, [N / n, K / k] -> float32 [N, K]."""
    rows, columns = x.shape[0] // scales.shape[0], x.shape[1] // scales.shape[1]
    return x.float() * scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def _scales(largest: Tensor) -> Tensor:
    return (largest / torch.finfo(torch.float8_e4m3fn).max).clamp_(min=1e-12)


def store_kv(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slots: Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Writes each token's key and value to its slot, in place.

    Args:
        key: [T, K, D].
        value: [T, K, D].
        key_pages: [P, page size, K, D] in any order, mutated.
        value_pages: The same for values.
        slots: int64 [T], no slot twice.
        scales: The divisors of keys and values when they are stored in pages of float8_e4m3fn.
    """
    store_vectors(key, key_pages, slots, scales[0])
    store_vectors(value, value_pages, slots, scales[1])


def store_vectors(vectors: Tensor, pages: Tensor, slots: Tensor, scale: float = 1.0) -> None:
    """Writes what each token leaves to its slot, in place; the arguments are those of :func:`store_kv`."""
    size = pages.shape[1]
    if pages.dtype == torch.float8_e4m3fn:
        # torch cannot index float8, so the bytes are copied.
        vectors, pages = quantise(vectors, scale).view(torch.uint8), pages.view(torch.uint8)
    pages[slots // size, slots % size] = vectors


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last N of M positions of one sequence; query heads share key/value heads in groups.

    Args:
        query: [N, H, D], at positions M - N .. M - 1.
        key: [M, K, D].
        value: [M, K, D].
        scale: Factor of the dot products.
        window: A query at position p sees positions p - window + 1 .. p; None: all up to p.
        chunked: It sees those from the latest multiple of ``window`` on instead (Llama 4).
        softcap: Scores become ``softcap * tanh(score / softcap)``.
        sinks: [H]: a score of each head's own that takes part in the softmax and has no value (gpt-oss). It is not capped.

    Returns:
        [N, H, D].
    """
    count, length = query.shape[0], key.shape[0]
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("nhd,mhd->hnm", query.float(), key.float().repeat_interleave(groups, 1)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(length - count, length, device=query.device)[:, None]
    seen = torch.arange(length, device=query.device)[None]
    hidden = seen > at
    if window is not None:
        hidden |= seen < (at // window * window if chunked else at - window + 1)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks.float()[:, None, None].expand(-1, count, 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return torch.einsum("hnm,mhd->nhd", weights, value.float().repeat_interleave(groups, 1)).to(query.dtype)


def latent_attention(query: Tensor, stored: Tensor, up: Tensor, *, scale: float) -> Tensor:
    """:func:`attention` of heads whose keys and values are made of one cached vector a token (MLA).

    Args:
        query: [N, H, D], at the last N of M positions; the last E of D are rotated.
        stored: [M, R + E]: a token's latent part, and the rotary part that ends each head's key.
        up: [H, D - E + V, R]: the matrices that expand the latent part to each head's key (without the rotary end) and value.
        scale: Factor of the dot products.

    Returns:
        [N, H, V].

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
    """
    rank = up.shape[2]
    flat = query.shape[2] - (stored.shape[1] - rank)
    both = torch.einsum("mr,hdr->mhd", stored[:, :rank].float(), up.float())
    rotary = stored[:, None, rank:].float().expand(-1, len(up), -1)
    return attention(query, torch.cat((both[..., :flat], rotary), -1), both[..., flat:], scale=scale)


def paged_attention(
    query: Tensor,
    key_slots: Tensor,
    value_slots: Tensor,
    page_table: Tensor,
    query_lens: Tensor,
    seq_lens: Tensor,
    page_size: int,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a ragged batch over the paged cache, which already holds the batch's own keys and values.

    Args:
        query: [T, H, D], the requests' tokens one after the other.
        key_slots: [S, K, D].
        value_slots: [S, K, D].
        page_table: Integers [B, P]: the pages of each request in order.
        query_lens: Integers [B], summing to T.
        seq_lens: Integers [B]: keys of each request, its own query tokens included.
        page_size: Slots in a page.
        scale, window, chunked, softcap, sinks: As in :func:`attention`.

    Returns:
        [T, H, D].
    """
    outputs = []
    chunks = torch.split(query, query_lens.tolist())
    for chunk, pages, length in zip(chunks, page_table.long(), seq_lens.tolist(), strict=True):
        positions = torch.arange(length, device=query.device)
        slots = pages[positions // page_size] * page_size + positions % page_size
        keys, values = key_slots[slots], value_slots[slots]
        outputs.append(
            attention(chunk, keys, values, scale=scale, window=window, chunked=chunked, softcap=softcap, sinks=sinks)
        )
    return torch.cat(outputs)


def store_pages(pages: Tensor, host: Tensor, device_pages: Tensor, host_pages: Tensor) -> None:
    """Copies one layer's pages from the device pool to the host pool. Mutates ``host`` at ``host_pages``.

    Args:
        pages: uint8 [P, N]: a layer's pages.
        host: uint8 [Q, N] of any stride: where host pages have that layer; in the host's memory.
        device_pages: int64 [N].
        host_pages: int64 [N], each once.
    """
    host[host_pages.cpu()] = pages[device_pages].to(host.device)


def load_pages(pages: Tensor, host: Tensor, device_pages: Tensor, host_pages: Tensor) -> None:
    """Copies host pages into one layer of the device pool. Mutates ``pages``.

    The arguments are those of :func:`store_pages`; ``device_pages`` holds each page once.
    """
    pages[device_pages] = host[host_pages.cpu()].to(pages.device)


def copy_pages(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies pages of one layer to others. Mutates ``pages``.

    Args:
        pages: [P, ...]: a layer's pages, contiguous.
        sources: int64 [N].
        targets: int64 [N], each once, none of them a source.
    """
    content = pages.view(torch.uint8).flatten(1)
    content[targets] = content[sources]


def apply_penalties(
    logits: Tensor,
    counts: Tensor,
    seen: Tensor,
    rows: Tensor,
    slots: Tensor,
    frequency: Tensor,
    presence: Tensor,
    repetition: Tensor,
) -> None:
    """Frequency, presence and repetition penalties, in place, on S of the R rows of logits.

    Args:
        logits: float32 [R, V]; mutated.
        counts: int32 [P, V]: how often each token is in the output of a row of the page table.
        seen: bool [P, V]: whether it is in the row's prompt or output.
        rows: int64 [S]: rows of the logits, each once.
        slots: int64 [S]: the row of ``counts`` and ``seen`` for each.
        frequency: float32 [S, 1]: subtracted from a token's logit for each time that it is in the output.
        presence: float32 [S, 1]: subtracted once if it is in the output.
        repetition: float32 [S, 1]: divides positive and multiplies other logits of tokens that were seen.
    """
    count, known, chosen = counts.index_select(0, slots), seen.index_select(0, slots), logits.index_select(0, rows)
    repeated = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
    chosen = torch.where(known, repeated, chosen)
    chosen -= frequency * count
    chosen -= presence * (count > 0)
    logits.index_copy_(0, rows, chosen)


def count_tokens(counts: Tensor, seen: Tensor, tokens: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Counts a step's tokens, in place: token ``tokens[rows[i]]`` in row ``slots[i]`` of :func:`apply_penalties`' tables.

    Args:
        counts: int32 [P, V]; mutated.
        seen: bool [P, V]; mutated.
        tokens: int64 [R]; -1 is not counted.
        rows: int64 [S].
        slots: int64 [S], each once.
    """
    new = tokens.index_select(0, rows)
    at = slots, new.clamp(min=0)
    counts.index_put_(at, (new >= 0).int(), accumulate=True)
    seen.index_put_(at, seen[at] | (new >= 0))


def add_digest(x: Tensor, total: Tensor) -> None:
    """Adds to ``total`` a number that follows from every bit of x and from where each is, modulo 2 ** 64.

    Args:
        x: [T, N], contiguous, of a multiple of 8 bytes.
        total: int64 [1], changed in place.
    """
    words = x.view(-1).view(torch.int64)
    total += (words * torch.arange(1, 2 * len(words), 2, device=x.device)).sum()
