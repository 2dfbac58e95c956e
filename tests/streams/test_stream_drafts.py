"""Right tokens with drafts: answers of a whole system are those of one process without, whoever drafts, whatever befalls them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from drafting_models import DraftedModel, save_drafted_model
from drafting_world import DraftingWorld, Tally
from judge import Judge
from scraping import scrape
from whole_system import whole_system

from twostep import AsyncClient, SamplingOptions
from twostep.settings.speculative import DRAFT_MODEL, EAGLE3, NGRAM

# Of each proposer; `make exact-drafts` asks more.
NUM_REQUESTS = int(os.environ.get("TWOSTEP_DRAFT_REQUESTS", "24"))
_EACH_WORLD = 167


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DraftedModel:
    return save_drafted_model(tmp_path_factory.mktemp("drafted"))


@pytest.fixture(scope="module")
def judge(model: DraftedModel) -> Judge:
    return Judge(model.model_dir, model.runner(64, 16))


@pytest.fixture
def leave_soon(patience: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers do not wait as long for a worker that is lost as the other tests' patience has it."""
    monkeypatch.setattr("router.serving.attempt._STREAM_TIMEOUT_S", 2.0)


@pytest.mark.smoke
@pytest.mark.usefixtures("leave_soon")
@pytest.mark.parametrize("method", [NGRAM, DRAFT_MODEL, EAGLE3])
async def test_answers_are_those_without_drafts(method: str, model: DraftedModel, judge: Judge, tmp_path: Path) -> None:
    tally = Tally()
    for seed, begun in enumerate(range(0, NUM_REQUESTS, _EACH_WORLD)):
        world = DraftingWorld(model, judge, method, seed, min(_EACH_WORLD, NUM_REQUESTS - begun))
        tally += await world.run(tmp_path / str(seed))
    print(f"\n{method}: {tally}")
    assert tally.seen["requests"] == NUM_REQUESTS
    assert 0.1 * sum(tally.drafted) < sum(tally.accepted) < sum(tally.drafted)
    # Of an answer that moved to another worker, and then lost its router, the client hears of the last part only.
    seldom = ("preemptions", "with reused blocks", "moved") if NUM_REQUESTS > 500 else ()
    assert all(tally.seen[name] for name in ("hand-overs", "prompts in chunks", "resumed", "workers that gain", *seldom)), tally
    assert tally.seen["near-ties"] <= max(1, 0.002 * tally.seen["answers"])


async def test_a_gap_is_between_steps(model: DraftedModel, tmp_path: Path) -> None:
    """Tokens that come with others are none, and without drafts each token is one."""
    options = model.drafting("ngram", 4, draft_blocks=0)
    async with (
        whole_system(model.model_dir, tmp_path, make_runner=lambda: model.runner(64, 16), **options) as system,
        AsyncClient(system.target()) as client,
    ):

        async def num_gaps(*, speculate: bool) -> int:
            told = scrape(system.routers[0].metrics_port)
            before = told("twostep_inter_token_latency_seconds_count") or 0
            asked = SamplingOptions(max_tokens=60, temperature=0.0, ignore_eos=True, speculate=speculate)
            answer = await client.generate(token_ids=model.usual[:8], **asked).result()
            assert len(answer.token_ids) == 60
            told = scrape(system.routers[0].metrics_port)
            return int(told("twostep_inter_token_latency_seconds_count") or 0) - int(before)

        assert 0 < await num_gaps(speculate=True) < 59
        assert sum(system.decodes[0].engine.stats().num_accepted) > 10
        assert await num_gaps(speculate=False) == 59
