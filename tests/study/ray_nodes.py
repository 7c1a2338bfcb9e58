"""A Ray cluster of two nodes on this machine, which a test starts as a process of its own.

Prints the address. `lose` on standard input kills the second node, `join` starts another one in its place, and the
cluster ends when standard input closes: also with a test that is killed. A node that does not start is started again: Ray gives
the processes beside it 15 seconds to come up, and a busy machine may take longer.
"""

import os
import sys

NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}
ATTEMPTS = 5


def tried(start):
    """What `start` returns; tried again where it fails."""
    for left in reversed(range(ATTEMPTS)):
        try:
            return start()
        except Exception:
            if not left:
                raise
    raise AssertionError("never tried")


def main() -> None:
    from ray.cluster_utils import Cluster  # not by who only collects tests: it takes seconds

    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # by default 30, then it is given up
    head = {**NODE, "include_dashboard": False}
    cluster = tried(lambda: Cluster(initialize_head=True, head_node_args=head))

    def second():
        return tried(lambda: cluster.add_node(**NODE, resources={"far": 1}))

    far = second()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "lose":
            cluster.remove_node(far, allow_graceful=False)
        else:
            far = second()
        print(line.strip(), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
