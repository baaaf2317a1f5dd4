"""The sandbox isolates programs and scores them by their tests."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from mppo_sandbox.sandbox import Sandbox
from mppo_sandbox.verifier import CodeVerifier

from mppo.batch.prompt import Prompt
from mppo.recipe.errors import ConfigError
from mppo.rewards.programs import extract_program, parse_tests
from mppo.rewards.response import Response
from mppo.rewards.rules import RuleReward
from mppo.rewards.scores import Unscored

ADD = "def add(a, b):\n    return a + b\n"
TESTS = json.dumps(["assert add(1, 2) == 3", "assert add(0, 0) == 0"])


@pytest.fixture(scope="module")
def sandbox():
    subject = Sandbox(cpu_s=60, memory_mb=512, output_mb=1)
    try:
        subject.check()
    except ConfigError as error:
        pytest.skip(f"this machine cannot isolate programs: {error.issues[0].why}")
    return subject


def prints(sandbox, program):
    outcome = sandbox.run(program)
    assert outcome.finished
    assert outcome.error is None, outcome.error
    return outcome.output.strip()


def test_tests_decide(sandbox):
    outcome = sandbox.run(ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "add(1)"])
    assert outcome.passed == (True, False, False)
    assert outcome.finished


def test_common_modules_can_be_imported_and_input_read(sandbox):
    program = (
        "import math, sys, collections, re\nprint(math.gcd(*map(int, sys.stdin.read().split())))"
    )
    assert sandbox.run(program, stdin="12 18").output == "6\n"
    assert sandbox.run("print(input()[::-1])", stdin="abc\n").output == "cba\n"


def test_no_file_of_the_machine_can_be_seen_read_or_written(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    for path in (secret, "/etc/passwd", "/proc/self/environ", "/proc/1/root"):
        assert "No such file" in sandbox.run(f"open({str(path)!r}).read()").error
    assert prints(sandbox, "import os\nprint(os.listdir('/'))") == "[]"
    for path in (secret, "/x", "/tmp/x"):
        assert "Error" in sandbox.run(f"open({str(path)!r}, 'w').write('x')").error
    assert secret.read_text() == "sesame"


def test_the_root_cannot_be_left(sandbox):
    escape = "import os\nos.chroot('/')"
    assert "Operation not permitted" in sandbox.run(escape).error
    mount = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.mount(b'none', b'/', b'proc', 0, None), libc.unshare(0x10000000))"
    )
    assert prints(Sandbox(modules=("ctypes",)), mount) == "-1 -1"


def test_no_network_can_be_reached(tmp_path):
    subject = Sandbox(modules=("socket",))
    try:
        subject.check()
    except ConfigError as error:
        pytest.skip(f"this machine cannot isolate programs: {error.issues[0].why}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        outcome = subject.run(f"import socket\nsocket.socket().connect({address})")
    assert "Operation not permitted" in outcome.error


def test_no_privilege_other_process_or_environment_is_left(sandbox, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_sesame")
    program = "import os\nprint(os.getresuid(), os.getgroups(), os.getpid(), os.getppid())"
    assert prints(sandbox, program) == "(65534, 65534, 65534) [] 1 0"
    assert "sesame" not in prints(sandbox, "import os\nprint(dict(os.environ))")
    assert "Operation not permitted" in sandbox.run("import os\nos.setuid(0)").error
    assert "Operation not permitted" in sandbox.run(f"import os\nos.kill({os.getpid()}, 9)").error


AS_ROOT_OF_A_CONTAINER = """
from mppo.rewards.workers.confinement import call
from mppo_sandbox.child import PR_CAPBSET_DROP
from mppo_sandbox.sandbox import Sandbox
CAP_SYS_ADMIN = 21
call("prctl", PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0)  # of the programs that follow
Sandbox().check()
print(Sandbox().run("import os\\nprint(os.getresuid(), os.getgroups(), os.listdir('/'))").output)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be the root of a container")
def test_the_root_of_a_container_runs_programs_as_nobody(sandbox):
    if subprocess.run(["unshare", "--user", "true"], user=65534, capture_output=True).returncode:
        pytest.skip("this machine lets only root create namespaces")
    command = [sys.executable, "-c", AS_ROOT_OF_A_CONTAINER]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.strip() == "(65534, 65534, 65534) [] []", result.stderr


@pytest.mark.parametrize(
    ("program", "cpu_s"), [("while True: pass", 2), ("import os\nos._exit(0)", 60)]
)
def test_a_program_that_does_not_finish_passes_no_test(program, cpu_s, sandbox):
    outcome = replace(sandbox, cpu_s=cpu_s).run(program, ["pass"])
    assert (outcome.passed, outcome.finished) == ((), False)


FORGED = """
import os
for fd in range(3, 1024):
    try:
        os.write(fd, {0})
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    "content",
    [
        """b'{"passed": [1000]}'""",
        "b'{'",
        "b'!'",
        "b'D111.'",
        "b'D.'",
        "b'D1'",
        "b'\\xff' * 100000",
    ],
)
@pytest.mark.parametrize("ends", ["os._exit(0)", "pass"])
def test_a_bad_verdict_is_counted_and_passes_no_test(content, ends, sandbox):
    outcome = sandbox.run(FORGED.format(content) + ends, ["pass"])
    assert (outcome.passed, outcome.finished, outcome.forged) == ((), False, True)
    score = CodeVerifier(sandbox)(FORGED.format(content) + ends, '["pass"]', {})
    assert score == Unscored("bad_verdicts")


def test_a_long_exception_is_an_error_like_another(sandbox):
    outcome = sandbox.run("raise ValueError('x' * 10**7)", ["pass"])
    assert outcome.finished
    assert not outcome.forged
    assert 1000 < len(outcome.error) <= 2000


def test_no_memory_outside_the_limit_is_available(sandbox):
    program = "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
    assert prints(sandbox, program + "print(libc.shmget(0, 1 << 30, 0o1600))") == "-1"
    assert prints(sandbox, program + "print(libc.msgget(0, 0o1600))") == "-1"
    assert "not permitted" in sandbox.run("import os\nos.memfd_create('x')").error


def test_a_program_has_a_session_of_its_own(sandbox):
    assert prints(sandbox, "import os\nprint(os.getpgid(0), os.getsid(0))") == "1 1"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("x = [0] * 10**9", "MemoryError"),
        ("import os\nos.fork()", "BlockingIOError"),
        ("import threading\nthreading.Thread(target=print).start()", "can't start new thread"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def f(:", "SyntaxError"),
        ("import torch", "No module named 'torch'"),
    ],
)
def test_limits_and_errors_are_reported(program, error, sandbox):
    outcome = sandbox.run(program, ["pass"])
    assert error in outcome.error
    assert outcome.passed == ()


def test_output_is_bounded(sandbox):
    outcome = sandbox.run("while True: print('x' * 1000)")
    assert len(outcome.output) <= 1 << 20


def test_scores_of_programs(sandbox):
    complete, parts = CodeVerifier(sandbox), CodeVerifier(sandbox, partial_credit=True)
    answer = f"Like this:\n```python\nprint(1)\n```\nor better:\n```python\n{ADD}```\nDone."
    assert complete(answer, TESTS, {}) == 1.0
    wrong = ADD.replace("+", "*")
    assert complete(wrong, TESTS, {}) == 0.0
    assert parts(wrong, TESTS, {}) == 0.5
    assert complete("import os\nos._exit(0)", TESTS, {}) == 0.0


def test_programs_that_read_and_write_are_compared_by_words(sandbox):
    tests = json.dumps([{"input": "1 2", "output": "3\n"}, {"input": "5 5", "output": "10"}])
    verify = CodeVerifier(sandbox, partial_credit=True)
    assert verify("print(sum(map(int, input().split())))", tests, {}) == 1.0
    assert verify("print(3)", tests, {}) == 0.5
    assert verify("print(10); raise ValueError", tests, {}) == 0.0


def test_many_programs_are_scored_in_order(sandbox):
    judge = RuleReward("code", sandbox={"cpu_s": 60})
    prompt = Prompt(0, (1,), "mbpp", TESTS, "add")
    programs = [ADD, ADD.replace("+", "-"), "", ADD]
    assert judge([Response(prompt, program) for program in programs]) == [1.0, 0.0, 0.0, 1.0]


def test_programs_and_tests_are_found():
    assert extract_program("x = 1") == "x = 1"
    assert extract_program("```py\nx = 1\n```") == "x = 1\n"
    assert parse_tests('["a"]') == ["a"]
    for wrong in ("[]", "{}", "oops", "[1]", '[{"input": "x"}]'):
        with pytest.raises(ValueError, match="JSON list"):
            parse_tests(wrong)


@pytest.mark.parametrize(
    ("sandbox", "message"),
    [({"cpus": 1}, "no such limit"), ({"cpu_s": 0}, "positive"), ({"memory_mb": "1G"}, "positive")],
)
def test_wrong_limits_are_explained(sandbox, message):
    with pytest.raises(ConfigError, match=message):
        RuleReward("code", sandbox=sandbox)
