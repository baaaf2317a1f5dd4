"""Thousands of random episodes through the endpoint on a real server that is killed meanwhile.

    python benchmarks/episode_soak.py [--episodes 10000] [--kills 6] [--minutes 60] [--out FILE]

Agents with unmodified clients of OpenAI treat their histories at random: they continue, branch,
rewrite and shorten them, ask for several answers, repeat requests, close connections, and ask at
the same time. Batches take the oldest complete prompts of an over-sampled supply with
``max_staleness`` 2, the weights change after each batch, and SGLang is killed with SIGKILL at
random moments. No batch begins after ``--minutes``. Exit code 0 if in every episode that a batch
takes

- its sequences consist of what the engine sampled after exactly these tokens, with the same ids,
  log-probabilities and version, each once, and every answer that its agent has read is in them;
- no token is older than two updates;
- log-probabilities are within 1e-5 of a transformers model with the weights of their version;

and if every episode is taken once.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import openai
import psutil
import torch
from record import parser, record
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from open_endpoint import turns_of
from policy_generator import Sampled
from random_agent import RandomAgent, identity

from mppo.agents.endpoint.tree import Leaf
from mppo.agents.episode_engine import EpisodeEngine
from mppo.agents.episode_program import failed
from mppo.batch.episode import NO_WEIGHTS, Episode, EpisodeResult
from mppo.batch.prompt import Prompt
from mppo.hub.builtin import load_tokenizer, resolve_model
from mppo.recipe.sections.agent import AgentConfig
from mppo.recipe.sections.rollout import RolloutConfig, SamplingConfig
from mppo.rollout.engine import EngineAround, GenerationRequest, WeightSource
from mppo.rollout.local.local_engine import LocalEngine
from mppo.rollout.sglang.sglang_engine import SGLangEngine
from mppo.weights.bucket import WeightBucket

STALENESS, OVER, SAMPLES = 2, 1.25, 2
TOKENS, TOLERANCE = 480, 1e-5
SAMPLING = SamplingConfig(n=SAMPLES, stop_token_ids=tuple(range(7, 260, 4)))
"""About every fourth token ends a turn of the untrained model."""
_SAMPLES_IN_STREAM = 1 << 20
"""The random stream of a turn is its sample's number, modulo this."""


class Recorded(EngineAround):
    """An engine that remembers which tokens it gave to which session.

    Attributes:
        sampled: by session.
        sessions: of each episode, in the order in which they first asked.
    """

    def __init__(self, engine) -> None:
        super().__init__(engine)
        self.sampled: dict[str, list[Sampled]] = defaultdict(list)
        self.sessions: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)

    def turns(self):
        """See ``RolloutEngine.turns``."""
        turns = self._engine.turns()
        generate = turns.generate

        def recorded(requests, sampling, seed):
            found = generate(requests, sampling, seed)
            for asked, turn in zip(requests, found, strict=True):
                uid, stream = asked.stream
                self.sessions[uid, stream % _SAMPLES_IN_STREAM][asked.session] = None
                if len(turn.ids):
                    given = tuple(asked.token_ids.tolist())
                    self.sampled[asked.session].append(Sampled(given, turn, asked.session))
            return found

        turns.generate = recorded
        return turns


class RandomAgents:
    """A ``Program``: every episode is the life of a random agent, in this process.

    Attributes:
        lives: the agents by session.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._http = seed, httpx.AsyncClient(timeout=None)
        self.lives: dict[str, RandomAgent] = {}

    async def start(self) -> None:
        """See ``Program.start``."""

    async def run(self, session, prompt) -> EpisodeResult:
        """See ``Program.run``."""
        where = {"base_url": session.base_url, "api_key": session.key}
        client = openai.AsyncOpenAI(**where, http_client=self._http, timeout=None)
        chance = random.Random(f"{self._seed}/{session.key}")
        agent = RandomAgent(client, self._http, *where.values(), chance, stops=(None,))
        self.lives[session.base_url.split("/")[-2]] = agent
        try:
            await agent.live()
            if not agent.read:  # it has left before every answer
                await agent.ask([{"role": "user", "content": "a"}], [], {})
        except (openai.APIError, AssertionError) as error:
            return failed(f"{type(error).__name__}: {error}")
        return EpisodeResult(1.0)

    async def stop(self) -> None:
        """See ``Program.stop``."""
        await self._http.aclose()


@dataclass
class Tally:
    """What was checked."""

    episodes: Counter[tuple[int, int]] = field(default_factory=Counter)
    did: Counter[str] = field(default_factory=Counter)
    sequences: int = 0
    turns: int = 0
    tokens: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    several_versions: int = 0
    logprob_difference: float = 0.0
    kills: int = 0


class Weights:
    """A small model whose weights change, and what it was with each version."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._versions: dict[int, dict[str, torch.Tensor]] = {}
        self.version = 0

    def change(self) -> WeightSource:
        """The weights of the next version."""
        self.version += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.002)
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self._versions[self.version] = state
        self._versions.pop(self.version - STALENESS - 1, None)

        def stream() -> Iterator[WeightBucket]:
            yield WeightBucket.pack(list(state.items()))

        return WeightSource(stream)

    @torch.inference_mode()
    def difference(self, leaves: Sequence[Leaf]) -> float:
        """Largest difference to the log-probabilities of leaves, each token by its version."""
        largest = 0.0
        for version, state in self._versions.items():
            wanted = [leaf for leaf in leaves if any(v == version for v, _ in leaf.parts)]
            wanted.sort(key=lambda leaf: len(leaf.context_ids) + len(leaf.ids))
            self.model.load_state_dict(state)
            for at in range(0, len(wanted), 32):
                largest = max(largest, self._difference(wanted[at : at + 32], version))
        self.model.load_state_dict(self._versions[self.version])
        return largest

    def _difference(self, leaves: Sequence[Leaf], version: int) -> float:
        rows = [torch.cat([leaf.context_ids, leaf.ids]).long() for leaf in leaves]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = self.model(padded).logits.float()
        largest = 0.0
        for leaf, row, found in zip(leaves, rows, logits, strict=True):
            start = len(leaf.context_ids)
            mine = found[start - 1 : len(row) - 1].log_softmax(-1)
            mine = mine.gather(-1, row[start:, None])[:, 0]
            versions = torch.cat([torch.full((count,), v) for v, count in leaf.parts])
            apart = (mine - leaf.logprobs)[versions == version].abs()
            largest = max(largest, float(apart.max()))
        return largest


def leaves_of(episode: Episode) -> list[Leaf]:
    """The sequences of an episode."""
    return [
        Leaf(each.prompt.token_ids, each.here.ids, each.here.logprobs, each.parts, "")
        for each in episode.sequences
    ]


def whole_turns(pieces: Sequence[Sampled]) -> list[Sampled]:
    """Turns, each of the pieces between two interruptions; the pieces are in their order."""
    found: list[Sampled] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and last.turn.finish_reason == "abort":
            assert piece.given == (*last.given, *last.turn.ids.tolist()), "an interrupted turn"
            ids, logprobs = (
                torch.cat([getattr(last.turn, name), getattr(piece.turn, name)])
                for name in ("ids", "logprobs")
            )
            turn = replace(piece.turn, ids=ids, logprobs=logprobs)
            found[-1] = Sampled(last.given, turn, last.session)
        else:
            found.append(piece)
    return found


def check(episode: Episode, agent: RandomAgent, sampled: Sequence[Sampled], tally: Tally) -> None:
    """One episode is exactly what was sampled for its session."""
    assert episode.result is not None
    assert episode.result.error is None, episode.result.error
    leaves = leaves_of(episode)
    found = whole_turns(turns_of(leaves, sampled))
    missing = Counter(map(identity, agent.read)) - Counter(map(identity, found))
    assert not missing, "an agent read an answer that no sequence contains"
    assert len(found) - len(agent.read) <= agent.left, "more turns than the agent asked for"
    tally.did.update(agent.did)
    tally.sequences += len(leaves)
    tally.turns += len(found)


def check_batch(
    batch: Sequence[Episode], agents: RandomAgents, engine: Recorded, weights: Weights, tally: Tally
) -> None:
    """What must hold of a batch."""
    leaves: list[Leaf] = []
    for place, episode in enumerate(batch):
        key = episode.prompt.uid, place % SAMPLES
        session = list(engine.sessions.pop(key))[-1]
        check(episode, agents.lives.pop(session), engine.sampled.pop(session), tally)
        tally.episodes[key] += 1
        leaves += leaves_of(episode)
        versions = set()
        for leaf in leaves_of(episode):
            for version, count in leaf.parts:
                if version != NO_WEIGHTS:
                    tally.tokens += count
                    tally.ages[weights.version - version] += count
                    versions.add(version)
        tally.several_versions += len(versions) > 1
    assert max(tally.ages) <= STALENESS, tally.ages
    apart = weights.difference(leaves)
    assert apart <= TOLERANCE, f"log-probabilities differ by {apart}"
    tally.logprob_difference = max(tally.logprob_difference, apart)


class Killer(threading.Thread):
    """Kills the server with SIGKILL after some seconds, or at the latest when ``end`` is called."""

    def __init__(self, inner: SGLangEngine, after_s: float) -> None:
        super().__init__()
        (self._server,) = psutil.Process(inner.fleet.processes[0].pid).children()
        self._after_s, self._now, self._has_killed = after_s, threading.Event(), False
        self.start()

    def run(self) -> None:
        """See ``Thread.run``."""
        self._now.wait(self._after_s)
        self._server.kill()
        self._has_killed = True

    def end(self) -> None:
        """Return when the server has been killed."""
        self._now.set()
        self.join()
        assert self._has_killed, "the server had ended before"


def soak(inner, weights: Weights, tokenizer, options, chance: random.Random) -> Tally:
    """Take batches until every episode was taken."""
    tally, agents, engine = Tally(), RandomAgents(options.seed), Recorded(inner)
    config = AgentConfig(run="random", max_turns=100, max_concurrent=options.concurrent)
    episodes = EpisodeEngine(engine, agents, tokenizer, config, TOKENS, goes_on=True)
    ask = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], return_dict=False)
    pending = [
        Prompt(uid, tuple(ask), "random", "", "a") for uid in range(options.episodes // SAMPLES)
    ]
    batch = max(1, min(options.batch, options.episodes) // SAMPLES)
    steps = math.ceil(len(pending) / batch)
    kills = chance.sample(range(1, steps), min(options.kills, steps - 1))
    episodes.update_weights(weights.change(), weights.version)
    typical_s, started = 2.0, time.monotonic()
    try:
        for step in range(steps):
            began = time.monotonic()
            if began > started + 60 * options.minutes:
                break
            request = GenerationRequest(
                pending[: (1 + STALENESS) * batch], SAMPLING, TOKENS, options.seed + step,
                num_prompts_needed=min(batch, len(pending)), among=math.ceil(OVER * batch),
                oldest_version=weights.version - STALENESS,
            )  # fmt: skip
            generation = episodes.submit(request)
            killer = Killer(inner, chance.uniform(0, typical_s / 2)) if step in kills else None
            found = generation.collect()
            if killer is None:
                typical_s = time.monotonic() - began
            else:
                killer.end()
                tally.kills += 1
            check_batch(found, agents, engine, weights, tally)
            gone = {episode.prompt.uid for episode in found}
            pending = [prompt for prompt in pending if prompt.uid not in gone]
            episodes.update_weights(weights.change(), weights.version)
            seconds = time.monotonic() - started
            done = f"{len(tally.episodes)} episodes in {seconds:.0f} s"
            print(f"step {step}: {done}", file=sys.stderr, flush=True)
    finally:
        episodes.stop()
    taken = set(range(options.episodes // SAMPLES)) - {prompt.uid for prompt in pending}
    expected = {(uid, i): 1 for uid in taken for i in range(SAMPLES)}
    assert tally.episodes == expected, "an episode is lost or doubled"
    return tally


def main() -> None:
    """Soak, print and record."""
    options = parser(__doc__)
    options.add_argument("--episodes", type=int, default=10000)
    options.add_argument("--batch", type=int, default=200, help="episodes of a batch")
    options.add_argument("--kills", type=int, default=6, help="of the server")
    options.add_argument("--concurrent", type=int, default=64, help="episodes at the same time")
    options.add_argument("--minutes", type=float, default=60.0, help="then no batch begins")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--engine", choices=("sglang", "local"), default="sglang")
    chosen = options.parse_args()
    if chosen.engine == "local":
        chosen.kills = 0
    began, folder = time.monotonic(), resolve_model("builtin:tiny")
    weights = Weights(folder)
    with tempfile.TemporaryDirectory() as run_dir:
        where = folder, weights.model.config, torch.float32
        if chosen.engine == "local":
            inner = LocalEngine(*where)
        else:
            rollout = RolloutConfig(
                name="sglang", start_timeout_s=900.0, request_timeout_s=300.0,
                server_args={"max_total_tokens": 65536}, batch_size=chosen.concurrent,
            )  # fmt: skip
            inner = SGLangEngine(*where, rollout, run_dir=Path(run_dir))
        tally = soak(inner, weights, load_tokenizer(folder), chosen, random.Random(chosen.seed))
    result = {
        "minutes": round((time.monotonic() - began) / 60, 1),
        "episodes": len(tally.episodes),
        "sequences": tally.sequences,
        "turns": tally.turns,
        "tokens_of_the_policy": tally.tokens,
        "tokens_by_age_in_updates": {str(k): v for k, v in sorted(tally.ages.items())},
        "episodes_of_several_versions": tally.several_versions,
        "agents_did": dict(sorted(tally.did.items())),
        "servers_killed": tally.kills,
        "largest_logprob_difference": tally.logprob_difference,
    }
    record(result, chosen.out)


if __name__ == "__main__":
    main()
