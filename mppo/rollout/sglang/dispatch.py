"""Run jobs on several servers at once; jobs of a lost server go to the others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mppo.rollout.sglang.http_client import ServerLost

Job = TypeVar("Job")
Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")
Server = TypeVar("Server")


@dataclass
class DispatchResult(Generic[Name, Result]):
    """Results by job index, only of jobs whose answer arrived completely; lost servers, and why."""

    results: dict[int, Result] = field(default_factory=dict)
    lost: dict[Name, str] = field(default_factory=dict)


def dispatch(
    servers: Mapping[Name, Server],
    jobs: Sequence[Job],
    call: Callable[[Server, Job], Result],
    max_in_flight: int,
) -> DispatchResult[Name, Result]:
    """Run jobs on servers until all are done or no server is left; jobs for which none was left
    have no result.

    Each server takes the next job, in order, as soon as it has fewer than ``max_in_flight``
    running, which balances the load. A server that loses a job (``call`` raises ``ServerLost``)
    gets no further job; the job goes to another.

    Raises:
        Exception: any other exception of ``call``, after running jobs have ended.
    """
    outcome: DispatchResult[Name, Result] = DispatchResult()
    waiting = deque(range(len(jobs)))
    failures: list[Exception] = []
    lock = threading.Condition()
    running = 0

    def work(name: Name, server: Server) -> None:
        nonlocal running
        while True:
            with lock:
                # a job that runs on another server returns to the queue if that server is lost
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

    each = max(1, min(max_in_flight, len(jobs)))
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
