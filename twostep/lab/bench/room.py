"""Whether what is to be measured fits: said before anything is loaded or measured, where it is known by then."""

from __future__ import annotations

from twostep.errors import SetupError


def check_context(prompt_tokens: int, output_tokens: int, longest: int) -> None:
    """`longest`: tokens of the model's context. Raises SetupError."""
    if prompt_tokens + output_tokens > longest:
        raise SetupError(
            f"{prompt_tokens} + {output_tokens} tokens are more than the model's context of {longest}; "
            "lower --input-tokens or --output-tokens"
        )


def check_blocks(batch: int, tokens: int, *, block_size: int, num_blocks: int) -> None:
    """Returns whether a pool holds so many sequences of so many tokens at once. Raises SetupError."""
    needed = batch * -(-tokens // block_size)
    if needed > num_blocks:
        raise SetupError(
            f"a batch of {batch} needs {needed} KV blocks and the pool has {num_blocks}; give a smaller --batch-size, "
            "fewer tokens, or --kv-cache-memory-bytes"
        )
