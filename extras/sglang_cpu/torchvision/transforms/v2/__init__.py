"""Transforms, second version, absent."""

from torchvision.absent import attributes_of

__getattr__ = attributes_of(__name__)

from torchvision.transforms.v2 import functional  # noqa: F401
