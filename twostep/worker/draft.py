"""The draft model that --speculative-config asks for, beside the served one: whether the two fit each other, what it takes of the memory,
and its runner. Its pool has as many blocks as the served model's, of as many tokens; shared prefixes are there once for each sequence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.engine.self_test import gives_tokens
from twostep.errors import SetupError
from twostep.lab.plan.model import weight_bytes
from twostep.model.loading.store import resolve
from twostep.settings.speculative import HEADS, NGRAM, SpeculativeConfig
from twostep.text.tokenizer_files import read_tokenizer
from twostep.worker.config import WorkerConfig
from twostep.worker.head import Head

if TYPE_CHECKING:
    from twostep.model.families.config import ModelConfig
    from twostep.model.runner.model_runner import ModelRunner

log = logging.getLogger(__name__)

_LEAVE_OUT = "or leave --speculative-config out"


class Draft:
    """A draft model that was found, and not loaded yet. `block_bytes`: its KV of as many tokens as a block of the served model's has.
    `fixed_bytes`: what it takes besides, whatever the pool, all of it later than the served model's weights (`later_bytes`)."""

    def __init__(self, config: WorkerConfig, model_dir: Path, served: ModelConfig, served_dir: Path) -> None:
        """Raises SetupError where it cannot draft for the served model."""
        from twostep.model.families.registry import parse_config  # noqa: PLC0415
        from twostep.model.runner.model_runner import captured_bytes, kv_shape  # noqa: PLC0415

        model = parse_config(model_dir)
        check_fit(model, model_dir, served, served_dir)
        self._config = config
        self._model_dir = model_dir
        self._max_model_len = min(model.max_model_len, config.max_model_len or served.max_model_len)
        dtype = model.dtype if config.dtype == "auto" else config.dtype
        self.block_bytes = kv_shape(model, dtype, 1, config.block_size, one_group=True).block_bytes
        self.fixed_bytes = weight_bytes(model_dir, dtype)
        if config.device != "cpu":
            self.fixed_bytes += captured_bytes(model, dtype, config.max_num_seqs, 0)
        self.later_bytes = self.fixed_bytes

    def load(self, num_blocks: int) -> ModelRunner:
        """Blocks until the weights are there. Raises SetupError."""
        from twostep.model.runner.model_runner import ModelRunner  # noqa: PLC0415

        config = self._config
        runner = ModelRunner(
            self._model_dir,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=config.dtype,
            device=config.device,
            max_model_len=self._max_model_len,
            load_format=config.load_format,
            max_num_seqs=config.max_num_seqs,
            one_group=True,
        )
        # It is also its first step, which takes longer than the others.
        if not gives_tokens(runner):
            raise SetupError(
                f"the draft model {self._model_dir} gives no token for any prompt: its files are damaged; replace it, {_LEAVE_OUT}"
            )
        log.info(
            "draft model %s loaded: %s, %d KV blocks of %d tokens of its own (%.0f MiB), context %d",
            self._model_dir,
            runner.kv_shape.dtype,
            num_blocks,
            config.block_size,
            num_blocks * self.block_bytes / (1 << 20),
            runner.max_model_len,
        )
        return runner


def find_draft(config: WorkerConfig, served_dir: Path | None) -> Draft | Head | None:
    """Returns the draft model or the head that is asked for; None: none is. `config` is settled, `served_dir` the served model's; None:
    there is none. Raises SetupError."""
    speculative = SpeculativeConfig.parse(config.speculative_config) if config.speculative_config else None
    if speculative is None or speculative.method == NGRAM:
        return None
    name = speculative.model or speculative.method
    if config.runner == "fake" or served_dir is None:
        raise SetupError(f"{name} needs a model to draft for, and --runner fake has none; give --runner model, {_LEAVE_OUT}")
    if config.tensor_parallel_size > 1:
        raise SetupError(
            f"{name} cannot draft for a model on {config.tensor_parallel_size} devices: give --tensor-parallel-size 1, or method ngram"
        )
    from twostep.model.families.registry import parse_config  # noqa: PLC0415

    try:
        served = parse_config(served_dir, config.architecture)
        if served.encoder is not None:
            raise SetupError("nothing but method ngram drafts for a model with an encoder; give that, or leave --speculative-config out")
        if speculative.method in HEADS:
            return Head(config, speculative, served)
        model_dir = resolve(name, weights=not config.dummy_weights, cache_dir=config.cache_dir, progress=log.info)
        return Draft(config, model_dir, served, served_dir)
    except SetupError as error:
        raise SetupError(f"--speculative-config, {'model ' if speculative.model else 'method '}{name}: {error.message}") from error


def check_fit(model: ModelConfig, model_dir: Path, served: ModelConfig, served_dir: Path) -> None:
    """Raises SetupError where `model` cannot draft for `served`."""
    if not model.generates:
        raise SetupError(f"it has no output layer, so that it gives no tokens; give a model that generates, {_LEAVE_OUT}")
    if model.encoder is not None:
        raise SetupError(f"it has an encoder, which reads a prompt whole; give a decoder, {_LEAVE_OUT}")
    if model.gated_delta is not None:
        raise SetupError(f"its layers keep states, which cannot forget drafts that did not come; give another model, {_LEAVE_OUT}")
    if model.vocab_size != served.vocab_size:
        raise SetupError(
            f"it has {model.vocab_size} tokens, and the served model {served.vocab_size}; give a model of the same vocabulary, {_LEAVE_OUT}"
        )
    tokens, served_tokens = _token_ids(model_dir), _token_ids(served_dir)
    if tokens is None or served_tokens is None:
        log.warning("that the draft model has the served one's tokens is not known: one of them has no tokenizer.json")
    elif tokens != served_tokens:
        text = min(text for text, _ in tokens.items() ^ served_tokens.items())
        raise SetupError(
            f"its tokens are others: {text!r} is token {tokens.get(text)} of it and {served_tokens.get(text)} of the served model; give a "
            f"model of the same tokenizer, {_LEAVE_OUT}"
        )


def _token_ids(model_dir: Path) -> dict[str, int] | None:
    """Returns the ids of its tokens; None: there is no tokenizer.json."""
    if not (model_dir / "tokenizer.json").exists():
        return None
    found: dict[str, int] = read_tokenizer(model_dir).get_vocab(with_added_tokens=True)
    return found
