"""Catalogs of tools and skills: what they take, find, call and tell, from several threads."""

from __future__ import annotations

import json
import random
import threading
from typing import TYPE_CHECKING

import pytest

from ratel.catalog import (
    RESERVED_IDS,
    SearchHit,
    Skill,
    SkillCatalog,
    SkillHit,
    Tool,
    ToolCatalog,
    UnknownToolError,
    clamp,
)
from ratel.ranking import EmbeddingError
from ratel.trace import RatelError, TraceSink

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EMPTY: dict[str, object] = {"type": "object"}


def a_tool(tool_id: str, description: str = "", execute: Callable[[dict[str, object]], object] = dict) -> Tool:
    """A tool whose name is what follows its server."""
    return Tool(tool_id, tool_id.rpartition("__")[2], description, EMPTY, EMPTY, execute)


def found(catalog: ToolCatalog, query: str, top_k: object = 50) -> list[str]:
    """The ids that a search finds."""
    return [hit.tool_id for hit in catalog.search(query, top_k)]


class Handle:
    """A server's handle, which counts how often it is closed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.closed = 0
        self.error = error

    def close(self) -> None:
        self.closed += 1
        if self.error is not None:
            raise self.error


# --- Tools ---------------------------------------------------------------------------------------------


def test_a_tool_is_found_by_name_description_and_schemas_and_not_by_its_id() -> None:
    catalog = ToolCatalog()
    catalog.register(
        Tool(
            id="acme__forecast",
            name="forecastWeather",
            description="Tells tomorrow's sky.",
            input_schema={
                "properties": {
                    "town": {"properties": {"countryCode": {"description": "two letters"}}},
                    "units": {"enum": ["metric", "imperial"]},
                    "days": {"items": {"description": "of the week"}},
                }
            },
            output_schema={"properties": {"temperature": {"description": "in degrees"}}},
            execute=dict,
        ),
        a_tool("other__tool", "something else"),
    )
    queries = ["forecastWeather", "forecast_weather", "weather", "sky", "town", "country", "letter", "metric"]
    for query in [*queries, "imperial", "weeks", "temperatures", "degree"]:
        assert found(catalog, query) == ["acme__forecast"], query
    assert found(catalog, "acme") == []


def test_a_search_gives_hits_the_best_first() -> None:
    catalog = ToolCatalog()
    catalog.register(a_tool("b__x", "cat"), a_tool("a__x", "cat"), a_tool("c__x", "cat cat"), a_tool("d__x", "dog"))
    hits = catalog.search("cats")
    assert [hit.tool_id for hit in hits] == ["c__x", "a__x", "b__x"]
    assert isinstance(hits[0], SearchHit)
    assert hits[0].score > hits[1].score == hits[2].score > 0


@pytest.mark.parametrize(
    ("given", "hits"),
    [
        *[(1, 1), (7, 7), (50, 50), (51, 50), (10**30, 50), (7.0, 7)],
        *[(0, 5), (-1, 5), (True, 5), (False, 5), (None, 5), ("7", 5), (7.5, 5), ([7], 5), ({}, 5)],
        *[(float("inf"), 5), (float("nan"), 5)],
    ],
)
def test_top_k_above_50_is_50_and_what_is_no_positive_integer_is_5(given: object, hits: int) -> None:
    catalog = ToolCatalog()
    catalog.register(*(a_tool(f"{place}", "cat") for place in range(60)))
    assert len(catalog.search("cat", given)) == hits
    assert clamp(given, 5) == hits


def test_five_hits_are_given_unless_asked_for_others() -> None:
    catalog = ToolCatalog()
    catalog.register(*(a_tool(f"{place}", "cat") for place in range(60)))
    assert len(catalog.search("cat")) == 5


def test_a_tool_registered_again_takes_the_place_of_the_former() -> None:
    catalog = ToolCatalog()
    catalog.register(a_tool("a", "cat", lambda arguments: "former"), a_tool("b", "cat"))
    catalog.register(a_tool("a", "dog", lambda arguments: "first"), a_tool("a", "bird", lambda arguments: "last"))
    assert (found(catalog, "cat"), found(catalog, "dog"), found(catalog, "bird")) == (["b"], [], ["a"])
    assert catalog.invoke("a") == "last"
    assert len(catalog) == 2


def test_what_a_catalog_has_and_what_is_removed_from_it() -> None:
    catalog = ToolCatalog()
    tool = a_tool("a", "cat")
    catalog.register(tool, a_tool("b", "cat"))
    assert (catalog.get("a"), catalog.get("c")) == (tool, None)
    assert ("a" in catalog, "c" in catalog, 3 in catalog, len(catalog)) == (True, False, False, 2)
    assert catalog.tool_ids() == ["a", "b"]
    catalog.remove("a", "c", "a")
    assert (catalog.tool_ids(), found(catalog, "cat")) == (["b"], ["b"])


@pytest.mark.parametrize("reserved", RESERVED_IDS)
def test_the_ids_of_the_model_tools_are_reserved(reserved: str) -> None:
    catalog = ToolCatalog()
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the text is compared whole
        catalog.register(a_tool("a"), a_tool(reserved))
    assert str(raised.value) == f"the id {reserved!r} is reserved for a tool that the model is given: choose another"
    assert catalog.tool_ids() == []


def test_a_schema_that_cannot_be_read_is_told_and_nothing_is_registered() -> None:
    schema: dict[str, object] = {}
    schema["items"] = schema
    catalog = ToolCatalog()
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the text is compared whole
        catalog.register(a_tool("a"), Tool("b", "b", "", EMPTY, schema, dict))
    assert str(raised.value) == "tool 'b' cannot be registered: a schema is nested too deeply, or contains itself"
    assert catalog.tool_ids() == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"id": ""}, "a tool needs an id, a string that is not empty"),
        ({"id": 3}, "a tool needs an id, a string that is not empty"),
        ({"name": None}, "tool 'a' needs name, a string"),
        ({"description": None}, "tool 'a' needs description, a string"),
        ({"input_schema": None}, "tool 'a' needs input_schema, a mapping"),
        ({"output_schema": []}, "tool 'a' needs output_schema, a mapping"),
        ({"execute": "print"}, "tool 'a' needs execute, a function of its arguments"),
    ],
)
def test_a_tool_that_is_none_is_told(fields: dict[str, object], said: str) -> None:
    good: dict[str, object] = {
        **{"id": "a", "name": "a", "description": "", "input_schema": {}, "output_schema": {}, "execute": dict}
    }
    Tool(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the text is compared whole
        Tool(**{**good, **fields})  # type: ignore[arg-type]
    assert str(raised.value) == said


def test_what_is_no_tool_is_told_before_anything_is_registered() -> None:
    catalog = ToolCatalog()
    with pytest.raises(TypeError, match=r"^expected a Tool, not list$"):
        catalog.register(a_tool("a"), [a_tool("b")])  # type: ignore[arg-type]
    assert catalog.tool_ids() == []


# --- Calls ---------------------------------------------------------------------------------------------


def test_a_tool_is_called_with_arguments_of_its_own_and_its_result_returned() -> None:
    catalog = ToolCatalog()
    given: dict[str, object] = {"x": 1}
    catalog.register(a_tool("a", execute=lambda arguments: (arguments.update(y=2), arguments)[1]))
    assert catalog.invoke("a", given) == {"x": 1, "y": 2}
    assert given == {"x": 1}
    assert catalog.invoke("a") == catalog.invoke("a", None) == catalog.invoke("a", {}) == {"y": 2}


def test_what_a_tool_raises_reaches_the_caller() -> None:
    error = OSError("disk full")

    def fail(arguments: dict[str, object]) -> object:
        raise error

    catalog = ToolCatalog()
    catalog.register(a_tool("a", execute=fail))
    with pytest.raises(OSError, match=r"^disk full$") as raised:
        catalog.invoke("a")
    assert raised.value is error


def test_a_tool_that_is_not_there_is_told() -> None:
    with pytest.raises(UnknownToolError, match=r"^unknown tool 'b': search for the tools there are$") as raised:
        ToolCatalog().invoke("b")
    assert raised.value.tool_id == "b"
    assert isinstance(raised.value, RatelError)
    assert isinstance(raised.value, LookupError)


def test_arguments_that_are_no_mapping_are_told() -> None:
    catalog = ToolCatalog()
    catalog.register(a_tool("a"))
    with pytest.raises(TypeError, match=r"^the arguments of tool 'a' are a mapping, not list$"):
        catalog.invoke("a", [1])  # type: ignore[arg-type]


# --- Servers -------------------------------------------------------------------------------------------


def test_the_tools_of_an_owner_are_replaced_in_one_step() -> None:
    catalog = ToolCatalog()
    catalog.register(a_tool("fs__local", "cat"))
    first, second = Handle(), Handle()
    assert catalog.replace("fs", [a_tool("fs__a", "cat"), a_tool("fs__b", "cat")], first) is None
    assert catalog.replace("web", [a_tool("web__a", "cat")], Handle()) is None
    catalog.drain_trace_events()
    assert catalog.replace("fs", [a_tool("fs__c", "cat"), a_tool("fs__b", "dog")], second) is first
    assert sorted(catalog.tool_ids()) == ["fs__b", "fs__c", "fs__local", "web__a"]
    assert found(catalog, "dog") == ["fs__b"]
    assert sorted(found(catalog, "cat")) == ["fs__c", "fs__local", "web__a"]
    [event] = catalog.drain_trace_events()[:1]
    assert (event["type"], event["added"], event["removed"]) == ("index_churn", ["fs__c", "fs__b"], ["fs__a"])
    assert (first.closed, second.closed) == (0, 0)  # that is its caller's, once its calls are over
    assert catalog.replace("fs", [], Handle()) is second
    assert sorted(catalog.tool_ids()) == ["fs__local", "web__a"]


def test_of_two_with_one_id_the_last_registered_counts_and_belongs_to_who_registered_it() -> None:
    catalog = ToolCatalog()
    catalog.replace("fs", [a_tool("fs__a"), a_tool("fs__a", "last")], Handle())
    assert found(catalog, "last") == ["fs__a"]
    catalog.register(a_tool("fs__a", "local"))
    catalog.replace("fs", [a_tool("fs__b")], Handle())
    assert sorted(catalog.tool_ids()) == ["fs__a", "fs__b"]  # the local one is not what vanished there
    catalog.replace("fs", [a_tool("fs__a", "listed again")], Handle())
    assert (catalog.tool_ids(), found(catalog, "listed")) == (["fs__a"], ["fs__a"])


def test_a_tool_that_was_removed_is_nobodys() -> None:
    catalog = ToolCatalog()
    catalog.replace("fs", [a_tool("fs__a")], Handle())
    catalog.remove("fs__a")
    catalog.register(a_tool("fs__a"))
    catalog.replace("fs", [], Handle())
    assert catalog.tool_ids() == ["fs__a"]


def test_closing_closes_the_handles_of_all_servers_and_leaves_the_tools() -> None:
    catalog = ToolCatalog()
    former, latter, failing = Handle(), Handle(), Handle(OSError("stuck"))
    catalog.replace("fs", [a_tool("fs__a")], former)
    catalog.replace("fs", [a_tool("fs__a", "cat")], latter)
    catalog.replace("web", [], failing)
    other = Handle()
    catalog.replace("other", [], other)
    with pytest.raises(OSError, match=r"^stuck$"):
        catalog.close()
    assert (former.closed, latter.closed, failing.closed, other.closed) == (0, 1, 1, 1)
    catalog.close()
    assert (latter.closed, failing.closed) == (1, 1)
    assert found(catalog, "cat") == ["fs__a"]
    with pytest.raises(RatelError, match=r"^the catalog was closed$"):
        catalog.replace("late", [a_tool("late__a")], Handle())
    catalog.register(a_tool("local"))
    assert catalog.tool_ids() == ["fs__a", "local"]


# --- Embeddings ----------------------------------------------------------------------------------------


def failing_for(word: str) -> Callable[[list[str]], list[list[float]]]:
    """An embedding that has had enough when it meets a word."""

    def embedding(texts: list[str]) -> list[list[float]]:
        if any(word in text for text in texts):
            raise OSError("out of memory")
        return [[1.0, len(text)] for text in texts]

    return embedding


@pytest.mark.parametrize("method", ["semantic", "hybrid"])
def test_a_registration_whose_embedding_fails_leaves_nothing(method: str) -> None:
    catalog = ToolCatalog(method, failing_for("poison"))
    handle, late = Handle(), Handle()
    catalog.register(a_tool("a", "cat"))
    catalog.replace("fs", [a_tool("fs__a", "cat")], handle)
    before = (catalog.tool_ids(), catalog.search("cat"))
    # In the second batch, the first having been embedded.
    tools = [a_tool(f"fs__{place}", "poison" if place == 39 else "cat") for place in range(40)]
    for register in (lambda: catalog.register(*tools), lambda: catalog.replace("fs", tools, late)):
        with pytest.raises(EmbeddingError, match=r"^the embedding function failed: out of memory$"):
            register()  # type: ignore[no-untyped-call]
    assert (catalog.tool_ids(), catalog.search("cat")) == before
    catalog.close()
    assert (handle.closed, late.closed) == (1, 0)


def test_a_method_is_for_life() -> None:
    said = r"^a BM25 catalog has no vectors, and cannot get any: choose method semantic or hybrid$"
    with pytest.raises(ValueError, match=said):
        ToolCatalog(embedding=failing_for("x"))
    catalog = ToolCatalog()
    assert catalog.method == "bm25"
    with pytest.raises(AttributeError):
        catalog.method = "hybrid"  # type: ignore[misc]
    assert ToolCatalog("hybrid", failing_for("x")).method == "hybrid"


# --- Skills --------------------------------------------------------------------------------------------


def test_a_skill_is_found_by_name_tags_and_description_never_by_body_or_tools() -> None:
    skills = SkillCatalog()
    review = Skill("review", "Review code", "Reads a change", ["quality"], ["git__diff"], "Look for regressions")
    skills.register(review, Skill("other", "Other", "Something else"))
    for query in ("review", "code", "changes", "quality", "reading"):
        assert skills.search(query) == [SkillHit("review", skills.search(query)[0].score)], query
    for query in ("git", "diff", "regressions"):
        assert skills.search(query) == [], query
    assert (skills.get("review"), skills.get("none"), len(skills)) == (review, None, 2)
    skills.register(Skill("review", "Audit", ""))
    assert (skills.search("code"), skills.search("audit")[0].skill_id, len(skills)) == ([], "review", 2)
    skills.remove("review", "none")
    assert (skills.search("audit"), len(skills)) == ([], 1)


@pytest.mark.parametrize(("given", "hits"), [(1, 1), (51, 50), (0, 3), (None, 3), ("9", 3)])
def test_three_skills_are_given_unless_asked_for_others(given: object, hits: int) -> None:
    skills = SkillCatalog()
    skills.register(*(Skill(f"{place}", "cat", "") for place in range(60)))
    assert len(skills.search("cat", given)) == hits
    assert len(skills.search("cat")) == 3


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"id": ""}, "a skill needs an id, a string that is not empty"),
        ({"name": 3}, "skill 'a' needs name, a string"),
        ({"description": None}, "skill 'a' needs description, a string"),
        ({"body": b""}, "skill 'a' needs body, a string"),
        ({"tags": "quality"}, "skill 'a' needs tags, a sequence of strings"),
        ({"tools": [3]}, "skill 'a' needs tools, a sequence of strings"),
        ({"tools": None}, "skill 'a' needs tools, a sequence of strings"),
    ],
)
def test_a_skill_that_is_none_is_told(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the text is compared whole
        Skill(**{"id": "a", "name": "a", "description": "", **fields})  # type: ignore[arg-type]
    assert str(raised.value) == said


def test_skills_are_embedded_by_the_same_method() -> None:
    skills = SkillCatalog("semantic", failing_for("poison"))
    skills.register(Skill("a", "cat", ""), Skill("b", "elephant", ""))
    assert [hit.skill_id for hit in skills.search("dog")] == ["a", "b"]
    with pytest.raises(EmbeddingError):
        skills.register(Skill("c", "cat", ""), Skill("d", "poison", ""))
    assert len(skills) == 2


# --- Trace ---------------------------------------------------------------------------------------------


def test_what_happens_is_told_in_trace_events() -> None:
    catalog = ToolCatalog()

    def fail(arguments: dict[str, object]) -> object:
        raise RuntimeError

    catalog.register(a_tool("u", "cat"), a_tool("v", "cat", fail))
    [hit, _] = catalog.search("cat", 99)
    catalog.invoke("u", {"x": 1})
    with pytest.raises(RuntimeError):
        catalog.invoke("v")
    with pytest.raises(UnknownToolError):
        catalog.invoke("w")
    catalog.remove("v", "w")
    catalog.remove("v")  # nothing changes
    events = catalog.drain_trace_events()
    assert all(isinstance(event.pop("time"), float) for event in events)
    assert all(event.pop("took_ms", 0.0) >= 0.0 for event in events)  # type: ignore[operator]
    scored = {"score": hit.score}
    assert events == [
        {"type": "index_churn", "catalog": "tools", "added": ["u", "v"], "removed": []},
        {
            **{"type": "search", "query": "cat", "origin": "direct", "top_k": 50},
            "hits": [{"tool_id": "u", **scored}, {"tool_id": "v", **scored}],
        },
        {"type": "invoke_start", "tool_id": "u"},
        {"type": "invoke_end", "tool_id": "u"},
        {"type": "invoke_start", "tool_id": "v"},
        {"type": "invoke_error", "tool_id": "v", "error": "RuntimeError"},
        {"type": "invoke_start", "tool_id": "w"},
        {"type": "invoke_error", "tool_id": "w", "error": "unknown tool 'w': search for the tools there are"},
        {"type": "index_churn", "catalog": "tools", "added": [], "removed": ["v"]},
    ]
    assert catalog.drain_trace_events() == []


def test_what_happens_to_skills_is_told_in_trace_events() -> None:
    trace = TraceSink()
    skills = SkillCatalog(trace=trace)
    skills.register(Skill("a", "cat", ""))
    [hit] = skills.search("cat")
    skills.remove("a")
    events = trace.drain()
    assert [(event["type"], event.get("added"), event.get("removed")) for event in events] == [
        ("index_churn", ["a"], []),
        ("skill_search", None, None),
        ("index_churn", [], ["a"]),
    ]
    assert events[1]["hits"] == [{"skill_id": "a", "score": hit.score}]


def test_events_are_written_to_a_file_when_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    catalog = ToolCatalog(trace_file=path)
    catalog.register(a_tool("a", "cat"))
    catalog.search("cat")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == json.loads(json.dumps(catalog.drain_trace_events()))
    assert [line["type"] for line in lines] == ["index_churn", "search"]
    with pytest.raises(ValueError, match=r"^give a trace or a trace_file, not both$"):
        ToolCatalog(trace=TraceSink(), trace_file=path)


# --- Threads -------------------------------------------------------------------------------------------


def run_together(*works: Callable[[], None]) -> None:
    """Run each work in a thread of its own, at once, and raise what the first of them raised."""
    errors: list[BaseException] = []
    begin = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            begin.wait(60)
            work()
        except BaseException as e:  # noqa: BLE001 - raised by the thread of the test
            errors.append(e)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("method", ["bm25", "hybrid"])
def test_a_search_during_a_registration_sees_the_catalog_before_or_after(method: str) -> None:
    catalog = ToolCatalog(method, failing_for("poison") if method == "hybrid" else None)
    eras = [[a_tool(f"fs__{name}{place}", "cat") for place in range(20)] for name in "ab"]
    catalog.replace("fs", eras[0], Handle())
    over = threading.Event()
    seen: set[str] = set()

    def swap() -> None:
        try:
            for turn in range(1, 61):
                catalog.replace("fs", eras[turn % 2], Handle())
        finally:
            over.set()

    def search() -> None:
        last = False
        while not last:
            last = over.is_set()
            ids = found(catalog, "cat")
            assert len(ids) == 20
            assert len({tool_id[4] for tool_id in ids}) == 1
            seen.add(ids[0][4])

    run_together(swap, search, search)
    assert "a" in seen  # that of the last turn, at least


def test_four_threads_register_search_invoke_and_remove_at_once() -> None:
    catalog = ToolCatalog()
    skills = SkillCatalog(trace=catalog.trace)

    def work(name: str) -> Callable[[], None]:
        chance = random.Random(name)

        def run() -> None:
            mine: set[str] = set()
            for turn in range(120):
                tool_id = f"{name}__{chance.randrange(30)}"
                if chance.random() < 0.6:
                    text = f"{name} common {turn}"
                    catalog.register(a_tool(tool_id, text, lambda arguments, turn=turn: (turn, arguments)))  # type: ignore[misc]
                    mine.add(tool_id)
                    assert catalog.invoke(tool_id, {"n": turn}) == (turn, {"n": turn})
                    assert tool_id in {hit.tool_id for hit in catalog.search(f"{turn} {name}", 50)}
                else:
                    catalog.remove(tool_id)
                    mine.discard(tool_id)
                    with pytest.raises(UnknownToolError):
                        catalog.invoke(tool_id)
                skills.register(Skill(tool_id, name, "common"))
                # All of this thread's are found, however many the others have at the moment.
                assert {hit.tool_id for hit in catalog.search(name, 50)} == mine
                hits = skills.search("common", 50)
                assert len({hit.skill_id for hit in hits}) == len(hits) > 0
            results[name] = mine

        return run

    results: dict[str, set[str]] = {}
    names = ["north", "east", "south", "west"]
    run_together(*map(work, names))
    assert set(catalog.tool_ids()) == {tool_id for name in names for tool_id in results[name]}
    fresh = ToolCatalog()
    tools = [catalog.get(tool_id) for tool_id in catalog.tool_ids()]
    fresh.register(*(tool for tool in tools if tool is not None))
    for query in ("common", "north 7", "west east"):
        scores, anew = dict(catalog.search(query, 50)), dict(fresh.search(query, 50))
        assert scores == pytest.approx(anew, abs=1e-9)
