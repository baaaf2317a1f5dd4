"""Scoring in separate processes: limits, failures, and shutdown."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hanging_clock import hanging_clock
from patient_judge import without_hurry

from mppo.batch.prompt import Prompt
from mppo.rewards.function import FunctionReward
from mppo.rewards.response import Response
from mppo.rewards.rules import RuleReward
from mppo.rewards.scores import FailedScore, Unscored, read_scores
from mppo.rewards.workers import worker_server
from mppo.rewards.workers.pool import WorkerPool
from mppo.rewards.workers.worker import ScoringTask
from mppo.rewards.workers.worker_server import Worker, WorkerServer

ROOT = Path(__file__).parents[2]
FUNCTION = """
import os, pickle, struct, subprocess, sys
calls = []

class Bomb:
    def __reduce__(self):
        return exec, ("import os; os._exit(99)",)

def send_to_all(content):
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2:
                os.write(int(name), content)
        except OSError:  # open for reading, or the listing's own
            pass

def score(data_source, solution_str, ground_truth, extra_info):
    calls.append(solution_str)
    if solution_str == "sleep":
        hang()
    if solution_str == "spawn":
        subprocess.Popen(["sleep", "3600"])
        hang()
    if solution_str == "memory":
        return len(bytearray(1 << 33)) * 0.0
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "leave":
        sys.exit("enough")
    if solution_str == "files":
        return len(os.listdir("/proc/self/fd"))
    if solution_str == "forge":
        record = struct.pack("<cdI", b"s", 7.0, 14) + b"[{}, [], null]"
        send_to_all(9 * record)
    if solution_str == "pickle":
        send_to_all(pickle.dumps(Bomb()))
    if solution_str == "pid":
        return os.getpid()
    return len(calls)
"""
PROMPT = Prompt(5, (1,), "poems", "", "p")


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A file with ``FUNCTION``, for which time passes only while it hangs."""
    path = tmp_path / "mine.py"
    path.write_text(FUNCTION + hanging_clock(tmp_path / "hanging", monkeypatch))
    return path


@pytest.fixture
def scored(path):
    def judge(*texts, on_error="stop", **limits):
        subject = FunctionReward(f"{path}:score", {}, **limits)
        responses = [Response(PROMPT, text) for text in texts]
        judgements = read_scores(subject(responses), responses, on_error)
        return [each.score for each in judgements], [each.unscored for each in judgements]

    return judge


def test_a_function_runs_in_another_process_and_keeps_its_state(scored):
    scores, _ = scored("a", "b", "pid", "c")
    assert scores[:2] == [1, 2]
    assert scores[3] == 4
    assert scores[2] != os.getpid()


def test_a_timeout_gets_the_score_of_on_error_and_the_others_are_scored(scored):
    scores, unscored = scored("a", "sleep", "b", on_error=-2.0)
    assert scores == [1, -2, 1]
    assert unscored == [None, "timeouts", None]


def test_processes_started_by_a_function_end_with_it(scored):
    scores, _ = scored("pid", "spawn", on_error=0.0)
    gone = (psutil.NoSuchProcess, psutil.ZombieProcess)
    group = int(scores[0])
    members = []
    for process in psutil.process_iter():
        try:
            members += [process] if os.getpgid(process.pid) == group else []
        except (*gone, ProcessLookupError):
            continue
    psutil.wait_procs(members, timeout=300)
    assert not [process for process in members if process.is_running()]


def test_exceeding_the_memory_limit_gets_the_score_of_on_error(scored):
    scores, unscored = scored("a", "memory", "b", memory_mb=2048, on_error=-2.0)
    assert scores == [1, -2, 1]
    assert unscored == [None, "failures", None]
    with pytest.raises(ValueError, match=r"prompt 5 .*it needs more than reward\.memory_mb"):
        scored("memory", memory_mb=2048)


@pytest.mark.parametrize(
    ("text", "message"),
    [("exit", "its process ended: exit code 3"), ("leave", "SystemExit: enough")],
)
def test_a_function_that_ends_its_process_is_named_with_the_prompt(text, message, scored):
    with pytest.raises(ValueError, match=rf"mine\.py:score failed on prompt 5 .*{message}"):
        scored("a", text)


def test_a_worker_has_no_file_or_socket_of_the_trainer(scored):
    with socket.create_server(("127.0.0.1", 0)) as server, open(os.devnull) as file:
        server.set_inheritable(True)
        os.set_inheritable(file.fileno(), True)
        (count,), _ = scored("files")
    assert count == 6  # standard input, output and error, two pipes, and the listed folder


def test_what_a_function_writes_to_its_pipes_is_neither_anothers_score_nor_executed(scored):
    scores, _ = scored("a", "forge", "b", "pickle", "c", on_error=-2.0)
    assert scores[::2] == [1, 1, 1]  # from a new process each
    assert scores[3] == -2


def test_a_worker_that_cannot_start_says_why():
    pool = WorkerPool(ScoringTask("mppo.no_such:load"), 1, 1.0)
    with pytest.raises(RuntimeError, match=r"could not start: ModuleNotFoundError.*no_such"):
        pool.run(["x"])


def test_the_worker_server_is_restarted_for_the_next_batch():
    task = ScoringTask("functools:partial", (map, len))
    pool = WorkerPool(task, 1, 60.0)
    assert [result.score for result in pool.run(["ab", "abc"])] == [2, 3]
    os.kill(pool._server.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"reward\.\* has ended .* lower reward\.memory_mb"):
        pool.run(["ab"])
    assert [result.score for result in pool.run(["ab"])] == [2]


def test_after_a_timeout_the_next_response_gets_half_the_time(monkeypatch):
    """No worker answers, and the clock shows the sum of the waits."""
    clock, ended = [0.0], [0.0]

    def wait(_readable, _writable, _exceptional, seconds):
        clock[0] += max(seconds, 0.01)
        return [], [], []

    def fork():
        subject._workers.append(Worker(pid=0, requests=-1, records=-1, ready=True))
        return subject._workers[-1]

    def end(one):
        subject._workers.remove(one)
        ended.append(clock[0])

    monkeypatch.setattr(worker_server, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(worker_server, "select", SimpleNamespace(select=wait))
    with tempfile.TemporaryFile() as replies:
        subject = WorkerServer(ScoringTask("builtins:len"), 1, replies.fileno())
        monkeypatch.setattr(subject, "_fork", fork)
        monkeypatch.setattr(subject, "_end", end)
        subject._waiting = deque([[(0, b"")], [(1, b"")]])
        assert subject._score(5.0)
        replies.seek(0)
        assert [json.loads(line)[1] for line in replies] == ["timeout", "timeout"]
    assert [after - before for before, after in pairwise(ended)] == pytest.approx([5, 2.5], abs=0.1)


SLEEPER = """
import sys
from mppo.batch.prompt import Prompt
from mppo.rewards.function import FunctionReward
from mppo.rewards.response import Response
judge = FunctionReward(sys.argv[1] + ":score", {})
prompt = Prompt(5, (1,), "poems", "", "p")
print(int(judge([Response(prompt, "pid")])[0].score), flush=True)
judge([Response(prompt, "sleep")])
"""


def test_workers_end_when_the_trainer_is_killed(path):
    command = [sys.executable, "-c", SLEEPER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as trainer:
        worker = psutil.Process(int(trainer.stdout.readline()))
        server = worker.parent()
        trainer.kill()
    _, alive = psutil.wait_procs([worker, server], timeout=300)
    assert not alive


def test_a_hostile_formula_scores_0_and_blocks_no_thread():
    pytest.importorskip("math_verify", reason="the optional package math-verify is missing")
    judge = RuleReward("math_flexible", timeout_s=2.0)
    prompt = Prompt(0, (1,), "math", "17", "p")
    beats, over = [time.monotonic()], threading.Event()

    def beat():
        while not over.wait(0.05):
            beats.append(time.monotonic())

    thread = threading.Thread(target=beat)
    thread.start()
    hostile, honest = [r"\boxed{9^{9^{9^9}}}", r"\boxed{(10^9)!}"], r"\boxed{17}"
    try:
        results = judge([Response(prompt, answer) for answer in hostile])
        results += without_hurry(judge)([Response(prompt, honest)])
    finally:
        over.set()
        thread.join()
        beats.append(time.monotonic())
    assert results == [Unscored("timeouts"), Unscored("timeouts"), 1]
    # no machine is as slow, but a formula that blocks the thread takes hours
    assert max(after - before for before, after in pairwise(beats)) < 120


def test_an_evaluated_answer_has_no_effect_and_changes_no_later_score(tmp_path):
    pytest.importorskip("reasoning_gym", reason="the optional package reasoning_gym is missing")
    from mppo.data.tasks import task

    example = task("reasoning_gym:spiral_matrix").example(0)
    prompt = Prompt(0, (1,), "reasoning_gym:spiral_matrix", example.answer, "p", example.extra)
    file = tmp_path / "new"
    hostile = [
        f"open({str(file)!r}, 'w')",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "setattr(__import__('mppo.rewards.verifiers').rewards.verifiers, 'extract_final', exit)",
    ]
    texts = [f"<answer>{text}</answer>" for text in [*hostile, example.answer]]
    judge = RuleReward(timeout_s=60.0)
    for text, score in zip(texts, [0, 0, 0, 1]):
        assert judge([Response(prompt, text)]) == [score]
    assert not file.exists()


def test_a_row_without_its_entry_is_found_before_the_first_rollout():
    pytest.importorskip("reasoning_gym", reason="the optional package reasoning_gym is missing")
    prompt = Prompt(7, (1,), "reasoning_gym:chain_sum", "1", "p", {})
    with pytest.raises(ValueError, match=r"prompt 7 .*no reasoning_gym entry"):
        RuleReward().check([prompt])
    (failed,) = RuleReward()([Response(prompt, "1")])  # in a step, reward.on_error decides
    assert isinstance(failed, FailedScore)
    assert "no reasoning_gym entry" in failed.message
