"""Changes to the readers and writers of files that a test must notice."""

from __future__ import annotations

INTERPRETED = True

FILES = "eplb_core/files"
TESTS = "tests/files"

# (file, text before, text after, test that must fail)
MUTATIONS = [
    (
        "eplb_core/trace.py",
        'check_is_load(load, "load")',
        "pass",
        "tests/test_contents.py::test_top_k_ids_are_known_by_rows_that_repeat_nothing",
    ),
    (
        f"{FILES}/reading.py",
        "first.header_offset + first.compress_size > second.header_offset",
        "False",
        f"{TESTS}/test_reading.py::test_members_that_overlap_are_refused_before_one_is_read",
    ),
    (
        f"{FILES}/reading.py",
        "if declared > MAX_BYTES:",
        "if False:",
        f"{TESTS}/test_reading.py::test_zip_bombs_are_refused_by_what_they_declare",
    ),
    (
        f"{FILES}/reading.py",
        "temporary.unlink(missing_ok=True)",
        "pass",
        f"{TESTS}/test_reading.py::test_a_failed_write_leaves_the_old_file_and_no_other",
    ),
    (
        f"{FILES}/pickles.py",
        "shared > MAX_SHARED",
        "False",
        f"{TESTS}/test_pickles.py::test_what_would_keep_a_reader_busy_is_refused",
    ),
    (
        f"{FILES}/layout_file.py",
        'read.layout.digest != found["digest"]',
        "False",
        f"{TESTS}/test_layout_file.py::test_changed_files_are_refused_and_say_what_is_wrong",
    ),
    (
        f"{FILES}/tensorrt_llm.py",
        'getattr(event, "anchor", None) or',
        "",
        f"{TESTS}/test_tensorrt_llm.py::test_other_yaml_is_refused_with_the_reason",
    ),
]
