"""lm-evaluation-harness with a local task: its figures are those of the logits."""

import json

import pytest
import torch

from mosar.data.tokenizer import ByteTokenizer
from mosar.integrations.hf.tokenizer import fast_tokenizer
from mosar.lazy import install_line

from .runs import small_model

TASK = """
task: spelling
dataset_path: json
dataset_kwargs:
  data_files: {test: FILE}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["yes", "no"]
doc_to_target: label
target_delimiter: " "
metric_list:
  - metric: acc
"""
QUESTIONS = ["is it", "was it so", "may one", "a b c", "no?", "0 1 2", "well then", "x"]


@pytest.mark.slow
def test_local_task(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason=f"needs lm_eval: {install_line('harness')}")
    from mosar.integrations.hf.harness import evaluate_tasks

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = small_model("mosar", vocab_size=257)
    tokenizer = fast_tokenizer(ByteTokenizer(), 32)

    def score(text, answer):
        ids = torch.tensor([list(f"{text} {answer}".encode())])
        with torch.no_grad():
            logs = model(ids, use_cache=False).logits[0].log_softmax(-1)
        start = len(text.encode())
        return sum(logs[i - 1, ids[0, i]].item() for i in range(start, ids.shape[1]))

    for routing in ("soft", "sparse"):
        model.set_routing(routing)
        better = [score(q, "no") > score(q, "yes") for q in QUESTIONS]
        rows = [{"question": q, "label": index % 2} for index, q in enumerate(QUESTIONS)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "spelling.yaml").write_text(TASK.replace("FILE", str(tmp_path / "rows.jsonl")))
        expected = sum(b == row["label"] for b, row in zip(better, rows, strict=True)) / len(rows)
        model.set_routing("top1")
        results = evaluate_tasks(
            model,
            ["spelling"],
            tokenizer=tokenizer,
            include_path=tmp_path,
            include_defaults=False,
            routing=routing,
            batch_size=3,
            bootstrap_iters=0,
        )
        assert results["spelling"]["acc,none"] == pytest.approx(expected)
        assert model.routing == "top1"
