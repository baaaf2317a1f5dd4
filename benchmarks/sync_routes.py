"""Times of the routes of a weight update, and the bytes that ranks must exchange.

    python benchmarks/sync_routes.py [--repeat 10] [--layers 8] [--out FILE]

Routes: one real SGLang server loads the same stream of a 0.5 GB dense model (float32) through
shared memory, by broadcast, and from a folder, alternating; the smallest of the repetitions counts.
The seconds are those of a complete update, including the server's loading.

Bytes, planned for the models of the recipes at full size in bfloat16: the bytes that the rollout
ranks hold, the bytes that must come from a rank on another host, and the bytes exchanged if every
training rank gathers the complete model.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import transformers
from record import alternate, parser, record

from mppo.parallel.layout import Layout
from mppo.recipe.model_shape import model_shape
from mppo.recipe.sections.rollout import RolloutConfig
from mppo.rollout.engine import WeightSource
from mppo.rollout.sglang.fleet import API_KEY_VARIABLE
from mppo.rollout.sglang.sglang_engine import SGLangEngine
from mppo.weights.bucket import WeightBucket
from mppo.weights.slices.reshard import ReshardPlanner
from mppo.weights.table import parameter_table

CONFIGS = Path(__file__).resolve().parents[1] / "recipes/configs"
MODEL = {
    "vocab_size": 16000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
ROUTES = ("tensor", "distributed", "disk")
CASES = {
    "Qwen2-7B-Instruct": (Layout(8, tp=2, pp=2), 2),
    "Qwen2.5-32B-Instruct": (Layout(32, tp=8, pp=2), 8),
    "Moonlight-16B-A3B-Instruct": (Layout(32, tp=8, pp=2, ep=8), 8),
}
"""Training layout and tensor parallelism of the engines; every rank has a rollout rank."""


def measure_routes(repeat: int, layers: int) -> dict[str, object]:
    """Seconds and rates of each route."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**MODEL, num_hidden_layers=layers)
    model = transformers.Qwen2ForCausalLM(config).eval()
    tensors = list(model.state_dict().items())
    starts = range(0, len(tensors), 16)
    source = WeightSource(lambda: (WeightBucket.pack(tensors[i : i + 16]) for i in starts))
    nbytes = sum(tensor.nbytes for _, tensor in tensors)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")

        def connect(**options: object) -> SGLangEngine:
            rollout = RolloutConfig(name="sglang", start_timeout_s=900.0, **options)
            return SGLangEngine(folder / "model", config, torch.float32, rollout, run_dir=folder)

        owner = connect(server_args={"max_total_tokens": 4096})
        try:
            owner.update_weights(source, 1)  # waits until the server is up
            os.environ[API_KEY_VARIABLE] = owner.fleet.key
            urls = tuple(api.url for api in owner.fleet.apis.values())
            engines = {route: connect(urls=urls, sync=route) for route in ROUTES}
            works = {
                route: lambda engine=engine: engine.update_weights(source, 1)
                for route, engine in engines.items()
            }
            times = alternate(works, repeat)
            for engine in engines.values():
                engine.stop()
        finally:
            owner.stop()
    return {
        "gigabytes": nbytes / 1e9,
        "seconds": {route: time.wall for route, time in times.items()},
        "processor_seconds_of_the_sender": {r: time.processor for r, time in times.items()},
        "gigabytes_per_s": {route: nbytes / time.wall / 1e9 for route, time in times.items()},
    }


def plan_bytes(name: str, layout: Layout, rollout_tp: int) -> dict[str, object]:
    """Gigabytes held, crossing and gathered, in bfloat16."""
    shape = model_shape(transformers.AutoConfig.from_pretrained(CONFIGS / name))
    table = parameter_table(shape)
    layers = range(shape.num_layers)
    owner = {index: index * layout.pp // shape.num_layers for index in layers}
    owner |= {row.name: 0 if row.where == "embedding" else layout.pp - 1 for row in table.rows}
    ranks = range(layout.world)
    engines = [ranks[i : i + rollout_tp] for i in ranks[::rollout_tp]]
    held = crossing = gathered = 0
    planner = ReshardPlanner(shape, layout, owner, engines)
    for plan in map(planner.plan, table.entries()):
        held, crossing = held + plan.total, crossing + plan.crossing
        gathered += plan.gathered
    return {
        "training": f"{layout.world} ranks, TP{layout.tp} PP{layout.pp} EP{layout.ep}",
        "rollout": f"{len(engines)} engines of TP{rollout_tp}",
        "held_gb": held * 2 / 1e9,
        "crossing_gb": crossing * 2 / 1e9,
        "gathered_gb": gathered * 2 / 1e9,
    }


def main() -> None:
    arguments = parser(__doc__, repeat=10)
    arguments.add_argument("--layers", type=int, default=8)
    given = arguments.parse_args()
    planned = {name: plan_bytes(name, *case) for name, case in CASES.items()}
    record({"routes": measure_routes(given.repeat, given.layers), "bytes": planned}, given.out)


if __name__ == "__main__":
    main()
