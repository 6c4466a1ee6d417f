"""The former name of `mosar.model.cache`."""

from mosar.model.cache import RegimeCache, RegimeLayerCache

__all__ = ["RegimeCache", "RegimeLayerCache"]
