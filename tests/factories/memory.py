"""Checks of what kernels do in Triton's interpreter, where a GPU would go wrong without a word.

check_accesses: reads and writes outside of all tensors of the launch, and reads of what the same
program stored before, without a barrier between: another thread may be the one that stores.
check_integers: 32-bit indices that would leave their range in a larger layer.
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

    launch = {"stored": []}
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
            if mask_at == 2:
                launch["stored"].append(where)
            elif mask_at == 1 and launch["stored"]:
                again = np.isin(where, np.concatenate(launch["stored"]))
                assert not again.any(), f"{access.__name__} of what the program stored"
            return access(builder, *arguments, **options)

        return method

    def forgets(name):
        method = getattr(InterpreterBuilder, name)

        def forgetting(*arguments):
            launch["stored"].clear()
            return method(*arguments)

        replace(InterpreterBuilder, name, forgetting)

    replace(GridExecutor, "_init_args_hst", taken)
    for name, places in ACCESSES.items():
        access = getattr(InterpreterBuilder, name)
        replace(InterpreterBuilder, name, checked(access, *places))
    for name in ("set_grid_idx", "create_barrier"):
        forgets(name)


def check_integers(limit, replace=setattr):
    """From now on raise AssertionError for a 32-bit sum or product above the limit.

    Numbers that are above it already are words of bits.
    """
    from triton.language.semantic import TritonSemantic

    def checked(semantic, left, right, operation):
        if left.dtype.scalar.name == "int32" and operation.__name__ in ("add", "mul"):
            a, b = (np.abs(one.handle.data.astype(np.int64)) for one in (left, right))
            result = a * b if operation.__name__ == "mul" else a + b
            result = np.where((a <= limit) & (b <= limit), result, 0)
            assert (result <= limit).all(), f"{operation.__name__} reaches {result.max():,}"

    replace(TritonSemantic, "binary_op_sanitize_overflow_impl", checked)


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
