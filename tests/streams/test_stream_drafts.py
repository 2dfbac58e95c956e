"""Right tokens with drafts: answers of a whole system are those of one process without, whoever drafts, whatever befalls them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from drafting_models import DraftedModel, save_drafted_model
from drafting_world import DraftingWorld, Tally
from judge import Judge

from twostep.settings.speculative import METHODS

# Of each proposer; `make exact-drafts` asks more.
NUM_REQUESTS = int(os.environ.get("TWOSTEP_DRAFT_REQUESTS", "24"))
_EACH_WORLD = 167


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DraftedModel:
    return save_drafted_model(tmp_path_factory.mktemp("drafted"))


@pytest.fixture(scope="module")
def judge(model: DraftedModel) -> Judge:
    return Judge(model.model_dir, model.runner(64, 16))


@pytest.fixture(autouse=True)
def leave_soon(patience: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers do not wait as long for a worker that is lost as the other tests' patience has it."""
    monkeypatch.setattr("router.serving.attempt._STREAM_TIMEOUT_S", 2.0)


@pytest.mark.smoke
@pytest.mark.parametrize("method", METHODS)
async def test_answers_are_those_without_drafts(method: str, model: DraftedModel, judge: Judge, tmp_path: Path) -> None:
    tally = Tally()
    for seed, begun in enumerate(range(0, NUM_REQUESTS, _EACH_WORLD)):
        world = DraftingWorld(model, judge, method, seed, min(_EACH_WORLD, NUM_REQUESTS - begun))
        tally += await world.run(tmp_path / str(seed))
    print(f"\n{method}: {tally}")
    assert tally.seen["requests"] == NUM_REQUESTS
    assert 0.1 * sum(tally.drafted) < sum(tally.accepted) < sum(tally.drafted)
    seldom = ("preemptions", "with reused blocks") if NUM_REQUESTS > 500 else ()
    assert all(tally.seen[name] for name in ("hand-overs", "prompts in chunks", "moved", "resumed", *seldom)), tally
    assert tally.seen["near-ties"] <= max(1, 0.002 * tally.seen["answers"])
