"""`twostep chat`: a conversation, at a terminal or through a pipe."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from typing import cast

from twostep.cli._connect import client_of
from twostep.cli._flags import sampling_of, urgency_of
from twostep.client import Client, Message, SamplingOptions
from twostep.errors import TwostepError

_PROMPT = "> "


def run(args: argparse.Namespace) -> int:
    with client_of(args) as client:
        # Said now, not after the first question.
        names = [model.name for model in client.models(timeout=min(10.0, args.timeout))]
        terminal = sys.stdin.isatty()
        if terminal:
            # Line editing and history for input().
            importlib.import_module("readline")
            print(f"{args.model or ', '.join(names) or 'no model yet'} at {args.target}")
            print("Ctrl-C cancels an answer, Ctrl-D leaves, /new begins again.")
        return Conversation(client, args, terminal).run()


class Conversation:
    """Turns until the input ends. At a terminal an error ends the turn, in a pipe the conversation."""

    def __init__(self, client: Client, args: argparse.Namespace, terminal: bool) -> None:
        self._client, self._model, self._terminal = client, args.model, terminal
        self._migrate = not args.no_migrate
        self._urgency = urgency_of(args)
        self._sampling = cast(SamplingOptions, sampling_of(args))
        self._first = [Message("system", args.system)] if args.system else []
        self._messages = list(self._first)

    def run(self) -> int:
        while True:
            try:
                line = input(_PROMPT if self._terminal else "").strip()
            except EOFError:
                if self._terminal:
                    print()
                return 0
            except KeyboardInterrupt:
                print()
                continue
            if line == "/new":
                self._messages = list(self._first)
            elif line:
                try:
                    self._turn(line)
                except TwostepError as error:
                    self._messages.pop()
                    if not self._terminal:
                        raise
                    print(f"\ntwostep: {error.message}", file=sys.stderr)

    def _turn(self, question: str) -> None:
        self._messages.append(Message("user", question))
        started = time.monotonic()
        first = last = started
        answer = self._client.chat(self._messages, model=self._model, migrate=self._migrate, **self._urgency, **self._sampling)
        try:
            for piece in answer:
                last = time.monotonic()
                if first == started:
                    first = last
                print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            answer.cancel()
            if not self._terminal:
                raise
            print(" [cancelled]", end="")
        print()
        if answer.text:
            self._messages.append(Message("assistant", answer.text))
        else:
            self._messages.pop()
        num_tokens = len(answer.token_ids)
        if self._terminal and num_tokens:
            rate = f", {(num_tokens - 1) / (last - first):.1f} tokens/s" if last > first else ""
            cached = f", {answer.usage.cached_tokens} of {answer.usage.prompt_tokens} prompt tokens cached" if answer.finish_reason else ""
            print(f"[{num_tokens} tokens{rate}, first after {first - started:.2f} s{cached}]", file=sys.stderr)
