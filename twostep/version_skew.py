"""Which versions of router and workers may serve together. Pure.

    same major, minors at most one apart        they may: a rolling update has both for a while
    everything else                             they may not, and say so; also two workers of which one takes KV from the other

Patches do not count. What says no version is older than versions were said: 0.1.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

UNSAID = "0.1"
_MAX_MINORS_APART = 1
# 1.2, 1.2.3, 1.2.3rc1, 1.2.dev4+g1234
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?!\d)")
# Where calls say it: in their channel's user agent, "twostep/0.1.0 grpc-python-asyncio/..."
_AGENT = re.compile(r"(?:^|\s)twostep/(\S{1,40})")


class Minor(NamedTuple):
    """Holds the part of a version that compatibility depends on."""

    major: int
    minor: int


def minor_of(version: str) -> Minor | None:
    """None: it is no version. An empty one is UNSAID."""
    found = _VERSION.match(version or UNSAID)
    return Minor(int(found[1]), int(found[2])) if found else None


@functools.lru_cache(maxsize=4096)
def together(one: str, other: str) -> bool:
    """Returns whether the two may serve together. Equal ones may, whatever they are."""
    if one == other:
        return True
    a, b = minor_of(one), minor_of(other)
    return a is not None and b is not None and a.major == b.major and abs(a.minor - b.minor) <= _MAX_MINORS_APART


def why_not(ours: str, theirs: str, *, us: str, them: str) -> str:
    """A sentence for operators, with what to do; empty if the two may serve together. `us` and `them`: "the router", "it"."""
    if together(ours, theirs):
        return ""
    if minor_of(theirs) is None:
        return f"{them} runs {theirs!r:.40}, which is no version; start it from a release, or from the code that {us} runs"
    older = us if (minor_of(ours) or Minor(0, 0)) < (minor_of(theirs) or Minor(0, 0)) else them
    return f"{them} runs version {theirs or UNSAID} and {us} {ours}, more than one minor version apart; upgrade {older}"


def user_agent(version: str) -> str:
    """Head of the user agent of a channel."""
    return f"twostep/{version}"


def version_in_agent(agent: str) -> str:
    """Returns the version in a channel's whole user agent; UNSAID where it names none."""
    found = _AGENT.search(agent)
    return found[1] if found else UNSAID
