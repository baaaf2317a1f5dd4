"""The reward server of a recipe."""

from __future__ import annotations

from mppo.config.remote_options import read_remote_options
from mppo.config.sections.remote import (
    ClassifierOptions,
    JudgeOptions,
    RemoteOptions,
    SandboxFusionOptions,
)
from mppo.config.sections.reward import RewardConfig
from mppo.rewards.remote.batches import MppoFormat, OpenRLHFFormat
from mppo.rewards.remote.classifier import load_classifier_format
from mppo.rewards.remote.judge import JudgeFormat
from mppo.rewards.remote.reward import RemoteReward
from mppo.rewards.remote.sandbox_fusion import SandboxFusionFormat
from mppo.rewards.remote.server import RewardServer
from mppo.rewards.remote.wire import WireFormat


def build_remote_reward(reward: RewardConfig) -> RemoteReward:
    """Build the client of a recipe's reward server; ConfigError for an invalid URL or option, or if
    there is no such environment variable or tokenizer."""
    options = read_remote_options(reward)
    server = RewardServer(str(reward.url), reward.timeout_s, options.api_key_env)
    return RemoteReward(server, _wire(reward.server_format, options), options)


def _wire(name: str | None, options: RemoteOptions) -> WireFormat:
    if isinstance(options, SandboxFusionOptions):
        return SandboxFusionFormat(options)
    if isinstance(options, ClassifierOptions):
        return load_classifier_format(options)
    if isinstance(options, JudgeOptions):
        return JudgeFormat(options)
    return OpenRLHFFormat() if name == "openrlhf" else MppoFormat()
