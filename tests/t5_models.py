"""Small random T5s, saved by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 211
# The token that decoders begin with, and the one that ends answers.
START, END = 0, 1

_SMALL = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "d_kv": 12,
    "d_ff": 80,
    "num_layers": 3,
    "num_heads": 5,
    "decoder_start_token_id": START,
    "eos_token_id": END,
}
KINDS: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5-v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_layers": 2, "num_decoder_layers": 4},
    "odd-buckets": {"relative_attention_num_buckets": 10, "relative_attention_max_distance": 23, "feed_forward_proj": "gated-silu"},
}


def save_t5(kind: str, directory: Path, **changes: Any) -> transformers.T5ForConditionalGeneration:
    """A random model, written to `directory` and returned as transformers' own."""
    config = transformers.T5Config(**(_SMALL | KINDS[kind] | changes))
    torch.manual_seed(len(kind))
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        if not config.scale_decoder_outputs:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.2)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif name.endswith("relative_attention_bias.weight"):
                parameter.normal_(std=2.0)
            elif name == "shared.weight":
                parameter.normal_(std=1.0)
            elif name != "lm_head.weight":
                # With 0.2, transformers' own logits are off by 2e-4 from those in float64.
                parameter.normal_(std=0.1)
    model.save_pretrained(directory)
    return model


def reference_logits(model: transformers.T5ForConditionalGeneration, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """transformers' logits of each token of `answer` and of the one behind it, float32 [len(answer) + 1, VOCAB]. `prompt` ends with the
    token that the decoder begins with."""
    with torch.inference_mode():
        decoder_ids = torch.tensor([[*prompt[-1:], *answer]])
        return model(input_ids=torch.tensor([prompt[:-1]]), decoder_input_ids=decoder_ids).logits[0].float()
