"""What a handler says of itself for /openapi.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

_ATTRIBUTE = "__described__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """`bodies`: what the request's body may be, one of them. `reply` is that of status 200 in JSON; `events` the data of each
    event, where the body asks for a stream; `media` that of a reply that is no JSON. `headers`: of requests: name, what it says, schema.
    `query`: the URL's parameters; `form`: fields of a multipart body, beside its `file`."""

    summary: str
    bodies: tuple[type[BaseModel], ...] = ()
    reply: type[BaseModel] | None = None
    events: type[BaseModel] | None = None
    media: str = "application/json"
    headers: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    query: type[BaseModel] | None = None
    form: type[BaseModel] | None = None


Handler = TypeVar("Handler", bound=Callable[..., object])


def described(
    summary: str,
    *,
    bodies: tuple[type[BaseModel], ...] = (),
    reply: type[BaseModel] | None = None,
    events: type[BaseModel] | None = None,
    media: str = "application/json",
    headers: tuple[tuple[str, str, dict[str, Any]], ...] = (),
    query: type[BaseModel] | None = None,
    form: type[BaseModel] | None = None,
) -> Callable[[Handler], Handler]:
    """Goes between the route and the handler."""
    description = Description(
        summary=summary, bodies=bodies, reply=reply, events=events, media=media, headers=headers, query=query, form=form
    )

    def attach(handler: Handler) -> Handler:
        setattr(handler, _ATTRIBUTE, description)
        return handler

    return attach


def description_of(handler: object) -> Description | None:
    found = getattr(handler, _ATTRIBUTE, None)
    return found if isinstance(found, Description) else None
