"""What the bytecode of a function tells: which questions it asks without calling anything, and what it does inside of ``try``."""

from __future__ import annotations

import dis
import types
import weakref
from collections.abc import Iterator

__all__ = ["questions_of", "tries_of"]

_read: weakref.WeakKeyDictionary[types.CodeType, frozenset[str]] = weakref.WeakKeyDictionary()
TENSOR_TYPES = {f"{kind}Tensor" for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")}


def questions_of(code: types.CodeType) -> frozenset[str]:
    """"type" where a type that was asked for is compared or looked up, "identity" for ``is`` between two values ("identity of Kind.SUM"
    where one of them is an attribute of a global), "dtype" and "device" for names such as FloatTensor.

    >>> sorted(questions_of(compile("type(x) is int or y is z", "", "eval")))
    ['identity', 'type']
    >>> questions_of(compile("x.device.type in ('cpu', 'mps')", "", "eval"))
    frozenset()
    >>> questions_of(compile("x is None or f(type(x).__name__) or type(x).forward is g", "", "eval"))
    frozenset()
    >>> questions_of(compile("type(x.shape) is torch.Size", "", "eval"))
    frozenset({'type'})
    >>> questions_of(compile("kind is Kind.SUM", "", "eval"))
    frozenset({'identity of Kind.SUM'})
    >>> questions_of(compile("f'{type(x[0]).__name__} of {n}'", "", "eval"))
    frozenset()
    >>> questions_of((lambda self, x: x.base is self).__code__), questions_of((lambda self, x: x is self.base).__code__)
    (frozenset(), frozenset({'identity'}))
    >>> questions_of(compile("x[0] is x[1]", "", "eval"))
    frozenset({'identity'})
    """
    if code not in _read:
        _read[code] = frozenset(_questions(code))
    return _read[code]


def _questions(code: types.CodeType) -> Iterator[str]:
    names = {*code.co_names}
    if names & TENSOR_TYPES:
        yield from ("dtype", "device")
    if not names & {"type", "__class__"} and dis.opmap["IS_OP"] not in code.co_code[::2]:
        return
    steps = [i for i in dis.get_instructions(code) if i.opname not in SILENT]
    asked = attribute = -NEAR                        # where type(...) or .__class__ was read last, and an attribute of that
    for index, step in enumerate(steps):
        if step.opname in NAMES and step.argval == "type":
            asked = _called(steps, index)
        elif step.opname.startswith("LOAD") and step.argval == "__class__":
            asked = index
        elif asked >= 0 and step.opname in ("LOAD_ATTR", "LOAD_METHOD") and not str(step.argval).startswith("__") and index == asked + 1:
            asked, attribute = -NEAR, index          # type(self).forward is what the class has, and no question for the class
        if step.opname in ("IS_OP", "COMPARE_OP", "CONTAINS_OP", "BINARY_SUBSCR") and 0 <= index - asked < NEAR:
            yield "type"
            asked = -NEAR
        elif step.opname == "IS_OP" and index - attribute >= NEAR and not _of_no_tensor(steps[max(index - 2, 0):index]):
            path = _global_path(steps[:index])
            yield f"identity of {path}" if path else "identity"


def _global_path(before: list[dis.Instruction]) -> str:
    """What the last steps load, where that is an attribute of a global, such as Kind.SUM; else nothing."""
    path: list[str] = []
    for step in reversed(before):
        path.append(str(step.argval))
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and len(path) > 1:
            return ".".join(reversed(path))
        if step.opname != "LOAD_ATTR":
            break
    return ""


def _of_no_tensor(before: list[dis.Instruction]) -> bool:
    """Is None, a truth value or ``self`` one of the two things that are compared, as the two steps before say?"""
    operands: list[tuple[str, object]] = []                # from the last one back, as long as a step is a load of one
    for step in reversed(before):
        if not step.opname.startswith(PLAIN):
            break
        both = step.opname.count("FAST") > 1               # since Python 3.13 one step loads two
        operands += [(step.opname, name) for name in reversed(step.argval)] if both else [(step.opname, step.argval)]
    constants = (None, True, False, ...)
    return any(name == "self" if op.startswith(("LOAD_FAST", "LOAD_DEREF")) else op == "LOAD_CONST" and any(name is c for c in constants)
               for op, name in operands[:2])


def _called(steps: list[dis.Instruction], start: int) -> int:
    """Where the function that step ``start`` loads has been called."""
    depth = 0
    for index in range(start, len(steps)):
        step = steps[index]
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
        if index > start and step.opname.startswith("CALL") and depth <= 1:
            return index
    return start


NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")          # device.type is an attribute, and no question for a class
SILENT = ("CACHE", "NOP", "EXTENDED_ARG", "RESUME")
PLAIN = ("LOAD_CONST", "LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")
NEAR = 7                   # instructions between the question for a type and what is done with it


# ---- blocks whose exceptions are caught ----

_tries: weakref.WeakKeyDictionary[types.CodeType, tuple[tuple[int, int], ...]] = weakref.WeakKeyDictionary()


def tries_of(code: types.CodeType) -> tuple[tuple[int, int], ...]:
    """(start, end) in the bytecode of what stands under a ``try`` with an ``except``; before Python 3.11, of all code that has one.

    >>> len(tries_of(compile("try: f()\\nexcept ValueError: pass", "", "exec")))
    1
    >>> tries_of(compile("with f(): g()\\ntry: h()\\nfinally: i()", "", "exec"))
    ()
    """
    if code not in _tries:
        _tries[code] = tuple(_caught(code))
    return _tries[code]


def _caught(code: types.CodeType) -> Iterator[tuple[int, int]]:
    names = [(i.offset, i.opname) for i in dis.get_instructions(code) if i.opname not in SILENT]
    entries = getattr(dis.Bytecode(code), "exception_entries", None)
    if entries is None:
        if any(name == "JUMP_IF_NOT_EXC_MATCH" for _, name in names):
            yield 0, len(code.co_code)
        return
    for entry in entries:
        handler = [name for offset, name in names if offset >= entry.target][:LONGEST]
        if handler[:1] == ["PUSH_EXC_INFO"] and (handler[1:2] == ["POP_TOP"] or "CHECK_EXC_MATCH" in handler[:_first(handler, "RERAISE")]):
            yield entry.start, entry.end


def _first(names: list[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


LONGEST = 16               # instructions until an ``except`` compares
