"""The HTML report's data: died and resumed runs, several runs, secrets, the server."""

from __future__ import annotations

import http.client
import json
import threading
from urllib.parse import urlsplit

import pytest
import torch
from random_dump import write_dump
from random_outputs import outputs_of

from mppo.dumps.step_dump import step_folder
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.trainer import TrainerConfig
from mppo.report.html.page import page_data, page_text
from mppo.report.html.program import ReportServer, main
from mppo.report.reporter import Reporter
from mppo.report.run_record import RunEvent, append_event, read_events

SECRET = "hf_qWeRtYuIoPaSdFgHjK0123"
PLAIN = "open5esame7cave"


def started(run_dir, done, layout, total=6, **settings) -> Reporter:
    """A run that starts after ``done`` steps, as the loop does it."""
    dump = Recipe.model_validate({"trainer": settings}).model_dump(mode="json")
    subject = Reporter(run_dir, TrainerConfig(**settings), dump, total, is_main=True)
    subject.start(done)
    subject.event("start", done, layout)
    return subject


def log(subject, *steps, **changes) -> None:
    for step in steps:
        row = {"critic/score/mean": step / 10, "timing_s/step": 1.0, "timing_s/gen": 0.4}
        subject.log(step, {**row, **changes})


def test_a_run_that_died_twice_and_changed_its_layout(tmp_path):
    def memory(ranks: int) -> dict[str, float]:
        return {f"perf/rank_memory_gb/{rank}": 1.0 for rank in range(ranks)}

    # killed: nothing is closed
    log(started(tmp_path, 0, "2 ranks; actor TP2"), 1, 2, 3, **memory(2))
    log(started(tmp_path, 2, "4 ranks; actor TP2 PP2"), 3, 4, 5, **memory(4))
    last = started(tmp_path, 4, "1 rank; actor TP1")
    log(last, 5, 6, **memory(1))
    last.close()
    data = page_data([tmp_path])
    (run,) = data["runs"]
    assert run["steps"] == [1, 2, 3, 4, 5, 6], "repeated steps count once"
    kinds = [(event["kind"], event["step"]) for event in run["events"]]
    assert kinds == [
        ("start", 0), ("died", 3), ("resumed", 2), ("died", 5), ("resumed", 4), ("end", 6),
    ]  # fmt: skip
    layouts = [event["text"] for event in run["events"] if event["kind"] in ("start", "resumed")]
    assert layouts == ["2 ranks; actor TP2", "4 ranks; actor TP2 PP2", "1 rank; actor TP1"]
    assert run["status"] == "finished: 6 of 6 steps"
    (reward,) = [plot for plot in data["plots"] if plot["title"] == "Reward"]
    assert reward["lines"][0]["y"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    (memory,) = [plot for plot in data["plots"] if plot["title"] == "Memory per rank"]
    assert [(line["label"], line.get("x")) for line in memory["lines"]] == [
        ("rank 0", None), ("rank 1", [1, 2, 3, 4]), ("rank 2", [3, 4]), ("rank 3", [3, 4]),
    ], "each rank in the steps in which it existed"  # fmt: skip
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_a_run_that_goes_on_is_said_to(tmp_path):
    log(started(tmp_path, 0, "1 rank"), 1)
    (run,) = page_data([tmp_path])["runs"]
    assert [event["kind"] for event in run["events"]] == ["start", "running"]
    assert run["status"].startswith("running: 1 of 6")


def test_runs_are_laid_over_each_other_with_the_difference_of_their_recipes(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        subject = started(tmp_path / name, 0, "1 rank", experiment_name=name, seed=seed)
        log(subject, 1, 2)
        subject.close()
    data = page_data([tmp_path / "a", tmp_path / "b"])
    assert [run["name"] for run in data["runs"]] == ["mppo/a", "mppo/b"]
    assert [(row["key"], row["values"]) for row in data["recipes"]] == [
        ("trainer.experiment_name", ['"a"', '"b"']), ("trainer.seed", ["1", "2"]),
    ]  # fmt: skip
    (reward,) = [plot for plot in data["plots"] if plot["title"] == "Reward"]
    assert [line["run"] for line in reward["lines"]] == [0, 1]
    stacks = [plot["lines"] for plot in data["plots"] if plot["kind"] == "stack"]
    assert [{line["run"] for line in lines} for lines in stacks] == [{0}, {1}]
    assert {line["label"] for line in stacks[0]} == {"gen"}, "the step itself is not a phase"


def test_tokens_of_a_dump_have_their_numbers(tmp_path):
    subject = started(tmp_path, 0, "1 rank")
    log(subject, 1)
    write_dump(tmp_path, 1)
    write_dump(tmp_path, 2)  # of work that was lost: no metrics
    (run,) = page_data([tmp_path])["runs"]
    assert [(row["step"], row["sequence"]) for row in run["tokens"]] == [(1, 0), (1, 1)]
    first = run["tokens"][0]
    assert first["pieces"] == ["ab0", "ab1", "ab2", "ab3"]
    assert first["prompt_tokens"] == 1
    outputs = outputs_of([3, 2], scores=[1.0, 0.0])
    ratio = torch.exp(outputs.logprobs_T - outputs.batch.rollout_logprobs_T)[1:4]
    assert first["numbers"]["ratio"] == pytest.approx(ratio.tolist(), rel=1e-4)
    assert {len(values) for values in first["numbers"].values()} == {3}
    (step_folder(tmp_path, 1) / "rank_0.safetensors").write_bytes(b"x")
    (row,) = page_data([tmp_path])["runs"][0]["tokens"]
    assert "cannot be read" in row["error"]


def test_the_sequences_of_an_episode_are_a_tree(tmp_path):
    log(started(tmp_path, 0, "1 rank"), 1, 2)
    write_dump(tmp_path, 1, tokens=[0, 1, 2, 3, 0, 1, 4], episode=5)
    write_dump(tmp_path, 2, tokens=[0, 1, 2, 3, 0, 1, 4])
    tokens = page_data([tmp_path])["runs"][0]["tokens"]
    found = [[row[key] for key in ("step", "parent", "shared", "sequences")] for row in tokens]
    assert found == [[1, None, 0, 2], [1, 0, 2, 2], [2, None, 0, 1], [2, None, 0, 1]]


def test_no_planted_secret_reaches_the_page_or_the_dump(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", PLAIN)
    subject = started(tmp_path, 0, f"engine http://user:{PLAIN}@host/?token={SECRET}")
    log(subject, 1)
    subject.event("warning", 1, f"Authorization: Bearer {SECRET}")
    with (tmp_path / "samples.jsonl").open("a") as file:
        row = {"prompt": PLAIN, "response": SECRET, "ground_truth": "x", "score": 1.0}
        file.write(json.dumps({"step": 1, **row}) + "\n")
    (tmp_path / "recipe.yaml").write_text(f"reward: {{kwargs: {{api_key: {SECRET}}}}}\n")
    write_dump(tmp_path, 1, f"q {PLAIN}=", SECRET)
    text = page_text(page_data([tmp_path]))
    assert SECRET not in text
    assert PLAIN not in text
    assert "***" in text
    for path in (tmp_path / "events.jsonl", step_folder(tmp_path, 1) / "step.json"):
        assert SECRET not in path.read_text()
        assert PLAIN not in path.read_text()


def test_text_of_a_run_cannot_end_the_script_element(tmp_path):
    subject = started(tmp_path, 0, "</script><img src=x onerror=alert(1)>")
    log(subject, 1)
    text = page_text(page_data([tmp_path]))
    assert text.count("</script>") == 3
    assert "<img" not in text
    assert "Content-Security-Policy" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text.replace("https://github.com/leeoniya/uPlot", "")


def test_samples_that_are_not_samples_are_left_out(tmp_path):
    log(started(tmp_path, 0, "1 rank"), 1)
    texts = '"prompt": "p", "response": "r", "ground_truth": 4'
    lines = ["{", "[]", f'{{"step": 1, {texts}}}', f'{{"step": 9, {texts}, "score": 1}}']
    lines += [f'{{"step": 1, {texts}, "score": {score}}}' for score in ("0.5", "NaN", "[]")]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))
    data = page_data([tmp_path])
    assert [row["score"] for row in data["runs"][0]["samples"]] == [0.5, None]
    assert "NaN" not in page_text(data).partition('id="data">')[2].partition("</script>")[0]


def test_the_program_writes_a_file_and_refuses_other_folders(tmp_path, capsys):
    log(started(tmp_path, 0, "1 rank"), 1)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "report.html")
    output = tmp_path / "other.html"
    assert main([str(tmp_path), "-o", str(output)]) == 0
    assert "mppo/run" in output.read_text()
    wrong = {
        "is not a run folder": [str(tmp_path / "nothing")],
        "is a folder: name a file": [str(tmp_path), "-o", str(tmp_path)],
        "does not exist: make it first": [str(tmp_path), "-o", str(tmp_path / "no" / "a.html")],
    }
    for message, arguments in wrong.items():
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert message in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("no JSON\n")
    assert main([str(tmp_path)]) == 2
    assert "line 1: is not JSON" in capsys.readouterr().err


def test_a_port_in_use_is_named(tmp_path, capsys):
    log(started(tmp_path, 0, "1 rank"), 1)
    with ReportServer([tmp_path], 0) as server:
        port = server.server_port
        assert main([str(tmp_path), "--serve", "--port", str(port)]) == 2
    assert f"cannot listen on port {port}" in (shown := capsys.readouterr().err)
    assert "--port" in shown


def test_a_folder_of_odd_files_is_shown_as_far_as_it_can_be(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": null, "lr": 1}\n')
    (tmp_path / "status.json").write_text('{"status": 5, "step": "x", "total_steps": []}')
    (tmp_path / "recipe.yaml").write_text("trainer: 3\nmodel: [.nan, {a: .inf}]\n")
    (tmp_path / "events.jsonl").write_text('{"kind": "start", "step": 1, "text": 7, "time": 8}\n')
    (tmp_path / "timeline").mkdir()
    (tmp_path / "timeline/step_1.json").write_bytes(b"{")
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), str(tmp_path), "-o", str(tmp_path / "x.html")]) == 0


def test_events_that_are_not_events_are_ignored(tmp_path):
    lines = ["{", '{"kind": "x", "step": 1, "text": ""}', "[]", '{"kind": "end", "step": "1"}']
    good = '{"kind": "end", "step": 1, "text": "finished", "time": ""}'
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, good, '{"kind": "en']))
    assert [event.text for event in read_events(tmp_path)] == ["finished"]
    append_event(tmp_path, RunEvent("engine", None, "restarting"))
    assert [event.step for event in read_events(tmp_path)] == [1, None]


def test_the_server_answers_on_the_loopback_only_to_its_own_name_and_key(tmp_path):
    subject = started(tmp_path, 0, "1 rank")
    log(subject, 1)
    with ReportServer([tmp_path], 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def get(path, host=f"127.0.0.1:{server.server_port}"):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        root = urlsplit(server.url).path
        assert "data-live" in get(root)[1]
        assert json.loads(get(f"{root}data.json")[1])["runs"][0]["steps"] == [1]
        log(subject, 2)
        assert json.loads(get(f"{root}data.json")[1])["runs"][0]["steps"] == [1, 2]
        assert get(root, host="evil.example:80")[0] == 403
        assert get(f"{root}../etc/passwd")[0] == 404
        other = f"/{len(root[1:-1]) * '0'}/"
        without = ["/", "//", "/data.json", "/../etc/passwd", other, root[:-2], "*"]
        for path in [*without, f"{other}data.json", f"{root[:-1]}0/"]:
            status, text = get(path)
            assert (status, "data-live" in text) == (403, False), path
        with ReportServer([tmp_path], 0) as second:
            assert urlsplit(second.url).path != root
        server.shutdown()
