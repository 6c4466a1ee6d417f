"""Small decoders that the tests share."""

from mosar.geometries import VARIANTS, AttentionConfig
from mosar.model.config import ModelConfig
from mosar.model.decoder import Decoder

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_size": 48,
    "query_pre_attn_scalar": 8,
    "attn_softcap": 50.0,
    "final_softcap": 30.0,
    "max_length": 32,
}


def small_model(**changes) -> ModelConfig:
    return ModelConfig(**(SIZES | changes))


def small_decoder(attention: str | AttentionConfig = "mosar", *, seed: int = 0, **changes):
    """A decoder of a variant (or of a configuration) with initialised weights."""
    if isinstance(attention, str):
        attention = VARIANTS[attention]
    decoder = Decoder(small_model(**changes), attention)
    decoder.init_weights(seed)
    return decoder
