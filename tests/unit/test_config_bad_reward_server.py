"""Bad recipes with a reward server: each gives one clear message and exit code 2."""

from __future__ import annotations

import pytest
from bad_recipe import GOOD, assert_one_fault, refusal

SERVER = "reward.name=remote reward.url=http://h/x"
SANDBOX = f"{SERVER} reward.format=sandbox_fusion"
JUDGE = f"{SERVER} reward.format=judge reward.kwargs.model=m reward.kwargs.template='{{response}}'"

# one setting too many: name, override, key, message
SETTINGS = [
    ("a format without a server", "reward.format=judge", "reward.format",
     "no effect with reward.name = rule and no server"),
    ("an unknown format", f"{SERVER} reward.format=grpc", "reward.format",
     "choose one of: mppo, openrlhf"),
    ("a judge for programs", "reward.url=http://h/x reward.format=judge", "reward.format",
     "the server at reward.url runs programs"),
    ("an unknown option of a server", f"{SERVER} reward.kwargs.retry=3", "reward.kwargs.retry",
     "did you mean 'retries'?"),
    ("a verifier's option for a server", f"{SERVER} reward.kwargs.partial_credit=true",
     "reward.kwargs.partial_credit", "the keys are batch_size, concurrency"),
    ("no responses in a request", f"{SERVER} reward.kwargs.batch_size=0",
     "reward.kwargs.batch_size", "give a value >= 1"),
    ("a truth for a number of responses", f"{SERVER} reward.kwargs.batch_size=true",
     "reward.kwargs.batch_size", "valid integer"),
    ("no requests at a time", f"{SERVER} reward.kwargs.concurrency=0",
     "reward.kwargs.concurrency", "give a value >= 1"),
    ("a negative number of retries", f"{SERVER} reward.kwargs.retries=-1",
     "reward.kwargs.retries", "give a value >= 0"),
    ("a word for a time", f"{SERVER} reward.kwargs.backoff_s=soon", "reward.kwargs.backoff_s",
     "valid number"),
    ("a negative longest time", f"{SERVER} reward.kwargs.max_backoff_s=-1",
     "reward.kwargs.max_backoff_s", "give a value >= 0"),
    ("no failures in a row", f"{SERVER} reward.kwargs.max_failures=0",
     "reward.kwargs.max_failures", "give a value >= 1"),
    ("a negative time to cool down", f"{SERVER} reward.kwargs.cool_down_s=-1",
     "reward.kwargs.cool_down_s", "give a value >= 0"),
    ("an empty variable", f"{SERVER} reward.kwargs.api_key_env=''", "reward.kwargs.api_key_env",
     "at least 1 character"),
    ("two programs in a request", f"{SANDBOX} reward.kwargs.batch_size=2",
     "reward.kwargs.batch_size", "give a value <= 1"),
    ("programs of no language", f"{SANDBOX} reward.kwargs.language=''",
     "reward.kwargs.language", "at least 1 character"),
    ("no time for a program", f"{SANDBOX} reward.kwargs.run_timeout_s=0",
     "reward.kwargs.run_timeout_s", "give a value > 0"),
    ("no time for a compiler", f"{SANDBOX} reward.kwargs.compile_timeout_s=0",
     "reward.kwargs.compile_timeout_s", "give a value > 0"),
    ("a test longer than its request", f"{SANDBOX} reward.timeout_s=20", "reward.timeout_s",
     "a request may take 20 s"),
    ("no memory for a program elsewhere", f"{SANDBOX} reward.kwargs.memory_limit_mb=0",
     "reward.kwargs.memory_limit_mb", "give a value > 0"),
    ("a word for partial credit", f"{SANDBOX} reward.kwargs.partial_credit=much",
     "reward.kwargs.partial_credit", "valid boolean"),
    ("a classifier without a tokenizer", f"{SERVER} reward.format=sglang",
     "reward.kwargs.tokenizer_path", "reward.format = sglang needs it"),
    ("no tokens for a classifier", f"{SERVER} reward.format=sglang "
     "reward.kwargs.tokenizer_path=x reward.kwargs.max_length=0", "reward.kwargs.max_length",
     "give a value > 0"),
    ("a word for a template's use", f"{SERVER} reward.format=sglang "
     "reward.kwargs.tokenizer_path=x reward.kwargs.apply_chat_template=no_thanks",
     "reward.kwargs.apply_chat_template", "valid boolean"),
    ("a judge without a model",
     f"{SERVER} reward.format=judge reward.kwargs.template='{{response}}'",
     "reward.kwargs.model", "reward.format = judge needs it"),
    ("a judge that sees no response", f"{JUDGE} reward.kwargs.template=x",
     "reward.kwargs.template", "does not contain {response}"),
    ("a pattern without a group", f"{JUDGE} reward.kwargs.pattern=x", "reward.kwargs.pattern",
     "has no group for the score"),
    ("a pattern that is none", f"{JUDGE} reward.kwargs.pattern='('", "reward.kwargs.pattern",
     "is not a regular expression"),
    ("a range upside down", f"{JUDGE} reward.kwargs.range=[5,1]", "reward.kwargs.range",
     "the lower one first"),
    ("a range of one number", f"{JUDGE} reward.kwargs.range=[1]", "reward.kwargs.range",
     "exactly that many entries"),
    ("a negative temperature of a judge", f"{JUDGE} reward.kwargs.temperature=-1",
     "reward.kwargs.temperature", "give a value >= 0"),
    ("a judge without words", f"{JUDGE} reward.kwargs.max_tokens=0", "reward.kwargs.max_tokens",
     "give a value >= 1"),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "key", "expected"), [row[1:] for row in SETTINGS],
                         ids=[row[0] for row in SETTINGS])  # fmt: skip
def test_a_malformed_setting_of_a_server_is_one_issue(setting, key, expected, tmp_path, capsys):
    assert_one_fault(refusal(tmp_path, capsys, GOOD, setting), key, expected)
