"""transformers' own tests of models and of generation, for each way to route.

They come with the source of the installed version, which CONTRIBUTING.md says how to get; without
it they are skipped. A distribution holds those of models, a checkout also those of generation.
A test in `REFUSED` must fail with the words that stand there: what passes belongs into no list.
"""

import functools
import importlib
import importlib.util
import sys
import types
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from model.models import small_model
from mosar.geometries import VARIANTS
from mosar.integrations.hf import (
    MosarDecoderConfig,
    MosarForCausalLM,
    MosarForSequenceClassification,
    MosarModel,
)

SOURCE = Path(__file__).parents[3] / "build" / f"transformers-{transformers.__version__}" / "tests"
PACKAGE = "transformers_tests"
# Mixins that the tests of models import, by module.
MIXINS = {
    "exporters.test_export": "ExportTesterMixin",
    "generation.test_utils": "GenerationTesterMixin",
}
# Test -> what it fails with, and why that is meant.
REFUSED = {
    "test_attention_outputs": (
        "output_attentions must be False",
        "no kernel holds the probabilities",
    ),
}

pytestmark = pytest.mark.slow
if not SOURCE.is_dir():
    pytest.skip(f"needs {SOURCE}: see CONTRIBUTING.md", allow_module_level=True)
pytest.importorskip("parameterized", reason="pip install parameterized")


def _load_mixins() -> list[type]:
    """The test classes of transformers; those of generation only where they are there."""
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(SOURCE)]
    sys.modules[PACKAGE] = package
    for module, mixin in MIXINS.items():
        if not (SOURCE / f"{module.replace('.', '/')}.py").exists():
            for name in (module.partition(".")[0], module):
                sys.modules[f"{PACKAGE}.{name}"] = types.ModuleType(f"{PACKAGE}.{name}")
            setattr(sys.modules[f"{PACKAGE}.{module}"], mixin, type(mixin, (), {}))
    models = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    return [models.ModelTesterMixin, models.GenerationTesterMixin]


class Tester:
    """A tiny model and an input, as transformers asks for them."""

    __test__ = False
    batch_size, seq_length, is_training = 3, 40, True
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 61, 32, 2, 4

    def __init__(self, variant: str, routing: str):
        self.variant, self.routing = variant, routing

    def get_config(self) -> MosarDecoderConfig:
        ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        attention = VARIANTS[self.variant]
        return MosarDecoderConfig.from_decoder(
            small_model(), attention, routing=self.routing, **ends
        )

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Suite(*_load_mixins()):
    """What the classes below have in common."""

    __test__ = False
    all_model_classes = (MosarModel, MosarForCausalLM, MosarForSequenceClassification)
    has_attentions = False
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        """Models are known by their names, which `register` does not write down."""
        for table, model in (
            (auto.MODEL_MAPPING_NAMES, MosarModel),
            (auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, MosarForSequenceClassification),
        ):
            self.enterContext(mock.patch.dict(table, {"mosar": model.__name__}))
        self.model_tester = Tester(self.variant, self.routing)
        # The labels of top1 and sparse routing pass no gradient to the routers.
        self.test_all_params_have_gradient = self.routing == "soft"

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        """Under sparse routing keys are kept by regime, and some are evicted."""
        if past_key_values.routing != "sparse":
            return super()._check_past_key_values_for_generate(
                batch_size, past_key_values, seq_length, config
            )
        assert past_key_values.get_seq_length() == seq_length
        assert past_key_values.batch_size == batch_size

    def _check_caches_are_equal(self, cache1, cache2):
        if cache1.routing != "sparse":
            return super()._check_caches_are_equal(cache1, cache2)
        assert cache1.get_seq_length() == cache2.get_seq_length()


def refused(test, message: str, reason: str):
    @functools.wraps(test)
    def run(self):
        self.has_attentions = True
        with pytest.raises(Exception, match=message):
            test(self)
        pytest.xfail(reason)

    return run


def _suite(name: str, variant: str, routing: str) -> type:
    tests = {
        test: refused(getattr(Suite, test), *why)
        for test, why in REFUSED.items()
        if hasattr(Suite, test)
    }
    given = {"__test__": True, "variant": variant, "routing": routing}
    return type(name, (Suite, unittest.TestCase), given | tests)


TestSoft = _suite("TestSoft", "mosar", "soft")
TestTop1 = _suite("TestTop1", "mosar", "top1")
TestSparse = _suite("TestSparse", "mosar", "sparse")
TestRope = _suite("TestRope", "rope", "soft")
