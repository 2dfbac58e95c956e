"""--speculative-config, as users of vLLM write it: a JSON object."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path

from twostep.errors import SetupError

NGRAM, DRAFT_MODEL, EAGLE3, MEDUSA, MTP = METHODS = ("ngram", "draft_model", "eagle3", "medusa", "mtp")
# What drafts from the states of the served model.
HEADS = (EAGLE3, MEDUSA, MTP)
_MOST_TOKENS, _LONGEST = 7, 32
_USUAL_SHORTEST, _USUAL_LONGEST = 2, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted. `method` ngram: what followed the last tokens where they came before, in prompt or answer; draft_model: what
    `model`, a smaller one of the same vocabulary, says; eagle3, medusa: what `model`, the directory of such heads of the served one, says;
    mtp: what the layer says that comes with the served model."""

    method: str
    model: str = ""
    num_speculative_tokens: int = 4
    prompt_lookup_min: int = _USUAL_SHORTEST
    prompt_lookup_max: int = _USUAL_LONGEST

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise SetupError(f"method is {self.method!r}; give {' or '.join(METHODS)}")
        if not isinstance(self.model, str) or bool(self.model) != (self.method not in (NGRAM, MTP)):
            raise SetupError(
                f"method {self.method} with model {self.model!r}; give {DRAFT_MODEL} the directory or name of a smaller model, {EAGLE3} "
                f"and {MEDUSA} the directory of a head, and {NGRAM} and {MTP} none"
            )
        for name, most in (("num_speculative_tokens", _MOST_TOKENS), ("prompt_lookup_min", _LONGEST), ("prompt_lookup_max", _LONGEST)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise SetupError(f"{name} is {value!r}; give a whole number from 1 to {most}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise SetupError(f"prompt_lookup_min {self.prompt_lookup_min} is more than prompt_lookup_max {self.prompt_lookup_max}")

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """Raises SetupError."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise SetupError(f"no JSON: {error}") from error
        if not isinstance(given, dict):
            raise SetupError(f'give a JSON object, such as {{"method": "ngram", "num_speculative_tokens": 4}}, not {text[:80]!r}')
        names = [each.name for each in fields(cls)]
        if unknown := sorted(set(given) - set(names)):
            raise SetupError(f"{unknown[0]!r} is not known; there are {', '.join(names)}")
        if "model" in given:
            given.setdefault("method", DRAFT_MODEL)
        if "method" not in given:
            raise SetupError(f"give a method: {' or '.join(METHODS)}")
        if "prompt_lookup_max" not in given and isinstance(shortest := given.get("prompt_lookup_min"), int):
            given["prompt_lookup_max"] = max(shortest, _USUAL_LONGEST)
        if "prompt_lookup_min" not in given and isinstance(longest := given.get("prompt_lookup_max"), int):
            given["prompt_lookup_min"] = min(longest, _USUAL_SHORTEST)
        return cls(**given)


def from_any_directory(text: str) -> str:
    """Returns --speculative-config so that a process in another directory finds the same model. What is wrong with it stays as it is."""
    try:
        model = SpeculativeConfig.parse(text).model
    except SetupError:
        return text
    return json.dumps(json.loads(text) | {"model": os.path.abspath(model)}) if model and Path(model).is_dir() else text
