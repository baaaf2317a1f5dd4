"""Environment variables of training and of the servers that it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mppo.parallel.environment import ROWS, check_queues, for_server, set_for_training
from mppo.rollout.sglang.server_options import own_server

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("name", "inherited"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", False),
        ("PYTORCH_ALLOC_CONF", False),
        ("CUDA_DEVICE_MAX_CONNECTIONS", False),
        ("NCCL_ALGO", False),
        ("NCCL_CUMEM_ENABLE", False),
        ("TORCH_NCCL_BLOCKING_WAIT", False),
        ("NVTE_FLASH_ATTN", False),
        ("RANK", False),
        ("MASTER_ADDR", False),
        ("TORCHELASTIC_RUN_ID", False),
        ("SLURM_PROCID", False),
        ("PMI_RANK", False),
        ("OMP_NUM_THREADS", False),
        ("NCCL_SOCKET_IFNAME", True),
        ("NCCL_IB_HCA", True),
        ("CUDA_VISIBLE_DEVICES", True),
        ("PATH", True),
        ("RANKING", True),
    ],
)
def test_what_a_server_inherits(name, inherited, monkeypatch, tmp_path):
    """Of the process that mppo starts, not of the table alone."""
    monkeypatch.setenv(name, "value")
    server = own_server(0, {}, {"EXTRA": "2"}, "key", tmp_path, 1.0)
    assert (name in server.environment) == inherited
    assert server.environment["EXTRA"] == "2"


START = {"CUDA_MODULE_LOADING": "EAGER", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_training_sets_what_the_user_has_not_set():
    environ: dict[str, str] = {}
    set_for_training(environ)
    assert environ == START
    set_for_training(environ, interleaved=False)
    assert environ == START | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    own = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "CUDA_MODULE_LOADING": "LAZY",
        "NCCL_NVLS_ENABLE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
    }
    environ = dict(own)
    set_for_training(environ, broadcasts=True, interleaved=False)
    assert environ == own | {"NCCL_CUMEM_ENABLE": "0"}


def test_interleaved_pipelines_have_hardware_queues_for_all_streams():
    environ: dict[str, str] = {}
    set_for_training(environ)
    set_for_training(environ, interleaved=True)
    assert environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    check_queues(environ, interleaved=True)
    environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    check_queues(environ, interleaved=False)
    with pytest.raises(ValueError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=8: .*unset it"):
        check_queues(environ, interleaved=True)


def test_both_ends_of_a_weight_broadcast_have_the_same_settings():
    environ = {"NCCL_NVLS_ENABLE": "1"}
    set_for_training(environ, broadcasts=True)
    inherited = for_server(environ, broadcasts=True)
    assert inherited == {"NCCL_NVLS_ENABLE": "1", "NCCL_CUMEM_ENABLE": "0"}


def test_the_documents_name_every_row():
    text = (DOCS / "rollout.md").read_text()
    assert len(ROWS) > 20
    missing = {row.names for row in ROWS if f"`{row.names}`" not in text}
    assert not missing
