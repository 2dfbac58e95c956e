"""Small random heads, and what they propose by a straightforward reading of the published model: no cache, one row after the other."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from twostep.engine.batch import SamplingRow
from twostep.model.eagle.config import EagleConfig
from twostep.model.eagle.head import EagleHead
from twostep.model.families.rope import Rope
from twostep.model.runner.sampler import sample
from twostep.sampling_params import SamplingParams

VOCAB = 61


def config(**changes: Any) -> EagleConfig:
    usual: dict[str, Any] = {
        "vocab_size": VOCAB,
        "draft_vocab_size": 23,
        "hidden_size": 24,
        "target_hidden_size": 24,
        "intermediate_size": 40,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 10,
        "norm_eps": 1e-5,
        "rope": Rope(theta=500.0),
        "max_model_len": 64,
    }
    return EagleConfig(**(usual | changes))


def random_head(seed: int = 0, *, has_embedding: bool = False, **changes: Any) -> EagleHead:
    """In float32, of wide weights, so that every part of it matters."""
    torch.manual_seed(seed)
    head = EagleHead(config(**changes), has_embedding=has_embedding)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0.0, 0.4).add_(1.0 if parameter.dim() == 1 else 0.0)
    c = head.config
    head.use_tokens(torch.randperm(c.vocab_size)[: c.draft_vocab_size].sort().values)
    if not has_embedding:
        head.use_embedding(torch.randn(c.vocab_size, c.hidden_size))
    return head.requires_grad_(False)


def random_sequence(head: EagleHead, length: int, seed: int = 0) -> tuple[torch.Tensor, list[int]]:
    """States of `length` positions, and one token more than that."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(length, 3 * head.config.target_hidden_size, generator=generator)
    return states, torch.randint(head.config.vocab_size, (length + 1,), generator=generator).tolist()


Choice = Callable[[torch.Tensor, int], int]


def likeliest(logits: torch.Tensor, number: int) -> int:
    return int(logits.argmax())


def drawn(params: SamplingParams, position: int) -> Choice:
    """A Choice that picks as the model's sampler does, the first proposal being at `position` of the answer."""

    def choose(logits: torch.Tensor, number: int) -> int:
        return int(sample(logits[None], [SamplingRow(params, position + number, (), 0, frozenset())]).token_ids[0])

    return choose


def propose(head: EagleHead, states: torch.Tensor, token_ids: Sequence[int], count: int, choose: Choice = likeliest) -> list[int]:
    return PlainHead(head.state_dict(), head.embedding, head.config).propose(states, token_ids, count, choose)


class PlainHead:
    """Reads the weights as a checkpoint has them."""

    def __init__(self, weights: Mapping[str, torch.Tensor], embedding: torch.Tensor, c: EagleConfig) -> None:
        self.w, self.embedding, self.c = weights, weights.get("embed_tokens.weight", embedding), c

    def propose(
        self,
        states: torch.Tensor,
        token_ids: Sequence[int],
        count: int,
        choose: Choice = likeliest,
        *,
        served: bool = False,
    ) -> list[int]:
        """`choose`: a token out of logits over the model's vocabulary, the n-th. `served`: a sequence's first token is seen, too, with its
        own state, as it is when the head serves."""
        rows = [(token, self.w["fc.weight"] @ state) for token, state in zip(token_ids[1:], states, strict=True)]
        if served:
            rows.insert(0, (token_ids[0], self.w["fc.weight"] @ states[0]))
        proposed: list[int] = []
        for number in range(count):
            last = self._last_row(rows)
            small = self.w["lm_head.weight"] @ self._norm("norm", last)
            logits = torch.full((self.c.vocab_size,), -torch.inf)
            for own, logit in enumerate(small):
                logits[own + int(self.w["d2t"][own])] = logit
            proposed.append(choose(logits, number))
            rows.append((proposed[-1], last))
        return proposed

    def _last_row(self, rows: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        c = self.c
        queries, keys, values = [], [], []
        for position, (token, hidden) in enumerate(rows):
            both = torch.cat((self._norm("midlayer.input_layernorm", self.embedding[token]), self._norm("midlayer.hidden_norm", hidden)))
            q, k, v = (self._linear(f"midlayer.self_attn.{name}_proj", both).view(-1, c.head_dim) for name in "qkv")
            queries.append(self._turned(q, position))
            keys.append(self._turned(k, position))
            values.append(v)
        heads = []
        for head in range(c.num_heads):
            group = head * c.num_kv_heads // c.num_heads
            scores = torch.stack([queries[-1][head] @ key[group] for key in keys]) / c.head_dim**0.5
            heads.append(sum(share * value[group] for share, value in zip(scores.softmax(0), values, strict=True)))
        hidden = rows[-1][1]
        residual = self._norm("midlayer.hidden_norm", hidden) if c.norm_before_residual else hidden
        residual = residual + self._linear("midlayer.self_attn.o_proj", torch.cat(heads))
        x = self._norm("midlayer.post_attention_layernorm", residual)
        gate, up = self._linear("midlayer.mlp.gate_proj", x), self._linear("midlayer.mlp.up_proj", x)
        return residual + self._linear("midlayer.mlp.down_proj", gate * torch.sigmoid(gate) * up)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.w[f"{name}.weight"] @ x + self.w.get(f"{name}.bias", 0)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean() + self.c.norm_eps).sqrt() * self.w[f"{name}.weight"]

    def _turned(self, heads: torch.Tensor, position: int) -> torch.Tensor:
        """RoPE as a product of complex numbers: pair i is (x[i], x[i + half])."""
        half = self.c.head_dim // 2
        turns = torch.tensor([cmath.exp(1j * position * self.c.rope.theta ** (-2 * i / self.c.head_dim)) for i in range(half)])
        turned = torch.complex(heads[:, :half], heads[:, half:]) * turns.to(torch.complex64)
        return torch.cat((turned.real, turned.imag), -1)
