"""Registering servers: whole or not at all, again in one step, and what is recorded of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from conftest import alive, eventually, fake_stdio
from web_server import HANG, Exchange, Request, free_port

import ratel
import ratel.client
import ratel.transports
from ratel import (
    EmbeddingError,
    McpError,
    McpServerHandle,
    McpToolsListError,
    Rat,
    Ratel,
    RatelError,
    SearchHit,
    Sse,
    Stdio,
    StreamableHttp,
    Tool,
    ToolCatalog,
    TransportError,
    UnauthorizedError,
    register_mcp_server,
)

if TYPE_CHECKING:
    from web_server import WebServer

    Servers = Callable[[Callable[[Exchange, Request], None]], WebServer]

NO_METHOD = {"code": -32601, "message": "Method not found"}


@pytest.fixture
def r(nothing_left: None) -> Iterator[Ratel]:
    """A Ratel whose servers are gone after the test."""
    with ratel.ratel() as made:
        yield made


def text(result: object) -> str:
    """The text of a result of a fake server."""
    assert isinstance(result, dict)
    return str(result["content"][0]["text"])


def kinds(catalog: ToolCatalog) -> list[object]:
    """The types of the trace events so far."""
    return [event["type"] for event in catalog.drain_trace_events()]


# --- What is registered ------------------------------------------------------------------------------


def test_the_tools_of_a_server_are_found_and_called(r: Ratel) -> None:
    handle = register_mcp_server(r.tools.catalog, name="fake", transport=fake_stdio())
    assert handle.tool_ids == ["fake__echo", "fake__hang"]
    assert handle.server_instructions == "Use me well"
    [hit] = r.tools.search("give back some arguments")
    assert hit.tool_id == "fake__echo"
    result = r.tools.invoke("fake__echo", {"a": [1, {"b": None}]})
    assert isinstance(result, dict)
    assert result["arguments"] == {"a": [1, {"b": None}]}
    assert result["isError"] is False


def test_they_rank_beside_the_tools_of_the_host(r: Ratel) -> None:
    register_mcp_server(r.tools.catalog, name="a", transport=fake_stdio(tools=["read_weather"]))
    register_mcp_server(r.tools.catalog, name="b", transport=fake_stdio(tools=["send_mail"]))
    schema: Mapping[str, object] = {"type": "object"}
    r.tools.register(Tool("weather", "weather", "Tell the weather", schema, schema, lambda arguments: "sunny"))
    assert {hit.tool_id for hit in r.tools.search("the weather")} == {"weather", "a__read_weather"}
    assert r.tools.invoke("weather") == "sunny"


def test_what_a_tool_lacks_is_filled_in(r: Ratel) -> None:
    pages = {"null": {"tools": [{"name": "bare"}, {"name": "full", "description": "d", "outputSchema": {"a": 1}}]}}
    register_mcp_server(r.tools.catalog, name="s", transport=fake_stdio(pages=pages))
    bare, full = r.tools.catalog.get("s__bare"), r.tools.catalog.get("s__full")
    assert bare is not None
    assert full is not None
    assert (bare.name, bare.description, bare.output_schema) == ("bare", "", {"type": "object"})
    assert (full.description, full.output_schema) == ("d", {"a": 1})
    assert r.tools.search("bare")[0].tool_id == "s__bare"


def test_of_tools_of_one_name_the_last_counts(r: Ratel) -> None:
    pages = {
        "null": {"tools": [{"name": "t", "description": "first"}, {"name": "u"}], "nextCursor": "1"},
        "1": {"tools": [{"name": "t", "description": "last"}]},
    }
    handle = register_mcp_server(r.tools.catalog, name="s", transport=fake_stdio(pages=pages))
    assert handle.tool_ids == ["s__t", "s__u", "s__t"]
    tool = r.tools.catalog.get("s__t")
    assert tool is not None
    assert tool.description == "last"
    assert len(r.tools.catalog) == 2


@pytest.mark.parametrize("name", ["", "a__b", "a_", "__", "_", None, 5])
def test_a_name_that_would_be_misread_is_refused_before_anything_is_started(r: Ratel, name: Any) -> None:
    with pytest.raises(ValueError, match=r"^a server's name is not empty, holds no __ and does not end in _: not "):
        register_mcp_server(r.tools.catalog, name=name, transport=Stdio("no-such-command"))


def test_names_that_look_alike_are_kept_apart(r: Ratel) -> None:
    for name in ("a", "a_b", "_a"):
        pages = {"null": {"tools": [{"name": "_t"}]}}
        assert register_mcp_server(r.tools.catalog, name=name, transport=fake_stdio(pages=pages)).tool_ids == [
            f"{name}___t"
        ]
    register_mcp_server(r.tools.catalog, name="a", transport=fake_stdio(pages={"null": {"tools": []}}))
    assert sorted(r.tools.catalog.tool_ids()) == ["_a___t", "a_b___t"]


def test_a_failed_call_is_recorded_and_raised(r: Ratel) -> None:
    register_mcp_server(r.tools.catalog, name="s", transport=fake_stdio(tools=["fail", "die"]))
    with pytest.raises(McpError) as caught:
        r.tools.invoke("s__fail", {"code": -32602, "message": "bad", "data": 1})
    assert (caught.value.code, caught.value.data) == (-32602, 1)
    with pytest.raises(TransportError, match="exited with status 7"):
        r.tools.invoke("s__die")
    first, second = [event for event in r.tools.catalog.drain_trace_events() if event["type"] == "upstream_error"]
    assert (first["server"], first["tool_id"], first["error"]) == ("s", "s__fail", "bad (-32602)")
    assert str(second["error"]).endswith("the end of me")


def test_through_the_tool_of_a_model_a_failure_is_a_result(r: Ratel, web_server: Servers) -> None:
    def respond(exchange: Exchange, request: Request) -> None:
        if request.message["method"] == "server/discover":
            exchange.result({"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}})
        elif request.message["method"] == "tools/list":
            exchange.result({"tools": [{"name": "t"}]})
        else:
            exchange.answer(status=401)

    register_mcp_server(r.tools.catalog, name="web", transport=StreamableHttp(web_server(respond).url))
    register_mcp_server(r.tools.catalog, name="s", transport=fake_stdio(tools=["fail"]))
    invoke = next(tool for tool in r.model_tools() if tool.id == "invoke_tool")
    failed = invoke.execute({"toolId": "s__fail", "args": {"code": 1, "message": "bad"}})
    assert failed == {"error": "tool s__fail threw: bad (1)", "isError": True}
    refused = invoke.execute({"toolId": "web__t", "args": {}})
    assert isinstance(refused, dict)
    assert (refused["error"], refused["isError"], refused["upstream"]) == ("needs_auth", True, "web")
    with pytest.raises(UnauthorizedError):
        r.tools.invoke("web__t")


def test_a_result_with_is_error_is_a_result(r: Ratel) -> None:
    register_mcp_server(r.tools.catalog, name="s", transport=fake_stdio(tools=["result"]))
    wrong = {"content": [], "isError": True, "structuredContent": {"not": "checked"}}
    assert r.tools.invoke("s__result", wrong) == wrong


# --- Closing -----------------------------------------------------------------------------------------


def test_after_close_the_tools_stay_listed_and_raise(r: Ratel) -> None:
    with register_mcp_server(r.tools.catalog, name="s", transport=fake_stdio()) as handle:
        pid = about_pid(handle)
    handle.close()
    assert not alive(pid)
    assert [hit.tool_id for hit in r.tools.search("arguments")] == ["s__echo"]
    with pytest.raises(TransportError) as caught:
        r.tools.invoke("s__echo")
    assert str(caught.value) == "MCP server 's' was closed: register it again to call its tools"


def about_pid(handle: McpServerHandle) -> int:
    """The process of a fake server."""
    about = handle.call("about", {})["about"]
    assert isinstance(about, dict)
    return int(about["pid"])


def test_a_ratel_closes_its_handles(nothing_left: None) -> None:
    with ratel.ratel() as r:
        pids = [
            about_pid(register_mcp_server(r.tools.catalog, name=name, transport=fake_stdio())) for name in ("a", "b")
        ]
        assert all(map(alive, pids))
    assert not any(map(alive, pids))
    with pytest.raises(RatelError, match="closed"):
        register_mcp_server(r.tools.catalog, name="c", transport=fake_stdio())


# --- All or nothing ----------------------------------------------------------------------------------


class _Failing:
    """A registration that fails: its transport, and how. ``start`` starts what it needs."""

    def __init__(self, error: type[Exception], said: str, transport: Callable[[Servers], Any]) -> None:
        self.error = error
        self.said = said
        self.transport = transport


def _deaf_web(exchange: Exchange, request: Request) -> None:
    exchange.wait_closed()


PAGE_3 = {
    "null": {"tools": [{"name": "a"}], "nextCursor": "1"},
    "1": {"tools": [{"name": "b"}], "nextCursor": "2"},
    "2": {"error": {"code": -32603, "message": "worn out"}},
}
EXIT = "import sys; sys.exit('no configuration')"
GARBAGE = "import sys\nfor line in sys.stdin: print('?', flush=True)"

FAILING = {
    "refused": _Failing(
        TransportError, "unreachable: connection refused", lambda _: StreamableHttp(f"http://127.0.0.1:{free_port()}/")
    ),
    "refused stream": _Failing(
        TransportError, "unreachable: connection refused", lambda _: Sse(f"http://127.0.0.1:{free_port()}/")
    ),
    "no bundle": _Failing(TransportError, "cannot read the directory", lambda _: Rat("127.0.0.1:1", "no/such/bundle")),
    "no command": _Failing(TransportError, "cannot be started", lambda _: Stdio("no-such-command-anywhere")),
    "exits": _Failing(
        TransportError,
        "exited with status 1: no configuration",
        lambda _: Stdio(sys.executable, ["-I", "-S", "-c", EXIT]),
    ),
    "garbage": _Failing(
        TransportError, "did not answer in time", lambda _: Stdio(sys.executable, ["-I", "-S", "-c", GARBAGE])
    ),
    "initialize refused": _Failing(
        McpError, "not you", lambda _: fake_stdio(probe=NO_METHOD, initialize={"code": -32000, "message": "not you"})
    ),
    "silence": _Failing(TransportError, "did not answer in time", lambda start: StreamableHttp(start(_deaf_web).url)),
    "page 3": _Failing(McpError, "worn out", lambda _: fake_stdio(pages=PAGE_3)),
    "endless": _Failing(McpToolsListError, "more than 64 pages", lambda _: fake_stdio(pages="endless")),
    "reserved": _Failing(TransportError, "something else than tools", lambda _: fake_stdio(pages={"null": {}})),
}


@pytest.mark.parametrize("how", FAILING)
def test_a_failed_registration_leaves_nothing_and_the_earlier_one_works(
    r: Ratel, web_server: Servers, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FAILING[how]
    catalog = r.tools.catalog
    register_mcp_server(catalog, name="s", transport=fake_stdio())
    before = catalog.tool_ids(), r.tools.search("give back the arguments")
    threads = left()
    catalog.drain_trace_events()
    transport = failing.transport(web_server)
    monkeypatch.setattr(ratel.transports, "GRACE_SECONDS", 0.3)
    if how in ("garbage", "silence"):
        monkeypatch.setattr(ratel.client, "PROBE_SECONDS", 0.05)
        monkeypatch.setattr(ratel.client, "CONNECT_SECONDS", 0.2)
    with pytest.raises(failing.error, match=failing.said):
        register_mcp_server(catalog, name="s", transport=transport)
    monkeypatch.undo()
    eventually(lambda: left() == threads)  # those of the earlier registration
    assert kinds(catalog) == []
    assert (catalog.tool_ids(), r.tools.search("give back the arguments")) == before
    assert text(r.tools.invoke("s__echo")) == "echo"


def left() -> int:
    """How many threads of ratel there are."""
    return sum(thread.name.startswith("ratel") for thread in threading.enumerate())


def test_an_embedding_that_fails_leaves_nothing(nothing_left: None) -> None:
    down = False

    def embed(texts: list[str]) -> Sequence[Sequence[float]]:
        if down:
            raise OSError("connection refused")
        return [[float(len(text)), 1.0] for text in texts]

    with ratel.ratel(method="hybrid", embedding=embed) as r:
        register_mcp_server(r.tools.catalog, name="s", transport=fake_stdio())
        threads = left()
        down = True
        with pytest.raises(EmbeddingError, match="failed: connection refused"):
            register_mcp_server(r.tools.catalog, name="s", transport=fake_stdio(tools=["more"]))
        assert left() == threads
        assert r.tools.catalog.tool_ids() == ["s__echo", "s__hang"]
        assert text(r.tools.invoke("s__echo")) == "echo"


def test_an_embedding_endpoint_that_is_down_leaves_nothing(nothing_left: None) -> None:
    endpoint = {"url": f"http://127.0.0.1:{free_port()}/v1/embeddings", "model": "m"}
    threads = left()
    with ratel.ratel(method="semantic", embedding=endpoint) as r:
        with pytest.raises(EmbeddingError, match="connection refused"):
            register_mcp_server(r.tools.catalog, name="s", transport=fake_stdio())
        assert left() == threads
        assert len(r.tools.catalog) == 0


def test_registration_embeds_every_tool_and_again_when_registered_again(nothing_left: None) -> None:
    embedded: list[str] = []

    def embed(texts: list[str]) -> Sequence[Sequence[float]]:
        embedded.extend(texts)
        return [[1.0, float("arguments" in text)] for text in texts]

    with ratel.ratel(method="semantic", embedding=embed) as r:
        for times in (1, 2):
            register_mcp_server(r.tools.catalog, name="s", transport=fake_stdio())
            assert len(embedded) == 2 * times
        assert r.tools.search("arguments")[0].tool_id == "s__echo"


# --- Again -------------------------------------------------------------------------------------------


def test_the_same_name_again_is_a_re_sync(r: Ratel) -> None:
    catalog = r.tools.catalog
    old = register_mcp_server(catalog, name="s", transport=fake_stdio(tools=["gone", "kept"]))
    pid = about_pid(old)
    new = register_mcp_server(catalog, name="s", transport=fake_stdio(tools=["kept", "came"]))
    assert sorted(catalog.tool_ids()) == ["s__came", "s__echo", "s__hang", "s__kept"]
    assert r.tools.search("gone") == []
    assert not alive(pid)
    old.close()  # harmless
    assert text(r.tools.invoke("s__kept")) == "kept"
    new.close()
    with pytest.raises(TransportError, match="was closed"):
        r.tools.invoke("s__kept")


def test_the_old_connection_closes_after_its_calls(r: Ratel) -> None:
    catalog = r.tools.catalog
    old = register_mcp_server(catalog, name="s", transport=fake_stdio(tools=["wait"]))
    pid = about_pid(old)
    results: list[object] = []
    calling = threading.Thread(target=lambda: results.append(r.tools.invoke("s__wait", {"seconds": 0.5})))
    calling.start()
    eventually(lambda: old._calls)
    register_mcp_server(catalog, name="s", transport=fake_stdio(tools=["wait"]))
    assert alive(pid)
    assert not results
    calling.join(HANG)
    assert text(results[0]) == "wait"
    eventually(lambda: not alive(pid))


def test_a_call_that_looked_its_tool_up_before_goes_over_the_new_connection(r: Ratel) -> None:
    catalog = r.tools.catalog
    register_mcp_server(catalog, name="s", transport=fake_stdio())
    looked_up = catalog.get("s__echo")
    register_mcp_server(catalog, name="s", transport=fake_stdio())
    assert looked_up is not None
    assert text(looked_up.execute({})) == "echo"


def test_a_tool_of_the_host_is_no_tool_of_the_server(r: Ratel) -> None:
    schema: Mapping[str, object] = {"type": "object"}
    r.tools.register(Tool("s__mine", "mine", "of the host", schema, schema, lambda arguments: 1))
    for _ in range(2):
        register_mcp_server(r.tools.catalog, name="s", transport=fake_stdio())
    assert "s__mine" in r.tools.catalog


def test_a_search_sees_the_tools_before_or_after_a_re_sync(r: Ratel) -> None:
    catalog = r.tools.catalog
    versions = [[f"number_{n}_of_{version}" for n in range(40)] for version in ("one", "two")]
    register_mcp_server(catalog, name="s", transport=fake_stdio(tools=versions[0]))
    stop = threading.Event()
    seen: set[tuple[str, ...]] = set()

    def search() -> None:
        while not stop.is_set():
            found = sorted(hit.tool_id for hit in r.tools.search("number", 50))
            seen.add(tuple(found))

    searching = threading.Thread(target=search)
    searching.start()
    for version in (1, 0, 1):
        register_mcp_server(catalog, name="s", transport=fake_stdio(tools=versions[version]))
    stop.set()
    searching.join(HANG)
    assert seen <= {tuple(sorted(f"s__{name}" for name in version)) for version in versions}


def test_four_threads_register_search_and_invoke_at_once(r: Ratel) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for step in range(3):
                register_mcp_server(r.tools.catalog, name=f"s{number}", transport=fake_stdio(tools=[f"only{number}"]))
                register_mcp_server(r.tools.catalog, name="shared", transport=fake_stdio(tools=["common"]))
                found = [hit.tool_id for hit in r.tools.search(f"only{number}")]
                if found != [f"s{number}__only{number}"]:
                    wrong.append(found)
                if text(r.tools.invoke(found[0])) != f"only{number}":
                    wrong.append(found)
                if text(r.tools.invoke("shared__common", {"step": step})) != "common":
                    wrong.append("shared")
        except Exception as e:  # noqa: BLE001 - whatever it is, the test tells it
            wrong.append(e)

    before = left()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert wrong == []
    eventually(lambda: left() == before + 5 * 4)  # five servers, of four threads each


# --- Trace -------------------------------------------------------------------------------------------


def test_what_a_registration_and_a_call_record(r: Ratel) -> None:
    catalog = r.tools.catalog
    register_mcp_server(catalog, name="s", transport=fake_stdio())
    r.tools.invoke("s__echo")
    events = catalog.drain_trace_events()
    assert [event["type"] for event in events] == [
        "index_churn",
        "upstream_register",
        "invoke_start",
        "upstream_invoke",
        "invoke_end",
    ]
    assert {key: events[1][key] for key in ("server", "transport", "tool_count")} == {
        "server": "s",
        "transport": "stdio",
        "tool_count": 2,
    }
    assert all(isinstance(event["time"], float) for event in events)
    assert catalog.drain_trace_events() == []


def test_transports_have_their_labels() -> None:
    transports = [fake_stdio(), StreamableHttp("http://a/"), Sse("http://a/"), Rat("a:1", "b")]
    assert [transport.label for transport in transports] == ["stdio", "http", "sse", "rat"]


def test_the_whole_registration_is_one_span(r: Ratel) -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason="opentelemetry-api is not installed here")
    spans: list[tuple[str, dict[str, object], str | None]] = []

    class Span(trace.NonRecordingSpan):  # type: ignore[misc]
        def __init__(self, name: str, attributes: Mapping[str, object]) -> None:
            super().__init__(trace.INVALID_SPAN_CONTEXT)
            self.name = name
            self.attributes = dict(attributes)
            self.error: str | None = None

        def is_recording(self) -> bool:
            return True

        def set_status(self, *args: object, **kwargs: object) -> None:
            pass

        def set_attribute(self, key: str, value: object) -> None:
            self.attributes[key] = value

        def record_exception(self, exception: BaseException, *args: object, **kwargs: object) -> None:
            self.error = type(exception).__name__

        def end(self, end_time: int | None = None) -> None:
            spans.append((self.name, self.attributes, self.error))

    class Tracer(trace.Tracer):  # type: ignore[misc]
        def start_span(self, name: str, *args: object, **kwargs: Any) -> Span:
            return Span(name, kwargs.get("attributes") or {})

        def start_as_current_span(self, name: str, **kwargs: Any) -> Any:
            span = self.start_span(name, attributes=kwargs.get("attributes"))
            return trace.use_span(span, end_on_exit=True)

    class Provider(trace.TracerProvider):  # type: ignore[misc]
        def get_tracer(self, *args: object, **kwargs: object) -> Tracer:
            return Tracer()

    current = trace._TRACER_PROVIDER
    trace._TRACER_PROVIDER = Provider()
    try:
        register_mcp_server(r.tools.catalog, name="s", transport=fake_stdio())
        with pytest.raises(TransportError):
            register_mcp_server(r.tools.catalog, name="t", transport=Stdio("no-such-command-anywhere"))
    finally:
        trace._TRACER_PROVIDER = current
    name = "ratel.upstream.register"
    attributes = {"ratel.upstream.server": "s", "ratel.upstream.transport": "stdio"}
    assert spans == [
        (name, {**attributes, "ratel.upstream.tool_count": 2}, None),
        (name, {**attributes, "ratel.upstream.server": "t"}, "TransportError"),
    ]


def test_it_works_without_opentelemetry(r: Ratel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    register_mcp_server(r.tools.catalog, name="s", transport=fake_stdio())
    assert isinstance(r.tools.search("arguments")[0], SearchHit)
