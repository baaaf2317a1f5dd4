"""The local rollout engine: a transformers model on every rank, which generates for a part of the
prompts. It is the default engine; other engines are compared with it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mppo.batch.episode import Episode, EpisodesBySample, EpisodeTokens
from mppo.batch.prompt import Prompt
from mppo.cpu.bfloat16 import multiplies_bfloat16
from mppo.models.families.architectures import family_config
from mppo.models.transformers_model import empty_model
from mppo.parallel.collectives import wait_for_ranks
from mppo.parallel.partition import partition
from mppo.recipe.sections.rollout import SamplingConfig
from mppo.rollout.engine import GenerationRequest
from mppo.rollout.local.decoding import DecodedRows, decode
from mppo.rollout.local.parameters import ParameterSink
from mppo.rollout.local.sampling import row_keys
from mppo.rollout.response_gather import gather_episodes, gather_logprobs, left_over
from mppo.rollout.turns import Turn, TurnRequest, deal_prompts
from mppo.safety.input_error import InputError
from mppo.safety.input_files import read_json
from mppo.supervision import stop_request
from mppo.supervision.stop_request import StepInterrupted
from mppo.weights.bucket import NamedTensors
from mppo.weights.hf.config_file import GENERATION

_LOGPROB_TOKENS = 4096


@dataclass
class LocalGeneration:
    """See ``rollout.engine.Generation``; complete when it is made, so nothing is in flight."""

    request: GenerationRequest
    responses: list[Episode]
    seconds: float
    left_over: EpisodesBySample = field(default_factory=dict)

    def wait(self) -> None:
        self.left_over = left_over(self.request, dict(enumerate(self.responses)))

    def collect(self) -> list[Episode]:
        needed = self.request.num_prompts_needed
        needed = len(self.request.prompts) if needed is None else needed
        everything = dict(enumerate(self.responses))
        self.left_over = left_over(self.request, everything, taken=range(needed))
        return self.responses[: needed * self.request.sampling.n]


class LocalTurns:
    """A ``TurnEngine`` that continues up to ``batch_size`` texts in one batch; ``stops``: tokens
    that end a turn, int64."""

    calls = 1

    def __init__(
        self, model: Any, version: int, stops: Tensor, world: int, batch_size: int
    ) -> None:
        self._model, self._version, self._stops = model, version, stops
        self._world, self.at_once = world, batch_size

    def homes(self, prompts: Sequence[Prompt], n: int) -> dict[int, int]:
        return deal_prompts(prompts, n, range(self._world))

    def generate(
        self, requests: Sequence[TurnRequest], sampling: SamplingConfig, seed: int
    ) -> list[Turn]:
        device = self._stops.device
        uids, samples = torch.tensor([each.stream for each in requests], device=device).unbind(1)
        extra = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        rows = decode(
            self._model,
            [each.token_ids for each in requests],
            list(range(len(requests))),
            row_keys(seed, uids, samples),
            sampling,
            torch.tensor([each.max_tokens for each in requests], device=device),
            torch.cat([self._stops, extra]),
        )
        return [Turn(*response, self._version) for response in rows.responses()]

    def abort(self) -> None:
        """Do nothing: a batch runs to its end."""


def stop_tokens(hf_folder: str | Path, hf_config: PretrainedConfig) -> tuple[int, ...]:
    """Tokens that end a response: ``eos_token_id`` of config.json and generation_config.json."""
    found: set[int] = set()
    sources = [getattr(hf_config, "eos_token_id", None)]
    generation = Path(hf_folder) / GENERATION
    if generation.is_file():
        sources.append(read_json(generation).get("eos_token_id"))
    for source in sources:
        if source is not None:
            found.update([source] if isinstance(source, int) else source)
    return tuple(sorted(found))


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to compute in: float32 instead of bfloat16 on CPUs without bfloat16 units, where it
    is many times faster. Weights are rounded to ``dtype`` either way."""
    slow = device.type == "cpu" and dtype == torch.bfloat16 and not multiplies_bfloat16()
    return torch.float32 if slow else dtype


class LocalEngine:
    """A transformers model on every rank; implements ``RolloutEngine``.

    The model is built without weights from its configuration; the first ``update_weights`` fills
    it. Only generation_config.json is read from ``hf_folder``. Weights are rounded to ``dtype``;
    ``batch_size`` is the most rows generated at once on a rank.
    """

    def __init__(
        self,
        hf_folder: str | Path,
        hf_config: PretrainedConfig,
        dtype: torch.dtype,
        *,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        batch_size: int = 256,
    ) -> None:
        self._device = torch.device(device)
        self._rank, self._world = rank, world
        self._batch_size, self._dtype = batch_size, dtype
        self.stop_tokens = stop_tokens(hf_folder, hf_config)
        family, computed = family_config(hf_config), compute_dtype(dtype, self._device)
        # torch's attention kernels have no soft-cap
        attention = "sdpa" if family.attn_logit_softcap is None else "eager"
        self._model = empty_model(hf_config, computed, self._device, attention)
        self._sink = ParameterSink(self._model, dtype)
        self._version: int | None = None

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    def generate(self, request: GenerationRequest) -> list[Episode]:
        return self.submit(request).collect()

    def _answers(self, request: GenerationRequest) -> list[Episode]:
        prompts, n = request.prompts, request.sampling.n
        version = self._loaded_version()
        if not all(len(prompt.token_ids) for prompt in prompts):
            raise InputError("an empty prompt cannot be continued: add at least a BOS token")
        dealt = partition([len(p.token_ids) for p in prompts], self._world, equal_count=True)
        resumed = request.resumed()
        # a response that another engine aborted is generated again from its start
        ready = {key: each for key, each in resumed.items() if not each.is_unfinished}
        mine = [index * n + sample for index in dealt[self._rank] for sample in range(n)]
        todo = [place for place in mine if place not in ready]
        todo.sort(key=lambda place: (len(prompts[place // n].token_ids), place))
        stops = torch.tensor(
            sorted({*self.stop_tokens, *request.sampling.stop_token_ids}),
            dtype=torch.int64,
            device=self._device,
        )
        received: dict[int, Episode] = {}
        with suppress(StepInterrupted):  # raised again below, on all ranks at the same point
            for start in range(0, len(todo), self._batch_size):
                chunk = todo[start : start + self._batch_size]
                decoded = self._generate_rows(request, chunk, stops).responses()
                new = {
                    place: Episode.sampled(
                        request.sample_at(place)[0], EpisodeTokens(ids, logprobs), reason, version
                    )
                    for place, (ids, logprobs, reason) in zip(chunk, decoded, strict=True)
                }
                received |= new
                if request.on_response is not None and start + self._batch_size < len(todo):
                    request.on_response(list(new), list(new.values()))
        wait_for_ranks(self._world)
        if self._world > 1:
            stop_request.sync()
        else:
            stop_request.raise_if_due()
        found = ready | gather_episodes(received, request, self._world)
        return [found[place] for place in range(len(prompts) * n)]

    def submit(self, request: GenerationRequest) -> LocalGeneration:
        """See ``RolloutEngine.submit``; generates in this thread before it returns."""
        start = time.perf_counter()
        return LocalGeneration(request, self._answers(request), time.perf_counter() - start)

    def turns(self) -> LocalTurns:
        version = self._loaded_version()
        stops = torch.tensor(self.stop_tokens, dtype=torch.int64, device=self._device)
        return LocalTurns(self._model, version, stops, self._world, self._batch_size)

    def _generate_rows(
        self, request: GenerationRequest, places: Sequence[int], stops: Tensor
    ) -> DecodedRows:
        """Responses by their indices in the result; the samples of a prompt share its prefill."""
        indices, samples = zip(*(divmod(place, request.sampling.n) for place in places))
        row_of = {index: row for row, index in enumerate(dict.fromkeys(indices))}
        uids = torch.tensor([request.prompts[i].uid for i in indices], device=self._device)
        return decode(
            self._model,
            [request.prompts[index].token_ids for index in row_of],
            [row_of[index] for index in indices],
            row_keys(request.seed, uids, torch.tensor(samples, device=self._device)),
            request.sampling,
            torch.full((len(places),), request.max_tokens, device=self._device),
            stops,
        )

    def _loaded_version(self) -> int:
        if self._version is None:
            raise RuntimeError("the local rollout engine has no weights: call update_weights first")
        self._move(self._device)  # it may have slept
        return self._version

    def update_weights(self, buckets: Iterable[NamedTensors], version: int) -> None:
        """See ``RolloutEngine.update_weights``. InputError if the stream does not fit the model;
        the engine has no weights afterwards."""
        self._version = None
        self._move(self._device)
        self._sink.fill(buckets)
        self._version = version

    @torch.inference_mode()
    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token but the first, at temperature 1; collective."""
        self._loaded_version()
        lengths = [len(s) for s in sequences]
        dealt = [
            sorted(d, key=lambda i: lengths[i])
            for d in partition(lengths, self._world, equal_count=True)
        ]
        parts = [torch.empty(0, device=self._device)]
        mine = dealt[self._rank]
        while mine:
            count = max(1, _LOGPROB_TOKENS // max(1, lengths[mine[-1]]))
            chunk, mine = mine[:count], mine[count:]
            parts += self._chunk_logprobs([sequences[i] for i in chunk])
        return gather_logprobs(torch.cat(parts), dealt, lengths)

    def _chunk_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probabilities of each sequence's tokens but the first, padded on the right."""
        width = max(len(s) for s in sequences)
        if width < 2:
            return []
        padded = torch.zeros(len(sequences), width, dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            padded[row, : len(sequence)] = torch.tensor(sequence)
        padded = padded.to(self._device)
        positions = torch.arange(width, device=self._device)[None]
        logits = self._model(input_ids=padded, position_ids=positions, use_cache=False).logits
        logprobs = logits[:, :-1].float().log_softmax(-1)
        chosen = logprobs.gather(-1, padded[:, 1:, None])[..., 0]
        return [chosen[row, : len(s) - 1] for row, s in enumerate(sequences) if len(s) > 1]

    def sync_metrics(self) -> dict[str, float]:
        return {}

    def sleep(self) -> None:
        """Move the weights from the GPU to host memory; on a CPU, do nothing."""
        self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        if next(self._model.parameters()).device.type == device.type:
            return
        cast("nn.Module", self._model).to(device)  # transformers annotates its override wrongly
        self._sink = ParameterSink(self._model, self._dtype)

    def stop(self) -> None:
        """Do nothing: the engine has no processes of its own."""
