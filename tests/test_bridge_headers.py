"""The headers of a request: the forms of values, annotated arguments, the versions of both eras."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Callable

import pytest
from fault_server import Response, result
from harness import ROOT, call, modern, notification

import rat

if TYPE_CHECKING:
    from fault_server import FaultServer, Request
    from harness import Harness


def encoded(text: str) -> str:
    return f"=?base64?{base64.b64encode(text.encode()).decode()}?="


@pytest.mark.parametrize(
    "text", ["", "read_file", "a b", "~!@#$%^&*()", "=?base64?", "=?utf-8?x?=", "x=?base64?x?=", "a  b"]
)
def test_a_printable_value_travels_as_it_is(text: str) -> None:
    assert rat.header_value(text) == text


@pytest.mark.parametrize(
    "text",
    [
        " a",
        "a ",
        "\ta",
        "a\t",
        " ",
        "a\tb",
        "a\r\nX-Evil: 1",
        "\x00",
        "\x7f",
        "ü",
        "\u2028",
        "日本語",
        "😀",
        "=?base64??=",
        "=?base64?YQ==?=",
        "=?base64?not base64?=",
    ],
)
def test_any_other_value_travels_in_base64(text: str) -> None:
    assert rat.header_value(text) == encoded(text)


def test_a_lone_surrogate_travels_as_the_replacement_character() -> None:
    assert rat.header_value("a\ud800b") == encoded("a\ufffdb")
    assert rat.header_value("\udfff") == encoded("\ufffd")


def annotated(name: object, kind: str = "string") -> dict[str, object]:
    return {"type": kind, "x-mcp-header": name}


def test_annotations_are_found_at_any_depth_of_properties() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "object", "properties": {}}}}
    inner["properties"]["b"]["properties"]["c"] = annotated("Deep", "integer")  # type: ignore[index]
    schema = {"type": "object", "properties": {"a": inner, "x": annotated("Flat"), "y": annotated("Yes", "boolean")}}
    assert rat.header_parameters(schema)[0] == {
        "Mcp-Param-Deep": ("a", "b", "c"),
        "Mcp-Param-Flat": ("x",),
        "Mcp-Param-Yes": ("y",),
    }


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a\r\nb", "ü", "a/b", "(a)", 5, None, ["a"], True])
def test_an_annotation_that_is_no_token_is_not_used(name: object) -> None:
    assert rat.header_parameters({"properties": {"x": annotated(name)}})[0] == {}


@pytest.mark.parametrize("kind", ["number", "array", "object", "null", None, ["string"]])
def test_an_annotation_of_another_type_is_not_used(kind: str) -> None:
    assert rat.header_parameters({"properties": {"x": annotated("X", kind)}})[0] == {}


def test_an_annotation_that_is_not_unique_is_used_nowhere() -> None:
    schema = {
        "properties": {"a": annotated("Same"), "b": {"properties": {"c": annotated("sAME")}}, "d": annotated("Other")}
    }
    assert rat.header_parameters(schema)[0] == {"Mcp-Param-Other": ("d",)}


@pytest.mark.parametrize("schema", [None, 5, [], {}, {"properties": 5}, {"properties": {"a": 5}}])
def test_a_schema_without_annotations_asks_for_nothing(schema: object) -> None:
    assert rat.header_parameters(schema)[0] == {}
    assert rat.parameter_headers(rat.header_parameters(schema)[0], {"a": 1}) == {}


def test_an_annotation_of_the_schema_itself_names_no_argument() -> None:
    assert rat.header_parameters(annotated("Root"))[0] == {}


@pytest.mark.parametrize(
    ("value", "header"),
    [
        ("x", "x"),
        ("", ""),
        ("a\r\nb", encoded("a\r\nb")),
        (True, "true"),
        (False, "false"),
        (5, "5"),
        (0, "0"),
        (-7, "-7"),
        (5.0, "5"),
        (-0.0, "0"),
        (1e3, "1000"),
        (2**53 - 1, "9007199254740991"),
        (-(2**53) + 1, "-9007199254740991"),
        (2**53, None),
        (-(2**53), None),
        (float(2**53), None),
        (1e300, None),
        (float("inf"), None),
        (5.5, None),
        (None, None),
        ({}, None),
        ([1], None),
    ],
)
def test_the_value_of_an_annotated_argument(value: object, header: str | None) -> None:
    schema = {"properties": {"x": annotated("X")}}
    assert rat.parameter_headers(rat.header_parameters(schema)[0], {"x": value}) == (
        {} if header is None else {"Mcp-Param-X": header}
    )


@pytest.mark.parametrize("arguments", [None, 5, [], {}, {"a": None}, {"a": 5}, {"a": {"c": 1}}])
def test_an_argument_that_is_absent_has_no_header(arguments: object) -> None:
    schema = {"properties": {"a": {"properties": {"b": annotated("B")}}}}
    assert rat.parameter_headers(rat.header_parameters(schema)[0], arguments) == {}


def test_an_integer_too_long_for_python_has_no_header() -> None:
    arguments = rat.parse_json(b'{"x":' + b"9" * 5000 + b"}")
    assert rat.parameter_headers(rat.header_parameters({"properties": {"x": annotated("X")}})[0], arguments) == {}


def test_every_schema_is_one_of_ratd_and_found_by_its_name() -> None:
    names = sorted(path.stem for path in (ROOT / "schemas").glob("*.json"))
    assert names == [
        "close_window",
        "create_window",
        "list_windows",
        "read_file",
        "read_window",
        "send_keys",
        "send_text",
        "wait_window",
        "write_file",
    ]
    for name in names:
        assert rat.built_in_schema(name) == json.loads((ROOT / "schemas" / f"{name}.json").read_bytes())
        # None is annotated today.
        assert rat.header_parameters(rat.built_in_schema(name))[0] == {}


@pytest.mark.parametrize("name", ["", "none", "../schemas/read_file", "read_file\n", "Read_File"])
def test_another_tool_has_no_schema(name: str) -> None:
    assert rat.built_in_schema(name) is None


# On the wire


def initialize_as(version: object) -> Callable[[Request], Response]:
    """A server's ``respond`` which settles on a version at initialize."""

    def respond(request: Request) -> Response:
        message = request.message
        if not isinstance(message, dict) or "id" not in message:
            return Response(202, kind="")
        value = {"protocolVersion": version} if message["method"] == "initialize" else {}
        return Response(200, result(message["id"], value))

    return respond


def fields(request: Request) -> dict[str, str]:
    """The fields of MCP, by their names in lower case."""
    return {name.lower(): value for name, value in request.fields if name.lower()[:4] == "mcp-"}


def test_the_request_is_a_post_to_mcp(rat: Harness, fault_server: FaultServer) -> None:
    rat.call(1)
    (request,) = fault_server.requests
    assert request.line == "POST /mcp HTTP/1.1"
    assert request.field("Host") == fault_server.address
    assert request.field("Content-Type") == "application/json"
    assert request.field("Accept") == "application/json, text/event-stream"
    assert request.field("Accept-Encoding") == "identity"
    assert request.field("Content-Length") == str(len(call(1)))
    assert request.field("Transfer-Encoding") is None
    assert request.field("Cookie") is None
    assert fields(request) == {}


def test_the_version_of_initialize_is_kept(rat: Harness, fault_server: FaultServer) -> None:
    fault_server.respond = initialize_as("2025-11-25")
    rat.call(1, "initialize", {"protocolVersion": "2025-06-18"})
    rat.send(notification("notifications/initialized"))
    rat.call(2, "tools/call", {"name": "t"})
    rat.send(b'[{"jsonrpc":"2.0","method":"notifications/x"}]')
    sent = {request.body: fields(request) for request in fault_server.wait_requests(4)}
    versions = [each.pop("mcp-protocol-version", None) for each in sent.values()]
    assert versions == [None, "2025-11-25", "2025-11-25", "2025-11-25"]
    # Before 2026-07-28 no header mirrors a parameter.
    assert list(sent.values()) == [{}, {}, {}, {}]


def test_a_later_initialize_settles_anew(rat: Harness, fault_server: FaultServer) -> None:
    for version in ("2025-06-18", "2025-11-25"):
        fault_server.respond = initialize_as(version)
        rat.call(1, "initialize")
        rat.call(2)
        assert fields(fault_server.requests[-1]) == {"mcp-protocol-version": version}


@pytest.mark.parametrize("version", [None, 5, ["2025-11-25"], {}])
def test_a_version_of_another_type_is_not_kept(rat: Harness, fault_server: FaultServer, version: object) -> None:
    fault_server.respond = initialize_as(version)
    rat.call(1, "initialize")
    rat.call(2)
    assert fields(fault_server.requests[1]) == {}


def test_an_error_to_initialize_settles_on_nothing(rat: Harness, fault_server: FaultServer) -> None:
    error = b'{"jsonrpc":"2.0","id":1,"error":{"code":-32602,"message":"no"}}'
    fault_server.respond = lambda request: Response(200, error)
    rat.call(1, "initialize")
    rat.call(1)
    assert fields(fault_server.requests[1]) == {}


def test_a_message_that_states_its_version_counts_before_what_was_settled(
    rat: Harness, fault_server: FaultServer
) -> None:
    fault_server.respond = initialize_as("2025-11-25")
    rat.call(1, "initialize")
    rat.call(2, "tools/call", modern({"name": "read_file"}))
    rat.call(3, "tools/call", {"name": "read_file"})
    assert [fields(request) for request in fault_server.requests[1:]] == [
        {"mcp-protocol-version": "2026-07-28", "mcp-method": "tools/call", "mcp-name": "read_file"},
        {"mcp-protocol-version": "2025-11-25"},
    ]


@pytest.mark.parametrize(
    ("method", "params", "name"),
    [
        ("tools/call", {"name": "t", "uri": "u"}, "t"),
        ("prompts/get", {"name": "p", "uri": "u"}, "p"),
        ("resources/read", {"name": "n", "uri": "file:///x"}, "file:///x"),
        ("resources/subscribe", {"name": "n", "uri": "file:///x"}, None),
        ("tools/list", {"name": "n"}, None),
        ("tools/call", {"uri": "u"}, None),
        ("tools/call", {"name": ["t"]}, None),
    ],
)
def test_the_name_of_what_a_request_is_for(method: str, params: dict[str, object], name: str | None) -> None:
    message = rat.read_message(call(1, method, modern(params)))
    headers = rat.request_headers(message, None)
    assert headers.get("Mcp-Name") == name
    assert headers["Mcp-Method"] == method
    assert headers["Mcp-Protocol-Version"] == "2026-07-28"


@pytest.mark.parametrize(
    ("version", "mirrors"), [("2026-07-28", True), ("2026-07-29", True), ("2027", True), ("2026-07-27", False)]
)
def test_versions_compare_as_text(version: str, mirrors: bool) -> None:
    message = rat.read_message(call(1))
    headers = rat.request_headers(message, version)
    assert headers["Mcp-Protocol-Version"] == version
    assert ("Mcp-Method" in headers) is mirrors


@pytest.mark.parametrize("version", ["2026-07-28\r\nX-Evil: 1", "2026-07-28ü", "9\x00"])
def test_a_version_that_is_not_printable_is_left_out(version: str) -> None:
    meta = {"_meta": {"io.modelcontextprotocol/protocolVersion": version}}
    headers = rat.request_headers(rat.read_message(call(1, "ping", meta)), None)
    assert "Mcp-Protocol-Version" not in headers
    assert "X-Evil" not in headers


def test_a_batch_carries_the_version_alone() -> None:
    line = b"[" + call(1, "tools/call", modern({"name": "t"})) + b"]"
    message = rat.read_message(line)
    assert "Mcp-Protocol-Version" not in rat.request_headers(message, None)
    headers = rat.request_headers(message, "2026-07-28")
    assert headers["Mcp-Protocol-Version"] == "2026-07-28"
    assert "Mcp-Method" not in headers
    assert "Mcp-Name" not in headers


def test_arguments_annotated_in_a_built_in_schema_become_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    # No schema of ratd is annotated: one that is stands in for the day one will be.
    schema = {"properties": {"path": annotated("Path"), "n": annotated("Count", "integer")}}
    monkeypatch.setattr(rat, "built_in_schema", lambda tool: schema if tool == "t" else None)
    arguments = {"path": "/tmp/a\r\nX-Evil: 1", "n": 5.0, "other": "secret"}
    message = rat.read_message(call(1, "tools/call", modern({"name": "t", "arguments": arguments})))
    headers = rat.request_headers(message, None)
    assert headers["Mcp-Param-Path"] == encoded("/tmp/a\r\nX-Evil: 1")
    assert headers["Mcp-Param-Count"] == "5"
    assert "secret" not in str(headers)
    older = rat.read_message(call(1, "tools/call", {"name": "t", "arguments": arguments}))
    assert not [name for name in rat.request_headers(older, "2025-11-25") if "Param" in name]
