"""Model classes for SGLang servers, for families whose SGLang class differs from the actor, or that
SGLang lacks. Those of the package in ``SGLANG_EXTERNAL_MODEL_PACKAGE`` replace SGLang's of the same
name.

Its modules are imported here: if the import of a module fails, SGLang silently uses its own class,
but it stops if the import of the package fails.
"""

from mppo.rollout.sglang_models import gemma, gpt_neox, latent

__all__ = ["gemma", "gpt_neox", "latent"]
