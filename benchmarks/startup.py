"""What `import eplb_core` and the first call in a new process cost, with the kernels compiled before and without.

python -m benchmarks.startup --json startup.json
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks import measure

IMPORT = """
import json, sys, time
start = time.perf_counter(); import eplb_core
took = time.perf_counter() - start
print(json.dumps({"import_s": took, "torch_imported": "torch" in sys.modules}))
"""
FIRST_CALL = """
import json, resource, sys, time
start = time.perf_counter(); import numpy as np, eplb_core as eplb; CALL; modules = time.perf_counter() - start
load = np.random.default_rng(0).integers(1, 1000, (58, 256))
times = []
for _ in range(2):
    start = time.perf_counter(); CALL(load); times.append(time.perf_counter() - start)
used = resource.getrusage(resource.RUSAGE_SELF)
cpu = used.ru_utime + used.ru_stime
print(json.dumps({"modules_s": modules, "first_s": times[0], "second_s": times[1], "process_cpu_s": cpu}))
"""
CALLS = {
    "place": "(lambda load: eplb.place(load, topology=eplb.Topology(num_ranks=32), num_slots=288))",
    "rebalance_experts": "(lambda load: eplb.rebalance_experts(load, 288, 1, 1, 32))",
}


def main(argv: Sequence[str] | None = None) -> int:
    options = measure.parser("startup", __doc__, quick="leave out the runs that compile, and repeats").parse_args(argv)
    imports = [measure.json_of("-c", IMPORT) for _ in range(1 if options.quick else 3)]
    fastest = min(imports, key=lambda entry: entry["import_s"])
    lines = [f"import eplb_core: {fastest['import_s']:.3f} s, torch imported: {fastest['torch_imported']}"]
    record: dict[str, Any] = {"import": fastest}
    for name, call in CALLS.items():
        code = FIRST_CALL.replace("CALL;", f"eplb.{name};").replace("CALL(load)", f"{call}(load)")
        if not options.quick:
            measure.json_of("-c", code)  # fills the cache
        record[name] = {"cached": measure.json_of("-c", code)}
        if not options.quick:
            with tempfile.TemporaryDirectory() as cache:
                record[name]["compiled"] = measure.json_of("-c", code, NUMBA_CACHE_DIR=cache)
        for state, times in record[name].items():
            lines.append(
                f"{name}, kernels {state}: modules {times['modules_s']:.2f} s, first call {times['first_s']:.3f} s, "
                f"second {times['second_s'] * 1e3:.2f} ms, process {times['process_cpu_s']:.1f} s of CPU"
            )
    print("\n".join(lines))
    measure.write_json(options.json, {"summary": lines, **record})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
