"""A Ray cluster of two nodes on this machine, which a test starts as a process of its own.

Prints the address. `lose` on standard input kills the second node, `join` starts another one in its place, and the
cluster ends when standard input closes: also with a test that is killed.
"""

import sys

NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}


def main() -> None:
    from ray.cluster_utils import Cluster  # not by who only collects tests: it takes seconds

    head = {**NODE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    far = cluster.add_node(**NODE, resources={"far": 1})
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "lose":
            cluster.remove_node(far, allow_graceful=False)
        else:
            far = cluster.add_node(**NODE, resources={"far": 1})
        print(line.strip(), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
