"""Record one forward pass operation by operation and follow the scales through it.

The pass runs on the example in eval mode under a dispatch mode, so that modules, functional code, methods, weights used
twice and reshaping all arrive as the same few tensor operations with real shapes. What a recording cannot see is
Python code that branches on numbers; reading a number out of an activation is therefore refused. Masks and token numbers
among the inputs are no activations: a branch on them is followed as the example takes it.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from spiritlevel.errors import TracingError
from spiritlevel.network.modes import Mode
from spiritlevel.symmetry import scales as sc
from spiritlevel.symmetry.scales import Leaf, Scale
from spiritlevel.symmetry.variables import FIXED, Variables, squeezed


class FixAll(Enum):
    """A rule's answer that fixes every scale the operation touches."""

    token = 0


FIX_ALL = FixAll.token
Result = Scale | None | tuple[Scale | None, ...] | FixAll
Rule = Callable[["Recorder", "Call"], Result]
RULES: dict[str, Rule] = {}
"""The rule of each operation, by its name without the trailing underscore of in-place forms."""

READS_A_NUMBER = {"_local_scalar_dense", "equal", "is_nonzero"}
LEAVES_TORCH = ("tolist", "numpy", "__array__")
_REMEDY = "the symmetries of a network that branches on its data differ from input to input: remove the branch"
REARRANGES: set[str] = set()
"""Operations that hand elements on without reading them."""


def rule(*names: str, rearranges: bool = False) -> Callable[[Rule], Rule]:
    """Register a function as the rule of the named operations; those that only rearrange elements read none of them."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        if rearranges:
            REARRANGES.update(names)
        return function

    return register


@dataclass(frozen=True, eq=False)
class Call:
    """One recorded operation: its name, its arguments by name and what it returned."""

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    def __getitem__(self, argument: str) -> Any:
        for position, spec in enumerate(self.func._schema.arguments):
            if spec.name == argument:
                given = self.kwargs.get(argument, spec.default_value)
                return self.args[position] if position < len(self.args) else given
        raise KeyError(argument)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations and keeps the scale of every tensor that depends on the input or on a parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.variables = Variables()
        self.barriers: Counter[str] = Counter()
        self.leaves: dict[int, Leaf] = {id(p): Leaf(name, p) for name, p in model.named_parameters()}
        self.statistics: dict[int, Leaf] = {id(b): Leaf(name, b) for name, b in model.named_buffers()}
        self._constants: set[int] = set()
        self._scales: dict[int, Scale] = {}
        self._alive: dict[int, list[Tensor]] = {}
        self._masks: set[int] = set()
        self._derived: set[int] = set()  # tensors made of one parameter alone, of which nothing was read so far
        self._read = torch.zeros(
            2, dtype=torch.bool
        )  # for every variable, whether something was done with what it scales

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here, and guarding against it would load the compiler (seconds) on first use."""
        return False

    def scale_of(self, tensor: Tensor) -> Scale:
        """The scale of a tensor; a parameter met for the first time gets one variable per element."""
        if id(tensor) in self._scales:
            return self._scales[id(tensor)]
        leaf = self.leaves.get(id(tensor))
        if leaf is not None:
            return self.elementwise(leaf)
        self._constants.add(id(tensor))
        return sc.fixed(tensor.shape, False) if tensor.requires_grad else sc.of_constant(tensor)

    def elementwise(self, leaf: Leaf) -> Scale:
        """The scale of a parameter; if it has none yet, one variable per element."""
        if leaf.terms is None:
            number = leaf.value.numel()
            if number > sc.MOST_ELEMENTS:
                leaf.terms = sc.fixed(leaf.value.shape).terms
            else:
                leaf.terms = ((sc.ONE, self.variables.fresh(number, leaf.name).view(leaf.value.shape)),)
        return Scale(leaf.terms, False, leaf)

    def matrix(self, tensor: Tensor, out_dim: int, in_dim: int, groups: int = 1) -> Scale:
        """The scale of a tensor used as a linear map; a parameter met for the first time gets v_out[o] − v_in[i].

        With groups, rows of different groups read different inputs, so the variables of the dimension that holds one
        group's channels are separate for each group: dimension 0 of the tensor always holds all groups.
        """
        leaf = self.leaves.get(id(tensor))
        if leaf is None or leaf.terms is not None or id(tensor) in self._scales:
            return self.scale_of(tensor)
        ids = {}
        for dim in (out_dim, in_dim):
            shape = [n if d == dim else 1 for d, n in enumerate(tensor.shape)]
            copies = groups if dim == 1 else 1
            label = leaf.name if dim == out_dim else ""
            made = self.variables.fresh(copies * tensor.shape[dim], label).view([copies, *shape[1:]] if dim else shape)
            ids[dim] = (made.repeat_interleave(tensor.shape[0] // copies, 0) if copies > 1 else made).expand(
                tensor.shape
            )
        leaf.terms, leaf.gauge_open = ((sc.ONE, ids[out_dim]), (Fraction(-1), ids[in_dim])), True
        return Scale(leaf.terms, False, leaf)

    def statistic(self, tensor: Tensor) -> Scale | None:
        """The scale of a buffer that may be rescaled with the parameters, as running means are."""
        leaf = self.statistics.get(id(tensor))
        return None if leaf is None else self.elementwise(leaf)

    def is_followed(self, tensor: Tensor) -> bool:
        """Whether the tensor depends on the input or on a parameter."""
        return id(tensor) in self._scales or id(tensor) in self.leaves

    def depends_on_input(self, tensor: Tensor) -> bool:
        """Whether the tensor depends on the input."""
        return id(tensor) in self._scales and self._scales[id(tensor)].from_input

    def is_mask(self, tensor: Tensor) -> bool:
        """Whether the tensor is made of whole numbers or truth values among the inputs alone, such as a mask of padding."""
        return id(tensor) in self._masks

    def take_as_input(self, tensor: Tensor) -> None:
        """Follow a tensor that the model is called with."""
        self.set(tensor, sc.fixed(tensor.shape))
        if not (tensor.is_floating_point() or tensor.is_complex()):
            self._masks.add(id(tensor))

    def _follow_masks(self, inputs: list[Tensor], out: Any) -> None:
        followed = [t for t in inputs if self.is_followed(t)]
        if followed and all(map(self.is_mask, followed)):
            self._masks.update(id(t) for t in tensors_in(out) if not (t.is_floating_point() or t.is_complex()))

    def set(self, tensor: Tensor, scale: Scale) -> None:
        """Give a tensor its scale."""
        assert scale.shape == tensor.shape, f"scale of shape {scale.shape} for a tensor of shape {tensor.shape}"
        self._scales[id(tensor)] = scale
        self._keep(tensor)

    def fix(self, tensor: Tensor) -> None:
        """Fix every variable in the scale of a tensor."""
        if self.is_followed(tensor):
            for _, ids in self.scale_of(tensor).terms:
                self.variables.fix(ids)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        inputs = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self._refuse_numbers(name, func, inputs)
        written = [t for t in _written(func, args, kwargs) if id(t) not in self._scales]
        for tensor in written:
            self._refuse_parameter_writes(tensor, name)
            for alias in (tensor, *self._alive.get(_memory(tensor), [])):  # as they are before their memory changes
                if id(alias) not in self._scales:
                    self.set(alias, self.scale_of(alias))
        out = func(*args, **kwargs)
        self._follow_masks(inputs, out)
        followed = any(self.is_followed(t) for t in inputs)
        random = torch.Tag.nondeterministic_seeded in func.tags
        if followed or random or func._schema.is_mutable:
            self._follow(Call(name, func, args, kwargs, out), inputs)
        for tensor in tensors_in(out):
            self._keep(tensor)
        return out

    def _follow(self, call: Call, inputs: list[Tensor]) -> None:
        """Set the scales of an operation's results by its rule, or fix all it touches."""
        mutable = call.func._schema.is_mutable
        outputs, result = list(tensors_in(call.out)), self._by_rule(call)
        results = result if isinstance(result, tuple) else (result,)
        if isinstance(result, FixAll) or not _fit(results, outputs):
            self._fix_all(call, inputs)
            return
        if self._hands_on(call, inputs, results):
            self._derived.update(map(id, outputs))
        elif call.name not in REARRANGES:
            self._note_read(inputs)
        for tensor, scale in zip(outputs, results, strict=True):
            if isinstance(scale, Scale) and mutable:
                self._write(tensor, scale)
            elif isinstance(scale, Scale):
                self.set(tensor, scale)

    def _of_parameter(self, tensor: Tensor) -> tuple[sc.Term, ...]:
        """The scale of a parameter, of a part of one, or of what was made of one alone; nothing for other tensors."""
        known = self._scales.get(id(tensor))
        if known is None:
            leaf = self.leaves.get(id(tensor))
            return () if leaf is None else leaf.terms or ()
        return known.terms if known.leaf is not None or id(tensor) in self._derived else ()

    def _hands_on(self, call: Call, inputs: list[Tensor], results: Sequence[Scale | FixAll | None]) -> bool:
        """Whether an operation does nothing to a parameter but copy it, multiply it by a number or rearrange what that gave: which of
        its parts are read is not decided yet."""
        followed = [tensor for tensor in inputs if self.is_followed(tensor)]
        if len(followed) != 1 or not (terms := self._of_parameter(followed[0])):
            return False
        if call.name in REARRANGES:
            return id(followed[0]) in self._derived
        return all(isinstance(each, Scale) and _same_terms(each.terms, terms) for each in results)

    def _note_read(self, tensors: list[Tensor]) -> None:
        """Remember which variables of parameters an operation has read: of a slice only its own."""
        for tensor in tensors:
            for _, ids in self._of_parameter(tensor):
                self._read = _grown(self._read, self.variables.count)
                self._read[squeezed(ids)] = True

    def _by_rule(self, call: Call) -> Result:
        """What the operation's rule says; a form of the operation that the rule does not know is fixed."""
        chosen = RULES.get(call.name) or RULES.get(call.name.removesuffix("_"))
        try:
            return chosen(self, call) if chosen is not None else FIX_ALL
        except (KeyError, IndexError, RuntimeError, TypeError):
            return FIX_ALL

    def _fix_all(self, call: Call, inputs: list[Tensor]) -> None:
        followed = [t for t in inputs if self.is_followed(t)]
        from_input = any(self.depends_on_input(t) for t in followed)
        if followed:
            self.barriers[call.name] += 1
        for tensor in followed:
            self.fix(tensor)
        self._note_read(followed)
        for tensor in tensors_in(call.out):
            self.set(tensor, sc.fixed(tensor.shape, from_input))
        for tensor in _written(call.func, call.args, call.kwargs):
            self._write(tensor, sc.fixed(tensor.shape, from_input))

    def _write(self, tensor: Tensor, scale: Scale) -> None:
        """Store the scale of a tensor changed in place, also for every view of the same memory."""
        aliases = [t for t in self._alive.get(_memory(tensor), []) if t is not tensor]
        if aliases:
            flat = torch.full((tensor.untyped_storage().nbytes() // tensor.element_size(),), 0)
            for alias in aliases:
                _window(flat, alias).copy_(sc.merged(self.variables, self.scale_of(alias)))
            _window(flat, tensor).copy_(sc.merged(self.variables, scale))
            for alias in aliases:
                from_input = scale.from_input or self.depends_on_input(alias)
                self.set(alias, sc.of(_window(flat, alias).clone(), from_input))
        self.set(tensor, scale)

    def _keep(self, tensor: Tensor) -> None:
        """Hold on to a tensor, so that its identity and its memory stay its own until the end of the pass."""
        family = self._alive.setdefault(_memory(tensor), [])
        if not any(t is tensor for t in family):
            family.append(tensor)

    def _refuse_numbers(self, name: str, func: Any, inputs: list[Tensor]) -> None:
        shapes = torch.Tag.dynamic_output_shape in func.tags and not _indexes_by_position(name, inputs)
        if name not in READS_A_NUMBER and not shapes:
            return
        if any(self.depends_on_input(t) and not self.is_mask(t) for t in inputs):
            what = "a result whose shape depends on the data" if shapes else "a number read out of an activation"
            raise TracingError(f"{what} ({name}) was met{_place()}; {_REMEDY}")
        for tensor in inputs:
            self.fix(tensor)

    def _refuse_parameter_writes(self, tensor: Tensor, name: str) -> None:
        owners = [leaf.name for leaf in self.leaves.values() if _memory(leaf.value) == _memory(tensor)]
        if owners:
            raise TracingError(
                f"the model changes its parameter {owners[0]} in place ({name}){_place()}; "
                "its function must not change its parameters: compute a new tensor instead"
            )

    def finish(self) -> None:
        """Fix what the pass left open: free gauges, what other inputs may read of parameters, and buffers that served as running means
        and as constants."""
        for leaf in self.leaves.values():
            self._tie_unread(leaf)
            if leaf.met_zeros_only:  # other inputs bring something else, of which nothing is known
                for _, ids in leaf.terms or ():
                    self.variables.fix(ids)
            if leaf.gauge_open and leaf.terms is not None:
                self.variables.fix(leaf.terms[1][1].flatten()[:1])
        for key, leaf in self.statistics.items():
            if leaf.terms is not None and key in self._constants:
                for _, ids in leaf.terms:
                    self.variables.fix(ids)

    def _tie_unread(self, leaf: Leaf) -> None:
        """What the example left unread of a parameter that it read in part, such as later positions, is used as the rest is: where whole
        rows, columns, … are unread, all of them have one factor."""
        for _, ids in leaf.terms or ():
            short = squeezed(ids)
            read = _grown(self._read, self.variables.count)[short] | (short <= FIXED)
            if bool(read.all()) or not bool(read.any()):
                continue
            axes = [
                d for d in range(read.dim()) if not bool(read.movedim(d, 0).reshape(read.shape[d], -1).any(1).all())
            ]
            sc.tied_along(self.variables, ids, axes or range(read.dim()))


def _same_terms(a: tuple[sc.Term, ...], b: tuple[sc.Term, ...]) -> bool:
    return len(a) == len(b) and all(c == d and torch.equal(i, j) for (c, i), (d, j) in zip(a, b, strict=True))


def _grown(flags: Tensor, count: int) -> Tensor:
    return flags if len(flags) >= count else torch.cat([flags, flags.new_zeros(count - len(flags))])


class NumberGuard(Mode):
    """Refuses the ways out of torch that no dispatch mode sees: `tolist`, `numpy` and numpy's own conversion."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        left = args[0] if name in LEAVES_TORCH and args and isinstance(args[0], Tensor) else None
        if left is not None and self.recorder.is_followed(left) and not self.recorder.is_mask(left):
            raise TracingError(f"a number read out of an activation (Tensor.{name}) was met{_place()}; {_REMEDY}")
        return func(*args, **(kwargs or {}))


def record(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder | None = None
) -> Recorder:
    """Run the model once on its arguments and return the recording; inputs and outputs are fixed."""
    recorder = recorder or Recorder(model)
    for tensor in tensors_in((args, kwargs)):
        recorder.take_as_input(tensor)
    with NumberGuard(recorder), recorder:
        out = model(*args, **kwargs)
    outputs = list(tensors_in(out))
    if not outputs:
        raise TracingError(
            f"the model returned {type(out).__name__}, which holds no tensor; return a tensor, or a tuple, dict or "
            "dataclass of tensors"
        )
    for tensor in outputs:
        recorder.fix(tensor)
    recorder.finish()
    return recorder


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple | set):
        for value in tree:
            yield from tensors_in(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for entry in fields(tree):
            yield from tensors_in(getattr(tree, entry.name))


def _fit(results: Sequence[Scale | FixAll | None], outputs: list[Tensor]) -> bool:
    """Whether a rule answered for every output with a scale of its shape (or None for a constant)."""
    if len(results) != len(outputs):
        return False
    return all(not isinstance(s, Scale) or s.shape == t.shape for s, t in zip(results, outputs, strict=True))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments an operation changes in place."""
    if func._schema.is_mutable:
        for position, spec in enumerate(func._schema.arguments):
            if spec.alias_info is not None and spec.alias_info.is_write:
                yield from tensors_in(args[position] if position < len(args) else kwargs.get(spec.name))


def _indexes_by_position(name: str, inputs: list[Tensor]) -> bool:
    return name in ("index", "index_put", "index_put_") and all(t.dtype != torch.bool for t in inputs[1:])


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _window(flat: Tensor, tensor: Tensor) -> Tensor:
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _place() -> str:
    """Where in the user's code the pass is now."""
    ours, theirs = Path(__file__).parent, Path(torch.__file__).parent
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if ours not in path.parents and theirs not in path.parents and frame.line:
            return f' at "{frame.line.strip()}" ({path.name}, line {frame.lineno})'
    return ""
