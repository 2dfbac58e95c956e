"""Several answers to one call, whatever protocol it came by: `n` to each of its prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import blake2b

from router.prompting.prompt import Prompt, ReadPrompt
from twostep.errors import TwostepError

# To one prompt.
MAX_CHOICES = 128
# Of one call; the others wait for these.
MAX_AT_ONCE = 128
# Of its prompts: the threads that tokenize are everybody's, and refuse when too many wait for them.
_MAX_READ_AT_ONCE = 8


def choice_seed(seed: int, choice: int) -> int:
    """Returns the i-th answer's: the request's own for the first, so that n does not change it; for the others 63 bits of a hash. All
    routers draw the same: a client may go on through another."""
    if choice == 0:
        return seed
    digest = blake2b(f"{seed} {choice}".encode(), digest_size=8, person=b"twostep choice").digest()
    return int.from_bytes(digest, "little") >> 1


def choice_name(name: str, choice: int) -> str:
    """Names the i-th answer in logs, after its request."""
    return name if choice == 0 else f"{name[:120]}-{choice}"


async def ask_all(
    num_answers: int,
    ask: Callable[[int, ReadPrompt], Awaitable[None]],
    read_prompt: Callable[[int], Awaitable[Prompt]],
    *,
    num_each: int = 1,
) -> None:
    """Asks for every answer; `num_each` in a row are to the same prompt, which is read once. The first that fails ends all of them, and its
    error is raised."""
    if num_answers == 1:
        await ask(0, partial(read_prompt, 0))
        return
    gate = asyncio.Semaphore(_MAX_READ_AT_ONCE)
    reading: dict[int, asyncio.Task[Prompt]] = {}
    turns = iter(range(num_answers))

    async def read(index: int) -> Prompt:
        async with gate:
            return await read_prompt(index)

    async def shared_prompt(index: int) -> Prompt:
        """Is read when the first answer to it wants it, for all of them; nobody keeps one that no other is to."""
        if num_each == 1:
            return await read(index)
        if index not in reading:
            reading[index] = asyncio.create_task(read(index))
        return await asyncio.shield(reading[index])

    async def ask_in_turn() -> None:
        for index in turns:
            await ask(index, partial(shared_prompt, index // num_each))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(num_answers, MAX_AT_ONCE)):
                group.create_task(ask_in_turn())
                # All begun in one turn of the event loop would hold up everybody else for as long as it takes to begin them.
                await asyncio.sleep(0)
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    finally:
        for task in reading.values():
            task.cancel()
        await asyncio.gather(*reading.values(), return_exceptions=True)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Chooses what the client is told: an error of ours rather than an unexpected one."""
    return next((error for error in errors.exceptions if isinstance(error, TwostepError)), errors.exceptions[0])
