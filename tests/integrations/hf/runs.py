"""Models whose every part shows, and run folders as `mosar train` would leave them."""

import json
from pathlib import Path

import torch

from model.models import small_decoder
from model.test_decoder import make_lively
from mosar.integrations.hf import MosarForCausalLM
from mosar.model.decoder import Decoder
from mosar.records import environment
from mosar.training.batches import open_batches
from mosar.training.checkpoints import write_checkpoint
from mosar.training.config import resolve_config
from mosar.training.run_folder import CHECKPOINTS, METRICS, write_config

CORPUS = Path(__file__).parents[2] / "training" / "corpus"
TINY = (
    *("model.hidden_size=32", "model.head_dim=8", "model.ffn_size=48", "model.max_length=32"),
    *("model.query_pre_attn_scalar=8", "train.steps=20", "model.init_std=0.2"),
)
STEP = 20
EPS = torch.finfo(torch.float32).eps


def small_model(attention="mosar", *, vocab_size=61, num_layers=2, **options) -> MosarForCausalLM:
    """A model with lively routers, so that all regimes are chosen."""
    sizes = {"init_std": 0.2, "vocab_size": vocab_size, "num_layers": num_layers}
    decoder = make_lively(small_decoder(attention, **sizes))
    return MosarForCausalLM.from_decoder(decoder, **options)


def make_run(out: Path, variant: str, data: Path, *changes: str) -> Path:
    """A run folder with one checkpoint of random parameters and two lines of metrics."""
    config = resolve_config(variant=variant, preset="smoke", data=data, changes=[*TINY, *changes])
    out.mkdir(parents=True)
    write_config(out, config, open_batches(config).fingerprint())
    decoder = Decoder(config.model, config.attention)
    decoder.init_weights(3)
    make_lively(decoder)
    state = {"config_hash": config.fingerprint(), "rng": {}, "environment": environment()}
    write_checkpoint(out / CHECKPOINTS, STEP, dict(decoder.named_parameters()), {}, state)
    lines = [
        {"step": STEP, "split": split, "loss": loss, "lm_loss": loss, "expected_reach": None}
        for split, loss in (("train", 3.5), ("valid", 3.25))
    ]
    (out / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def parameters_of(run: Path) -> bytes:
    return (run / CHECKPOINTS / f"step-{STEP:08d}" / "model.safetensors").read_bytes()


def assert_same_tensors(model, other) -> None:
    """Equal names, dtypes and bits."""
    ours, theirs = model.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
