"""Results of operations on simulated tensors, remembered by the form of their arguments.

torch's fake tensors compute the form of a result (shape, strides, dtype, device) from that of the
arguments, and check these, in some 150 microseconds. The same few hundred operations repeat in
every layer and micro-batch. A repeated one takes its result's form from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten

_NUMBERS = (int, float, bool)
_WORDS = frozenset((type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format))
_SELECTING = (torch.bool, torch.uint8)
"""Dtypes of masks: the shape that a mask selects depends on its values."""


class _NoKey(Exception):
    """An argument whose form does not determine the result's."""


class _Form(NamedTuple):
    """How to make one result.

    Args:
        same: the result is this tensor argument itself; None: a new tensor.
        view_of: the result is a view of this tensor argument's storage; None: a new storage.
        shape, stride, dtype, device: of a new tensor.
        offset: of a view from the argument's own, in elements.
    """

    same: int | None
    view_of: int | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: Any = None


class ResultCache:
    """Executes operations on simulated tensors.

    Args:
        mode: torch's mode for fake tensors, which executes an operation for the first time.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[tuple, tuple[type, list[_Form]] | None] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Execute an operation; its arguments are checked when their forms appear first."""
        try:
            key = _key(func, args, kwargs)
            found = self._known.get(key, _ABSENT)
        except _NoKey:
            key, found = None, None
        if found is not None and found is not _ABSENT:
            return self._repeated(found, args, kwargs)
        with self._mode:
            out = func(*args, **kwargs)
        if key is not None and found is _ABSENT:
            self._known[key] = self._forms(func, key, args, kwargs, out)
        return out

    def empty(self, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make a simulated tensor with a storage of its own."""
        return self._wrapped(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)

    def _wrapped(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """Make a fake tensor as ``FakeTensor.__new__`` does, in a third of the time."""
        attributes = self._attributes.get(device)
        if attributes is None:
            found = FakeTensor(self._mode, meta, device)
            self._attributes[device] = dict(vars(found))
            return found
        made: Any = Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(attributes)
        return made

    def _repeated(
        self, found: tuple[type, list[_Form]], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        kind, forms = found
        tensors = list(_tensors(args, kwargs)) if kind is not FakeTensor or _uses(forms) else []
        out = [self._made(form, tensors) for form in forms]
        return out[0] if kind is FakeTensor else kind(out)  # pyright: ignore[reportArgumentType]  a list or tuple

    def _made(self, form: _Form, tensors: list[Tensor]) -> Tensor:
        if form.same is not None:
            return tensors[form.same]
        if form.view_of is None:
            return self.empty(form.shape, form.stride, form.dtype, form.device)
        meta = torch.empty(0, dtype=form.dtype, device="meta")
        viewed = tensors[form.view_of]
        begin, storage = viewed.storage_offset() + form.offset, viewed.untyped_storage()
        nbytes = storage.nbytes()
        meta.set_(storage, begin, form.shape, form.stride)
        if storage.nbytes() != nbytes:
            storage.resize_(nbytes)  # a view of freed memory does not bring it back
        return self._wrapped(meta, form.device)

    def _forms(
        self, func: Any, key: tuple, args: tuple, kwargs: dict[str, Any], out: Any
    ) -> tuple[type, list[_Form]] | None:
        """Describe a result; None: it cannot be repeated from the forms of the arguments."""
        outputs = [out] if isinstance(out, Tensor) else out
        if not isinstance(outputs, list | tuple) or type(outputs) not in (list, tuple):
            return None
        if func._schema.is_mutable and _key(func, args, kwargs) != key:
            return None  # the operation changed the shape of an argument
        tensors, forms = list(_tensors(args, kwargs)), []
        places = {x.untyped_storage()._cdata: i for i, x in reversed(list(enumerate(tensors)))}
        seen = set()
        for x in outputs:
            if not isinstance(x, FakeTensor):
                return None
            same = next((i for i, y in enumerate(tensors) if y is x), None)
            if same is not None:
                forms.append(_Form(same))
                continue
            storage = x.untyped_storage()
            shared = places.get(storage._cdata)
            plain = self.empty(x.shape, x.stride(), x.dtype, x.fake_device)
            if shared is None and (
                storage.nbytes() != plain.untyped_storage().nbytes()
                or x.storage_offset()
                or storage._cdata in seen
            ):
                return None
            seen.add(storage._cdata)
            offset = 0
            if shared is not None:
                if tensors[shared].dtype.itemsize != x.dtype.itemsize:
                    return None  # a view of other elements: its offset is not the argument's
                offset = int(x.storage_offset() - tensors[shared].storage_offset())
            shape, stride = tuple(x.shape), x.stride()
            forms.append(_Form(None, shared, shape, stride, offset, x.dtype, x.fake_device))
        kind: type = FakeTensor if isinstance(out, Tensor) else type(out)
        return kind, forms


_ABSENT: Any = object()


def _uses(forms: list[_Form]) -> bool:
    return any(form.same is not None or form.view_of is not None for form in forms)


def _tensors(args: tuple, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments, also those in lists, in order."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from (y for y in tree_flatten(x)[0] if isinstance(y, Tensor))


def _key(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """What determines the form of an operation's result."""
    key = func, torch.get_default_dtype(), *map(_form, args), *map(_form, kwargs.items())
    if "as_strided" in func.__name__:  # its offset is from the beginning of the storage
        return *key, args[0].storage_offset()
    return key


def _form(x: Any) -> Any:
    """A hashable description of an argument that determines the form of a result."""
    kind = type(x)
    if kind is FakeTensor:
        if x.dtype.is_complex:
            raise _NoKey  # it may be a lazy conjugate
        return x.dtype, x.shape, x.stride(), x.fake_device
    if kind in _NUMBERS:
        return kind, x
    if kind in _WORDS:
        return x
    if kind is list or kind is tuple:
        return tuple(map(_form, x))
    if kind is Tensor and x.dtype not in _SELECTING and not x.dtype.is_complex:
        return x.dtype, x.shape, x.stride(), "host"
    raise _NoKey
