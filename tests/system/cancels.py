"""Clients that leave their answers at any moment."""

from __future__ import annotations

import asyncio

from running import System

from twostep import AsyncClient, TwostepError

_NUM_ANSWERS = 20
# Between the moments.
_STEP_S = 0.005


async def cancel_at_all_moments(system: System) -> None:
    """From before the prompt is placed until tokens come; every other one after its first piece."""
    async with AsyncClient(system.target) as client:
        for n in range(_NUM_ANSWERS):
            prompt = [(token + n) % 200 + 2 for token in range(200)] * 5
            answer = client.generate(token_ids=prompt, max_tokens=500, ignore_eos=True, timeout=180)
            first = asyncio.create_task(anext(aiter(answer)))
            await asyncio.sleep(_STEP_S * n)
            if n % 2:
                await first
            answer.cancel()
            try:
                await first
            except (TwostepError, asyncio.CancelledError, StopAsyncIteration):
                pass
