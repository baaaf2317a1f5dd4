"""PPO-ptx: a language-model loss on pretraining text beside the policy loss.

``L = L_ppo + ptx_coef * mean_t(-log pi(x_t))``, DeepSpeed-Chat's ``unsup_coef`` (27.8) and
OpenRLHF's ``ptx_coef`` (0.05). Both add its gradient before the same optimizer step.

Source: InstructGPT, https://arxiv.org/abs/2203.02155, equation 2.
"""

from __future__ import annotations

from torch import Tensor

from mppo.algos.masked import masked_sum


def ptx_loss(logprobs_T: Tensor, mask_T: Tensor, num_tokens: float, coef: float) -> Tensor:
    """``-coef sum(m log pi) / num_tokens``, 0 without tokens: adds up over any division of the text
    batch, whose masked tokens (all but a document's first) over all ranks are ``num_tokens``."""
    return -coef * masked_sum(logprobs_T, mask_T) / max(num_tokens, 1.0)
