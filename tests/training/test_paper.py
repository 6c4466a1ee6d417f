"""The published setting: its size, its precision, and one real step of it in bounded memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mosar.data.documents import parse_hf
from mosar.data.tokenizer import parse_bpe
from mosar.model.decoder import Decoder
from mosar.training.config import TrainConfig, resolve_config

GIB = 2**30


def paper(variant="mosar", *changes):
    return resolve_config(variant=variant, preset="paper", data="data", changes=changes)


def test_the_size():
    config = paper("rope")
    with torch.device("meta"):
        decoder = Decoder(config.model, config.attention)
    assert sum(p.numel() for p in decoder.parameters()) == 800_138_240
    embedding = decoder.embedding.weight.numel()
    assert sum(p.numel() for p in decoder.parameters()) - embedding == 537_994_240


def test_the_recipe_for_the_corpus_is_understood():
    source, tokenizer = "hf:wikimedia/wikipedia:20231101.en", "bpe:256000"
    page = Path(__file__).parents[2] / "docs" / "data.md"
    assert f"mosar prepare {source} --tokenizer {tokenizer} " in page.read_text(encoding="utf-8")
    assert parse_hf(source) == ("wikimedia/wikipedia", "20231101.en", "train")
    assert parse_bpe(tokenizer) == paper().model.vocab_size


def test_bfloat16_on_a_gpu_and_float32_on_a_cpu():
    assert paper().train.precision == "fp32"
    for device in ("cuda", "cuda:1"):
        assert paper("mosar", f"train.device={device}").train.precision == "bf16"
    assert paper("mosar", "train.device=cuda", "train.precision=fp32").train.precision == "fp32"


def test_a_gpu_without_bfloat16_computes_in_float32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert TrainConfig(steps=1, device="cuda", precision="auto").precision == "fp32"


STEP = """
import json, sys
from pathlib import Path
from mosar.training.config import resolve_config
from mosar.training.loop import train

folder, out = map(Path, sys.argv[1:])
changes = ["train.steps=1", "train.decay_steps=610000", "train.eval_batches=1"]
config = resolve_config(variant="mosar", preset="paper", data=folder, changes=changes)
result = train(config, out, progress=False)
status = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
print(json.dumps({"step": result.step, "loss": result.loss, "peak": peak}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_one_real_step_within_20_gib(tmp_path, dataset):
    command = [sys.executable, "-c", STEP, str(dataset), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["step"] == 1 and 12 < result["loss"] < 13
    assert result["peak"] < 20 * GIB
    print(f"peak {result['peak'] / GIB:.1f} GiB")
