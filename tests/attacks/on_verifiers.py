"""Attacks on the verifiers of model text."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from attacks.attack import Attack, Table
from patient_judge import without_hurry

SAYS = "scores 0.0 and 1.0; the heartbeat continued"
TIMEOUT_S = 1.5
LONGEST_PAUSE_S = 120.0
"""Of the heartbeat: no machine is as slow, but one that is blocked is as late."""


def _scored(verifier: str, response: str, correct: str, truth: str, says: str):
    """Score the response, then an honest one, as a run does; a thread must keep running."""

    def run(folder: Path) -> int:
        from mppo.batch.prompt import Prompt
        from mppo.rewards.response import Response
        from mppo.rewards.rules import RuleReward
        from mppo.rewards.scores import read_scores

        package, _, family = verifier.partition(":")
        needed = {"math_flexible": "math_verify", "reasoning_gym": "reasoning_gym"}.get(package)
        if needed and find_spec(needed) is None:
            print(f"{says}, because nothing was run: {needed} is not installed")
            return 0
        answer, extra = _entry(family) if family else (correct, {})
        reward = RuleReward(package, timeout_s=TIMEOUT_S)
        prompt = Prompt(0, (1,), "attack", truth, "attack", extra)
        text = response.replace("PARENT", "__import__('os').getppid()")
        hostile = Response(prompt, text.replace("FOLDER", str(folder)))
        honest = Response(prompt, answer)
        with _beating() as beats:
            (first,) = read_scores(reward([hostile]), [hostile])
            (second,) = read_scores(without_hurry(reward)([honest]), [honest])
        pause = max(b - a for a, b in pairwise(beats))
        beating = "continued" if pause < LONGEST_PAUSE_S else f"was {pause:.0f} s late"
        scores = f"scores {first.score} and {second.score}"
        print(f"{scores}; the heartbeat {beating}; {first.unscored}")
        return 0

    return run


def _beating():
    """A thread that appends the time to a list, like the heartbeat's thread."""
    import threading
    import time
    from contextlib import contextmanager

    @contextmanager
    def beating():
        beats, over = [time.monotonic()], threading.Event()

        def beat() -> None:
            while not over.wait(0.05):
                beats.append(time.monotonic())

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield beats
        finally:
            over.set()
            thread.join()
            beats.append(time.monotonic())

    return beating()


def _entry(family: str) -> tuple[str, dict]:
    """An example of a reasoning_gym family: its answer and the data of its row."""
    from mppo.data.tasks import task

    example = task(f"reasoning_gym:{family}").example(0)
    return f"<answer>{example.answer}</answer>", example.extra


def _row(
    given: str, verifier: str, response: str, honest: str, truth: str = "17", by_user: bool = False
) -> Attack:
    run = _scored(verifier, response, honest, truth, SAYS)
    return Attack(given, run=run, says=SAYS, code=0, by_user=by_user)


def _math(given: str, response: str) -> Attack:
    return _row(f"{given}, `math_flexible`", "math_flexible", response, r"\boxed{17}")


def _gym(given: str, family: str, response: str) -> Attack:
    """Code of the model, in a process that may not do what its user may."""
    response, verifier = f"<answer>{response}</answer>", f"reasoning_gym:{family}"
    return _row(f"{given}, `{verifier}`", verifier, response, "", by_user=True)


def _final(given: str, response: str) -> Attack:
    return _row(f"{given}, `final_answer`", "final_answer", response, "17")


MILLION = 1_000_000

TABLE = Table(
    "Answers of the model",
    "Verifiers whose running time depends on the content of a response run in processes that can "
    "only read files and compute; they are killed after `reward.timeout_s`. The time of the other "
    "verifiers depends only on the length of the response. After each row a correct answer is "
    "scored and must get 1.",
    (
        _math("a tower of powers", r"\boxed{9^{9^{9^9}}}"),
        _math("the factorial of a billion", r"\boxed{(10^9)!}"),
        _math("a sum of a billion terms", r"\boxed{\sum_{i=1}^{10^9} \frac{1}{i^2}}"),
        _math("a product of 10^8 factors", r"\boxed{\prod_{i=1}^{100000000} i}"),
        _math("a binomial coefficient of a billion", r"\boxed{\binom{10^9}{10^8}}"),
        _math("the expansion of a power", r"\boxed{(x+1)^{100000} - x}"),
        _math("5,000 nested brackets", "\\boxed{" + "(" * 5000 + ")" * 5000 + "}"),
        _math("a number of a million digits", "\\boxed{" + "9" * MILLION + "}"),
        _math("100,000 additions", "1+" * 100_000),
        _math("a million dollar signs", "$" * MILLION),
        _gym("a power tower", "countdown", "9**9**9**9"),
        _gym(
            "a command",
            "countdown",
            "__import__('os').system('echo x > FOLDER/new')",
        ),
        _gym("a signal to the trainer", "n_queens", "__import__('os').kill(PARENT, 9)"),
        _gym("an endless loop", "n_queens", "exec('while True: pass')"),
        _gym("an exit of the process", "spiral_matrix", "__import__('os')._exit(0)"),
        _gym("a list of 80 GB", "string_insertion", "[0] * 10**10"),
        _gym("a new file", "n_queens", "open('FOLDER/new', 'w')"),
        _gym("a connection", "n_queens", "__import__('socket').create_connection(('::1', 80))"),
        _final("a megabyte of `\\boxed{`", "\\boxed{" * (MILLION // 7)),
        _final("a megabyte of `<answer>`", "<answer>" * (MILLION // 8)),
        _final("a megabyte of empty lines", "\n" * MILLION),
        _row("a million digits, `gsm8k`", "gsm8k", "#### " + "9" * MILLION, "#### 17"),
        _row("a megabyte of `#### `, `gsm8k`", "gsm8k", "#### " * (MILLION // 5), "#### 17"),
        _row("a million spaces, `gsm8k`", "gsm8k", "####" + " " * MILLION, "#### 17"),
        _row("a million commas, `gsm8k_flexible`", "gsm8k_flexible", "1" + "," * MILLION, "17"),
        _row("a million minus signs, `gsm8k_flexible`", "gsm8k_flexible", "-" * MILLION, "17"),
        _row("a million brackets, `choice`", "choice", "(" * MILLION, "B", "B"),
        _row("a megabyte, `exact`", "exact", "17 " * (MILLION // 3), "17"),
    ),
)
