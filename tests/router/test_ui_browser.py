"""The page in a real browser: what it shows of a deployment that lives, falls and comes back, and a chat with it."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, chromium, running_browser, tab
from router_fakes import ANSWER_TEXT, Cluster, FakeWorker, Script, until

from router.status import alerts
from router.status import board as status_board
from twostep.cluster.records import GpuLoad, WorkerLoad
from twostep.keys.api_key_file import put_in_file
from twostep.keys.api_keys import make_key
from twostep.local.ports import free_ports
from twostep.step_curve import StepCurve

pytestmark = [pytest.mark.system, pytest.mark.skipif(chromium() is None, reason="no Chromium here to open the page with")]

_LIVE = "document.documentElement.dataset.connection === 'live'"
# The router may go before the page.
_GONE = ("net::ERR_CONNECTION_", "net::ERR_EMPTY_RESPONSE", "net::ERR_INCOMPLETE_CHUNKED_ENCODING")
_CURVE = StepCurve(fixed_s=0.01, per_row_s=1e-4, per_sequence_s=1e-4, per_context_s=1e-7)


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running_browser(tmp_path_factory.mktemp("chromium")) as port:
        yield port


@pytest.fixture
async def page(devtools: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Page]:
    """Whatever a test does, the page throws nothing, violates no policy of its own and asks nobody but the router."""
    monkeypatch.setattr(status_board, "_EVERY_S", 0.2)
    async with tab(devtools) as opened:
        await opened.look(width=1280, height=900)
        yield opened
        assert [error for error in opened.errors if not any(part in error for part in (*_GONE, *opened.expected))] == []
        hosts = {url.split("/")[2] for url in opened.asked if not url.startswith(("about:", "data:"))}
        assert len(hosts) == 1, hosts


def url(cluster: Cluster) -> str:
    return f"http://127.0.0.1:{cluster.router.http_port}/ui"


def tell(worker: FakeWorker, **load: Any) -> None:
    """Changes a worker's load, from its next heartbeat on."""
    worker.record = dataclasses.replace(worker.record, curve=_CURVE, load=WorkerLoad(**({"num_free_blocks": 1024} | load)))


async def texts(page: Page, selector: str) -> list[str]:
    found: list[str] = await page.do(f"[...document.querySelectorAll({selector!r})].map((each) => each.innerText.trim())")
    return found


async def fits(page: Page, width: int) -> None:
    """Nothing sticks out to the side, once what follows the page's size has followed it."""
    await page.look(width=width, height=800)
    await page.until(f"innerWidth === {width} && document.documentElement.scrollWidth <= {width}")


# ---- the dashboard ---------------------------------------------------------------------------------------------------------


async def test_the_dashboard_shows_workers_and_what_flows(cluster: Cluster, page: Page) -> None:
    prefill = await cluster.prefill("prefill-0")
    decodes = [await cluster.decode(f"decode-{i}") for i in range(2)]
    tell(
        prefill,
        num_running=2,
        num_waiting=3,
        num_queued_tokens=4096,
        tokens_per_s=5000.0,
        queried_tokens_per_s=100.0,
        hit_tokens_per_s=40.0,
    )
    tell(decodes[0], num_running=64, num_free_blocks=256, num_context_tokens=6400, tokens_per_s=900.0, fetched_bytes_per_s=2.5e9)
    async with cluster.serving():
        await page.open(url(cluster))
        await page.until(_LIVE)
        assert await page.do("location.pathname") == "/ui/"
        for _ in range(3):
            await cluster.ask(max_tokens=8)
        await page.until("document.querySelectorAll('.card').length === 3 && document.querySelector('.flow:not(.still) .run') !== null")
        assert (await texts(page, ".side h3")) == ["Prefill · 1 worker", "Decode · 2 workers"]
        first, second, third = await texts(page, ".card")
        assert first.split("\n")[:2] == ["prefill-0", "ready"]
        assert "2 + 3" in first
        assert "4096 queued" in first
        assert "75 %" in second
        assert "2.5 GB/s" in second
        assert "0 %" in third
        await page.until("document.querySelector('.balance b').innerText.includes(':')")
        charts: list[str] = await page.do("[...document.querySelectorAll('.plot')].map((plot) => plot.getAttribute('aria-label'))")
        assert len(charts) == 12
        told = "Prefix cache hit rate, the last 5 min. hit rate 40 %"
        await page.until(f"[...document.querySelectorAll('.plot')].some((plot) => plot.getAttribute('aria-label').startsWith({told!r}))")
        await page.until("document.querySelectorAll('.chart')[0].querySelector('path.line').getAttribute('d') !== ''")
        # The same for who reads rather than looks.
        await page.do("document.querySelectorAll('details').forEach((each) => { each.open = true })")
        await page.until("document.querySelectorAll('.dashboard > details tbody tr').length === 3")
        assert (await texts(page, ".dashboard > details tbody tr:first-child > *"))[:5] == ["prefill-0", "prefill", "ready", "2", "3"]
        await page.until("[...document.querySelectorAll('.chart tbody')].every((body) => body.children.length > 0)")
        await page.do("document.querySelectorAll('details').forEach((each) => { each.open = false })")
        for width in (320, 390, 768, 1920):
            await fits(page, width)


async def test_everything_can_be_reached_by_keyboard(cluster: Cluster, page: Page) -> None:
    await cluster.prefill()
    await cluster.decode()
    async with cluster.serving():
        await page.open(url(cluster))
        await page.until("document.querySelectorAll('.card').length === 2")
        seen: list[str] = []
        for _ in range(60):
            await page.press("Tab")
            at = await page.do("(({ tagName, id, className }) => `${tagName}#${id}.${className}`)(document.activeElement)")
            seen.append(at)
            if at.startswith("BODY") or (len(seen) > 1 and at == seen[0]):
                break
            if at == "DIV#.plot" and seen.count(at) == 1:
                for key in ("ArrowLeft", "Home", "End"):
                    await page.press(key)
                said = await page.do("document.querySelector('[aria-live=polite]').innerText")
                assert "p50" in said
                assert await page.do("document.querySelector('.tip').hidden") is False
                await page.press("Escape")
                assert await page.do("document.querySelector('.tip').hidden") is True
        assert seen[0] == "A#.skip"
        for wanted in ("A#to-dashboard.", "A#to-requests.", "A#to-playground.", "BUTTON#key-button.plain", "SELECT#theme."):
            assert wanted in seen
        assert seen.count("DIV#.plot") == 12
        assert sum(each.startswith("SUMMARY") for each in seen) == 13
        # A visible ring on whatever has the focus.
        await page.do("document.querySelector('#to-playground').focus()")
        await page.press("Enter")
        await page.until("document.querySelector('.dashboard').hidden && document.activeElement.id === 'prompt'")
        assert await page.do("getComputedStyle(document.activeElement).outlineStyle") == "solid"


async def test_requests_alerts_and_gpus_are_there_to_be_found(cluster: Cluster, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(await cluster.prefill("prefill-0"), gpus=(GpuLoad(memory_used=60 * 10**9, memory_total=141 * 10**9, utilization=0.87),))
    decode = await cluster.decode("decode-0")
    decode.script = Script(step_s=0.05)
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with cluster.serving(trace_url="https://traces.example/{trace_id}"):
        await page.open(url(cluster) + "/#requests")
        await page.until(f"{_LIVE} && !document.querySelector('.requests').hidden")
        request = cluster.request(max_tokens=8)
        request.tenant = "gold"
        async for _ in cluster.stub.Generate(request, metadata=(("traceparent", f"00-{trace}-00f067aa0ba902b7-01"),)):
            pass
        await page.until("document.querySelectorAll('.book tbody tr').length === 3")
        assert await page.do("document.querySelector('.book a').href") == f"https://traces.example/{trace}"
        heads, cells = [await texts(page, f".book:last-child {which}") for which in ("th[scope=col]", "tbody tr > *")]
        row = dict(zip(heads, cells, strict=True))
        assert (row["State"], row["Tenant"], row["Workers"]) == ("ok", "gold", "prefill-0 → decode-0")
        assert "Decode" in await page.do("document.querySelector('.book:last-child .stack').getAttribute('aria-label')")
        for width in (320, 768, 1920):
            await fits(page, width)
        await page.do("document.querySelector('#to-dashboard').click()")
        await page.until("document.querySelector('.card.prefill .gpu').innerText.includes('87 %')")
        first, second = await texts(page, ".card .gpu")
        assert ("60 GB of 141 GB" in first, second.split()) == (True, ["GPU", "none"])
        assert await page.do("document.querySelector('.alerts').hidden")
        decode.record = dataclasses.replace(decode.record, not_ready_reason="ray does not answer")
        monkeypatch.setattr(alerts, "RULES", [dataclasses.replace(rule, hold_s=0.0) for rule in alerts.RULES])
        await page.until("!document.querySelector('.alerts').hidden && document.title.startsWith('(')")
        assert "TwostepNoTransport" in (await texts(page, ".alerts li"))[-1]
        await fits(page, 390)


# ---- what may go wrong -----------------------------------------------------------------------------------------------------


async def test_workers_and_the_router_come_and_go(cluster: Cluster, page: Page) -> None:
    (port,) = free_ports(1)
    async with cluster.serving(port=port):
        await page.open(url(cluster))
        await page.until("document.querySelector('.nobody') !== null && !document.querySelector('.nobody').hidden")
        assert "twostep up" in (await texts(page, ".nobody"))[0]
        assert await page.until("document.querySelector('#router-state').innerText") == "not ready"
        await cluster.prefill()
        decode = await cluster.decode("decode-0")
        await page.until("document.querySelector('#router-state').innerText === 'ready'")
        await page.until("!document.querySelector('.quiet').hidden")
        decode.record = dataclasses.replace(decode.record, draining=True)
        await page.until("document.querySelector('.card.decode .pill').innerText === 'draining'")
        await decode.die()
        await page.until("document.querySelector('.card.decode .pill').innerText === 'gone'")
        assert (await texts(page, ".side.decode h3")) == ["Decode · 0 workers"]
    await page.until("document.querySelector('#banner').innerText.startsWith('No connection')")
    assert await page.do("document.querySelector('#router-state').innerText") == "away"
    assert len(await texts(page, ".card")) == 2, "what was known last is still there"
    # The browser itself reports what it could not reach.
    await until(lambda: any("ERR_CONNECTION_REFUSED" in error for error in page.errors), "it tries again")
    async with cluster.serving(port=port):
        await page.until(_LIVE)
        await page.until("document.querySelector('#banner').hidden")


async def test_a_key_is_asked_for_where_one_is_needed(cluster: Cluster, page: Page, tmp_path: Path) -> None:
    page.expected.append("401")
    told, key = make_key()
    put_in_file(tmp_path / "keys", key)
    await cluster.prefill()
    await cluster.decode()
    async with cluster.serving(api_keys_file=tmp_path / "keys"):
        await page.open(url(cluster))
        await page.until("document.querySelector('#key-dialog').open")
        assert await page.do("document.activeElement.id") == "key"
        await page.type("wrong")
        await page.press("Enter")
        # Refused, and so it is asked for again.
        await page.until("sessionStorage.length === 1 && document.querySelector('#key-dialog').open")
        await page.press("Escape")
        await page.until("document.querySelector('#router-state').innerText === 'no access'")
        await page.do("document.querySelector('#key-button').click()")
        await page.until("document.querySelector('#key-dialog').open")
        await page.do("document.querySelector('#key').value = ''")
        await page.type(told)
        await page.press("Enter")
        await page.until(f"{_LIVE} && document.querySelector('#banner').hidden")
        assert await page.do("[sessionStorage.length, localStorage.length]") == [1, 0]
        assert await page.do("document.cookie") == ""
        await page.open(url(cluster))
        await page.until(_LIVE)
        await page.do("document.querySelector('#to-playground').click()")
        await ask(page, "hello")
        await page.until("document.querySelector('.phases') !== null")


# ---- the playground --------------------------------------------------------------------------------------------------------


async def ask(page: Page, text: str) -> None:
    await page.do("document.querySelector('#prompt').focus()")
    await page.type(text)
    await page.press("Enter")


async def test_a_chat_shows_where_its_time_went(cluster: Cluster, page: Page) -> None:
    prefill = await cluster.prefill("prefill-0")
    prefill.cached_tokens = 7
    await cluster.decode("decode-0")
    async with cluster.serving():
        await page.open(url(cluster) + "/#playground")
        await page.until(_LIVE)
        nasty = "<img src=x onerror=alert(1)> <b>bold</b>"
        await page.do("document.querySelector('#system').value = 'Be brief.'; document.querySelector('#max-tokens').value = '6'; undefined")
        await ask(page, nasty)
        await page.until("document.querySelector('.phases') !== null")
        assert (await texts(page, ".turn.user .text")) == [nasty]
        assert await page.do("document.querySelectorAll('.log img, .log b:not(.phases b)').length") == 0
        assert (await page.do("document.querySelector('.turn.assistant .text').textContent")) == cluster.text_of(cluster.expected(6))
        asked = prefill.requests[-1]
        assert asked.sampling.max_tokens == 6
        prompt = cluster.tokenizer.decode(list(asked.token_ids), skip_special_tokens=False)
        assert "Be brief." in prompt
        assert nasty in prompt
        assert await page.do("document.querySelector('.turn.assistant .live').innerText.includes('cut at max tokens')")
        facts = dict(zip(await texts(page, ".facts dt"), await texts(page, ".facts dd"), strict=True))
        assert facts["Prefill worker"] == "prefill-0"
        assert facts["Decode worker"] == "decode-0"
        assert facts["Answer"] == "6 tokens"
        assert facts["Prompt"] == f"{len(asked.token_ids)} tokens, 7 of them cached"
        assert "by local, 3 blocks moved, 1 reused" in facts["KV cache"]
        bars: list[str] = await page.do("[...document.querySelectorAll('.stack')].map((bar) => bar.getAttribute('aria-label'))")
        assert "Prefill 2 ms" in bars[0]
        assert "Fetch 4 ms" in bars[1]
        assert "Decode" not in bars[1].replace("First decode", "")
        await page.do("document.querySelector('.phases details').open = true")
        assert (await texts(page, ".phases tbody th")) == ["Route", "Queue", "Prefill", "Publish", "Fetch", "First decode", "Decode"]
        # Earlier messages go along.
        await ask(page, "and then?")
        await page.until("document.querySelectorAll('.phases').length === 2")
        prompt = cluster.tokenizer.decode(list(prefill.requests[-1].token_ids), skip_special_tokens=False)
        assert prompt.index(nasty) < prompt.index(cluster.text_of(cluster.expected(6))) < prompt.index("and then?")
        for width in (320, 390, 1280):
            await fits(page, width)


async def test_an_answer_can_be_stopped_and_asked_again(cluster: Cluster, page: Page) -> None:
    await cluster.prefill()
    decode = await cluster.decode()
    decode.script = Script(step_s=0.1)
    page.expected.append("400")
    async with cluster.serving():
        await page.open(url(cluster) + "/#playground")
        await page.until(_LIVE)
        await ask(page, "tell me everything")
        await page.until(f"document.querySelector('.turn.assistant .text').innerText.length > {len(ANSWER_TEXT) // 4}")
        await page.until("/tokens\\/s/.test(document.querySelector('.turn.assistant .live').innerText)")
        await page.do("document.querySelector('.danger').click()")
        await cluster.all_free()
        await page.until("document.querySelector('.turn.assistant .live').innerText.endsWith('stopped')")
        assert await page.do("document.activeElement.id") == "prompt"
        # A refusal is shown in the router's own words.
        await page.do("document.querySelector('#max-tokens').value = '-3'; undefined")
        await ask(page, "now this")
        await page.until("document.querySelector('.failure') !== null")
        (failure,) = await texts(page, ".failure")
        assert "The request was refused" in failure
        assert "max_tokens" in failure
        await page.do("document.querySelector('#max-tokens').value = '4'; undefined")
        await page.do("document.querySelector('.failure button').click()")
        await page.until("document.querySelector('.phases') !== null")
        assert await texts(page, ".failure") == []
        await page.do("[...document.querySelectorAll('.composer button')].find((each) => each.innerText === 'New chat').click()")
        assert len(await texts(page, ".turn")) == 0


@pytest.mark.smoke
async def test_without_workers_the_playground_says_so(cluster: Cluster, page: Page) -> None:
    page.expected.append("503")
    async with cluster.serving(no_worker_grace=0.1):
        await page.open(url(cluster) + "/#playground")
        await page.until(_LIVE)
        await ask(page, "anybody there?")
        await page.until("document.querySelector('.failure') !== null")
        (failure,) = await texts(page, ".failure")
        assert "The deployment cannot answer now" in failure
        assert "Request " in failure
