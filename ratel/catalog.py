"""What a host has to offer: tools that can be searched and called, and skills that can be searched and read.

A catalog is changed by whole steps. Whatever takes time, words to split or texts to embed, is done before the lock is
taken; then all of a registration appears at once, or an error has left nothing of it. So a search on another thread
needs no notion of a registration under way: it sees the catalog before it or after.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from ratel.ranking import Embedding, Ranking, schema_texts
from ratel.trace import RatelError, TraceEvent, TraceSink

if TYPE_CHECKING:
    import os

Arguments = dict[str, object]
T = TypeVar("T", "Tool", "Skill")

# The ids of the tools that a model is given. One of these in the catalog could be found, but never be meant.
RESERVED_IDS = ("search_capabilities", "invoke_tool", "get_skill_content")

# Hits that a search gives unless asked for others, and at most: a model that asks for a thousand does not read them.
TOP_TOOLS = 5
TOP_SKILLS = 3
TOP_LIMIT = 50


class UnknownToolError(RatelError, LookupError):
    """A tool that the catalog does not have; ``tool_id`` is what was asked for."""

    def __init__(self, tool_id: str) -> None:
        super().__init__(f"unknown tool {tool_id!r}: search for the tools there are")
        self.tool_id = tool_id


@dataclass(frozen=True)
class Tool:
    """Something that can be called.

    ``id`` names it in a catalog, ``name`` and ``description`` say what it does, and the schemas (JSON Schema) what it
    takes and gives. ``execute`` is called with the arguments, from any thread, and returns the result; what it raises
    reaches the caller. Raises ValueError for a field that is of another kind.
    """

    id: str
    name: str
    description: str
    input_schema: Mapping[str, object]
    output_schema: Mapping[str, object]
    execute: Callable[[Arguments], object] = field(repr=False)

    def __post_init__(self) -> None:
        _check_strings("tool", self.id, name=self.name, description=self.description)
        for name in ("input_schema", "output_schema"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"tool {self.id!r} needs {name}, a mapping")
        if not callable(self.execute):
            raise ValueError(f"tool {self.id!r} needs execute, a function of its arguments")


@dataclass(frozen=True)
class Skill:
    """A way of doing something, in writing, that a model reads when it has found it.

    ``id`` names it; it is found by ``name``, ``tags`` and ``description``. ``tools`` are the ids of the tools that it
    uses, and ``body`` is the writing itself, Markdown as a rule. Raises ValueError for a field that is of another kind.
    """

    id: str
    name: str
    description: str
    tags: Sequence[str] = ()
    tools: Sequence[str] = ()
    body: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        _check_strings("skill", self.id, name=self.name, description=self.description, body=self.body)
        for name in ("tags", "tools"):
            values = getattr(self, name)
            given = isinstance(values, Sequence) and not isinstance(values, str)
            if not given or not all(isinstance(value, str) for value in values):
                raise ValueError(f"skill {self.id!r} needs {name}, a sequence of strings")


def _check_strings(kind: str, identifier: object, **fields: object) -> None:
    if not isinstance(identifier, str) or not identifier:
        raise ValueError(f"a {kind} needs an id, a string that is not empty")
    for name, value in fields.items():
        if not isinstance(value, str):
            raise ValueError(f"{kind} {identifier!r} needs {name}, a string")


class SearchHit(NamedTuple):
    """A tool that was found. Scores compare within one search only."""

    tool_id: str
    score: float


class SkillHit(NamedTuple):
    """A skill that was found. Scores compare within one search only."""

    skill_id: str
    score: float


class Closable(Protocol):
    """What is closed, once or more often."""

    def close(self) -> None:
        """Close it. Closing it again does nothing."""


def clamp(value: object, default: int) -> int:
    """How many hits are asked for: an integer above 50 is 50, and what is no positive integer the default."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a JSON number with a zero fraction is an integer (JSON Schema, section 4.2.3)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return default
    return min(value, TOP_LIMIT)


def elapsed(since: float) -> float:
    """Milliseconds since a moment of the monotonic clock, as trace events tell them."""
    return round((time.monotonic() - since) * 1000, 3)


class ToolCatalog:
    """Tools by id, ranked for a query. Any thread may call any method.

    ``method`` is "bm25", or "semantic" or "hybrid" with an ``embedding``: a function from a list of texts to a list
    of vectors, or an OpenAI-compatible endpoint as ``{"url", "model", "api_key_env"?}``. Events go to ``trace``, or
    to a sink of its own, which writes them to ``trace_file``, too, when one is named. Raises ValueError.
    """

    def __init__(
        self,
        method: str = "bm25",
        embedding: Embedding | None = None,
        *,
        trace: TraceSink | None = None,
        trace_file: str | os.PathLike[str] | None = None,
    ) -> None:
        if trace is not None and trace_file is not None:
            raise ValueError("give a trace or a trace_file, not both")
        self.trace = trace or TraceSink(trace_file)
        self._ranking: Ranking[Tool] = Ranking(method, embedding)
        self._lock = self._ranking.lock  # guards the ranking, and all below
        self._owners: dict[str, str] = {}  # tool id: who put it here, for those of replace()
        self._handles: dict[str, Closable] = {}  # by owner
        self._closed = False

    @property
    def method(self) -> str:
        """How the catalog ranks, for as long as it lives."""
        return self._ranking.method

    def register(self, *tools: Tool) -> None:
        """Take tools in, each in the place of one with its id; of several with one id the last counts. All or none.

        Raises ValueError for an id that is reserved or a schema that cannot be read, EmbeddingError.
        """
        self._change(tools)

    def replace(self, owner: str, tools: Sequence[Tool], handle: Closable) -> Closable | None:
        """Make the tools of ``owner`` these and no others, in one step, and keep ``handle`` for it.

        Returns the handle that was kept for it before: its caller closes it when its calls are over. Of tools with an
        id that another had registered these count, and the other way round. Raises what `register` raises, and
        RatelError after `close`; then nothing has changed.
        """
        return self._change(tools, (owner, handle))

    def _change(self, tools: Sequence[Tool], by: tuple[str, Closable] | None = None) -> Closable | None:
        by_id = _by_id(Tool, tools)
        documents = self._ranking.prepare({tool_id: _texts(tool) for tool_id, tool in by_id.items()})
        with self._lock:
            removed = []
            if by is not None:
                if self._closed:
                    raise RatelError("the catalog was closed")
                removed = [one for one, owner in self._owners.items() if owner == by[0] and one not in by_id]
            self._ranking.change(removed, [(document, by_id[document.identifier]) for document in documents])
            for tool_id in (*removed, *by_id):
                self._owners.pop(tool_id, None)
            before = None
            if by is not None:
                owner, handle = by
                self._owners.update(dict.fromkeys(by_id, owner))
                before = self._handles.get(owner)
                self._handles[owner] = handle
        _record_churn(self.trace, "tools", list(by_id), removed)
        return before

    def remove(self, *tool_ids: str) -> None:
        """Take tools out. Ids that it does not have are passed over."""
        with self._lock:
            removed = [one for one in dict.fromkeys(tool_ids) if self._ranking.get(one) is not None]
            self._ranking.change(removed, ())
            for tool_id in removed:
                self._owners.pop(tool_id, None)
        _record_churn(self.trace, "tools", [], removed)

    def get(self, tool_id: str) -> Tool | None:
        """The tool of an id."""
        with self._lock:
            return self._ranking.get(tool_id)

    def tool_ids(self) -> list[str]:
        """The ids of all tools."""
        with self._lock:
            return self._ranking.identifiers()

    def __len__(self) -> int:
        return len(self.tool_ids())

    def __contains__(self, tool_id: object) -> bool:
        return isinstance(tool_id, str) and self.get(tool_id) is not None

    def search(self, query: str, top_k: object = TOP_TOOLS) -> list[SearchHit]:
        """The tools that fit a query best, the best first; ``top_k`` of them, 50 at most. Raises EmbeddingError."""
        return [SearchHit(tool.id, score) for tool, score in self.ranked(query, top_k)]

    def ranked(self, query: str, top_k: object = TOP_TOOLS, origin: str = "direct") -> list[tuple[Tool, float]]:
        """What `search` finds, as tools: those of the moment of the search, whatever is registered meanwhile."""
        since = time.monotonic()
        most = clamp(top_k, TOP_TOOLS)
        ranked = self._ranking.search(query, most)
        hits = [{"tool_id": tool.id, "score": score} for tool, score in ranked]
        self.trace.record("search", query=query, origin=origin, top_k=most, hits=hits, took_ms=elapsed(since))
        return ranked

    def invoke(self, tool_id: str, arguments: Mapping[str, object] | None = None) -> object:
        """Call a tool and return its result.

        Raises UnknownToolError, TypeError for arguments that are no mapping, and whatever the tool raises.
        """
        since = time.monotonic()
        self.trace.record("invoke_start", tool_id=tool_id)
        try:
            tool = self.get(tool_id)
            if tool is None:
                raise UnknownToolError(tool_id)
            if arguments is not None and not isinstance(arguments, Mapping):
                raise TypeError(f"the arguments of tool {tool_id!r} are a mapping, not {type(arguments).__name__}")
            result = tool.execute(dict(arguments or {}))
        except BaseException as e:
            self.trace.record("invoke_error", tool_id=tool_id, error=describe(e), took_ms=elapsed(since))
            raise
        self.trace.record("invoke_end", tool_id=tool_id, took_ms=elapsed(since))
        return result

    def drain_trace_events(self) -> list[TraceEvent]:
        """The trace events since the last call, the oldest first; they are forgotten."""
        return self.trace.drain()

    def close(self) -> None:
        """Close the connections of all servers, and to an embedding endpoint. Their tools stay listed, and say so
        when called.

        Closing again does nothing. Raises what closing one of them raised, when all were closed.
        """
        with self._lock:
            self._closed = True
            handles = list(self._handles.values())
            self._handles.clear()
        self._ranking.close()
        with contextlib.ExitStack() as stack:
            for handle in handles:
                stack.callback(handle.close)


def _by_id(kind: type[T], items: Sequence[T]) -> dict[str, T]:
    for item in items:
        if not isinstance(item, kind):
            raise TypeError(f"expected a {kind.__name__}, not {type(item).__name__}")
    return {item.id: item for item in items}


def _record_churn(trace: TraceSink, catalog: str, added: list[str], removed: list[str]) -> None:
    if added or removed:
        trace.record("index_churn", catalog=catalog, added=added, removed=removed)


def describe(error: BaseException) -> str:
    """What an error says, or of which kind it is if it says nothing."""
    return str(error) or type(error).__name__


def _texts(tool: Tool) -> list[str]:
    if tool.id in RESERVED_IDS:
        raise ValueError(f"the id {tool.id!r} is reserved for a tool that the model is given: choose another")
    try:
        return [tool.name, tool.description, *schema_texts(tool.input_schema), *schema_texts(tool.output_schema)]
    except ValueError as e:
        raise ValueError(f"tool {tool.id!r} cannot be registered: {e}") from None


class SkillCatalog:
    """Skills by id, ranked for a query. Any thread may call any method. The parameters are those of ToolCatalog."""

    def __init__(
        self, method: str = "bm25", embedding: Embedding | None = None, *, trace: TraceSink | None = None
    ) -> None:
        self.trace = trace or TraceSink()
        self._ranking: Ranking[Skill] = Ranking(method, embedding)

    def register(self, *skills: Skill) -> None:
        """Take skills in, each in the place of one with its id; of several with one id the last counts. All or none.

        Raises EmbeddingError.
        """
        by_id = _by_id(Skill, skills)
        texts = {skill.id: [skill.name, *skill.tags, skill.description] for skill in by_id.values()}
        documents = self._ranking.prepare(texts)
        with self._ranking.lock:
            self._ranking.change((), [(document, by_id[document.identifier]) for document in documents])
        _record_churn(self.trace, "skills", list(by_id), [])

    def remove(self, *skill_ids: str) -> None:
        """Take skills out. Ids that it does not have are passed over."""
        with self._ranking.lock:
            removed = [one for one in dict.fromkeys(skill_ids) if self._ranking.get(one) is not None]
            self._ranking.change(removed, ())
        _record_churn(self.trace, "skills", [], removed)

    def close(self) -> None:
        """Close the connections to an embedding endpoint. One that is needed afterwards is opened again."""
        self._ranking.close()

    def get(self, skill_id: str) -> Skill | None:
        """The skill of an id."""
        with self._ranking.lock:
            return self._ranking.get(skill_id)

    def __len__(self) -> int:
        with self._ranking.lock:
            return len(self._ranking.identifiers())

    def search(self, query: str, top_k: object = TOP_SKILLS) -> list[SkillHit]:
        """The skills that fit a query best, the best first; ``top_k`` of them, 50 at most. Raises EmbeddingError."""
        return [SkillHit(skill.id, score) for skill, score in self.ranked(query, top_k)]

    def ranked(self, query: str, top_k: object = TOP_SKILLS, origin: str = "direct") -> list[tuple[Skill, float]]:
        """What `search` finds, as skills: those of the moment of the search."""
        since = time.monotonic()
        most = clamp(top_k, TOP_SKILLS)
        ranked = self._ranking.search(query, most)
        hits = [{"skill_id": skill.id, "score": score} for skill, score in ranked]
        self.trace.record("skill_search", query=query, origin=origin, top_k=most, hits=hits, took_ms=elapsed(since))
        return ranked
