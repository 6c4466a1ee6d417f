"""A model under EleutherAI's lm-evaluation-harness, by its own tasks or by local ones.

Its command line does not import us, so its Auto classes would not know the model: this does.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mosar.errors import needing
from mosar.integrations.hf.folders import load_model
from mosar.integrations.hf.model import MosarForCausalLM
from mosar.lazy import install_line

_MODULES = ("lm_eval", "lm_eval.models.huggingface", "lm_eval.tasks")


def evaluate_tasks(
    model: MosarForCausalLM | Path | str,
    tasks: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    include_path: Path | str | None = None,
    include_defaults: bool = True,
    routing: str | None = None,
    max_length: int | None = None,
    batch_size: int = 1,
    limit: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Results by task, as `lm_eval.simple_evaluate` gives them.

    model: a folder of mosar export, or a model together with its `tokenizer`. include_path: a
    folder with task files (YAML); include_defaults: the harness's own tasks, too. routing: set for
    the evaluation, then put back. max_length: the longest input, by default the training length.
    limit: examples of each task. options: those of `simple_evaluate`.
    """
    missing = f"this needs lm_eval, which is not installed: {install_line('harness')}"
    with needing("lm_eval", missing):
        harness, models, managers = map(import_module, _MODULES)
    if not isinstance(model, MosarForCausalLM):
        folder = Path(model)
        model = load_model(folder)
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if tokenizer is None:
        raise ValueError("tokenizer must be given with a model; a folder brings its own")
    before = model.routing
    model.set_routing(before if routing is None else routing)
    try:
        harnessed = models.HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            max_length=max_length or model.config.max_position_embeddings,
            batch_size=batch_size,
        )
        manager = managers.TaskManager(
            include_path=None if include_path is None else str(include_path),
            include_defaults=include_defaults,
        )
        results = harness.simple_evaluate(
            model=harnessed, tasks=list(tasks), task_manager=manager, limit=limit, **options
        )
    finally:
        model.set_routing(before)
    return results["results"]
