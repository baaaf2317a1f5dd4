"""Names that SGLang's configs import from torchvision; text models never call them."""

from torchvision import io, transforms

__version__ = "0.0.0"
__all__ = ["io", "transforms"]
