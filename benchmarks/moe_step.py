"""Speed of updating a mixture of experts, cost of router replay, memory saved by CP2.

    python benchmarks/moe_step.py speed [--repeat 3] [--sequences 16] [--longest 512] [--out FILE]
    python benchmarks/moe_step.py memory [--long 16384] [--layers 4 12] [--out FILE]

Speed, in one process and one thread, float32: forward and backward pass on the same sequences by
mppo's actor (Qwen3-MoE with 64 experts, 6 active), by a dense model with the same number of active
parameters, and by transformers' eager mixture of experts, which pads: in the batch's order, and
with sequences sorted by length. Then the same update with all expert choices replayed, from the
role's own record (R2) and from the batch, as rollout engines report them (R3). The cases alternate
and the fastest repetition counts; on a shared machine only processor seconds are comparable.

Memory: the peak that the update of one long sequence adds, on one rank and on each of two (context
parallelism), for dense models of several depths. CP2 halves what a layer keeps for its backward
pass, but not the working memory of one layer or of the head.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from record import alternate, parser, record

EXPERTS, CHOSEN, WIDTH = 64, 6, 128
M_MMAP_THRESHOLD = -3
"""glibc's number for ``mallopt`` (malloc.h)."""
TRUNK = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


def save_models(folder: Path, layers: int = 4) -> None:
    """The mixture of experts, and a dense model with as many active parameters."""
    torch.manual_seed(0)
    trunk = {**TRUNK, "num_hidden_layers": layers}
    sparse = transformers.Qwen3MoeConfig(
        **trunk,
        intermediate_size=WIDTH,
        moe_intermediate_size=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
    )
    dense = transformers.Qwen3Config(**trunk, intermediate_size=CHOSEN * WIDTH)
    for name, config in (("sparse", sparse), ("dense", dense)):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)


def make_batch(lengths: list[int]):
    """Random sequences; the prompt is an eighth of each."""
    from mppo.batch.episode import Episode, EpisodeTokens
    from mppo.batch.packing import pack_episodes
    from mppo.batch.prompt import Prompt

    generator = torch.Generator().manual_seed(1)
    episodes = []
    for uid, length in enumerate(lengths):
        tokens = torch.randint(0, TRUNK["vocab_size"], (length,), generator=generator).tolist()
        cut = max(1, length // 8)
        prompt = Prompt(uid, tokens[:cut], "", "", "")
        response = EpisodeTokens(tokens[cut:], [0.0] * (length - cut))
        episodes.append(Episode.sampled(prompt, response, "stop", 0))
    return pack_episodes(episodes)


def make_role(folder: Path, registry, micro_batch: int, replay: str = "off", cp: int = 1):
    """An actor on the running process group."""
    from mppo.models.role import Role
    from mppo.recipe.sections.megatron import MegatronConfig
    from mppo.recipe.sections.optim import OptimConfig
    from mppo.recipe.sections.role_config import RoleConfig
    from mppo.recipe.sections.roles import BatchingConfig

    megatron = MegatronConfig(context_parallel_size=cp)
    settings = RoleConfig(
        name="actor",
        dtype="float32",
        megatron=megatron,
        batching=BatchingConfig(ppo_micro_batch_size_per_gpu=micro_batch),
        optim=OptimConfig(),
        router_replay=replay,
    )
    config = transformers.AutoConfig.from_pretrained(folder)
    groups = registry.of(megatron.layout(dist.get_world_size()))
    return Role(settings, folder, config, groups)


def make_update(role, batch) -> Callable[[], object]:
    """A forward and backward pass of the role over the batch."""
    from mppo.batch.mini_batch import MiniBatch
    from mppo.models.streamed_role import forward, forward_backward

    forward(role, batch, role.plan(batch, training=False))
    plan = role.plan(batch, training=True)

    def objective(outputs, indices):
        loss = -outputs.logprobs_T.sum() / float(batch.response_mask_T.sum())
        return loss, {"loss": loss.detach()}

    objective.statistics = ("loss",)
    return lambda: forward_backward(role, MiniBatch(batch, plan, objective))


def as_chosen(role, batch):
    """The batch with a role's recorded routing, as if from the rollout engine."""
    with role.groups.active():
        chosen, _ = role.routing._taken(batch, role.plan(batch, training=False))
    return replace(batch, routed_experts_T=chosen.to(torch.int16))


def make_hf_update(folder: Path, batch, micro_batch: int, by_length: bool) -> Callable[[], object]:
    """The same by transformers in padded micro-batches, optionally of similar lengths."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager"
    ).train()
    starts = batch.cu_seqlens.tolist()
    sequences = [batch.tokens_T[a:b] for a, b in itertools.pairwise(starts)]
    masks = [batch.response_mask_T[a:b] for a, b in itertools.pairwise(starts)]
    order = list(range(len(sequences)))
    if by_length:
        order.sort(key=lambda i: len(sequences[i]))
    total = float(batch.response_mask_T.sum())

    def pad(rows):
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def update() -> None:
        model.zero_grad()
        for first in range(0, len(order), micro_batch):
            part = order[first : first + micro_batch]
            tokens, mask = pad([sequences[i] for i in part]), pad([masks[i] for i in part])
            real = pad([torch.ones(len(sequences[i]), dtype=torch.int64) for i in part])
            logits = model(tokens, attention_mask=real, use_cache=False).logits[:, :-1]
            logprobs = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
            (-(logprobs * mask[:, 1:]).sum() / total).backward()

    return update


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def return_freed_memory() -> None:
    """Undo ``mppo.parallel.device.keep_freed_memory``: every large tensor gets its own pages.

    The process then holds the memory of its tensors without the gaps of freed ones.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


def start(rank: int, world: int, store: Path):
    """A process group of gloo ranks with a file store; the registry of its layouts."""
    torch.set_num_threads(1)
    from mppo.parallel import device

    device.prepare_megatron()
    from mppo.parallel.groups import GroupRegistry

    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    return GroupRegistry()


def grow_memory(rank: int, world: int, folder: Path, length: int) -> None:
    """Peak bytes added by a long sequence's update, written to ``memory_<world>_<rank>``."""
    registry = start(rank, world, folder / f"store_{world}")
    return_freed_memory()
    role = make_role(folder / "dense", registry, 1, cp=world)
    make_update(role, make_batch([256]))()
    before = peak_bytes()
    from mppo.batch.mini_batch import MiniBatch
    from mppo.models.streamed_role import forward_backward

    batch = make_batch([length])
    plan = role.plan(batch, training=True)

    def objective(outputs, indices):
        loss = -outputs.logprobs_T.mean()
        return loss, {"loss": loss.detach()}

    objective.statistics = ("loss",)
    forward_backward(role, MiniBatch(batch, plan, objective))
    (folder / f"memory_{world}_{rank}").write_text(str(peak_bytes() - before))
    dist.destroy_process_group()


def measure_speed(folder: Path, repeat: int, sequences: int, longest: int) -> dict[str, object]:
    """Seconds and rates of every update."""
    registry = start(0, 1, folder / "store")
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(longest // 8, longest, (sequences,), generator=generator).tolist()
    batch, micro_batch = make_batch(lengths), 8
    recorded = make_role(folder / "sparse", registry, micro_batch, "R2")
    replayed = make_update(recorded, batch)
    works = {
        "moe": make_update(make_role(folder / "sparse", registry, micro_batch), batch),
        "moe_replayed": replayed,
        "moe_replayed_from_engine": make_update(
            make_role(folder / "sparse", registry, micro_batch, "R3"), as_chosen(recorded, batch)
        ),
        "dense": make_update(make_role(folder / "dense", registry, micro_batch), batch),
        "transformers_eager": make_hf_update(folder / "sparse", batch, micro_batch, False),
        "transformers_eager_by_length": make_hf_update(folder / "sparse", batch, micro_batch, True),
    }
    times = alternate(works, repeat)
    dist.destroy_process_group()
    seconds, tokens = {name: spent.processor for name, spent in times.items()}, sum(lengths)
    return {
        "model": {**TRUNK, "experts": EXPERTS, "chosen": CHOSEN, "expert_width": WIDTH},
        "tokens": tokens,
        "seconds": {
            name: {"wall_s": spent.wall, "processor_s": spent.processor}
            for name, spent in times.items()
        },
        "tokens_per_processor_second": {k: round(tokens / v) for k, v in seconds.items()},
        "times_transformers": seconds["transformers_eager"] / seconds["moe"],
        "times_transformers_by_length": seconds["transformers_eager_by_length"] / seconds["moe"],
        "share_of_dense_speed": seconds["dense"] / seconds["moe"],
        "replay_cost": seconds["moe_replayed"] / seconds["moe"] - 1,
        "replay_cost_from_engine": seconds["moe_replayed_from_engine"] / seconds["moe"] - 1,
    }


def measure_memory(folder: Path, length: int, depths: list[int]) -> dict[str, object]:
    """Peak growth by one long sequence, on one rank and on two, for each depth."""
    found = {}
    for layers in depths:
        here = folder / str(layers)
        save_models(here, layers)
        for world in (1, 2):
            mp.spawn(grow_memory, (world, here, length), nprocs=world)
        alone = int((here / "memory_1_0").read_text())
        split = max(int((here / f"memory_2_{rank}").read_text()) for rank in (0, 1))
        found[f"{layers} layers"] = {
            "peak_growth_mib": {"cp1": round(alone / 2**20), "cp2": round(split / 2**20)},
            "cp2_share_of_cp1": split / alone,
        }
    return {"long_sequence": length, **found}


def main() -> None:
    """Run one part and show its result."""
    arguments = parser(__doc__, repeat=3)
    arguments.add_argument("part", choices=("speed", "memory"))
    arguments.add_argument("--sequences", type=int, default=16, help="in the timed batch")
    arguments.add_argument("--longest", type=int, default=512, help="tokens; the shortest an 8th")
    arguments.add_argument("--long", type=int, default=16384, help="tokens of the long sequence")
    arguments.add_argument("--layers", type=int, nargs="+", default=[4, 12], help="for memory")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.part == "speed":
            save_models(folder)
            measured = measure_speed(folder, options.repeat, options.sequences, options.longest)
        else:
            measured = measure_memory(folder, options.long, options.layers)
    record(measured, options.out)


if __name__ == "__main__":
    main()
