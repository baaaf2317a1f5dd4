"""Handing jobs to several servers at once, and again to another when one is lost."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mppo.rollout.sglang.http_client import ServerLost

Job = TypeVar("Job")
Result = TypeVar("Result")
Server = TypeVar("Server")


@dataclass
class DispatchResult(Generic[Result]):
    """What became of the jobs.

    Args:
        results: by job index; a job counts only when its whole answer came.
        lost: servers that failed, with why.
    """

    results: dict[int, Result] = field(default_factory=dict)
    lost: dict[Hashable, str] = field(default_factory=dict)


def dispatch(
    servers: Mapping[Hashable, Server],
    jobs: Sequence[Job],
    call: Callable[[Server, Job], Result],
    in_flight: int,
) -> DispatchResult[Result]:
    """Run jobs on servers until all are done or no server is left.

    Each server takes the next job whenever it has less than ``in_flight`` running, so load balances
    by itself. A server that loses a job gets no further one; the job goes to another.

    Args:
        servers: by name.
        jobs: in the order they should start.
        call: does one job on one server; ``ServerLost`` means try elsewhere.
        in_flight: jobs running at once on a server.

    Returns:
        Results of the jobs done; jobs without a server left have none.

    Raises:
        Exception: anything but ``ServerLost`` that ``call`` raised, once running jobs have ended.
    """
    outcome: DispatchResult[Result] = DispatchResult()
    waiting = deque(range(len(jobs)))
    failures: list[Exception] = []
    lock = threading.Condition()
    running = 0

    def work(name: Hashable, server: Server) -> None:
        nonlocal running
        while True:
            with lock:
                # a job running elsewhere may come back to the queue
                while not waiting and running and not failures and name not in outcome.lost:
                    lock.wait()
                if not waiting or failures or name in outcome.lost:
                    return
                index = waiting.popleft()
                running += 1
            try:
                result = call(server, jobs[index])
            except ServerLost as error:
                with lock:
                    waiting.appendleft(index)
                    outcome.lost.setdefault(name, str(error))
            except Exception as error:
                with lock:
                    failures.append(error)
            else:
                with lock:
                    outcome.results[index] = result
            finally:
                with lock:
                    running -= 1
                    lock.notify_all()

    each = max(1, min(in_flight, len(jobs)))
    threads = [
        threading.Thread(target=work, args=item, daemon=True)
        for item in servers.items()
        for _ in range(each)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return outcome
