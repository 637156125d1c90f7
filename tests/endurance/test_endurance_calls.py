"""Very many calls through one process, while everything around it fails."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from endurance import Use, accidents, parse, sized, tell
from fault_server import Connection, FaultServer, answer
from harness import call, cancel

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from conftest import StartRat

AT_ONCE = 16


class FailingServer:
    """A server at one address that is restarted, and resets connections at random moments."""

    def __init__(self, side: Path, chance: random.Random) -> None:
        self._side = side
        self._chance = chance
        self.resets = 0
        self._server = FaultServer(side)
        self._server.script = self._serve
        self.address = self._server.address

    def restart(self) -> None:
        """Go down, and come up at the same address."""
        self._server.close()
        self._server = FaultServer(self._side, port=self._server.port)
        self._server.script = self._serve

    def close(self) -> None:
        self._server.close()

    def _serve(self, connection: Connection) -> None:
        if self._chance.random() < 0.05:
            self._reset(connection)
            return
        connection.handshake()
        while (request := connection.request()) is not None:
            accident = self._chance.random()
            response = answer(request).encode()
            if accident < 0.004:
                connection.send(response[: self._chance.randrange(len(response))] if accident < 0.002 else b"")
                self._reset(connection)
                return
            if accident < 0.1:  # so that cancellations find calls waiting
                time.sleep(self._chance.random() / 200)
            connection.send(response)

    def _reset(self, connection: Connection) -> None:
        self.resets += 1
        connection.reset()


def test_every_call_gets_one_answer_whatever_fails(start_rat: StartRat, server_side: Path) -> None:
    """Calls that are not canceled get exactly one answer each, and nothing grows, while 5% are canceled, the server is
    restarted and connections are reset."""
    total, lifetime = sized(2_500, 200_000), sized(600, 5_000)
    chance = accidents()
    server = FailingServer(server_side, chance)
    try:
        rat = start_rat(server.address, level="error")
        rat.allow(sized(120, 3600))
        open_calls: set[int] = set()
        canceled: set[int] = set()
        cancellations: list[tuple[int, int]] = []  # when, in answers read, and what
        sent = answered = results = late = 0
        warm: Use | None = None
        began = time.monotonic()
        while sent < total or open_calls:
            lines: list[bytes] = []
            while sent < total and len(open_calls) < AT_ONCE:
                if sent and sent % lifetime == 0:
                    if lines:
                        break  # what is open is in flight when the server goes down
                    server.restart()
                lines.append(call(sent, "tools/call", {"name": "t", "arguments": {"x": "y" * chance.randrange(500)}}))
                open_calls.add(sent)
                if chance.random() < 0.05:
                    cancellations.append((answered + chance.choice((0, 0, 1, 2, 3, 8)), sent))
                sent += 1
            for due in [each for each in cancellations if each[0] <= answered or sent == total]:
                cancellations.remove(due)
                if due[1] in open_calls:
                    lines.append(cancel(due[1]))
                    open_calls.remove(due[1])
                    canceled.add(due[1])
            if lines:
                rat.send(*lines)
            if not open_calls:
                continue
            response = parse(rat.line())
            assert isinstance(response, dict)
            if response["id"] in canceled:  # it was on its way
                canceled.remove(response["id"])
                late += 1
            else:
                open_calls.remove(response["id"])  # a second answer would not find it
                answered += 1
                results += "result" in response
            if warm is None and sent >= total // 5:
                warm = Use.of(rat.process.pid)
        seconds = time.monotonic() - began
        rat.call("last")
        level = Use.of(rat.process.pid)
        status, rest = rat.finish()
    finally:
        server.close()
    assert status == 0
    assert not rest
    assert results > total * 0.8
    assert late < total * 0.05
    assert server.resets
    if warm is not None and level is not None:
        # Each call and each cancellation, which is relayed too, has a worker and a connection while it lasts.
        assert level.descriptors <= 10 + 3 * AT_ONCE
        assert level.threads <= 10 + 3 * AT_ONCE
        assert level.memory <= warm.memory + (8 << 20)
    tell(
        f"{total:,} calls in {seconds:.0f} s: {results:,} results, {answered - results:,} errors while the server was "
        f"restarted ({(total - 1) // lifetime} times) and connections reset ({server.resets:,}), "
        f"{len(canceled) + late:,} canceled, of which {late:,} had their answer on its way; none unanswered, none "
        f"twice. After a fifth of them: {warm}; at the end: {level}."
    )
