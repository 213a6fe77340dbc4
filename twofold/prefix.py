"""Runs the beginning that many prompts share once, for sampling and, with gradients, for training.

The prompts of one module begin alike: instruction and demos. With P shared tokens, S own tokens and B rows:

1. The beginning goes through the model once, as one row of P tokens; each layer's keys and values are kept.
2. The rows go through as (B, S): each layer attends to the keys of the beginning and to the row's own, with torch's
   kernel, which holds no matrix of scores.
3. For training, equal prompts are one row; their completions follow as rows of their own, which take over the keys and
   values of their prompt.
4. While decoding, the rows' keys and values lie in buffers made for the whole answer: nothing is copied per token. The
   one query of a row scores the beginning's keys as one un-repeated block, one matrix product for all rows of a key
   head, and its own row's keys; one softmax runs over both.

Nothing is approximated: the result is that of B full rows of P + S tokens. The attention below is installed through
transformers' `AttentionInterface`, so it serves every decoder whose layers attend to the full context.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name everyone reads
from transformers import AttentionInterface, PreTrainedModel

from twofold.errors import ModelError

ATTENTION = "twofold_shared_prefix"


def install(model: PreTrainedModel) -> None:
    """Make `model` attend through this module.

    Raises:
        ModelError: a layer of the model looks at a window of the context only.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ModelError(
            f"{config.model_type}: layers of kind {sorted(kinds - {'full_attention'})} are not supported. "
            "Choose a model whose layers all attend to the full context, such as Llama or Qwen3."
        )
    model.set_attn_implementation(ATTENTION)


class Beginning:
    """Keys and values of the shared tokens: per layer two tensors of shape (key heads, P, head size)."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[1]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.layers.append((key[0], value[0]))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)


class Prompts:
    """Prompts that go on from the beginning, all at once; each layer's keys and values are kept.

    Per layer two tensors of shape (B, key heads, S, head size).
    """

    def __init__(self, beginning: Beginning, mask: Tensor):
        """`mask`: (B, S), true for tokens and false for padding, which may stand at either end."""
        self.beginning = beginning
        self.mask = mask
        self.bias = _bias(_visible(mask), beginning)
        self.layers: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.layers.append((key, value))
        return _attend(query, self.beginning.layers[layer], (key, value), self.bias, scaling)


class Completions:
    """Completions of prompts, all at once: row b goes on from prompt `origin[b]`."""

    def __init__(self, prompts: Prompts, origin: Tensor, mask: Tensor):
        """`origin`: (B,); `mask`: (B, C), true for tokens and false for the padding after them."""
        self.prompts = prompts
        self.origin = origin
        before = prompts.mask[origin][:, None].expand(-1, mask.shape[1], -1)
        self.bias = _bias(torch.cat([before, _visible(mask)], dim=-1), prompts.beginning)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = self.prompts.layers[layer]
        own = torch.cat([keys[self.origin], key], dim=2), torch.cat([values[self.origin], value], dim=2)
        return _attend(query, self.prompts.beginning.layers[layer], own, self.bias, scaling)


class Decoding:
    """Rows that grow by one token a step.

    Buffers per layer: (B, key heads, S + room, head size), where `room` is the most tokens that can be added.
    """

    def __init__(self, beginning: Beginning, mask: Tensor, room: int):
        """`mask`: (B, S) of the rows' own prompt tokens, padded on the left."""
        self.beginning = beginning
        self.mask = F.pad(mask, (0, room), value=True)
        self.room = room
        self.filled = 0
        self.buffers: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if layer == len(self.buffers):
            self.buffers.append((F.pad(key, (0, 0, 0, self.room)), F.pad(value, (0, 0, 0, self.room))))
        end = self.filled + key.shape[2]
        if layer == 0:
            self.bias = _bias(_visible(self.mask[:, :end], self.filled), self.beginning)
        keys, values = self.buffers[layer]
        keys[:, :, self.filled : end] = key
        values[:, :, self.filled : end] = value
        own = keys[:, :, :end], values[:, :, :end]
        attend = _attend if query.shape[2] > 1 else _attend_one
        return attend(query, self.beginning.layers[layer], own, self.bias, scaling)

    def advance(self, tokens: int) -> None:
        """Keep the last `tokens` tokens of every row, once the pass over them is done."""
        self.filled += tokens

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only, in this order; a row may be taken several times."""
        self.mask = self.mask[rows]
        self.buffers = [(keys[rows], values[rows]) for keys, values in self.buffers]


def _attend(
    query: Tensor, shared: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], bias: Tensor, scaling: float
) -> Tensor:
    """Attention of each row to the shared tokens and to its own.

    Shapes: query (B, heads, T, D); shared (key heads, P, D) twice; own (B, key heads, S, D) twice; bias
    (B, 1, T, P + S) of `_bias`. Returns (B, T, heads, D).
    """
    batch, heads = query.shape[:2]
    # A key head serves `heads / key_heads` query heads. Not every device's kernel takes both fewer keys and a mask.
    keys, values = (
        torch.cat([first.expand(batch, -1, -1, -1), rest], dim=2).repeat_interleave(heads // len(first), dim=1)
        for first, rest in zip(shared, own, strict=True)
    )
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scaling).transpose(1, 2)


def _attend_one(
    query: Tensor, shared: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], bias: Tensor, scaling: float
) -> Tensor:
    """As `_attend`, for one query a row (T = 1), which is soon done with a key: the time goes into reading keys."""
    batch, heads, _, size = query.shape
    key_heads, shared_length, _ = shared[0].shape
    # The query heads of a key head become rows of one product, and no key is repeated.
    query = (query * scaling).reshape(batch, key_heads, -1, size)
    flat = query.transpose(0, 1).reshape(key_heads, -1, size)
    to_shared = (flat @ shared[0].mT).view(key_heads, batch, -1, shared_length).transpose(0, 1)
    to_own = query @ own[0].mT + bias[..., shared_length:]
    weights = torch.softmax(torch.cat([to_shared, to_own], dim=-1), dim=-1, dtype=torch.float32).to(query.dtype)
    on_shared = weights[..., :shared_length].transpose(0, 1).reshape(key_heads, -1, shared_length)
    out = (on_shared @ shared[1]).view(key_heads, batch, -1, size).transpose(0, 1)
    out = out + weights[..., shared_length:] @ own[1]
    return out.reshape(batch, 1, heads, size)


def run_beginning(model: PreTrainedModel, ids: Sequence[int]) -> Beginning:
    """Run the shared tokens through the model; with gradients unless they are switched off around it."""
    beginning = Beginning()
    tokens = torch.tensor([ids], device=model.device)
    positions = torch.arange(len(ids), device=model.device)[None]
    _hidden(model, tokens, positions, beginning)
    return beginning


def run_prompts(model: PreTrainedModel, ids: Tensor, mask: Tensor, beginning: Beginning) -> tuple[Prompts, Tensor]:
    """Run prompts that go on from `beginning`. Returns their last hidden states, (B, S, hidden), too.

    `ids` and `mask` are (B, S).
    """
    prompts = Prompts(beginning, mask)
    return prompts, _hidden(model, ids, positions_after(beginning, mask), prompts)


def run_completions(model: PreTrainedModel, ids: Tensor, mask: Tensor, prompts: Prompts, origin: Tensor) -> Tensor:
    """Last hidden states, (B, C, hidden), of completions; `ids` and `mask` are (B, C), `origin` (B,)."""
    positions = positions_after(prompts.beginning, mask) + prompts.mask.sum(-1)[origin][:, None]
    return _hidden(model, ids, positions, Completions(prompts, origin, mask))


def run_step(model: PreTrainedModel, ids: Tensor, positions: Tensor, decoding: Decoding) -> Tensor:
    """Last hidden states, (B, T, hidden), of tokens that are added to the rows; `ids` and `positions` are (B, T)."""
    hidden = _hidden(model, ids, positions, decoding)
    decoding.advance(ids.shape[1])
    return hidden


def positions_after(beginning: Beginning, mask: Tensor) -> Tensor:
    """Positions of the rows' own tokens in the full sequence; padding takes that of the token before it."""
    return beginning.length + (mask.long().cumsum(-1) - 1).clamp(min=0)


def shared_length(rows: Sequence[Sequence[int]]) -> int:
    """How many tokens all rows begin with, leaving every row at least one token of its own."""
    shortest = min(map(len, rows)) - 1
    first = rows[0]
    return next((k for k in range(shortest) if any(row[k] != first[k] for row in rows)), max(shortest, 0))


def _hidden(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, attention: Beginning | Prompts | Completions | Decoding
) -> Tensor:
    decoder = model.get_decoder()
    out = decoder(input_ids=ids, position_ids=positions, use_cache=False, attention=attention)
    return out.last_hidden_state


def _visible(mask: Tensor, start: int = 0) -> Tensor:
    """(B, S - start, S): what each token from `start` on sees: itself, and those before it that are no padding.

    So padding, false in the (B, S) mask, sees one token too, and stays free of NaN.
    """
    places = torch.arange(mask.shape[1], device=mask.device)
    own = places[start:, None]
    return (places < own) & mask[:, None] | (places == own)


def _bias(visible: Tensor, beginning: Beginning) -> Tensor:
    """What is added to scores, (B, 1, T, P + S): 0 for what a token sees, all of the beginning among it, else -inf.

    All layers of a pass share it. `visible` is (B, T, S).
    """
    own = torch.zeros(visible.shape, dtype=beginning.layers[0][0].dtype, device=visible.device)
    return F.pad(own.masked_fill(~visible, -torch.inf), (beginning.length, 0))[:, None]


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    attention: Beginning | Prompts | Completions | Decoding,
    **_: object,
) -> tuple[Tensor, None]:
    return attention.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _attention)
