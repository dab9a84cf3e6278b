"""SGLang's weight cache daemon with a record of the layout of its weights; see `adapters.sglang.record`.

    python -m eplb_core.adapters.sglang_daemon --model-path MODEL --tp-size 4 ...

takes the arguments of `python -m sglang.srt.weight_cache.daemon`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from eplb_core.adapters.sglang.daemon import run_daemon, spawn


def main(argv: Sequence[str] | None = None) -> int:  # pragma: no cover  as above
    """One daemon for a rank, or those of all ranks of this node, as SGLang's own command does."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.weight_cache import daemon

    own = argparse.ArgumentParser(add_help=False)
    daemon.WeightCacheDaemonArgs.add_cli_args(own)
    known, rest = own.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    server_args = prepare_server_args(rest)
    asked = daemon.WeightCacheDaemonArgs.from_cli_args(known)
    if asked.gpu_id is None and asked.tp_rank is None:
        spawn(
            daemon.launch_weight_cache_daemons,
            server_args,
            dist_init_method=asked.dist_init_method,
            timeout=asked.timeout,
            force=asked.force,
        )
        return 0
    gpu = asked.tp_rank if asked.gpu_id is None else asked.gpu_id
    rank = asked.gpu_id if asked.tp_rank is None else asked.tp_rank
    daemon.cleanup_stale_daemon_files(current_platform.get_device_uuid(gpu), force=asked.force)
    run_daemon(server_args, gpu_id=gpu, tp_rank=rank, pp_rank=asked.pp_rank, dist_init_method=asked.dist_init_method)
    return 0


if __name__ == "__main__":  # pragma: no cover  needs SGLang: tests/engines
    sys.exit(main())
