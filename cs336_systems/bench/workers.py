"""Jobs done in processes of their own, any of which may crash or hang: that job is lost, and the rest go on."""

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Job = TypeVar("Job")
Failure = TypeVar("Failure")

START_S = 180  # until a process has imported PyTorch and made its inputs
EXIT_S = 5  # until a process whose pipe is closed has an exit code
_READY, _UNABLE = "ready", "unable"  # the first word of a process; what follows are failures, or None


@dataclass
class _Worker:
    process: Any  # the classes of processes have no public base
    connection: Connection
    deadline: float
    ready: bool = False
    job: Any = None


def done_apart(
    jobs: Sequence[Job],
    start: Callable[[], Callable[[Job], Failure | None]],
    lost: Callable[[str], Failure],
    n_processes: int,
    timeout_s: float,
    method: str = "spawn",
) -> Generator[tuple[Job, Failure | None]]:
    """Do each job in one of `n_processes` processes, and say how it went, in the order in which they end.

    A process in which a job failed is replaced: it may no longer be good for anything (after an illegal access on a
    GPU every later call fails). Where processes cannot even start, the jobs left over are neither done nor reported.

    Args:
        jobs: picklable, none of them None.
        start: called once in each process; returns what does a job, and says what went wrong in it, or None. Picklable.
        lost: makes a failure of a text, for jobs whose process died or took too long.
        timeout_s: seconds after which a job is given up and its process killed.
        method: how processes begin; CUDA does not survive a fork.

    Yields:
        A job and what went wrong in it, or None.
    """
    context: Any = multiprocessing.get_context(method)
    waiting, workers = deque(jobs), []

    def new() -> _Worker:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, start), daemon=True)
        process.start()
        theirs.close()  # so that ours ends when the process does
        return _Worker(process, ours, time.monotonic() + START_S)

    try:
        workers += [new() for _ in range(min(n_processes, len(jobs)))]
        while workers:
            due = min(worker.deadline for worker in workers)
            heard = wait([worker.connection for worker in workers], max(0.0, due - time.monotonic()))
            for worker in list(workers):
                if worker.connection in heard:
                    failure, fit = _answer(worker, lost)
                elif time.monotonic() >= worker.deadline:
                    failure, fit = lost(f"not done after {timeout_s:g} s"), False
                else:
                    continue
                job, worker.job = worker.job, None
                if fit and waiting:
                    worker.ready, worker.job, worker.deadline = True, waiting.popleft(), time.monotonic() + timeout_s
                    with suppress(OSError):  # it died idle: the next answer is that it did
                        worker.connection.send(worker.job)
                else:
                    workers.remove(worker)
                    _end(worker)
                    if worker.ready and waiting:
                        workers.append(new())
                if job is not None:
                    yield job, failure
    finally:
        for worker in workers:
            _end(worker)


def _serve(connection: Connection, start: Callable[[], Callable[[Any], Any]]) -> None:
    """The life of one process: one job after another, until one fails or the parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    with suppress(EOFError, OSError):  # the parent is gone
        try:
            do = start()
        except Exception:
            connection.send(_UNABLE)
            return
        connection.send(_READY)
        failure = None
        while failure is None:
            failure = do(connection.recv())
            connection.send(failure)


def _answer(worker: _Worker, lost: Callable[[str], Failure]) -> tuple[Failure | None, bool]:
    """What went wrong in the worker's job, and whether the process is fit for another one."""
    try:
        said = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join(EXIT_S)
        return lost(f"the process died of it, exit code {worker.process.exitcode}"), False
    return (None, said == _READY) if not worker.ready else (said, said is None)


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.connection.close()
