"""The page's files: what is served, that nothing in them comes from anywhere else, and the parts of its script that are pure functions."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_fakes import open_http, refused
from router_fakes import Cluster

from router.http.ui import PAGE_HEADERS, load_page

FOLDER = Path(__file__).parents[2] / "router" / "ui"
NODE = shutil.which("node")

_FILES = sorted(path.name for path in FOLDER.iterdir())
_SCRIPTS = [name for name in _FILES if name.endswith(".js")]
_STYLES = [name for name in _FILES if name.endswith(".css")]

# ---- files -----------------------------------------------------------------------------------------------------------------


async def test_files_are_served_and_not_sent_twice(cluster: Cluster) -> None:
    async with cluster.serving(), open_http(cluster) as http:
        async with http.get("/ui", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (307, "ui/")
        async with http.get("/", headers={"Accept": "text/html,*/*;q=0.8"}, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (307, "ui/")
        await refused(http, "/", None, 404)
        for name in _FILES:
            path = "/ui/" if name == "index.html" else f"/ui/{name}"
            async with http.get(path, headers={"Accept-Encoding": "identity"}) as answer:
                assert answer.status == 200, name
                assert await answer.read() == (FOLDER / name).read_bytes()
                for header, value in PAGE_HEADERS.items():
                    assert answer.headers[header] == value
                etag = answer.headers["ETag"]
            async with http.get(path, headers={"If-None-Match": etag}) as again:
                assert (again.status, await again.read(), again.headers["ETag"]) == (304, b"", etag)
            async with http.get(path, headers={"If-None-Match": '"another"'}) as other:
                assert other.status == 200
        async with http.get("/openapi.json") as answer:
            assert not [path for path in (await answer.json())["paths"] if path.startswith("/ui")], "it is the page's own"
        for path in ("/ui/index.html", "/ui/nothing.js", "/ui/..%2fhttp%2fui.py", "/ui/../server.py", "/ui/%2e%2e/http/ui.py", "/ui/api"):
            await refused(http, path, None, 404)


def test_what_is_no_file_of_the_page_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<p>")
    (tmp_path / "notes.txt").write_text("no")
    (tmp_path / "app.js.map").write_text("{}")
    assert list(load_page(tmp_path)) == ["index.html"]


def test_the_policy_lets_in_nothing_foreign_and_nothing_inline() -> None:
    policy = dict(part.strip().split(" ", 1) for part in PAGE_HEADERS["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"


def test_the_html_speaks_to_screen_readers_and_has_nothing_inline() -> None:
    page = (FOLDER / "index.html").read_text()
    tags = [(tag, dict(re.findall(r'([\w-]+)="([^"]*)"', rest))) for tag, rest in re.findall(r"<([a-z1-6]+)([^>]*)>", page)]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on") or name == "style"]
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    count = [tag for tag, _ in tags].count
    assert count("main") == count("h1") == count("title") == 1
    labelled = {attributes.get("for") for tag, attributes in tags if tag == "label"}
    assert all(attributes["id"] in labelled for tag, attributes in tags if tag in ("input", "select"))
    assert all("alt" in attributes for tag, attributes in tags if tag == "img")
    assert all("src" in attributes for tag, attributes in tags if tag == "script")
    targets = {target for _, attributes in tags for name in ("src", "href") if (target := attributes.get(name, "#"))[0] != "#"}
    assert targets <= set(_FILES), "files of the page, by a path that works wherever it is mounted"


def _colours(scheme: str) -> dict[str, tuple[float, float, float]]:
    found = re.findall(r"--([\w-]+): light-dark\(#([0-9a-f]{6}), #([0-9a-f]{6})\);", (FOLDER / "style.css").read_text())
    values = {name: light if scheme == "light" else dark for name, light, dark in found}
    return {name: _colour(value) for name, value in values.items()}


def _colour(written: str) -> tuple[float, float, float]:
    red, green, blue = (int(written[i : i + 2], 16) / 255 for i in (0, 2, 4))
    return red, green, blue


def _contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    """WCAG 2.2's contrast ratio, from relative luminance."""

    def luminance(colour: tuple[float, float, float]) -> float:
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrasts_are_enough_to_read(scheme: str) -> None:
    colours = _colours(scheme)
    texts = [(text, back) for text in ("text", "muted", "accent", "ok", "warn", "bad") for back in ("back", "panel")]
    texts += [("text", "sunk"), ("muted", "sunk"), ("on-accent", "accent")] + [(name, f"{name}-back") for name in ("ok", "warn", "bad")]
    texts += [(name, "panel") for name in ("prefill", "decode", "kv", "one", "two", "three")]
    for text, back in texts:
        assert _contrast(colours[text], colours[back]) >= 4.5, (text, back)
    # Edges of what can be used, and the ring around what has the focus.
    for line in ("strong-line", "accent"):
        assert _contrast(colours[line], colours["panel"]) >= 3.0, line


# ---- the parts that are pure functions -------------------------------------------------------------------------------------

needs_node = pytest.mark.skipif(NODE is None, reason="no Node.js here to run the page's functions with")


Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(script, *modules): what `script` logs as JSON, with the modules imported by their names. `document` is not there."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "package.json").write_text('{"type": "module"}')
    for name in _SCRIPTS:
        shutil.copy(FOLDER / name, folder)

    def run(script: str, *modules: str) -> Any:
        assert NODE is not None
        imports = "".join(f"import * as {Path(name).stem} from './{name}';\n" for name in modules)
        (folder / "main.js").write_text(imports + script)
        done = subprocess.run([NODE, str(folder / "main.js")], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@needs_node
def test_scripts_are_javascript() -> None:
    assert NODE is not None
    for name in _SCRIPTS:
        source = (FOLDER / name).read_text()
        done = subprocess.run([NODE, "--check", "--input-type=module"], input=source, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{name}: {done.stderr}"


@needs_node
def test_numbers_as_people_read_them(run: Run) -> None:
    cases = {
        "count": [[0, "0"], [3.14159, "3.1"], [1234, "1234"], [12_345, "12.3 k"], [2_500_000, "2.5 M"], [None, "–"]],
        "seconds": [
            *([0, "0 ms"], [2.5e-5, "25 µs"], [0.0042, "4.2 ms"], [0.25, "250 ms"], [0.9999, "1 s"], [1.234, "1.23 s"]),
            *([61, "61 s"], [600, "10 min 0 s"], [7300, "2 h 1 min"], [200_000, "2 d 7 h"], [None, "–"]),
        ],
        "bytesPerSecond": [[0, "0 B/s"], [999, "999 B/s"], [3.2e9, "3.2 GB/s"], [None, "–"]],
        "percent": [[0, "0 %"], [0.051, "5.1 %"], [0.5, "50 %"], [1, "100 %"], [None, "–"]],
        "ratio": [[1, "1 : 1"], [2.5, "2.5 : 1"], [0.4, "1 : 2.5"], [0, "0 : 1"], [0.002, "1 : 500"], [6e-32, "0 : 1"], [None, "–"]],
        "ago": [[30, "−30 s"], [150, "−2.5 min"]],
    }
    script = f"const cases = {json.dumps(cases)};\n" + (
        "console.log(JSON.stringify(Object.fromEntries(Object.entries(cases).map(([n, all]) => [n, all.map(([v]) => [v, format[n](v)])]))))"
    )
    assert run(script, "format.js") == cases


@needs_node
def test_events_are_found_however_the_bytes_are_cut(run: Run) -> None:
    stream = 'data: {"a":1}\r\n\r\n: a comment\n\ndata: one\ndata: two\n\ndata:[DONE]\r\r'
    script = f"""
    const stream = {json.dumps(stream)};
    const found = [];
    for (let first = 0; first <= stream.length; first += 1) {{
      for (let second = first; second <= stream.length; second += 1) {{
        const parser = new sse.EventParser();
        const parts = [stream.slice(0, first), stream.slice(first, second), stream.slice(second), "\\n"];
        const told = parts.flatMap((part) => parser.feed(part));
        found.push(JSON.stringify(told));
      }}
    }}
    console.log(JSON.stringify([...new Set(found)]));
    """
    assert run(script, "sse.js") == [json.dumps(['{"a":1}', "one\ntwo", "[DONE]"], separators=(",", ":"))]


@needs_node
def test_history_grows_by_what_happens_and_is_bounded(run: Run) -> None:
    script = """
    const worker = (name) => ({ worker_id: name, role: "decode", ready: true, tokens_per_s: 1 });
    const status = (...names) => ({ workers: names.map(worker) });
    let now = state.withHistory(state.emptyState(), { every_s: 1, columns: { unix_s: [1, 2], a: [5, 6] } });
    now = state.withEvent(now, { status: status("w1", "w2"), point: { unix_s: 2, a: 6 } }, 2);
    now = state.withEvent(now, { status: status("w2"), point: { unix_s: 3, a: 7, b: 8 } }, 3);
    const grown = now;
    const conditions = state.workersOf(now, "decode").map((worker) => [worker.worker_id, state.conditionOf(worker).word]);
    for (let s = 4; s < 1000; s += 1) now = state.withEvent(now, { status: status("w10", "w2"), point: { unix_s: s, a: s } }, s);
    console.log(JSON.stringify({
      columns: grown.columns, conditions, kept: now.columns.unix_s.length, last: state.latest(now, "a"),
      names: state.workersOf(now, "decode").map((worker) => worker.worker_id),
      tail: state.lastOf(now, "a", 2), recent: now.workers.get("w2").recent.length, traffic: state.anyTraffic(now, 60),
    }));
    """
    assert run(script, "state.js") == {
        "columns": {"unix_s": [1, 2, 3], "a": [5, 6, 7], "b": [None, None, 8]},
        "conditions": [["w1", "gone"], ["w2", "ready"]],
        "kept": 600,
        "last": 999,
        "names": ["w2", "w10"],
        "tail": [998, 999],
        "recent": 60,
        "traffic": False,
    }


@needs_node
def test_scales_paths_and_phases(run: Run) -> None:
    script = """
    const tops = [0, 0.003, 1, 1.1, 7, 99].map(scale.niceTop);
    const even = scale.balance(8);
    const x = (i) => i * 10, y = (v) => v;
    console.log(JSON.stringify({
      tops, even: [1 / 8, 1, 8, 0, 1000].map(even.of).map((v) => Number(v.toFixed(6))),
      path: scale.pathOf([1, 2, null, 3, null], x, y), nothing: scale.pathOf([null, undefined], x, y),
      area: scale.areaOf([null, 1, 2, null, 5, null, 3, 4], x, y, 9),
      summary: scale.summaryOf([null, 2, 4, null]), none: scale.summaryOf([null]),
      phases: phases.segmentsOf({ route_s: 1, decode_s: 3, fetch_s: 0, total_s: 9 }).map(({ name, s, share }) => [name, s, share]),
    }));
    """
    assert run(script, "scale.js", "phases.js") == {
        "tops": [1, 0.005, 1, 2, 10, 100],
        "even": [0, 0.5, 1, 0, 1],
        "path": "M0.0 1.0L10.0 2.0M30.0 3.0h0.01",
        "nothing": "",
        "area": "M10.0 9L10.0 1.0L20.0 2.0L20.0 9ZM60.0 9L60.0 3.0L70.0 4.0L70.0 9Z",
        "summary": {"least": 2, "mean": 3, "most": 4, "last": 4},
        "none": None,
        "phases": [["route", 1, 0.25], ["decode", 3, 0.75]],
    }


@needs_node
def test_lines_of_the_map_are_what_flows(run: Run) -> None:
    """What a worker is for has a line always; what else it does, as long as it does it."""
    idle = dict.fromkeys(("tokens_per_s", "prompt_tokens_per_s", "fetched_bytes_per_s", "handed_over_per_s"), 0)
    workers = [
        {**idle, "worker_id": "a", "role": "prefill", "tokens_per_s": 90, "prompt_tokens_per_s": 80, "handed_over_per_s": 3},
        {**idle, "worker_id": "b", "role": "decode", "tokens_per_s": 50, "prompt_tokens_per_s": 20, "fetched_bytes_per_s": 400},
        {**idle, "worker_id": "c", "role": "decode", "handed_over_per_s": 1},
        {**idle, "worker_id": "d", "role": "prefill", "gone": True},
    ]
    script = f"""
    const workers = new Map({json.dumps(workers)}.map((worker) => [worker.worker_id, worker]));
    const flows = map.flowsOf({{ workers }}).map(({{ kind, from, to, rate }}) => [kind, from, to, rate]);
    console.log(JSON.stringify([flows, map.movesOf({{ num_decoding: 4, kept_per_s: 1.5, handed_over_per_s: 0, taken_over_per_s: 2 }})]));
    """
    flows, moves = run(script, "map.js")
    assert flows == [
        ["prompts", "router", "prefill/a", 80],
        ["kv", "prefill/a", "kv", 300],
        ["tokens", "prefill/a", "router", 10],
        ["prompts", "router", "decode/b", 20],
        ["kv", "kv", "decode/b", 400],
        ["tokens", "decode/b", "router", 30],
        ["kv", "decode/c", "kv", 100],
        ["kv", "kv", "decode/c", 0],
        ["tokens", "decode/c", "router", 0],
    ]
    assert moves == "4 decode · kept 1.5/s · out 0/s · in 2/s"


@needs_node
def test_what_the_autoscaler_wants_in_words(run: Run) -> None:
    role = {"role": "prefill", "pods": 1, "wanted_pods": 2, "wanted_workers": 2, "serving_workers": 1}
    other = {"role": "decode", "pods": 3, "wanted_pods": 3, "wanted_workers": 2, "serving_workers": 3}
    texts = dict.fromkeys(("leader", "reason", "limit", "problem"), "")
    empty: dict[str, Any] = {"age_s": 0, "stale": False, "roles": [], "switches": [], **texts}
    fresh = empty | {"leader": "as-0", "age_s": 7.6, "roles": [role, other], "reason": "1 requests/s need 1 + 1", "limit": "surge"}
    switches = [{"worker_id": f"d{i}", "role": "prefill"} for i in range(5)]
    cases = [None, fresh | {"switches": switches}, fresh | {"age_s": 3700, "stale": True}, empty | {"problem": "no access"}]
    wish = "prefill 1 of 2 (1 → 2 started as such), decode 3 of 2 (3 started as such) workers"
    why = "1 requests/s need 1 + 1; held back by surge"
    becomes = "; d0 becomes prefill, d1 becomes prefill, d2 becomes prefill, d3 becomes prefill; and 1 more"
    late = "nobody has decided for 61 min 40 s, as-0 was the last; see that it runs, and its log"
    assert run(f"console.log(JSON.stringify({json.dumps(cases)}.map(scaling.wordsOf)))", "scaling.js") == [
        None,
        {"wish": wish, "state": "", "when": "8 s ago, by as-0", "why": why + becomes, "trouble": ""},
        {"wish": wish, "state": "stale", "when": late, "why": why, "trouble": ""},
        {"wish": "", "state": "", "when": "", "why": "", "trouble": "Its decision cannot be read: no access"},
    ]


@needs_node
def test_requests_tenants_and_gpus_in_words(run: Run) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    quota = {"max_inflight": 4, "max_waiting": 0, "keys": {"gold": {"used": 50, "limit": 20_000}}}
    tenant = {"tenant": "gold", "running": 2, "waiting": 1, "tokens": 500, "share": 0.75, "weight": 3}
    gpu = {"utilization": 0.5, "memory_used": str(60 * 10**9), "memory_total": str(141 * 10**9)}
    script = f"""
    const state_of = (status, ...names) => requests.stateOf({{ status, phases: Object.fromEntries(names.map((name) => [name, 1])) }});
    const words = (...gpus) => Object.values(state.gpuWords({{ gpus }}));
    const gpu = {json.dumps(gpu)};
    console.log(JSON.stringify({{
      states: [state_of("", "route"), state_of("", "route", "queue", "prefill"), state_of("", "route", "decode"), state_of("OK"),
               state_of("DEADLINE_EXCEEDED")].map(({{ word, tone }}) => [word, tone]),
      traces: ["https://t.example/{{trace_id}}", "", "javascript:alert({{trace_id}})"].map((url) => requests.traceUrl(url, "{trace}")),
      untraced: requests.traceUrl("https://t.example/{{trace_id}}", ""),
      parts: requests.partsOf({{ route: 1, queue: 0, hand_over: 3 }}).map(({{ colour, label, share }}) => [colour, label, share]),
      tenants: [requests.tenantCells({json.dumps(tenant)}, {json.dumps(quota)}, 1000)],
      gpus: [words(gpu), words(gpu, {{ ...gpu, utilization: 0.9 }}), words({{ memory_used: "0", memory_total: "1000000000" }}), words()],
    }}));
    """
    assert run(script, "requests.js", "state.js") == {
        "states": [["waiting", ""], ["prefill", ""], ["decoding", ""], ["ok", "ok"], ["deadline exceeded", "bad"]],
        "traces": [f"https://t.example/{trace}", None, None],
        "untraced": None,
        "parts": [["route", "Route", 0.25], ["fetch", "Hand-over", 0.75]],
        "tenants": [["gold", "2 of 4", "1", "500", "50 %", "75 %", "3", "50 of 20 k"]],
        "gpus": [["50 %", "60 GB of 141 GB"], ["2 × 50 % to 90 %", "120 GB of 282 GB"], ["–", "0 B of 1 GB"], ["none", ""]],
    }
