"""The imports of every rank, made once; Megatron-Core is prepared for the CPU first."""

from __future__ import annotations

import gc
import importlib
import sys
import warnings

IMPORTED = (
    "mppo.rollout.local.local_engine",
    "mppo.rollout.sglang.sglang_engine",
    "mppo.train",
    "mppo.trainer.loop",
    "mppo.trainer.run_setup",
    "mppo.trainer.start.training_session",
)
LATER = (
    "matplotlib.backends.backend_agg",  # the first rank's, for the report at the end of a run
    "matplotlib.figure",
    "transformers.models.qwen2.modeling_qwen2",  # of the model of most tests
    "transformers.models.qwen2.tokenization_qwen2",
)
"""What many ranks import while they run."""

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mppo.parallel import device

    device.prepare_megatron()
    for name in IMPORTED:
        importlib.import_module(name)
    AT_THE_START = frozenset(sys.modules)
    for name in LATER:
        importlib.import_module(name)

gc.collect()
gc.freeze()  # collections in a forked rank would visit and copy them
