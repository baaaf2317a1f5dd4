"""Model classes for SGLang servers, where SGLang's own compute another model than the actor.

SGLang takes the classes of the package that ``SGLANG_EXTERNAL_MODEL_PACKAGE`` names in place of its
own of the same name. They are imported here, because SGLang goes on with its own class when the
import of a module fails, and stops when that of the package does.
"""

from mppo.rollout.sglang_models import gemma, latent

__all__ = ["gemma", "latent"]
