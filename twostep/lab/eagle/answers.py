"""Makes what a head is trained on: a model's own answers to prompts out of texts.

Every second prompt is answered greedily, the others are drawn as somebody gets them who sets nothing: with the temperature, top_k, top_p
and min_p that the model's makers recommend. The last part of each text is held back: answers to it are only measured with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostep.engine.config import EngineConfig
from twostep.engine.engine import Engine
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.errors import SetupError
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams
from twostep.text.chat_template import ChatTemplate
from twostep.text.model_card import GenerationDefaults
from twostep.text.tokenizer import Tokenizer

# Answered at once.
AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class LearntPrompt:
    """A prompt out of the texts. `held_back`: of the part that nothing is learned from."""

    token_ids: Sequence[int]
    held_back: bool


@dataclass(frozen=True, slots=True)
class LearntAnswer:
    """A prompt's token ids and those of its answer, the one that ends it included; what it was drawn with (temperature 0: greedily),
    without penalties."""

    prompt: Sequence[int]
    token_ids: Sequence[int]
    sampling: SamplingParams
    held_back: bool

    @property
    def whole(self) -> list[int]:
        return [*self.prompt, *self.token_ids]


def cut_prompts(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    num_prompts: int,
    prompt_tokens: int,
    held_back_share: float,
) -> list[LearntPrompt]:
    """Returns `num_prompts` passages of so many tokens, evenly spaced over the texts, and beside them `held_back_share` as many of their
    last parts. With a template, each is what a user says; else it is continued. Raises SetupError for too short texts."""
    learned, held = list[int](), list[int]()
    for text in texts:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        end = round(len(token_ids) * (1 - held_back_share))
        learned += token_ids[:end]
        held += token_ids[end:]
    if min(len(learned), len(held)) <= prompt_tokens:
        raise SetupError(
            f"the texts have {len(learned)} tokens, and {len(held)} that are held back; passages of {prompt_tokens} need more of both: "
            "give longer texts, or a smaller --prompt-tokens"
        )

    def prompt(passage: Sequence[int], held_back: bool) -> LearntPrompt:
        if template is None:
            return LearntPrompt(tokenizer.encode(tokenizer.decode(passage)), held_back)
        text = template.render([{"role": "user", "content": tokenizer.decode(passage)}])
        return LearntPrompt(tokenizer.encode(text, add_special_tokens=False), held_back)

    found = list[LearntPrompt]()
    for token_ids, count, held_back in ((learned, num_prompts, False), (held, max(2, round(num_prompts * held_back_share)), True)):
        for i in range(count):
            start = i * (len(token_ids) - prompt_tokens) // count
            found.append(prompt(token_ids[start : start + prompt_tokens], held_back))
    return found


def sampling_of(number: int, defaults: GenerationDefaults, *, max_tokens: int, seed: int) -> SamplingParams:
    """Returns what the prompt of this number is answered with."""
    if number % 2 == 0:
        return SamplingParams(max_tokens=max_tokens, temperature=0.0)
    d = defaults
    # Makers may recommend to be greedy: then there is something to draw from all the same.
    return SamplingParams(
        max_tokens=max_tokens, temperature=d.temperature or 1.0, top_k=d.top_k, top_p=d.top_p, min_p=d.min_p, seed=seed + number
    )


def make_answers(
    runner: ModelRunner,
    prompts: Sequence[LearntPrompt],
    sampling: Callable[[int], SamplingParams],
    eos_token_ids: frozenset[int],
    keep: Callable[[Sequence[LearntAnswer]], None],
    *,
    first: int = 0,
) -> None:
    """Answers the prompts from number `first` on, and gives the answers to `keep`, some at a time, in order."""
    engine = Engine(
        runner,
        EngineConfig(
            max_num_batched_tokens=512,
            max_num_seqs=AT_ONCE,
            max_waiting=AT_ONCE,
            enable_prefix_caching=False,
            hash_unit=runner.kv_shape.block_size,
        ),
    )
    for start in range(first, len(prompts), AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, len(prompts)))
        requests = [
            EngineRequest(
                seq_id=f"answer-{number}",
                token_ids=prompts[number].token_ids,
                num_prompt_tokens=len(prompts[number].token_ids),
                sampling=sampling(number),
                eos_token_ids=eos_token_ids,
            )
            for number in numbers
        ]
        outputs = generate(engine, requests)
        keep(
            [
                LearntAnswer(request.token_ids, [token.token_id for token in output], request.sampling, prompts[number].held_back)
                for number, request, output in zip(numbers, requests, outputs, strict=True)
            ]
        )
