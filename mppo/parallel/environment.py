"""Environment variables of CUDA, NCCL and the launcher that training sets or servers inherit.

A rollout server that mppo starts is a child process of a training rank, but not a rank itself. It
inherits the rank's environment without the variables that ``ROWS`` reserves for training.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mppo.safety.input_error import InputError


@dataclass(frozen=True)
class EnvironmentRule:
    """The rule for one variable, or for all variables that match a pattern.

    Args:
        names: a name, or a pattern with ``*``.
        value: the value that training sets if the user has not; None: training does not set it.
        interleaved: ``value`` where a role has several model chunks on a pipeline stage; None: the
            same value.
        for_broadcasts: ``value`` is set only with ``rollout.sync=distributed``. Servers then
            inherit the trainer's value, because both ends of a communicator need the same one.
        for_servers: whether a server that mppo starts inherits the variable.
    """

    names: str
    why: str
    value: str | None = None
    interleaved: str | None = None
    for_broadcasts: bool = False
    for_servers: bool = False


QUEUES, QUEUES_INTERLEAVED = 1, 32
"""Hardware queues of a GPU with which ``mppo.pipeline.schedule_checks`` examines lists of actions.
With one queue some interleaved lists can hang."""

_LAUNCHER = "describes the rank; a server is none"
_NETWORK = "names the machine's network, which servers use for rollout.sync=distributed"
_ONE_TREATMENT = "SGLang turns it off; NCCL hangs if the two ends of a communicator differ"

ROWS = (
    EnvironmentRule(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "with one queue, Megatron's communication starts before the computation that hides it, but "
        "interleaved stages can wait for each other for ever; SGLang overlaps otherwise",
        value=str(QUEUES),
        interleaved=str(QUEUES_INTERLEAVED),
    ),
    EnvironmentRule(
        "CUDA_MODULE_LOADING",
        "a kernel that is loaded when it is first used waits for the whole device, and thereby for "
        "messages that other ranks have not sent yet; a server chooses for itself",
        value="EAGER",
    ),
    EnvironmentRule("NCCL_CUMEM_ENABLE", _ONE_TREATMENT, value="0", for_broadcasts=True),
    EnvironmentRule("NCCL_NVLS_ENABLE", _ONE_TREATMENT, value="0", for_broadcasts=True),
    EnvironmentRule("NCCL_SOCKET_*", _NETWORK, for_servers=True),
    EnvironmentRule("NCCL_IB_*", _NETWORK, for_servers=True),
    EnvironmentRule("NCCL_NET*", _NETWORK, for_servers=True),
    EnvironmentRule("NCCL_DEBUG*", "shows what NCCL does, in servers too", for_servers=True),
    EnvironmentRule("NCCL_*", "tunes training's communicators; SGLang sets its own values"),
    EnvironmentRule("TORCH_NCCL_*", "tunes training's process groups"),
    EnvironmentRule(
        "PYTORCH_ALLOC_CONF",
        "to free other memory than expandable segments, torch waits for the whole device, as "
        "above; memory that a server releases between generations cannot be in them",
        value="expandable_segments:True",
    ),
    EnvironmentRule(
        "PYTORCH_*ALLOC_CONF", "older names of the one above; training sets neither if one is set"
    ),
    EnvironmentRule("NVTE_*", "chooses Transformer Engine's kernels for training"),
    *(
        EnvironmentRule(names, _LAUNCHER)
        for names in (
            "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
            "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*",
            "SLURM_*", "PMI_*", "PMIX_*", "OMPI_*",
        )
    ),
    EnvironmentRule("OMP_NUM_THREADS", "is the share of one rank; a server has its own number"),
)  # fmt: skip
"""The first row that matches a variable applies. Servers inherit variables without a row."""


def set_for_training(
    environ: MutableMapping[str, str], broadcasts: bool = False, interleaved: bool | None = None
) -> None:
    """Set the variables that training needs, except those that the user has set; call it before
    CUDA and NCCL read them. ``broadcasts``: weights reach the servers by
    ``rollout.sync=distributed``. ``interleaved``: a role has several model chunks on a pipeline
    stage; None: not known yet, variables that depend on it are not set."""
    for row in ROWS:
        value = row.interleaved if interleaved and row.interleaved is not None else row.value
        if value is None or (row.for_broadcasts and not broadcasts):
            continue
        if interleaved is None and row.interleaved is not None:
            continue
        if "ALLOC_CONF" not in row.names or not any("ALLOC_CONF" in name for name in environ):
            environ.setdefault(row.names, value)


def check_queues(environ: Mapping[str, str], interleaved: bool) -> None:
    """Raise InputError if with the user's number of hardware queues of a GPU the stages of an
    interleaved pipeline could wait for each other for ever."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    queues = environ.get(name, str(QUEUES_INTERLEAVED))
    if interleaved and queues != str(QUEUES_INTERLEAVED):
        raise InputError(
            f"{name}={queues}: with virtual_pipeline_model_parallel_size, streams that share a "
            "hardware queue can make the pipeline's stages wait for each other for ever: unset it, "
            f"or set it to {QUEUES_INTERLEAVED}"
        )


def for_server(environ: Mapping[str, str], broadcasts: bool = False) -> dict[str, str]:
    """Select the part of a training rank's environment that a server inherits."""
    kept = {}
    for name, value in environ.items():
        row = next((row for row in ROWS if fnmatchcase(name, row.names)), None)
        if row is None or row.for_servers or (row.for_broadcasts and broadcasts):
            kept[name] = value
    return kept
