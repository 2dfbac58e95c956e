"""How large the experts of a model are, by its config.json alone: what planning asks before anything is loaded. Torch-free.

Whoever loads the model reads the same keys strictly (twostep/model/families); here a key that makes no sense counts as missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostep.checkpoint.usual_keys import usual_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """num_experts   of a layer, of which each token goes to `top_k`
    width         of one expert, between its products
    shared_width  of what every token goes to besides; 0: nothing
    num_layers    that have experts; the others have a dense MLP
    """

    num_experts: int
    top_k: int
    width: int
    shared_width: int
    num_layers: int


def expected_experts(num_experts: int, top_k: int, num_tokens: float) -> float:
    """Returns how many of a layer's experts a step of so many tokens reads, where each chooses its `top_k` independently and uniformly."""
    unchosen: float = (1 - top_k / num_experts) ** num_tokens
    return num_experts * (1 - unchosen)


def read_expert_sizes(config: Mapping[str, Any]) -> ExpertSizes | None:
    """Returns what config.json says; None: there are no experts."""
    config = usual_keys(config)

    def number(*names: str) -> int:
        value = next((config[name] for name in names if config.get(name) is not None), 0)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    num_experts, top_k = number("num_experts", "num_local_experts", "n_routed_experts"), number("num_experts_per_tok")
    width, num_layers = number("moe_intermediate_size", "intermediate_size"), number("num_hidden_layers")
    if not (num_experts and top_k and width and num_layers):
        return None
    dense, step = config.get("mlp_only_layers"), number("decoder_sparse_step") or 1
    dense = dense if isinstance(dense, list) else []
    first = number("first_k_dense_replace")
    with_experts = sum(i >= first and i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    if not with_experts:
        return None
    return ExpertSizes(
        num_experts=num_experts,
        top_k=min(top_k, num_experts),
        width=width,
        shared_width=number("shared_expert_intermediate_size") or width * number("n_shared_experts"),
        num_layers=with_experts,
    )
