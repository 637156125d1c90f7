"""What ranking costs and finds, beside the alternatives: python benchmarks/ratel/ranking.py

Five thousand generated tools (ten servers, twenty verbs, thirty nouns) and two hundred queries of verb, noun and
server, so that most queries touch hundreds of tools; then a corpus of inflected wording, where each query has one
right answer. Each contender is measured in a process of its own: ratel; ratel-ai, the SDK with an engine in Rust, and
bm25s, on arrays of numpy, where they are installed (pip install ratel-ai bm25s); and plain Python, the formula in a
loop over what has a word of the query. The status is 1 when ratel misses one of its limits.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import itertools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from ratel import Tool, ToolCatalog
from ratel.ranking import schema_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TOOLS = 5_000
QUERIES = 200
ROUNDS = 5  # through the queries; and registrations of all, of which the best counts, as other load only adds
MORE = 50  # tools registered one at a time

# ratel's own, by the name of the column.
LIMITS = {"register": 400.0, "search": 1.5, "one more": 2.0, "index": 12.0}

SERVERS = ["github", "gitlab", "jira", "slack", "gmail", "drive", "stripe", "notion", "linear", "sentry"]
VERBS = [
    *("create", "delete", "list", "update", "search", "fetch", "archive", "restore", "send", "schedule"),
    *("cancel", "assign", "close", "reopen", "merge", "export", "import", "validate", "publish", "share"),
]
NOUNS = [
    *("issue", "invoice", "calendar", "event", "message", "contact", "file", "folder", "ticket", "order"),
    *("payment", "report", "user", "team", "project", "task", "comment", "label", "branch", "commit"),
    *("page", "document", "sheet", "chart", "image", "video", "alert", "metric", "deployment", "pipeline"),
]

# The forms of regular words and of some that are not, as base, third person, past and participle; and plurals.
ACTIONS = """
book books booked booking|cancel cancels cancelled cancelling|copy copies copied copying|delete deletes deleted deleting
stop stops stopped stopping|plan plans planned planning|notify notifies notified notifying|merge merges merged merging
watch watches watched watching|tag tags tagged tagging|apply applies applied applying|fix fixes fixed fixing
share shares shared sharing|submit submits submitted submitting|verify verifies verified verifying
process processes processed processing|index indexes indexed indexing|save saves saved saving|write writes wrote writing
convert converts converted converting|drop drops dropped dropping|approve approves approved approving
translate translates translated translating|print prints printed printing|retry retries retried retrying
move moves moved moving|scan scans scanned scanning|assign assigns assigned assigning|query queries queried querying
pay pays paid paying
"""
THINGS = """
flight flights|box boxes|company companies|invoice invoices|address addresses|query queries|file files|branch branches
policy policies|database databases|message messages|class classes|entry entries|patch patches|image images
category categories|process processes|person people|schedule schedules
"""


class Wanted(NamedTuple):
    """A tool to register, in what all contenders take."""

    id: str
    name: str
    description: str
    schema: dict[str, Any]


class Contender(Protocol):
    """Something that ranks tools."""

    def register(self, wanted: Sequence[Wanted]) -> None: ...

    def search(self, query: str, top_k: int) -> list[str]: ...


class Ratel:
    """This package."""

    def __init__(self) -> None:
        self.catalog = ToolCatalog()

    def register(self, wanted: Sequence[Wanted]) -> None:
        self.catalog.register(*(Tool(one.id, one.name, one.description, one.schema, {}, dict) for one in wanted))

    def search(self, query: str, top_k: int) -> list[str]:
        return [hit.tool_id for hit in self.catalog.search(query, top_k)]


class RatelAi:
    """The SDK that this follows, in its Python form."""

    def __init__(self) -> None:
        from ratel_ai import ExecutableTool, ToolCatalog  # type: ignore[import-not-found,unused-ignore]

        self._tool = ExecutableTool
        self._catalog = ToolCatalog()

    def register(self, wanted: Sequence[Wanted]) -> None:
        tools = [
            self._tool(one.id, one.name, one.description, one.schema, {"type": "object"}, execute=dict)
            for one in wanted
        ]

        async def register() -> None:
            await self._catalog.register(tools)

        asyncio.run(register())

    def search(self, query: str, top_k: int) -> list[str]:
        return [hit.tool_id for hit in self._catalog.search(query, top_k)]


def text_of(one: Wanted) -> str:
    """All that is indexed of a tool."""
    return "\n".join([one.name, one.description, *schema_texts(one.schema)])


class Bm25s:
    """bm25s with its own tokenizer and stop words. It takes in everything at once, or everything anew."""

    def __init__(self) -> None:
        import bm25s  # type: ignore[import-untyped,import-not-found,unused-ignore]

        self._module = bm25s
        self._wanted: list[Wanted] = []

    def register(self, wanted: Sequence[Wanted]) -> None:
        self._wanted.extend(wanted)
        texts = [text_of(one).replace("_", " ") for one in self._wanted]
        self._index = self._module.BM25(method="lucene", k1=0.9, b=0.4)
        self._index.index(self._module.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)

    def search(self, query: str, top_k: int) -> list[str]:
        words = self._module.tokenize(query, stopwords="en", show_progress=False)
        places, _ = self._index.retrieve(words, k=min(top_k, len(self._wanted)), show_progress=False)
        return [self._wanted[place].id for place in places[0]]


class Plain:
    """The formula in plain Python: every text with a word of the query is scored, and all are sorted."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._lengths: list[int] = []
        self._postings: dict[str, list[tuple[int, int]]] = {}

    def register(self, wanted: Sequence[Wanted]) -> None:
        for one in wanted:
            words = self.words(text_of(one))
            for word, count in Counter(words).items():
                self._postings.setdefault(word, []).append((len(self._ids), count))
            self._ids.append(one.id)
            self._lengths.append(len(words))

    def words(self, text: str) -> list[str]:
        return re.findall("[a-z0-9]+", text.lower())

    def search(self, query: str, top_k: int) -> list[str]:
        mean = sum(self._lengths) / len(self._lengths)
        scores: dict[int, float] = {}
        for word in self.words(query):
            postings = self._postings.get(word, [])
            idf = math.log(1 + (len(self._ids) - len(postings) + 0.5) / (len(postings) + 0.5))
            for place, count in postings:
                norm = 0.9 * (0.6 + 0.4 * self._lengths[place] / mean)
                scores[place] = scores.get(place, 0.0) + idf * count * 1.9 / (count + norm)
        best = sorted(scores, key=lambda place: (-scores[place], self._ids[place]))
        return [self._ids[place] for place in best[:top_k]]


CONTENDERS: dict[str, Callable[[], Contender]] = {
    "ratel": Ratel,
    "ratel-ai": RatelAi,
    "bm25s": Bm25s,
    "plain Python": Plain,
}


def generated() -> list[Wanted]:
    """The tools, in an order that tells nothing."""
    wanted = []
    for server, verb, noun in itertools.product(SERVERS, VERBS, NOUNS):
        fields = {
            f"{noun}_id": {"type": "string", "description": f"Identifier of the {noun}"},
            "limit": {"type": "integer", "description": "How many to return at most"},
            "state": {"type": "string", "enum": ["open", "closed", "all"], "description": "State to filter by"},
        }
        text = f"{verb.capitalize()} one {noun} or several in {server}. Returns what was changed, and its state."
        schema = {"type": "object", "properties": fields, "required": [f"{noun}_id"]}
        wanted.append(Wanted(f"{server}__{verb}_{noun}", f"{verb}_{noun}", text, schema))
    random.Random(7).shuffle(wanted)
    return wanted[:TOOLS]


def queries() -> list[str]:
    """Queries of verb, noun and server."""
    chance = random.Random(8)
    return [f"{chance.choice(VERBS)} {chance.choice(NOUNS)} {chance.choice(SERVERS)}" for _ in range(QUERIES)]


def inflected() -> tuple[list[Wanted], list[tuple[str, str]]]:
    """Tools worded in one form and queries in another, each with the id of its right answer."""
    chance = random.Random(9)
    actions = [group.split() for line in ACTIONS.strip().splitlines() for group in line.split("|")]
    things = [group.split() for line in THINGS.strip().splitlines() for group in line.split("|")]
    wanted: list[Wanted] = []
    asked: list[tuple[str, str]] = []
    for (base, third, past, participle), (one, several) in itertools.product(actions, things):
        tool_id = f"{base}_{one}"
        text = chance.choice(
            [
                f"{third.capitalize()} the {several} of a user and tells what it did",
                f"A tool for {participle} one {one}",
                f"Returns which {several} were {past}, and by whom",
            ]
        )
        wanted.append(Wanted(tool_id, f"tool{len(wanted)}", text, {"type": "object"}))
        asked.append(
            (
                chance.choice(
                    [
                        f"I would like to {base} this {one}, can you do that for me?",
                        f"what is needed for {participle} our {several}",
                        f"the {one} that she {past} with us",
                        f"who {third} {several} here",
                    ]
                ),
                tool_id,
            )
        )
    return wanted, asked


def timed(work: Callable[..., object], *arguments: object) -> float:
    """Milliseconds that a call takes."""
    begin = time.perf_counter()
    work(*arguments)
    return (time.perf_counter() - begin) * 1000


def resident() -> float:
    """MiB of memory in use, NaN where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return math.nan


def measure(name: str) -> dict[str, float]:
    """All that is told of one contender."""
    wanted, asked = generated(), queries()
    make = CONTENDERS[name]
    contender = make()  # imports, and what is compiled or allocated once
    contender.register(wanted[:50])
    contender.search("warm", 5)
    gc.collect()
    before = resident()
    contender = make()
    spent = [timed(contender.register, wanted)]
    told = {"first": timed(contender.search, asked[0], 5)}
    gc.collect()
    told["memory"] = resident() - before
    told["search"] = statistics.median(timed(contender.search, query, 5) for query in asked * ROUNDS)
    one_more = []
    for turn in range(MORE):
        new = Wanted(f"new__{turn}", f"frobnicate{turn}_widget", "Frobnicates one widget", {"type": "object"})
        begin = time.perf_counter()
        contender.register([new])
        found = contender.search(new.name.replace("_", " "), 5)
        one_more.append((time.perf_counter() - begin) * 1000)
        assert found[0] == new.id, (name, new.id, found)
    told["one more"] = statistics.median(one_more)
    for _ in range(ROUNDS - 1):
        contender = make()
        spent.append(timed(contender.register, wanted))
    told["register"] = min(spent)
    if name == "ratel":
        tools = [Tool(one.id, one.name, one.description, one.schema, {}, dict) for one in wanted]
        gc.collect()
        tracemalloc.start()
        catalog = ToolCatalog()
        catalog.register(*tools)
        catalog.search("widget")
        catalog.drain_trace_events()
        gc.collect()
        told["index"] = tracemalloc.get_traced_memory()[0] / 2**20
        tracemalloc.stop()
    worded, questions = inflected()
    contender = make()
    contender.register(worded)
    told["found"] = 100 * statistics.mean(answer in contender.search(query, 5) for query, answer in questions)
    return told


COLUMNS = [
    ("register", f"register {TOOLS:,} (ms)", "{:.0f}"),
    ("first", "search after it (ms)", "{:.2f}"),
    ("search", "search (ms)", "{:.2f}"),
    ("one more", "one more, found (ms)", "{:.2f}"),
    ("memory", "resident (MiB)", "{:.1f}"),
    ("index", "index (MiB)", "{:.1f}"),
    ("found", "inflected, in 5 (%)", "{:.1f}"),
]


def rows(told: dict[str, dict[str, float]]) -> Iterator[list[str]]:
    """The table, a list a row."""
    yield ["", *(title for _, title, _ in COLUMNS)]
    for name, values in told.items():
        yield [name, *(form.format(values[key]) if key in values else "-" for key, _, form in COLUMNS)]
    found = told.get("ratel-ai", {}).get("found")
    limits = {**LIMITS, **({} if found is None else {"found": found})}
    yield ["limit of ratel", *(f"{limits[key]:g}"[:5] if key in limits else "" for key, _, _ in COLUMNS)]


def main() -> int:
    """Measure whatever is installed, and print the table."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        return 0
    told = {}
    modules = {"ratel-ai": "ratel_ai", "bm25s": "bm25s"}
    for name in CONTENDERS:
        if name in modules and importlib.util.find_spec(modules[name]) is None:
            print(f"{name} is not installed here: pip install {name}")
            continue
        run = subprocess.run([sys.executable, __file__, name], stdout=subprocess.PIPE, check=True)
        told[name] = json.loads(run.stdout)
    table = list(rows(told))
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(widths[0]) if not i else cell.rjust(widths[i]) for i, cell in enumerate(row)))
    ours = told["ratel"]
    missed = [key for key, limit in LIMITS.items() if ours[key] > limit]
    if "ratel-ai" in told and ours["found"] < told["ratel-ai"]["found"]:
        missed.append("found")
    print(f"Python {sys.version.split()[0]}; " + (f"missed: {', '.join(missed)}" if missed else "all limits are kept"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
