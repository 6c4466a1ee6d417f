"""KV caches: what attention keeps of the tokens so far.

regime.py        RegimeLayerCache, RegimeCache   of layers with regimes; they attend themselves
dense.py         DenseLayerCache, DenseCache     of all others; they give back all keys
layer.py         what both can do: rows move, the last tokens go, graphs take them
tokens.py        tokens on their way in or out, checked by name
ordered_keys.py  keys in the order they came        | where the tokens of a layer are:
regime_keys.py   keys by regime, which are evicted  | either of the two
regime_lists.py  the paged lists of the latter, which the kernels read
"""

from mosar.model.cache.dense import DenseCache, DenseLayerCache
from mosar.model.cache.regime import RegimeCache, RegimeLayerCache

__all__ = ["DenseCache", "DenseLayerCache", "RegimeCache", "RegimeLayerCache"]
