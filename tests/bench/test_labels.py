"""Labels for benchmarks: the paper's shares, runs where asked for, files read or refused."""

import numpy as np
import pytest
import torch

from mosar import MoSARConfig, Regime
from mosar.bench.labels import DRAWN, KEY_SHARES, MEAN_RUN, QUERY_SHARES, make_labels

CONFIG = MoSARConfig()
TWO = MoSARConfig(regimes=(Regime("S", 8, 0.5), Regime("G", 32, 1.0)))


def num_runs(labels):
    return 1 + int((labels[1:] != labels[:-1]).sum())


@pytest.mark.parametrize("source", DRAWN)
def test_drawn_labels_have_the_papers_shares(source):
    length = 400_000
    drawn = make_labels(source, length, 0, CONFIG)
    for labels, shares in zip(drawn, (QUERY_SHARES, KEY_SHARES), strict=True):
        found = torch.bincount(labels, minlength=3) / length
        torch.testing.assert_close(found, torch.tensor(shares), atol=0.015, rtol=0)


def test_clustered_labels_come_in_runs():
    length = 400_000
    for labels, shares in zip(
        make_labels("clustered", length, 0, CONFIG), (QUERY_SHARES, KEY_SHARES), strict=True
    ):
        # Neighbouring runs may have the same regime, so that they look like one.
        differ = 1 - sum(share**2 for share in shares)
        assert num_runs(labels) == pytest.approx(length / MEAN_RUN * differ, rel=0.05)


@pytest.mark.parametrize("source", DRAWN)
def test_drawn_labels_follow_the_seed(source):
    first, again, other = (make_labels(source, 100, seed, CONFIG) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])


def test_labels_of_a_file(tmp_path):
    path = tmp_path / "labels.npz"
    q, k = np.arange(10, dtype=np.uint8) % 2, np.ones(12, dtype=np.int32)
    np.savez(path, labels_q=q, labels_k=k)
    labels_q, labels_k = make_labels(str(path), 9, 0, TWO)
    assert labels_q.tolist() == q[:9].tolist()
    assert labels_k.tolist() == [1] * 9
    assert labels_q.dtype == labels_k.dtype == torch.int64


@pytest.mark.parametrize(
    ("arrays", "part"),
    [
        ({"labels_q": [0, 1]}, "must hold labels_q and labels_k"),
        ({"labels_q": [0, 1], "labels_k": [0]}, "labels_k has 1 tokens, 2 are asked for"),
        ({"labels_q": [0, 2], "labels_k": [0, 1]}, r"labels_q must lie in 0\.\.1"),
        ({"labels_q": [0, -1], "labels_k": [0, 1]}, r"labels_q must lie in 0\.\.1"),
        ({"labels_q": [[0, 1]], "labels_k": [0, 1]}, "labels_q must be integers"),
        ({"labels_q": [0.0, 1.0], "labels_k": [0, 1]}, "labels_q must be integers"),
    ],
)
def test_bad_arrays_are_refused(tmp_path, arrays, part):
    path = tmp_path / "labels.npz"
    np.savez(path, **{name: np.asarray(values) for name, values in arrays.items()})
    with pytest.raises(ValueError, match=part):
        make_labels(str(path), 2, 0, TWO)


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 half"])
def test_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "labels.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a file of arrays"):
        make_labels(str(path), 2, 0, TWO)


def test_drawing_needs_the_papers_regimes():
    with pytest.raises(ValueError, match="drawn for 3 regimes, the configuration has 2"):
        make_labels("independent", 2, 0, TWO)


def test_other_sources_are_refused():
    with pytest.raises(ValueError, match=r"independent.*FILE\.npz, got 'labels\.pt'"):
        make_labels("labels.pt", 2, 0, TWO)
