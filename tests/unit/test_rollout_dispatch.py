"""Jobs over several servers: balanced, retried on another server, never done twice."""

import threading

import pytest

from mppo.rollout.sglang.http_client import ServerLost
from mppo.rollout.sglang.requests import dispatch


def test_every_job_is_done_once_and_both_servers_work() -> None:
    done = []
    both = threading.Barrier(2, timeout=30)

    def call(server: str, job: int) -> tuple[str, int]:
        if job < 2:
            both.wait()
        done.append(job)
        return server, job * job

    outcome = dispatch({"a": "a", "b": "b"}, range(40), call, max_in_flight=1)
    assert sorted(done) == list(range(40))
    assert [outcome.results[i][1] for i in range(40)] == [i * i for i in range(40)]
    assert {server for server, _ in outcome.results.values()} == {"a", "b"}
    assert outcome.lost == {}


def test_jobs_of_a_lost_server_go_to_another() -> None:
    def call(server: str, job: int) -> str:
        if server == "bad":
            raise ServerLost("http://bad", "gone")
        return server

    outcome = dispatch({"bad": "bad", "good": "good"}, range(20), call, max_in_flight=3)
    assert outcome.results == dict.fromkeys(range(20), "good")
    assert set(outcome.lost) <= {"bad"}


def test_without_a_server_the_remaining_jobs_are_returned_as_missing() -> None:
    count = iter(range(100))

    def call(server: str, job: int) -> int:
        if next(count) >= 3:
            raise ServerLost("http://only", "gone")
        return job

    outcome = dispatch({"only": "only"}, range(10), call, max_in_flight=1)
    assert outcome.results == {0: 0, 1: 1, 2: 2}
    assert "gone" in outcome.lost["only"]
    assert dispatch({}, range(3), call, max_in_flight=1).results == {}


def test_an_error_other_than_a_lost_server_is_raised() -> None:
    def call(server: str, job: int) -> int:
        raise ValueError(f"job {job} is wrong")

    with pytest.raises(ValueError, match="is wrong"):
        dispatch({"a": "a"}, range(5), call, max_in_flight=2)
