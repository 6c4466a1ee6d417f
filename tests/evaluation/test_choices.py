"""Lengths and routings: what may be asked, and errors that name the choices."""

import pytest

from mosar.evaluation.choices import check_routings, parse_lengths


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (("1x", "2x", "4x"), (64, 128, 256)),
        (("4x", "1x", "64", 256), (64, 256)),
        ((" 2x ", "100"), (100, 128)),
        (("0.5x", "1.5x"), (32, 96)),
    ],
)
def test_lengths(lengths, expected):
    assert parse_lengths(lengths, 64) == expected


@pytest.mark.parametrize(
    "length", ["0x", "x", "two", "-1x", "1", "0", "1.01x", "2048.5", "", "1e3"]
)
def test_a_wrong_length_says_what_is_right(length):
    with pytest.raises(ValueError, match=r"training length 64, like 1x or 2x, or .*; got "):
        parse_lengths(["1x", length], 64)


def test_routings():
    assert check_routings(None, True, "mosar") == ("soft", "top1", "sparse")
    assert check_routings(None, False, "rope") == ("native",)
    assert check_routings(["sparse", "soft", "sparse"], True, "mosar") == ("soft", "sparse")
    with pytest.raises(ValueError, match=r"one of soft, top1, sparse; got 'hard'"):
        check_routings(["soft", "hard"], True, "mosar")
    with pytest.raises(ValueError, match=r"one of native, since rope has no routers; got 'soft'"):
        check_routings(["soft"], False, "rope")


def test_nothing_asked():
    with pytest.raises(ValueError, match="lengths must name at least one"):
        parse_lengths([], 64)
    with pytest.raises(ValueError, match="routings must name at least one"):
        check_routings([], True, "mosar")
