"""Changes to the way kernels are compiled that a test must notice; tried with compilation."""

from __future__ import annotations

FILE = "eplb_core/_numba.py"
TESTS = "tests/test_numba.py"
OPTIONS = f"{TESTS}::test_every_kernel_lets_go_of_the_lock_is_cached_and_rounds_as_written"

MUTATIONS = [
    (
        FILE,
        '"nogil": True,',
        '"nogil": False,',
        OPTIONS,
        "rule 10",
    ),
    (
        FILE,
        "forceinline=True)",
        "forceinline=True, fastmath=True)",
        OPTIONS,
        "rule 5",
    ),
    (
        FILE,
        "        compiled._cache._cache_file._source_stamp = _stamp(Path(compiled.py_func.__code__.co_filename))\n",
        "        _stamp(Path(compiled.py_func.__code__.co_filename))\n",
        f"{TESTS}::test_the_disk_cache_notices_a_change_in_a_called_kernels_file",
        "rule 5",
    ),
    # shares that the caller may write to are another kind of array: a kernel for them is compiled while serving
    (
        "eplb_core/dispatch/tables.py",
        'read_only(np.require(to_reals(shares, "shares"), np.float64, ["C", "A"]).view())',
        'np.require(to_reals(shares, "shares"), np.float64, ["C", "A"]).view()',
        "tests/loading/moves/test_migrator.py::test_nothing_is_compiled_after_the_constructors",
        "rule 8",
    ),
    (
        FILE,
        "    except RuntimeError:  # no place",
        "    except KeyError:  # no place",
        f"{TESTS}::test_kernels_run_where_no_folder_can_be_written",
    ),
    (
        FILE,
        "        except OSError as error:\n            _say_not_kept(error.strerror or str(error))\n",
        "        except TypeError as error:\n            _say_not_kept(str(error))\n",
        f"{TESTS}::test_kernels_run_where_the_disk_is_full",
    ),
    (
        FILE,
        "tuple(map(_variable, args))",
        "args",
        f"{TESTS}::test_a_kernel_is_compiled_once_whatever_constants_it_is_called_with",
    ),
    # an array in another order compiles the kernels that take it once more
    (
        "eplb_core/placement/problem.py",
        'np.array(to_reals(transfer_cost, "transfer_cost"), order="C")',
        'np.array(to_reals(transfer_cost, "transfer_cost"))',
        "tests/test_warm_up.py::test_after_warming_up_no_call_compiles",
    ),
]
