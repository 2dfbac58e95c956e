"""Who calls and what that caller may do: Identity is what a front says of each call, whatever protocol it speaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from router.access.account import Account, Spending
from twostep.errors import PermissionDenied
from twostep.request_class import RequestClass
from twostep.rpc.v1 import inference_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """`tenant`: whose share of the system the caller uses. None: nobody knows, and the request may say; if it does not, `fallback`. Without
    an `account` nothing is counted and everything is allowed. `prompt_paid`: another answer to the same prompt pays for it. `address`:
    where the call comes from, without its port; empty: from this router itself."""

    tenant: str | None = None
    fallback: str = ""
    account: Account | None = None
    prompt_paid: bool = False
    address: str = ""

    @property
    def caller(self) -> str:
        """Who is to have no more than its part of what the router holds: a key, or an address where no keys are asked for; a tenant's name
        costs nothing there."""
        return self.key_id or self.address

    @property
    def key_id(self) -> str:
        """Empty: no key was shown, because none is asked for."""
        return "" if self.account is None else self.account.key.id

    def again(self) -> Identity:
        """The same, for a further answer to a prompt."""
        return self if self.prompt_paid or self.account is None else replace(self, prompt_paid=True)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around one call of a client that costs something, whatever number of answers it asks for. Raises Refused."""
        if self.account is None:
            yield
            return
        with self.account.calling():
            yield

    def check_solvent(self) -> None:
        """Before a prompt is even tokenized. Raises Refused for a key that has no token left."""
        if self.account is not None:
            self.account.check_tokens(1, "any prompt")

    @contextmanager
    def spending(self, num_prompt: int) -> Iterator[Spending]:
        """Around one answer to a prompt of so many tokens. Raises Refused, InvalidRequest."""
        if self.account is None:
            yield Spending()
            return
        with self.account.spending(0 if self.prompt_paid else num_prompt) as spending:
            yield spending

    def complete(self, request: inference_pb2.GenerateRequest) -> None:
        """What the key says and the request leaves open."""
        if self.account is not None and not request.request_class and self.account.key.most_urgent is RequestClass.BATCH:
            request.request_class = inference_pb2.REQUEST_CLASS_BATCH

    def check_class(self, wanted: RequestClass) -> None:
        """Raises PermissionDenied."""
        if self.account is None:
            return
        most_urgent = self.account.key.most_urgent
        if wanted < most_urgent:
            raise PermissionDenied(
                f"this API key's requests may be {most_urgent.name.lower()} at best, and this one is {wanted.name.lower()}; ask for less"
            )

    def headers(self) -> dict[str, str]:
        """What is left of the key's limits."""
        return {} if self.account is None else self.account.headers()


NOBODY = Identity()
