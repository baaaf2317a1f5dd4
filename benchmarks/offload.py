"""Parts of roles to host memory and back: copies against memcpy, and the share hidden behind work.

    python benchmarks/offload.py            # on the GPU if there is one, else on the CPU

``copies``: ``MovedStorages.leave`` and ``arrive`` of the storages, against copies of one flat
tensor of the same size between the device and (on a GPU, pinned) host memory; works alternate.
One thread copies, which other load disturbs least. ``leave`` also frees the storages, and
``arrive`` allocates them, so ``arrive`` is also compared with a copy to a newly allocated flat
tensor. If an allocator returned freed memory to the system, the first write to each page would take
longer than the copy; ``page_faults`` counts such writes in the last turn. On a CPU glibc keeps
freed memory (``device.prepare_megatron``), on a GPU torch's caching allocator does.
``step``: forward passes and updates of actor and critic with everything offloaded, and without
offload. The hidden share is the part of the copies' time by which the step does not get longer. On
the CPU a copy is complete when the call returns: none is hidden, and the share is null.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from record import Seconds, alternate, parser, record

STORAGES = 8
OFFLOAD = {"parameters": True, "gradients": True, "optimizer": True}


def page_faults() -> int:
    """Pages that were mapped for this process so far, without a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def copies(megabytes: int, repeat: int) -> dict[str, object]:
    """Seconds and bandwidths of both directions."""
    from mppo.parallel import device
    from mppo.parallel.moved_storages import MovedStorages

    nbytes = (megabytes << 20) // STORAGES * STORAGES
    tensors = [
        torch.zeros(nbytes // STORAGES, dtype=torch.uint8, device=device.device())
        for _ in range(STORAGES)
    ]
    storages = MovedStorages(lambda: tensors, device.device())
    flat = torch.zeros(nbytes, dtype=torch.uint8, device=device.device())
    host = device.pinned_memory(nbytes)

    faults: dict[str, int] = {}

    def awaited(name: str, move: Callable[[], object]) -> None:
        before = page_faults()
        move()
        device.synchronize()
        faults[name] = page_faults() - before  # of the last turn

    new: list[torch.Tensor] = []

    def leave() -> None:
        storages.changed = True
        storages.leave()

    def copy_to_new() -> None:
        new.append(torch.empty(nbytes, dtype=torch.uint8, device=device.device()))
        new[0].copy_(host, non_blocking=True)

    works = {
        "leave": leave,
        "arrive": storages.arrive,
        "memcpy to the host": partial(host.copy_, flat, non_blocking=True),
        "memcpy to the device": partial(flat.copy_, host, non_blocking=True),
        "memcpy to new memory": copy_to_new,
    }
    timed = {name: partial(awaited, name, work) for name, work in works.items()}
    times = alternate({**timed, "free": new.clear}, repeat)
    return {
        "bytes": nbytes,
        "storages": STORAGES,
        "GB_per_s": {name: round(nbytes / times[name].wall / 1e9, 2) for name in works},
        "page_faults": faults,
        "of_memcpy": {
            "leave": _ratio(times["memcpy to the host"], times["leave"]),
            "arrive": _ratio(times["memcpy to the device"], times["arrive"]),
            "arrive, of memcpy to new memory": _ratio(
                times["memcpy to new memory"], times["arrive"]
            ),
        },
    }


def one_thread(work: Callable[[], dict[str, object]]) -> dict[str, object]:
    """What ``work`` returns when torch computes with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = work()
    torch.set_num_threads(threads)
    return found


def _ratio(of: Seconds, to: Seconds) -> float:
    """Bandwidth of ``to`` as a share of the bandwidth of ``of``."""
    return round(of.over(to), 3)


def step(hidden: int, layers: int, sequences: int, repeat: int) -> dict[str, object]:
    """Seconds of the passes of an iteration, with and without offload, and of the copies alone."""
    from mppo.parallel import device

    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), hidden, layers)
        runs = {name: _roles(Path(folder), name == "offloaded") for name in ("kept", "offloaded")}
        experience = {name: _experience(roles, sequences) for name, roles in runs.items()}
        works = {
            name: partial(_iterate, roles, experience[name], sequences)
            for name, roles in runs.items()
        }
        moved = runs["offloaded"].placement
        phases = [phase for phase in moved._table if phase.split()[0] in ("forward", "update")]

        def only_moves() -> None:
            for phase in (*phases, "generation"):
                moved.enter(phase)
            device.synchronize()

        times = alternate(works | {"copies": only_moves}, repeat)
    hidden = None
    if device.is_cuda():
        longer = times["offloaded"].wall - times["kept"].wall
        hidden = round(min(1.0, max(0.0, 1 - longer / times["copies"].wall)), 3)
    return {
        "seconds": {name: round(one.wall, 4) for name, one in times.items()},
        "hidden_share": hidden,
        "host_bytes": moved.host_nbytes,
    }


def _write_model(folder: Path, hidden: int, layers: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=4096, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        tie_word_embeddings=False, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=512, dtype=torch.bfloat16,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


def _roles(folder: Path, offloaded: bool):
    from mppo.hub.builtin import read_model_config
    from mppo.parallel.groups import GroupRegistry
    from mppo.recipe.load import load_recipe
    from mppo.trainer.run_roles import Roles

    keys = [f"model.path={folder}", "data.train_batch_size=8", "rollout.n=1"]
    for role in ("actor", "critic"):
        keys.append(f"{role}.ppo_mini_batch_size=8")
        keys += [f"{role}.megatron.offload.{part}={offloaded}" for part in OFFLOAD]
    return Roles(load_recipe(None, keys), folder, read_model_config, GroupRegistry(), 100)


def _batch(sequences: int):
    from mppo.batch.episode import Episode, EpisodeTokens, with_scores
    from mppo.batch.packing import pack_episodes
    from mppo.batch.prompt import Prompt
    from mppo.batch.score import ResponseScore

    prompt = Prompt(0, torch.ones(32, dtype=torch.int32), "", "", "")
    tokens = EpisodeTokens(torch.full((96,), 2, dtype=torch.int32), torch.full((96,), -0.5))
    episodes = [Episode.sampled(prompt, tokens, "length", 0)] * sequences
    scores = [ResponseScore(float(i % 2)) for i in range(sequences)]
    return pack_episodes(with_scores(episodes, scores))


def _experience(roles, sequences: int):
    from mppo.trainer.advantages import estimate
    from mppo.trainer.forward_phase import ForwardPhase

    forward = ForwardPhase(roles, _batch(sequences))
    for together in forward.passes:
        forward.compute(together)
    return estimate(forward.outputs(), roles.recipe.algorithm, 0.0)


def _iterate(roles, experience, sequences: int) -> None:
    """The passes and updates of an iteration; weights and states wait in the host between them."""
    from mppo.parallel import device
    from mppo.trainer.update.update_stage import UpdatePhase

    roles.placement.prepare("forward")
    _experience(roles, sequences)
    roles.placement.prepare("update")
    UpdatePhase(roles, experience, 1, actor_frozen=False).run()
    roles.placement.enter("generation")
    device.synchronize()


def main() -> None:
    arguments = parser(__doc__ or "", repeat=5)
    arguments.add_argument("--megabytes", type=int, default=1024)
    arguments.add_argument("--hidden", type=int, default=512)
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--sequences", type=int, default=8)
    options = arguments.parse_args()
    from mppo.parallel import device

    device.prepare_megatron()
    from mppo.parallel.launch import discover
    from mppo.parallel.process_group import process_group

    with process_group(discover(), timeout_s=600):
        found = {
            "device": device.name(),
            "copies": one_thread(partial(copies, options.megabytes, options.repeat)),
            "step": step(options.hidden, options.layers, options.sequences, options.repeat),
        }
    record(found, options.out)


if __name__ == "__main__":
    sys.exit(main())
