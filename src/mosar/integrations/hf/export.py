"""A training run's checkpoint in the form of transformers: weights, tokenizer, model card.

DIR/config.json              sizes, geometry, and in `provenance` the run it comes from
DIR/model.safetensors        the parameters, under `decoder.`
DIR/generation_config.json   where a text ends
DIR/tokenizer.json, …        where the data was text
DIR/README.md                the model card
DIR/checksums.json           what the others were when they were written
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from mosar.data.manifest import Manifest
from mosar.data.tokenizer import Tokenizer
from mosar.errors import ModelError
from mosar.evaluation.loaded_run import LoadedRun
from mosar.files import write_synced
from mosar.integrations.hf.card import model_card
from mosar.integrations.hf.folders import (
    CARD,
    CONFIG,
    WEIGHTS,
    load_model,
    new_folder,
    write_checksums,
)
from mosar.integrations.hf.model import MosarForCausalLM
from mosar.integrations.hf.tokenizer import fast_tokenizer
from mosar.integrations.quiet import quiet
from mosar.training.run_folder import METRICS, read_metrics

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_run(
    run: Path | str,
    out: Path | str,
    *,
    step: int | None = None,
    dtype: str = "float32",
    routing: str = "soft",
    data: Path | None = None,
    force: bool = False,
) -> Path:
    """Writes the checkpoint of `step`, by default the newest, and returns `out`.

    dtype: of the parameters but the routers; float32 keeps every bit. routing: what the loaded
    model starts with. data: where the dataset of the run lies, if it was moved. force: replaces an
    exported model in `out`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    run, out = Path(run), Path(out)
    loaded = LoadedRun.open(run, step)
    manifest, tokenizer = _open_data(loaded, data)
    origin = provenance(loaded)
    end = {}
    if tokenizer is not None:
        end = dict.fromkeys(("eos_token_id", "pad_token_id"), tokenizer.end_of_text)
    model = MosarForCausalLM.from_decoder(
        loaded.decoder.cpu(),
        routing=routing,
        provenance=origin,
        **end,
    )
    _narrow(model, DTYPES[dtype])
    model.generation_config = GenerationConfig.from_model_config(model.config)
    with new_folder(out, replace=force) as staging, quiet():
        model.save_pretrained(staging)
        if tokenizer is not None:
            fast = fast_tokenizer(tokenizer, loaded.train_length)
            fast.save_pretrained(staging)
        card = model_card(loaded, manifest, origin["metrics"], dtype=dtype, routing=routing)
        write_synced(staging / CARD, card.encode())
        # transformers keeps weights to their owner; a model is made to be shared.
        (staging / WEIGHTS).chmod((staging / CONFIG).stat().st_mode)
        write_checksums(staging)
        # What was written is what was meant, before anybody relies on it.
        _check_written(load_model(staging), model)
    return out


def provenance(loaded: LoadedRun) -> dict[str, Any]:
    """What `import_model` needs to make a run folder again; no path of this machine."""
    run = loaded.config.to_dict()
    run["data"]["folder"] = Path(run["data"]["folder"]).name
    lines = read_metrics(loaded.run) if (loaded.run / METRICS).exists() else []
    # The last one of each split up to the step.
    metrics = {line["split"]: line for line in lines if line["step"] <= loaded.step}
    return {
        "run": run,
        "step": loaded.step,
        "checkpoint": loaded.checksum,
        "data_fingerprint": loaded.data_fingerprint,
        "metrics": list(metrics.values()),
    }


def _open_data(loaded: LoadedRun, data: Path | None) -> tuple[Manifest | None, Tokenizer | None]:
    """The dataset that the run was trained on and its tokenizer; neither where it learnt a task."""
    if loaded.config.data.task != "text":
        return None, None
    return loaded.open_tokenizer(data)


def _narrow(model: MosarForCausalLM, dtype: torch.dtype) -> None:
    """All parameters but the routers' in `dtype`."""
    kept = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        if not any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.to(dtype)


def _check_written(written: MosarForCausalLM, meant: MosarForCausalLM) -> None:
    saved = written.state_dict()
    for name, tensor in meant.state_dict().items():
        if saved[name].dtype != tensor.dtype or not torch.equal(saved[name], tensor):
            raise ModelError(f"{name} was not written correctly: reading it gives other values")
