"""The most memory that an update really holds, as the allocator's events tell it."""

import gc
from itertools import accumulate
from unittest.mock import patch

import torch
from torch.profiler import profile

from mosar.kernels import elementwise
from mosar.training.distributed.tensor import local
from mosar.training.learner import Learner
from mosar.training.stopping import StopRequest


def as_on_a_gpu():
    """A plan is that of a GPU, where no native pass makes bfloat16 need less."""
    return patch.object(elementwise, "_NATIVE", (torch.float32,))


@as_on_a_gpu()
def peak_of_update(learner: Learner) -> int:
    """Bytes of parameters, optimizer, and whatever the second update allocates."""
    learner.update(1, StopRequest())
    # The profiler does not see the end of what it has not seen begin.
    learner.optimizer.zero_grad(set_to_none=True)
    state = [t for entries in learner.optimizer.state.values() for t in entries.values()]
    held = sum(local(tensor).nbytes for tensor in (*learner.names, *state))
    # What earlier models left must not go away meanwhile.
    gc.collect()
    with profile(profile_memory=True) as seen:
        learner.update(2, StopRequest())
    assert seen.profiler is not None
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return held + max(accumulate(size for _, size in changes))
