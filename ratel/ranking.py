"""How a catalog is ranked: BM25 over terms, cosines of embeddings, or both fused.

The index is of plain dictionaries and takes a text in, or out, without looking at the others: a catalog of thousands
of tools is searched between two registrations without being built anew. Scores are those of the whole formula all
the same, since what depends on the whole corpus (the inverse document frequency, the mean length) is put in at the
search. An array library would search as fast, but could not take in one text, and would have to be installed.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import re
import socket
import ssl
import sys
import threading
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from heapq import nlargest, nsmallest
from typing import Generic, NamedTuple, TypeVar, Union
from urllib.parse import urlsplit

import urllib3
import urllib3.exceptions

import rat
from ratel.trace import RatelError
from ratel.transports import web_manager

METHODS = ("bm25", "semantic", "hybrid")

# Saturation of a term's frequency and weight of a text's length. Lower than the usual 1.2 and 0.75, as for the short
# texts of passage retrieval (Anserini's values): a schema that names a word five times is not five times as apt.
K1 = 0.9
B = 0.4

# Texts embedded at a time: what the strictest of the common servers takes in one request unless told otherwise
# (Text Embeddings Inference), and the batch that sentence-transformers makes itself.
BATCH = 32

# Seconds that an embedding endpoint may be silent: it may be loading its model.
EMBEDDING_SECONDS = 60.0

# Reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009), with the constant of its authors; and how many
# of each ranking are fused: what stands further down moves the sum by less than two thirds of a hundredth.
FUSION = 60
FUSED = 100

Vectors = Sequence[Sequence[float]]
Embedding = Union[Callable[[list[str]], Vectors], Mapping[str, str]]

T = TypeVar("T")


class EmbeddingError(RatelError):
    """Texts that could not be embedded, in one sentence."""


# --- Terms ---------------------------------------------------------------------------------------------

# What says nothing of what a tool does. "off", "up", "down", "over", "under", "all" and the like do, and are left.
_STOP_LIST = """
a about am an and any are as at be because been being but by can could d did do does doing for from had has have
having he her hers him his how i if in into is it its just ll me might must my of on or our ours please re s shall
she should so some such t than that the their theirs them then there these they this those to us ve via was we
were what when where which while who whom whose why will with would you your yours
"""
_STOP_WORDS = frozenset(_STOP_LIST.split())

# A word, with what is joined to it as in an identifier: read_file, well-known, System.IO.
_WORD = re.compile(r"[^\W_]+(?:[_.-]+[^\W_]+)*")
_JOINER = re.compile(r"[_.-]+")

# The parts of a word between changes of case, in its shape: HTTPServer, readFile, S3Bucket; and URLs is one.
_PART = re.compile(r"A[A0]*s?(?!a|s)|A?[a0s]+")


def _parts(word: str) -> list[str]:
    """The parts of a word at its changes of case, in lower case."""
    lower = word.lower()
    if len(word) == 1 or word == lower or word[1:] == lower[1:] or len(lower) != len(word):
        return [lower]
    shape = "".join("A" if c.isupper() else "0" if c.isdigit() else "s" if c == "s" else "a" for c in word)
    return [lower[part.start() : part.end()] for part in _PART.finditer(shape)]


_VOWEL = re.compile("[aeiouy]")
_DOUBLED = re.compile(r"([^\W\d_aeiouy])\1$")


def stem(word: str) -> str:
    """A lower-case word without plural, -ed and -ing: book for books, booked and booking.

    Inflection and no more: what a whole stemmer conflates beyond it ("organ", "organization") loses as often as it
    finds. What is left need be no word, only the same for every inflection: copi for copy, copies, copied, copying.
    """
    if word.endswith(("ies", "ied")) and len(word) > 4:
        word = word[:-3] + "y"
    elif word.endswith("s") and not word.endswith("ss") and len(word) > 2:
        word = word[:-1]
    while True:
        suffix = 3 if word.endswith("ing") else 2 if word.endswith("ed") and not word.endswith("eed") else 0
        if not suffix or len(word) < suffix + 2 or not _VOWEL.search(word[:-suffix]):
            break
        word = _DOUBLED.sub(r"\1", word[:-suffix])
    if len(word) > 2:
        word = _DOUBLED.sub(r"\1", word[:-1] if word[-1] == "e" else word)
    if len(word) > 2:
        word = word[:-1] if word.endswith("us") else re.sub("(?<=[^aeiou])y$", "i", word)
    return word


@lru_cache(maxsize=1 << 14)  # names and keys recur: a catalog of 5,000 tools has about as many words
def _terms_of(word: str) -> tuple[str, ...]:
    """The terms of a word as it stands: itself, without what joins its parts, and each part."""
    parts = [part for piece in _JOINER.split(word) for part in _parts(piece)]
    words = parts if len(parts) == 1 else ["".join(parts), *parts]
    # Interned, as a term stands in the index under one key and in the list of every text that has it.
    return tuple(sys.intern(stem(w)) for w in words if w not in _STOP_WORDS)


def terms(text: str) -> list[str]:
    """The terms of a text, in order, as often as they stand in it.

    Identifiers give themselves and their parts: ``createIssue`` and ``create_issue`` both createissu, creat, issu.
    Stop words give nothing, and inflections of a word give the same term.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return [term for word in _WORD.findall(text) for term in _terms_of(word)]


def schema_texts(schema: Mapping[str, object]) -> list[str]:
    """What a JSON Schema says in words: keys, descriptions and enum strings, through ``properties`` and ``items``.

    Raises ValueError for one nested too deeply to be read, as one that contains itself is.
    """
    texts: list[str] = []
    try:
        _collect(schema, texts)
    except RecursionError:
        raise ValueError("a schema is nested too deeply, or contains itself") from None
    return texts


_MAPPING = (dict, Mapping)  # all are the latter; asking whether they are costs more than all the rest


def _collect(schema: object, texts: list[str]) -> None:
    if not isinstance(schema, _MAPPING):
        if isinstance(schema, (list, tuple)):  # items of a tuple, before 2020-12
            for item in schema:
                _collect(item, texts)
        return
    description, values, properties = schema.get("description"), schema.get("enum"), schema.get("properties")
    if isinstance(description, str):
        texts.append(description)
    if isinstance(values, (list, tuple)):
        texts.extend([value for value in values if isinstance(value, str)])
    if properties is not None and isinstance(properties, _MAPPING):
        for key, value in properties.items():
            texts.append(str(key))
            _collect(value, texts)
    if "items" in schema:
        _collect(schema["items"], texts)


# --- BM25 ----------------------------------------------------------------------------------------------


class TermIndex:
    """An index of terms, and the BM25 scores of what is in it. Not for several threads: its owner has the lock.

    A score is the sum, over the words of the query, of ``(K1 + 1) idf tf / (tf + K1 (1 - B + B length / mean))``
    with the idf of Lucene, ``ln(1 + (n - df + 0.5) / (df + 0.5))``, which is never negative: Robertson's is, for a
    term that more than half of the texts have, and would rank a text below others for having what was asked for.
    """

    def __init__(self) -> None:
        self._postings: dict[str, dict[int, int]] = {}  # term: slot: how often it stands there
        self._terms: list[tuple[str, ...]] = []  # the terms of each slot, for its removal
        self._lengths: list[int] = []  # in terms; 0 in a free slot
        self._free: list[int] = []
        self._norms: list[float] | None = None  # what a frequency saturates against, by slot; None after a change
        self._count = 0
        self._total = 0  # of the lengths

    def add(self, counts: Mapping[str, int]) -> int:
        """Take a text in; its slot, by which it is known until it is removed."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._terms)
            self._terms.append(())
            self._lengths.append(0)
        length = 0
        for term, count in counts.items():
            postings = self._postings.get(term)
            if postings is None:
                self._postings[term] = {slot: count}
            else:
                postings[slot] = count
            length += count
        self._terms[slot] = tuple(counts)
        self._lengths[slot] = length
        self._total += length
        self._count += 1
        self._norms = None
        return slot

    def remove(self, slot: int) -> None:
        """Take a text out."""
        for term in self._terms[slot]:
            postings = self._postings[term]
            del postings[slot]
            if not postings:
                del self._postings[term]
        self._total -= self._lengths[slot]
        self._count -= 1
        self._terms[slot] = ()
        self._lengths[slot] = 0
        self._free.append(slot)
        self._norms = None

    def scores(self, query: Iterable[str], most: int) -> dict[int, float]:
        """The scores of at least the ``most`` best texts, ties with the last of them included, by slot.

        The rarest words come first. Once the words that remain could not lift a text that has none of those before
        above the best so far, only those already found are looked up: most of the time that means that the words
        which most texts have are never walked through. What is left out is never among the best; what is scored is
        scored in full, the words always in one order, so that equal texts have equal scores to the last bit.
        """
        if self._norms is None:
            mean = self._total / self._count if self._total else 1.0
            short, each = K1 * (1 - B), K1 * B / mean
            self._norms = [short + each * length for length in self._lengths]
        norms = self._norms
        weighted = []
        for term, count in Counter(query).items():
            postings = self._postings.get(term)
            if postings is not None:
                idf = math.log1p((self._count - len(postings) + 0.5) / (len(postings) + 0.5))
                weighted.append((count * idf * (K1 + 1), term, postings))
        weighted.sort(key=lambda word: (-word[0], word[1]))
        scores: dict[int, float] = {}
        # A weight bounds what its word adds. The sums are rounded: a bound is passed by less than this.
        remaining = sum(weight for weight, _, _ in weighted) * (1 + 1e-9)
        passed = 0.0
        for weight, _, postings in weighted:
            if len(scores) >= most and remaining < passed:
                least = nlargest(most, scores.values())[-1]
                if remaining < least:
                    scores = {slot: score for slot, score in scores.items() if score + remaining >= least}
                    postings = {slot: postings[slot] for slot in scores if slot in postings}
            for slot, count in postings.items():
                scores[slot] = scores.get(slot, 0.0) + weight * count / (count + norms[slot])
            remaining -= weight
            passed += weight
        return scores


# --- Embeddings ----------------------------------------------------------------------------------------


class Embedder:
    """Texts to vectors of length one, by a callable or an OpenAI-compatible endpoint.

    Any thread may use it; whether the callable may be called from several at once is its owner's matter.
    """

    def __init__(self, embedding: Embedding) -> None:
        """Take a callable, or ``{"url", "model", "api_key_env"?}``. Raises ValueError for anything else."""
        if callable(embedding):
            self._call: Callable[[list[str]], Vectors] = embedding
            self.close: Callable[[], None] = lambda: None
            self.name = "the embedding function"
        elif isinstance(embedding, Mapping):
            endpoint = EmbeddingEndpoint(embedding)
            self._call = endpoint.embed
            self.close = endpoint.close
            self.name = endpoint.name
        else:
            raise ValueError(
                "embedding is a function from a list of texts to a list of vectors, or a mapping with url and model"
            )

    def embed(self, texts: Sequence[str]) -> list[array[float]]:
        """The vectors of texts, all of one dimension. Raises EmbeddingError, which leaves no connection open."""
        try:
            return self._embed(texts)
        except EmbeddingError:
            self.close()
            raise

    def _embed(self, texts: Sequence[str]) -> list[array[float]]:
        vectors: list[array[float]] = []
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            try:
                answer = list(self._call(list(batch)))
            except EmbeddingError:
                raise
            except Exception as e:  # the function is the user's, and raises what it likes
                raise EmbeddingError(f"{self.name} failed: {str(e) or type(e).__name__}") from e
            if len(answer) != len(batch):
                raise EmbeddingError(f"{self.name} gave {_vectors(len(answer))} for {_texts(len(batch))}")
            vectors.extend(self._unit(vector) for vector in answer)
        dimensions = sorted({len(vector) for vector in vectors})
        if len(dimensions) > 1:
            raise EmbeddingError(f"{self.name} gave vectors of {dimensions[0]} and of {dimensions[-1]} dimensions")
        return vectors

    def _unit(self, vector: Sequence[float]) -> array[float]:
        try:
            numbers = array("d", vector)
        except (TypeError, ValueError, OverflowError):
            numbers = array("d")
        if not numbers:
            raise EmbeddingError(f"{self.name} gave something else than a vector of numbers")
        length = math.hypot(*numbers)
        if not math.isfinite(length):
            raise EmbeddingError(f"{self.name} gave a vector with a number that is not finite")
        return array("d", (number / length for number in numbers)) if length else numbers


def _vectors(count: int) -> str:
    return "1 vector" if count == 1 else f"{count} vectors"


def _texts(count: int) -> str:
    return "1 text" if count == 1 else f"{count} texts"


class EmbeddingEndpoint:
    """An HTTP endpoint that embeds as OpenAI's does: ``{"model", "input"}`` posted, ``{"data": […]}`` answered.

    A failure is not retried, but for a connection that was kept open too long: what is asked for is asked for by a
    registration or a search, whose caller knows better whether to try again.
    """

    def __init__(self, spec: Mapping[str, str]) -> None:
        """Take ``url``, ``model`` and perhaps ``api_key_env``, the environment variable of a key that is sent as
        bearer token. Raises ValueError."""
        unknown = sorted(str(key) for key in spec if key not in ("url", "model", "api_key_env"))
        if unknown:
            raise ValueError(f"embedding has url, model and api_key_env, not {unknown[0]!r}")
        for key in ("url", "model"):
            if not isinstance(spec.get(key), str) or not spec[key]:
                raise ValueError(f"embedding needs {key}, a string")
        variable = spec.get("api_key_env")
        if variable is not None and (not isinstance(variable, str) or not variable):
            raise ValueError("embedding takes the name of an environment variable as api_key_env")
        self._url, self._model, self._variable = spec["url"], spec["model"], variable
        try:
            parts = urlsplit(self._url)
            scheme, host, _ = parts.scheme, parts.hostname, parts.port
        except ValueError:
            scheme, host = "", None
        if scheme not in ("http", "https") or not host:
            raise ValueError(f"embedding needs url, an http:// or https:// URL, not {self._url!r}")
        # Neither what it may hold in credentials nor its query is told.
        self.name = f"the embedding endpoint {scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._http, _ = web_manager(self._url, timeout=urllib3.Timeout(connect=10.0, read=EMBEDDING_SECONDS))

    def embed(self, texts: list[str]) -> Vectors:
        """The vectors of texts, as the endpoint gives them. Raises EmbeddingError."""
        fields = {"Content-Type": "application/json", "Accept": "application/json"}
        fields["User-Agent"] = f"ratel/{rat.__version__}"
        if self._variable is not None:
            key = os.environ.get(self._variable)
            if not key:
                raise EmbeddingError(f"{self.name} needs a key: set {self._variable} to it")
            fields["Authorization"] = f"Bearer {key}"
        body = json.dumps({"model": self._model, "input": texts}).encode()
        # Embedding twice does no harm: a request on a connection that the server gave up is sent anew, once.
        retries = urllib3.Retry(1, connect=0, other=0, status=0, allowed_methods=None)
        try:
            while True:
                with contextlib.suppress(urllib3.exceptions.ClosedPoolError):  # by another thread, in this moment
                    response = self._http.request(
                        "POST", self._url, body=body, headers=fields, retries=retries, redirect=False
                    )
                    break
        except urllib3.exceptions.HTTPError as e:
            raise EmbeddingError(f"{self.name} {_failure(e)}") from e
        return self._read(response.status, response.data, len(texts))

    def close(self) -> None:
        """Close the connections that are idle. The next use opens another."""
        pool = self._http.connection_from_url(self._url)
        self._http.clear()
        pool.close()  # clear() leaves that to the garbage collector

    def _read(self, status: int, content: bytes, count: int) -> Vectors:
        if status != 200:
            said = " ".join(content[:2000].decode("utf-8", "replace").split())[:200]
            raise EmbeddingError(f"{self.name} answered HTTP {status}" + (f": {said}" if said else ""))
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
            raise EmbeddingError(f"{self.name} answered with something else than embeddings")
        places = [item.get("index", place) for place, item in enumerate(data)]
        if sorted(places, key=str) != sorted(range(count), key=str):
            raise EmbeddingError(
                f"{self.name} answered with {_vectors(len(data))} for {_texts(count)}, or numbered wrong"
            )
        return [item.get("embedding") for _, item in sorted(zip(places, data), key=operator.itemgetter(0))]


def _failure(error: urllib3.exceptions.HTTPError) -> str:
    """What went wrong with a request, in the words of the system."""
    cause: BaseException | None = error
    timeout = False
    while cause is not None and not isinstance(cause, OSError):
        timeout = isinstance(cause, urllib3.exceptions.ReadTimeoutError)
        inner = getattr(cause, "reason", None) or cause.__cause__ or (cause.args[-1] if cause.args else None)
        cause = inner if isinstance(inner, BaseException) else None
    if timeout or isinstance(cause, (TimeoutError, socket.timeout)):
        return "did not answer in time"
    if isinstance(cause, ssl.SSLError):
        return f"failed the TLS handshake: {rat.openssl_reason(cause)}"
    return f"is unreachable: {rat.system_reason(cause)}" if cause is not None else "gave no HTTP answer"


# --- Ranking -------------------------------------------------------------------------------------------


class Document(NamedTuple):
    """A text made ready to be taken in: what takes time is done, so that the lock is held for a moment only."""

    identifier: str
    counts: Mapping[str, int]  # of its terms
    vector: array[float] | None


class Entry(Generic[T]):
    """What the ranking has of one item. Never changed, only replaced: it may be read without the lock."""

    __slots__ = ("identifier", "item", "slot", "vector")

    def __init__(self, identifier: str, item: T, slot: int, vector: array[float] | None) -> None:
        self.identifier = identifier
        self.item = item
        self.slot = slot
        self.vector = vector


class Ranking(Generic[T]):
    """Items by identifier, ranked for a query by BM25, by the cosine of embeddings, or by both fused.

    ``lock`` guards all that it holds, and is for its owner to guard with what changes along with it. Terms are found
    and texts embedded before it is taken, cosines computed after: a search sees the items as they were at one moment,
    and waits for no endpoint of another's.
    """

    def __init__(self, method: str = "bm25", embedding: Embedding | None = None) -> None:
        """Rank by ``method``: "bm25", or "semantic" or "hybrid" with an embedding. Raises ValueError."""
        if method not in METHODS:
            raise ValueError(f"the method is bm25, semantic or hybrid, not {method!r}")
        if method == "bm25" and embedding is not None:
            raise ValueError("a BM25 catalog has no vectors, and cannot get any: choose method semantic or hybrid")
        if method != "bm25" and embedding is None:
            raise ValueError(f"method {method} needs an embedding: a function, or a mapping with url and model")
        self.method = method
        self.lock = threading.Lock()
        self._embedder = None if embedding is None else Embedder(embedding)
        self._entries: dict[str, Entry[T]] = {}
        self._index = TermIndex()
        self._at: dict[int, Entry[T]] = {}  # by slot

    def close(self) -> None:
        """Close the connections to an embedding endpoint. The next use opens another."""
        if self._embedder is not None:
            self._embedder.close()

    def prepare(self, texts: Mapping[str, Sequence[str]]) -> list[Document]:
        """Make the texts of items ready to be taken in, without the lock. Raises EmbeddingError."""
        counts: list[Mapping[str, int]] = [
            Counter(terms("\n".join(of_item))) if self.method != "semantic" else {} for of_item in texts.values()
        ]
        vectors: Sequence[array[float] | None] = [None] * len(texts)
        if self._embedder is not None:
            whole = ("\n".join(text for text in of_item if text.strip()) for of_item in texts.values())
            vectors = self._embedder.embed([text or identifier for identifier, text in zip(texts, whole)])
        return [Document(*document) for document in zip(texts, counts, vectors)]

    def change(self, removed: Iterable[str], added: Sequence[tuple[Document, T]]) -> None:
        """Take items out and others in, each in the place of one with its identifier. Only with the lock.

        Raises EmbeddingError, with nothing changed, for vectors of another dimension than those that stay.
        """
        gone = {*removed, *(document.identifier for document, _ in added)}
        if added:
            staying = (entry for identifier, entry in self._entries.items() if identifier not in gone)
            self._check_dimension(next(staying, None), added[0][0].vector)
        for identifier in gone:
            entry = self._entries.pop(identifier, None)
            if entry is not None:
                self._index.remove(entry.slot)
                del self._at[entry.slot]
        for document, item in added:
            slot = self._index.add(document.counts)
            entry = Entry(document.identifier, item, slot, document.vector)
            self._entries[document.identifier] = self._at[slot] = entry

    def get(self, identifier: str) -> T | None:
        """The item of an identifier. Only with the lock."""
        entry = self._entries.get(identifier)
        return None if entry is None else entry.item

    def identifiers(self) -> list[str]:
        """The identifiers of all items. Only with the lock."""
        return list(self._entries)

    def search(self, query: str, most: int) -> list[tuple[T, float]]:
        """The ``most`` best items and their scores, the best first, ties by identifier. Takes the lock itself.

        BM25 finds what has a word of the query, which may be nothing. The others rank all items: by cosine, from -1
        to 1; or by the sum of ``1 / (60 + rank)`` over both rankings, the first 100 of each, ranks from 0. A blank
        query finds nothing. Raises EmbeddingError, and TypeError for a query that is no string.
        """
        if not isinstance(query, str):
            raise TypeError(f"the query is a string, not {type(query).__name__}")
        if not query.strip():
            return []
        words = [] if self.method == "semantic" else terms(query)
        if self._embedder is None:
            with self.lock:
                return [(entry.item, score) for entry, score in self._by_terms(words, most)]
        with self.lock:
            if not self._entries:
                return []
        [vector] = self._embedder.embed([query])
        with self.lock:
            by_terms = self._by_terms(words, FUSED)
            entries = list(self._entries.values())
        self._check_dimension(next(iter(entries), None), vector)
        cosines = ((entry, _dot(vector, entry.vector or vector)) for entry in entries)
        if self.method == "semantic":
            return [(entry.item, score) for entry, score in _best(cosines, most)]
        fused: dict[str, tuple[Entry[T], float]] = {}
        for ranked in (by_terms, _best(cosines, FUSED)):
            for rank, (entry, _) in enumerate(ranked):
                before = fused[entry.identifier][1] if entry.identifier in fused else 0.0
                fused[entry.identifier] = entry, before + 1 / (FUSION + rank)
        return [(entry.item, score) for entry, score in _best(fused.values(), most)]

    def _by_terms(self, words: Sequence[str], most: int) -> list[tuple[Entry[T], float]]:
        scores = self._index.scores(words, most)
        if len(scores) > most:
            least = nlargest(most, scores.values())[-1]
            scores = {slot: score for slot, score in scores.items() if score >= least}
        return _best(((self._at[slot], score) for slot, score in scores.items()), most)

    def _check_dimension(self, entry: Entry[T] | None, vector: array[float] | None) -> None:
        if entry is None or entry.vector is None or vector is None or len(entry.vector) == len(vector):
            return
        assert self._embedder is not None
        raise EmbeddingError(
            f"{self._embedder.name} gave vectors of {len(vector)} dimensions, "
            f"where those of the catalog have {len(entry.vector)}"
        )


def _best(scored: Iterable[tuple[Entry[T], float]], most: int) -> list[tuple[Entry[T], float]]:
    return nsmallest(most, scored, key=lambda one: (-one[1], one[0].identifier))


def _dot(one: array[float], other: array[float]) -> float:
    return float(sum(map(operator.mul, one, other)))
