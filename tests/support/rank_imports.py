"""The imports of every rank, made once; Megatron-Core is prepared for the CPU first."""

from __future__ import annotations

import gc
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mppo.parallel import device

    device.prepare_megatron()
    import mppo.rollout.local.local_engine
    import mppo.rollout.sglang.sglang_engine
    import mppo.trainer.run_setup  # noqa: F401

gc.collect()
gc.freeze()  # collections in a forked rank would visit and copy them
