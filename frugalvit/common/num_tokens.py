"""The number of tokens that a SparseFormer computes with, chosen from outside."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


_REGISTERING = threading.Lock()


@contextmanager
def using_tokens(student: nn.Module, num_tokens: int) -> Iterator[None]:
    """Within, a SparseFormer computes with so many latent tokens in calls of this thread that choose none. Calls of
    other threads and the model itself stay as they are."""
    thread = threading.get_ident()

    def choose(module, args, kwargs=None):
        # A hook that another thread removes just now is called without `kwargs`.
        if kwargs is None or threading.get_ident() != thread or kwargs.get("num_tokens") is not None:
            return None
        return args, kwargs | {"num_tokens": num_tokens}

    # Heads and towers around it pass the choice on.
    bases = [part for part in student.modules() if hasattr(part, "check_num_tokens") and part.base_model is part]
    # The last hook that was registered is asked first; numbers of hooks are not given atomically.
    with _REGISTERING:
        hooks = [base.register_forward_pre_hook(choose, prepend=True, with_kwargs=True) for base in bases]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
