"""A run's output and files contain no secret and are private, also if it fails."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from launched_run import ROOT, TINY, LaunchedRun

from mppo.dumps.inspection import main as inspect
from mppo.report.html.page import page_data
from mppo.report.html.program import main as report

HUB = "hf_qWeRtYuIoPaSdFgHjK0123"
PLAIN = "open5esame7cave"
FORGE = "ghp_0123456789abcdefghijABCDEFGHIJ"
FUNCTION = """
calls = 0

def score(data_source, solution_str, ground_truth, extra_info, hub_token, note):
    global calls
    calls += 1
    if calls > 8:
        raise ValueError(f"cannot log in with {note}, token={hub_token}")
    return 1.0
"""


def test_a_run_that_fails_shows_no_secret_of_its_recipe_and_leaves_private_files(tmp_path):
    run_dir, function = tmp_path / "run", tmp_path / "my_rewards.py"
    function.write_text(FUNCTION)
    settings = (
        "reward.name=function",
        f"reward.function={function}:score",
        f"reward.kwargs={{hub_token: {PLAIN}, note: {HUB}}}",
        f"trainer.project_name={FORGE}",
        "trainer.dump_rollouts=true",
    )
    run = LaunchedRun(run_dir, settings)
    assert run.codes() == [1, 1], run.texts()
    assert "cannot log in with ***, token=***" in run.texts()
    written = [path for path in run_dir.rglob("*") if path.is_file()]
    names = {path.name for path in written}
    assert {"recipe.yaml", "metrics.jsonl", "report.md", "report.html", "output_0.txt"} <= names
    assert {"events.jsonl", "step.json", "rank_1.safetensors"} <= names
    assert any("global_step_1" in str(path) for path in written), "a checkpoint holds the recipe"
    for secret in (HUB, PLAIN, FORGE):
        assert [path for path in written if secret.encode() in path.read_bytes()] == []
    others = [path for path in run_dir.rglob("*") if path.parent != run_dir or path.is_dir()]
    others += [run_dir / "recipe.yaml", run_dir / "metrics.jsonl", run_dir / ".lock"]
    assert [path for path in others if _seen_by_others(path)] == []


def _seen_by_others(path: Path) -> bool:
    return bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


# planted in the environment, in URLs and in the data; the first is a reward server's key
JUDGE, TRACKER, PROXY = "judge0pen5esame7", "wandb0pen5esame7cave", "pr0xyPass7word"
QUERY, USER = "query0pen5esame7", "url0pen5esame7"
PLANTED = (JUDGE, TRACKER, PROXY, QUERY, USER, HUB)
ENVIRONMENT = {
    "JUDGE_ACCESS": JUDGE, "WANDB_API_KEY": TRACKER, "HTTPS_PROXY": f"http://me:{PROXY}@proxy:1",
    "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40",
}  # fmt: skip
ONE_RANK = ("actor.megatron.tensor_model_parallel_size=1",)
ONE_RANK += ("critic.megatron.pipeline_model_parallel_size=1",)
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class EchoingJudge(BaseHTTPRequestHandler):
    """A reward server that refuses the first response it gets, and quotes the key and the URL."""

    refused: str | None = None

    def do_POST(self) -> None:
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        ids = [item["id"] for item in items]
        cls, texts = type(self), [item["response"] for item in items]
        cls.refused = texts[0] if cls.refused is None else cls.refused
        status, answer = 200, json.dumps({"scores": [i % 2 for i in range(len(ids))], "ids": ids})
        if cls.refused in texts:
            status, answer = 400, f"no: {self.headers['Authorization']} at {self.path}"
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, format: str, *args) -> None:
        """Print nothing per request."""


def on_a_terminal(settings: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a run of one rank whose output is a terminal."""
    shown, terminal = pty.openpty()
    command = [sys.executable, "-m", "mppo.train", *settings]
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment, cwd=ROOT)
    os.close(terminal)
    parts = []
    with suppress(OSError):  # the end of a terminal
        while part := os.read(shown, 1 << 16):
            parts.append(part)
    os.close(shown)
    return process.wait(300), b"".join(parts).decode(errors="replace")


def seen(text: str) -> list[str]:
    """The planted secrets in a text, also those that a table has cut into lines."""
    plain = CONTROL.sub("", text)
    joined = re.sub(r"[\s│|]", "", plain)
    return [secret for secret in PLANTED if secret in plain or secret in joined]


def seen_in(folder: Path) -> list[tuple[Path, list[str]]]:
    """The files with planted secrets."""
    found = []
    for path in (each for each in folder.rglob("*") if each.is_file()):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if any(secret.encode() in content for secret in PLANTED):
            found.append((path, seen(content.decode(errors="replace"))))
    return found


def test_no_planted_secret_leaves_a_run_its_tools_or_its_replay(tmp_path, monkeypatch, capfd):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    prompt = f"ask https://me:{USER}@host/x with {TRACKER} and {HUB}"
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": prompt, "answer": TRACKER}) + "\n")
    settings = [
        *TINY, *ONE_RANK, "data.task=null", f"data.train_files=[{tmp_path}/train.jsonl]",
        "data.max_prompt_length=160", "data.train_batch_size=1", "actor.ppo_mini_batch_size=1",
        "rollout.n=8", "trainer.total_training_steps=2", "trainer.export_hf=false",
        "trainer.save_freq=-1", "data.val_size=0",
    ]  # fmt: skip
    dumped, replayed = tmp_path / "dumped", tmp_path / "replayed"
    judge = ThreadingHTTPServer(("127.0.0.1", 0), EchoingJudge)
    threading.Thread(target=judge.serve_forever, daemon=True).start()
    remote = [
        "reward.name=remote", "reward.on_error=0", "reward.kwargs.api_key_env=JUDGE_ACCESS",
        f"reward.url=http://127.0.0.1:{judge.server_port}/score?key={QUERY}",
        "trainer.logger=[console, jsonl, tensorboard]", "trainer.dump_rollouts=true",
        "trainer.profile={steps: [1], ranks: [0]}", f"trainer.default_local_dir={dumped}",
    ]  # fmt: skip
    code, shown = on_a_terminal([*settings, *remote], dict(os.environ))
    judge.shutdown()
    assert code == 0, shown
    plain = CONTROL.sub("", shown)
    assert "HTTP 400" in plain, "the refusal is reported"
    assert shown.count("\x1b[") > 20, "a terminal has a live display"
    assert re.search(r"PPO .*1/2 .*eta", plain)
    again = [f"trainer.default_local_dir={replayed}", f"trainer.replay={dumped}"]
    again.append("reward.verifier=exact")
    # the output of a job is a log, even if the shell that submits it forces colours
    forced = {**os.environ, "FORCE_COLOR": "1", "SLURM_JOB_ID": "7"}
    command = [sys.executable, "-m", "mppo.train", *settings, *again]
    found = subprocess.run(command, capture_output=True, text=True, env=forced, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    assert "\x1b" not in found.stdout
    assert len(re.findall(r"^step [12]/2 ", found.stdout, re.M)) == 2
    assert not (replayed / "profile").exists(), "nothing is profiled that is not named"
    for main, arguments in (
        (report, [str(dumped), str(replayed), "-o", str(tmp_path / "both.html")]),
        (inspect, [str(dumped)]),
        (inspect, [str(dumped), "--sequence", "1"]),
    ):
        assert main(arguments) == 0
    outputs = [shown, found.stdout, found.stderr, *capfd.readouterr()]
    assert [seen(text) for text in outputs] == [[]] * len(outputs)
    assert seen(json.dumps(page_data([dumped, replayed]))) == []
    names = {path.name for path in dumped.rglob("*")}
    assert {"step.json", "samples.jsonl", "step_1_rank_0.json.gz", "tensorboard"} <= names
    assert "***" in (dumped / "samples.jsonl").read_text()
    (tmp_path / "train.jsonl").unlink()
    assert seen_in(tmp_path) == []
