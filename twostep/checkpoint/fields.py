"""The keys of one JSON object, taken one by one; what is left over at the end is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NoReturn

from twostep.errors import SetupError

# Bookkeeping, training, and generation settings: no forward pass depends on them. Everything else must be understood.
# fmt: off
_HARMLESS = frozenset({
    "_attn_implementation", "_attn_implementation_internal", "_commit_hash", "_name_or_path", "activation_dropout", "attention_dropout",
    "attention_probs_dropout_prob", "attn_pdrop", "auto_map", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
    "classifier_dropout", "decoder_start_token_id", "diversity_penalty", "do_sample", "dropout", "early_stopping", "embd_pdrop",
    "embedding_dropout", "encoder_no_repeat_ngram_size", "eos_token_id", "finetuning_task", "hidden_dropout", "hidden_dropout_prob",
    "id2label", "init_std", "initializer_range", "is_decoder", "is_llama_config", "label2id",
    "layerdrop", "length_penalty", "max_length", "max_window_layers", "min_length", "model_name", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "pad_token_id", "prefix",
    "pretraining_tp", "problem_type", "repetition_penalty", "resid_pdrop", "residual_dropout", "return_dict", "return_dict_in_generate",
    "sep_token_id", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "temperature", "tokenizer_class", "top_k", "top_p", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_cache",
})
# fmt: on


class Fields:
    """Takes the keys of a JSON object one by one; `refuse_rest` names the first that is left. All methods raise SetupError only."""

    def __init__(self, path: Path, raw: dict[str, Any], *, prefix: str = "", harmless: frozenset[str] = _HARMLESS) -> None:
        """`prefix`: what stands before a key where it is named. `harmless`: keys that may be left over."""
        self.path = path
        self.whole = raw  # what it began with
        self._raw = dict(raw)
        self._prefix = prefix
        self._harmless = harmless

    def inner(self, key: str, raw: dict[str, Any]) -> Fields:
        """Returns the keys of an object in this one."""
        return Fields(self.path, raw, prefix=f"{self._prefix}{key}.", harmless=self._harmless)

    def has(self, key: str) -> bool:
        return key in self._raw

    def peek(self, key: str) -> Any:
        return self._raw.get(key)

    def take(self, key: str, default: Any) -> Any:
        return self._raw.pop(key, default)

    def refuse(self, key: str, value: object, why: str) -> NoReturn:
        raise SetupError(f"{self.path}: {self._prefix}{key} is {_short(value)}; {why}")

    def expect(self, key: str, value: object, *, default: object) -> None:
        """Refuses all values of this key but one."""
        given = self.take(key, default)
        if given != value:
            self.refuse(key, given, f"only {value!r} is supported")

    def positive_int(self, key: str, at_most: int) -> int:
        """Takes a whole number; `at_most` is beyond every model there is, and far below what would take all memory."""
        value = self._required(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= at_most:
            self.refuse(key, value, f"it must be a positive whole number, {at_most} at most")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self._required(key) if default is None else self.take(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
            self.refuse(key, value, "it must be a positive number")
        return float(value)

    def optional_float(self, key: str) -> float | None:
        """Takes a positive number, or None where the key is missing or null."""
        return self.positive_float(key) if self.peek(key) is not None else self.take(key, None)

    def boolean(self, key: str, default: bool, *, null: bool | None = None) -> bool:
        """`null`: what that counts as; None: it is refused."""
        value = self.take(key, default)
        if value is None and null is not None:
            return null
        if not isinstance(value, bool):
            self.refuse(key, value, "it must be true or false")
        return value

    def refuse_rest(self) -> None:
        """Refuses a key that was not taken, unless it is known to be harmless or its value switches it off."""
        for key, value in self._raw.items():
            if key in self._harmless or value is None or value is False or value in ([], {}):
                continue
            self.refuse(key, value, "this key is not known here and could change the result; remove it only if you know that it does not")

    def _required(self, key: str) -> Any:
        if key not in self._raw:
            raise SetupError(f"{self.path} has no {self._prefix}{key}; download the file again, or add the key")
        return self.take(key, None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
