"""Starts the stages of a pipeline on the machines of a Ray cluster (Moritz et al. 2018).

Ray chooses the machines, and starts and ends a process on each; steps use the engine's own
connections. Each machine needs kvik and the model's files, under the same path.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvik.config.config import ResolvedConfig
from kvik.errors import ConfigError, brief
from kvik.rank_process import Process
from kvik.stage_process import start_stage

OPTION = "distributed_executor_backend"
PLACE_SECONDS = 60.0  # limit for the cluster to answer, and to find free CPUs
END_SECONDS = 10.0


class StageActor:
    """Starts a stage where Ray has placed it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def host(self) -> str:
        return _own_host()

    def start(self, arguments: list[str], token: str) -> None:
        self._process = start_stage([*arguments, _own_host()], token)

    def wait(self) -> int:
        """Return its exit code, or minus the signal that ended it."""
        assert self._process is not None
        return self._process.wait()


class RayProcess:
    """A stage on another machine, with the interface of a local `Process`."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._ended = actor.wait.remote()

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """See `Process.wait`."""
        end = time.monotonic() + (END_SECONDS if timeout is None else timeout)
        try:
            return int(self._ray.get(self._ended, timeout=max(0.0, end - time.monotonic())))
        except self._ray.exceptions.GetTimeoutError:
            if timeout is None:
                return -9
            raise subprocess.TimeoutExpired("a stage", timeout) from None
        except self._ray.exceptions.RayError:  # the actor, or its machine, is gone
            return -9

    def kill(self) -> None:
        """End the actor; the stage ends when its connection to the engine closes."""
        self._ray.kill(self._actor)


class RayLauncher:
    """Starts each stage on a separate machine, if there are enough machines; see `Launcher`."""

    is_local = False

    def __init__(self, resolved: ResolvedConfig) -> None:
        """Reserve a place for each stage but the engine's own.

        Raises:
            ConfigError: Ray is not installed, no cluster is running, or it lacks free CPUs.
        """
        try:
            import ray
        except ImportError:
            raise ConfigError(OPTION, 'ray is missing: pip install "kvik[ray]"') from None
        from ray.util.placement_group import placement_group

        if not ray.is_initialized():
            _join_cluster(ray)
        self._ray: Any = ray
        self.host = _own_host()
        runner = resolved.runner
        count, cpus = len(runner.stages) - 1, runner.threads * runner.ranks
        self._gpus = 0 if runner.device == "cpu" else runner.ranks
        place = {"CPU": cpus, "GPU": self._gpus} if self._gpus else {"CPU": cpus}
        self._group: Any = placement_group([place] * count, strategy="SPREAD")
        if not self._group.wait(PLACE_SECONDS):
            self.stop()
            requested = f"{count} times {cpus} free CPUs"
            requested += f" and {self._gpus} free GPUs" if self._gpus else ""
            reason = f"ray has not found {requested} within {PLACE_SECONDS:.0f} s"
            raise ConfigError(OPTION, reason)
        self._cpus = cpus

    def start(self, stage: int, arguments: Sequence[str], token: str) -> Process:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, stage)
        kind = self._ray.remote(StageActor).options(
            num_cpus=self._cpus,
            num_gpus=self._gpus,
            scheduling_strategy=strategy,
            max_concurrency=2,
        )
        actor = kind.remote()
        self._ray.get(actor.start.remote(list(arguments), token), timeout=PLACE_SECONDS)
        return RayProcess(self._ray, actor)

    def stop(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if self._group is not None and self._ray.is_initialized():
            remove_placement_group(self._group)
        self._group = None


def _join_cluster(ray: Any) -> None:
    """Join the cluster that Ray finds. Raises ConfigError if there is none, it does not answer, or
    it refuses this machine."""
    errors: list[BaseException] = []

    def join() -> None:
        try:
            ray.init("auto", log_to_driver=True, configure_logging=False)
        except BaseException as error:
            errors.append(error)

    # Ray tries for minutes to reach a cluster that is gone.
    joining = threading.Thread(target=join, name="kvik-ray", daemon=True)
    joining.start()
    joining.join(PLACE_SECONDS)
    if joining.is_alive():
        reason = f"no cluster of ray has answered within {PLACE_SECONDS:.0f} s"
        raise ConfigError(
            OPTION, f"{reason}: start one, or set RAY_ADDRESS to one that can be reached"
        )
    if errors and isinstance(errors[0], ConnectionError):
        reason = "ray finds no cluster, or may not join it: `ray start --head` starts one"
        raise ConfigError(
            OPTION, f"{reason}, RAY_ADDRESS names one, RAY_AUTH_MODE=token shows Ray's token"
        )
    if errors:  # for instance of another version
        why = brief(errors[0]) or type(errors[0]).__name__
        raise ConfigError(OPTION, f"ray cannot join the cluster: {why}")


def _own_host() -> str:
    import ray.util

    return str(ray.util.get_node_ip_address())
