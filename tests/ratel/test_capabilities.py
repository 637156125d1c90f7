"""What a model is given, and what comes back to it, whatever it asks for."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import pytest

from ratel import (
    Ratel,
    RatelError,
    Skill,
    SkillCatalog,
    SkillHit,
    Tool,
    ToolCatalog,
    TransportError,
    UnauthorizedError,
    UpstreamServerInfo,
    format_upstream_line,
    get_skill_content_tool,
    invoke_tool_tool,
    ratel,
    search_capabilities_tool,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SCHEMA: dict[str, object] = {"type": "object", "properties": {"q": {"type": "string"}}}


def a_tool(tool_id: str, description: str = "", execute: Callable[[dict[str, object]], object] = dict) -> Tool:
    """A tool whose name says nothing."""
    return Tool(tool_id, "tool", description, SCHEMA, {"type": "object"}, execute)


def call(tool: Tool, **arguments: object) -> dict[str, object]:
    """The result of a model's tool, which is an object that JSON can hold."""
    result = tool.execute(arguments)
    assert isinstance(result, dict)
    assert json.loads(json.dumps(result)) == result
    return result


def hits(result: dict[str, object]) -> list[tuple[str, list[tuple[str, float]]]]:
    """Groups by the name of their server, with the ids and scores of their hits."""
    tools = result["tools"]
    assert isinstance(tools, dict)
    assert list(tools) == ["groups"]
    return [
        (group["server"]["name"], [(hit["toolId"], hit["score"]) for hit in group["hits"]]) for group in tools["groups"]
    ]


def ids(result: dict[str, object]) -> list[str]:
    """The ids of all hits, group by group."""
    return [tool_id for _, of_group in hits(result) for tool_id, _ in of_group]


# --- search_capabilities -------------------------------------------------------------------------------


def test_a_search_gives_groups_of_hits_with_their_schemas() -> None:
    catalog = ToolCatalog()
    catalog.register(a_tool("fs__read", "cat  in\nfull"), a_tool("local", "dog"))
    [(tool_id, score)] = catalog.search("cat")
    assert call(search_capabilities_tool(catalog), query="cats") == {
        "tools": {
            "groups": [
                {
                    "server": {"name": "fs"},
                    "hits": [
                        {"toolId": tool_id, "score": score, "description": "cat  in\nfull", "inputSchema": SCHEMA}
                    ],
                }
            ]
        },
        "skills": [],
    }


def test_groups_stand_in_the_order_of_their_best_hit() -> None:
    catalog = ToolCatalog()
    catalog.register(
        a_tool("web__b", "cat cat dog"),
        a_tool("fs__a", "cat cat cat cat"),
        a_tool("fs__z", "cat dog bird fish"),
        a_tool("mail__c", "cat dog bird"),
    )
    result = call(search_capabilities_tool(catalog), query="cat")
    assert [(name, [tool_id for tool_id, _ in of_group]) for name, of_group in hits(result)] == [
        ("fs", ["fs__a", "fs__z"]),
        ("web", ["web__b"]),
        ("mail", ["mail__c"]),
    ]


@pytest.mark.parametrize(
    ("tool_id", "group"),
    [
        ("fs__read", "fs"),
        ("fs__read__all", "fs"),
        ("fs___read", "fs"),
        ("my_fs__read", "my_fs"),
        ("read", "read"),
        ("read_all", "read_all"),
        ("__read", "__read"),
        ("__read__all", "__read__all"),
        ("fs__", "fs"),
    ],
)
def test_a_tool_is_of_the_group_of_what_stands_before_the_first_two_underscores(tool_id: str, group: str) -> None:
    catalog = ToolCatalog()
    catalog.register(a_tool(tool_id, "cat"))
    assert [name for name, _ in hits(call(search_capabilities_tool(catalog), query="cat"))] == [group]


def test_what_is_known_of_a_server_goes_along_with_its_group() -> None:
    catalog = ToolCatalog()
    catalog.register(a_tool("fs__a", "cat"), a_tool("web__a", "cat"), a_tool("mail__a", "cat"))
    servers = [
        UpstreamServerInfo("fs", "Files\nof all kinds", "Read before writing.", 3, True),
        UpstreamServerInfo("web", instructions="Be brief."),
        UpstreamServerInfo("other", "Not found"),
    ]
    result = call(search_capabilities_tool(catalog, upstream_servers=iter(servers)), query="cat")
    tools = result["tools"]
    assert isinstance(tools, dict)
    assert [group["server"] for group in tools["groups"]] == [
        {"name": "fs", "description": "Files\nof all kinds", "instructions": "Read before writing."},
        {"name": "mail"},
        {"name": "web", "instructions": "Be brief."},
    ]


@pytest.mark.parametrize(
    ("given", "tools", "skills"),
    [({}, 5, 3)]
    + [({"topKTools": given, "topKSkills": given}, given, given) for given in (1, 4, 50)]
    + [({"topKTools": given, "topKSkills": given}, 50, 50) for given in (51, 10**9)]
    + [({"topKTools": given, "topKSkills": given}, 5, 3) for given in (0, -3, 2.5, "7", None, True, [7])],
)
def test_as_many_are_given_as_asked_for_50_at_most_and_5_and_3_otherwise(
    given: dict[str, object], tools: int, skills: int
) -> None:
    catalog, of_skills = ToolCatalog(), SkillCatalog()
    catalog.register(*(a_tool(f"fs__{place}", "cat") for place in range(60)))
    of_skills.register(*(Skill(f"{place}", "cat", "") for place in range(60)))
    result = call(search_capabilities_tool(catalog, of_skills), query="cat", **given)
    found = result["skills"]
    assert isinstance(found, list)
    assert (len(ids(result)), len(found)) == (tools, skills)


def test_a_skill_that_is_found_brings_its_tools_beyond_those_asked_for_without_repeating_one() -> None:
    catalog, skills = ToolCatalog(), SkillCatalog()
    catalog.register(
        a_tool("git__log", "history of a repository"),
        a_tool("git__diff", "what changed"),
        a_tool("ci__run", "run the build"),
        a_tool("git__blame", "review who wrote it"),
    )
    skills.register(
        Skill("review", "Review", "a change", (), ["git__diff", "git__blame", "ci__run", "gone", "git__diff"]),
        Skill("bisect", "Review history", "by halves", (), ["git__log", "ci__run"]),
        Skill("other", "Other", "nothing", (), ["git__log"]),
    )
    result = call(search_capabilities_tool(catalog, skills), query="review", topKTools=1)
    [(_, score)] = catalog.search("review")
    assert score > 0
    assert hits(result) == [
        ("git", [("git__blame", score), ("git__diff", 0), ("git__log", 0)]),
        ("ci", [("ci__run", 0)]),
    ]
    by_id = {hit.skill_id: hit.score for hit in skills.search("review")}
    assert result["skills"] == [
        {"skillId": "review", "score": by_id["review"], "description": "a change"},
        {"skillId": "bisect", "score": by_id["bisect"], "description": "by halves"},
    ]
    assert "topKSkills" in json.dumps(search_capabilities_tool(catalog, skills).input_schema)


def test_a_skill_is_described_on_one_line_of_160_characters_at_most() -> None:
    catalog, skills = ToolCatalog(), SkillCatalog()
    skills.register(Skill("a", "cat", "  first\n\nsecond\t third  "), Skill("b", "cat", "word " * 60))
    result = call(search_capabilities_tool(catalog, skills), query="cat")
    found = result["skills"]
    assert isinstance(found, list)
    assert {skill["skillId"]: skill["description"] for skill in found} == {
        "a": "first second third",
        "b": " ".join(["word"] * 32) + "…",
    }
    assert all(len(skill["description"]) <= 160 for skill in found)


def test_skills_are_mentioned_only_when_there_are_some() -> None:
    catalog, skills = ToolCatalog(), SkillCatalog()
    for of_skills in (None, skills):
        tool = search_capabilities_tool(catalog, of_skills)
        assert "skill" not in (tool.description + json.dumps(tool.input_schema)).lower()
    skills.register(Skill("a", "a", ""))
    tool = search_capabilities_tool(catalog, skills)
    assert "get_skill_content" in tool.description
    assert tool.input_schema["properties"].keys() == {"query", "topKTools", "topKSkills"}  # type: ignore[attr-defined]
    assert "skill" not in search_capabilities_tool(catalog).description.lower()


def test_skills_registered_later_are_found_by_the_tool_there_is() -> None:
    skills = SkillCatalog()
    tool = search_capabilities_tool(ToolCatalog(), skills)
    skills.register(Skill("a", "cat", "about cats"))
    assert [skill["skillId"] for skill in call(tool, query="cat")["skills"]] == ["a"]  # type: ignore[attr-defined]


def test_servers_are_listed_in_the_description() -> None:
    servers = [UpstreamServerInfo("gmail", "Send and search email", tool_count=12), UpstreamServerInfo("fs")]
    plain = search_capabilities_tool(ToolCatalog()).description
    assert search_capabilities_tool(ToolCatalog(), upstream_servers=servers).description == (
        f"{plain}\n\nThere are tools of these MCP servers, among others:\n"
        "- gmail — Send and search email (12 tools)\n- fs"
    )


@pytest.mark.parametrize("query", [None, 3, ["cat"], {}])
def test_a_search_without_a_query_says_so(query: object) -> None:
    said = "search_capabilities needs query, a string that describes what you want to do"
    expected = {"error": said, "isError": True}
    assert call(search_capabilities_tool(ToolCatalog()), query=query) == expected
    assert call(search_capabilities_tool(ToolCatalog())) == expected


def test_a_search_whose_embedding_fails_says_so() -> None:
    def embedding(texts: list[str]) -> list[list[float]]:
        if texts == ["cat"]:
            raise OSError("no memory")
        return [[1.0]] * len(texts)

    catalog = ToolCatalog("semantic", embedding)
    catalog.register(a_tool("a", "dog"))
    catalog.drain_trace_events()
    said = "the embedding function failed: no memory"
    expected = {"error": f"search failed: {said}", "isError": True}
    assert call(search_capabilities_tool(catalog), query="cat") == expected
    [event] = catalog.drain_trace_events()
    assert (event["type"], event["tool_id"], event["error"]) == ("gateway_error", "search_capabilities", said)


def test_a_search_of_a_model_is_told_in_trace_events() -> None:
    catalog = ToolCatalog()
    skills = SkillCatalog(trace=catalog.trace)
    catalog.register(a_tool("a", "cat"), a_tool("b", "dog"))
    skills.register(Skill("c", "cat", "", (), ["b"]))
    catalog.drain_trace_events()
    call(search_capabilities_tool(catalog, skills), query="cat", topKTools=77)
    events = catalog.drain_trace_events()
    assert [event["type"] for event in events] == ["search", "skill_search", "gateway_search"]
    assert [event.get("origin") for event in events] == ["agent", "agent", None]
    last = events[-1]
    assert (last["query"], last["top_k"], last["hits"], last["skills"]) == ("cat", 50, 1, 1)


# --- Lines ---------------------------------------------------------------------------------------------


def test_a_line_has_each_part_that_is_known() -> None:
    parts: list[tuple[str, object, str]] = [
        ("description", "Send and search email", " — Send and search email"),
        ("tool_count", 12, " (12 tools)"),
        ("needs_auth", True, " (auth required)"),
    ]
    for chosen in itertools.product([False, True], repeat=3):
        given = {name: value for take, (name, value, _) in zip(chosen, parts) if take}
        line = "- gmail" + "".join(text for take, (_, _, text) in zip(chosen, parts) if take)
        assert format_upstream_line(UpstreamServerInfo("gmail", **given)) == line  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("info", "line"),
    [
        (UpstreamServerInfo("a", "", "unseen", 0), "- a (0 tools)"),
        (UpstreamServerInfo("a", " \n ", tool_count=1), "- a (1 tools)"),
        (UpstreamServerInfo("a", "first\n  second\tthird "), "- a — first second third"),
        (UpstreamServerInfo("a", "x" * 160), "- a — " + "x" * 160),
        (UpstreamServerInfo("a", "x" * 161), "- a — " + "x" * 159 + "…"),
        (UpstreamServerInfo("a", "x" * 150 + " " + "y" * 30), "- a — " + "x" * 150 + "…"),
        (UpstreamServerInfo("a", "x" * 159 + " yy"), "- a — " + "x" * 159 + "…"),
        (UpstreamServerInfo("a", "x" * 40 + " " + "y" * 150), "- a — " + "x" * 40 + " " + "y" * 118 + "…"),
    ],
)
def test_a_description_is_cut_to_one_line_of_160_characters(info: UpstreamServerInfo, line: str) -> None:
    assert format_upstream_line(info) == line
    assert len(line) <= len("- a — ") + 160


# --- invoke_tool ---------------------------------------------------------------------------------------


def test_a_tool_is_called_with_its_args() -> None:
    catalog = ToolCatalog()
    catalog.register(a_tool("fs__read", execute=lambda arguments: {"got": arguments}))
    tool = invoke_tool_tool(catalog)
    for given in ({}, {"x": 1}, {"args": {"y": 2}}):
        assert call(tool, toolId="fs__read", args=given) == {"got": given}
    assert call(tool, toolId="fs__read", args={"x": 1}, x=2, other=3) == {"got": {"x": 1}}


def test_without_args_the_remaining_keys_are_the_arguments() -> None:
    catalog = ToolCatalog()
    catalog.register(a_tool("fs__read", execute=lambda arguments: {"got": arguments}))
    tool = invoke_tool_tool(catalog)
    assert call(tool, toolId="fs__read", path="a", deep={"b": 1}) == {"got": {"path": "a", "deep": {"b": 1}}}
    assert call(tool, toolId="fs__read", args=None, path="a") == {"got": {"path": "a"}}
    assert call(tool, toolId="fs__read", args=None) == call(tool, toolId="fs__read") == {"got": {}}


@pytest.mark.parametrize("given", ['{"x": 1}', 3, [1], False, ""])
def test_args_of_another_type_are_an_error_and_the_tool_is_not_called(given: object) -> None:
    catalog = ToolCatalog()
    called: list[object] = []
    catalog.register(a_tool("a", execute=called.append))
    said = "invalid args for a: args must be an object that holds the arguments of the tool"
    assert call(invoke_tool_tool(catalog), toolId="a", args=given, x=1) == {"error": said, "isError": True}
    assert called == []


@pytest.mark.parametrize(
    ("tool_id", "said"),
    [
        ("gone", "unknown toolId: gone. Use search_capabilities to find the tools there are."),
        ("invoke_tool", "unknown toolId: invoke_tool. Use search_capabilities to find the tools there are."),
        (None, "invoke_tool needs toolId, the id of a tool that search_capabilities found"),
        (3, "invoke_tool needs toolId, the id of a tool that search_capabilities found"),
    ],
)
def test_a_tool_that_is_not_there_is_an_error(tool_id: object, said: str) -> None:
    assert call(invoke_tool_tool(ToolCatalog()), toolId=tool_id, args={}) == {"error": said, "isError": True}


def raising(error: BaseException) -> Callable[[dict[str, object]], object]:
    """A tool that raises."""

    def execute(arguments: dict[str, object]) -> object:
        raise error

    return execute


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no such path"), "tool fs__read threw: no such path"),
        (RuntimeError(), "tool fs__read threw: RuntimeError"),
        (TransportError("the server exited with status 1"), "tool fs__read threw: the server exited with status 1"),
        (RatelError("anything"), "tool fs__read threw: anything"),
    ],
)
def test_what_a_tool_raises_is_an_error_that_the_model_can_read(error: Exception, said: str) -> None:
    catalog = ToolCatalog()
    catalog.register(a_tool("fs__read", execute=raising(error)))
    assert call(invoke_tool_tool(catalog), toolId="fs__read", args={}) == {"error": said, "isError": True}


def test_an_interrupt_is_no_error_of_a_tool() -> None:
    catalog = ToolCatalog()
    catalog.register(a_tool("a", execute=raising(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        invoke_tool_tool(catalog).execute({"toolId": "a"})


def caused() -> Exception:
    """An error that says more of one that is under it."""
    error = RuntimeError("the call failed")
    error.__cause__ = UnauthorizedError("mail.example answered HTTP 401")
    return error


@pytest.mark.parametrize("error", [UnauthorizedError("mail.example answered HTTP 401"), caused()])
@pytest.mark.parametrize(("tool_id", "upstream"), [("mail__send", "mail"), ("local", "local")])
def test_a_server_that_answers_401_needs_auth(error: Exception, tool_id: str, upstream: str) -> None:
    catalog = ToolCatalog()
    catalog.register(a_tool(tool_id, execute=raising(error)))
    hint = f"{upstream} asks for credentials, which you cannot give: tell the user to authorize {upstream} again"
    assert call(invoke_tool_tool(catalog), toolId=tool_id, args={}) == {
        **{"error": "needs_auth", "isError": True, "upstream": upstream, "hint": hint}
    }


def test_results_with_is_error_are_results() -> None:
    result = {"content": [{"type": "text", "text": "no"}], "isError": True, "structuredContent": {"any": 1}}
    catalog = ToolCatalog()
    catalog.register(a_tool("a", execute=lambda arguments: result))
    assert invoke_tool_tool(catalog).execute({"toolId": "a"}) is result


def test_a_call_of_a_model_is_told_in_trace_events() -> None:
    catalog = ToolCatalog()
    catalog.register(a_tool("a"), a_tool("b", execute=raising(ValueError("no"))))
    catalog.register(a_tool("c", execute=raising(UnauthorizedError("401"))))
    catalog.drain_trace_events()
    tool = invoke_tool_tool(catalog)
    asked: list[dict[str, object]] = [{"toolId": tool_id} for tool_id in ("a", "b", "c", "d")]
    for arguments in [*asked, {}, {"toolId": "a", "args": 1}]:
        tool.execute(arguments)
    events = catalog.drain_trace_events()
    assert [(event["type"], event["tool_id"], event.get("error")) for event in events] == [
        ("invoke_start", "a", None),
        ("invoke_end", "a", None),
        ("gateway_invoke", "a", None),
        ("invoke_start", "b", None),
        ("invoke_error", "b", "no"),
        ("gateway_error", "b", "no"),
        ("invoke_start", "c", None),
        ("invoke_error", "c", "401"),
        ("gateway_error", "c", "needs_auth"),
        ("gateway_error", "d", "unknown toolId"),
        ("gateway_error", "", "no toolId"),
        ("gateway_error", "a", "invalid args"),
    ]


# --- get_skill_content ---------------------------------------------------------------------------------


def test_a_skill_is_read_whole() -> None:
    skills = SkillCatalog()
    body = "# Review\n\n  1. Look.\n" * 100
    skills.register(Skill("review", "Review", "A change", body=body), Skill("empty", "Empty", ""))
    tool = get_skill_content_tool(skills)
    assert call(tool, skillId="review") == {"body": body}
    assert call(tool, skillId="empty") == {"body": ""}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"skillId": "gone"}, "unknown skillId: gone. Use search_capabilities to find the skills there are."),
        ({"skillId": 3}, "get_skill_content needs skillId, the id of a skill that search_capabilities found"),
        ({}, "get_skill_content needs skillId, the id of a skill that search_capabilities found"),
    ],
)
def test_a_skill_that_is_not_there_is_an_error(arguments: dict[str, object], said: str) -> None:
    skills = SkillCatalog()
    assert call(get_skill_content_tool(skills), **arguments) == {"error": said, "isError": True}
    [event] = skills.trace.drain()
    assert (event["type"], event["error"]) == ("gateway_error", "unknown skillId")


# --- Ratel ---------------------------------------------------------------------------------------------


def test_a_model_is_given_three_tools_from_search_to_call() -> None:
    with ratel() as r:
        assert isinstance(r, Ratel)
        r.tools.register(a_tool("zoo__feed", "feeds the cats", lambda arguments: {"fed": arguments["animal"]}))
        r.skills.register(Skill("feeding", "Feeding", "when to feed", (), ["zoo__feed"], "At noon."))
        by_name = {tool.name: tool for tool in r.model_tools()}
        assert list(by_name) == [tool.id for tool in r.model_tools()]
        assert list(by_name) == ["search_capabilities", "invoke_tool", "get_skill_content"]
        result = call(by_name["search_capabilities"], query="feeding a cat")
        assert ids(result) == ["zoo__feed"]
        [skill] = result["skills"]  # type: ignore[misc]
        assert call(by_name["get_skill_content"], skillId=skill["skillId"]) == {"body": "At noon."}  # type: ignore[has-type]
        assert call(by_name["invoke_tool"], toolId="zoo__feed", args={"animal": "lion"}) == {"fed": "lion"}
        assert r.tools.invoke("zoo__feed", {"animal": "owl"}) == {"fed": "owl"}
        assert [hit.tool_id for hit in r.tools.search("cat")] == ["zoo__feed"]
        assert r.skills.search("feed") == [SkillHit("feeding", r.skills.search("feed")[0].score)]
        assert r.tools.catalog.tool_ids() == ["zoo__feed"]


def test_the_three_are_always_there_and_skills_are_mentioned_once_there_are_some() -> None:
    r = ratel()
    assert len(r.model_tools()) == 3
    assert "skill" not in r.model_tools()[0].description.lower()
    r.skills.register(Skill("a", "a", ""))
    assert len(r.model_tools()) == 3
    assert "skill" in r.model_tools()[0].description.lower()


def test_the_schemas_of_the_model_tools_are_json_and_their_names_camel_case() -> None:
    r = ratel()
    r.skills.register(Skill("a", "a", ""))
    search, invoke, read = r.model_tools()
    for tool in (search, invoke, read):
        for schema in (tool.input_schema, tool.output_schema):
            assert json.loads(json.dumps(schema)) == schema
            assert schema["type"] == "object"
        assert tool.description
    assert list(search.input_schema["properties"]) == ["query", "topKTools", "topKSkills"]  # type: ignore[call-overload]
    assert search.input_schema["required"] == ["query"]
    assert list(invoke.input_schema["properties"]) == ["toolId", "args"]  # type: ignore[call-overload]
    assert list(read.input_schema["properties"]) == ["skillId"]  # type: ignore[call-overload]


def test_search_clamps_alike() -> None:
    r = ratel()
    r.tools.register(*(a_tool(f"{place}", "cat") for place in range(60)))
    for given, count in ((51, 50), (7, 7), (0, 5), (-1, 5), (True, 5), (None, 5), ("7", 5)):
        assert len(r.tools.search("cat", given)) == count
    assert len(r.tools.search("cat", top_k=6)) == 6


def test_tools_and_skills_are_ranked_by_the_method_and_told_of_in_one_trace(tmp_path: Path) -> None:
    embedded: list[str] = []

    def embedding(texts: list[str]) -> list[list[float]]:
        embedded.extend(texts)
        return [[1.0, len(text)] for text in texts]

    path = tmp_path / "trace.jsonl"
    with ratel("hybrid", embedding, trace_file=path) as r:
        r.tools.register(a_tool("a", "cat"))
        r.skills.register(Skill("b", "dog", ""))
        assert embedded == ["tool\ncat\nq", "dog"]
        r.skills.search("bird")
        kinds = [event["type"] for event in r.tools.catalog.drain_trace_events()]
    assert kinds == ["index_churn", "index_churn", "skill_search"]
    assert [json.loads(line)["type"] for line in path.read_text().splitlines()] == kinds


def test_a_method_and_an_embedding_that_do_not_fit_are_told() -> None:
    with pytest.raises(ValueError, match=r"^method semantic needs an embedding: a function, or a mapping"):
        ratel("semantic")
    with pytest.raises(ValueError, match=r"^a BM25 catalog has no vectors, and cannot get any: choose method"):
        ratel(embedding=lambda texts: [[1.0]] * len(texts))


def test_leaving_it_closes_its_servers_whatever_happened() -> None:
    class Handle:
        closed = 0

        def close(self) -> None:
            self.closed += 1

    handle = Handle()
    r = ratel()
    r.tools.catalog.replace("fs", [a_tool("fs__a")], handle)
    with pytest.raises(LookupError), r:
        raise LookupError
    assert handle.closed == 1
    r.close()
    assert handle.closed == 1
