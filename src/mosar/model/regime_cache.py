"""The name under which `mosar.model.cache` was known first."""

from mosar.model.cache import RegimeCache, RegimeLayerCache

__all__ = ["RegimeCache", "RegimeLayerCache"]
