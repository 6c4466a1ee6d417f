"""Does a retrofitted model still find what it has read? Offline tasks in the manner of RULER.

    single           one number hidden in a long text of plain sentences
    multi-key        several keys with a number each; each is asked for
    multi-value      one key with several numbers; all are asked for
    tracking         X1 = number, X2 = X1, ...: which variables have that number?
    common words     a list in which a few words come far more often than all others

A text is read once, and each of its questions goes on from a copy of the cache. Answers are the
likeliest tokens. The score of a question is the share of the expected words in its answer.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from mosar.core.hard_domain import build_hard_domain
from mosar.integrations.retrofit.attach import Retrofit
from mosar.records import RetrofitNeedles

TASKS = ("single", "multi-key", "multi-value", "tracking", "common words")
ROOM = 96
"""Tokens of a length that are left for a question and its answer."""
_NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)
_CITIES = ("Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Prague", "Dublin")
_WORDS = (
    *("apple", "river", "stone", "table", "cloud", "horse", "paper", "light", "green", "music"),
    *("water", "chair", "bread", "house", "plant", "glass", "train", "smile", "beach", "clock"),
    *("mouse", "heart", "tower", "sugar", "field", "night", "woman", "north", "queen", "storm"),
    *("knife", "radio", "lemon", "tiger", "wheel", "voice", "sheep", "grain", "coast", "dress"),
)


@dataclass(frozen=True)
class Question:
    """What is asked after a text, up to the answer's first word, and the words expected in it."""

    text: str
    answers: tuple[str, ...]


class Asked(NamedTuple):
    """What came of a context."""

    scores: list[float]
    """By question."""
    answers: list[str]
    density: float
    """The share of the text's causal pairs that were read."""


@dataclass(frozen=True)
class Context:
    """A text with its needles at given depths, and the questions about it."""

    task: str
    needles: tuple[str, ...]
    """Sentences, in their order; they are spread evenly over the text."""
    questions: tuple[Question, ...]
    noise: tuple[str, ...] = (_NOISE,)
    """What lies between them, in turn."""
    opening: str = ""


def make_context(task: str, number: int) -> Context:
    """The context number `number` of a task; equal numbers give equal texts."""
    draw = random.Random(f"{task} {number}")
    return _MAKERS[task](draw)


def _magic(city: str, value: str) -> str:
    return f"One of the special magic numbers for {city} is: {value}. "


def _number(draw: random.Random) -> str:
    return str(draw.randrange(10_000, 100_000))


def _single(draw: random.Random) -> Context:
    city, value = draw.choice(_CITIES), _number(draw)
    asked = f"\nQuestion: What is the special magic number for {city}?\n"
    asked += f"Answer: The special magic number for {city} is"
    # One needle, at a depth that differs by context.
    before = draw.randrange(4)
    needles = ["" for _ in range(4)]
    needles[before] = _magic(city, value)
    return Context("single", tuple(needles), (Question(asked, (value,)),))


def _multi_key(draw: random.Random) -> Context:
    cities = draw.sample(_CITIES, 4)
    values = {city: _number(draw) for city in cities}
    questions = tuple(
        Question(
            f"\nQuestion: What is the special magic number for {city}?\n"
            f"Answer: The special magic number for {city} is",
            (value,),
        )
        for city, value in values.items()
    )
    return Context("multi-key", tuple(_magic(c, v) for c, v in values.items()), questions)


def _multi_value(draw: random.Random) -> Context:
    city, values = draw.choice(_CITIES), [_number(draw) for _ in range(4)]
    asked = f"\nQuestion: What are all the special magic numbers for {city}?\n"
    asked += f"Answer: The special magic numbers for {city} are"
    needles = tuple(_magic(city, value) for value in values)
    return Context("multi-value", needles, (Question(asked, tuple(values)),))


def _tracking(draw: random.Random) -> Context:
    names = ["".join(draw.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=3)) for _ in range(4)]
    value = _number(draw)
    chain = [f"VAR {names[0]} = {value}. "]
    chain += [f"VAR {new} = VAR {old}. " for old, new in pairwise(names)]
    asked = f"\nQuestion: Which variables have the value {value}?\n"
    asked += f"Answer: The variables that have the value {value} are"
    return Context("tracking", tuple(chain), (Question(asked, tuple(names)),))


def _common_words(draw: random.Random) -> Context:
    words = draw.sample(_WORDS, len(_WORDS))
    common, rare = words[:3], words[3:]
    pieces = []
    for _ in range(8):
        # A common word comes in every piece, a rare one in few.
        piece = common * 2 + draw.sample(rare, 6)
        draw.shuffle(piece)
        pieces.append(", ".join(piece) + ", ")
    asked = "\nQuestion: What are the 3 most common words in the list?\n"
    asked += "Answer: The 3 most common words in the list are"
    opening = "Below is a list of words. Memorize the words that come most often. "
    questions = (Question(asked, tuple(common)),)
    return Context("common words", (), questions, noise=tuple(pieces), opening=opening)


_MAKERS: dict[str, Callable[[random.Random], Context]] = {
    "single": _single,
    "multi-key": _multi_key,
    "multi-value": _multi_value,
    "tracking": _tracking,
    "common words": _common_words,
}


def context_tokens(context: Context, tokenizer: Any, length: int) -> list[int]:
    """The text in tokens, with room for a question in `length`: as much noise as goes in."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    opening = encode(context.opening) if context.opening else []
    needles = [encode(needle) if needle else [] for needle in context.needles]
    noise = [encode(piece) for piece in context.noise]
    room = length - ROOM - len(opening) - sum(map(len, needles))
    if room < 0:
        raise ValueError(f"length must leave room for the needles of {context.task}, got {length}")
    gaps = len(needles) + 1
    filled, used, pieces = opening, 0, cycle(noise)
    piece = next(pieces)
    for gap in range(gaps):
        while used + len(piece) <= room * (gap + 1) // gaps:
            filled = filled + piece
            used += len(piece)
            piece = next(pieces)
        if gap < len(needles):
            filled = filled + needles[gap]
    return filled


def score(answer: str, expected: Sequence[str]) -> float:
    """The share of the expected words that the answer has."""
    found = set(re.findall(r"\w+", answer))
    return sum(word in found for word in expected) / len(expected)


@torch.no_grad()
def ask(attached: Retrofit, tokenizer: Any, context: Context, length: int) -> Asked:
    """Reads a context once and asks all of its questions."""
    model = attached.model
    cache, density = _read(attached, context_tokens(context, tokenizer, length))
    scores, answers = [], []
    for question in context.questions:
        ids = tokenizer.encode(question.text, add_special_tokens=False)
        expected = " " + ", ".join(question.answers)
        most = len(tokenizer.encode(expected, add_special_tokens=False)) + 8
        written = _write(model, copy.deepcopy(cache), ids, most, tokenizer.eos_token_id)
        answers.append(tokenizer.decode(written))
        scores.append(score(answers[-1], question.answers))
    return Asked(scores, answers, density)


def _read(attached: Retrofit, tokens: list[int]) -> tuple[Cache, float]:
    """The cache of a text, and the share of its causal pairs that were read."""
    labels: dict[Any, Tensor] = {}

    def keep(router: Any, arguments: Any, output: Any) -> None:
        labels[router] = output.labels

    model: Any = attached.model
    hooks = [router.register_forward_hook(keep) for layer in attached for router in layer.routers]
    cache = DynamicCache(config=model.config)
    try:
        ids = torch.tensor([tokens], device=model.device)
        model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    if not labels:
        return cache, 1.0
    densities = []
    for layer in attached:
        queries, keys = (labels[router] for router in layer.routers)
        domain = build_hard_domain(
            queries, keys, layer.config, window=layer.window, materialize=False
        )
        densities.append(domain.density)
    return cache, sum(densities) / len(densities)


def _write(model: Any, cache: Any, ids: Sequence[int], most: int, end: int | None) -> list[int]:
    """The likeliest tokens after `ids`, which follow what is in the cache."""
    row = torch.tensor([ids], device=model.device)
    written: list[int] = []
    for _ in range(most):
        logits: Tensor = model(row, past_key_values=cache, use_cache=True).logits
        token = int(logits[0, -1].argmax())
        if token == end:
            break
        written.append(token)
        row = row.new_tensor([[token]])
    return written


def evaluate_needles(
    attached: Retrofit,
    tokenizer: Any,
    length: int,
    contexts: int,
    *,
    tasks: Sequence[str] = TASKS,
    routing: str,
    reach: int | None = None,
    base: str = "",
    adapter: str = "",
    advance: Callable[[], None] = lambda: None,
) -> list[RetrofitNeedles]:
    """Tasks at one length, `contexts` texts each; the routing stays as it is.

    routing, reach, base and adapter are for the records.
    """
    records = []
    for task in tasks:
        asked = []
        for number in range(contexts):
            asked.append(ask(attached, tokenizer, make_context(task, number), length))
            advance()
        records.append(
            RetrofitNeedles(
                base=base,
                adapter=adapter,
                task=task,
                length=length,
                routing=routing,
                reach=None if reach is None else float(reach),
                contexts=contexts,
                scores=[value for found in asked for value in found.scores],
                answers=[text for found in asked for text in found.answers],
                density=sum(found.density for found in asked) / contexts,
            )
        )
    return records


def window_of_density(density: float, length: int, num_sinks: int) -> int:
    """The shortest reach whose window, with its sinks, reads at least this share of the pairs."""

    def share(reach: int) -> float:
        # The first tokens read all there is; sinks count where the window does not hold them.
        near = min(reach + 1, length)
        pairs = near * (near + 1) // 2 + (length - near) * near
        sinks = sum(min(num_sinks, query - reach) for query in range(reach + 1, length))
        return (pairs + sinks) / (length * (length + 1) / 2)

    low, high = 0, length - 1
    while low < high:
        middle = (low + high) // 2
        if share(middle) >= density:
            high = middle
        else:
            low = middle + 1
    return low
