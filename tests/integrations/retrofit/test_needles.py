"""Needles: texts hold what is asked for, a copy of the cache answers as a whole text would."""

import pytest
import torch

from integrations.retrofit.models import GEOMETRY, routed_model
from mosar.core.hard_domain import build_hard_domain
from mosar.integrations.retrofit.evaluate import fixed_window
from mosar.integrations.retrofit.needles import (
    ROOM,
    TASKS,
    ask,
    context_tokens,
    make_context,
    score,
    window_of_density,
)


class Letters:
    """A token per letter, in a vocabulary of 97."""

    eos_token_id = None

    def encode(self, text, add_special_tokens=False):
        return [3 + ord(letter) % 94 for letter in text]

    def decode(self, tokens):
        return " ".join(map(str, tokens))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [500, 2000])
def test_texts_hold_what_is_asked_for_and_leave_room(task, length):
    context = make_context(task, 1)
    assert context == make_context(task, 1) != make_context(task, 2)

    class Characters(Letters):
        def encode(self, text, add_special_tokens=False):
            return [ord(letter) for letter in text]

    text = "".join(map(chr, context_tokens(context, Characters(), length)))
    # Whole pieces of noise fill all but less than one of them.
    assert length - ROOM - max(map(len, context.noise)) < len(text) <= length - ROOM
    for needle in context.needles:
        assert text.count(needle) == 1 or not needle
    for question in context.questions:
        assert len(question.text) + len(", ".join(question.answers)) < 300
        for answer in question.answers:
            assert answer in text
    if task == "common words":
        words = text.replace(",", " ").split()
        counts = sorted((words.count(w) for w in set(words)), reverse=True)
        common = [words.count(word) for word in context.questions[0].answers]
        assert sorted(common, reverse=True) == counts[:3] and counts[3] < counts[2]


def test_needles_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must leave room for the needles of tracking, got 100"):
        context_tokens(make_context("tracking", 0), Letters(), 100)


def test_the_score_is_the_share_of_the_expected_words():
    assert score(" 12345, 777.", ("12345", "777")) == 1
    assert score(" 12345 and 77", ("12345", "777")) == 0.5
    assert score("123456", ("12345",)) == 0
    assert score(' "stone", "stone", and "glass"', ("tiger", "stone", "heart")) == 1 / 3
    assert score(" VAR ABC, (DEF)!", ("ABC", "DEF")) == 1


@pytest.mark.parametrize("routing", ["dense", "sparse"])
def test_questions_from_a_copied_cache_are_those_after_the_whole_text(routing):
    model, attached = routed_model(routing=routing)
    context, letters = make_context("multi-key", 0), Letters()
    asked = ask(attached, letters, context, 420)
    text = context_tokens(context, letters, 420)
    assert (asked.density == 1) == (routing == "dense")
    for question, answer in zip(context.questions, asked.answers, strict=True):
        row = torch.tensor([text + letters.encode(question.text)])
        most = len(letters.encode(f" {question.answers[0]}")) + 8
        written = []
        with torch.no_grad():
            for _ in range(most):
                token = model(row, use_cache=False).logits[0, -1].argmax()
                written.append(int(token))
                row = torch.cat([row, token[None, None]], dim=1)
        assert answer == letters.decode(written)


@pytest.mark.parametrize("density", [0.05, 0.3, 0.9])
def test_a_window_of_a_density(density):
    length, sinks = 60, 4
    reach = window_of_density(density, length, sinks)

    def share(reach):
        return sum(
            len({*range(max(i - reach, 0), i + 1), *range(min(sinks, i + 1))})
            for i in range(length)
        ) / (length * (length + 1) / 2)

    assert share(reach) >= density
    assert reach == 0 or share(reach - 1) < density


def test_a_fixed_window_reads_its_window_and_goes_away():
    model, attached = routed_model()
    attached.detach()
    with torch.no_grad():
        before = model(input_ids=torch.arange(3, 50)[None]).logits
        with fixed_window(model, 8, 2) as window:
            seen = []
            window.observe(lambda layer, q, k, *_: seen.append(layer.route(q, k).labels))
            model(input_ids=torch.arange(3, 50)[None], use_cache=False)
            for labels in seen:
                domain = build_hard_domain(*labels, window.config, materialize=False)
                assert domain.count == 2 * sum(
                    min(i + 1, 9) + max(min(i - 8, 2), 0) for i in range(47)
                )
        assert torch.equal(model(input_ids=torch.arange(3, 50)[None]).logits, before)
    assert GEOMETRY.routing_groups == 2
