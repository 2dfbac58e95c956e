"""An engine that drafts with a head: its answers are those without, whatever the head is, and a good head is seen to be one."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from eagle_cases import PlainHead, random_head
from heard_proposals import listen

from twostep.engine.batch import SamplingRow
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.proposer import WantedDrafts
from twostep.engine.types import EngineRequest
from twostep.errors import SetupError
from twostep.lab.eagle.acceptance import measure
from twostep.lab.eagle.answers import LearntAnswer
from twostep.lab.eagle.target import Target, new_head
from twostep.lab.eagle.training import Trainer, TrainingPlan
from twostep.lab.one_prompt import prompt_batch
from twostep.model.eagle.files import save_head
from twostep.model.eagle.head import EagleHead
from twostep.model.families.layer_states import LayerStates
from twostep.model.heads.source import HeadSource
from twostep.model.runner.head_proposer import HeadProposer
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.runner.sampler import sample
from twostep.process.startup import NoProgress
from twostep.sampling_params import SamplingParams
from twostep.settings.speculative import SpeculativeConfig
from twostep.worker.config import WorkerConfig
from twostep.worker.local_engine import LocalEngine
from twostep.worker.model import load_model, resolve_config

K = 3
BOUNDS: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 24, "hash_unit": 8}


def new_runner(directory: Path, num_blocks: int = 120, head: EagleHead | None = None) -> ModelRunner:
    """With a head, through a directory of its own, if one is given."""
    with TemporaryDirectory() as head_dir:
        if head is not None:
            save_head(head, Path(head_dir))
        source = None if head is None else HeadSource(method="eagle3", head_dir=Path(head_dir), most_tokens=K)
        return ModelRunner(directory, dtype="float32", num_blocks=num_blocks, block_size=8, num_threads=1, head=source)


def drafting(runner: ModelRunner, **bounds: Any) -> tuple[Engine, HeadProposer]:
    proposer = HeadProposer(runner)
    config = SpeculativeConfig(method="eagle3", model="head", num_speculative_tokens=K)
    return Engine(runner, EngineConfig(**(BOUNDS | bounds), speculative=config), proposer=proposer), proposer


def request(number: int, token_ids: Sequence[int], **sampling: Any) -> EngineRequest:
    return EngineRequest(
        seq_id=f"r{number}",
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(**({"max_tokens": 24, "temperature": 0.0, "ignore_eos": True} | sampling)),
        prefix_key=b"k",
    )


def requests(vocab_size: int) -> list[EngineRequest]:
    """Of all kinds, some with the same beginning."""
    rng = random.Random(5)
    beginning = [rng.randrange(3, vocab_size) for _ in range(20)]
    made = []
    for number in range(30):
        prompt = [*(beginning if rng.random() < 0.4 else ()), *(rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, 40)))]
        options = {
            "max_tokens": rng.randrange(1, 30),
            "temperature": rng.choice([0.0, 0.7, 1.5]),
            "top_p": rng.choice([1.0, 0.9]),
            "repetition_penalty": rng.choice([1.0, 1.3]),
            "min_tokens": rng.choice([0, 1]),
            "speculate": rng.random() < 0.9,
        }
        made.append(request(number, prompt, seed=number, **options))
    return made


def tokens_of(engine: Engine, asked: Sequence[EngineRequest]) -> list[list[int]]:
    return [[token.token_id for token in answer] for answer in generate(engine, asked)]


@pytest.fixture(scope="module")
def learned(tiny_llama_dir: Path) -> tuple[EagleHead, EngineRequest, list[int]]:
    """A head that knows one answer by heart, what was asked, and that answer."""
    runner = new_runner(tiny_llama_dir)
    asked = request(0, [5, 6, 7, 8, 9, 10], max_tokens=60)
    (token_ids,) = tokens_of(Engine(runner, EngineConfig(**BOUNDS)), [asked])
    answer = LearntAnswer(asked.token_ids, token_ids, asked.sampling, False)
    trainer = Trainer(
        new_head(runner, torch.arange(runner.vocab_size), 0),
        TrainingPlan(num_rounds=60, num_steps=K, batch_size=1, learning_rate=5e-3, seed=0),
    )
    look = Target(runner, trainer.head).look
    trainer.train([answer], lambda number: look(number, answer.whole), lambda: None, NoProgress())
    head = trainer.head.eval().requires_grad_(False)
    assert measure(head, [answer], lambda number: look(number, answer.whole), K).tokens_per_step > 3
    return head, asked, token_ids


def test_a_head_that_knows_the_answer_saves_steps(tiny_llama_dir: Path, learned: tuple[EagleHead, EngineRequest, list[int]]) -> None:
    head, asked, want = learned
    engine, _ = drafting(new_runner(tiny_llama_dir, head=head))
    assert tokens_of(engine, [asked]) == [want]
    assert engine.steps < len(want) / 2
    stats = engine.stats()
    assert len(stats.num_accepted) == K
    assert sum(stats.num_accepted) > 0.7 * sum(stats.num_drafted)


HEADS: dict[str, dict[str, Any]] = {
    "usual": {},
    "all tokens": {"draft_vocab_size": None},
    "norm before residual": {"norm_before_residual": True},
    "another width": {"hidden_size": 40, "has_embedding": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "more heads": {"num_heads": 12},
}


def plain_head(directory: Path, kind: str) -> tuple[EagleHead, PlainHead]:
    """A random head of a model, and its straightforward reading."""
    runner = new_runner(directory)
    c, options = runner.config, dict(HEADS[kind])
    size = {"num_kv_heads": c.num_kv_heads, "head_dim": c.head_dim, "num_heads": c.num_heads, "hidden_size": c.hidden_size}
    draft = options.pop("draft_vocab_size", 60) or c.vocab_size
    has_embedding = options.pop("has_embedding", False)
    changes = {"vocab_size": c.vocab_size, "target_hidden_size": c.hidden_size, "draft_vocab_size": draft, **(size | options)}
    head = random_head(has_embedding=True, **changes)
    if not has_embedding:
        head.embed_tokens = None
        head.use_embedding(runner.model.embedding)
    return head, PlainHead(head.state_dict(), head.embedding, head.config)


@pytest.mark.parametrize("kind", HEADS)
def test_proposals_are_the_head_s_own(tiny_llama_dir: Path, kind: str) -> None:
    """They are those of a plain reading over the states that the model has, of several sequences at once, greedy and drawn, in chunks."""
    head, plain = plain_head(tiny_llama_dir, kind)
    engine, proposer = drafting(new_runner(tiny_llama_dir, head=head), max_num_batched_tokens=24)
    told = listen(proposer, K)
    asked = [
        request(0, [9, 8, 7, 6, 5, 4, 3, 9, 8, 7, 6, 5], max_tokens=9),
        request(1, [9, 8, 7, 6, 5, 4, 3, 9, 8, 7, 6, 5, 31, 32, 33], max_tokens=8, temperature=0.8, top_p=0.9, seed=7),
        request(2, [40], max_tokens=9, temperature=1.5, seed=-3),
        request(3, [50, 51, 52], max_tokens=9, repetition_penalty=1.3, frequency_penalty=0.4),
        request(4, [60, 61], max_tokens=9, temperature=1.0, logit_bias=((5, 3.0),), seed=2),
    ]
    tokens_of(engine, asked)
    assert not proposer.failed
    oracle, states = new_runner(tiny_llama_dir), LayerStates(head.config.layers_of(new_runner(tiny_llama_dir).config))
    assert {each.sequence.seq_id for each, _, proposed in told if proposed} == {f"r{number}" for number in range(5)}
    assert max(len(proposed) for _, _, proposed in told) == K
    for each, tokens, proposed in told:
        sequence = each.sequence
        num_prompt = sequence.request.num_prompt_tokens
        oracle.forward(prompt_batch(tokens[:-1], oracle.kv_shape), states)
        drafted: list[int] = []

        def choose(logits: torch.Tensor, number: int) -> int:
            history = [*tokens, *drafted]  # noqa: B023 - called at once
            row = SamplingRow(sequence.request.sampling, len(history) - num_prompt, history, num_prompt, frozenset())  # noqa: B023
            drafted.append(int(sample(logits[None], [row]).token_ids[0]))  # noqa: B023
            return drafted[-1]  # noqa: B023

        assert list(proposed) == plain.propose(states.joined(), tokens, len(proposed), choose, served=True)


def test_of_a_prompt_that_was_handed_over_the_answer_is_seen(
    tiny_llama_dir: Path, learned: tuple[EagleHead, EngineRequest, list[int]]
) -> None:
    """The head's KV comes with the model's from another worker; the last state does not, and after one step there is another."""
    head, asked, want = learned
    elsewhere, runner = new_runner(tiny_llama_dir, head=head), new_runner(tiny_llama_dir, head=head)
    prefill = Engine(elsewhere, EngineConfig(**BOUNDS))
    prefill.submit(asked, hold=True)
    got = [token.token_id for token in prefill.step().tokens]
    engine, _ = drafting(runner)
    reservation = engine.reserve(asked)
    blocks = prefill.block_ids("r0")
    data = elsewhere.new_host_blocks(len(blocks))
    elsewhere.read_blocks(blocks, data)
    runner.write_blocks(reservation.block_ids[: len(blocks)], data)
    engine.commit("r0", got)
    while len(got) < len(want):
        got += [token.token_id for token in engine.step().tokens]
    assert got == want
    assert engine.steps < len(want) / 2


def test_a_head_that_breaks_leaves_requests_alone(
    tiny_llama_dir: Path, learned: tuple[EagleHead, EngineRequest, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(new_runner(tiny_llama_dir).vocab_size)
    want = tokens_of(Engine(new_runner(tiny_llama_dir), EngineConfig(**BOUNDS)), asked)
    engine, _ = drafting(new_runner(tiny_llama_dir, head=learned[0]))

    def broken(*args: Any) -> None:
        raise RuntimeError("as it was told to")

    monkeypatch.setattr("twostep.model.heads.eagle.EagleDrafts.step", broken)
    assert tokens_of(engine, asked) == want
    assert engine.stats().drafting_failed


def test_a_sequence_that_is_cancelled_while_the_head_computes_breaks_nothing(
    tiny_llama_dir: Path, learned: tuple[EagleHead, EngineRequest, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are gone between two looks at it, and others are drafted for as before."""
    head, asked, _ = learned
    engine, proposer = drafting(new_runner(tiny_llama_dir, head=head))
    others = [request(number, asked.token_ids, max_tokens=40) for number in range(1, 5)]
    for each in others:
        engine.submit(each)
    prepare, cancelled = proposer.prepare, list[str]()

    def preparing(wanted: Sequence[WantedDrafts], most_rows: int) -> None:
        if wanted and not cancelled:
            cancelled.append(others[0].seq_id)
            engine.cancel(others[0].seq_id)
        prepare(wanted, most_rows)

    monkeypatch.setattr(proposer, "prepare", preparing)
    while engine.stats().num_running or engine.stats().num_waiting:
        engine.step()
    assert cancelled
    assert not proposer.failed
    assert sum(engine.stats().num_accepted) > 20


def test_a_head_that_cannot_take_a_step_s_states_leaves_requests_alone(
    tiny_llama_dir: Path, learned: tuple[EagleHead, EngineRequest, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, asked, answer = learned
    engine, proposer = drafting(new_runner(tiny_llama_dir, head=head))

    def state(self: object, seen: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("as it was told to")

    monkeypatch.setattr("twostep.model.heads.eagle.EagleDrafts.state", state)
    assert tokens_of(engine, [asked]) == [answer]
    assert proposer.failed
    assert engine.stats().drafting_failed


def worker_config(model: Path, head: Path) -> WorkerConfig:
    config = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 2})
    return WorkerConfig(
        role="decode", model=str(model), device="cpu", dtype="float32", num_blocks=60, calibrate=False, speculative_config=config
    )


def test_a_worker_drafts_with_the_head_that_it_is_given(
    tiny_llama_dir: Path, tmp_path: Path, learned: tuple[EagleHead, EngineRequest, list[int]]
) -> None:
    head, asked, want = learned
    save_head(head, tmp_path)
    config = resolve_config(worker_config(tiny_llama_dir, tmp_path))
    engine = LocalEngine(config, load_model(config)).engine
    assert tokens_of(engine, [asked]) == [want]
    assert engine.steps < len(want) / 1.5


def _shape_of(head: EagleHead) -> dict[str, Any]:
    c = head.config
    names = ("vocab_size", "hidden_size", "target_hidden_size", "num_heads", "num_kv_heads", "head_dim")
    return {name: getattr(c, name) for name in names}


def test_what_is_no_head_of_the_model_is_refused_by_name(tiny_llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="nothing-here"):
        load_model(worker_config(tiny_llama_dir, tmp_path / "nothing-here"))
    save_head(random_head(), tmp_path)
    with pytest.raises(SetupError, match="vocab_size"):
        load_model(worker_config(tiny_llama_dir, tmp_path))
    head, _ = plain_head(tiny_llama_dir, "usual")
    save_head(random_head(**(_shape_of(head) | {"num_kv_heads": head.config.num_heads})), tmp_path)
    with pytest.raises(SetupError, match="num_key_value_heads"):
        load_model(worker_config(tiny_llama_dir, tmp_path))
    with pytest.raises(SetupError, match="architectures"):
        load_model(worker_config(tiny_llama_dir, tiny_llama_dir))
