"""Rules of load, traces, files, replay and command line, each with a change that a test must notice."""

MUTATIONS = [
    # counting
    ("eplb_core/load.py", "        ids = ids[:real]\n", "        ids = ids\n", "tests/test_load.py"),
    ("eplb_core/load.py", "np.iinfo(source.dtype).max < experts - 1", "False", "tests/test_load.py"),
    ("eplb_core/load.py", "ids.min() < -1 or ids.max() >= experts", "ids.max() >= experts", "tests/test_load.py"),
    (
        "eplb_core/load.py",
        "        self._ended += 1\n",
        "        self._ended = min(self._ended + 1, len(self._ring))\n",
        "tests/test_load.py",
    ),
    ("eplb_core/load.py", "if (more > _TOP - self._open).any():", "if False:", "tests/test_load.py"),
    ("eplb_core/load.py", "if (counts * (p2l < 0)).any():", "if False:", "tests/test_load.py"),
    ("eplb_core/load.py", "(last == width) & ", "", "tests/test_load.py"),
    # traces
    (
        "eplb_core/trace.py",
        'check_counts(array, "load") if array.dtype.kind in "iu" else checked.copy()',
        "checked.copy()",
        "tests/test_trace.py",
    ),
    ("eplb_core/trace.py", "read_only(load))", "load)", "tests/test_trace.py"),
    ("eplb_core/trace.py", "if given and len(given) != length:", "if False:", "tests/test_trace.py"),
    # hostile files
    ("eplb_core/_files.py", "    if declared > MAX_BYTES:\n", "    if False:\n", "tests/test_files.py"),
    ("eplb_core/_files.py", "* itemsize > MAX_BYTES:", "* itemsize > MAX_BYTES * 10**30:", "tests/test_files.py"),
    # words of strangers in messages
    ("eplb_core/_text.py", "    line = _line(text)\n", "    line = text\n", "tests/test_text.py"),
    ("eplb_core/_text.py", "    text = text[: width + 1]  #", "    width = len(text)  #", "tests/test_text.py"),
    ("eplb_core/_text.py", "    except Exception:  #", "    except TypeError:  #", "tests/test_text.py"),
    ("eplb_core/errors.py", "plain(message, MAX_TEXT)", "message", "tests/test_errors.py"),
    ("eplb_core/errors.py", "    error.__dict__.update(attributes)\n", "", "tests/test_errors.py"),
    ("eplb_core/_files.py", "expected {plain(expected)}", "expected {expected}", "tests/loading/test_backup.py"),
    ("eplb_core/cli.py", "super().error(plain(message, MAX_TEXT))", "super().error(message)", "tests/test_cli.py"),
    ("eplb_core/_inputs.py", "{plain(each, MAX_TEXT)}", "{each}", "tests/test_cli.py"),
    ("eplb_core/_inspect.py", "lines(_facts_text(facts))", "_facts_text(facts)", "tests/test_cli.py"),
    # pickles that keep a reader busy
    ("eplb_core/_pickle.py", "and len(argument) > MAX_NAME:", "and False:", "tests/test_pickle.py"),
    ("eplb_core/_pickle.py", "shared > MAX_SHARED", "False", "tests/test_pickle.py"),
    ("eplb_core/_pickle.py", 'or stack[-2] != "GLOBAL"', "", "tests/test_pickle.py"),
    ("eplb_core/layout_file.py", "0 <= layer < 2**63", "True", "tests/adapters/test_vllm_ascend.py"),
    (
        "eplb_core/loading/checkpoint.py",
        "{plain(str(error))}; fetch",
        "{error}; fetch",
        "tests/loading/test_checkpoint.py::test_a_shard_s_name_that_no_file_can_have_is_refused",
    ),
    ("eplb_core/_files.py", "        temporary.unlink(missing_ok=True)\n", "", "tests/test_files.py"),
    ("eplb_core/_files.py", "Path(os.path.realpath(check_path(path)))", "Path(path)", "tests/test_files.py"),
    ("eplb_core/_files.py", "        if isinstance(error, OSError):  #", "        if False:  #", "tests/test_files.py"),
    (
        "eplb_core/cli.py",
        'errors="backslashreplace"',
        'errors="strict"',
        "tests/test_cli.py::test_names_that_the_terminal_cannot_show_are_escaped",
    ),
    (
        "eplb_core/cli.py",
        "with contextlib.suppress(OSError):",
        "with contextlib.suppress(TypeError):",
        "tests/test_cli.py::test_output_that_cannot_be_written_ends_with_status_2_and_one_line",
    ),
    (
        "eplb_core/cli.py",
        "if sys.stdout is not None:",
        "if True:",
        "tests/test_cli.py::test_a_closed_output_is_no_error",
    ),
    (
        "eplb_core/loading/backup.py",
        "        path.unlink(missing_ok=True)\n        raise OSError(",
        "        path.touch()\n        raise OSError(",
        "tests/loading/test_backup.py",
    ),
    # layouts
    ("eplb_core/layout_file.py", 'if read.layout.digest != found["digest"]:', "if False:", "tests/test_layout_file.py"),
    (
        "eplb_core/layout_file.py",
        "if topology is not None and topology != own:",
        "if False:",
        "tests/test_layout_file.py",
    ),
    (
        "eplb_core/layout_file.py",
        "if num_experts is not None and num_experts != experts:",
        "if False:",
        "tests/test_layout_file.py",
    ),
    (
        "eplb_core/layout_file.py",
        "rank_to_node.max(initial=0) >= rank_to_node.size",
        "False",
        "tests/test_layout_file.py",
    ),
    # engines' files
    (
        "eplb_core/adapters/sglang_files.py",
        "        rows = (starts[0] + np.arange(len(rows))) % total\n",
        "",
        "tests/adapters/test_sglang_files.py",
    ),
    (
        "eplb_core/adapters/sglang_files.py",
        "    passes = sorted(by_pass)\n",
        "    passes = list(by_pass)\n",
        "tests/adapters/test_sglang_files.py",
    ),
    (
        "eplb_core/adapters/sglang_files.py",
        "            if (number, rank) in seen:\n",
        "            if False:\n",
        "tests/adapters/test_sglang_files.py",
    ),
    ("eplb_core/adapters/sglang_files.py", "    if (p2l < 0).any():\n", "    if False:\n", "tests/adapters"),
    (
        "eplb_core/adapters/vllm_ascend.py",
        'if short is not None and uneven == "reject":',
        "if False:",
        "tests/adapters/test_vllm_ascend.py",
    ),
    (
        "eplb_core/adapters/vllm_ascend.py",
        "        row[rank] = [",
        "        row[len(seen) - 1] = [",
        "tests/adapters/test_vllm_ascend.py",
    ),
    (
        "eplb_core/adapters/vllm_ascend.py",
        "    if len(twice):\n",
        "    if False:\n",
        "tests/adapters/test_vllm_ascend.py",
    ),
    (
        "eplb_core/adapters/tensorrt_llm.py",
        "            if len(row) != slots:\n",
        "            if False:\n",
        "tests/adapters/test_tensorrt_llm.py",
    ),
    ("eplb_core/adapters/tensorrt_llm.py", "if layer not in rows]", "if False]", "tests/adapters/test_tensorrt_llm.py"),
    (
        "eplb_core/adapters/tensorrt_llm.py",
        "if len(counts.get(key, ())) != len(files):",
        "if False:",
        "tests/adapters/test_tensorrt_llm.py",
    ),
    # command line
    ("eplb_core/cli.py", "        return 130\n", "        return 0\n", "tests/test_cli.py"),
    ("eplb_core/cli.py", "        return 141\n", "        raise\n", "tests/test_cli.py"),
    ("eplb_core/_inspect.py", 'return 1 if facts["faults"] else 0', "return 0", "tests/test_cli.py"),
]
