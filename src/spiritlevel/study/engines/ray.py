"""Tasks of Ray Core: a cluster started here for the time of the run, or one that is joined by its address."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spiritlevel.errors import SpiritLevelError
from spiritlevel.study.engines import launch
from spiritlevel.study.engines.endings import CANCELLED, NO_MEMORY, NODE_LOST, VANISHED, Outcome, outcome_of, taken
from spiritlevel.study.engines.engine import Slots, Task
from spiritlevel.study.store import Tell, silent
from spiritlevel.study.worker import REFUSED

WAIT = 0.2
# Seconds for an address to accept a connection.
PATIENCE = 5.0
# How often a cluster is asked for its token: one that is busy may not answer in time.
ASKED = 3
# What Ray calls by names of its own; any other resource is one of the cluster's.
_OPTIONS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
_HOST_AND_PORT = re.compile(r"(?P<host>[^/:]+):(?P<port>\d+)")


class RayEngine(Slots):
    """One Ray task for each task, with the resources of a cell; every node must see the study's folder or URL."""

    def __init__(
        self,
        workers: int | None = None,
        address: str | None = None,
        *,
        logs: Path,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        seconds: float | None = None,
        tell: Tell = silent,
    ) -> None:
        try:
            import ray
        except ImportError:
            raise SpiritLevelError(
                "engine 'ray' needs Ray, which is not installed: pip install \"spiritlevel[ray]\""
            ) from None
        super().__init__(workers or 0, seconds)  # 0: as many as the cluster has room for
        self.ray: Any = ray
        self.tell, self.logs = tell, logs
        self.asked = {"num_cpus": 1.0, **(resources or {})}
        self.surroundings = _surroundings(runtime_env or {})
        self._connect(workers, address, dict(runtime_env or {}))
        self._divert_messages()
        self._launch = self._prepared()
        self._say_where_it_does_not_fit()

    def _connect(self, workers: int | None, address: str | None, runtime_env: dict[str, Any]) -> None:
        if address is not None:
            check_cluster(address)
        # A cluster that is joined has its own size; `workers` then bounds what is submitted at once.
        own = {"num_cpus": workers, "num_gpus": None, "include_dashboard": False} if address is None else {}
        try:
            with self._quiet_logs(), _sigterm_as_it_was():
                self.ray.init(
                    address=address or "local",
                    runtime_env=runtime_env or None,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **own,
                )
        except ConnectionError as error:
            raise SpiritLevelError(f"no Ray cluster answers at {address}: {error}") from None
        except self.ray.exceptions.AuthenticationError:
            raise SpiritLevelError(token_needed(address)) from None
        except (ValueError, TypeError, self.ray.exceptions.RuntimeEnvSetupError) as error:
            raise SpiritLevelError(f"Ray refuses these settings: {_first_line(error)}") from None

    @contextlib.contextmanager
    def _quiet_logs(self) -> Iterator[None]:
        """Ray says how it starts before it reads how much it is to say."""
        logger = logging.getLogger("ray")
        before = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(before)

    def _divert_messages(self) -> None:
        """What Ray prints of every process and node that it loses goes to a file; the study tells of its cells itself."""

        def keep(data: Mapping[str, Any], **_: Any) -> None:
            with contextlib.suppress(OSError):
                self.logs.mkdir(parents=True, exist_ok=True)
                with (self.logs / "ray.txt").open("a") as file:
                    file.writelines(f"{line}\n" for line in data.get("lines", ()))

        listening = importlib.import_module("ray._private.worker")  # Ray has no setting for it
        if hasattr(listening, "print_to_stdstream"):
            vars(listening)["print_to_stdstream"] = keep

    def _prepared(self) -> Any:
        """`launch` as a Ray task. A process that dies is the study's business, which tries again and says so."""
        self.ray.cloudpickle.register_pickle_by_value(launch)
        named = {name: self.asked[name] for name in _OPTIONS if name in self.asked}
        further = {name: amount for name, amount in self.asked.items() if name not in _OPTIONS}
        return self.ray.remote(**named, resources=further, max_retries=0)(launch.launch)

    def _room(self) -> int:
        """How many cells fit into the nodes as they are, if all were free."""
        wanted = {_OPTIONS.get(name, name): amount for name, amount in self.asked.items() if amount > 0}
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        room = (min((int(node.get(name, 0) / amount) for name, amount in wanted.items()), default=1) for node in nodes)
        return sum(room)

    def _say_where_it_does_not_fit(self) -> None:
        if self._room() == 0:
            asked = ", ".join(f"{name}={amount:g}" for name, amount in self.asked.items())
            self.tell(f"no node of the Ray cluster has what a cell asks for ({asked}); waiting for one that has")

    @property
    def free(self) -> int:
        return (self.most or max(1, self._room())) - self.running

    def submit(self, task: Task) -> None:
        """Hand a task to the cluster."""
        threads = max(1, int(self.asked["num_cpus"]))
        self.tasks[self._launch.remote(task.paths, threads, self.seconds, self.surroundings)] = task

    def finished(self) -> list[tuple[Task, Outcome]]:
        """Tasks that returned or whose process died."""
        if not self.tasks:
            time.sleep(WAIT)
            return []
        ready, _ = self.ray.wait(list(self.tasks), num_returns=len(self.tasks), timeout=WAIT)
        return [(self.tasks.pop(reference), self._outcome(reference)) for reference in ready]

    def _outcome(self, reference: Any) -> Outcome:
        known = self.ray.exceptions
        try:
            return outcome_of(self.seconds, *self.ray.get(reference))
        except known.NodeDiedError as error:
            return taken(NODE_LOST, str(error))
        except known.OutOfMemoryError as error:
            return taken(NO_MEMORY, str(error))
        except known.TaskCancelledError as error:
            return taken(CANCELLED, str(error))
        except known.RuntimeEnvSetupError as error:
            return Outcome(REFUSED, str(error), f"its runtime_env cannot be set up: {_first_line(error)}")
        except known.WorkerCrashedError as error:
            return taken(VANISHED, str(error))
        except known.RayError as error:
            return taken(_first_line(error), str(error))

    def stop(self) -> None:
        """Cancel all tasks and leave the cluster, or end it if it was started here."""
        for reference in self.tasks:
            self.ray.cancel(reference, force=True)
        self.tasks.clear()
        self.ray.shutdown()


@contextlib.contextmanager
def _sigterm_as_it_was() -> Iterator[None]:
    """Ray takes SIGTERM for itself and never gives it back, also from a command that keeps what is finished when it comes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:  # installed from Python
            signal.signal(signal.SIGTERM, before)


def _surroundings(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """Where a worker looks for code of the user's own: as here, unless the runtime environment brings its own folder."""
    folder = None if "working_dir" in runtime_env else os.getcwd()
    return {"paths": os.environ.get("PYTHONPATH", ""), "folder": folder}


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def token_needed(address: str | None) -> str:
    """What to do where a cluster asks for a token."""
    return (
        f"the Ray cluster at {address} asks for a token, and the one given is missing or wrong: set RAY_AUTH_MODE=token, "
        "and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, to what the cluster was started with (`ray get-auth-token` prints it "
        "there). Ray asks for one by default since version 2.59"
    )


def check_cluster(address: str) -> None:
    """Refuse an address where nothing answers, or where a cluster wants another token: Ray itself tries for long."""
    place = _HOST_AND_PORT.fullmatch(address)
    if place is None:  # "auto", ray://…: found, or not, by Ray
        return
    try:
        socket.create_connection((place["host"], int(place["port"])), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise SpiritLevelError(
            f"no Ray cluster answers at {address}: {error}; `ray start --head` on a node prints the address of its cluster"
        ) from None
    if _asks_for_another_token(address):
        raise SpiritLevelError(token_needed(address))


def _asks_for_another_token(address: str) -> bool:
    """Whether the cluster says so itself; joining it would try again for 20 seconds, and say something else."""
    from ray import _raylet, exceptions

    with _standard_error_aside():
        for _ in range(ASKED):
            try:
                # Where a token is asked for here and none is found, the client itself would end this process.
                setup = importlib.import_module("ray._private.authentication.authentication_token_setup")
                setup.ensure_token_if_auth_enabled(create_token_if_missing=False)
                vars(_raylet)["GcsClient"](address=address)
            except getattr(exceptions, "AuthenticationError", ()):
                return True
            except getattr(exceptions, "RpcError", ()):  # not answered in time
                continue
            except Exception:  # another version of Ray, another way to ask: joining the cluster will tell
                return False
            return False
    return False


@contextlib.contextmanager
def _standard_error_aside() -> Iterator[None]:
    """What libraries write to the file behind standard error, where no setting of theirs reaches, is not shown."""
    with tempfile.TemporaryFile() as aside:
        before = os.dup(2)
        os.dup2(aside.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
