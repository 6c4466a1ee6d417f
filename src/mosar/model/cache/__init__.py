"""KV caches: the keys and values of the tokens so far.

regime.py        RegimeLayerCache, RegimeCache   for layers with regimes; they compute attention
dense.py         DenseLayerCache, DenseCache     for all other layers; they return all keys
layer.py         what both can do: reorder rows, drop the last tokens, be part of a graph
tokens.py        the tokens that go into or come out of a cache, and their checks
ordered_keys.py  stores keys in the order they came       | each layer uses one
regime_keys.py   stores keys by regime, and evicts them   | of these two
regime_lists.py  the paged lists of regime_keys.py, which the kernels read
"""

from mosar.model.cache.dense import DenseCache, DenseLayerCache
from mosar.model.cache.regime import RegimeCache, RegimeLayerCache

__all__ = ["DenseCache", "DenseLayerCache", "RegimeCache", "RegimeLayerCache"]
