"""Launches in Triton's interpreter whose every access has to lie in one of the given tensors.

The interpreter reads and writes any address. So does a GPU, without a word where the memory belongs
to another tensor.
"""

import numpy as np

# Methods that access memory, and where pointers and mask stand in their arguments.
ACCESSES = {
    "create_masked_load": (0, 1),
    "create_masked_store": (0, 2),
    "create_atomic_rmw": (1, 3),
}


def check_accesses(replace=setattr):
    """From now on raise AssertionError for an access outside of a launch's tensors."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    launch = {}
    take = GridExecutor._init_args_hst

    def taken(executor, arguments, named):
        given, given_by_name = take(executor, arguments, named)
        spans = [span for one in (*given, *given_by_name.values()) for span in _spans(one)]
        launch["tensors"] = _merged(spans)
        return given, given_by_name

    def checked(access, pointers_at, mask_at):
        def method(builder, *arguments, **options):
            pointers, mask = arguments[pointers_at], arguments[mask_at].data
            where = pointers.data[np.broadcast_to(mask, pointers.data.shape)].astype(np.int64)
            size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
            starts, ends = launch["tensors"]
            tensor = np.searchsorted(starts, where, "right") - 1
            outside = (tensor < 0) | (where + size > ends[tensor])
            of = f"{access.__name__}: {outside.sum()} of {len(where)}"
            assert not outside.any(), f"{of} addresses are outside of all tensors"
            return access(builder, *arguments, **options)

        return method

    replace(GridExecutor, "_init_args_hst", taken)
    for name, places in ACCESSES.items():
        access = getattr(InterpreterBuilder, name)
        replace(InterpreterBuilder, name, checked(access, *places))


def _spans(argument):
    """The first byte of each tensor in an argument, and the one after its last."""
    if isinstance(argument, tuple):
        for one in argument:
            yield from _spans(one)
    elif hasattr(argument, "base"):  # a descriptor
        yield from _spans(argument.base)
    elif hasattr(argument, "data_ptr") and argument.numel():
        steps = zip(argument.shape, argument.stride(), strict=True)
        last = sum((size - 1) * step for size, step in steps)
        first = argument.data_ptr()
        yield first, first + (last + 1) * argument.element_size()


def _merged(spans):
    """Starts and ends, ascending; spans that overlap are one."""
    merged = [[0, 0]]
    for first, last in sorted(spans):
        if first < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    return np.array(merged, dtype=np.int64).T
