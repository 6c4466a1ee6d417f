"""Commands of torchrun in the documents: what can be known of them without starting processes."""

from itertools import pairwise
from pathlib import Path

from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from mosar.cli import app
from mosar.cli.train import PRESET, VARIANT
from mosar.training.config import resolve_config
from mosar.training.distributed.mesh import Mesh, check_mesh


def check_torchrun(arguments: list[str]) -> Mesh:
    """torchrun takes the options, `mosar train` the rest, and the mesh fits the processes."""
    options = get_args_parser().parse_args(arguments)
    assert options.module and options.training_script == "mosar"
    command = options.training_script_args
    assert command[0] == "train"
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0, result.output
    config = resolve_config(
        variant=_option(command, "--variant", VARIANT),
        preset=_option(command, "--preset", PRESET),
        data=Path(_option(command, "--data", "data/stdlib")),
        changes=[value for key, value in pairwise(command) if key == "--set"],
        vocab_size=257,
    )
    nodes = int(options.nnodes.rpartition(":")[2])
    return check_mesh(config, nodes * int(options.nproc_per_node))


def _option(command: list[str], name: str, default: str) -> str:
    return command[command.index(name) + 1] if name in command else default
