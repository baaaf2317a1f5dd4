"""mppo: PPO for large language models on Megatron-Core, with SGLang rollout."""

__version__ = "0.1.0"
