"""Lengths and routings: what may be asked, and errors that name the choices."""

import pytest

from mosar.evaluation.choices import check_routings, parse_lengths
from mosar.geometries import VARIANTS, HeadShape


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


def checked(routings, variant):
    return check_routings(routings, VARIANTS[variant].build(HeadShape(4, 2, 8, 64)), variant)


def test_routings():
    assert checked(None, "mosar") == ("soft", "top1", "sparse")
    assert checked(None, "rope") == checked(None, "fixed-s") == ("native",)
    assert checked(["sparse", "soft", "sparse"], "mosar") == ("soft", "sparse")
    assert checked(["sparse"], "fixed-s") == ("sparse",)
    with pytest.raises(ValueError, match=r"one of soft, top1, sparse; got 'hard'"):
        checked(["soft", "hard"], "mosar")
    with pytest.raises(ValueError, match=r"one of native, since rope has no routers; got 'soft'"):
        checked(["soft"], "rope")


def test_nothing_asked():
    with pytest.raises(ValueError, match="lengths must name at least one"):
        parse_lengths([], 64)
    with pytest.raises(ValueError, match="routings must name at least one"):
        checked([], "mosar")
