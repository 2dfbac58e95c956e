"""A rolling update under load: no request fails, and every token is right. This is the short form, with the fake runner; `make rolling`
does all of it, with a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet import Fleet
from rolling import LONG_S, SHORT_S, Update, differing
from steady_load import SteadyLoad, fake_cases

from twostep.text import ModelCard

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

FLAGS = ("--runner", "fake", "--fake-step-ms", "15", "--num-blocks", "512")


@pytest.mark.usefixtures("alone")
async def test_each_role_and_redis_roll_under_load(tiny_llama_dir: Path) -> None:
    cases = fake_cases(ModelCard.load(tiny_llama_dir).vocab_size, 12, max_tokens=(60, 120))
    async with Fleet(tiny_llama_dir, flags=FLAGS) as fleet:
        drains_s = {
            "prefill-0": LONG_S,
            "prefill-1": LONG_S,
            "decode-0": LONG_S,
            "decode-1": SHORT_S,
            "router-0": SHORT_S,
            "router-1": LONG_S,
        }
        await fleet.start(drains_s)
        async with SteadyLoad(fleet.targets, cases, num_clients=6) as load:
            update = Update(fleet, load, print)
            patient = await update.part("a prefill worker leaves, with time to drain", update.drain("prefill-0"))
            hasty = await update.part("a decode worker is restarted in place, without time", update.restart("decode-1"))
            gone = await update.part("a router leaves, without time", update.drain("router-0"))
            await update.part("Redis is restarted", update.restart_redis(down_s=0.5))
        await fleet.until_empty()
    assert differing(update.parts) == []
    assert patient.num_moved == 0
    assert hasty.num_moved > 0
    assert gone.num_moved > 0
