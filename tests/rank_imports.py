"""What every rank needs, imported once; Megatron-Core is prepared for the CPU before it is used."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mppo.parallel import device

    device.prepare_megatron()
