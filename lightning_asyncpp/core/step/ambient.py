"""What torch has set for the thread or the process while the model is called: autocast, attention backends, modes.

What a user's step sets around ``self.model(...)`` holds on the last stage alone, which runs the step to its end. So the
first stage reads it at the call. Autocast and the choice of attention backends travel with the micro-batch, as one
number in its header, and are set around the layers of every stage; everything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from lightning_asyncpp.errors import ProtocolError
from lightning_asyncpp.private_names import required

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_BITS = 3  # of a value that travels
_ATTENTION = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)
_PURPOSE = "notice what a step sets around the model"
_parametrize, _forward_ad = parametrize.__dict__, forward_ad.__dict__
required(parametrize, "_cache_enabled", _PURPOSE)
required(forward_ad, "_current_level", _PURPOSE)
_saved_tensor_hooks = required(required(torch._C, "_autograd", _PURPOSE), "_top_saved_tensors_default_hooks", _PURPOSE)
_transforms = required(required(torch._C, "_functorch", _PURPOSE), "peek_interpreter_stack", _PURPOSE)
_everywhere = "set it where every stage does, in on_train_start or around the training, or within the layers"


class Setting(NamedTuple):
    """Something that a step may set around the model, but that only the last stage would see.

    Attributes:
        what: in words, for messages.
        read: its value now.
        mend: what to do instead.
    """

    what: str
    read: Callable[[], Any]
    mend: str = _everywhere


GRADIENTS = (
    Setting(
        "torch.no_grad(), inference_mode() or another switch of gradients",
        lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "leave it out; to train a part of the model alone, freeze the rest (requires_grad_(False)) before the training",
    ),
)
# What takes next to no time to read, in every micro-batch.
REFUSED = (
    Setting("the default dtype (torch.set_default_dtype)", torch.get_default_dtype),
    Setting(
        "a TorchFunctionMode (torch.device(...) as a context, torch.set_default_device)",
        required(torch._C, "_len_torch_function_stack", _PURPOSE),
    ),
    Setting(
        "a TorchDispatchMode (FlopCounterMode and its kind)", required(torch._C, "_len_torch_dispatch_stack", _PURPOSE)
    ),
    Setting("torch.use_deterministic_algorithms()", torch.are_deterministic_algorithms_enabled),
    Setting(
        "the order of attention backends (sdpa_kernel(..., set_priority=True))",
        required(torch._C, "_get_sdp_priority_order", _PURPOSE),
    ),
    Setting("torch.nn.utils.parametrize.cached()", lambda: _parametrize["_cache_enabled"] > 0, "use it in the layers"),
    Setting(
        "hooks on saved tensors (save_on_cpu, saved_tensors_hooks)", lambda: _saved_tensor_hooks(True),
        "set them within the layers whose activations they are for",
    ),
    Setting(
        "a transform of torch.func (grad, vmap, jvp, functionalize)", _transforms,
        "compute it in one process (delayed_gradient), or inside one layer of the model",
    ),
    Setting(
        "forward-mode differentiation (dual_level)", lambda: _forward_ad["_current_level"],
        "compute it in one process (delayed_gradient), or inside one layer of the model",
    ),
)  # fmt: skip
# What takes longer, once per batch.
_cudnn: Any = torch.backends.cudnn
_mkldnn: Any = torch.backends.mkldnn
_matmul: Any = vars(torch.backends.cuda)["matmul"]
REFUSED_ONCE = (
    Setting(
        "the precision of matrix products (torch.set_float32_matmul_precision)",
        lambda: (_matmul.fp32_precision, _mkldnn.matmul.fp32_precision),
    ),
    Setting(
        "flags of cuDNN or oneDNN (torch.backends.cudnn.flags, torch.backends.mkldnn.flags)",
        lambda: (_cudnn.enabled, _cudnn.benchmark, _cudnn.deterministic, _mkldnn.enabled),
    ),
)


class Travelling:
    """Autocast and the choice of attention backends: what goes with a micro-batch, as a number.

    Args:
        device: where the layers run; autocast is looked at there and on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self.readers: list[Callable[[], Any]] = []
        for device_type in self.types:
            self.readers += [
                partial(torch.is_autocast_enabled, device_type), partial(torch.get_autocast_dtype, device_type)
            ]  # fmt: skip
        self.readers += [torch.is_autocast_cache_enabled, *(read for read, _ in _ATTENTION)]

    def written(self, values: Sequence[Any]) -> int:
        """What was read, as a number other than 0.

        Raises:
            ValueError: autocast to a dtype that cannot be written.
        """
        number = 1
        for value in values:
            number = number << _BITS | (_DTYPES.index(value) if isinstance(value, torch.dtype) else int(value))
        return number

    @contextmanager
    def set_as(self, number: int) -> Iterator[None]:
        """Have everything as it was written.

        Raises:
            ProtocolError: nobody wrote this.
        """
        values = self._read(number)
        cache, attention = values[2 * len(self.types)], values[2 * len(self.types) + 1 :]
        with ExitStack() as stack:
            for place, device_type in enumerate(self.types):
                enabled, dtype = values[2 * place], _DTYPES[values[2 * place + 1]]
                stack.enter_context(
                    torch.autocast(device_type, dtype=dtype, enabled=bool(enabled), cache_enabled=bool(cache))
                )
            stack.enter_context(_attention_by([bool(value) for value in attention]))
            yield

    def _read(self, number: int) -> list[int]:
        count = len(self.readers)
        values = [number >> _BITS * place & 2**_BITS - 1 for place in reversed(range(count))]
        is_dtype = [place < 2 * len(self.types) and place % 2 == 1 for place in range(count)]
        fits = all(value < (len(_DTYPES) if dtype else 2) for value, dtype in zip(values, is_dtype))
        if number >> _BITS * count != 1 or not fits:
            raise ProtocolError(f"not what may be set around a model: {number:#x}")
        return values


@contextmanager
def _attention_by(backends: Sequence[bool]) -> Iterator[None]:
    before = [read() for read, _ in _ATTENTION]
    try:
        for (_, enable), wanted in zip(_ATTENTION, backends):
            enable(wanted)
        yield
    finally:
        for (_, enable), wanted in zip(_ATTENTION, before):
            enable(wanted)
