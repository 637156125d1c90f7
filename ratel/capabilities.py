"""The tools a model is given: search, invoke, and the reading of skills; and the `Ratel` that they are tools of.

A model has three schemas before it instead of hundreds, and gets those it asks for with the hits of a search. What
goes wrong on its way comes back as a result that says so (``isError``), not as an exception: the model can mend its
call, the loop around it can not.

The names on the wire are camelCase, as in JSON Schemas that models have seen, and are those of the TypeScript SDK that
this follows, so that a prompt written for one fits the other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ratel.catalog import (
    RESERVED_IDS,
    TOP_LIMIT,
    TOP_SKILLS,
    TOP_TOOLS,
    Arguments,
    SearchHit,
    Skill,
    SkillCatalog,
    Tool,
    ToolCatalog,
    clamp,
    describe,
    elapsed,
)
from ratel.trace import RatelError
from ratel.transports import UnauthorizedError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from ratel.ranking import Embedding

_SEARCH, _INVOKE, _READ = RESERVED_IDS

# Characters of a description in a list: enough to choose by, and a hundred of them still no page.
LINE_LIMIT = 160

_SEARCH_DESCRIPTION = (
    "Find out what you can do here. Most of the tools you have are not in your list: describe what you want to get "
    "done, in plain words, and the tools that fit come back with the schema of their arguments; run one with "
    "invoke_tool. Search before you decline a request, before you make do with a more general tool, and before you "
    "plan work of several steps."
)
_SKILLS_DESCRIPTION = (
    " Skills come back, too: instructions, tried before, for a kind of work. When one fits, read it with "
    "get_skill_content first, then follow it. They are counted apart from the tools, and take no place of theirs."
)
_SERVERS_DESCRIPTION = "\n\nThere are tools of these MCP servers, among others:\n"


@dataclass(frozen=True)
class UpstreamServerInfo:
    """What a model is told of an MCP server whose tools are in the catalog.

    ``name`` is that of its registration, what stands before the first ``__`` of its tools' ids. ``description`` and
    ``instructions`` (from its handshake) go along with hits among its tools; ``tool_count`` and ``needs_auth``, which
    tells that it answers to nobody before somebody logs in, are for the line that lists it.
    """

    name: str
    description: str | None = None
    instructions: str | None = None
    tool_count: int | None = None
    needs_auth: bool = False


def format_upstream_line(info: UpstreamServerInfo) -> str:
    """A server in a list: ``- <name> — <description> (<n> tools) (auth required)``, without what is not known."""
    line = f"- {info.name}"
    if info.description and info.description.strip():
        line += f" — {_one_line(info.description)}"
    if info.tool_count is not None:
        line += f" ({info.tool_count} tools)"
    return line + (" (auth required)" if info.needs_auth else "")


def _one_line(text: str) -> str:
    """A text on one line of 160 characters at most, cut between words where there is a gap not too far back."""
    text = " ".join(text.split())
    if len(text) <= LINE_LIMIT:
        return text
    cut = text[: LINE_LIMIT - 1]
    gap = cut.rfind(" ") if text[LINE_LIMIT - 1] != " " else len(cut)
    return (cut[:gap] if gap > LINE_LIMIT // 2 else cut).rstrip() + "…"


def _server_of(tool_id: str) -> str:
    """The server that a tool is of, by its id; a tool of no server is a server of itself."""
    return tool_id.partition("__")[0] or tool_id


def _failed(error: str, **more: object) -> dict[str, object]:
    return {"error": error, "isError": True, **more}


def search_capabilities_tool(
    catalog: ToolCatalog, skills: SkillCatalog | None = None, *, upstream_servers: Iterable[UpstreamServerInfo] = ()
) -> Tool:
    """The tool that finds tools, and skills if there are any by now.

    Hits are grouped by server, in the order of each group's best; ``upstream_servers`` are listed in the description
    of the tool, and what is told of them goes along with their group. The tools that a skill found uses come along
    with score 0, however many tools were asked for.
    """
    servers = {info.name: info for info in upstream_servers}
    with_skills = skills is not None and len(skills) > 0

    def execute(arguments: Arguments) -> object:
        since = time.monotonic()
        query = arguments.get("query")
        if not isinstance(query, str):
            return _failed("search_capabilities needs query, a string that describes what you want to do")
        most = clamp(arguments.get("topKTools"), TOP_TOOLS)
        found: list[tuple[Skill, float]] = []
        try:
            hits = catalog.ranked(query, most, "agent")
            if skills is not None:
                found = skills.ranked(query, arguments.get("topKSkills"), "agent")
        except RatelError as e:  # the embedding of the query
            catalog.trace.record("gateway_error", tool_id=_SEARCH, error=describe(e))
            return _failed(f"search failed: {describe(e)}")
        count = len(hits)
        seen = {tool.id for tool, _ in hits}
        for skill, _ in found:
            for tool_id in skill.tools:
                tool = None if tool_id in seen else catalog.get(tool_id)
                if tool is not None:
                    seen.add(tool_id)
                    hits.append((tool, 0.0))
        catalog.trace.record(
            "gateway_search", query=query, top_k=most, hits=count, skills=len(found), took_ms=elapsed(since)
        )
        return {
            "tools": {"groups": _groups(hits, servers)},
            "skills": [
                {"skillId": skill.id, "score": score, "description": _one_line(skill.description)}
                for skill, score in found
            ],
        }

    description = _SEARCH_DESCRIPTION
    if with_skills:
        description += _SKILLS_DESCRIPTION
    if servers:
        description += _SERVERS_DESCRIPTION + "\n".join(map(format_upstream_line, servers.values()))
    properties: dict[str, object] = {
        "query": {"type": "string", "description": "what you want to do, in plain words"},
        "topKTools": _count_schema("tools", TOP_TOOLS),
    }
    if with_skills:
        properties["topKSkills"] = _count_schema("skills", TOP_SKILLS)
    return Tool(
        id=_SEARCH,
        name=_SEARCH,
        description=description,
        input_schema={"type": "object", "properties": properties, "required": ["query"]},
        output_schema=_SEARCH_OUTPUT,
        execute=execute,
    )


def _groups(hits: Iterable[tuple[Tool, float]], servers: Mapping[str, UpstreamServerInfo]) -> list[dict[str, object]]:
    """Hits by server, a group where its first hit is."""
    groups: dict[str, list[dict[str, object]]] = {}
    for tool, score in hits:
        groups.setdefault(_server_of(tool.id), []).append(
            {"toolId": tool.id, "score": score, "description": tool.description, "inputSchema": tool.input_schema}
        )
    return [{"server": _server(name, servers.get(name)), "hits": of_server} for name, of_server in groups.items()]


def _server(name: str, info: UpstreamServerInfo | None) -> dict[str, object]:
    server: dict[str, object] = {"name": name}
    if info is not None and info.description:
        server["description"] = info.description
    if info is not None and info.instructions:
        server["instructions"] = info.instructions
    return server


def _count_schema(what: str, default: int) -> dict[str, object]:
    text = f"how many {what} to return at most (default {default})"
    return {"type": "integer", "minimum": 1, "maximum": TOP_LIMIT, "description": text}


def _object(properties: Mapping[str, object], required: Sequence[str] = ()) -> dict[str, object]:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


_STRING, _NUMBER, _BOOLEAN = {"type": "string"}, {"type": "number"}, {"type": "boolean"}
_SERVER_OUTPUT = _object({"name": _STRING, "description": _STRING, "instructions": _STRING}, ["name"])
_HIT_OUTPUT = _object(
    {"toolId": _STRING, "score": _NUMBER, "description": _STRING, "inputSchema": {"type": "object"}},
    ["toolId", "score", "description", "inputSchema"],
)
_GROUP_OUTPUT = _object({"server": _SERVER_OUTPUT, "hits": {"type": "array", "items": _HIT_OUTPUT}}, ["server", "hits"])
_SKILL_OUTPUT = _object(
    {"skillId": _STRING, "score": _NUMBER, "description": _STRING}, ["skillId", "score", "description"]
)
# Nothing is required of a result, as one that tells of an error has nothing else.
_SEARCH_OUTPUT = _object(
    {
        "tools": _object({"groups": {"type": "array", "items": _GROUP_OUTPUT}}, ["groups"]),
        "skills": {"type": "array", "items": _SKILL_OUTPUT},
        "error": _STRING,
        "isError": _BOOLEAN,
    }
)


def invoke_tool_tool(catalog: ToolCatalog) -> Tool:
    """The tool that calls a tool by its id. It never raises: a failure is a result that says so.

    Arguments that were not put under ``args``, as models sometimes do, are taken from beside ``toolId``.
    """

    def failed(tool_id: str, error: str, result: dict[str, object]) -> dict[str, object]:
        catalog.trace.record("gateway_error", tool_id=tool_id, error=error)
        return result

    def execute(arguments: Arguments) -> object:
        since = time.monotonic()
        tool_id, given = arguments.get("toolId"), arguments.get("args")
        if not isinstance(tool_id, str):
            text = "invoke_tool needs toolId, the id of a tool that search_capabilities found"
            return failed("", "no toolId", _failed(text))
        if tool_id not in catalog:
            text = f"unknown toolId: {tool_id}. Use search_capabilities to find the tools there are."
            return failed(tool_id, "unknown toolId", _failed(text))
        if given is None:
            given = {key: value for key, value in arguments.items() if key not in ("toolId", "args")}
        if not isinstance(given, Mapping):
            text = f"invalid args for {tool_id}: args must be an object that holds the arguments of the tool"
            return failed(tool_id, "invalid args", _failed(text))
        try:
            result = catalog.invoke(tool_id, given)
        except Exception as e:  # noqa: BLE001 - a tool raises what it likes, and the loop of the model goes on
            if _is_unauthorized(e):
                return failed(tool_id, "needs_auth", _needs_auth(tool_id))
            return failed(tool_id, describe(e), _failed(f"tool {tool_id} threw: {describe(e)}"))
        catalog.trace.record("gateway_invoke", tool_id=tool_id, took_ms=elapsed(since))
        return result

    return Tool(
        id=_INVOKE,
        name=_INVOKE,
        description=(
            "Run a tool that search_capabilities found. Give its id as toolId, and its arguments, as its schema asks "
            "for them, as one object in args. A result with isError tells what went wrong: mend the call, or search "
            "for another tool."
        ),
        input_schema=_object(
            {
                "toolId": {"type": "string", "description": "the toolId of a hit of search_capabilities"},
                "args": {
                    "type": "object",
                    "description": "the arguments of the tool, by its inputSchema",
                    "additionalProperties": True,
                },
            },
            ["toolId", "args"],
        ),
        output_schema={"type": "object"},
        execute=execute,
    )


def _is_unauthorized(error: BaseException | None) -> bool:
    """Whether a server answered 401, be it under an error that says more."""
    while error is not None:
        if isinstance(error, UnauthorizedError):
            return True
        error = error.__cause__
    return False


def _needs_auth(tool_id: str) -> dict[str, object]:
    upstream = _server_of(tool_id)
    hint = f"{upstream} asks for credentials, which you cannot give: tell the user to authorize {upstream} again"
    return _failed("needs_auth", upstream=upstream, hint=hint)


def get_skill_content_tool(skills: SkillCatalog) -> Tool:
    """The tool that reads a skill by its id. It never raises: an unknown id is a result that says so."""

    def execute(arguments: Arguments) -> object:
        skill_id = arguments.get("skillId")
        skill = skills.get(skill_id) if isinstance(skill_id, str) else None
        if skill is not None:
            return {"body": skill.body}
        skills.trace.record("gateway_error", skill_id=skill_id, error="unknown skillId")
        if not isinstance(skill_id, str):
            return _failed("get_skill_content needs skillId, the id of a skill that search_capabilities found")
        return _failed(f"unknown skillId: {skill_id}. Use search_capabilities to find the skills there are.")

    return Tool(
        id=_READ,
        name=_READ,
        description=(
            "Read a skill that search_capabilities found: instructions for a kind of work. Give its id as skillId, "
            "read what comes back to its end, and follow it."
        ),
        input_schema=_object(
            {"skillId": {"type": "string", "description": "the skillId of a skill that search_capabilities found"}},
            ["skillId"],
        ),
        output_schema=_object({"body": _STRING, "error": _STRING, "isError": _BOOLEAN}),
        execute=execute,
    )


class Tools:
    """The tools of a `Ratel`; what needs more than this is in ``catalog``."""

    def __init__(self, catalog: ToolCatalog) -> None:
        self.catalog = catalog

    def register(self, *tools: Tool) -> None:
        """Take tools in, as `ToolCatalog.register` does."""
        self.catalog.register(*tools)

    def search(self, query: str, top_k: object = TOP_TOOLS) -> list[SearchHit]:
        """The tools that fit a query best, as `ToolCatalog.search` finds them."""
        return self.catalog.search(query, top_k)

    def invoke(self, tool_id: str, arguments: Mapping[str, object] | None = None) -> object:
        """Call a tool and return its result, as `ToolCatalog.invoke` does."""
        return self.catalog.invoke(tool_id, arguments)


class Ratel:
    """Tools and skills of one host, ranked by one method. A context manager: leaving it closes the servers.

    ``tools`` has ``register``, ``search``, ``invoke`` and the ``catalog`` that servers are registered in; ``skills`` is
    a `SkillCatalog`. Any thread may use it.
    """

    def __init__(
        self,
        method: str = "bm25",
        embedding: Embedding | None = None,
        *,
        trace_file: str | os.PathLike[str] | None = None,
    ) -> None:
        catalog = ToolCatalog(method, embedding, trace_file=trace_file)
        self.tools = Tools(catalog)
        self.skills = SkillCatalog(method, embedding, trace=catalog.trace)

    def model_tools(self) -> list[Tool]:
        """The three tools to give a model. Of skills it is told when there are some by now: ask anew for each turn."""
        return [
            search_capabilities_tool(self.tools.catalog, self.skills),
            invoke_tool_tool(self.tools.catalog),
            get_skill_content_tool(self.skills),
        ]

    def close(self) -> None:
        """Close the connections of all servers registered, as `ToolCatalog.close` does."""
        self.skills.close()
        self.tools.catalog.close()

    def __enter__(self) -> Ratel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def ratel(
    method: str = "bm25", embedding: Embedding | None = None, *, trace_file: str | os.PathLike[str] | None = None
) -> Ratel:
    """A new `Ratel`.

    ``method`` is "bm25", which needs nothing; or "semantic" or "hybrid", which need an ``embedding``: a function from
    a list of texts to a list of vectors, or ``{"url", "model", "api_key_env"?}`` for an OpenAI-compatible endpoint.
    Trace events are appended to ``trace_file`` as JSON Lines, when it is given. Raises ValueError.
    """
    return Ratel(method, embedding, trace_file=trace_file)
