"""How much memory a training step takes: counted while it runs, or foretold by running it on tensors without numbers.

Counted is what tensors hold. What a GPU's libraries and its allocator take besides is not.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xctrain.models.parameters import parameters_without_gradient

if TYPE_CHECKING:
    from xctrain.collate import Batch
    from xctrain.config import Config
    from xctrain.trainconfig import OptimConfig

WEIGHTS, ADAPTER, GRADIENTS, OPTIMIZER = "weights", "adapter", "gradients", "optimizer"
BATCH, ACTIVATIONS, LOGITS, UPDATE = "batch", "activations", "logits", "update"
KINDS = (WEIGHTS, ADAPTER, GRADIENTS, OPTIMIZER, BATCH, ACTIVATIONS, LOGITS, UPDATE)

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_aten = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default)


class NeedsNumbersError(Exception):
    """The model's code asks for numbers that depend on weights, which a model without memory for them has not."""


class Tally(TorchDispatchMode):
    """Counts the bytes that tensors hold while it is entered, by kind. A view holds nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: dict[str, int] = {}  # by kind, at the moment when the sum was largest
        self.most: Counter[str] = Counter()  # of each kind, whenever that was
        self.kind = ACTIVATIONS  # of what is made from now on
        self.vocabulary: int | None = None  # what is that wide counts as logits
        self._held: dict[int, tuple[str, int, Any]] = {}
        self._sum = self._peak_sum = 0

    def add(self, tensor: Tensor, kind: str) -> None:
        """Count the memory of ``tensor``, until it is freed; known memory becomes of this kind."""
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place in self._held:
            before, num_bytes, reference = self._held[place]
            self.live[before] -= num_bytes
            self._held[place] = (kind, num_bytes, reference)
        else:
            num_bytes = storage.nbytes()
            self._held[place] = (kind, num_bytes, weakref.ref(storage, lambda _: self._free(place)))
            self._sum += num_bytes
        self.live[kind] += num_bytes
        self.most[kind] = max(self.most[kind], self.live[kind])
        if self._sum > self._peak_sum:
            self._peak_sum, self.peak = self._sum, dict(self.live)

    def begin(self) -> None:
        """Forget the peak before this moment."""
        self._peak_sum, self.peak, self.most = self._sum, dict(self.live), Counter(self.live)

    def _free(self, place: int) -> None:
        kind, num_bytes, _ = self._held.pop(place)
        self.live[kind] -= num_bytes
        self._sum -= num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count what it made."""
        result = self.call(func, args, kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._held:
                wide = tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary
                self.add(tensor, LOGITS if wide else self.kind)
        return result

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation itself."""
        return func(*args, **kwargs)


class EmptyTally(Tally):
    """The same for a model whose weights hold no numbers. What does not depend on weights is computed all the same:
    token ids, masks and the like decide shapes.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation: on numbers if all tensors have some, else on shapes alone."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:  # a test such as "is any of it infinite"
            return 0.0 if tensors[0].is_floating_point() else 0
        if func in _INDEXING:
            args = (args[0], self._positions(args[1]), *args[2:])
        with self.mode:
            result = func(*args, **kwargs)
        into = args[0] if func._schema.is_mutable and args else None
        return into if isinstance(into, Tensor) and not isinstance(into, FakeTensor) else result

    def _positions(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices with positions in the place of masks, since the number of a mask's true places is a shape."""
        result: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
                result.append(index)
            else:
                count = int(index.sum())
                with self.mode:
                    result += [torch.empty(count, dtype=torch.int64)] * index.ndim
        return result


def imagine(module: nn.Module, mode: FakeTensorMode) -> None:
    """Put tensors that claim to lie on the CPU in the place of those on `meta`, so that code takes its usual ways."""

    def fake(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        with mode:
            return torch.empty_like(tensor, device="cpu")

    def fake_parameter(parameter: nn.Parameter) -> nn.Parameter:
        new = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
        new.__dict__.update(parameter.__dict__)
        state = getattr(new, "quant_state", None)
        while state is not None:
            state.absmax, state.code = fake(state.absmax), fake(state.code)
            state.offset = None if state.offset is None else fake(state.offset)
            state = state.state2
        return new

    imagined = {parameter: fake_parameter(parameter) for parameter in module.parameters() if parameter.is_meta}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta:
                part.register_parameter(name, imagined[parameter])
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = fake(buffer)


def held_by(module: nn.Module) -> Iterator[tuple[Tensor, str]]:
    """Every tensor that a model keeps, scales of 4-bit weights included, and its kind."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield tensor, ADAPTER if ".lora_" in name else WEIGHTS
        state = getattr(tensor, "quant_state", None)
        while state is not None:
            yield from ((part, WEIGHTS) for part in (state.absmax, state.code, state.offset) if part is not None)
            state = state.state2


@contextmanager
def counting(tally: Tally, module: nn.Module, batch: "Batch") -> Iterator[None]:
    """Count with ``tally`` what is made inside, on top of the model, its gradients and a batch."""
    for tensor, kind in held_by(module):
        tally.add(tensor, kind)
    for tensor in (*batch.inputs.values(), batch.labels):
        tally.add(tensor, BATCH)
    tally.vocabulary = max((m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)), default=None)
    trainable = [p for p in module.parameters() if p.requires_grad]

    def mark(parameter: Tensor) -> None:
        assert parameter.grad is not None
        tally.add(parameter.grad, GRADIENTS)

    hooks = [p.register_post_accumulate_grad_hook(mark) for p in trainable]
    with tally:
        yield
    for hook in hooks:
        hook.remove()


def foretell(
    module: nn.Module, batch: "Batch", optim: "OptimConfig", *, precision: str, keeps_gradients: bool
) -> Tally:
    """What a training step of a model without memory for its weights would hold, counted.

    ``keeps_gradients``: they are there during the forward, as with several micro-batches or GPUs.

    Raises:
        NeedsNumbersError: it cannot be known without the numbers.
    """
    plain = optim.model_copy(update={"name": "adamw"})
    try:
        tally = _foretell(module, batch, plain, precision, keeps_gradients)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
        where = f" ({error.func})" if hasattr(error, "func") else ""
        raise NeedsNumbersError(
            f"the code of {type(module).__name__} asks for numbers that depend on weights{where}"
        ) from error
    if optim.name.endswith("8bit"):
        # Two bytes a weight and two numbers a block of 256; small tensors stay in float32. Updated in place.
        sizes = [p.numel() for p in module.parameters() if p.requires_grad]
        means = sum(2 * n + 8 * (n // 256) if n >= 4096 else 8 * n for n in sizes)
        tally.peak |= {OPTIMIZER: means, UPDATE: 0}
        tally.most |= {OPTIMIZER: means, UPDATE: 0}
        tally.most[UPDATE] = 0
    return tally


def _foretell(module: nn.Module, batch: "Batch", optim: "OptimConfig", precision: str, keeps_gradients: bool) -> Tally:
    from xctrain.optim import make_optimizer

    tally = EmptyTally(FakeTensorMode(allow_non_fake_inputs=True))
    imagine(module, tally.mode)
    module.train()
    autocast = torch.autocast("cpu", _AUTOCAST[precision]) if precision in _AUTOCAST else nullcontext()
    optimizer = make_optimizer(module.parameters(), optim)

    def update() -> None:
        kind, tally.kind = tally.kind, UPDATE
        torch.nn.utils.clip_grad_norm_([p for p in module.parameters() if p.requires_grad], optim.max_grad_norm)
        optimizer.step()
        tally.kind = kind

    with counting(tally, module, batch):
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                tally.add(parameter.grad, GRADIENTS)
        update()
        for state in optimizer.state.values():
            for tensor in state.values():
                tally.add(tensor, OPTIMIZER)
        optimizer.zero_grad(set_to_none=not keeps_gradients)
        tally.begin()
        with autocast:
            loss = module(batch)
        if unused := set(parameters_without_gradient(loss, module)):  # the run freezes these before it begins
            del loss
            for name, parameter in module.named_parameters():
                if name in unused:
                    parameter.requires_grad_(False).grad = None
                    optimizer.state.pop(parameter)
            tally.begin()
            with autocast:
                loss = module(batch)
        loss.backward()
        del loss
        update()
    return tally


def foretell_shared(
    module: nn.Module, batch: "Batch", config: "Config", *, world_size: int, keeps_gradients: bool
) -> Tally:
    """The same for one of ``world_size`` ranks that share the model as ``parallel.mode`` says: an upper bound.

    What each rank has a part of is counted by size; activations are those of a step with the weights at hand.
    """
    mode, precision = config.parallel.mode, config.train.precision
    if mode == "ddp":
        return foretell(module, batch, config.optim, precision=precision, keeps_gradients=keeps_gradients)
    cuts_weights = mode in ("fsdp", "zero3")
    trained = _bytes(p for p in module.parameters() if p.requires_grad)
    weights = _bytes([*module.parameters(), *module.buffers()])
    short = _AUTOCAST[precision].itemsize if mode == "fsdp" and precision in _AUTOCAST else None
    gathered, reduced = _in_flight(module, short)
    if short:  # gathered in this type, so no copies of weights in it are made in a step
        module.to(_AUTOCAST[precision])
    tally = foretell(module, batch, config.optim, precision=precision, keeps_gradients=False)
    held = {kind: tally.most[kind] for kind in (BATCH, ACTIVATIONS, LOGITS)}
    held[WEIGHTS] = weights // world_size + gathered if cuts_weights else weights
    held[GRADIENTS] = trained // world_size + reduced if mode != "zero1" else trained
    # DeepSpeed keeps a second copy of the weights that train, beside their two means.
    held[OPTIMIZER] = trained * (2 if mode == "fsdp" else 3) // world_size
    tally.peak, tally.most = held, Counter(held)
    tally.most[UPDATE] = trained // world_size  # once activations are gone
    return tally


def _bytes(held: Iterable[Tensor], size: int | None = None) -> int:
    return sum(t.numel() * (size or t.element_size()) for t in held)


def _in_flight(module: nn.Module, size: int | None) -> tuple[int, int]:
    """Most bytes of whole weights on a rank, and of whole gradients: two layers, and what is in no layer."""
    found = layers(module)
    inside = {id(p) for layer in found for p in layer.parameters()}
    outside = [p for p in module.parameters() if id(p) not in inside]
    gathered = _bytes(outside, size) + 2 * max((_bytes(layer.parameters(), size) for layer in found), default=0)
    units = [outside, *(list(layer.parameters()) for layer in found)]
    # As they come, and once more in float32 while the ranks add them up.
    reduced = max(_bytes((p for p in unit if p.requires_grad), (size or 4) + 4) for unit in units)
    return gathered, reduced


def layers(module: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model, which sharing cuts one by one: members of its outermost lists."""
    found: list[nn.Module] = []
    for child in module.children():
        found += child.children() if isinstance(child, nn.ModuleList) else layers(child)
    return [layer for layer in found if next(layer.parameters(), None) is not None]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU, or the machine, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
