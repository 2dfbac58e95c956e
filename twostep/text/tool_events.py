"""What an answer turns out to consist of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """More text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The `index`-th call of this answer, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, a JSON object as the model writes it."""

    index: int
    text: str


Event = Content | CallBegun | CallArguments
