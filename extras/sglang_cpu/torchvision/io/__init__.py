"""Image and video reading, absent."""

from torchvision.absent import attributes_of

__getattr__ = attributes_of(__name__)
