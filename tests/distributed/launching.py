"""Functions run as the ranks of a process group, for tests."""

import datetime
import multiprocessing
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

#: imported once, in the process from which all ranks are forked
PRELOADED = [
    "launching", "pytest", "structvi.distributed.sharding", "torch.testing",
]  # fmt: skip


def launch(function, size, *arguments, backend="gloo"):
    """`function(rank, *arguments)` in `size` processes: what each returned, None for one that did not get there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as directory:
        processes = [
            context.Process(target=_rank, args=(function, rank, size, directory, arguments, backend))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        results = [Path(directory, f"{rank}.pt") for rank in range(size)]
        return [torch.load(path, weights_only=False) if path.exists() else None for path in results]


def _rank(function, rank, size, directory, arguments, backend):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group(
        backend, f"file://{directory}/store", datetime.timedelta(seconds=60), rank=rank, world_size=size
    )
    torch.save(function(rank, *arguments), Path(directory, f"{rank}.pt"))
    dist.destroy_process_group()
