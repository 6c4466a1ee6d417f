"""What the microscope sees: attention as the reference has it, the support, the text, the cache."""

import pytest
import torch
from typer.testing import CliRunner

import mosar
from integrations.hf.conftest import dataset, run  # noqa: F401
from microscope.models import make_decoder, make_retrofit
from mosar.cli import app
from mosar.core.bias import LabelBias
from mosar.core.config import MoSARConfig
from mosar.core.hard_domain import support_mask
from mosar.core.layout import resolve_layout
from mosar.core.reference_attention import attend_routed
from mosar.data.tokenizer import ByteTokenizer, train_bpe
from mosar.errors import ModelError
from mosar.integrations.hf.export import export_run
from mosar.microscope import attention
from mosar.microscope.attention import INSIDE, OUTSIDE, view_layer
from mosar.microscope.text import read_text, split_pieces
from mosar.model.cache.regime import RegimeLayerCache

VIEWS = {
    "nonsense?token=3": "must begin with one of top, reading",
    "#reading?lyer=2": "got 'lyer'",
    "savings?token=x": "token must be a whole number, got 'x'",
}
TEXT = "Some text, a little of it; and some more, so that there is a way back. " * 2


@pytest.mark.parametrize(
    ("length", "kv_heads", "groups", "sinks", "window", "softcap"),
    [(1, 1, 1, 0, None, None), (70, 2, 2, 3, None, 5.0), (70, 4, 4, 0, 20, None)],
)
def test_a_layer_is_as_the_reference_has_it(
    length, kv_heads, groups, sinks, window, softcap, monkeypatch
):
    monkeypatch.setattr(attention, "_CHUNK", 700)
    generator = torch.Generator().manual_seed(length + groups)
    q, k = (torch.randn(h, length, 8, generator=generator) * 2 for h in (4, kv_heads))
    config = MoSARConfig.scaled(32, num_sinks=sinks, composition="mean" if sinks else "min")
    labels = tuple(torch.randint(3, (groups, length), generator=generator) for _ in range(2))
    scores = {"scale": 0.4, "softcap": softcap}
    # It grows along the text, as what forget gates add does.
    of_key = 20 * torch.rand(4, length, generator=generator).double().cumsum(-1) if sinks else None
    scores_of_keys = {"of_key": of_key, **scores}
    view = view_layer(q, k, labels, config, gated=True, window=window, **scores_of_keys)
    layout = resolve_layout(1, length, length, window=window)
    bias = LabelBias(
        *(x[None] for x in labels),
        config,
        ends_at_reach=False,
        of_key=None if of_key is None else of_key[None],
    )
    exact = attend_routed(*(x[None].double() for x in (q, k, k)), layout, bias, **scores).attention[
        0
    ]
    exact = exact.unflatten(0, (groups, -1)).mean(dim=1)
    inside = support_mask(*(x[None] for x in labels), config, layout)[0]
    assert torch.equal(view.reads.long(), inside.sum(dim=-1))
    torch.testing.assert_close(view.outside.double(), (exact * ~inside).sum(-1), **EXACT)
    for largest, mask, most in (
        (view.inside_largest, inside, INSIDE),
        (view.outside_largest, ~inside, OUTSIDE),
    ):
        shares = (exact * mask).sort(dim=-1, descending=True).values[..., :most]
        found = largest.share[..., : shares.shape[-1]].double()
        torch.testing.assert_close(found, shares, **EXACT)
        places = (torch.arange(length)[:, None] - largest.distance).long()
        there = largest.share > 1e-6
        at_place = exact.gather(2, places.clamp_min(0))
        torch.testing.assert_close(largest.share.double()[there], at_place[there], **EXACT)
        assert mask.gather(2, places)[there].all()


EXACT = {"rtol": 1e-4, "atol": 1e-6}


@pytest.mark.parametrize("kind", ["mosar", "mosar-hard", "mosar-plus", "retrofit"])
def test_every_kind_of_model_is_seen(kind):
    model = make_retrofit() if kind == "retrofit" else make_decoder(kind)
    seen = mosar.look(model, TEXT, tokenizer=ByteTokenizer())
    length = len(TEXT.encode())
    layers, _, groups, tokens = seen.labels.shape
    assert (layers, groups, tokens) == (2, seen.config.routing_groups, length)
    assert "".join(seen.pieces) == TEXT
    outside = torch.stack([view.outside for view in seen.views])
    assert 0 < float(outside.mean()) < 1
    assert 0 < min(seen.savings.layer_reads) <= max(seen.savings.layer_reads) < 1
    if not seen.gated:
        assert model.routing == "dense"
    for view, share in zip(seen.views, seen.savings.layer_alive, strict=True):
        # The cache itself, given the same keys.
        cache = RegimeLayerCache(seen.config)
        k = torch.zeros(1, groups, length, 4)
        cache.update(k, k, view.labels[1][None].long())
        kept = sum(int(count.sum()) for count in cache.regime_counts.values())
        assert share == pytest.approx(kept / (groups * length))
    ranking = seen.rankings["key"].far_positions
    chosen = seen.labels[:, 1].flatten(0, 1) == seen.config.global_index
    assert ranking[0].far == pytest.approx(float(chosen.double().mean(dim=0).max()))
    assert "<iframe sandbox" in seen._repr_html_()


def test_texts_are_read_whole_cut_or_repaired():
    tokenizer = ByteTokenizer()
    seen = mosar.look(make_decoder(), "x", tokenizer=tokenizer)
    assert (seen.pieces, seen.notes, seen.savings.layer_reads) == (["x"], [], [1.0, 1.0])
    cut = mosar.look(make_decoder(), b"ab \xff" * (1 << 18), tokenizer=tokenizer, max_tokens=40)
    assert len(cut.pieces) == 40
    assert "not valid UTF-8" in cut.notes[0] and "first 40 tokens" in cut.notes[1]
    assert "of 1,048,576 characters" in cut.notes[1]
    with pytest.raises(ValueError, match="the text is empty"):
        mosar.look(make_decoder(), "", tokenizer=tokenizer)
    with pytest.raises(ModelError, match="no routers: its geometry is rope"):
        mosar.look(make_decoder("rope"), "x", tokenizer=tokenizer)


@pytest.mark.parametrize("trained", [False, True])
def test_pieces_are_the_text(trained):
    text = "naïve — שלום العربية 漢字 🙂\r\n\t\x00x\u202e  end"
    tokenizer = train_bpe([text, "some of it"], 300) if trained else ByteTokenizer()
    tokens = tokenizer.encode(text)
    pieces = split_pieces(tokens, tokenizer.decode)
    assert "".join(pieces) == text and len(pieces) == len(tokens)
    assert "�" not in "".join(pieces)
    broken = read_text(b"a\xc3(\xe2\x82", tokenizer.encode, tokenizer.decode, most=99)
    assert "".join(broken.pieces) == "a�(�"
    if not trained:
        # The sign is three bytes of its own: the last one shows it.
        assert broken.pieces == ["a", "", "", "�", "(", "", "", "�"]


def test_command(run, tmp_path, monkeypatch):  # noqa: F811
    def look(folder, *options, stdin=None):
        arguments = ["look", str(folder), "--out", str(tmp_path / "look.html"), *options]
        return CliRunner().invoke(app, arguments, input=stdin)

    source = run()
    result = look(source, "--text", "-", "--tokens", "20", stdin="The cat sat on the mat again.")
    assert result.exit_code == 0, result.output
    assert "first 20 tokens" in result.stderr
    assert "<title>MoSAR: a look into mosar</title>" in (tmp_path / "look.html").read_text()
    refused = look(run("rope"), "--text", "-", stdin="x")
    assert refused.exit_code == 1 and len(refused.stderr.strip().splitlines()) <= 2
    assert "no routers" in refused.stderr
    missing = look(source, "--text", str(tmp_path / "none.txt"))
    assert missing.exit_code == 1 and "none.txt" in missing.stderr
    exported = export_run(source, tmp_path / "exported")
    result = look(exported, "--text", "-", stdin="The cat sat on the mat again.")
    assert result.exit_code == 0, result.output
    assert "a look into exported" in (tmp_path / "look.html").read_text()
    picture = look(source, "--text", "-", "--picture", str(tmp_path / "look.jpg"), stdin="x")
    assert picture.exit_code == 1 and "--picture must end in .png" in picture.stderr
    for view, reason in VIEWS.items():
        wrong = look(source, "--text", "-", "--picture", "look.png", "--view", view, stdin="x")
        assert wrong.exit_code == 2 and reason in " ".join(wrong.stderr.split()), wrong.stderr
    alone = look(source, "--text", "-", "--view", "reading", stdin="x")
    assert alone.exit_code == 2 and "give --picture too" in alone.stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    browser = look(source, "--text", "-", "--picture", str(tmp_path / "look.png"), stdin="x")
    assert browser.exit_code == 1 and "--picture needs Chromium" in browser.stderr
    assert not (tmp_path / "look.png").exists()
