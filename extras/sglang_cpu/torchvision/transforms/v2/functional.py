"""Functional transforms, absent."""

from torchvision.absent import attributes_of
from torchvision.transforms import InterpolationMode  # noqa: F401

__getattr__ = attributes_of(__name__)
