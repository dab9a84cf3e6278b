"""Changes to the readers and writers of files that a test must notice."""

from __future__ import annotations

INTERPRETED = True

FILES = "eplb_core/files"
TESTS = "tests/files"

# (file, text before, text after, test that must fail)
MUTATIONS = [
    (f"{FILES}/reading.py", "if declared > MAX_BYTES:", "if False:", f"{TESTS}/test_reading.py"),
    (f"{FILES}/reading.py", "temporary.unlink(missing_ok=True)", "pass", f"{TESTS}/test_reading.py"),
    (f"{FILES}/pickles.py", "shared > MAX_SHARED", "False", f"{TESTS}/test_pickles.py"),
    (f"{FILES}/layout_file.py", 'read.layout.digest != found["digest"]', "False", f"{TESTS}/test_layout_file.py"),
    (f"{FILES}/tensorrt_llm.py", "isinstance(event, yaml.AliasEvent) or", "", f"{TESTS}/test_tensorrt_llm.py"),
]
