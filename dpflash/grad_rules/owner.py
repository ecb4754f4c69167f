"""Rule for parameters of a module that also has layers below it, such as the class token of ViT.

The module's forward runs under vmap over samples, with a copy of its own parameters for each
sample: the handles `[B, ...]`. So every operation between a parameter and the data sees one sample
and its copy of the parameter. The layers below run outside of vmap, on the whole batch, with their
own rules. If the forward reads a parameter of a layer below, as Mamba reads the weight of its
convolution, it reads that layer's handle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import _VF, Tensor, nn
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.func import vmap
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from ..clipping.forward import ALL_ROWS, is_recomputing
from ..distributed.fsdp import is_sharded
from ..isolation.copies import copied as own_copies
from ..isolation.dropout import WithoutDropout
from ..random_state import RandomState, random_state_kept
from ..refusal import PrivateRefusal
from ..verification.attributes import OF_TORCH, OwnAttributes
from ..verification.digests import tolerance
from .base import (
    PLAIN,
    PrivateModule,
    copy_to_store_in,
    described,
    of_units,
    plain_class,
    refuse_without_tensor,
    stored,
)
from .batch_second import BatchSecond
from .embedding import PrivateEmbedding
from .functions import PerSampleFunctions
from .generic import PrivateLeaf

_functorch = torch._C._functorch

_TENSOR = object()  # marks the position of a tensor among outputs


class PrivateOwner(PrivateModule):
    """A module with parameters of its own and with layers below it.

    The forward must treat samples one by one. The batch must be the first dimension of the inputs
    and outputs, of the module and of the layers below. A tensor with another first dimension
    counts as shared by all samples, and must not need a gradient.

    Guarantees:
        An operation of this forward cannot read a row of another sample. The layers below have
        their own rules, and are tested with the first batches.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_private_call():
            return super().forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{described(self)} has parameters of its own and layers below it, which "
                "torch.compile cannot trace; leave out torch.compile"
            )
        leaves, structure = tree_flatten((args, kwargs))
        # The call runs without empty caches, which training does not read. If the same cache is
        # passed to a second call, the call is refused: the cache may lack values that the first
        # call should have stored.
        empty = {i for i, x in enumerate(leaves) if _is_empty_cache(x)}
        given, caches = leaves, {i for i in empty if self._dpflash.note_left_out(leaves[i])}
        leaves = [None if i in caches else x for i, x in enumerate(leaves)]
        batch_size = self._batch_size(leaves)
        in_dims = [self._in_dim(x, batch_size, structure, i) for i, x in enumerate(leaves)]
        device = next(x.device for x in leaves if isinstance(x, Tensor))
        # Autocast misses operations under vmap, so it is enabled only in the layers below.
        dtype = _autocast_dtype(device)
        leaves = [_widened(x, dtype) for x in leaves]
        handles = self.private_handles(batch_size)
        own = [n for n in self._dpflash.slots if handles[n] is not None]
        owned = {n: handle for n in own if (handle := handles.values(n)) is not None}
        if batch_size == 0:
            # Gradients are empty, but the gate must take part in the exchange between ranks.
            nothing = sum(handle.sum() for handle in owned.values())
            outputs = super().forward(*args, **kwargs)
            return tree_map_only(
                Tensor, lambda t: t + nothing if t.is_floating_point() else t, outputs
            )
        own_copy: Any = None
        # The flattened outputs (with `_TENSOR` for each tensor), and the tree structure.
        found: list[Any] = []

        def one(parameters: dict[str, Tensor], *inputs: Any) -> Any:
            level = _functorch.current_level()
            outside = _Outside(described(self), batch_size, level, device, dtype)
            own_copy.__dict__["_modules"] = {n: outside.of(m) for n, m in self._modules.items()}
            own_copy.__dict__["_parameters"] = {**self._parameters, **parameters}
            # Modules expect a batch dimension: under vmap, give them a batch of one sample.
            rows = [
                x if dim is None else x.unsqueeze(0)
                for x, dim in zip(inputs, in_dims, strict=True)
            ]
            own_args, own_kwargs = tree_unflatten(rows, structure)
            results, returned = tree_flatten(own_copy.forward(*own_args, **own_kwargs))
            self._refuse_objects(results, "returned")
            if batch_size > 1:
                self._refuse_returned(results, parameters)
            found[:] = [_TENSOR if isinstance(x, Tensor) else x for x in results], returned
            return tuple(outside.output(x) for x in results if isinstance(x, Tensor))

        def one_by_one(inputs: list[Any]) -> Any:
            nonlocal own_copy
            own_copy = copy_to_store_in(self)
            run = vmap(one, in_dims=(0, *in_dims), randomness="different")
            with _OwnerFunctions(self), self._named(), _autocast(device, None):
                tensors = iter(run(owned, *inputs))
            # A sample's output is [1, ...], or [n, ...] with one row for each of n windows.
            results = [next(tensors).flatten(0, 1) if x is _TENSOR else x for x in found[0]]
            return tree_unflatten(results, found[1])

        def of_batch(inputs: list[Any]) -> Any:
            # Pass copies of the caches, which are left out when samples run one by one.
            own = [copy.deepcopy(given[i]) if i in caches else x for i, x in enumerate(inputs)]
            return self._batch_forward(*tree_unflatten(own, structure))

        call = str(structure), tuple(in_dims)
        is_to_compare = batch_size > 1 and self._is_to_compare(call)
        expected = failed = None
        if is_to_compare:
            try:
                expected = self._expected(of_batch, one_by_one, leaves, device)
            except _FailedBatch as error:
                # The error may depend on a sample, and the run by samples may not have it.
                is_to_compare, failed = False, error.__cause__
        try:
            outputs = one_by_one(leaves)
        except Exception as error:
            if failed is None or isinstance(error, PrivateRefusal):
                raise
            raise failed from None
        if expected is not None and not _is_equal(outputs, expected):
            self._refuse_mixing()
        if is_to_compare:
            # Add the call only now, so that a loop that catches the error gets the error again.
            self._dpflash.compared.add(call)
        # Keep plain values, such as counters: under vmap they cannot depend on the data.
        plain = {k: v for k, v in own_copy.__dict__.items() if isinstance(v, PLAIN)}
        self.__dict__.update((k, v) for k, v in plain.items() if k not in OF_TORCH)
        return outputs

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the module in errors about operations that vmap cannot run."""
        try:
            yield
        except RuntimeError as error:
            if not any(word in str(error).lower() for word in ("vmap", "batching rule")):
                raise
            raise RuntimeError(
                f"{described(self)} has an operation that cannot run sample by sample, such "
                "as a boolean mask (x[mask]), nonzero() or item(). Move its parameters into a "
                "module of their own, or freeze them with requires_grad_(False)"
            ) from error

    def _refuse_objects(self, leaves: list[Any], verb: str) -> None:
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *PLAIN)):
                raise ValueError(
                    f"{described(self)} {verb} an object of {type(leaf).__name__}, which may keep "
                    "tensors of single samples; a module with parameters of its own and layers "
                    "below it takes and returns tensors and plain values. Training needs no "
                    "cache: pass use_cache=False in the call, model(..., use_cache=False); "
                    "model.config.use_cache does not reach decoders with a config of their own, "
                    "such as T5's"
                )

    def _refuse_returned(self, results: list[Any], parameters: dict[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            shared = parameter.ndim and len(parameter) != 1
            if shared and any(result is parameter for result in results):
                sizes = ", ".join(["len(x)", *["-1"] * parameter.ndim])
                raise RuntimeError(
                    f"{described(self)} returns its parameter '{name}' itself, which has no row "
                    f"for each sample. Return {name}.expand({sizes})"
                )

    def _batch_forward(self, args: Any, kwargs: Any) -> Any:
        """Return the outputs of the module's own forward for a whole batch.

        Raises:
            RuntimeError: the forward sets an attribute.
            _FailedBatch: the forward raised an error.
        """
        own_copy: Any = copy_to_store_in(self)
        try:
            outputs = own_copy.forward(*args, **kwargs)
        except PrivateRefusal:
            raise
        except Exception as error:
            raise _FailedBatch from error
        for name, value in stored(self, own_copy):
            if not isinstance(value, PLAIN):
                self.refuse_stored(name)
        return outputs

    def _is_to_compare(self, call: tuple[str, tuple[int | None, ...]]) -> bool:
        """Return whether to compare this call's outputs with a forward of the whole batch: in a
        test that asks for it, else if no call with such arguments was compared before.
        """
        backward = self._dpflash.backward
        if backward.forward.rows is not None:
            return backward.forward.rows.compares
        # Not for sharded layers: other ranks may not make the forward, which needs all ranks.
        shards = any(is_sharded(p) for p in self.parameters())
        is_new = call not in self._dpflash.compared
        return is_new and backward.proof.is_on and not shards and not is_recomputing()

    def _expected(
        self,
        of_batch: Callable[[list[Any]], Any],
        one_by_one: Callable[[list[Any]], Any],
        inputs: list[Any],
        device: torch.device,
    ) -> Any:
        """Return the outputs of the module's own forward for the batch; None if they are random.

        Raises:
            PrivateRefusal: outputs are random, and depend on other samples even without dropout.
            RuntimeError: the forward sets an attribute.
        """
        random_state, attributes = RandomState(device), OwnAttributes(self.named_modules())
        forward = self._dpflash.backward.forward
        rows = forward.rows
        forward.record(None)

        def run(function: Callable[[list[Any]], Any]) -> Any:
            random_state.restore()
            attributes.restore_copies()
            return function(own_copies(inputs))

        try:
            with torch.no_grad(), random_state_kept(device):
                expected = run(of_batch)
                if RandomState(device).equals(random_state):
                    return expected
                # Dropout masks depend on the order of elements in memory, so compare without them.
                with WithoutDropout():
                    if not _is_equal(run(one_by_one), run(of_batch)):
                        self._refuse_mixing()
                return None
        finally:
            forward.record(rows)
            attributes.restore()

    def _refuse_mixing(self) -> NoReturn:
        raise PrivateRefusal(
            f"{described(self)} gives a sample alone another result than in a batch, so "
            "nothing was released: its forward mixes samples, branches on the number of "
            "samples, or draws random numbers other than dropout's, such as masks of SpecAugment "
            "(config.apply_spec_augment=False). Outputs that compare the samples of a batch, for "
            "a contrastive loss, have no per-sample gradients: train with a loss of each sample "
            "by itself. If the module returns one of its parameters, expand it to the batch: "
            "parameter.expand(len(x), ...). Otherwise move its parameters into a module of their "
            "own, or freeze them with requires_grad_(False)"
        ) from None

    def _batch_size(self, leaves: list[Any]) -> int:
        """Return the batch size of the call, from its first tensor with a dimension."""
        self._refuse_objects(leaves, "got")
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        if not tensors:
            refuse_without_tensor(self)
        return len(self._dpflash.check_batch(tensors[0]))

    def _in_dim(self, leaf: Any, batch_size: int, structure: TreeSpec, index: int) -> int | None:
        """Return the vmap dimension: 0 for a batch, None for plain values and shared tensors."""
        if not isinstance(leaf, Tensor):
            return None
        is_positions = leaf.ndim == 1 and not leaf.requires_grad
        # Record whether each argument is a batch [B] or positions [T]; a call may have both. If T
        # = B, the argument counts as positions only if an earlier call had T != B and T > 1.
        places = self._dpflash.places
        place = (str(structure), index) if is_positions else None
        if leaf.ndim and len(leaf) == batch_size and places.get(place) != "positions":
            # Masks are not recorded: transformers passes none for a batch without padding. A
            # mask's effect is compared in the inputs of later layers, in losses and in gradients.
            if not _is_mask(leaf):
                self._dpflash.check_batch(leaf)
            if place is not None and batch_size > 1:
                places[place] = "batch"
            return 0
        if place is not None:
            if len(leaf) > 1 and places.setdefault(place, "positions") == "batch":
                raise PrivateRefusal(
                    f"{described(self)} got a tensor whose first dimension is not the batch, for "
                    "an argument that had one entry for each sample before; pass one entry "
                    f"for each sample, or positions as [1, T]. {ALL_ROWS}",
                    shape=tuple(leaf.shape),
                    batch_size=batch_size,
                ) from None
        elif leaf.requires_grad or (leaf.ndim and len(leaf) != 1):
            raise PrivateRefusal(
                f"{described(self)} got a tensor whose first dimension is not the batch. If all "
                "samples share the tensor and it does not depend on layers that are trained, "
                f"pass it as x[None]. Otherwise put the batch first. {ALL_ROWS}",
                shape=tuple(leaf.shape),
                batch_size=batch_size,
            ) from None
        return None


def _is_mask(x: Tensor) -> bool:
    """Return whether x has the shape of a mask, `[B, 1, T, S]`, and needs no gradient."""
    return not x.requires_grad and x.ndim == 4 and x.shape[1] == 1


def _is_empty_cache(x: Any) -> bool:
    if not type(x).__module__.startswith("transformers."):
        return False
    from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

    if isinstance(x, EncoderDecoderCache):
        return _is_empty_cache(x.self_attention_cache) and _is_empty_cache(x.cross_attention_cache)
    return isinstance(x, Cache) and all(
        isinstance(layer, CacheLayerMixin) and int(layer.get_seq_length()) == 0
        for layer in x.layers
    )


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    enabled = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else None


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    if dtype is None and not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def _widened(x: Any, dtype: torch.dtype | None) -> Any:
    """Convert a tensor in autocast's dtype to float32; return other values unchanged."""
    return x.float() if dtype is not None and isinstance(x, Tensor) and x.dtype == dtype else x


def _is_close(found: Tensor, expected: Tensor, dtypes: set[torch.dtype]) -> bool:
    """Return whether tensors differ only by rounding; a shared `expected` may be `[1, ...]`."""
    if found.shape[1:] != expected.shape[1:] or len(expected) not in (1, len(found)):
        return False
    if not found.is_floating_point():
        return bool((found == expected).all())
    apart = torch.where(found == expected, 0.0, found - expected).double().norm()
    # Other code refuses or drops rows that are not finite.
    return not bool(apart > tolerance(dtypes) * found.double().norm())


def _is_equal(outputs: Any, expected: Any) -> bool:
    """Return whether paired tensors of both outputs differ only by rounding; ignore unpaired ones.

    There may be unpaired tensors if hooks of an outer call collect outputs in each forward.
    """
    # Detach: checkpointing counts saved tensors, and the comparison must save none.
    found = [x.detach() for x in tree_flatten(outputs)[0] if isinstance(x, Tensor)]
    wanted = [x for x in tree_flatten(expected)[0] if isinstance(x, Tensor)]
    return bool(found) == bool(wanted) and all(
        _is_close(x, y, {x.dtype, _autocast_dtype(x.device) or x.dtype})
        for x, y in zip(found, wanted, strict=False)
    )


class PrivateSampleBySample(PrivateOwner):
    """A module without parameters of its own, whose layers get inputs without the batch first.

    For example, T5's first attention looks up positions `[T, T]` that all samples share, and in
    Swin's layers the first dimension is windows of samples. This class runs the module for each
    sample, so a bias that is looked up by positions needs B times the memory.
    """

    def is_private_call(self) -> bool:
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in self._hidden()):
            return False
        units = self._dpflash.backward.forward.units
        if units is not None and not units.are_rows:
            self.refuse_documents()
        return True

    def _hidden(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the layers that do not get the batch first."""
        return self.parameters()


class PrivateRelativeBias(PrivateSampleBySample):
    """Attention of T5, which may have a table of relative positions."""

    def _hidden(self) -> Iterator[nn.Parameter]:
        table = self._modules.get("relative_attention_bias")
        return iter(()) if table is None else table.parameters()


def _refuse_recurrent(owner: str, layer: nn.RNNBase) -> NoReturn:
    raise ValueError(
        f"{owner} has parameters of its own and calls a layer {plain_class(layer).__name__} "
        "itself; call the layer in a module without parameters of its own, which takes and "
        "returns batch-first tensors. It can take a state [B, layers, H] and transpose it inside"
    )


class _FailedBatch(Exception):
    """The module's own forward raised an error, the cause of this error, for a whole batch."""


class _OwnerFunctions(PerSampleFunctions):
    """`PerSampleFunctions` that also refuses to pack sequences for a recurrent layer.

    vmap would stack packed sequences, whose lengths differ.
    """

    def __init__(self, owner: PrivateOwner):
        super().__init__(owner._dpflash.name)
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _VF._pack_padded_sequence and _functorch.is_batchedtensor(args[0]):
            for layer in self._owner.modules():
                if isinstance(layer, nn.RNNBase):
                    _refuse_recurrent(described(self._owner), layer)
        return super().__torch_function__(func, types, args, kwargs)


class _Outside:
    """Runs the layers below a `PrivateOwner` outside of its vmap.

    Args:
        owner: description of the owner, for messages.
        batch_size: B.
        level: level of the owner's vmap.
        device: device of the batch.
        dtype: autocast's dtype in the layers below; None without autocast.
    """

    def __init__(
        self,
        owner: str,
        batch_size: int,
        level: int,
        device: torch.device,
        dtype: torch.dtype | None,
    ):
        self.owner = owner
        self.batch_size = batch_size
        self.level = level
        self.device = device
        self.dtype = dtype

    def of(self, module: nn.Module | None) -> nn.Module | None:
        """Return a stand-in for a layer. Its calls run the layer itself on the whole batch."""
        if module is None:
            return None
        made = object.__new__(_type_outside(plain_class(module)))
        # Recurrent layers' __setattr__ reads other attributes, so set the dictionary without it.
        object.__setattr__(made, "__dict__", copy_to_store_in(module).__dict__)
        made.__dict__["_module"] = module
        made.__dict__["_outside"] = self
        made.__dict__["_parameters"] = _Parameters(self, module)
        made.__dict__["_modules"] = {n: self.of(child) for n, child in module._modules.items()}
        return made

    def output(self, x: Tensor) -> Tensor:
        """Return the owner's output for one sample; raise if the output is a scalar."""
        if not x.ndim:
            raise ValueError(
                f"{self.owner} returned a number for one sample; a module with parameters of its "
                "own and layers below it returns tensors whose first dimension is the batch. "
                "Expand a parameter that it returns (self.scale.exp().expand(len(x), 1)), move "
                "the parameters into a module of their own, or freeze them with "
                "requires_grad_(False)"
            )
        if len(x) == self.batch_size != 1 and not _functorch.is_batchedtensor(x):
            # A hook stored the whole output [B, ...] of a layer below; return each sample's row.
            return self._mapped(x.unsqueeze(1))
        return x

    def parameter(self, module: nn.Module, name: str) -> Any:
        """Return a layer's parameter for the owner's forward: one copy per sample, under vmap."""
        parameter = module._parameters[name]
        if parameter is None or not (parameter.requires_grad and torch.is_grad_enabled()):
            return parameter
        handle = None
        if isinstance(module, PrivateModule) and module.is_private_call():
            with temporarily_pop_interpreter_stack():
                handle = module.private_handles(self.batch_size).values(name)
                if handle is not None and module._dpflash.units is not None:
                    handle = of_units(handle, module._dpflash.units)
        if handle is None:
            self._refuse_reading(name)
        return _functorch._add_batch_dim(handle, 0, self.level)

    def _refuse_reading(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"{self.owner} reads parameter '{name}' of a layer below it that is not "
            "private; freeze it with requires_grad_(False)"
        )

    def call(self, module: nn.Module, outside: Any, args: Any, kwargs: Any) -> Any:
        """Run a layer on the whole batch, and return the outputs as a vmap batch of samples."""
        if _functorch.maybe_current_level() is None:
            raise RuntimeError(
                f"{self.owner} has layers below it that activation checkpointing recomputes. Pass "
                "the whole module to checkpoint, or leave checkpointing out"
            )
        if isinstance(module, ParametrizationList):
            # The layer computes a weight in this call, which the layer's rule does not cover.
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    self._refuse_reading(name)
            return module(*args, **kwargs)
        if isinstance(module, nn.RNNBase) and isinstance(module, PrivateModule):
            _refuse_recurrent(self.owner, module)
        leaves, structure = tree_flatten((args, kwargs))
        mapped = [x for x in leaves if isinstance(x, Tensor) and _functorch.is_batchedtensor(x)]
        # A sample's input is bare if it has no batch dimension of 1, so that its tokens or windows
        # come first. Layers that treat all tokens alike get all samples at once; others get one.
        is_second = bool(mapped) and isinstance(module, BatchSecond)
        is_bare = is_second or any(not x.ndim or x.shape[0] != 1 for x in mapped)
        if is_bare and plain_class(module).forward not in _POINTWISE:
            return plain_class(module).forward(outside, *args, **kwargs)
        if isinstance(module, PrivateLeaf) and not any(isinstance(x, Tensor) for x in leaves):
            return plain_class(module).forward(outside, *args, **kwargs)
        # Whether parameters of the layer need per-sample gradients.
        has_rules = any(
            isinstance(m, PrivateModule) and m.is_private_call() for m in module.modules()
        )
        is_expanded = not mapped and has_rules and any(isinstance(x, Tensor) for x in leaves)
        if is_expanded:
            leaves, is_bare = self._expanded(module, leaves)
        leaves = [self._whole(x, is_bare) for x in leaves]
        if is_second:
            leaves = tree_map_only(Tensor, _turned, leaves)
        with temporarily_pop_interpreter_stack(), _autocast(self.device, self.dtype):
            whole_args, whole_kwargs = tree_unflatten(leaves, structure)
            outputs = module(*whole_args, **whole_kwargs)
        if is_second:
            outputs = tree_map_only(Tensor, _turned, outputs)
        if is_bare:
            return tree_map_only(Tensor, self._mapped, outputs)
        is_mapped = bool(mapped) or is_expanded
        return tree_map_only(Tensor, lambda x: self._rows(module, x, is_mapped), outputs)

    def _expanded(self, module: nn.Module, leaves: list[Any]) -> tuple[list[Any], bool]:
        """Expand shared inputs to all samples; return (inputs, whether inputs are bare)."""
        tensors = [x for x in leaves if isinstance(x, Tensor) and x.ndim]
        is_bare = any(len(x) != 1 for x in tensors)
        if is_bare and not (
            isinstance(module, PrivateEmbedding) or plain_class(module).forward in _POINTWISE
        ):
            raise PrivateRefusal(
                f"layer {plain_class(module).__name__} below {self.owner} got tensors that do not "
                "depend on the batch; give them a first dimension of 1",
                shapes=[tuple(x.shape) for x in tensors],
            ) from None
        first = 0 if is_bare else 1
        return [
            x.expand(self.batch_size, *x.shape[first:]) if isinstance(x, Tensor) and x.ndim else x
            for x in leaves
        ], is_bare

    def _mapped(self, x: Tensor) -> Tensor:
        return _functorch._add_batch_dim(_widened(x, self.dtype), 0, self.level)

    def _whole(self, x: Any, is_bare: bool) -> Any:
        """Convert a vmap batch of `[1, ...]` (of `[...]` if `is_bare`) to a tensor `[B, ...]`."""
        if not isinstance(x, Tensor) or not _functorch.is_batchedtensor(x):
            return x
        row = x if is_bare else x.squeeze(0)
        return _functorch._remove_batch_dim(row, self.level, self.batch_size, 0)

    def _rows(self, module: nn.Module, x: Tensor, is_mapped: bool) -> Tensor:
        if not is_mapped and not x.requires_grad:
            # Samples share x, even if its first dimension is B, as in positions [T] with T = B.
            return x
        if x.ndim and x.shape[0] == self.batch_size:
            return self._mapped(x.unsqueeze(1))
        if x.ndim and x.shape[0] == 1 and not x.requires_grad:
            return x  # for example rotary tables
        raise PrivateRefusal(
            f"layer {plain_class(module).__name__} below {self.owner} returned a tensor whose "
            "first dimension is not the batch. Call the layer in another module that returns only "
            "tensors with the batch first",
            shape=tuple(x.shape),
            batch_size=self.batch_size,
        ) from None


class _Parameters(dict[str, Any]):
    """The parameters of a layer as its owner's forward reads them, see `_Outside.parameter`."""

    def __init__(self, outside: _Outside, module: nn.Module):
        super().__init__(module._parameters)
        self._outside, self._module = outside, module

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return self._outside.parameter(self._module, name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def items(self) -> Any:
        return ((name, self[name]) for name in self)

    def values(self) -> Any:
        return (self[name] for name in self)

    def __setitem__(self, name: str, value: Any) -> NoReturn:
        raise RuntimeError(
            f"{self._outside.owner} replaces parameter '{name}' of a layer below it, as "
            "functional_call does; call the layer itself, or freeze it with requires_grad_(False)"
        )

    def __delitem__(self, name: str) -> NoReturn:
        self[name] = None


def _turned(x: Tensor) -> Tensor:
    """Exchange the first two dimensions for a layer with the batch second (`BatchSecond`)."""
    return x.transpose(0, 1) if x.ndim > 2 else x


# Layers that treat all positions in the leading dimensions alike.
_POINTWISE = frozenset({nn.Linear.forward, nn.LayerNorm.forward, nn.RMSNorm.forward})


class _LayerOutside(nn.Module):
    """A layer as its owner's forward calls it, see `_Outside.of`."""

    _module: nn.Module
    _outside: _Outside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "_outside" not in self.__dict__:
            # The forward has created this container (such as layers[:2]); run it as it is.
            return super().__call__(*args, **kwargs)
        return self._outside.call(self._module, self, args, kwargs)


_TYPES: dict[type[nn.Module], type[nn.Module]] = {}


def _type_outside(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _TYPES:
        _TYPES[kind] = type(kind.__name__, (_LayerOutside, kind), {})
    return _TYPES[kind]
