"""The servers of a session: attached to, or launched and owned, each as a ready Target."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from pytest_kvcache.cards import Cards, find_cards, held
from pytest_kvcache.engines import Dialect
from pytest_kvcache.errors import UsageError
from pytest_kvcache.measure import Target
from pytest_kvcache.observe.gpu import read_gpus
from pytest_kvcache.observe.scrape import detect_endpoint
from pytest_kvcache.quality.harness import check_tasks
from pytest_kvcache.quantities import Missing
from pytest_kvcache.server.endpoint import Endpoint, check_ready, parse_endpoint
from pytest_kvcache.server.launch import LaunchedServer, launch, parse_command
from pytest_kvcache.server.shown import shown_command
from pytest_kvcache.settings import Settings

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def is_address(text: str) -> bool:
    """Return whether a side is named by its address and not by a command."""
    return re.match(r"https?://", text) is not None


class Servers:
    """Opens the servers of a session, and keeps the cards that launched ones run on until ``close``. ``notes`` is what the verdict must say."""

    def __init__(self, settings: Settings, dialects: Sequence[Dialect], provenance: Mapping[str, str], say: Callable[[str], None]) -> None:
        self.settings = settings
        self.notes: list[str] = []
        self._dialects = dialects
        self._provenance = dict(provenance)
        self._say = say
        self._launched: dict[int, LaunchedServer] = {}
        self._cards: dict[tuple[str, ...], Cards] = {}
        self._held = ExitStack()
        self._tasks_checked: set[str] = set()

    def attach(self, urls: Sequence[str], side: str) -> Target:
        """Return the servers at ``urls`` as one Target. Raises what endpoint and detection raise."""
        endpoints = [check_ready(parse_endpoint(url, self.settings), min(self.settings.ready_timeout_s, 60.0)) for url in urls]
        if len({endpoint.root for endpoint in endpoints}) != len(endpoints):
            raise UsageError("the same endpoint was given twice", where=", ".join(e.shown for e in endpoints), hint="name each replica once")
        target = self._target(endpoints, side)
        if all(urlsplit(endpoint.root).hostname in _LOOPBACK for endpoint in endpoints):
            cards = read_gpus()
            if not isinstance(cards, Missing) and len(cards) == 1:  # of several it is not known from here which the server uses
                target = dataclasses.replace(target, gpus=Cards(cards, self.settings, named=False).facts)
        return target

    def open(self, text: str, side: str, stack: ExitStack, log: Path) -> Target:
        """Launch ``text`` (or attach, where it is a URL) and return it as a Target that ``stack`` stops. Raises what launching raises."""
        if is_address(text):
            return self.attach([text], side)
        spec = parse_command(text)
        if spec.engine and self.settings.gpus:
            raise UsageError(f"--kv-gpus was given, and the engine {spec.engine} of ours runs on the CPU", hint="leave --kv-gpus out")
        # an engine of ours runs on the CPU
        cards = None if spec.engine else self._ready_cards(spec.env)
        is_default = not (self.settings.launch or side)
        self._say("starting the embedded engine (llama.cpp)" if is_default else f"starting {side or 'the server'}: {shown_command(text)}")
        server = stack.enter_context(launch(text, self.settings, log, env=cards.environment if cards is not None else {}))
        target = self._target([server.endpoint], side)
        self._launched[id(target.endpoints)] = server
        return dataclasses.replace(
            target,
            command=tuple(server.command),
            fresh=True,
            embedded=bool(server.engine),
            launch_id=secrets.token_hex(4),
            gpus=cards.facts if cards is not None else (),
        )

    def check(self, target: Target) -> None:
        """Raise LaunchFailed, with the cause out of its log, where a server that we started has died."""
        server = self._launched.get(id(target.endpoints))
        if server is not None:
            server.check()

    def close(self) -> None:
        """Let go of the cards; the servers themselves end with their stacks."""
        self._held.close()

    def _ready_cards(self, environment: Mapping[str, str]) -> Cards | None:
        """Return the cards of a launch, held and free; None where there are none to watch."""
        found = find_cards(self.settings, environment)
        if found is None:
            return None
        key = tuple(row.uuid for row in found.rows)
        if key not in self._cards:
            taken = {uuid for other in self._cards for uuid in other}
            fresh = dataclasses.replace(found, rows=[row for row in found.rows if row.uuid not in taken])
            self._held.enter_context(held(fresh, self._say))
            self._cards[key] = found
        cards = self._cards[key]
        self.notes += [note for note in cards.make_ready() if note not in self.notes]
        return cards

    def _target(self, endpoints: Sequence[Endpoint], side: str) -> Target:
        dialects = [detect_endpoint(endpoint, self.settings.engine, self._dialects) for endpoint in endpoints]
        if self.settings.quality_tasks and side not in self._tasks_checked:  # what cannot be asked is said before minutes of load
            check_tasks(endpoints[0], self.settings)
            self._tasks_checked.add(side)
        return Target(tuple(endpoints), tuple(dialects), side=side, provenance=self._provenance)
