"""Reading of pickles without running the functions that they name.

A ``torch_dist`` checkpoint stores its ``.metadata`` as a pickle, and a pickle is a program: it
names functions, calls them, and sets attributes of the results. This reader turns each call into a
record of the name, the arguments and the state, so it never creates, calls or changes a foreign
class. The caller must check the records.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

TYPES: dict[str, tuple[str, ...]] = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.planner": (
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    ),
    "torch.distributed._shard.sharded_tensor.metadata": ("MEM_FORMAT_ENCODING", "TensorProperties"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "builtins": ("getattr",),  # members of enums, from Python 3.11.0 to 3.11.3
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
    # Megatron-Core's own subclasses, gone since 0.16
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
}  # fmt: skip
"""The names that ``.metadata`` may contain, by module."""

OUTSIDE = "an object outside the pickle"
"""Name of the record of such an object: in ``torch.save``'s archives, a tensor's data."""


class Name:
    """A class or function that a pickle names; ``name`` is without its module."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Record:
    """A call that a pickle contains of a class or function, without its module."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None
        """The state that the pickle sets on the result."""


def read_pickle(data: bytes, types: Mapping[str, Collection[str]] = TYPES) -> Any:
    """Read a pickle: plain values, ``torch.dtype``, and records of everything else.

    Raises:
        pickle.UnpicklingError: the pickle contains a name that is not in ``types``, uses an
            operation that neither ``.metadata`` nor a tensor needs, or is cut short.
    """
    try:
        return _Reader(data, types).load()
    except pickle.UnpicklingError:
        raise
    except EOFError as error:
        raise pickle.UnpicklingError("it is cut short") from error
    except Exception as error:  # operations raise many types for wrong operands
        raise pickle.UnpicklingError(f"it is damaged ({type(error).__name__}: {error})") from error


class _Reader(pickle._Unpickler):  # pyright: ignore[reportAttributeAccessIssue] (private, not in the stub)
    """Python's unpickler in Python (the one in C cannot be changed). The operations that call or
    change an object are replaced, and those that ``.metadata`` does not use are removed."""

    dispatch: dict[int, Any] = {}  # noqa: RUF012 (the base class's own attribute)
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, types: Mapping[str, Collection[str]]) -> None:
        super().__init__(io.BytesIO(data))
        self._types = types

    def find_class(self, module: str, name: str) -> Any:
        if name in self._types.get(module, ()):
            return Name(name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Record:
        return Record(OUTSIDE, (pid,))

    def _call(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if type(called) is not Name or type(arguments) is not tuple:
            raise pickle.UnpicklingError(f"it calls a {type(called).__name__}")
        if called.name == "Size":
            (sizes,) = arguments
            self.append(sizes)
        elif called.name == "OrderedDict":
            self.append({})
        else:
            self.append(Record(called.name, arguments))

    def _set_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not Record or target.state is not None:
            raise pickle.UnpicklingError(f"it sets attributes of a {type(target).__name__}")
        target.state = state

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self.pop_mark())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            # hashing a deeply nested key overflows the stack and ends the process
            if type(target) is not dict or type(key) not in (str, int, Record):
                raise pickle.UnpicklingError(f"its {type(target).__name__} has no plain keys")
            target[key] = value

    def _append(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def _appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise pickle.UnpicklingError(f"it extends a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(values)


_PLAIN = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2,
    pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8,
    pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.BINBYTES, pickle.SHORT_BINBYTES,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE,
    pickle.BINGET, pickle.LONG_BINGET, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID,
)  # fmt: skip
_Reader.dispatch = {op[0]: pickle._Unpickler.dispatch[op[0]] for op in _PLAIN} | {  # type: ignore[attr-defined]
    pickle.REDUCE[0]: _Reader._call,
    pickle.NEWOBJ[0]: _Reader._call,
    pickle.BUILD[0]: _Reader._set_state,
    pickle.SETITEM[0]: _Reader._set_item,
    pickle.SETITEMS[0]: _Reader._set_items,
    pickle.APPEND[0]: _Reader._append,
    pickle.APPENDS[0]: _Reader._appends,
}
