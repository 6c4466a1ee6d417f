"""The SLURM script of docs/scaling.md, run with stand-ins for what only a cluster has."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from mosar.training.distributed.mesh import Mesh
from torchrun_commands import check_torchrun

PAGE = Path(__file__).parents[3] / "docs" / "scaling.md"
STAND_INS = {
    "srun": '#!/bin/bash\nexec "$@"\n',
    "scontrol": "#!/bin/bash\nprintf 'node7\\nnode8\\n'\n",
    "torchrun": "#!/bin/bash\nprintf '%s\\n' \"$@\"\n",
}


@pytest.mark.parametrize("task, steps", [(1, 50_000), (12, 600_000), (13, 610_000)])
def test_script(tmp_path, task, steps):
    (script,) = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    for name, text in STAND_INS.items():
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "job.sh").write_text(script)
    slurm = {"ARRAY_TASK_ID": str(task), "JOB_NODELIST": "node[7-8]", "NNODES": "2", "JOB_ID": "5"}
    variables = {f"SLURM_{key}": value for key, value in slurm.items()}
    result = subprocess.run(
        ["bash", "-eu", "job.sh"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    arguments = result.stdout.splitlines()
    assert check_torchrun(arguments) == Mesh(2, 8, 1)
    assert f"train.steps={steps}" in arguments and "node7:29500" in arguments
    # Every node of the job is one of torchrun's.
    assert "#SBATCH --nodes=2" in script and "#SBATCH --ntasks-per-node=1" in script
    last = int(re.search(r"--array=1-(\d+)%1", script)[1])
    assert (last - 1) * 50_000 < 610_000 <= last * 50_000
