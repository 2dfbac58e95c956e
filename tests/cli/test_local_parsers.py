"""How a local system's router is told to read answers."""

from __future__ import annotations

import pytest

from twostep.cli._flags import parser
from twostep.cli._up import options_of
from twostep.errors import SetupError
from twostep.local.options import LocalOptions


@pytest.mark.parametrize(("flag", "value"), [("reasoning_parser", "o1"), ("tool_call_parser", "jamba")])
def test_an_unknown_parser_is_refused_before_anything_starts(flag: str, value: str) -> None:
    with pytest.raises(SetupError, match=f"--{flag.replace('_', '-')} '{value}' is not known; give one of auto, none"):
        LocalOptions(**{flag: value})  # type: ignore[arg-type]


def test_the_flags_of_up() -> None:
    args = parser().parse_args(["up", "--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"])
    options = options_of(args)
    assert (options.reasoning_parser, options.tool_call_parser) == ("qwen3", "hermes")
