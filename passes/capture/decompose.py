"""Composite functions of torch that hide weights inside, written out so that the tracer sees plain linears.

One row of `DECOMPOSITIONS` per function: called in its place, with the same arguments and the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["DECOMPOSITIONS"]


def multi_head_attention_forward(
        query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int, in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None, add_zero_attn: bool, dropout_p: float,
        out_proj_weight: Tensor, out_proj_bias: Tensor | None, training: bool = True, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False,
        q_proj_weight: Tensor | None = None, k_proj_weight: Tensor | None = None, v_proj_weight: Tensor | None = None,
        static_k: Tensor | None = None, static_v: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False) -> tuple[Tensor, Tensor | None]:
    """`torch.nn.functional.multi_head_attention_forward` as four linears around a scaled dot product.

    Inputs are [length, batch, embed] (or [length, embed]) as there; the packed projection is used as one linear when
    query, key and value are the same tensor, and as three row slices of it otherwise.
    """
    batched = query.dim() == 3
    if not batched:
        same = key is value and query is key
        query = query.unsqueeze(1)
        key, value = (query, query) if same else (key.unsqueeze(1), value.unsqueeze(1))
        key_padding_mask = key_padding_mask.unsqueeze(0) if key_padding_mask is not None else None
    length, batch, embed = query.shape
    head = embed_dim_to_check // num_heads
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")

    if not use_separate_proj_weight:
        assert in_proj_weight is not None
        if key is value and query is key:
            q, k, v = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
        else:
            width = embed_dim_to_check
            weights = [in_proj_weight[i * width:(i + 1) * width] for i in range(3)]
            biases = [None if in_proj_bias is None else in_proj_bias[i * width:(i + 1) * width] for i in range(3)]
            q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    else:
        assert q_proj_weight is not None and k_proj_weight is not None and v_proj_weight is not None
        width = embed_dim_to_check
        biases = [None if in_proj_bias is None else in_proj_bias[i * width:(i + 1) * width] for i in range(3)]
        q, k, v = (F.linear(x, w, b) for x, w, b in zip(
            (query, key, value), (q_proj_weight, k_proj_weight, v_proj_weight), biases, strict=True))

    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None                                   # torch leaves the mask to the kernel then
    elif key_padding_mask is not None:
        is_causal = False
    mask = _additive(attn_mask, q.dtype)
    padding = _additive(key_padding_mask, q.dtype)
    if mask is not None and mask.dim() == 2:
        mask = mask.unsqueeze(0)
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, bias_k.repeat(1, batch, 1)])
        v = torch.cat([v, bias_v.repeat(1, batch, 1)])
        mask = F.pad(mask, (0, 1)) if mask is not None else None
        padding = F.pad(padding, (0, 1)) if padding is not None else None

    q = q.reshape(length, batch * num_heads, head).transpose(0, 1)
    k = k.reshape(k.shape[0], batch * num_heads, head).transpose(0, 1) if static_k is None else static_k
    v = v.reshape(v.shape[0], batch * num_heads, head).transpose(0, 1) if static_v is None else static_v
    if add_zero_attn:
        zeros = k.new_zeros((batch * num_heads, 1, head))
        k, v = torch.cat([k, zeros], dim=1), torch.cat([v, zeros], dim=1)
        mask = F.pad(mask, (0, 1)) if mask is not None else None
        padding = F.pad(padding, (0, 1)) if padding is not None else None
    source = k.shape[1]

    if padding is not None:
        padding = padding.view(batch, 1, 1, source).expand(-1, num_heads, -1, -1).reshape(batch * num_heads, 1, source)
        mask = padding if mask is None else mask + padding
    probability = dropout_p if training else 0.0

    if need_weights:
        scores: Tensor = torch.bmm(q * math.sqrt(1.0 / float(head)), k.transpose(-2, -1))
        scores = scores if mask is None else scores + mask
        attention = torch.softmax(scores, dim=-1)
        attention = F.dropout(attention, p=probability) if probability > 0.0 else attention
        joined = torch.bmm(attention, v).transpose(0, 1).reshape(length * batch, embed)
        output = F.linear(joined, out_proj_weight, out_proj_bias).view(length, batch, -1)
        attention = attention.view(batch, num_heads, length, source)
        attention = attention.mean(dim=1) if average_attn_weights else attention
        return (output, attention) if batched else (output.squeeze(1), attention.squeeze(0))

    if mask is not None:
        whole = mask.dim() == 3 and mask.size(0) == 1
        mask = mask.unsqueeze(0) if whole else mask.view(batch, num_heads, -1, source)
    q, k, v = (t.view(batch, num_heads, -1, head) for t in (q, k, v))
    joined = F.scaled_dot_product_attention(q, k, v, mask, probability, is_causal and mask is None)
    joined = joined.permute(2, 0, 1, 3).reshape(length * batch, embed)
    output = F.linear(joined, out_proj_weight, out_proj_bias).view(length, batch, -1)
    return (output if batched else output.squeeze(1)), None


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask (True = do not attend) as the numbers that are added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


DECOMPOSITIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: multi_head_attention_forward,
}
