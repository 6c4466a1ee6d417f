"""What `import mosar` offers and loads, and which way the arrows between its parts point."""

import json
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

import mosar
from source_imports import imports_of

PUBLIC = (
    *("MoSARConfig", "Regime", "mosar_attention", "distance_attention", "pair_geometry"),
    *("RegimeKernel", "PostPositionRouter", "WorthField", "build_hard_domain"),
    *("normalized_reach_cost", "MoSARReferenceAttention"),
)
HEAVY = ("transformers", "matplotlib", "triton", "typer", "rich")
# What all parts may import but those that know nothing of files.
SHARED = {f"mosar.{name}" for name in ("errors", "files", "lazy", "schema", "terminal", "version")}
PURE = ("core", "kernels", "geometries", "model", "integrations/megatron")
# Third-party modules and parts of mosar that each part may import, besides the standard library.
MAY_IMPORT = {
    "core": {"torch", "mosar.core"},
    "kernels": {"torch", "triton", "mosar.core", "mosar.kernels", "mosar.lazy"},
    "geometries": {
        *("torch", "mosar.attention", "mosar.core", "mosar.geometries", "mosar.kernels"),
    },
    "report": {
        *("torch", "jinja2", "markupsafe", "matplotlib", "rich"),
        *("mosar.core", "mosar.geometries", "mosar.records", "mosar.report"),
    },
    "data": {
        *("torch", "numpy", "rich", "tokenizers", "datasets", "pyarrow"),
        *("mosar.core.checks", "mosar.data"),
    },
    "model": {
        *("torch", "mosar.attention", "mosar.core", "mosar.geometries", "mosar.kernels"),
        "mosar.model",
    },
    "training": {
        *("torch", "numpy", "rich", "safetensors", "mosar.core", "mosar.data"),
        *("mosar.geometries", "mosar.model", "mosar.records", "mosar.training"),
        # The loss is one of its passes.
        "mosar.kernels.elementwise",
    },
    "evaluation": {
        *("torch", "numpy", "rich", "mosar.attention", "mosar.core", "mosar.data"),
        *("mosar.evaluation", "mosar.geometries", "mosar.model", "mosar.records"),
        # What a run folder holds, never how it was trained.
        *("mosar.training.batches", "mosar.training.checkpoints", "mosar.training.config"),
        "mosar.training.run_folder",
    },
    "experiments": {
        *("torch", "rich", "mosar.data", "mosar.evaluation", "mosar.experiments"),
        *("mosar.geometries", "mosar.model", "mosar.records", "mosar.training"),
    },
    "generation": {
        *("torch", "mosar.attention", "mosar.core", "mosar.data", "mosar.generation"),
        *("mosar.geometries", "mosar.integrations", "mosar.model"),
        *("mosar.evaluation.choices", "mosar.evaluation.loaded_run"),
    },
    "microscope": {
        *("torch", "numpy", "jinja2", "mosar.core", "mosar.generation", "mosar.geometries"),
        *("mosar.evaluation.discarded_mass", "mosar.integrations.retrofit", "mosar.microscope"),
        # The colours, style and policy of the report's page, never a report.
        *("mosar.model", "mosar.report.assets", "mosar.report.palette"),
    },
    "planning": {
        *("torch", "rich", "mosar.core", "mosar.geometries", "mosar.planning", "mosar.records"),
        # What a run is configured with and what its folder holds, never how it is trained.
        *("mosar.model.config", "mosar.model.parameters", "mosar.training.config"),
        *("mosar.training.distributed.mesh", "mosar.training.distributed.share"),
        *("mosar.training.run_folder", "mosar.evaluation.store"),
    },
    "integrations/megatron": {
        *("torch", "megatron", "mosar.attention", "mosar.core", "mosar.integrations.megatron"),
        "mosar.lazy",
    },
    "integrations/retrofit": {
        *("torch", "numpy", "rich", "safetensors", "transformers", "mosar.attention"),
        *("mosar.core", "mosar.data", "mosar.geometries", "mosar.integrations.retrofit"),
        *("mosar.integrations.quiet", "mosar.integrations.transformers_cache"),
        *("mosar.model", "mosar.records"),
        *("mosar.evaluation.choices", "mosar.evaluation.progress"),
        # The loop, with its run folders and checkpoints.
        "mosar.training",
    },
    "integrations/hf": {
        *("mosar.integrations.quiet", "mosar.integrations.transformers_cache"),
        *("torch", "transformers", "tokenizers", "safetensors", "lm_eval", "mosar.attention"),
        *("mosar.core", "mosar.data", "mosar.geometries", "mosar.integrations.hf", "mosar.model"),
        "mosar.records",
        # What run folders and their evaluations hold.
        *("mosar.evaluation.choices", "mosar.evaluation.store"),
        *("mosar.evaluation.loaded_run", "mosar.training.batches", "mosar.training.checkpoints"),
        *("mosar.training.config", "mosar.training.run_folder"),
    },
    "bench": {
        *("torch", "numpy", "rich", "transformers", "mosar.attention", "mosar.bench"),
        *("mosar.core", "mosar.geometries", "mosar.kernels", "mosar.model", "mosar.records"),
        # A trained model, its text and what it reads.
        *("mosar.data.stream", "mosar.evaluation.loaded_run", "mosar.evaluation.routing"),
        "mosar.training",
    },
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name):
    assert name in mosar.__all__
    assert getattr(mosar, name).__doc__


def test_public_names_resolve_and_are_listed():
    assert all(getattr(mosar, name) is not None for name in mosar.__all__)
    assert dir(mosar) == sorted(mosar.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mosar.nothing


def test_import_is_light():
    program = "import json, sys; from mosar import *; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = json.loads(result.stdout)
    assert "mosar" in loaded
    # It takes as long to import as torch itself.
    assert "torch._dynamo" not in loaded
    assert {name.split(".")[0] for name in loaded}.isdisjoint(HEAVY)


@pytest.mark.parametrize("part", [part for part in MAY_IMPORT if imports_of(part)])
def test_imports_point_towards_the_core(part):
    targets = MAY_IMPORT[part] if part in PURE else MAY_IMPORT[part] | SHARED
    targets = MAY_IMPORT[part] if part in PURE else MAY_IMPORT[part] | SHARED
    for file, names in imports_of(part).items():
        for name in names:
            allowed = name.split(".")[0] in sys.stdlib_module_names or any(
                name == target or name.startswith(f"{target}.") for target in targets
            )
            assert allowed, f"{file} imports {name}"


def test_packages_do_not_import_each_other_in_a_circle():
    """Imports inside functions count, too; those of one package's modules among themselves not."""
    arrows: dict[str, set[str]] = {}
    for file, names in imports_of(".").items():
        inside = (
            package_of(name.removeprefix("mosar.").split(".")) for name in names if "mosar." in name
        )
        arrows.setdefault(package_of(file.removesuffix(".py").split("/")), set()).update(inside)
    arrows = {package: targets - {package} for package, targets in arrows.items()}
    tuple(TopologicalSorter(arrows).static_order())


def package_of(parts):
    """The package of a module's path; each integration is one."""
    return "/".join(parts[: 2 if parts[0] == "integrations" else 1])


def test_private_names_stay_in_their_module():
    for file, names in imports_of(".").items():
        for name in names:
            private = name.startswith("mosar.") and name.rpartition(".")[2].startswith("_")
            assert not private or name.endswith("__"), f"{file} imports {name}"


def test_fast_paths_do_not_import_the_reference():
    for file, names in imports_of("kernels").items():
        assert not any("reference" in name for name in names), file
