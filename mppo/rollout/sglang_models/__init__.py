"""Model classes for SGLang servers, for families whose SGLang class differs from the actor, or
that SGLang lacks.

The classes of the package in ``SGLANG_EXTERNAL_MODEL_PACKAGE`` replace SGLang's classes of the same
name. The package imports its modules here: if the import of a module fails, SGLang would silently
use its own class, but it stops if the import of the package fails.
"""

from mppo.rollout.sglang_models import gemma, gpt_neox, latent

__all__ = ["gemma", "gpt_neox", "latent"]
