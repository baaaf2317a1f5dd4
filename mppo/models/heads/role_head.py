"""A role's head: hidden states of a micro-batch to log-probabilities or values."""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from mppo.algos.value_loss import bin_edges, expected_value
from mppo.batch.batch import Sequences
from mppo.batch.head_outputs import HeadOutputs, ValueOutputs, unstack_outputs
from mppo.batch.mini_batch import PassInputs
from mppo.models.heads.vocabulary import (
    Projection,
    VocabShard,
    chunked_full_kl,
    chunked_logprobs,
    chunked_squares,
    gather_hidden,
    gather_values,
)
from mppo.models.microbatch import MicroBatch
from mppo.models.role_weights import RoleWeights
from mppo.models.stage import Stage
from mppo.parallel import device
from mppo.parallel.groups import LayoutGroups
from mppo.recipe.sections.role_config import RoleConfig
from mppo.safety.input_error import InputError
from mppo.weights.blocks import padded_vocab_size


class RoleHead:
    """Maps hidden states of a micro-batch to outputs; used on the last pipeline stage only."""

    def __init__(
        self, chunk: Stage, role: RoleConfig, groups: LayoutGroups, vocab_size: int
    ) -> None:
        self._chunk, self._role, self._groups = chunk, role, groups
        self._sequence_parallel = chunk.config.sequence_parallel
        self._vocab_size = vocab_size
        self._reference: Projection | None = None

    def __call__(
        self, hidden: Tensor, microbatch: MicroBatch, batch: Sequences, inputs: PassInputs
    ) -> HeadOutputs:
        """Compute outputs ``[T]`` on the micro-batch's token axis, 0 for unpredicted tokens, from
        the last chunk's output ``[t, 1, hidden]``."""
        if self._role.head == "value":
            raw = gather_values(self._chunk.value_head(hidden[:, 0]), self._sequence_parallel)
            return self._value_outputs(self._select(raw, microbatch), microbatch)
        outputs_N = self._policy_outputs(hidden, microbatch, batch, inputs)
        rows_kT = torch.stack([microbatch.scatter(x_N) for x_N in outputs_N])
        return unstack_outputs("policy", self._complete(rows_kT, microbatch))

    def predicting_states(self, hidden: Tensor, microbatch: MicroBatch) -> Tensor:
        """Hidden states that predict a response token ``[N, hidden]``."""
        return self._select(gather_hidden(hidden, self._sequence_parallel), microbatch)

    def load_reference(self, reference: RoleHead, weights: RoleWeights, bucket_bytes: int) -> None:
        """Keep this rank's rows of a frozen policy's projection, for the KL over the vocabulary;
        its layout may differ, a different vocabulary raises InputError. Collective."""
        if reference._vocab_size != self._vocab_size:
            raise InputError(
                f"ref.path: the reference's vocabulary has {reference._vocab_size} tokens, the "
                f"actor's {self._vocab_size}; KL type full compares them token by token: choose "
                "k3, or another reference"
            )
        tp = self._groups.layout.tp
        rows = padded_vocab_size(self._vocab_size, tp) // tp
        start = self._groups.coordinates.tp * rows
        projection = weights.projection_name
        for bucket in weights.stream(bucket_bytes):
            for name, tensor in bucket:
                if self._groups.is_last_stage and name == projection:
                    own = torch.zeros(rows, tensor.shape[1], dtype=tensor.dtype)
                    mine = tensor[start : start + rows]
                    own[: len(mine)] = mine
                    shard = self._vocab_shard(rows, reference._chunk.final_logit_softcap)
                    self._reference = Projection(own.to(device.device()), shard)

    def _policy_outputs(
        self, hidden: Tensor, microbatch: MicroBatch, batch: Sequences, inputs: PassInputs
    ) -> list[Tensor]:
        weight, is_text = self._chunk.output_weight(), inputs.is_text(microbatch.indices)
        shard = self._vocab_shard(len(weight), self._chunk.final_logit_softcap)
        if is_text:
            shard = replace(shard, temperature=1.0)
        chosen = self.predicting_states(hidden, microbatch)
        outputs_N = list(chunked_logprobs(chosen, weight, microbatch.target_N, shard))
        if inputs.ref_hidden_T is not None and is_text:
            outputs_N.append(torch.zeros_like(outputs_N[0]))
        elif inputs.ref_hidden_T is not None:
            assert self._reference is not None, "load_reference has been called"
            (ref_states,) = device.copied([inputs.ref_hidden_T[microbatch.predicted_in(batch)]])
            outputs_N.append(chunked_full_kl(chosen, weight, ref_states, shard, self._reference))
        if inputs.with_squares:
            zeros = [torch.zeros_like(outputs_N[0])] if len(outputs_N) == 2 else []
            outputs_N += [*zeros, chunked_squares(chosen, weight, shard)]
        return outputs_N

    def _vocab_shard(self, rows: int, softcap: float | None) -> VocabShard:
        tp = self._groups.layout.tp
        return VocabShard(
            start=self._groups.coordinates.tp * rows,
            size=self._vocab_size,
            group=self._groups.tp if tp > 1 else None,
            temperature=self._role.temperature,
            softcap=softcap,
            chunk=self._role.batching.head_chunk_tokens,
        )

    def _select(self, rows_t: Tensor, microbatch: MicroBatch) -> Tensor:
        """Select the rows that predict a response token: ``[t, ...]`` to ``[N, ...]``."""
        if self._chunk.selects_early:
            return rows_t
        keep = microbatch.packing.logits_to_keep
        assert keep is not None, "microbatch.cut sets it"
        return rows_t.index_select(0, keep)

    def _value_outputs(self, raw_NK: Tensor, microbatch: MicroBatch) -> ValueOutputs:
        histogram = self._role.histogram
        rows_Nk, has_logits = raw_NK, False
        if histogram is not None:
            edges = bin_edges(histogram.min, histogram.max, histogram.bins)
            rows_Nk = expected_value(raw_NK, edges.to(raw_NK.device))[:, None]
            has_logits = torch.is_grad_enabled()
            if has_logits:
                rows_Nk = torch.cat([rows_Nk, raw_NK], 1)
        rows_kT = self._complete(microbatch.scatter(rows_Nk).T.contiguous(), microbatch)
        return ValueOutputs(rows_kT[0], rows_kT[1:] if has_logits else None)

    def _complete(self, rows_kT: Tensor, microbatch: MicroBatch) -> Tensor:
        """Sum rows on the tokens of the micro-batch over the context-parallel ranks. Every rank of
        the group then computes the loss of all tokens; its gradient reaches only the outputs
        computed here, so gradients add up over the group."""
        if self._groups.layout.cp > 1 and microbatch.num_tokens:
            return reduce_from_tensor_model_parallel_region(rows_kT, self._groups.cp)
        return rows_kT
