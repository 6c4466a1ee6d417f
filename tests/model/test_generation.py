"""Writing with a decoder: which token is drawn, and that the cache changes none."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mosar.core.hard_domain import build_hard_domain
from mosar.model.generation import DecoderReader, Sampling, write_tokens
from mosar.model.label_log import LabelLog

from .models import small_decoder
from .test_decoder import make_lively

PROMPT = [5, 17, 3, 60, 0, 12]
LOGITS = torch.tensor([1.0, 3.0, 3.0, -2.0, 0.5])


def lively(variant="mosar"):
    return make_lively(small_decoder(variant, init_std=0.2))


class Noting:
    """A reader that keeps the logits it gave."""

    def __init__(self, reader):
        self.reader, self.logits = reader, []

    def read(self, tokens):
        self.logits.append(self.reader.read(tokens))
        return self.logits[-1]


@pytest.mark.parametrize("routing", ["soft", "top1", "sparse"])
@pytest.mark.parametrize("variant", ["alibi", "mosar"])
@torch.no_grad()
def test_writing_reads_what_the_decoder_reads(variant, routing):
    """The logits that tokens were drawn from are those of the whole text."""
    decoder = lively(variant)
    reader = DecoderReader(decoder, routing)
    noting = Noting(reader)
    hot = Sampling(temperature=3.0)
    written = list(write_tokens(noting, PROMPT, max_new_tokens=40, sampling=hot))
    text = torch.tensor([[*PROMPT, *written[:-1]]])
    whole = decoder.logits(decoder(text, routing=routing).hidden)[0, len(PROMPT) - 1 :]
    assert (torch.stack(noting.logits) - whole).abs().max() < 2e-5
    assert len(set(written)) > 10
    # The last one was not read.
    assert reader.num_tokens == len(PROMPT) + 39
    assert reader.dense_bytes == 2 * 2 * 2 * 8 * 4 * 45 and reader.cache_bytes > 0


def test_greedy_writing_takes_the_likeliest():
    noting = Noting(DecoderReader(lively()))
    greedy = Sampling(temperature=0)
    written = list(write_tokens(noting, PROMPT, max_new_tokens=5, sampling=greedy))
    assert written == [int(logits.argmax()) for logits in noting.logits]


@torch.no_grad()
def test_density_is_that_of_the_labels():
    decoder = lively()
    reader = DecoderReader(decoder, "sparse")
    written = list(write_tokens(reader, PROMPT, max_new_tokens=60))
    tokens = torch.tensor([[*PROMPT, *written[:-1]]])
    config = decoder.attention_config.mosar_config(32)
    densities = [
        build_hard_domain(routing.query.labels, routing.key.labels, config).mask.sum().item()
        / (65 * 66 / 2)
        for routing in decoder(tokens, routing="sparse").routings
    ]
    assert reader.density == pytest.approx(sum(densities) / 2, abs=1e-12)
    assert 0.05 < reader.density < 0.95


def test_density_without_routers():
    for variant, expected in (("rope", 1.0), ("rope-m-mask", (65 * 66 / 2 - 56 * 57 / 2) / 2145)):
        reader = DecoderReader(lively(variant), "soft")
        assert reader.density == 1.0
        list(write_tokens(reader, PROMPT, max_new_tokens=60))
        assert reader.density == pytest.approx(expected)


def test_seeds_and_stop():
    decoder = lively()

    def write(**options):
        reader = DecoderReader(decoder)
        return list(write_tokens(reader, PROMPT, max_new_tokens=30, **options))

    first = write(seed=4)
    assert write(seed=4) == first != write(seed=5)
    stop = first[10]
    assert write(seed=4, stop=stop) == first[: first.index(stop)]


@given(
    temperature=st.floats(0.05, 5),
    top_k=st.none() | st.integers(1, 7),
    top_p=st.none() | st.floats(0.01, 1.0),
)
def test_probabilities(temperature, top_k, top_p):
    found = Sampling(temperature=temperature, top_k=top_k, top_p=top_p).probabilities(LOGITS)
    assert found.sum().item() == pytest.approx(1)
    # By hand: drop the least likely, one by one, as long as the rule allows it.
    exact = torch.softmax(LOGITS.double() / temperature, 0)
    order = sorted(range(5), key=lambda i: (-exact[i].item(), i))[:top_k]
    kept, total = [], sum(exact[i].item() for i in order)
    for index in order:
        if top_p is not None and sum(exact[i].item() for i in kept) / total >= top_p - 1e-12:
            break
        kept.append(index)
    expected = torch.zeros(5, dtype=torch.float64)
    expected[kept] = exact[kept] / exact[kept].sum()
    assert (found - expected).abs().max() < 1e-9


def test_a_tiny_temperature_is_nearly_greedy():
    found = Sampling(temperature=1e-300).probabilities(LOGITS)
    assert torch.equal(found[[1, 2]], torch.full((2,), 0.5, dtype=torch.float64))
    assert Sampling(temperature=0).choose(LOGITS, torch.Generator()) == 1


def test_draws_follow_the_probabilities():
    sampling, generator = Sampling(temperature=1.0, top_k=3), torch.Generator().manual_seed(0)
    draws = torch.tensor([sampling.choose(LOGITS, generator) for _ in range(3000)])
    shares = torch.bincount(draws, minlength=5) / 3000
    assert (shares - sampling.probabilities(LOGITS)).abs().max() < 0.04
    assert shares[3] == shares[4] == 0


def test_wrong_values_are_named():
    for options, rule in (
        ({"temperature": -1}, "temperature must be a number >= 0"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_k": 0}, "top_k must be an integer >= 1"),
        ({"top_p": 0.0}, "top_p must be a number above 0"),
        ({"top_p": 1.5}, "top_p must be"),
    ):
        with pytest.raises(ValueError, match=rule):
            Sampling(**options)
    decoder = lively()
    with pytest.raises(ValueError, match="prompt must hold at least one token"):
        next(write_tokens(DecoderReader(decoder), [], max_new_tokens=3))
    with pytest.raises(ValueError, match="max_new_tokens must be"):
        next(write_tokens(DecoderReader(decoder), PROMPT, max_new_tokens=0))
    with pytest.raises(ValueError, match=r"tokens must lie in 0\.\.60, got 61"):
        DecoderReader(decoder).read([3, 61])
    with pytest.raises(ValueError, match="logits are not finite"):
        Sampling().choose(torch.tensor([0.0, float("nan")]), torch.Generator())


def test_labels_are_kept_a_byte_each():
    log, parts = LabelLog(), torch.randint(3, (1, 2, 700)).split([1, 300, 1, 398], dim=-1)
    for part in parts:
        log.append(part)
    assert len(log) == 700
    assert torch.equal(log.labels, torch.cat(parts, dim=-1))
    assert log._kept.nbytes <= 2 * 2 * 700 and log._kept.dtype == torch.uint8
