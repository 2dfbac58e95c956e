"""Tests of a process' settings: their sources, which wins, and the refusal of a wrong one by its name, with what to give instead."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import RouterConfig
from twostep.autoscaler.config import AutoscalerConfig
from twostep.cli._flags import parser
from twostep.settings.autoscaler import AutoscalerSettings
from twostep.settings.known import COMMANDS, TABLES, known_variables
from twostep.settings.readers import Number, Whole
from twostep.settings.reading import FlagParser, read_settings
from twostep.settings.removed import REMOVED, REMOVED_FLAGS
from twostep.settings.router import REASONING_PARSERS, TOOL_CALL_PARSERS, RouterSettings
from twostep.settings.table import Required, Rule, Settings, group, setting, settings_of, variable_of
from twostep.settings.up import UpSettings
from twostep.settings.worker import WorkerSettings
from twostep.text import chat_format, tool_calls
from twostep.worker.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner(Settings):
    size: int = setting(1, "size of the {group} part", Whole(0, 9))
    where: Path | None = setting(None, "a file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Settings):
    name: str = setting(Required, "must be given")
    colour: str = setting("red", "one of three", choices=("red", "green", "blue"))
    loud: bool = setting(False, "a switch")
    ratio: float = setting(0.5, "a share", Number(0, 1), aliases=("-r",))
    max_waiting: int = setting(7, "prompts", Whole(0, 100))
    left: Inner = group(Inner())
    right: Inner = group(Inner(size=2))
    constant: int = 3

    def too_large(self) -> str:
        over = self.left.size - self.right.size
        return f"{{left-size}} is more than {{right-size}} by {over}" if over > 0 else ""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(lambda table: table.loud and table.colour == "blue", "{loud} and {colour} do not go together"),
        Rule(too_large),
    )


def read(*argv: str, environ: Mapping[str, str] | None = None, **defaults: Any) -> Table:
    return read_settings(Table, ["--name", "n", *argv], prog="p", description="", environ=environ or {}, defaults=defaults)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(SystemExit) as ended:
        read(*argv, environ=environ)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_defaults_are_the_table_s() -> None:
    assert read() == Table(name="n")
    assert (read().left.size, read().right.size) == (1, 2)
    assert read(max_waiting=9).max_waiting == 9


def test_a_flag_wins_over_a_variable_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max-waiting: 1\ncolour: green\nleft_size: 2\nloud: true\nratio: 0.25\nright-where:\n")
    variables = {"TWOSTEP_MAX_WAITING": "2", "TWOSTEP_COLOUR": "blue", "TWOSTEP_LOUD": "no", "TWOSTEP_RATIO": ""}
    found = read("--config", str(file), "--max-waiting", "3", "--right-size=5", environ=variables)
    assert found == Table(name="n", colour="blue", ratio=0.25, max_waiting=3, left=Inner(size=2), right=Inner(size=5))
    assert read(environ={"TWOSTEP_CONFIG": str(file)}).loud
    assert not read("--no-loud", environ={"TWOSTEP_CONFIG": str(file)}).loud
    assert read("-r", "1").ratio == 1.0


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--max-waiting", "101"], {}, "--max-waiting"),
        (["--max-waiting", "many"], {}, "--max-waiting"),
        (["--ratio", "nan"], {}, "--ratio"),
        (["--colour", "mauve"], {}, "green"),
        ([], {"TWOSTEP_COLOUR": "mauve"}, "TWOSTEP_COLOUR"),
        ([], {"TWOSTEP_LOUD": "perhaps"}, "TWOSTEP_LOUD"),
        ([], {"TWOSTEP_LEFT_SIZE": "10"}, "TWOSTEP_LEFT_SIZE"),
        (["--loud", "--colour", "blue"], {}, "--loud and --colour blue"),
        ([], {"TWOSTEP_LOUD": "1", "TWOSTEP_COLOUR": "blue"}, "TWOSTEP_LOUD=1 and TWOSTEP_COLOUR=blue"),
        (["--left-size", "4"], {}, "--left-size 4 is more than --right-size 2 (its default) by 2"),
        (["--max-wating", "1"], {}, "--max-waiting"),
        (["--max-w", "1"], {}, "--max-waiting"),
        (["--l"], {}, "--loud"),
        (["--ageing", "1"], {}, REMOVED["ageing"]),
        ([], {"TWOSTEP_STALL_TIMEOUT": "1"}, REMOVED["stall-timeout"]),
        (["--config", "/no/such/file"], {}, "/no/such/file"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(
    argv: list[str], environ: dict[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in refusal(capsys, *argv, environ=environ)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("ratio: 2\nmax-wating: 1\nratio: 3\n")
    variables = {"TWOSTEP_LEFT_SIZE": "11", "TWOSTEP_AGEING": "1", "TWOSTEP_COLOUR": "blue"}
    said = refusal(capsys, "--config", str(file), "--max-waiting", "-1", "--loude", "--loud", environ=variables)
    for named in (f"{file}, line 1: ratio", f"{file}, line 2", f"{file}, line 3", "--max-waiting: '-1'", "--loude", REMOVED["ageing"]):
        assert named in said
    assert "--loud and TWOSTEP_COLOUR=blue" in said
    assert "TWOSTEP_LEFT_SIZE: '11'" in said
    assert "right-size" not in said, "what could not be read breaks no rule"


def test_what_kubernetes_tells_of_services_is_none_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    links = {"TWOSTEP_ROUTER_PORT": "tcp://10.0.0.1:50051", "TWOSTEP_ROUTER_PORT_50051_TCP": "tcp://10.0.0.1:50051"}
    links |= {"TWOSTEP_REDIS_SERVICE_HOST": "10.0.0.2", "TWOSTEP_MAX_WAITING": "tcp://10.0.0.3:80"}
    assert read(environ=links) == read()
    assert capsys.readouterr().err == ""


def test_a_command_s_wrong_variable_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("TWOSTEP_SIZE", "big"), ("TWOSTEP_KIND", "c"), ("TWOSTEP_LOUD", "perhaps")):
        command = FlagParser()
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            command.flag("--size", type=int, help="")
            command.flag("--kind", choices=["a", "b"], help="")
            command.flag("--loud", action="store_true", help="")
        with pytest.raises(SystemExit):
            command.parse_args([])
        assert f"{name}: '{value}'" in capsys.readouterr().err
        assert vars(command.parse_args(["--size", "3", "--kind", "a", "--loud"])) == {"size": 3, "kind": "a", "loud": True}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max-wating: 1", "max-waiting"),
        ("max_waiting: 101", "max_waiting"),
        ("constant: 4", "constant"),
        ("router-lease: 4", REMOVED["router-lease"]),
        ("- a\n- b", "max-num-seqs: 64"),
        ("{", "cannot be read"),
    ],
)
def test_so_is_a_line_of_the_file(text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    said = refusal(capsys, "--config", str(file))
    assert named in said
    assert str(file) in said


def test_what_must_be_given_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(Table, [], prog="p", description="", environ={})
    assert "TWOSTEP_NAME" in capsys.readouterr().err


def test_a_mistyped_variable_is_warned_of_and_nobody_else_s(capsys: pytest.CaptureFixture[str]) -> None:
    read(environ={"TWOSTEP_MAX_INFLITE": "1", "TWOSTEP_MAX_NUM_SEQS": "1", "TWOSTEP_API_KEY": "k", "TWOSTEP_PORT_80_TCP": "x", "OTHER": ""})
    said = capsys.readouterr().err
    assert re.findall(r"TWOSTEP_\w+", said) == ["TWOSTEP_MAX_INFLITE", "TWOSTEP_MAX_INFLIGHT"]


@pytest.mark.parametrize(
    ("table", "asked", "meant"),
    [
        (RouterSettings, ["--http-port", "8080"], "--port"),
        (UpSettings, ["--http-port", "8080"], "--port"),
        (WorkerSettings, ["--port", "50061"], "--grpc-port"),
        (AutoscalerSettings, ["--port", "50081"], "--grpc-port"),
    ],
)
def test_a_port_under_another_name_is_refused_with_the_right_one(
    table: type[Settings], asked: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_settings(table, asked, prog="p", description="", environ={})
    assert meant in re.split(r"[^-a-z]+", capsys.readouterr().err)


def test_a_secret_is_taken_from_everywhere_but_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("api-key: in-the-file\nmodel: m")

    def key(*argv: str, **environ: str) -> str:
        return read_settings(RouterSettings, ["--model", "m", *argv], prog="p", description="", environ=environ).api_key

    assert key(TWOSTEP_API_KEY="of-the-variable") == "of-the-variable"
    assert key("--config", str(tmp_path / "c.yaml")) == "in-the-file"
    for argv in (["--api-key", "seen-by-all"], ["--api-key=seen-by-all"]):
        with pytest.raises(SystemExit):
            key(*argv)
        said = capsys.readouterr().err
        assert "--api-key-file" in said
        assert "TWOSTEP_API_KEY" in said
        assert "seen-by-all" not in said


@pytest.mark.parametrize("argv", [["a", "b"], ["a,b"], ["a", ",", "b"]])
def test_a_setting_may_take_several_words(argv: list[str]) -> None:
    found = read_settings(RouterSettings, ["--served-model-name", *argv, "--model", "m"], prog="p", description="", environ={})
    assert found.served_model_name == ("a", "b")


@given(st.integers(-5, 15), st.integers(-5, 15), st.integers(0, 10))
def test_bounds_are_in(value: int, low: int, width: int) -> None:
    """Whole and other numbers alike; `above` leaves the lower one out."""
    inside = low <= value <= low + width
    for reader, allowed in (
        (Whole(low, low + width), inside),
        (Number(low, low + width), inside),
        (Number(low, low + width, above=True), inside and value != low),
    ):
        if allowed:
            assert reader(str(value)) == value
        else:
            with pytest.raises(argparse.ArgumentTypeError):
                reader(str(value))


# ---- the tables themselves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES.values())
def test_every_default_is_one_that_its_own_reader_takes(table: type[Settings]) -> None:
    for each in settings_of(table):
        assert each.help
        if each.default_text and not each.switch:
            assert each.value(each.default_text) == each.default, each.name
        assert each.name not in REMOVED, "a removed name is refused by name, and must not come back"


@pytest.mark.parametrize(
    ("config", "options"), [(RouterConfig, {"model": Path()}), (WorkerConfig, {"role": "decode"}), (AutoscalerConfig, {})]
)
def test_what_is_no_setting_has_a_value(config: Any, options: dict[str, Any]) -> None:
    made = config(**options)
    settings = {each.path[0] for each in settings_of(config)}
    assert all(getattr(made, field.name) is not None for field in fields(config) if field.name not in {*settings, "cache_dir"})


def test_every_variable_of_a_command_is_known() -> None:
    """Or it would be warned of as mistyped."""
    found: set[str] = set()

    def walk(command: argparse.ArgumentParser) -> None:
        found.update(re.findall(r"\[(TWOSTEP_\w+)\]", re.sub(r"\s+", " ", command.format_help())))
        for action in command._actions:  # argparse has no public way to its subcommands
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    walk(inner)

    walk(parser())
    assert found <= known_variables()
    assert {variable_of(name) for name in COMMANDS} <= found


def test_names_of_parsers_are_those_that_there_are() -> None:
    assert REASONING_PARSERS == chat_format.REASONING_PARSERS
    assert TOOL_CALL_PARSERS == tool_calls.TOOL_CALL_PARSERS


def test_the_tables_load_nothing_heavy() -> None:
    """The base install has no numpy, and `twostep --help` is instant."""
    program = "import sys, twostep.cli._flags as f; f.parser(); print({'grpc', 'numpy', 'yaml', 'jinja2'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_what_was_removed_is_in_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in (*REMOVED, *REMOVED_FLAGS) if f"`--{name}`" not in text] == []


@pytest.mark.parametrize(
    "command", [["plan", "--workload", "w", "--slo", "s", "--rate", "1"], ["bench", "engine"], ["bench", "quality", "--against", "x"]]
)
def test_kv_may_be_asked_for_in_vllm_s_word_for_the_same(command: list[str]) -> None:
    assert parser().parse_args([*command, "--kv-cache-dtype", "fp8_e4m3"]).kv_cache_dtype == "fp8"
    row = next(each for each in settings_of(WorkerConfig) if each.name == "kv-cache-dtype")
    assert [row.value(text) for text in ("fp8_e4m3", *row.choices)] == ["fp8", *row.choices]
    for other in ("fp8_e5m2", "bfloat16"):
        with pytest.raises(argparse.ArgumentTypeError, match=other):
            row.value(other)
