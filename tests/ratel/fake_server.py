"""An MCP server that misbehaves as a test says, on stdio or behind an HTTP server of the tests.

Run as a program it is a stdio server; its only argument is a JSON object of options:

``probe``      what server/discover is answered: "answer" (the default), "silent", "exit", "late" (once initialize has
               come), or an error object
``initialize`` what initialize is answered: "answer", "silent", "exit" or an error object
``version``    the version a legacy server offers, whatever it was asked for
``supported``  the versions of a DiscoverResult
``tools``      names of tools beside the built-in ones; ``pages``: tools/list results by cursor ("null" for the first)
``log``        a file that every line read is appended to
``garbage``    lines written first, ``stderr`` text written there first
``children``   a file for the process ids of a child and a grandchild, which outlive the end of the input
``deaf``       true: neither the end of the input nor SIGTERM ends it
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

Message = dict[str, Any]

MODERN = "2026-07-28"
NO_METHOD = {"code": -32601, "message": "Method not found"}

TOOLS: list[Message] = [
    {"name": "echo", "description": "Give back the arguments", "inputSchema": {"type": "object"}},
    {"name": "hang", "description": "Never answer", "inputSchema": {"type": "object"}},
]


class FakeServer:
    """Answers messages. ``send`` is called with what the server has to say, from whichever thread it is at."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.waiting: Message | None = None  # a discovery that is answered late
        self.asked: Message = {}  # calls waiting for an answer of the client, by the identifier of our request

    def receive(self, message: Message, send: Callable[[Message], None]) -> None:
        """Take a message."""
        method, identifier = message.get("method"), message.get("id")
        if method is None:
            call = self.asked.pop(str(identifier), None)
            if call is not None:
                send(result(call, {"content": [], "answered": {k: v for k, v in message.items() if k != "jsonrpc"}}))
            return
        if identifier is None:
            return
        if method in ("server/discover", "initialize"):
            self._opening(method, message, send)
            return
        answer = getattr(self, f"_{method.replace('/', '_')}", None)
        if answer is None:
            send(error(message, NO_METHOD))
        else:
            answer(message, send)

    def _opening(self, method: str, message: Message, send: Callable[[Message], None]) -> None:
        how = self.options.get("probe" if method == "server/discover" else "initialize", "answer")
        if isinstance(how, dict):
            send(error(message, how))
        elif how == "late":
            self.waiting = message
        elif how == "exit":
            sys.stderr.write(f"cannot do {method}\n")
            sys.stderr.flush()
            os._exit(3)
        elif how == "answer":
            send(result(message, self._discovery() if method == "server/discover" else self._handshake(message)))
        if method == "initialize" and self.waiting is not None:
            late, self.waiting = self.waiting, None
            send(result(late, self._discovery()))

    def _discovery(self) -> Message:
        return {
            "resultType": "complete",
            "supportedVersions": self.options.get("supported", [MODERN]),
            "capabilities": self.options.get("capabilities", {"tools": {}}),
            "instructions": "Use me well",
            "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "fake", "version": "1"}},
        }

    def _handshake(self, message: Message) -> Message:
        return {
            "protocolVersion": self.options.get("version", message["params"]["protocolVersion"]),
            "capabilities": self.options.get("capabilities", {"tools": {}}),
            "serverInfo": {"name": "fake", "version": "1"},
            "instructions": "Use me well",
        }

    def _tools_list(self, message: Message, send: Callable[[Message], None]) -> None:
        pages = self.options.get("pages")
        cursor = message.get("params", {}).get("cursor")
        if pages is None:
            extra = [{"name": name, "inputSchema": {"type": "object"}} for name in self.options.get("tools", [])]
            send(result(message, {"tools": TOOLS + extra}))
        elif pages == "endless":
            number = int(cursor or 0)
            send(result(message, {"tools": [{"name": f"t{number}"}], "nextCursor": str(number + 1)}))
        else:
            page = pages["null" if cursor is None else cursor]
            send(error(message, page["error"]) if "error" in page else result(message, page))

    def _tools_call(self, message: Message, send: Callable[[Message], None]) -> None:
        name, arguments = message["params"]["name"], message["params"].get("arguments", {})
        content: Message = {"content": [{"type": "text", "text": name}], "isError": False}
        if name == "hang":
            return
        if name == "die":
            sys.stderr.write("x" * 10_000 + "\nthe end of me\n")
            sys.stderr.flush()
            os._exit(7)
        if name == "ask":
            self.asked["q"] = message
            send({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "hm"}})
            send({"jsonrpc": "2.0", "id": "q", "method": arguments["method"], "params": {}})
        elif name == "fail":
            send(error(message, arguments))
        elif name == "result":
            send(result(message, arguments))
        elif name == "wait":
            time.sleep(arguments["seconds"])
            send(result(message, content))
        elif name == "about":
            about = {"pid": os.getpid(), "group": os.getpgid(0), "cwd": os.getcwd(), "env": dict(os.environ)}
            send(result(message, {**content, "about": about}))
        else:
            send(result(message, {**content, "arguments": arguments, "tool": name}))


def result(message: Message, value: object) -> Message:
    """A response."""
    return {"jsonrpc": "2.0", "id": message["id"], "result": value}


def error(message: Message, value: object) -> Message:
    """An error response."""
    return {"jsonrpc": "2.0", "id": message["id"], "error": value}


def main() -> None:
    """Serve on the standard streams."""
    options = json.loads(sys.argv[1])
    output = threading.Lock()

    def send(message: Message) -> None:
        with output:
            os.write(1, json.dumps(message).encode() + b"\n")

    if options.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "children" in options:
        inner = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
        outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}]); {inner}"
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", outer], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        pids = [child.stdout.readline() for _ in range(2)]
        with open(options["children"] + "~", "w") as file:
            file.write("".join(pids))
        os.rename(options["children"] + "~", options["children"])
    sys.stderr.write(options.get("stderr", ""))
    sys.stderr.flush()
    for line in options.get("garbage", []):
        os.write(1, line.encode() + b"\n")
    server = FakeServer(options)
    while line := sys.stdin.buffer.readline():
        if "log" in options:
            with open(options["log"], "ab") as file:
                file.write(line)
        message = json.loads(line)
        threading.Thread(target=server.receive, args=(message, send), daemon=True).start()
    while options.get("deaf"):
        time.sleep(600)
    os._exit(0)


if __name__ == "__main__":
    main()
