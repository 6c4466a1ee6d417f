"""A short real training with `Trainer`: the loss falls, routers move, the cost counts."""

import pytest
import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from model.models import small_model
from mosar.geometries import VARIANTS, AttentionConfig
from mosar.integrations.hf import MosarForCausalLM, RoutingCostWarmup
from mosar.integrations.hf.config import MosarDecoderConfig
from mosar.lazy import install_line

pytest.importorskip("accelerate", reason=f"Trainer needs accelerate: {install_line('hf')}")

COST = AttentionConfig(geometry="mosar", cost_weight=0.5, cost_warmup=10)


class Texts(torch.utils.data.Dataset):
    """Rows that repeat a short word, each its own."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = (torch.arange(24) % 4 + index) % 61
        return {"input_ids": row, "labels": row}


def trained(attention, folder, steps=24, batch=8, **options):
    """A model after `steps` updates, its parameters before, and what was logged."""
    torch.manual_seed(0)
    model = MosarForCausalLM(MosarDecoderConfig.from_decoder(small_model(), attention))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
        **options,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Texts(),
        eval_dataset=Texts(),
        callbacks=[RoutingCostWarmup()],
    )
    trainer.train()
    return trainer, before


def test_training_learns(tmp_path):
    trainer, before = trained(VARIANTS["mosar"], tmp_path / "out")
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    for name, parameter in trainer.model.named_parameters():
        if "_router." in name:
            assert not torch.equal(parameter, before[name]), name
    # The mean cross-entropy, though predictions come with a cache and a cost.
    found = trainer.evaluate()["eval_loss"]
    row = torch.stack([Texts()[i]["input_ids"] for i in range(64)])
    model = trainer.model.eval()
    with torch.no_grad():
        expected = model(row, labels=row, use_cache=False).loss.item()
    assert found == pytest.approx(expected, rel=1e-4)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = MosarForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded.decoder.embedding.weight, model.decoder.embedding.weight)


def test_the_cost_shortens_reach_and_accumulates(tmp_path):
    row = torch.stack([Texts()[i]["input_ids"] for i in range(64)])

    def reach(trainer):
        with torch.no_grad():
            return trainer.model.eval()(row, labels=row, use_cache=False).routing_cost.item()

    free, _ = trained(VARIANTS["mosar"], tmp_path / "free", steps=14)
    paid, _ = trained(COST, tmp_path / "paid", steps=14)
    assert reach(paid) < reach(free) - 0.02
    assert paid.model.cost_step is None
    # Two passes an update are one of twice the size: each brings its part of the cost.
    options = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    halves, _ = trained(COST, tmp_path / "halves", steps=4, **options)
    whole, before = trained(COST, tmp_path / "whole", steps=4, batch=16)
    for name, parameter in halves.model.named_parameters():
        same = whole.model.get_parameter(name)
        assert (parameter - same).abs().max() < 0.02 * (same - before[name]).abs().max() + 1e-6, (
            name
        )


def test_label_smoothing(tmp_path):
    """Trainer shifts the labels of a causal model; the cost, which it leaves out, is refused."""
    trainer, _ = trained(VARIANTS["mosar"], tmp_path, steps=1, label_smoothing_factor=0.1)
    batch = torch.stack([Texts()[0]["input_ids"]])
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model, {"input_ids": batch, "labels": batch.clone()})
        logits = trainer.model(batch).logits[:, :-1]
    exact = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch[:, 1:].flatten(), label_smoothing=0.1
    )
    torch.testing.assert_close(loss, exact)
    with pytest.raises(ValueError, match="label_smoothing_factor must be 0"):
        trained(COST, tmp_path, steps=1, label_smoothing_factor=0.1)


def test_the_warmup_finds_the_model_inside(tmp_path):
    """Distributed training and adapters put another module around it."""
    model = MosarForCausalLM(MosarDecoderConfig.from_decoder(small_model(), COST))
    outer = torch.nn.ModuleDict({"base": torch.nn.ModuleList([model])})
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    state = TrainerState(global_step=3)
    RoutingCostWarmup().on_step_begin(arguments, state, TrainerControl(), model=outer)
    assert model.cost_step == 4
