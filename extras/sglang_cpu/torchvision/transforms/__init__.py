"""Image transforms: only the enum that SGLang reads at import."""

import enum

from torchvision.absent import attributes_of


class InterpolationMode(enum.Enum):
    """Torchvision's interpolation names."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__getattr__ = attributes_of(__name__)

from torchvision.transforms import functional, v2  # noqa: E402, F401
