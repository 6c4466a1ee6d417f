"""Labels for benchmarks: the paper's shares, runs where asked for, files read or refused."""

import numpy as np
import pytest
import torch

from mosar import MoSARConfig, Regime
from mosar.bench.labels import DRAWN, KEY_SHARES, MEAN_RUN, QUERY_SHARES, make_labels

CONFIG = MoSARConfig()
TWO = MoSARConfig(regimes=(Regime("S", 8, 0.5), Regime("G", 32, 1.0)))


@pytest.mark.parametrize("source", DRAWN)
def test_drawn_labels_have_the_papers_shares_and_runs(source):
    length = 400_000
    drawn = make_labels(source, length, 0, CONFIG)
    for labels, shares in zip(drawn, (QUERY_SHARES, KEY_SHARES), strict=True):
        found = torch.bincount(labels, minlength=3) / length
        torch.testing.assert_close(found, torch.tensor(shares), atol=0.015, rtol=0)
        # Neighbouring runs may have the same regime, so that they look like one.
        differ = length * (1 - sum(share**2 for share in shares))
        expected = differ / (MEAN_RUN if source == "clustered" else 1)
        assert int((labels[1:] != labels[:-1]).sum()) == pytest.approx(expected, rel=0.05)


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
        ({"labels_q": [0, 1], "labels_k": [0]}, "labels_k has 1 tokens, 2 are needed"),
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


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("damaged.npz", "is not a file of arrays"),
        ("labels.pt", r"independent.*FILE\.npz, got 'labels\.pt'"),
        ("independent", "drawn for 3 regimes, the configuration has 2"),
    ],
)
def test_sources_without_labels_are_refused(tmp_path, monkeypatch, source, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04 half")
    with pytest.raises(ValueError, match=part):
        make_labels(source, 2, 0, TWO)
